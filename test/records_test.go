package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/simulatetest"
	"kvrouter/internal/tools/simulate"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestARecordingOfAFleetReplaysToWhatTheIndexHeld: of --record-events, also in a
// second run of the router.
func TestARecordingOfAFleetReplaysToWhatTheIndexHeld(t *testing.T) {
	t.Parallel()
	held := func(index radix.Index) (all []string) {
		for _, w := range index.Workers() {
			for b := range index.DumpOf(w) {
				line := fmt.Sprint(w.Worker, ".", w.Rank, " ")
				if b.HasParent {
					line += fmt.Sprint(b.Parent)
				}
				all = append(all, fmt.Sprint(line, " ", b.Engine, " ", b.Local))
			}
		}
		slices.Sort(all)
		return all
	}
	for _, args := range [][]string{nil, {"--mock=data-parallel-size=2"}, {"--policy=kv", "--router-predicted-ttl-secs=60", "--mock=delay-events=3ms"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "events.jsonl")
			for range 2 {
				s := StartMocks(t, 2, append(args, "--record-events="+file, "--mock=num-gpu-blocks=60")...) // few, so that blocks are removed
				for i := range 30 {
					if _, err := s.Chat(t.Context(), Say(fmt.Sprint("topic ", i%5, strings.Repeat(" lorem ipsum", 40+9*i))), true, 20); err != nil {
						t.Fatal(err)
					}
				}
				s.Settle()
				want := s.dump()
				page := s.Metrics()
				removed := 0.0
				for series, n := range page {
					if strings.HasPrefix(series, "kvrouter_kv_events_total{") && strings.Contains(series, `kind="removed_blocks"`) {
						removed += n
					}
				}
				lost := sum(page, "kvrouter_record_lines_lost_total")
				s.Stop()
				if len(want) == 0 || removed == 0 || lost > 0 {
					t.Errorf("%d blocks were held, %v removed, %v lines lost", len(want), removed, lost)
				}
				recording, err := os.Open(file)
				if err != nil {
					t.Fatal(err)
				}
				defer recording.Close()
				index := radix.NewTree()
				if _, err := new(events.ReplayCommand).Replay(recording, index); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, held(index)); diff != "" {
					t.Errorf("(-held +replayed):\n%s", diff)
				}
			}
		})
	}
}

// TestARecordingReplaysAsItWent holds the simulator against the workers that the
// recording was made of: what they found cached, it must find.
func TestARecordingReplaysAsItWent(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "recording.jsonl")
	s := StartMocks(t, 3, "--record="+file, "--policy=kv")
	chats := make([][]map[string]string, 5)
	for i := range chats {
		chats[i] = []map[string]string{
			Message("system", strings.Repeat(fmt.Sprint("Rule ", i%2, " of the house. "), 40)), Message("user", fmt.Sprint("I am guest ", i)),
		}
	}
	prompted, cached := 0, 0
	for range 4 {
		for i, chat := range chats {
			a, err := s.Chat(t.Context(), chat, true, 150)
			if err != nil || !a.Finished {
				t.Fatal(err, a)
			}
			s.Settle()
			prompted += a.Prompt
			cached += a.Cached
			chats[i] = append(chat, Message("assistant", a.Text), Message("user", strings.Repeat("go on ", 10+i)))
		}
	}
	s.Stop()

	requests, err := simulate.ReadTrace(file)
	if err != nil {
		t.Fatal(err)
	}
	reuse := map[string]float64{}
	for _, policy := range policies.Names {
		run := simulatetest.New(requests, policy, 0)
		run.Workers, run.Concurrency = 3, 1
		reuse[policy] = simulatetest.MustRun(t, run).Reuse
	}
	if want := float64(cached) / float64(prompted); reuse["kv"] != want {
		t.Errorf("simulated reuse %v, the workers' %v", reuse["kv"], want)
	}
	if reuse["round-robin"] >= reuse["kv"] {
		t.Errorf("reuse by policy %v", reuse)
	}
}

func TestMockedRequestsAreRecorded(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	s := StartMocks(t, 2, "--record="+file)
	chat := Say(strings.Repeat("on the record ", 30))
	for range 2 {
		if _, err := s.Chat(t.Context(), chat, true, 7); err != nil {
			t.Fatal(err)
		}
		s.Settle()
	}
	s.Stop()
	lines := readRecord(t, file)
	if len(lines) != 2 {
		t.Fatalf("%d lines", len(lines))
	}
	a, b := lines[0], lines[1]
	if a.InputLength != 439 || a.OutputLength != 7 || len(a.HashIDs) != 6 || a.HashBlockSize != 64 || a.Route != "/v1/chat/completions" || a.Status != 200 || a.PromptMismatch {
		t.Errorf("%+v", a)
	}
	if !slices.Equal(a.HashIDs, b.HashIDs) || b.PredictedTokens != 384 || b.CachedTokens == nil || *b.CachedTokens != 384 || b.FirstTokenMS == nil || b.Timestamp <= a.Timestamp {
		t.Errorf("%+v", b)
	}
	if text, _ := os.ReadFile(file); strings.Contains(string(text), "on the record") {
		t.Error("the record has text of a prompt")
	}
}

// readRecord reads a file of records.
func readRecord(t *testing.T, file string) (lines []telemetry.RecordLine) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var r telemetry.RecordLine
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, r)
	}
	return lines
}

func TestHintsOfARequestAreRecorded(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "recording.jsonl")
	s := StartMocks(t, 1, "--record="+file)
	s.send(testkit.ChatPath, `{"max_tokens":2,"messages":[{"role":"user","content":"hi"}],
		"nvext":{"agent_hints":{"prefix_id":"bob","total_requests":7,"osl":2000,"iat":50}}}`)
	s.Stop()
	requests, err := simulate.ReadTrace(file)
	if err != nil || len(requests) != 1 {
		t.Fatal(requests, err)
	}
	hinted := requests[0].Hints
	if want := (hints.Prefix{ID: hinted.ID, Total: 7, OSL: hints.LevelHigh, IAT: hints.LevelLow}); hinted != want || hinted.ID == "" || hinted.ID == "bob" {
		t.Errorf("hints %+v", hinted)
	}
}
