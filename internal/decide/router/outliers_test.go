package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// newWatchedRouter returns a router over workers that are up and a clock that the
// test moves.
func newWatchedRouter(t testing.TB, rule string, workers int) (r *Router, now *time.Time) {
	t.Helper()
	at := time.Unix(1_000_000, 0)
	r = NewTestRouter(t, rule, 0)
	r.now = func() time.Time { return at }
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1, Models: []string{"m"}})
	}
	return r, &at
}

// eject has a worker fail until it is out.
func eject(t testing.TB, r *Router, worker uint64) {
	t.Helper()
	for range 3 {
		d := MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: worker}})
		d.Booking.FailAs(health.Status, "answered 500")
	}
	if !r.Health.outliers.Ejected(kv.WorkerKey{Worker: worker}, r.now()) {
		t.Fatalf("worker %d is in after three failures", worker)
	}
}

// chosen counts where n requests go that are answered at once.
func chosen(t testing.TB, r *Router, n int, request Request) map[uint64]int {
	t.Helper()
	counts := map[uint64]int{}
	for range n {
		d := MustRoute(t, r, request)
		counts[d.Target.Key.Worker]++
		d.Booking.End()
	}
	return counts
}

func TestAnEjectedWorkerGetsNothing(t *testing.T) {
	for _, rule := range policies.Names {
		t.Run(rule, func(t *testing.T) {
			r, _ := newWatchedRouter(t, rule, 4)
			eject(t, r, 1)
			if got := chosen(t, r, 40, Request{Tokens: testkit.Tokens(1, 20)}); got[1] != 0 {
				t.Errorf("it got %d of 40 requests", got[1])
			}
			d := MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: 1}})
			if d.Booking.End(); d.Target.Key.Worker != 1 {
				t.Errorf("a request that names it went to worker %d", d.Target.Key.Worker)
			}
			if idlest, _ := r.Health.Idlest(kv.EngineVLLM); idlest.Key.Worker == 1 {
				t.Error("it is asked for tokens")
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAtMostHalfOfThemAreOut(t *testing.T) {
	r, now := newWatchedRouter(t, "round-robin", 4)
	fail := func(worker uint64, n int) {
		for range n {
			MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: worker}}).Booking.FailAs(health.Status, "answered 500")
		}
	}
	succeed := func(worker uint64) {
		MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: worker}}).Booking.Finish(1)
	}
	eject(t, r, 0)
	eject(t, r, 1)
	if got := chosen(t, r, 40, Request{}); got[0]+got[1] != 0 {
		t.Errorf("two of four are out, and got %v", got)
	}
	if _, panicking := r.Health.Records(); panicking {
		t.Error("two of four out is said to be too many")
	}
	fail(2, 3)
	if r.Health.outliers.Ejected(kv.WorkerKey{Worker: 2}, *now) {
		t.Error("three of four are out")
	}
	if _, panicking := r.Health.Records(); !panicking {
		t.Error("that three of four fail is not said to be too many")
	}
	if got := chosen(t, r, 40, Request{}); got[3] != 40 {
		t.Errorf("three of four fail: the fourth is to be used, not %v", got)
	}
	d := MustRoute(t, r, Request{Explain: true})
	d.Booking.End()
	if list := d.Receipts[0].Candidates; list[0].Excluded != excludedEjected.String() || list[2].Excluded != excludedFailing.String() || list[3].Excluded != "" {
		t.Errorf("excluded for %+v", list)
	}
	fail(3, 3) // the request is at fault, or the network
	if got := chosen(t, r, 40, Request{}); got[0] != 10 || got[1] != 10 || got[2] != 10 || got[3] != 10 {
		t.Errorf("all fail alike: all are to be used, not %v", got)
	}
	*now = now.Add(time.Second)
	for range 6 {
		succeed(2)
		fail(2, 1)
	}
	fail(2, 3)
	if got := chosen(t, r, 40, Request{}); got[2] != 40 {
		t.Errorf("one answers now and then: it is to be used, not %v", got)
	}
	if got := chosen(t, r, 40, Request{Allowed: []uint64{0, 2, 3}, Exclude: []uint64{3}}); got[2] != 40 {
		t.Errorf("of three all fail, one less, one has failed this request: %v", got)
	}
	alone, _ := newWatchedRouter(t, "work", 1)
	for range 5 {
		MustRoute(t, alone, Request{}).Booking.Report(policy.Feedback{Ending: policy.Failed})
	}
	if got := chosen(t, alone, 5, Request{}); got[0] != 5 {
		t.Errorf("the only worker got %v", got)
	}
}

