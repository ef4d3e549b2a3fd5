package router

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

func drawMatches(rt *rapid.T, workers, blocks int) (matches []kv.Match) {
	few := func(label string) int32 {
		return rapid.SampledFrom([]int32{0, 0, 0, 1, 3, int32(blocks)}).Draw(rt, label)
	}
	for w := range workers {
		if rapid.Bool().Draw(rt, "matches") {
			m := kv.Match{Worker: kv.WorkerKey{Worker: uint64(w)}, Blocks: rapid.IntRange(0, blocks).Draw(rt, "blocks"), Held: few("held"), Sure: few("sure")}
			m.Lower, m.Staged = kv.LowerBlocks{Host: few("host"), Disk: few("disk")}, kv.LowerBlocks{Host: few("staged")}
			matches = append(matches, m)
		}
	}
	return matches
}

// TestMatchesAreFoundInAnyOrder compares matched with a look at all matches.
func TestMatchesAreFoundInAnyOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const workers = 12
		p := prompt{matches: drawMatches(rt, workers, 4)}
		w := 0
		for range 40 {
			if w++; rapid.IntRange(0, 3).Draw(rt, "jumps") == 0 {
				w = rapid.IntRange(0, workers).Draw(rt, "worker")
			}
			key := kv.WorkerKey{Worker: uint64(w)}
			var want *kv.Match
			if i := slices.IndexFunc(p.matches, func(m kv.Match) bool { return m.Worker == key }); i >= 0 {
				want = &p.matches[i]
			}
			if got := p.matched(key); got != want {
				rt.Fatalf("worker %d has %v of the prompt, want %v", w, got, want)
			}
		}
	})
}

// TestCandidatesAreAllThatMayServe compares the candidates of decisions that reuse them with what
// targets, matches and books say of each worker.
func TestCandidatesAreAllThatMayServe(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		now := time.Now()
		rule := rapid.SampledFrom([]string{"work", "kv", "least-loaded"}).Draw(rt, "policy")
		r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, rule), BlockSize: testkit.BlockSize, Seed: 1, Now: func() time.Time { return now }})
		workers := rapid.IntRange(1, 8).Draw(rt, "workers")
		up := func(w int) {
			r.Up(kv.Target{
				Key: kv.WorkerKey{Worker: uint64(w)}, Models: rapid.SampledFrom([][]string{nil, {"m"}, {"n", "m"}, {"n"}}).Draw(rt, "models"), Unanswered: rapid.IntRange(0, 5).Draw(rt, "unanswered") == 0,
				Disagg: kv.Disagg{Role: rapid.SampledFrom([]kv.Role{kv.RoleBoth, kv.RoleBoth, kv.RolePrefill, kv.RoleDecode}).Draw(rt, "role")},
			})
		}
		for w := range workers {
			up(w)
		}
		for range rapid.IntRange(1, 8).Draw(rt, "decisions") {
			now = now.Add(time.Duration(rapid.IntRange(0, 6000).Draw(rt, "ms")) * time.Millisecond)
			w := rapid.IntRange(0, workers-1).Draw(rt, "worker")
			key := kv.WorkerKey{Worker: uint64(w)}
			switch rapid.IntRange(0, 5).Draw(rt, "before") {
			case 0:
				_ = r.Health.Cordon(key.Worker) // it may be down
			case 1:
				r.Down(key)
			case 2:
				up(w)
			case 3:
				_, _ = r.Book(Request{Tokens: testkit.PromptTokens(1, rapid.IntRange(0, 5).Draw(rt, "booked"))}, key) // it may be down
			default:
				r.Publish(key, policy.Published{Running: 2, At: now.Add(-time.Duration(rapid.IntRange(0, 12_000).Draw(rt, "age")) * time.Millisecond)})
			}
			tokens := testkit.PromptTokens(1, rapid.IntRange(0, 6).Draw(rt, "prompt"))
			tokens = tokens[:rapid.SampledFrom([]int{len(tokens), max(0, len(tokens)-1)}).Draw(rt, "length")]
			p, _ := r.lookUp(Request{
				Tokens: tokens, Model: rapid.SampledFrom([]string{"", "m"}).Draw(rt, "model"),
				Leg: rapid.SampledFrom([]kv.Leg{kv.LegWhole, kv.LegPrefill, kv.LegDecode}).Draw(rt, "leg"), Unanswered: rapid.Bool().Draw(rt, "also unanswered"),
			}, new(workspace))
			if rapid.Bool().Draw(rt, "retry") {
				p.Exclude = []uint64{0}
			}
			if rapid.IntRange(0, 3).Draw(rt, "restricted") == 0 {
				p.Allowed = []uint64{1, 2, 3}
			}
			p.matches = drawMatches(rt, workers, 6)
			r.mu.Lock()
			err := r.decider.collect(&p, now)
			compareCandidates(rt, r, &p, now)
			if (err == nil) != (len(r.decider.candidates) > 0) {
				rt.Fatalf("%d candidates, error %v", len(r.decider.candidates), err)
			}
			r.mu.Unlock()
			if err := r.Check(); err != nil {
				rt.Fatal(err)
			}
		}
	})
}

