package routes

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/fleet/sglang"
	"kvrouter/internal/fleet/vllm"
)

// TestListsOfRoutes compares the lists of routes that the tests of the OpenAI port use with the
// installed engines.
func TestListsOfRoutes(t *testing.T) {
	for _, engine := range []process.Engine{vllm.Engine(), sglang.Engine()} {
		name := engine.Kind.String()
		t.Run(name, func(t *testing.T) {
			python := filepath.Join(settings.CacheDir(os.Getenv), engine.CPUVenv, "bin", "python")
			if _, err := os.Stat(python); err != nil {
				t.Skip("it is not installed: run ", engine.Setup)
			}
			command := exec.CommandContext(t.Context(), python, "testdata/routes/list.py", name)
			command.Stderr = os.Stderr
			got, err := command.Output()
			if err != nil {
				t.Fatal(err)
			}
			file := "testdata/routes/" + name + ".txt"
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != string(want) {
				t.Errorf("the routes have changed: run %s testdata/routes/list.py %s >%s", python, name, file)
			}
		})
	}
}
