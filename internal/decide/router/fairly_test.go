package router

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
)

// newFairRouter returns a router with a fair queue over workers with passes of 16 tokens.
func newFairRouter(t testing.TB, workers int, change ...func(*Settings)) (*Router, *testkit.StandingClock) {
	t.Helper()
	knobs := testkit.Defaults[Settings]()
	knobs.RouterQueuePolicy, knobs.RouterQueueTimeout, knobs.RouterQueueLimit = queueFair, time.Minute, 10
	for _, f := range change {
		f(&knobs)
	}
	if err := knobs.Validate(); err != nil {
		t.Fatal(err)
	}
	r, clock := newClockedRouter(t, "work", 0, knobs)
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Models: []string{"m"}, MaxBatchedTokens: 16})
	}
	return r, clock
}

// tenant is a request of a tenant with so many prompt tokens and one of the answer.
func tenant(name string, tokens int) Request {
	return Request{Tenant: fair.Tenant{Name: name}, NumTokens: tokens, ExpectedOutput: 1}
}

// park has the requests wait, one after the other.
func park(t testing.TB, r *Router, requests ...Request) (all []*queued) {
	t.Helper()
	before, _ := r.Admission.QueueDepth()
	for i, request := range requests {
		all = append(all, send(t, r, t.Context(), before+i+1, request))
	}
	return all
}

// goes ends a booking and returns which of the waiting requests goes then, and its booking.
func goes(t testing.TB, full *Booking, all []*queued) (which int, next *Booking) {
	t.Helper()
	full.Finish(1)
	which = -1
	testkit.Eventually(t, 5*time.Second, "a request goes", func() bool {
		for i, q := range all {
			if q != nil && !q.waits() {
				which = i
				return true
			}
		}
		return false
	})
	d, err := all[which].get(t)
	if err != nil {
		t.Fatal(err)
	}
	all[which] = nil
	return which, d.Booking
}

// orderOf has the requests wait for the only worker, and returns the order in which they go.
func orderOf(t testing.TB, r *Router, requests ...Request) string {
	t.Helper()
	full := occupy(t, r, 0, 16)
	all := park(t, r, requests...)
	var order []string
	for range requests {
		var which int
		which, full = goes(t, full, all)
		order = append(order, fmt.Sprint(which))
	}
	full.End()
	return strings.Join(order, " ")
}