// compareCandidates is a plain account of what collect does.
func compareCandidates(rt *rapid.T, r *Router, p *prompt, now time.Time) {
	var want []policy.Candidate
	workers := 0
	for i := range r.fleet.targets {
		t := &r.fleet.targets[i]
		if t.Cordoned || !t.Disagg.Takes(p.Leg) || t.Unanswered && !p.Unanswered {
			continue
		}
		workers++
		if p.Model != "" && len(t.Models) > 0 && !slices.Contains(t.Models, p.Model) || slices.Contains(p.Exclude, t.Key.Worker) || p.Allowed != nil && !slices.Contains(p.Allowed, t.Key.Worker) {
			continue
		}
		c := policy.Candidate{Target: t, Load: r.fleet.loads.byWorker[t.Key].Load}
		if m := slices.IndexFunc(p.matches, func(m kv.Match) bool { return m.Worker == t.Key }); m >= 0 {
			c.Overlap, c.Held, c.Lower = p.matches[m].Blocks, p.matches[m].Held, r.decider.counted(&p.matches[m])
			c.Doubtful = r.decider.doubts(&p.matches[m])
		}
		held, active := c.Overlap, 0
		sequence := p.views[0].sequence
		for active < len(sequence) && r.fleet.loads.active.requests(sequence[active], r.fleet.loads.byWorker[t.Key].number) > 0 {
			active++
		}
		if p.counted {
			c.NewBlocks = len(p.views[0].local) - active
		}
		usable := max(0, p.tokens-1) / r.blockSize
		if r.decider.traits.WholeMatch {
			usable = p.tokens / r.blockSize
		}
		if r.decider.traits.Siblings {
			c.Overlap = max(c.Overlap, active)
		}
		c.Overlap = min(c.Overlap, usable)
		c.Indexed = c.Overlap
		c.Lower = c.Lower.Beyond(c.Overlap - held).Within(usable - c.Overlap)
		want = append(want, c)
		if fresh := now.Sub(c.Load.At) < loadFreshFor; c.Load.Fresh != fresh || !fresh && c.Load.Foreign > 0 {
			rt.Fatalf("worker %v: its load of %v ago is fresh %v, with %d foreign requests", t.Key, now.Sub(c.Load.At), c.Load.Fresh, c.Load.Foreign)
		}
	}
	if workers != p.workers {
		rt.Fatalf("%d workers share such requests, want %d", p.workers, workers)
	}
	order := slices.CompareFunc(r.decider.candidates, want, func(a, b policy.Candidate) int {
		if b.Lower == (kv.LowerBlocks{}) {
			a.Doubtful, b.Doubtful = false, false
		}
		if a != b {
			return cmp.Or(a.Overlap-b.Overlap, 1)
		}
		return 0
	})
	if order != 0 {
		rt.Fatalf("candidates %+v\nwant %+v", r.decider.candidates, want)
	}
}