func TestASessionDoesNotStayWithAWorkerThatIsSpared(t *testing.T) {
	r, _ := newWatchedRouter(t, "round-robin", 4)
	session := Request{Session: 7}
	home := MustRoute(t, r, session)
	home.Booking.Finish(1)
	eject(t, r, (home.Target.Key.Worker+1)%4)
	eject(t, r, (home.Target.Key.Worker+2)%4)
	for range 3 {
		MustRoute(t, r, Request{Pinned: &home.Target.Key}).Booking.Report(policy.Feedback{Ending: policy.Failed})
	}
	if got := chosen(t, r, 5, session); got[(home.Target.Key.Worker+3)%4] != 5 {
		t.Errorf("worker %d fails and keeps its session: %v", home.Target.Key.Worker, got)
	}
}

func TestOneRequestIsOnTrial(t *testing.T) {
	r, now := newWatchedRouter(t, "random", 4)
	eject(t, r, 2)
	*now = now.Add(5 * time.Second)
	if d, err := r.Route(t.Context(), Request{QueryOnly: true}); err != nil || d.Target.Key.Worker == 2 {
		t.Errorf("a dry run is a trial: %v, %v", d.Target, err)
	}
	if got := chosen(t, r, 10, Request{Exclude: []uint64{0}}); got[2] != 0 {
		t.Errorf("a repeated request is a trial: %v", got)
	}
	if d := MustRoute(t, r, Request{ID: "a"}); d.Target.Key.Worker == 2 {
		t.Error("a reservation is a trial, though its client cannot repeat it")
	} else {
		d.Booking.End()
	}
	trial := MustRoute(t, r, Request{})
	if trial.Target.Key.Worker != 2 {
		t.Fatalf("the first request goes to worker %d, not on trial", trial.Target.Key.Worker)
	}
	if got := chosen(t, r, 10, Request{}); got[2] != 0 {
		t.Errorf("beside the trial it got %d", got[2])
	}
	if out := trial.Booking.FailAs(health.Status, "answered 500"); !out {
		t.Error("it is in after a trial that failed")
	}
	*now = now.Add(10 * time.Second)
	MustRoute(t, r, Request{}).Booking.Finish(1)
	*now = now.Add(10 * time.Second)
	if got := chosen(t, r, 400, Request{}); got[2] < 70 {
		t.Errorf("it is back and got %d of 400", got[2])
	}
	if !r.Health.outliers.Quiet() {
		t.Error("something is still remembered as odd")
	}
}

// TestAReservationIsOnTrialWhereNothingElseComes is about routers whose clients
// forward their requests themselves.
func TestAReservationIsOnTrialWhereNothingElseComes(t *testing.T) {
	r, now := newWatchedRouter(t, "random", 4)
	eject(t, r, 2)
	*now = now.Add(5*time.Second + trialOverdue)
	d := MustRoute(t, r, Request{ID: "a"})
	if d.Target.Key.Worker != 2 {
		t.Errorf("it went to worker %d", d.Target.Key.Worker)
	}
	d.Booking.Report(policy.Feedback{Ending: policy.Finished})
	if r.Health.outliers.Ejected(kv.WorkerKey{Worker: 2}, *now) {
		t.Error("it is out although the client reports an answer")
	}
	for range 3 {
		d := MustRoute(t, r, Request{ID: "a", Pinned: &kv.WorkerKey{Worker: 3}})
		d.Booking.Report(policy.Feedback{Ending: policy.Failed})
	}
	if !r.Health.outliers.Ejected(kv.WorkerKey{Worker: 3}, *now) {
		t.Error("what clients report does not count")
	}
}

