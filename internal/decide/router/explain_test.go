package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
)

// last returns the newest receipt, and asks for those of the next minute.
func last(t testing.TB, r *Router) *Receipt {
	t.Helper()
	list, _ := r.Receipts.Last(1)
	if len(list) != 1 {
		t.Fatal("there is no receipt")
	}
	return list[0]
}

// checkReceipt computes a decision again from its receipt, as a reader of its JSON has it.
func checkReceipt(t testing.TB, receipt *Receipt, chosen kv.WorkerKey) {
	t.Helper()
	text, err := json.Marshal(receipt)
	if err != nil {
		t.Fatal(err)
	}
	var read Receipt
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	if read.Worker == nil || *read.Worker != chosen.Worker || read.Rank != chosen.Rank {
		t.Fatalf("%v was chosen, the receipt says %s", chosen, text)
	}
	e, at := read.Explanation, -1
	for _, c := range read.Candidates {
		if c.Score == nil {
			if c.Excluded == "" {
				t.Fatalf("worker %d was not weighed, and nothing says why: %s", c.Worker, text)
			}
			continue
		}
		if (kv.WorkerKey{Worker: c.Worker, Rank: c.Rank}) == chosen {
			at = len(e.Scores)
		}
		score := *c.Score
		score.Excluded = c.Excluded
		e.Scores = append(e.Scores, score)
		sum := 0.0
		for _, term := range c.Terms {
			sum += term.Value
		}
		if math.Abs(sum-c.Total) > 1e-9*(1+math.Abs(c.Total)) {
			t.Fatalf("the terms of worker %d add up to %v: %s", c.Worker, sum, text)
		}
	}
	winners := e.Winners()
	if !slices.Contains(winners, at) || len(winners) > 1 && len(winners) != read.Ties {
		t.Fatalf("the receipt gives %v with %d ties, %d was chosen: %s", winners, read.Ties, at, text)
	}
}

func TestEachDecisionFollowsFromItsReceipt(t *testing.T) {
	for _, rule := range policies.Names {
		t.Run(rule, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 2))
			r, now := newWatchedRouter(t, rule, 6)
			r.Receipts.Last(1)
			for w := range uint64(6) {
				Hold(r, w, testkit.Tokens(1, 40*int(w)))
			}
			var open []*Booking
			for i := range 1000 {
				*now = now.Add(time.Duration(random.IntN(50)) * time.Millisecond)
				request := Request{Tokens: testkit.Tokens(1, 1+random.IntN(300)), Prefix: hints.Prefix{ID: string(rune('a' + random.IntN(8))), Total: 4}}
				if i%7 == 0 {
					request.Exclude = []uint64{uint64(random.IntN(6))}
				}
				r.Publish(kv.WorkerKey{Worker: uint64(random.IntN(6))}, policy.Published{Waiting: random.IntN(4), KVUsage: random.Float64(), At: *now})
				d, err := r.Route(t.Context(), request)
				if err != nil {
					t.Fatal(err)
				}
				receipt := last(t, r)
				if len(d.Receipts) != 1 || d.Receipts[0] != receipt || len(receipt.Candidates) != 6 || receipt.Policy != rule {
					t.Fatalf("receipt %+v", receipt)
				}
				checkReceipt(t, receipt, d.Target.Key)
				d.Booking.FirstToken()
				if open = append(open, d.Booking); len(open) > 20 {
					at := random.IntN(len(open))
					if random.IntN(40) == 0 {
						open[at].FailAs(health.Status, "answered 500")
					}
					open[at].Finish(20)
					open = slices.Delete(open, at, at+1)
				}
			}
		})
	}
}

