package vllm

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/fleet/process"
)

func TestPluginFolderHoldsTheEntryPointsOfItsModules(t *testing.T) {
	var files []string
	err := fs.WalkDir(Engine().Plugin, "plugin", func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() {
			files = append(files, strings.TrimPrefix(path, "plugin/"))
		}
		return err
	})
	want := []string{"kvrouter_loopback.py", "kvrouter_nixl.py", "kvrouter_stats.dist-info/METADATA", "kvrouter_stats.dist-info/entry_points.txt", "kvrouter_stats.py", "kvrouter_tiers.py"}
	if err != nil || !slices.Equal(files, want) {
		t.Errorf("files %q, %v; want %q", files, err, want)
	}
}

func TestThreadsOnACPUAreUnboundInEachVersionsWords(t *testing.T) {
	for source, want := range map[string]string{
		`if self.local_omp_cpuid != "all":`:    "all", // 0.9.1 to 0.11.0
		`if self.local_omp_cpuid != "nobind":`: "nobind",
		"":                                     "nobind", // 0.20 has it elsewhere
	} {
		dir := t.TempDir()
		for file, text := range map[string]string{"__init__.py": "raise SystemExit('imported')", "v1/worker/cpu_worker.py": source} {
			path := filepath.Join(dir, "vllm", file)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		t.Setenv("PYTHONPATH", dir)
		cfg := process.Settings{Python: "python3", NumWorkers: 1, Cores: 2}
		examine(&cfg)
		spec, err := command(cfg, 0, "/plugin", nil)
		if err != nil || !slices.Contains(spec.Env, "VLLM_CPU_OMP_THREADS_BIND="+want) {
			t.Errorf("%q: %q, %v; want %s", source, spec.Env, err, want)
		}
	}
}
