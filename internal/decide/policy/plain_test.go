package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
)

// needsSameRounding skips a test of equal sums where the compiler may round a product and a sum at
// once in one place and not in another.
func needsSameRounding(t *testing.T) {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("sums are rounded differently on " + runtime.GOARCH)
	}
}

// drawWork returns a policy that has learned something, or nothing.
func drawWork(rt *rapid.T) *Work {
	p := NewWork()
	for range rapid.IntRange(0, 3).Draw(rt, "learned") {
		p.Learn(Outcome{
			Prompt: 100, Uncached: 50, Output: rapid.IntRange(1, 500).Draw(rt, "output"), Alone: rapid.Bool().Draw(rt, "alone"),
			FirstToken: time.Duration(rapid.IntRange(1, 500).Draw(rt, "first")) * time.Millisecond,
			Decode:     time.Duration(rapid.IntRange(1, 5000).Draw(rt, "decode")) * time.Millisecond,
			Before:     Meanwhile{Prompts: 1, Passes: 1, Tokens: 50, Context: float64(rapid.IntRange(0, 5000).Draw(rt, "context"))},
			During:     Meanwhile{Tokens: rapid.IntRange(0, 500).Draw(rt, "meanwhile"), Context: 100},
		})
	}
	return p
}

// ago is a time that is a few passes from testNow, and sometimes the same as another one's.
func ago(rt *rapid.T, label string) time.Time {
	return testNow.Add(-time.Duration(rapid.SampledFrom([]int{-20, 0, 0, 1, 5, 5, 30, 200, 5000}).Draw(rt, label)) * time.Millisecond)
}

func drawLoad(rt *rapid.T, q *Query) *Load {
	few := func(label string, most int) int {
		return rapid.SampledFrom([]int{0, 0, 1, most / 2, most}).Draw(rt, label)
	}
	l := &Load{
		ContextTokens: few("context", 20_000), AwaitedTokens: few("awaited", 500), InFlight: few("in flight", 8), Foreign: few("foreign", 4), Fresh: true,
		Published: Published{At: ago(rt, "published"), Running: few("running", 4), Waiting: few("waiting", 4)},
	}
	l.Remote = int32(min(l.InFlight, few("remote", 2)))
	if rapid.Bool().Draw(rt, "had a first token") {
		l.FirstToken = ago(rt, "first token")
	}
	sent := ago(rt, "sent")
	for range rapid.SampledFrom([]int{0, 0, 1, 1, 1, 2, 3}).Draw(rt, "prompts") {
		f := Prefill{Sent: sent, Tokens: rapid.SampledFrom([]int{0, 1, 500, 500, workPass, workPass + 1, 3 * workPass}).Draw(rt, "tokens"), AnsweredWhole: rapid.Bool().Draw(rt, "answered whole")}
		f.Queued = f.Tokens
		if rapid.IntRange(0, 7).Draw(rt, "loads") == 0 {
			f.Loads.Host = 640
			l.Fetching++
		}
		l.Prefills, sent = append(l.Prefills, f), sent.Add(3*time.Millisecond)
		l.PrefillTokens += f.Tokens
	}
	switch rapid.IntRange(0, 9).Draw(rt, "kind") {
	case 0:
		l.Cell = &Cell{CellReport: CellReport{Workers: rapid.IntRange(1, 4).Draw(rt, "workers"), Network: time.Millisecond, Load: l.Published}}
	case 1:
		l.Tiers = new(Tiers)
	}
	if q.Adapter != "" && rapid.Bool().Draw(rt, "has adapters") {
		l.Adapters = new(Adapters)
		l.Adapters.Begin(rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "adapter"), testNow)
	}
	return l
}

func drawCandidates(rt *rapid.T, q *Query) []Candidate {
	candidates := make([]Candidate, rapid.IntRange(1, 12).Draw(rt, "candidates"))
	for i := range candidates {
		c := &candidates[i]
		c.Target = &kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, TotalBlocks: rapid.SampledFrom([]int{0, 1000}).Draw(rt, "cache")}
		if c.Load = drawLoad(rt, q); i > 0 && rapid.Bool().Draw(rt, "as the one before") { // for ties
			c.Load = candidates[i-1].Load
		}
		most := q.Tokens / q.BlockSize
		c.Overlap = rapid.IntRange(0, most).Draw(rt, "overlap")
		if rapid.IntRange(0, 2).Draw(rt, "as deep as others") > 0 {
			c.Overlap = most / 2
		}
		switch rapid.IntRange(0, 11).Draw(rt, "special") {
		case 0:
			c.Held = int32(c.Overlap + 1)
		case 1:
			c.Lower.Host = 1
		case 2:
			c.Pull = Pull{Blocks: 2, Source: new(Tiers)}
		case 3:
			c.Network = time.Millisecond
		}
	}
	return candidates
}