func TestBackPressure(t *testing.T) {
	r, now := newWatchedRouter(t, "round-robin", 3)
	press := func(worker uint64, pause time.Duration) {
		MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: worker}}).Booking.Press(pause)
	}
	press(0, 5*time.Second)
	if got := chosen(t, r, 20, Request{}); got[0] != 0 {
		t.Errorf("a worker that asked for a pause got %d", got[0])
	}
	press(1, 5*time.Second)
	press(2, 5*time.Second)
	if got := chosen(t, r, 30, Request{}); got[0] != 10 || got[1] != 10 || got[2] != 10 {
		t.Errorf("all have asked for a pause: all are to be used, not %v", got)
	}
	if _, err := r.Route(t.Context(), Request{Exclude: []uint64{0}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("a request that one refused is sent to another in its pause: %v", err)
	}
	*now = now.Add(5 * time.Second)
	if got := chosen(t, r, 30, Request{}); got[0] != 10 || !r.Health.outliers.Quiet() {
		t.Errorf("after the pause: %v", got)
	}
	records, _ := r.Health.Records()
	for _, record := range records {
		if len(record.Ejections) > 0 || record.Row > 0 {
			t.Errorf("a pause counts as a failure: %+v", record)
		}
	}
}

func TestQuestionsGoToAWorkerThatAnswers(t *testing.T) {
	r, now := newWatchedRouter(t, "work", 2)
	first, _ := r.Health.Idlest(kv.EngineVLLM)
	asked := *now
	*now = now.Add(2 * time.Second)
	r.Health.AskFailed(t.Context(), first, asked)
	second, _ := r.Health.Idlest(kv.EngineVLLM)
	if second.Key == first.Key {
		t.Error("the worker that did not answer is asked again")
	}
	if got := chosen(t, r, 20, Request{}); got[first.Key.Worker] != 0 {
		t.Errorf("it got %d requests", got[first.Key.Worker])
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	for range 5 {
		r.Health.AskFailed(gone, second, *now)
	}
	if got := chosen(t, r, 20, Request{}); got[second.Key.Worker] != 20 {
		t.Errorf("a client that left counts against the worker: %v", got)
	}
}

// TestRequestsGoRoundASilentWorker: it is not ejected, and what runs there continues.
func TestRequestsGoRoundASilentWorker(t *testing.T) {
	r, now := newWatchedRouter(t, "round-robin", 2)
	for range 5 {
		d := MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: 1}})
		*now = now.Add(100 * time.Millisecond)
		d.Booking.FirstToken()
		d.Booking.Finish(1)
	}
	d := MustRoute(t, r, Request{Pinned: &kv.WorkerKey{}})
	last := *now
	look := func(after time.Duration) health.Verdict {
		*now = last.Add(after)
		all := []InFlight{{Booking: d.Booking, Since: last}}
		Look(all, last)
		return all[0].Verdict
	}
	if v := look(2900 * time.Millisecond); v != health.Wait {
		t.Fatalf("after 2.9 s: verdict %d", v)
	}
	if v := look(3 * time.Second); v != health.Hedge {
		t.Fatalf("after 3 s: verdict %d", v)
	}
	if got := chosen(t, r, 20, Request{}); got[0] > 0 {
		t.Errorf("it gets requests: %v", got)
	}
	if records, _ := r.Health.Records(); records[0].State != health.StateSilent || len(records[0].Ejections) > 0 || d.Booking.Ended() {
		t.Errorf("%+v", records[0])
	}
	if _, err := r.Route(t.Context(), Request{Exclude: []uint64{1}, Beside: true}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("an attempt beside the first goes to a worker in doubt: %v", err)
	}
	MustRoute(t, r, Request{Exclude: []uint64{1}}).Booking.End()
	r.Health.Lives(0, 1)
	if got := chosen(t, r, 20, Request{}); got[0] == 0 {
		t.Errorf("after a sign of life: %v", got)
	}
	d.Booking.End()
}