func TestAReceiptSaysWhyAWorkerWasExcluded(t *testing.T) {
	limit := 10
	for _, test := range []struct {
		name    string
		prepare func(r *Router, now *time.Time)
		request Request
		want    string // of worker 1
	}{
		{"another one is pinned", nil, Request{Pinned: &kv.WorkerKey{}}, excludedPinned.String()},
		{"it serves another model", func(r *Router, _ *time.Time) {
			r.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}, Generation: 1, Models: []string{"other"}})
		}, Request{Model: "m"}, excludedModel.String()},
		{"it computes prompts only", func(r *Router, _ *time.Time) {
			r.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}, Generation: 1, Disagg: kv.Disagg{Role: kv.RolePrefill}})
		}, Request{}, excludedLeg.String()},
		{"it runs no SGLang", func(r *Router, _ *time.Time) {
			r.Up(kv.Target{Generation: 1, Engine: kv.EngineSGLang})
		}, Request{SGLang: true}, excludedEngine.String()},
		{"others are listed", nil, Request{Allowed: []uint64{0}}, excludedUnlisted.String()},
		{"it has failed the request", nil, Request{Exclude: []uint64{1}}, excludedRetry.String()},
		{"it is busy", func(r *Router, _ *time.Time) {
			r.setBusyThresholds(BusyThresholds{ActivePrefillTokensThreshold: &limit})
			overload(t, r, kv.WorkerKey{Worker: 1})
		}, Request{}, excludedBusy.String()},
		{"it is ejected", func(r *Router, _ *time.Time) { eject(t, r, 1) }, Request{}, excludedEjected.String()},
		{"it asked for a pause", func(r *Router, _ *time.Time) {
			MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: 1}}).Booking.Press(time.Second)
		}, Request{}, excludedHeld.String()},
		{"another one is on trial", func(r *Router, now *time.Time) {
			eject(t, r, 0)
			*now = now.Add(6 * time.Second)
		}, Request{}, excludedTrial.String()},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, now := newWatchedRouter(t, "least-loaded", 2)
			if test.prepare != nil {
				test.prepare(r, now)
			}
			r.Receipts.Last(1)
			d := MustRoute(t, r, test.request)
			receipt := last(t, r)
			if d.Target.Key.Worker != 0 || receipt.Candidates[1].Excluded != test.want || receipt.Candidates[0].Excluded != "" || receipt.Margin != nil {
				t.Errorf("worker %d, receipt %+v, want %q", d.Target.Key.Worker, receipt, test.want)
			}
			if trial := test.want == excludedTrial.String(); receipt.Trial != trial {
				t.Errorf("trial: %v", receipt.Trial)
			}
		})
	}
}

// BenchmarkBusyThresholds measures a decision where thresholds are set and half of the
// workers are busy, with a receipt and without.
func BenchmarkBusyThresholds(b *testing.B) {
	for _, workers := range []int{100, 1000} {
		for _, explained := range []bool{false, true} {
			b.Run(fmt.Sprintf("workers=%d/explained=%v", workers, explained), func(b *testing.B) {
				r, _ := newWatchedRouter(b, "least-loaded", workers)
				limit := 10
				for w := range uint64(workers / 2) {
					overload(b, r, kv.WorkerKey{Worker: w})
				}
				r.setBusyThresholds(BusyThresholds{ActivePrefillTokensThreshold: &limit})
				if explained {
					r.Receipts.Last(1)
				}
				for b.Loop() {
					MustRoute(b, r, Request{}).Booking.Finish(1)
				}
			})
		}
	}
}

func TestARefusalHasAReceipt(t *testing.T) {
	r := newBusyRouter(t, 2)
	overload(t, r, kv.WorkerKey{Worker: 0})
	r.Receipts.Last(1)
	d, err := r.Route(t.Context(), Request{NumTokens: 8, Allowed: []uint64{0}})
	if !errors.Is(err, ErrBusy) {
		t.Fatalf("error %v, want ErrBusy", err)
	}
	receipt := last(t, r)
	if len(d.Receipts) != 1 || receipt.Worker != nil || receipt.Error != ErrBusy.Error() || receipt.Candidates[0].Excluded != excludedBusy.String() || receipt.Candidates[1].Excluded != excludedUnlisted.String() {
		t.Errorf("receipt %+v", receipt)
	}
}

func TestReceiptsAreMadeWhileSomebodyAsks(t *testing.T) {
	r, now := newWatchedRouter(t, "kv", 2)
	var level slog.LevelVar
	r.log = slog.New(slog.NewTextHandler(&bytes.Buffer{}, &slog.HandlerOptions{Level: &level}))
	made := func() bool {
		d := MustRoute(t, r, Request{NumTokens: 10})
		d.Booking.End()
		return len(d.Receipts) == 1
	}
	if made() {
		t.Error("a receipt that nobody asked for")
	}
	if list, explained := r.Receipts.Last(9); explained || len(list) != 0 {
		t.Errorf("before anybody asked: %v, %v", list, explained)
	}
	if !made() {
		t.Error("no receipt though somebody has just asked")
	}
	*now = now.Add(receiptsWanted)
	if made() {
		t.Error("a receipt a minute after somebody asked")
	}
	level.Set(slog.LevelDebug)
	if !made() {
		t.Error("no receipt at the level debug")
	}
	level.Set(slog.LevelInfo)
	r.settings.RecordDecisions = true
	if !made() {
		t.Error("no receipt with --record-decisions")
	}
	if list, explained := r.Receipts.Last(9); !explained || len(list) != 3 || list[0].At.Before(list[2].At) {
		t.Errorf("%d receipts, explained %v; want 3, the newest first", len(list), explained)
	}
}

