package test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// TestAPolicyOfOnesOwn builds the program with the policy of docs/routing.md, as that page says, by Go alone, and uses
// it with the simulated workers that such a program has.
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
	replace, _ := json.Marshal(map[string]any{"Replace": map[string]string{"mine.go": file, "internal/prompt/native/link/linked.go": ""}})
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

	s := startMocker(t, func() (string, error) { return program, nil }, 2, "--policy=mine")
	testkit.Eventually(t, 10*time.Second, "a prompt is found where it was computed", func() bool {
		a, err := s.Chat(t.Context(), LongPrompt(0), true, 4)
		if err != nil || !a.Finished {
			t.Fatalf("%+v, %v", a, err)
		}
		return a.Cached > 0 && a.Predicted == a.Cached
	})
}
