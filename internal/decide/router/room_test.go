package router

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// batchEngine is an engine that runs so many requests at once, in passes of 16 prompt tokens.
type batchEngine struct {
	seats            int
	running, waiting []*batchRequest
}

type batchRequest struct {
	booking       *Booking
	prompt, steps int // left
}

// pass computes one pass and reports it to the router.
func (e *batchEngine) pass() {
	budget := 16
	compute := func(r *batchRequest) {
		if r.prompt == 0 {
			r.steps--
			return
		}
		n := min(budget, r.prompt)
		budget -= n
		if r.prompt -= n; r.prompt == 0 {
			r.booking.FirstToken()
		}
	}
	for _, r := range e.running {
		compute(r)
	}
	for budget > 0 && len(e.waiting) > 0 && len(e.running) < e.seats {
		r := e.waiting[0]
		e.waiting, e.running = e.waiting[1:], append(e.running, r)
		compute(r)
	}
	stay := e.running[:0]
	var ended []*batchRequest
	for _, r := range e.running {
		if r.steps <= 0 {
			ended = append(ended, r)
		} else {
			stay = append(stay, r)
		}
	}
	e.running = stay
	for _, r := range ended {
		r.booking.Finish(10)
	}
}

// TestSeatsAreLearnedWhateverThePrompts: requests of any length, more than an engine runs at once.
// Once the router has learned how many that are, hardly any waits in the engine, and hardly any
// seat is free.
func TestSeatsAreLearnedWhateverThePrompts(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		r, clock := newFairRouter(t, 1, func(k *Settings) { k.RouterQueueLimit = 100 })
		e := &batchEngine{seats: rapid.IntRange(1, 8).Draw(rt, "seats")}
		longest := rapid.SampledFrom([]int{1, 16, 100}).Draw(rt, "longest")
		prompt := rapid.IntRange(1, longest)
		var decided []*batchRequest
		demand := func() {
			for waits, _ := r.Admission.QueueDepth(); waits < 5; waits, _ = r.Admission.QueueDepth() {
				b := &batchRequest{prompt: prompt.Draw(rt, "prompt"), steps: 20}
				d, waiting, err := r.RouteOrWait(tenant("a", b.prompt), func(d Decision, err error) {
					b.booking = d.Booking
					decided = append(decided, b)
				})
				if err != nil {
					rt.Fatal(err)
				}
				if waiting == nil {
					b.booking = d.Booking
					decided = append(decided, b)
				}
			}
			e.waiting, decided = append(e.waiting, decided...), nil
		}
		waited, free := 0, 0
		const learn, passes = 1000, 2000 // a second each
		for i := range passes {
			demand()
			clock.Advance(time.Second)
			e.pass()
			r.Publish(kv.WorkerKey{}, policy.Published{Running: len(e.running), Waiting: len(e.waiting), At: clock.Now()})
			if i >= learn {
				waited, free = waited+len(e.waiting), free+e.seats-len(e.running)
			}
		}
		if most := (passes - learn) / 3; waited > most {
			rt.Errorf("with %d seats %d requests wait in the engine on average", e.seats, waited/(passes-learn))
		}
		if longest < 100 && free > (passes-learn)*e.seats/10 {
			rt.Errorf("%d of %d seats are free", free, (passes-learn)*e.seats)
		}
		if err := r.Check(); err != nil {
			rt.Error(err)
		}
	})
}

// TestTriesBeyondABatchBecomeRare: an engine that has left a request waiting gets one more than
// it runs after a second, then after two, and so on; where its cache was full, at once.
func TestTriesBeyondABatchBecomeRare(t *testing.T) {
	now := time.Unix(0, 0)
	l := &workerLoad{Load: new(policy.Load)}
	l.setFill(16, now)
	for _, want := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 32 * time.Second, time.Minute, time.Minute} {
		if got := l.growsFrom.Sub(now); got < want/2 || got > want {
			t.Fatalf("the next try comes after %s, want %s", got, want)
		}
		now = l.growsFrom
		if l.growFill(now); l.Fill != 17 {
			t.Fatalf("%d are tried", l.Fill)
		}
		l.setFill(16, now)
	}
	for range 10 {
		l.growFill(l.growsFrom)
	}
	if l.Fill < 24 || l.probe > leastProbe/8 {
		t.Errorf("after 10 tries that it ran, %d are, and the next comes after %s", l.Fill, l.probe)
	}
	l.KVUsage = 0.9
	if l.setFill(20, now); l.growsFrom != now {
		t.Errorf("its cache was full: it grows after %s", l.growsFrom.Sub(now))
	}
}