func TestWithoutAReaderNothingIsAllocatedForReceipts(t *testing.T) {
	if testkit.RaceDetector {
		t.Skip("pools forget at random under the race detector")
	}
	for _, rule := range []string{"standalone", "kv", "work", "thompson", "variance", "round-robin"} {
		r := NewTestRouter(t, rule, 8)
		route := func() { MustRoute(t, r, Request{NumTokens: 100}).Booking.End() }
		without := testing.AllocsPerRun(200, route)
		quiet := slog.LevelInfo
		if rule == "thompson" {
			quiet = slog.LevelWarn
		}
		r.log = slog.New(slog.NewTextHandler(&bytes.Buffer{}, &slog.HandlerOptions{Level: quiet}))
		if with := testing.AllocsPerRun(200, route); with != without {
			t.Errorf("%s: %v allocations a decision with a log that has no decisions, %v without one", rule, with, without)
		}
		r.Receipts.Last(1)
		if asked := testing.AllocsPerRun(200, route); asked < without+5 {
			t.Errorf("%s: %v allocations with a reader, as without one: this test sees nothing", rule, asked)
		}
	}
}

func TestReceiptsAreBounded(t *testing.T) {
	var kept Receipts
	for range MaxReceipts + 5 {
		kept.keep(&Receipt{Candidates: make([]ReceiptCandidate, 1)})
	}
	if len(kept.kept) != MaxReceipts || kept.candidates != MaxReceipts {
		t.Errorf("%d receipts of %d candidates", len(kept.kept), kept.candidates)
	}
	for range 20 {
		kept.keep(&Receipt{Candidates: make([]ReceiptCandidate, 10_000)})
	}
	if len(kept.kept) != 3 || kept.candidates != 30_000 {
		t.Errorf("%d large receipts of %d candidates", len(kept.kept), kept.candidates)
	}
	r := NewTestRouter(t, "random", 1)
	r.Receipts.Last(1)
	MustRoute(t, r, Request{ID: strings.Repeat("é", 1000) + "x"})
	if id := last(t, r).RequestID; id != strings.Repeat("é", maxReceiptText/2) {
		t.Errorf("a text of %d bytes in a receipt", len(id))
	}
}

func TestDecisionsAreLoggedAtDebug(t *testing.T) {
	for _, test := range []struct {
		rule string
		want []string
	}{
		{"kv", []string{`"msg":"decision","receipt":{"at":`, `"terms":[{"name":"prefill"`}},
		{"thompson", []string{`"msg":"Processing request","prefix":"p","total":3,"osl":"HIGH","iat":"MEDIUM","tokens":10}`, `"msg":"Routing decision","worker":0,"decision":1,"reuse_budget":2}`, `"msg":"decision","receipt":{"at":`}},
	} {
		r := NewTestRouter(t, test.rule, 1)
		var out bytes.Buffer
		r.log = slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
		MustRoute(t, r, Request{NumTokens: 10, Prefix: hints.Prefix{ID: "p", Total: 3, OSL: hints.LevelHigh}})
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != max(1, len(test.want)/3*3) {
			t.Errorf("%s: %d lines", test.rule, len(lines))
		}
		for _, want := range test.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: the log has no %s:\n%s", test.rule, want, out.String())
			}
		}
	}
}

// TestThompsonLogsDecisionsAsInformation: a request without hints is called as the Toolkit calls it.
func TestThompsonLogsDecisionsAsInformation(t *testing.T) {
	r := NewTestRouter(t, "thompson", 1)
	var out bytes.Buffer
	r.log = slog.New(slog.NewJSONHandler(&out, nil))
	MustRoute(t, r, Request{ID: "r1", NumTokens: 10})
	if text := out.String(); !strings.Contains(text, `"level":"INFO","msg":"Processing request","prefix":"auto-r1","total":1,`) ||
		!strings.Contains(text, `"level":"INFO","msg":"Routing decision","worker":0,`) || strings.Contains(text, "receipt") {
		t.Error(text)
	}
}

func TestReceiptsNameWorkersThatHaveNames(t *testing.T) {
	r := NewTestRouter(t, "random", 2)
	last := func() string {
		t.Helper()
		r.Receipts.Last(0)
		if _, err := r.Route(t.Context(), Request{Tokens: testkit.Tokens(1, 8), Pinned: &kv.WorkerKey{Worker: 1}, ChooseOnly: true}); err != nil {
			t.Fatal(err)
		}
		list, _ := r.Receipts.Last(1)
		text, err := json.Marshal(list[0])
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if text := last(); strings.Contains(text, "worker_name") {
		t.Error(text)
	}
	r.names.Set([]kv.Worker{{ID: 1, Name: "pod-a"}})
	if text := last(); strings.Count(text, `"worker_id":1,"worker_name":"pod-a"`) != 2 || strings.Count(text, "worker_name") != 2 {
		t.Error(text)
	}
}
