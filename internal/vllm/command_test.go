package vllm

import (
	"io/fs"
	"os"
	"slices"
	"testing"
)

func TestPluginFolderHoldsTheEntryPointsOfItsModules(t *testing.T) {
	dir, err := writePlugin()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder %v, %v: not private", info, err)
	}
	var files []string
	err = fs.WalkDir(os.DirFS(dir), ".", func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() {
			files = append(files, path)
		}
		return err
	})
	want := []string{"kvrouter_loopback.py", "kvrouter_nixl.py", "kvrouter_stats.dist-info/METADATA", "kvrouter_stats.dist-info/entry_points.txt", "kvrouter_stats.py"}
	if err != nil || !slices.Equal(files, want) {
		t.Errorf("files %q, %v; want %q", files, err, want)
	}
}