// TestEndedAnswersDoNotShrinkABatch: an engine whose answers end beside a request that waits runs as many again with
// its next pass. One whose cache is full does not.
func TestEndedAnswersDoNotShrinkABatch(t *testing.T) {
	r, clock := newFairRouter(t, 1)
	var run []*Booking
	for range 8 {
		b := occupy(t, r, 0, 1)
		b.FirstToken()
		run = append(run, b)
	}
	clock.Advance(time.Second)
	waits := occupy(t, r, 0, 1)
	at, _ := r.fleet.target(kv.WorkerKey{})
	for _, report := range []struct {
		running int
		usage   float64
		fill    int
	}{
		{8, 0.2, 0}, {8, 0.2, 8}, {7, 0.2, 8}, {7, 0.2, 8}, {3, 0.2, 8}, {4, 0.2, 8}, {4, 0.9, 4}, {3, 0.9, 4}, {3, 0.9, 3},
	} {
		clock.Advance(time.Second)
		r.Publish(kv.WorkerKey{}, policy.Published{Running: report.running, Waiting: 1, KVUsage: report.usage, At: clock.Now()})
		if got := r.fleet.targetLoads[at].Fill; got != report.fill {
			t.Fatalf("%d run, usage %v: it is taken to run %d, want %d", report.running, report.usage, got, report.fill)
		}
	}
	for _, b := range append(run, waits) {
		b.End()
	}
}

// TestAnEngineIsTriedWithMoreWhenItsBatchIsFull: by its own report. In flight are answers, too, that it has ended.
func TestAnEngineIsTriedWithMoreWhenItsBatchIsFull(t *testing.T) {
	r, clock := newFairRouter(t, 1)
	at, _ := r.fleet.target(kv.WorkerKey{})
	r.fleet.targetLoads[at].Fill = 2
	var run []*Booking
	for range 3 {
		run = append(run, occupy(t, r, 0, 1))
	}
	for _, report := range []policy.Published{{Running: 1}, {Running: 2, Waiting: 1}, {Running: 1}, {Running: 2}} {
		if got := r.fleet.targetLoads[at].Fill; got != 2 {
			t.Fatalf("before %+v: it is taken to run %d", report, got)
		}
		clock.Advance(time.Second)
		report.At = clock.Now()
		r.Publish(kv.WorkerKey{}, report)
	}
	if got := r.fleet.targetLoads[at].Fill; got != 3 {
		t.Errorf("its batch was full, and it is taken to run %d", got)
	}
	for _, b := range run {
		b.End()
	}
}

// TestAFullEngineIsNotChosen: of two workers, the one that holds the prompt runs as many requests
// as it can, and the receipt says so.
func TestAFullEngineIsNotChosen(t *testing.T) {
	r, clock := newFairRouter(t, 2)
	prompt := testkit.Tokens(1, 4001)
	Hold(r, 0, prompt)
	full := occupy(t, r, 0, 1)
	full.FirstToken()
	request := Request{Tenant: fair.Tenant{Name: "a"}, Tokens: prompt, ExpectedOutput: 1}
	d := MustRoute(t, r, request)
	if d.Target.Key.Worker != 0 {
		t.Errorf("worker %d is chosen", d.Target.Key.Worker)
	}
	d.Booking.End()
	r.Publish(kv.WorkerKey{}, policy.Published{Running: 1, At: clock.Now()})
	at, _ := r.fleet.target(kv.WorkerKey{})
	r.fleet.targetLoads[at].Fill = 1
	request.Explain = true
	if d = MustRoute(t, r, request); d.Target.Key.Worker != 1 {
		t.Error("a full engine is chosen")
	}
	if all := d.Receipts[0].Candidates; len(all) != 2 || all[0].Excluded != excludedFull.String() || all[1].Score == nil {
		t.Errorf("receipt %+v", all)
	}
	d.Booking.End()
	full.End()
}
