package test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// TestAPolicyOfOnesOwn builds the program with the policy of docs/routing.md, as that page says,
// and uses it.
func TestAPolicyOfOnesOwn(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program")
	}
	t.Parallel()
	page, err := os.ReadFile("docs/routing.md")
	if err != nil {
		t.Fatal(err)
	}
	code := regexp.MustCompile("(?s)```go\n(.*?)```").FindSubmatch(page)
	if code == nil {
		t.Fatal("docs/routing.md has no Go file")
	}
	folder := t.TempDir()
	file, overlay, program := filepath.Join(folder, "mine.go"), filepath.Join(folder, "overlay.json"), filepath.Join(folder, "kvrouter")
	replace, _ := json.Marshal(map[string]any{"Replace": map[string]string{"mine.go": file}})
	for name, content := range map[string][]byte{file: code[1], overlay: replace} {
		if err := os.WriteFile(name, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlay, "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	out, err := exec.CommandContext(t.Context(), program, "simulate", "--json", "--policy=mine,round-robin", "--synthetic=chat",
		"--synthetic-conversations=40", "--concurrency=8",
		"--workers=2").Output()
	if err != nil {
		t.Fatal(err)
	}
	mine, turns := gjson.GetBytes(out, `..#(policy=="mine").reuse`).Float(), gjson.GetBytes(out, `..#(policy=="round-robin").reuse`).Float()
	if mine <= turns {
		t.Errorf("mine finds %v of the prompts cached, round-robin %v", mine, turns)
	}

	s := StartOverAt(t, func() (string, error) { return program, nil }, testkit.FreePorts(t, 2), StartWorkers(t, 2), "--policy=mine")
	for i := range 2 {
		if a, err := s.Chat(t.Context(), LongPrompt(0), true, 4); err != nil || !a.Finished || a.Predicted != a.Cached || (a.Cached > 0) != (i > 0) {
			t.Errorf("chat %d: %+v, %v", i, a, err)
		}
		s.Settle()
	}
}
