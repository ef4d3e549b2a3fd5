package policy

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
)

// pullable gives the last candidate blocks that it can pull from another one.
func (p *pool) pullable(blocks, ahead int, tiers, source *Tiers) *pool {
	c := &p.candidates[len(p.candidates)-1]
	c.Pull = Pull{From: kv.WorkerKey{Worker: 0}, Blocks: blocks, Ahead: ahead, Source: source}
	c.Load.Tiers = tiers
	return p
}

// pullingAt has learned from first tokens, with noise, that computing takes 0.02 ms a token
// and a pull that share of it.
func pullingAt(share float64, tiers *Tiers) *Work {
	p := NewWork()
	p.last, tiers.pulls.at = testNow, testNow
	learnLoads(p, 0.02, share, func(o *Outcome, tokens int) { o.Pulled, o.Tiers = tokens, tiers })
	return p
}

// choose has the policy choose once, and returns the candidate and what it is to pull.
func (p *pool) choose(work *Work, now time.Time) (at, tokens int) {
	for i := range p.candidates {
		p.candidates[i].Pull.Tokens = 0
	}
	q := Query{Now: now, Tokens: 6400, BlockSize: 64, DryRun: true}
	at = work.Choose(q, p.candidates, rand.New(rand.NewPCG(1, 2)))
	return at, p.candidates[at].Pull.Tokens
}

// TestWorkPullsWhereThatIsCheaperThanComputing: worker 0 has the prompt and a queue, worker
// 1 has neither. The true time of a pull moves across that of computing.
func TestWorkPullsWhereThatIsCheaperThanComputing(t *testing.T) {
	for _, test := range []struct {
		name          string
		share         float64 // of computing that a pull takes
		queue         []int
		chosen, pulls int
	}{
		{"no queue at the source", 0.1, nil, 0, 0},
		{"a cheap pull past a queue", 0.1, []int{8192, 8192}, 1, 99 * 64},
		{"a pull of four fifths past a queue", 0.8, []int{8192, 8192}, 1, 99 * 64},
		{"computing is cheaper", 1.3, []int{8192, 8192}, 1, 0},
		{"the queue is shorter than the pull", 0.8, []int{1000}, 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			tiers := new(Tiers)
			p := pullingAt(test.share, tiers)
			candidates := new(pool).add(99, waiting(0, test.queue...)).add(0, Load{}).pullable(99, 0, tiers, nil)
			if at, tokens := candidates.choose(p, testNow); at != test.chosen || tokens != test.pulls {
				t.Errorf("worker %d pulls %d tokens, want %d and %d", at, tokens, test.chosen, test.pulls)
			}
		})
	}
}

func TestAPullWaitsForThoseBeforeItAtTheSource(t *testing.T) {
	tiers := new(Tiers)
	p := pullingAt(0.5, tiers)
	for ahead, want := range map[int]int{0: 99 * 64, 50_000: 0} {
		candidates := new(pool).add(0, Load{}).pullable(99, ahead, tiers, nil)
		if _, tokens := candidates.choose(p, testNow); tokens != want {
			t.Errorf("%d tokens before: %d are pulled, want %d", ahead, tokens, want)
		}
	}
}

// TestAFailedPullIsPricedNextTime: pulls that fail end, whether the worker or its source is
// to blame, and are tried again after a while.
func TestAFailedPullIsPricedNextTime(t *testing.T) {
	for _, blame := range []string{"worker", "source"} {
		t.Run(blame, func(t *testing.T) {
			tiers, source := new(Tiers), new(Tiers)
			p := pullingAt(0.5, tiers)
			candidates := new(pool).add(0, Load{}).pullable(99, 0, tiers, source)
			last := 99 * 64
			for i := range 10 {
				if blame == "worker" {
					tiers.Pulled(new(Tiers), 99, 0, testNow)
				} else {
					new(Tiers).Pulled(source, 99, 0, testNow)
				}
				_, tokens := candidates.choose(p, testNow)
				if tokens >= last && tokens > 0 {
					t.Errorf("after %d failures %d tokens are expected to come, %d before", i+1, tokens, last)
				}
				last = tokens
			}
			if last != 0 {
				t.Errorf("after ten failures %d tokens are still pulled", last)
			}
			if _, tokens := candidates.choose(p, testNow.Add(9*time.Minute)); tokens < 6000 {
				t.Errorf("nine minutes later %d tokens are pulled", tokens)
			}
		})
	}
}

