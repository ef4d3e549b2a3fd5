package router

import (
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// pullers is a router with workers that pull from each other, of which worker 0 has the
// prompt on its device and in host memory.
func pullers(t *testing.T, rule string, prompt []uint32, workers int) *Router {
	r := NewTestRouter(t, rule, 0)
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: "http://worker", Models: []string{"m"}, Disagg: kv.Disagg{P2P: kv.Bootstrap{Host: "h", Port: 5710 + uint16(i)}}})
	}
	Hold(r, 0, prompt)
	holdLower(r, 0, kv.Host, prompt, 0, len(prompt)/testkit.BlockSize)
	return r
}

// burden gives a worker prompts to compute until the test ends.
func burden(t *testing.T, r *Router, worker uint64, prompts int) {
	t.Helper()
	for i := range prompts {
		b, err := r.Book(Request{Tokens: testkit.Tokens(100_000*(uint32(i)+1), 8192)}, kv.WorkerKey{Worker: worker})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.End)
	}
}

func TestARequestPullsWhatABusyWorkerHas(t *testing.T) {
	const size = testkit.BlockSize
	prompt := testkit.Tokens(1, 100*size)
	r := pullers(t, "work", prompt, 2)
	burden(t, r, 0, 12)
	d := MustRoute(t, r, Request{Tokens: prompt, Pulls: true, Explain: true})
	if d.Target.Key != testkit.W1 || d.Source == nil || d.Source.Key != testkit.W0 || d.Source.PeerAddress().Port != 5710 {
		t.Fatalf("%+v", d)
	}
	if d.Predicted != (kv.TierTokens{}) || d.Guessed.External != 99*size || d.EffectivePrefillTokens != size {
		t.Errorf("predicted %+v, guessed %+v, %d tokens to compute", d.Predicted, d.Guessed, d.EffectivePrefillTokens)
	}
	load := r.Load(testkit.W1)
	if load.PrefillTokens != size || load.Prefills[0].Pulled != 99*size {
		t.Errorf("booked %+v", load.Prefills)
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
	if r.fleet.targetLoads[0].served != 99*size {
		t.Errorf("worker 0 serves %d tokens", r.fleet.targetLoads[0].served)
	}
	d.Booking.FirstToken()
	if r.fleet.targetLoads[0].served != 0 {
		t.Errorf("worker 0 serves %d tokens after the first one came", r.fleet.targetLoads[0].served)
	}
	d.Booking.Cached(99*size, kv.TierTokens{})
	d.Booking.Finish(2)
	if counts := r.Load(testkit.W1).Tiers.PullCounts(); counts.Results[policy.PullCame] != 1 || counts.Tokens != 99*size {
		t.Errorf("%+v", counts)
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

func TestResultsOfPulls(t *testing.T) {
	const size = testkit.BlockSize
	prompt := testkit.Tokens(1, 100*size)
	for _, test := range []struct {
		name   string
		end    func(*Booking)
		result policy.PullResult
		trust  bool // is kept
	}{
		{"none came", func(b *Booking) { b.Cached(0, kv.TierTokens{}); b.Finish(2) }, policy.PullFailed, false},
		{"some came", func(b *Booking) { b.Cached(50*size, kv.TierTokens{}); b.Finish(2) }, policy.PullPart, false},
		{"all came", func(b *Booking) { b.Cached(99*size, kv.TierTokens{}); b.Finish(2) }, policy.PullCame, true},
		{"the answer does not say", func(b *Booking) { b.Finish(2) }, policy.PullUnreported, true},
		{"the client left", (*Booking).End, policy.PullUnreported, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := pullers(t, "work", prompt, 2)
			burden(t, r, 0, 12)
			d := MustRoute(t, r, Request{Tokens: prompt, Pulls: true})
			if d.Source == nil {
				t.Fatal("nothing is pulled")
			}
			d.Booking.FirstToken()
			test.end(d.Booking)
			want := policy.PullCounts{}
			want.Results[test.result] = 1
			got := r.Load(testkit.W1).Tiers.PullCounts()
			if got.Tokens = 0; got != want {
				t.Errorf("%+v", got)
			}
			if trust := r.Load(testkit.W1).Tiers.PullTrust(time.Now()); (trust == 1) != test.trust {
				t.Errorf("trust %v", trust)
			}
		})
	}
}

// TestNobodyPulls where it cannot, or was not to.
func TestNobodyPulls(t *testing.T) {
	const size = testkit.BlockSize
	prompt := testkit.Tokens(1, 100*size)
	for _, test := range []struct {
		name, rule string
		change     func(r *Router, q *Request)
	}{
		{"the caller names no source", "work", func(_ *Router, q *Request) { q.Pulls = false }},
		{"the policy does not price pulls", "least-loaded", func(*Router, *Request) {}},
		{"the source does not serve", "work", func(r *Router, _ *Request) {
			r.Up(kv.Target{Key: testkit.W0, URL: "http://worker", Models: []string{"m"}})
		}},
		{"the worker does not pull", "work", func(r *Router, _ *Request) {
			r.Up(kv.Target{Key: testkit.W1, URL: "http://worker", Models: []string{"m"}})
		}},
		{"the source is gone", "work", func(r *Router, _ *Request) { r.Down(testkit.W0) }},
		{"the source runs SGLang", "work", func(r *Router, _ *Request) {
			r.Up(kv.Target{Key: testkit.W0, URL: "http://worker", Models: []string{"m"}, Engine: kv.EngineSGLang, Disagg: kv.Disagg{P2P: kv.Bootstrap{Host: "h", Port: 1}}})
		}},
		{"the blocks are on the device alone", "work", func(r *Router, q *Request) {
			q.Tokens = testkit.Tokens(500_000, 100*size)
			Hold(r, 0, q.Tokens)
		}},
		{"the host memory may have been emptied", "work", func(r *Router, _ *Request) { radixtest.ClearDevice(r.Index(), testkit.W0) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := pullers(t, test.rule, prompt, 2)
			burden(t, r, 0, 12)
			q := Request{Tokens: prompt, Pulls: true}
			test.change(r, &q)
			d := MustRoute(t, r, q)
			if d.Target.Key != testkit.W1 || d.Source != nil || d.Guessed != (kv.TierTokens{}) || d.EffectivePrefillTokens != len(prompt) {
				t.Errorf("%+v", d)
			}
			d.Booking.End()
			if counts := r.Load(testkit.W1).Tiers.PullCounts(); counts != (policy.PullCounts{}) {
				t.Errorf("%+v", counts)
			}
		})
	}
}

// TestPullsAreSharedOutAmongEqualSources, by what is under way.
func TestPullsAreSharedOutAmongEqualSources(t *testing.T) {
	prompt := testkit.Tokens(1, 100*testkit.BlockSize)
	r := pullers(t, "work", prompt, 4)
	Hold(r, 1, prompt)
	holdLower(r, 1, kv.Host, prompt, 0, 100)
	burden(t, r, 0, 12)
	burden(t, r, 1, 12)
	for busy, free := range map[uint64]uint64{0: 1, 1: 0} {
		r.fleet.targetLoads[busy].served, r.fleet.targetLoads[free].served = 640, 0
		d := MustRoute(t, r, Request{Tokens: prompt, Pulls: true, QueryOnly: true})
		if d.Source == nil || d.Source.Key.Worker != free {
			t.Errorf("worker %d sends already: pulled from %+v", busy, d.Source)
		}
	}
	r.fleet.targetLoads[0].served, r.fleet.targetLoads[1].served = 0, 0
}

// TestWorkersThatDoNotPullCostNothing: the index does not look for what could be pulled.
func TestWorkersThatDoNotPullCostNothing(t *testing.T) {
	prompt := testkit.Tokens(1, 100*testkit.BlockSize)
	r := NewTestRouter(t, "work", 2)
	Hold(r, 0, prompt)
	holdLower(r, 0, kv.Host, prompt, 0, 100)
	d := MustRoute(t, r, Request{Tokens: prompt, Pulls: true, Explain: true})
	if r.parts()&kv.HostedPart != 0 {
		t.Error("lookups count what could be pulled")
	}
	for _, c := range d.Receipts[0].Candidates {
		for _, term := range c.Terms {
			if term.Name == "pull" {
				t.Errorf("%+v", c)
			}
		}
	}
	d.Booking.End()
}