func drawQuery(rt *rapid.T) Query {
	q := Query{
		Now: testNow, BlockSize: 64, Tokens: rapid.SampledFrom([]int{0, 1, 640, 1000, workPass, workPass + 640, 20_000}).Draw(rt, "prompt"),
		Leg: rapid.SampledFrom([]kv.Leg{kv.LegWhole, kv.LegWhole, kv.LegPrefill, kv.LegDecode}).Draw(rt, "leg"), Class: fair.Standard,
		DryRun: rapid.Bool().Draw(rt, "dry run"), Adapter: rapid.SampledFrom([]string{"", "", "a"}).Draw(rt, "adapter"),
		Backlog: rapid.SampledFrom([]float64{0, 12.5}).Draw(rt, "backlog"), Workers: 20,
	}
	for i := range q.Tokens / q.BlockSize {
		q.Sequence = append(q.Sequence, uint64(i)+1)
	}
	return q
}

// TestWorkChoosesByAllTerms compares decisions with those by the terms of every candidate, which an
// explanation has: the costs must be the same to the last bit, and the same random numbers must be
// drawn for ties.
func TestWorkChoosesByAllTerms(t *testing.T) {
	needsSameRounding(t)
	plain, other, ties := 0, 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		p := drawWork(rt)
		for decision := range 4 {
			q := drawQuery(rt)
			q.Now = testNow.Add(time.Duration(decision) * time.Millisecond)
			candidates := drawCandidates(rt, &q)
			all := p.survey(&q, candidates)
			p.reuse.look(q.Sequence, all.workers/all.routers(), false)
			u, same := p.usual(q, candidates, all), workSame{overlap: -1}
			for i := range candidates {
				if c := &candidates[i]; c.plain() && q.Adapter == "" {
					plain++
					terms := p.terms(&q, c, &u)
					if got, want := p.plainCost(&q, c, &u, &same), terms.cost(); got != want {
						rt.Fatalf("candidate %d: cost %v, by its terms %v: %+v\nquery %+v\nload %+v", i, got, want, terms, q, *c.Load)
					}
				} else {
					other++
				}
			}
			why := &Explanation{}
			q.Explain = why
			random, again := rand.New(rand.NewPCG(1, uint64(decision))), rand.New(rand.NewPCG(1, uint64(decision)))
			got := p.Choose(q, candidates, random)
			want := Best(candidates, again, func(c *Candidate) float64 { return why.Scores[c.Target.Key.Worker].Total })
			if got != want || random.Uint64() != again.Uint64() {
				rt.Fatalf("candidate %d was chosen, or ties were not broken alike: want %d of %s", got, want, fmt.Sprintln(why.Scores))
			}
			if len(why.Winners()) > 1 {
				ties++
			}
		}
	})
	if plain == 0 || other == 0 || ties == 0 {
		t.Errorf("%d plain candidates, %d others, %d ties: the test lacks some", plain, other, ties)
	}
}

// TestPlainPassesArePlayedThrough compares the passes of a worker with few prompts with those of
// coming.
func TestPlainPassesArePlayedThrough(t *testing.T) {
	needsSameRounding(t)
	rapid.Check(t, func(rt *rapid.T) {
		p, q := drawWork(rt), drawQuery(rt)
		load, u, s := drawLoad(rt, &q), &workUsual{f: 2}, workSame{}
		p.reuse.look(nil, 1, false)
		p.setSame(&s, &q, &Candidate{Load: load}, u)
		first, pushed, begun, _ := p.coming(q.Now, load, s.uncached, 0)
		gotFirst, gotPushed, gotBegun := p.plainComing(&q, load, &s)
		if math.Float64bits(first+0) != math.Float64bits(gotFirst+0) || pushed != gotPushed || begun != gotBegun {
			rt.Fatalf("first token in %v ms, %v ms for others, %d passes: want %v, %v, %d", gotFirst, gotPushed, gotBegun, first, pushed, begun)
		}
	})
}
