package thompson

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
)

// learnedPolicy has learned something of three workers.
func learnedPolicy(t testing.TB, fixes string) *Policy {
	p := mustPolicy(t, fixes)
	random := rand.New(rand.NewPCG(1, 1))
	var candidates []policy.Candidate
	for i := range 3 {
		candidates = append(candidates, policy.Candidate{Target: &kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1}, Load: &policy.Load{}})
	}
	now := epoch
	for decision := range uint64(100) {
		chosen := candidates[p.Choose(policy.Query{Now: now, Tokens: 400, BlockSize: 16, Decision: decision + 1}, candidates, random)].Target.Key
		unit := time.Duration(chosen.Worker+1) * time.Millisecond
		now = now.Add(unit)
		p.Judge(policy.Feedback{Decision: decision + 1, Worker: chosen, Now: now, Ending: policy.Finished, Latency: 250 * unit, FirstToken: 50 * unit, TokensIn: 400, TokensOut: 21})
	}
	candidates = []policy.Candidate{{Target: &kv.Target{Key: kv.WorkerKey{Worker: 1}, Generation: 1}, Load: &policy.Load{}}, {Target: &kv.Target{Key: kv.WorkerKey{Worker: 7, Rank: 3}, Generation: 4}, Load: &policy.Load{}}}
	for i := range 30 {
		p.Choose(policy.Query{Now: now, Tokens: 999, BlockSize: 16, Decision: 1_000_000 + uint64(i), Prefix: hints.Prefix{ID: fmt.Sprint(i % 5), Total: 4 + i%5}}, candidates, random)
	}
	return p
}

// with runs functions with p, as a router does under its lock.
func (p *Policy) with(f func(policy.Policy)) { f(p) }

// stateOf is what is kept of a policy, in the order of a file.
func stateOf(p *Policy) string {
	state := p.state()
	usual := map[string]float64{}
	for _, u := range state.Baselines {
		key, _ := json.Marshal(savedBaseline{Worker: u.Worker, Rank: u.Rank, Kind: u.Kind, A: u.A, B: u.B})
		usual[string(key)] = u.MS
	}
	state.Baselines = nil
	data, _ := json.Marshal(state)
	baselines, _ := json.Marshal(usual)
	return string(data) + string(baselines)
}

