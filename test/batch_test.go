package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// TestMockBatchGoesOnAfterAKill sends a file of chats through a router, and kills the
// command in the middle.
func TestMockBatchGoesOnAfterAKill(t *testing.T) {
	t.Parallel()
	const chats = 300
	s := StartMocks(t, 2, "--speedup-ratio=10", "--mock=output-tokens=20")
	program, err := Program()
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	for i := range chats {
		fmt.Fprintf(&lines, `{"custom_id":"chat-%d","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"What is %d?"}]}}`+"\n", i, i)
	}
	file := filepath.Join(t.TempDir(), "chats.jsonl")
	testkit.WriteFile(t, file, lines.String())
	results := func() (done []string) {
		text, err := os.ReadFile(file + ".results.jsonl")
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasSuffix(line, "\n") {
				done = append(done, line)
			}
		}
		return done
	}

	killed := exec.Command(program, "batch", file, "--url="+s.OpenAI+"/v1", "--concurrency=4")
	if err := killed.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 60*time.Second, "some results", func() bool { return len(results()) > chats/10 })
	_ = killed.Process.Kill()
	_ = killed.Wait()
	before := len(results())
	if before == chats {
		t.Fatal("all was done before the kill")
	}
	summary, err := Output(t, "batch", file, "--url="+s.OpenAI)
	if err != nil {
		t.Error(err)
	}
	if want := fmt.Sprintf("%d of %d done, %d of them before this run", chats, chats, before); !strings.Contains(summary, want) {
		t.Errorf("no %q in\n%s", want, summary)
	}
	seen := map[string]bool{}
	for _, line := range results() {
		id := gjson.Get(line, "custom_id").String()
		if seen[id] || gjson.Get(line, "response.status_code").Int() != 200 || gjson.Get(line, "response.body.usage.completion_tokens").Int() != 20 || gjson.Get(line, "response.request_id").String() == "" {
			t.Errorf("%s", line)
		}
		seen[id] = true
	}
	if len(seen) != chats {
		t.Errorf("%d results", len(seen))
	}
}
