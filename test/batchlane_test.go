package test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// TestABatchRunsBesideChats: while the requests of a file fill the worker, a chat waits for
// those that are being computed, not for those that wait in the router. It has no key: the
// header of kvrouter batch lowers the class of its requests.
func TestABatchRunsBesideChats(t *testing.T) {
	t.Parallel()
	const requests, chats, wait, few = 250, 7, 24, 8
	s := StartMocker(t, 1, "--policy=work", "--speedup-ratio=1", "--router-queue-threshold=0", "--router-queue-policy=fair")
	var lines strings.Builder
	for i := range requests {
		fmt.Fprintf(&lines, `{"custom_id":"q-%d","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":%q}],"max_tokens":1}}`+"\n", i, strings.Repeat(fmt.Sprintf("question %d ", i), 8))
	}
	file := filepath.Join(t.TempDir(), "questions.jsonl")
	testkit.WriteFile(t, file, lines.String())
	done := func() int {
		text, err := os.ReadFile(file + ".results.jsonl")
		if err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
		return strings.Count(string(text), "\n")
	}

	program, err := Program()
	if err != nil {
		t.Fatal(err)
	}
	batch := exec.CommandContext(t.Context(), program, "batch", file, "--url="+s.OpenAI)
	var summary strings.Builder
	batch.Stdout, batch.Stderr = &summary, &summary
	if err := batch.Start(); err != nil {
		t.Fatal(err)
	}
	var before []int // requests of the batch that were answered while a chat was under way
	for i := range chats {
		testkit.Eventually(t, time.Minute, "the batch waits in the router", func() bool {
			return gjson.GetBytes(s.Get(s.Port+"/tenants"), `tenants.0.waiting.batch`).Int() >= wait
		})
		began := done()
		if response := s.streamAs(t.Context(), "", i, 1); response == nil || response.StatusCode != http.StatusOK {
			t.Fatalf("chat %d: %+v", i, response)
		}
		before = append(before, done()-began)
	}
	if err := batch.Wait(); err != nil {
		t.Errorf("%v: %s", err, summary.String())
	}
	if want := fmt.Sprintf("%d of %d done", requests, requests); !strings.Contains(summary.String(), want) || done() != requests {
		t.Errorf("no %q, or not as many results, in\n%s", want, summary.String())
	}
	slices.Sort(before)
	if median := before[chats/2]; median > few {
		t.Errorf("of %d that waited, %v of the batch were answered before the chats", wait, before)
	}
	t.Logf("%v of the batch were answered while a chat was under way", before)
}