// TestAFailingWorkerLosesLittleAndIsBackInTime plays 40 s in which a worker fails
// at once and 60 s in which it is well again, under every policy.
func TestAFailingWorkerLosesLittleAndIsBackInTime(t *testing.T) {
	const every, fails, ends = 25 * time.Millisecond, 40 * time.Second, 100 * time.Second
	for _, rule := range policies.Names {
		for _, bad := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s, %d of 4", rule, bad), func(t *testing.T) {
				r, now := newWatchedRouter(t, rule, 4)
				began := *now
				var flying []*Booking // the oldest first; each takes 300 ms, to its first token 25
				sent, first, lost := 0, 0, 0
				var back time.Duration // when its share was whole again
				share, shareOf := 0, 0
				for at := time.Duration(0); at < ends; at += every {
					*now = began.Add(at)
					if last := len(flying) - 1; last >= 0 {
						flying[last].FirstToken()
					}
					for len(flying) >= int(300*time.Millisecond/every) {
						flying[0].Finish(10)
						flying = flying[1:]
					}
					sent++
					var exclude []uint64
					for tries := 0; ; tries++ {
						d := MustRoute(t, r, Request{Tokens: testkit.Tokens(uint32(sent), 8), Exclude: exclude})
						worker := d.Target.Key.Worker
						if at >= fails || int(worker) >= bad {
							flying = append(flying, d.Booking)
							if at >= fails {
								shareOf++
								if int(worker) < bad {
									share++
								}
							}
							break
						}
						if tries == 0 {
							first++
						}
						d.Booking.FailAs(health.Status, "answered 500")
						if exclude = append(exclude, worker); tries == 2 {
							lost++
							break
						}
					}
					if shareOf == 80 { // 2 s
						if back == 0 && float64(share)/80 >= 0.6*float64(bad)/4 {
							back = at - fails
						}
						share, shareOf = 0, 0
					}
				}
				for _, b := range flying {
					b.End()
				}
				if limit := int(fails / every / 20); first > limit || lost > 0 {
					t.Errorf("of %d requests %d went there first and %d were lost; at most %d and 0", int(fails/every), first, lost, limit)
				}
				if back == 0 || back > 30*time.Second {
					t.Errorf("it has its share again %s after it was well", back)
				}
				if err := r.Check(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestAPromptStaysWholeWhileAllPrefillWorkersAreOut(t *testing.T) {
	r := pairRouter(t, "round-robin", testkit.NixlPrefill, testkit.NixlDecode, testkit.NixlDecode)
	prompt := Request{Tokens: testkit.Tokens(1, 20)}
	for range 3 {
		pair, err := r.RoutePair(t.Context(), prompt, PairRule{})
		if err != nil || pair.Whole != "" {
			t.Fatalf("%q, %v", pair.Whole, err)
		}
		pair.Prefill.Booking.FailAs(health.Refused, "refused")
		pair.End()
	}
	pair, err := r.RoutePair(t.Context(), prompt, PairRule{})
	if err != nil || pair.Whole != WholeNoPair {
		t.Errorf("whole %q, %v", pair.Whole, err)
	}
	pair.End()
	pair, err = r.RoutePair(t.Context(), prompt, PairRule{Enforce: true})
	if err != nil || pair.Whole != "" {
		t.Errorf("enforced: whole %q, %v", pair.Whole, err)
	}
	pair.End()
}

func TestTheRouterLogsWhoIsOut(t *testing.T) {
	r, now := newWatchedRouter(t, "work", 2)
	var out bytes.Buffer
	r.log = slog.New(slog.NewTextHandler(&out, nil))
	eject(t, r, 1)
	*now = now.Add(5 * time.Second)
	MustRoute(t, r, Request{}).Booking.Finish(1)
	for _, want := range []string{"worker 1: ejected for 5s", "worker 1: returned to service"} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("the log lacks %q, or has it twice:\n%s", want, &out)
		}
	}
}