func TestFairQueueOrders(t *testing.T) {
	class := func(r Request, c fair.Class) Request { r.Class = c; return r }
	for name, test := range map[string]struct {
		requests []Request
		want     string
	}{
		"tenants take turns":                  {[]Request{tenant("a", 20), tenant("a", 20), tenant("a", 20), tenant("b", 20), tenant("b", 20)}, "0 3 1 4 2"},
		"a light tenant goes before a flood":  {[]Request{tenant("a", 90), tenant("a", 90), tenant("a", 90), tenant("b", 20), tenant("b", 20)}, "0 3 4 1 2"},
		"classes go first":                    {[]Request{class(tenant("a", 20), fair.Batch), tenant("a", 20), class(tenant("b", 90), fair.Interactive)}, "2 1 0"},
		"a strict priority among one's own":   {[]Request{tenant("a", 20), {NumTokens: 20, StrictPriority: 1, Tenant: fair.Tenant{Name: "a"}, ExpectedOutput: 1}, tenant("b", 20)}, "1 2 0"},
		"a jump among one's own":              {[]Request{tenant("a", 20), {NumTokens: 20, PriorityJump: 9, Tenant: fair.Tenant{Name: "a"}, ExpectedOutput: 1}, tenant("b", 20)}, "1 2 0"},
		"a weight of 2 is served twice of it": {[]Request{{NumTokens: 20, Tenant: fair.Tenant{Name: "a", Weight: 2}, ExpectedOutput: 1}, {NumTokens: 20, Tenant: fair.Tenant{Name: "a", Weight: 2}, ExpectedOutput: 1}, {NumTokens: 20, Tenant: fair.Tenant{Name: "a", Weight: 2}, ExpectedOutput: 1}, tenant("b", 20), tenant("b", 20)}, "0 3 1 2 4"},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := newFairRouter(t, 1)
			if got := orderOf(t, r, test.requests...); got != test.want {
				t.Errorf("order %s, want %s", got, test.want)
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestBatchKeepsItsShare: of requests of one cost, class batch gets one of four.
func TestBatchKeepsItsShare(t *testing.T) {
	r, _ := newFairRouter(t, 1, func(k *Settings) { k.RouterBatchShare = 0.25 })
	full := occupy(t, r, 0, 16)
	var requests []Request
	for _, class := range []fair.Class{fair.Interactive, fair.Batch} {
		for range 5 {
			request := tenant("a", 20)
			request.Class = class
			requests = append(requests, request)
		}
	}
	all := park(t, r, requests...)
	order := ""
	for range requests {
		var which int
		which, full = goes(t, full, all)
		order += requests[which].Class.String()[:1]
	}
	full.End()
	if want := "ibiiibibbb"; order != want {
		t.Errorf("order %s, want %s", order, want)
	}
}

// TestCachedPromptsCostLittle: a tenant whose prompts are cached is served more requests.
func TestCachedPromptsCostLittle(t *testing.T) {
	r, _ := newFairRouter(t, 1, func(k *Settings) { k.RouterQueueLimit = 100 })
	r.Up(kv.Target{Models: []string{"m"}, MaxBatchedTokens: 1})
	cached := testkit.Tokens(1, 4001)
	Hold(r, 0, cached)
	full := occupy(t, r, 0, 1)
	var requests []Request
	for i := range 9 {
		requests = append(requests, Request{Tenant: fair.Tenant{Name: "cached"}, Tokens: cached, ExpectedOutput: 1})
		if i < 3 {
			requests = append(requests, Request{Tenant: fair.Tenant{Name: "new"}, Tokens: testkit.Tokens(uint32(100+i), 4001), ExpectedOutput: 1})
		}
	}
	all := park(t, r, requests...)
	served := map[string]int{}
	for i := range requests {
		var which int
		if which, full = goes(t, full, all); i < 8 {
			served[requests[which].Tenant.Name]++
		}
	}
	full.End()
	if served["cached"] != 7 || served["new"] != 1 {
		t.Errorf("served %v of the first 8", served)
	}
}

// TestWhatATenantIsChargedFor: costs of a prompt of 100 tokens, 10 of them not cached, with an
// answer of 5.
func TestWhatATenantIsChargedFor(t *testing.T) {
	for c, want := range map[Charging]float64{ByWork: 10*0.5 + 5*2, ByPrompt: 100 * 0.5, ByRequest: requestCost} {
		if got := c.cost(10, 100, 5, price{prompt: 0.5, answer: 2}); got != want {
			t.Errorf("charging %d: %v ms, want %v", c, got, want)
		}
	}
}

// TestTurnsOfRequests: charged by request, tenants take turns, whatever the length of their prompts.
func TestTurnsOfRequests(t *testing.T) {
	for c, want := range map[Charging]string{ByWork: "0 3 4 1 2", ByPrompt: "0 3 4 1 2", ByRequest: "0 3 1 4 2"} {
		r, _ := newFairRouter(t, 1, func(k *Settings) { k.Charging = c })
		if got := orderOf(t, r, tenant("a", 90), tenant("a", 90), tenant("a", 90), tenant("b", 20), tenant("b", 20)); got != want {
			t.Errorf("charging %d: order %s, want %s", c, got, want)
		}
	}
}

func TestRoomIsAPassOfPendingTokens(t *testing.T) {
	r, clock := newFairRouter(t, 1)
	first := MustRoute(t, r, tenant("a", 100)) // longer than a pass, and the worker is idle
	waits := park(t, r, tenant("a", 1))
	first.Booking.FirstToken()
	second, err := waits[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	whole := tenant("a", 15)
	whole.AnsweredWhole = true
	MustRoute(t, r, whole) // 16 are pending
	waits = park(t, r, tenant("a", 1))
	clock.Advance(time.Minute) // the prompt whose first token is not reported has been computed by now
	third, err := waits[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []Decision{first, second, third} {
		d.Booking.End()
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

func TestRoomIsWhatTheEngineRunsAtOnce(t *testing.T) {
	r, clock := newFairRouter(t, 1)
	publish := func(running, waiting int) {
		clock.Advance(time.Second)
		r.Publish(kv.WorkerKey{}, policy.Published{Running: running, Waiting: waiting, At: clock.Now()})
	}
	var running []*Booking
	for range 3 {
		running = append(running, MustRoute(t, r, tenant("a", 1)).Booking)
	}
	for _, b := range running[:2] { // in one pass each
		clock.Advance(time.Second)
		b.FirstToken()
	}
	publish(2, 1)
	if got := r.Load(kv.WorkerKey{}).Fill; got != 0 {
		t.Errorf("one report teaches nothing: %d", got)
	}
	publish(2, 1)
	if got := r.Load(kv.WorkerKey{}).Fill; got != 2 {
		t.Errorf("the engine runs 2 at once, learned %d", got)
	}
	waits := park(t, r, tenant("a", 1))
	running[0].Finish(1) // two are left, which is all that it runs
	publish(2, 0)        // and none waits there: it may run more
	d, err := waits[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Load(kv.WorkerKey{}).Fill; got != 3 {
		t.Errorf("learned %d", got)
	}
	waits = park(t, r, tenant("a", 1))
	running[1].Finish(1)
	last, err := waits[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []*Booking{running[2], d.Booking, last.Booking} {
		b.End()
	}
	whole := tenant("a", 1)
	whole.AnsweredWhole = true
	running = nil
	for range 3 {
		running = append(running, MustRoute(t, r, whole).Booking)
	}
	publish(1, 2)
	publish(2, 1)
	if got := r.Load(kv.WorkerKey{}).Fill; got != 3 {
		t.Errorf("more run than before: learned %d", got)
	}
	publish(2, 1)
	if got := r.Load(kv.WorkerKey{}).Fill; got != 2 {
		t.Errorf("answers come whole, and the engine runs 2 at once: learned %d", got)
	}
	for _, b := range running {
		b.End()
	}
	r.Down(kv.WorkerKey{})
	r.Up(kv.Target{Key: kv.WorkerKey{}, Models: []string{"m"}, MaxBatchedTokens: 16})
	if got := r.Load(kv.WorkerKey{}).Fill; got != 0 {
		t.Errorf("a new incarnation has what the old one has taught: %d", got)
	}
}

// TestWaitsForAPassTeachNothing: a request that has come while the last passes ran waits for the
// next one.
func TestWaitsForAPassTeachNothing(t *testing.T) {
	r, clock := newFairRouter(t, 1)
	for range 2 {
		b := MustRoute(t, r, tenant("a", 1)).Booking
		clock.Advance(time.Second)
		b.FirstToken()
	}
	MustRoute(t, r, tenant("a", 1))
	for range 2 {
		r.Publish(kv.WorkerKey{}, policy.Published{Running: 2, Waiting: 1, At: clock.Now()})
	}
	if got := r.Load(kv.WorkerKey{}).Fill; got != 0 {
		t.Errorf("learned %d", got)
	}
}

func TestSheddableRequestsAreShedEarly(t *testing.T) {
	r, clock := newFairRouter(t, 1)
	within := func(d time.Duration) Request {
		q := tenant("a", 20)
		q.Deadline, q.Sheddable = clock.Now().Add(d), true
		return q
	}
	idle := MustRoute(t, r, within(-time.Hour)).Booking // a worker that is idle sheds nothing
	_, err := r.Route(t.Context(), within(time.Millisecond))
	var shed *ShedError
	if !errors.As(err, &shed) || !errors.Is(err, ErrShed) || shed.RetryAfter != time.Second || shed.Seconds() != 1 {
		t.Errorf("%v, want to be shed", err)
	}
	if _, err = r.Route(t.Context(), within(-time.Hour)); !errors.As(err, &shed) || shed.RetryAfter != mostRetryAfter {
		t.Errorf("%v, want to be shed for long", err)
	}
	urgent := within(time.Millisecond)
	urgent.Sheddable = false
	waits := park(t, r, urgent, within(time.Minute))
	clock.Advance(2 * time.Minute)
	if _, err := waits[1].get(t); !errors.Is(err, ErrShed) { // it has become too late
		t.Errorf("%v", err)
	}
	idle.End()
	d, err := waits[0].get(t) // what cannot be shed is served late
	if err != nil {
		t.Fatal(err)
	}
	d.Booking.End()
}

func TestAFullFairQueueKeepsLightTenants(t *testing.T) {
	r, _ := newFairRouter(t, 1, func(k *Settings) { k.RouterQueueLimit = 2 })
	full := occupy(t, r, 0, 16)
	flood := park(t, r, tenant("a", 20), tenant("a", 20))
	if _, err := r.Route(t.Context(), tenant("a", 20)); !errors.Is(err, ErrQueueFull) {
		t.Errorf("%v", err)
	}
	light := send(t, r, t.Context(), 2, tenant("b", 20))
	if _, err := flood[1].get(t); !errors.Is(err, ErrQueueFull) {
		t.Errorf("%v", err)
	}
	for _, q := range []*queued{flood[0], light} {
		full.End()
		d, err := q.get(t)
		if err != nil {
			t.Fatal(err)
		}
		full = d.Booking
	}
	full.End()
}

func TestTenantsAreListed(t *testing.T) {
	r, _ := newFairRouter(t, 1)
	full := MustRoute(t, r, tenant("a", 20)).Booking
	waits := park(t, r, tenant("b", 20))
	for _, s := range r.Admission.Tenants() {
		if s.Tenant == "a" && (s.Running != 1 || s.Waiting != 0) || s.Tenant == "b" && (s.Running != 0 || s.Waiting != 1 || s.Cost <= 0 || s.Oldest.IsZero()) {
			t.Errorf("%+v", s)
		}
	}
	if got := len(r.Admission.Tenants()); got != 2 {
		t.Errorf("%d tenants", got)
	}
	full.End()
	d, err := waits[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	d.Booking.FailAs(health.Engine, "it broke")
	if got := r.Admission.Tenants(); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	if off := NewTestRouter(t, "kv", 1); off.Admission.Tenants() != nil {
		t.Error("tenants without a fair queue")
	}
}

// TestATenantIsChargedForWhatItGot: predicted first, more for an answer that gets longer, and
// what is true in the end.
func TestATenantIsChargedForWhatItGot(t *testing.T) {
	r, _ := newFairRouter(t, 1)
	full := occupy(t, r, 0, 16)
	waits := park(t, r, tenant("other", 1), tenant("other", 1)) // so that service counts
	b, err := r.Book(Request{Tenant: fair.Tenant{Name: "a"}, NumTokens: 100, ExpectedOutput: 10}, kv.WorkerKey{})
	if err != nil {
		t.Fatal(err)
	}
	want := func(what string, prompt, answer float64) {
		t.Helper()
		if got, want := b.charge.Cost(), prompt*b.price.prompt+answer*b.price.answer; got < want*0.999999 || got > want*1.000001 || b.price.prompt <= 0 || b.price.answer <= 0 {
			t.Errorf("%s: charged %v, want %v", what, got, want)
		}
	}
	want("at first", 100, 10)
	if b.AnswerStep() <= 0 {
		t.Error("answers are not charged as they come")
	}
	b.FirstToken()
	b.Answered(5)
	want("with a short answer so far", 100, 10)
	b.Answered(64)
	want("with a long answer", 100, 64)
	b.Cached(40, kv.TierTokens{})
	b.Finish(70)
	want("in the end", 60, 70)
	full.End()
	for _, q := range waits {
		if d, err := q.get(t); err != nil {
			t.Fatal(err)
		} else {
			d.Booking.End()
		}
	}
}

// TestPrefixesStayWhereTheyAre: of two requests of a tenant, the one whose prefix the worker with
// room holds goes first, also if it came later.
func TestPrefixesStayWhereTheyAre(t *testing.T) {
	r, _ := newFairRouter(t, 2)
	prompts := [2][]uint32{testkit.Tokens(1, 2001), testkit.Tokens(2, 2001)}
	full := [2]*Booking{}
	for w := range full {
		Hold(r, uint64(w), prompts[w])
		full[w] = occupy(t, r, uint64(w), 16)
	}
	request := func(prompt int) Request {
		return Request{Tenant: fair.Tenant{Name: "a"}, Tokens: prompts[prompt], ExpectedOutput: 1}
	}
	waits := park(t, r, request(0), request(0), request(1))
	full[1].Finish(1)
	last, err := waits[2].get(t)
	if err != nil || last.Target.Key.Worker != 1 {
		t.Fatalf("%+v, %v", last.Target, err)
	}
	full[0].Finish(1)
	for _, q := range waits[:2] {
		d, err := q.get(t)
		if err != nil {
			t.Fatal(err)
		}
		d.Booking.Finish(1)
	}
	last.Booking.Finish(1)
}

// TestWaitingRequestsKnowWhatIsStoredMeanwhile: a request waits for a full worker that has computed
// its prefix since it came, and no longer once that has removed it.
func TestWaitingRequestsKnowWhatIsStoredMeanwhile(t *testing.T) {
	r, clock := newFairRouter(t, 2)
	full := [2]*Booking{occupy(t, r, 0, 16), occupy(t, r, 1, 16)}
	prompt := testkit.Tokens(1, 2001)
	long := Request{Tenant: fair.Tenant{Name: "a"}, Tokens: prompt, ExpectedOutput: 1}
	short := tenant("a", 16)
	short.Allowed = []uint64{0}
	waits := park(t, r, long, short)
	Hold(r, 1, prompt)
	full[0].Finish(1)
	first, err := waits[1].get(t)
	if err != nil {
		t.Fatal(err)
	}
	radixtest.Clear(r.Index(), kv.WorkerKey{Worker: 1})
	clock.Advance(time.Second) // it looks again
	first.Booking.Finish(1)
	d, err := waits[0].get(t)
	if err != nil || d.OverlapTokens != 0 {
		t.Fatalf("%d cached tokens, %v", d.OverlapTokens, err)
	}
	d.Booking.Finish(1)
	full[1].Finish(1)
}

// countingIndex counts the lookups.
type countingIndex struct {
	Index
	lookups int
}

func (x *countingIndex) Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match {
	x.lookups++
	return x.Index.Match(local, usable, parts, dst)
}

// TestWaitingRequestsAreLookedUpOnlyWhereTheyAreOffered: a lookup takes time that a full worker
// makes useless.
func TestWaitingRequestsAreLookedUpOnlyWhereTheyAreOffered(t *testing.T) {
	r, _ := newFairRouter(t, 1)
	index := &countingIndex{Index: r.index}
	r.index = index
	full := occupy(t, r, 0, 16)
	var went *Booking
	_, waiting, err := r.RouteOrWait(Request{Tokens: testkit.Tokens(1, 40), ExpectedOutput: 1}, func(d Decision, _ error) { went = d.Booking })
	if err != nil || waiting == nil {
		t.Fatalf("it does not wait: %v", err)
	}
	before := index.lookups
	if waiting.Refresh(); index.lookups != before {
		t.Errorf("%d lookups while the worker is full", index.lookups-before)
	}
	if full.Finish(1); went == nil || index.lookups != before+1 {
		t.Fatalf("it goes after %d lookups: %v", index.lookups-before, went)
	}
	went.Finish(1)
}

// TestAWaitingLegLeavesTheMatchesOfTheOther: the legs of a pair share what was looked up.
func TestAWaitingLegLeavesTheMatchesOfTheOther(t *testing.T) {
	r, _ := newFairRouter(t, 2)
	full := [2]*Booking{occupy(t, r, 0, 16), occupy(t, r, 1, 16)}
	prompt := testkit.Tokens(1, 2001)
	Hold(r, 0, testkit.Tokens(9001, 64))
	Hold(r, 1, prompt)
	p, d := r.lookUp(Request{Tokens: prompt, ExpectedOutput: 1}, &workspace{})
	was := slices.Clone(p.matches)
	leg := p
	var went *Booking
	leg.decided = func(d Decision, _ error) { went = d.Booking }
	if w, err := r.schedule(&leg, &d); w == nil || err != nil {
		t.Fatalf("it does not wait: %v", err)
	}
	Hold(r, 0, prompt)
	full[0].Finish(1)
	if went == nil || !slices.Equal(p.matches, was) {
		t.Errorf("booked: %v; matches %+v, before %+v", went, p.matches, was)
	}
	went.End()
	full[1].Finish(1)
}

// TestObjectivesEndTheWaitForAPrefix: at the last moment at which computing the prompt elsewhere is
// in time, but not where it would be too late anyway.
func TestObjectivesEndTheWaitForAPrefix(t *testing.T) {
	for _, test := range []struct {
		name   string
		within time.Duration // beyond the time that computing takes
		waits  bool
	}{
		{"none", 0, true},
		{"there is time", 10 * time.Second, true},
		{"the last moment", lastMoment / 2, false},
		{"too late elsewhere", -lastMoment / 2, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, clock := newFairRouter(t, 2)
			prompt := testkit.Tokens(1, 2001)
			Hold(r, 1, prompt)
			full := occupy(t, r, 1, 16)
			p, _ := r.lookUp(Request{Tokens: prompt, ExpectedOutput: 1}, &workspace{})
			w := &waiter{prompt: p, since: clock.Now()}
			if test.within != 0 {
				w.prompt.Deadline = clock.Now().Add(r.decider.forecast.Alone(len(prompt)) + test.within)
			}
			if err := r.decider.collect(&w.prompt, clock.Now()); err != nil {
				t.Fatal(err)
			}
			if got := r.Admission.want(w, clock.Now()); got != test.waits || got && !r.Admission.stillWants(w, clock.Now()) {
				t.Errorf("it waits: %t", got)
			}
			full.End()
			if r.Admission.stillWants(w, clock.Now()) {
				t.Error("its worker has room, and it does not look")
			}
		})
	}
}

func TestReachableIsWhatTheBestEligibleWorkerHolds(t *testing.T) {
	r := NewTestRouter(t, "round-robin", 3)
	prompt := testkit.Tokens(1, 42)
	Hold(r, 2, prompt)
	for range 3 {
		d := MustRoute(t, r, Request{Tokens: prompt})
		if d.Reachable != 40 {
			t.Errorf("worker %d: %d of 40 tokens are reachable", d.Target.Key.Worker, d.Reachable)
		}
		d.Booking.End()
	}
	if d := MustRoute(t, r, Request{Tokens: prompt, Allowed: []uint64{0, 1}}); d.Reachable != 0 {
		t.Errorf("%d tokens are reachable on workers that have none", d.Reachable)
	} else {
		d.Booking.End()
	}
}

// TestFairQueueServesEverybody drives a fair queue at random. Nobody waits who has a worker with
// room, nobody is shed while a worker is idle, and the books are even.
func TestFairQueueServesEverybody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		knobs := testkit.Defaults[Settings]()
		knobs.QueueSettings = QueueSettings{RouterQueuePolicy: queueFair, RouterQueueTimeout: time.Minute, RouterQueueLimit: 6}
		clock := new(testkit.StandingClock)
		r := New(knobs, Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, rapid.SampledFrom([]string{"work", "kv"}).Draw(t, "rule")), BlockSize: testkit.BlockSize, Seed: 1, Now: clock.Now})
		up := func(w uint64) { r.Up(kv.Target{Key: kv.WorkerKey{Worker: w}, MaxBatchedTokens: 16}) }
		for w := range uint64(3) {
			up(w)
		}
		prompts := [][]uint32{testkit.Tokens(1, 400), testkit.Tokens(2, 400)}
		Hold(r, 0, prompts[0])
		Hold(r, 1, prompts[1])
		var running []*Booking
		var parked []*waiter
		worker := func(t *rapid.T) kv.WorkerKey { return kv.WorkerKey{Worker: rapid.Uint64Range(0, 2).Draw(t, "worker")} }
		mayShed := func(p *prompt) {
			if !p.Sheddable || r.Admission.anyIdle(p) {
				t.Fatal("a request is shed that may not be")
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"come": func(t *rapid.T) {
				request := Request{
					NumTokens: rapid.SampledFrom([]int{1, 1, 5, 30}).Draw(t, "tokens"), StrictPriority: rapid.Uint32Range(0, 1).Draw(t, "priority"), PriorityJump: rapid.Float64Range(0, 5).Draw(t, "jump"),
					Tenant: fair.Tenant{Name: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "tenant"), Weight: rapid.Float64Range(0, 2).Draw(t, "weight")}, Class: fair.Class(rapid.IntRange(-1, 1).Draw(t, "class")),
					AnsweredWhole: rapid.Bool().Draw(t, "whole"), Sheddable: rapid.Bool().Draw(t, "sheddable"),
				}
				if rapid.Bool().Draw(t, "long") {
					request.Tokens, request.NumTokens = rapid.SampledFrom(prompts).Draw(t, "prompt"), 0
				}
				if rapid.Bool().Draw(t, "choosy") {
					request.Allowed = []uint64{worker(t).Worker}
				}
				if rapid.Bool().Draw(t, "due") {
					request.Deadline = clock.Now().Add(time.Duration(rapid.IntRange(-1, 5).Draw(t, "within")) * time.Second)
				}
				p, d := r.lookUp(request, &workspace{})
				w, err := r.schedule(&p, &d)
				switch {
				case errors.Is(err, ErrShed):
					mayShed(&p)
				case errors.Is(err, ErrQueueFull) && len(parked) == 6, errors.Is(err, ErrNoWorker):
				case err != nil:
					t.Fatal(err)
				case w != nil:
					parked = append(parked, w)
				default:
					running = append(running, d.Booking)
				}
			},
			"leave": func(t *rapid.T) {
				if len(parked) > 0 {
					i := rapid.IntRange(0, len(parked)-1).Draw(t, "which")
					r.Admission.leave(parked[i])
					parked = append(parked[:i], parked[i+1:]...)
				}
			},
			"first token": func(t *rapid.T) {
				if len(running) > 0 {
					rapid.SampledFrom(running).Draw(t, "which").FirstToken()
				}
			},
			"answer": func(t *rapid.T) {
				if len(running) > 0 {
					rapid.SampledFrom(running).Draw(t, "which").Answered(rapid.IntRange(-1, 500).Draw(t, "answered"))
				}
			},
			"end": func(t *rapid.T) {
				if len(running) > 0 {
					i := rapid.IntRange(0, len(running)-1).Draw(t, "which")
					switch rapid.IntRange(0, 2).Draw(t, "how") {
					case 0:
						running[i].End()
					case 1:
						running[i].Finish(rapid.IntRange(0, 500).Draw(t, "output"))
					default:
						running[i].FailAs(health.Engine, "it broke")
						r.Health.Readmit(running[i].Worker().Worker)
					}
					running = append(running[:i], running[i+1:]...)
				}
			},
			"publish": func(t *rapid.T) {
				r.Publish(worker(t), policy.Published{Running: rapid.IntRange(0, 4).Draw(t, "runs"), Waiting: rapid.IntRange(0, 2).Draw(t, "waits"), At: clock.Now()})
			},
			"learn": func(t *rapid.T) { // as if reports had said so
				at, found := r.fleet.target(worker(t))
				if found && (r.fleet.targetLoads[at].Fill == 0 || r.fleet.targetLoads[at].Fill > 1) {
					r.fleet.targetLoads[at].Fill = 1
				}
			},
			"stored":  func(t *rapid.T) { Hold(r, worker(t).Worker, rapid.SampledFrom(prompts).Draw(t, "prompt")) },
			"cleared": func(t *rapid.T) { radixtest.Clear(r.Index(), worker(t)) },
			"down":    func(t *rapid.T) { r.Down(worker(t)) },
			"up":      func(t *rapid.T) { up(worker(t).Worker) },
			"time": func(t *rapid.T) {
				clock.Advance(time.Duration(rapid.IntRange(1, 20).Draw(t, "seconds")) * time.Second)
				for _, w := range parked {
					w.look = time.NewTimer(time.Hour)
					r.Admission.lookForRoom(w)
				}
			},
			"": func(t *rapid.T) {
				still := parked[:0]
				for _, w := range parked {
					select {
					case result := <-w.decided:
						switch {
						case result.err == nil:
							running = append(running, result.decision.Booking)
						case errors.Is(result.err, ErrShed):
							if !w.prompt.Sheddable {
								t.Fatal("a request is shed that may not be")
							}
						case !errors.Is(result.err, ErrNoWorker) && !errors.Is(result.err, ErrQueueFull):
							t.Fatal(result.err)
						}
					default:
						still = append(still, w)
					}
				}
				parked = still
				if n, _ := r.Admission.QueueDepth(); n != len(parked) {
					t.Fatalf("%d wait, want %d", n, len(parked))
				}
				r.mu.Lock()
				for _, w := range parked {
					if r.decider.collect(&w.prompt, clock.Now()) == nil && !r.Admission.mustWait(&w.prompt, clock.Now()) {
						t.Errorf("a request waits although a worker has room")
					}
				}
				r.mu.Unlock()
				if err := r.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

func TestFairQueueSettings(t *testing.T) {
	for want, change := range map[string]func(*Settings){
		"--class-ttft urgent=1s: give interactive":                            func(k *Settings) { k.ClassTTFT = map[string]time.Duration{"urgent": time.Second} },
		"--class-tpot batch=-1s: give interactive":                            func(k *Settings) { k.ClassTPOT = map[string]time.Duration{"batch": -time.Second} },
		"--class-ttft batch=0s: give interactive":                             func(k *Settings) { k.ClassTTFT = map[string]time.Duration{"batch": 0} },
		"--router-batch-share 1.5: give a share from 0 to 1":                  func(k *Settings) { k.RouterBatchShare = 1.5 },
		"--router-batch-share NaN: give a share from 0 to 1":                  func(k *Settings) { k.RouterBatchShare = math.NaN() },
		"--router-batch-share 0.1 needs --router-queue-policy fair":           func(k *Settings) { k.RouterBatchShare, k.RouterQueuePolicy = 0.1, queueFCFS },
		"--router-queue-limit 0: give at least 1, or another":                 func(k *Settings) { k.RouterQueueLimit = 0 },
		"--router-queue-timeout 0s: give more than 0, or another":             func(k *Settings) { k.RouterQueueTimeout = 0 },
		"--router-queue-policy fair counts prompt tokens: remove --no-router": func(k *Settings) { k.RouterTrackPrefillTokens = false },
	} {
		knobs := testkit.Defaults[Settings]()
		knobs.RouterQueuePolicy = queueFair
		if change(&knobs); knobs.Validate() == nil || !strings.HasPrefix(knobs.Validate().Error(), want) {
			t.Errorf("%v, want %s", knobs.Validate(), want)
		}
	}
	knobs := testkit.Defaults[Settings]()
	knobs.ClassTTFT, knobs.ClassTPOT = map[string]time.Duration{"batch": time.Hour}, map[string]time.Duration{"interactive": time.Second}
	if ttft, tpot := knobs.Objectives(); len(ttft) != 1 || ttft[fair.Batch] != time.Hour || len(tpot) != 1 || tpot[fair.Interactive] != time.Second {
		t.Errorf("%v %v", ttft, tpot)
	}
}

// BenchmarkFairQueueDispatches is a request that goes to the worker that holds its prefix and has
// room again, while others wait for other workers, and one that begins to wait.
func BenchmarkFairQueueDispatches(b *testing.B) {
	const workers = 200
	r, _ := newFairRouter(b, workers, func(s *Settings) { s.RouterQueueLimit = workers })
	prompts, full := [workers][]uint32{}, [workers]*Booking{}
	var went *Booking
	var again int
	wait := func(w int) {
		p, d := r.lookUp(Request{Tokens: prompts[w], ExpectedOutput: 1}, &workspace{})
		p.decided = func(d Decision, _ error) { went, again = d.Booking, w }
		if _, err := r.schedule(&p, &d); err != nil {
			b.Fatal(err)
		}
	}
	for w := range prompts {
		prompts[w] = testkit.Tokens(uint32(w)*2001, 2001)
		Hold(r, uint64(w), prompts[w])
		full[w] = occupy(b, r, uint64(w), 16)
	}
	for w := range prompts {
		wait(w)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i = (i + 77) % workers {
		full[i].End()
		full[i] = occupy(b, r, uint64(i), 16)
		went.End()
		wait(again)
	}
}