func TestSuccessRestoresTrustInPulls(t *testing.T) {
	var w, from Tiers
	for range 5 {
		w.Pulled(&from, 10, 0, testNow)
	}
	low := w.PullTrust(testNow)
	for range 20 {
		w.Pulled(&from, 10, 10, testNow)
	}
	if high := w.PullTrust(testNow); low > 0.4 || high < 0.95 || from.serves.trust(testNow) != high {
		t.Errorf("trust %v after failures, %v after successes", low, high)
	}
}

// TestTimesOfPullsAreForgotten: one that measured dear is never tried, so nothing could
// show that it has become cheap.
func TestTimesOfPullsAreForgotten(t *testing.T) {
	tiers := new(Tiers)
	p := pullingAt(5, tiers)
	candidates := new(pool).add(0, Load{}).pullable(99, 0, tiers, nil)
	if _, tokens := candidates.choose(p, testNow); tokens != 0 {
		t.Errorf("%d tokens are pulled at five times the time of computing", tokens)
	}
	if _, tokens := candidates.choose(p, testNow.Add(pullKept+time.Second)); tokens != 99*64 {
		t.Errorf("%d tokens are pulled once that is forgotten", tokens)
	}
}

func TestCountersTellTheTimeOfPulls(t *testing.T) {
	var tiers Tiers
	tiers.pulls.at = testNow
	now := Transfers{}
	for range 20 {
		tiers.Count(now)
		now.PeerBytes, now.PeerSeconds = now.PeerBytes+20_000*640, now.PeerSeconds+20_000*640/1e9
		now.HostBytes, now.HostSeconds, now.HostTokens = now.HostBytes+20_000*640, now.HostSeconds+20_000*640/4e9, now.HostTokens+640
	}
	if b := 1 / tiers.peer.each(); math.Abs(b-1e9) > 1e6 {
		t.Errorf("%.3g bytes a second, want 1e9", b)
	}
	// 20,000 bytes a token at 1 GB/s to host memory and at 4 GB/s to the device
	if ms, measured := NewWork().pullTime(testNow, &tiers, 1000); math.Abs(ms-25) > 0.1 || !measured {
		t.Errorf("1,000 tokens take %.2f ms, want 25", ms)
	}
}

// TestAPullHasItsTermInReceipts, and no other decision has it.
func TestAPullHasItsTermInReceipts(t *testing.T) {
	tiers := new(Tiers)
	p := pullingAt(0.1, tiers)
	candidates := new(pool).add(99, waiting(0, 8192, 8192)).add(0, Load{}).pullable(99, 0, tiers, nil).candidates
	var e Explanation
	p.Choose(Query{Now: testNow, Tokens: 6400, BlockSize: 64, DryRun: true, Explain: &e}, candidates, rand.New(rand.NewPCG(1, 2)))
	for i, score := range e.Scores {
		sum, pull := 0.0, 0.0
		for _, term := range score.Terms {
			sum += term.Value
			if term.Name == "pull" {
				pull = term.Value
			}
		}
		if math.Abs(sum-score.Total) > 1e-6*math.Abs(score.Total) || (pull < 0) != (i == 1) {
			t.Errorf("candidate %d: %+v", i, score)
		}
	}
}

// TestAPullIsCreditedNoMoreThanItSaves: whatever the pull and the uses of the prompt, a
// worker that can pull costs no less than the time saved below one that cannot.
func TestAPullIsCreditedNoMoreThanItSaves(t *testing.T) {
	for _, share := range []float64{0.05, 0.3, 0.9} {
		tiers := new(Tiers)
		p := pullingAt(share, tiers)
		sequence := make([]uint64, 100)
		for i := range sequence {
			sequence[i] = uint64(i + 1)
		}
		q := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Sequence: sequence}
		for range 50 { // it is used often
			p.reuse.look(sequence, 2, true)
		}
		candidates := new(pool).add(0, Load{}).add(0, Load{}).pullable(99, 0, tiers, nil).candidates
		u := p.usual(q, candidates, survey{candidates: 2})
		without, with := p.terms(&q, &candidates[0], &u), p.terms(&q, &candidates[1], &u)
		pull, _ := p.pullTime(testNow, tiers, 99*64)
		saved := u.f * (p.Timing.Prefill(99*64) - pull)
		if gain := without.cost() + without.copy - with.cost() - with.copy; gain > saved*1.01+1 {
			t.Errorf("share %v: the pull is credited %.0f ms and saves %.0f", share, gain, saved)
		}
	}
}