func TestStateSurvivesARestart(t *testing.T) {
	for _, fixes := range []string{"all", "none", "load-sign,feedback"} {
		name := filepath.Join(t.TempDir(), "state.json")
		first := learnedPolicy(t, fixes)
		file := &StateFile{name: name, with: first.with}
		if err := file.write(false); err != nil {
			t.Fatal(err)
		}
		second := mustPolicy(t, fixes)
		reopened, err := OpenState(name, second.with, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := stateOf(second), stateOf(first); got != want {
			t.Errorf("fixes %s:\n%s\nwant\n%s", fixes, got, want)
		}
		second.check(t)
		before, _ := os.Stat(name)
		if err := reopened.write(false); err != nil {
			t.Fatal(err)
		}
		if after, _ := os.Stat(name); !reflect.DeepEqual(before, after) {
			t.Errorf("fixes %s: what had not changed was written", fixes)
		}
		second.Choose(policy.Query{Now: epoch.Add(time.Hour), Tokens: 400, BlockSize: 16, Decision: 1}, []policy.Candidate{{Target: &kv.Target{Key: kv.WorkerKey{Worker: 2}, Generation: 1}, Load: &policy.Load{}}}, rand.New(rand.NewPCG(1, 1)))
		if err := reopened.write(false); err != nil {
			t.Fatal(err)
		}
		if files, _ := os.ReadDir(filepath.Dir(name)); len(files) != 1 {
			t.Errorf("fixes %s: %v is left", fixes, files)
		}
	}
}

func TestStateOfRestartedWorkersKeepsItsPins(t *testing.T) {
	name := filepath.Join(t.TempDir(), "state.json")
	p := newPool(t, "all", 2)
	p.only(1, func() { p.decide(hints.Prefix{ID: "a", Total: 10}) })
	data, _ := json.Marshal(p.policy.state())
	testkit.WriteFile(t, name, string(data))
	again := newPool(t, "all", 2)
	if _, err := OpenState(name, again.policy.with, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	again.candidates[1].Target.Generation = 5 // as the router counts from now on
	again.decide(hints.Prefix{})
	if w := again.worker(1); w.pins != 1 || w.work != p.worker(1).work {
		t.Errorf("%d pins, work %v", w.pins, w.work)
	}
}

func TestBrokenStatesAreRefused(t *testing.T) {
	valid := func(change func(*savedState)) string {
		s := learnedPolicy(t, "all").state()
		change(s)
		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for name, test := range map[string]struct{ content, want string }{
		"empty":             {"", "not a state file"},
		"another program's": {`{"version": 1}`, "not a state file"},
		"cut off":           {valid(func(*savedState) {})[:900], "not a state file"},
		"a later version":   {valid(func(s *savedState) { s.Version = 2 }), "version 2"},
		"other fixes":       {valid(func(s *savedState) { s.Fixes = "none" }), "with fixes none, not all"},
		"another prior":     {valid(func(s *savedState) { s.Lambda = 3 }), "lints.lambda 3"},
		"an unknown field":  {strings.Replace(valid(func(*savedState) {}), `"workers"`, `"wokers"`, 1), "wokers"},
		"no evidence":       {valid(func(s *savedState) { s.Workers[0].Alpha = 0 }), "alpha 0"},
		"a lost row":        {valid(func(s *savedState) { s.Workers[0].A = s.Workers[0].A[:8] }), "8 rows"},
		"a short row":       {valid(func(s *savedState) { s.Workers[0].A[2] = s.Workers[0].A[2][1:] }), "row 2"},
		"no variance":       {valid(func(s *savedState) { s.Workers[0].A[2][0] = -1 }), "row 2"},
		"beyond reason":     {valid(func(s *savedState) { s.Workers[0].B[2] = 1e300 }), "b"},
		"a worker twice":    {valid(func(s *savedState) { s.Workers = append(s.Workers, s.Workers[0]) }), "duplicate"},
		"a series twice":    {valid(func(s *savedState) { s.Series = append(s.Series, s.Series[0]) }), "duplicate"},
		"a baseline":        {valid(func(s *savedState) { s.Baselines[0].MS = -1 }), "baseline of -1"},
		"a nameless series": {valid(func(s *savedState) { s.Series[0].ID = "" }), "series"},
		"a negative reuse":  {valid(func(s *savedState) { s.Series[0].Reuse = -1 }), "series"},
	} {
		file := filepath.Join(t.TempDir(), "state.json")
		testkit.WriteFile(t, file, test.content)
		_, err := OpenState(file, mustPolicy(t, "all").with, slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: error %v, want %q in it", name, err, test.want)
		}
		if kept, _ := os.ReadFile(file); string(kept) != test.content {
			t.Errorf("%s: the file was changed", name)
		}
	}
	if _, err := OpenState(t.TempDir(), mustPolicy(t, "all").with, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a folder is taken for a state")
	}
	if _, err := OpenState("/nonexistent/state.json", mustPolicy(t, "all").with, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "--thompson-state") {
		t.Errorf("a state in a folder that is not there: %v", err)
	}
}

func FuzzState(f *testing.F) {
	learned, _ := json.Marshal(learnedPolicy(f, "all").state())
	f.Add(learned)
	f.Add([]byte(`{"format":"kvrouter thompson state","version":1,"fixes":"all","lambda":1,"workers":[],"baselines":[{"ms":1}],"series":[{"id":"a","worker":3}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		state, err := decodeState(data)
		if err != nil {
			return
		}
		p := newPool(t, "all", 2)
		if p.policy.restore(state) != nil {
			return
		}
		for range 5 {
			_, decision := p.decide(hints.Prefix{})
			p.judge(decision, policy.Finished, time.Second)
		}
	})
}

func BenchmarkState(b *testing.B) {
	p := mustPolicy(b, "all")
	candidates := []policy.Candidate{{Target: &kv.Target{Key: kv.WorkerKey{Worker: 1}}, Load: &policy.Load{}}}
	random := rand.New(rand.NewPCG(1, 1))
	for i := range maxSeries {
		p.Choose(policy.Query{Now: epoch, Tokens: 999, BlockSize: 16, Decision: uint64(i + 1), Prefix: hints.Prefix{ID: fmt.Sprint(i), Total: 4}}, candidates, random)
	}
	for b.Loop() {
		p.state()
	}
}

func TestTraces(t *testing.T) {
	dir := t.TempDir()
	p := newPool(t, "none", 2)
	p.policy.parameters.traces, p.policy.traceDir = true, filepath.Join(dir, "traces")
	lines, err := p.policy.OpenTraces(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	_, d := p.decide(hints.Prefix{ID: "a", Total: 3, OSL: hints.LevelHigh})
	p.policy.Judge(policy.Feedback{Decision: d, Now: p.now, Ending: policy.Finished, Latency: time.Second, TokensOut: 11, Finish: "length"})
	p.decide(hints.Prefix{ID: "b"})
	p.now = p.now.Add(p.policy.timeout)
	p.decide(hints.Prefix{})
	lines.Close()
	data, err := os.ReadFile(filepath.Join(dir, "traces", traceFile))
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for line := range strings.Lines(string(data)) {
		var x map[string]any
		if err := json.Unmarshal([]byte(line), &x); err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, x["kind"].(string))
		switch x["kind"] {
		case "decision":
			workers := x["workers"].(map[string]any)
			one := workers[x["chosen"].(string)].(map[string]any)
			if len(workers) != 2 || one["prefill_cost"] != 1.0 || !(one["prob"].(float64) > 0) {
				t.Errorf("%s", line)
			}
		case "feedback":
			if x["latency_ms"] != 1000.0 || x["per_tok"] != true || x["reward"] != 0.5 || x["success"] != true || x["decision_id"] != "1" || x["finish_reason"] != "length" {
				t.Errorf("%s", line)
			}
		case "timeout":
			if x["prefix_id"] != "b" || x["age"] != 120.0 || x["prefill_bin"] != "HIGH" || x["osl"] != "MEDIUM" {
				t.Errorf("%s", line)
			}
		}
	}
	if got := strings.Join(kinds, " "); got != "decision feedback decision timeout decision" {
		t.Errorf("kinds %s", got)
	}
}

func TestTraceBoundsTheFinishReason(t *testing.T) {
	for want, f := range map[string]policy.Feedback{
		"":                      {Ending: policy.Finished},
		"stop":                  {Ending: policy.Finished, Finish: "stop"},
		"error":                 {Ending: policy.Failed},
		"exception":             {Ending: policy.Failed, Finish: "exception"},
		strings.Repeat("x", 64): {Ending: policy.Finished, Finish: strings.Repeat("x", 1<<20)},
	} {
		if got := traceFinish(f); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestStateThatCannotBeSavedIsToldOnce, counted, and saved once it can be.
func TestStateThatCannotBeSavedIsToldOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "state.json")
	p := mustPolicy(t, "all")
	var log testkit.LogBuffer
	file, err := OpenState(name, p.with, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(dir, dir+".away"); err != nil { // as good as a full disk
		t.Fatal(err)
	}
	before, err := os.ReadFile(filepath.Join(dir+".away", "state.json"))
	if err != nil {
		t.Fatal(err)
	}
	p.changes++
	file.every = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { // ends with ctx
		defer close(done)
		file.Run(ctx)
	}()
	testkit.Eventually(t, 20*time.Second, "writes fail", func() bool { return file.Failures() > 5 })
	after, err := os.ReadFile(filepath.Join(dir+".away", "state.json"))
	if err != nil || string(after) != string(before) {
		t.Errorf("the old file has %d bytes of %d, %v", len(after), len(before), err)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "it is saved", func() bool { return strings.Contains(log.String(), "is saved again") })
	cancel()
	<-done
	if n := strings.Count(log.String(), "failed to save"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
}
