package process

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestFlagsThatAnEngineDoesNotTake(t *testing.T) {
	dir := t.TempDir()
	write := func(path, text string) {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("engine_a/__init__.py", "raise SystemExit('imported')")
	write("engine_a/engine/arg_utils.py", "class EngineArgs:\n    kv_events_config: str = ''\n    other_scale_out: bool = False\n")
	write("engine_a/entrypoints/openai/cli_args.py", `parser.add_argument("--enable-prompt-tokens-details")`)
	write("engine_a/entrypoints/factory.py", "enable_scale_out = 1")
	write("engine_a/arg_groups/fields/observability.py", "load_publish_endpoint: str | None = None")
	write("engine_b/__init__.py", "")
	t.Setenv("PYTHONPATH", dir)
	flags := []string{"kv-events-config", "enable-prompt-tokens-details", "scale-out", "enable-scale-out", "load-publish-endpoint"}
	for module, want := range map[string][]string{"engine_a": {"scale-out", "enable-scale-out"}, "engine_b": nil, "engine_c": nil} {
		if got := Untaken("python3", module, flags); !slices.Equal(got, want) {
			t.Errorf("%s does not take %q, want %q", module, got, want)
		}
	}
	if got := Untaken(filepath.Join(dir, "none"), "engine_a", flags); len(got) != 0 {
		t.Errorf("without a Python: %q", got)
	}
}

func TestUntakenFlagsGoWithTheirValues(t *testing.T) {
	s := Settings{Untaken: []string{"events", "switch"}}
	argv := strings.Fields("python -m engine --port 8000 --events {} more --switch --number -1 --last")
	if got, want := strings.Join(s.Taken(argv), " "), "python -m engine --port 8000 --number -1 --last"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
