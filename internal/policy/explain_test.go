package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
)

// explained are the policies whose explanations are tested, some with settings.
func explained(t *testing.T) map[string]func() Policy {
	t.Helper()
	list := map[string]func() Policy{}
	with := func(label, name string, change func(*Settings)) {
		settings := DefaultSettings()
		change(&settings)
		list[label] = func() Policy {
			p, err := New(name, settings)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
	}
	for _, name := range Names {
		with(name, name, func(*Settings) {})
	}
	with("kv by chance", "kv", func(s *Settings) { s.RouterTemperature = 0.7 })
	with("kv by the smallest tree", "kv", func(s *Settings) { s.Ties = tiesSmallestTree })
	with("thompson as the original", "thompson", func(s *Settings) { s.ThompsonFixes = "none" })
	with("variance with a low limit", "variance", func(s *Settings) { s.VarianceK, s.CacheThreshold = 0.5, 0.1 })
	with("cache-threshold with a low gate", "cache-threshold", func(s *Settings) { s.CacheThreshold, s.BalanceAbsThreshold = 0, 1 })
	list["thompson by usage"] = func() Policy {
		p := list["thompson"]().(*Thompson)
		p.RouterType = ThompsonKVLoad
		return p
	}
	return list
}

// drawQuery draws a request; number is that of the decision.
func drawQuery(rt *rapid.T, now time.Time, number uint64) Query {
	return Query{
		Now: now, Tokens: rapid.IntRange(0, 2000).Draw(rt, "tokens"), BlockSize: 64, Decision: number,
		FreePrefill: rapid.Bool().Draw(rt, "free prefill"), Leg: kv.Leg(rapid.IntRange(0, 2).Draw(rt, "leg")), Retry: rapid.Bool().Draw(rt, "retry"),
		Prefix: hints.Prefix{ID: rapid.SampledFrom([]string{"", "a", "b"}).Draw(rt, "series"), Total: rapid.IntRange(0, 5).Draw(rt, "total"), OSL: hints.Level(rapid.IntRange(0, 2).Draw(rt, "osl"))},
	}
}

// drawCandidates draws the workers; small ranges make for ties.
func drawCandidates(rt *rapid.T, q Query) []Candidate {
	var list []Candidate
	for i := range rapid.IntRange(1, 6).Draw(rt, "workers") {
		c := Candidate{
			Target:  kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1},
			Overlap: rapid.IntRange(0, q.Tokens/q.BlockSize).Draw(rt, "overlap"), NewBlocks: rapid.IntRange(0, 3).Draw(rt, "new"), TreeBlocks: rapid.IntRange(0, 2).Draw(rt, "tree"),
			Load: Load{
				Published: Published{Running: rapid.IntRange(0, 2).Draw(rt, "running"), Waiting: rapid.IntRange(0, 2).Draw(rt, "waiting"), KVUsage: rapid.SampledFrom([]float64{0, 0.25, 1}).Draw(rt, "usage")},
				Fresh:     rapid.Bool().Draw(rt, "fresh"), InFlight: rapid.IntRange(0, 40).Draw(rt, "in flight"), Foreign: rapid.IntRange(0, 2).Draw(rt, "foreign"),
				PrefillTokens: rapid.IntRange(0, 3).Draw(rt, "prefill") * 500, ContextTokens: rapid.IntRange(0, 3).Draw(rt, "context") * 500, ActiveBlocks: rapid.IntRange(0, 9).Draw(rt, "active"),
			},
		}
		if c.Load.PrefillTokens > 0 {
			c.Load.Prefills = []Prefill{{Tokens: c.Load.PrefillTokens, Sent: q.Now.Add(-time.Duration(rapid.IntRange(0, 50).Draw(rt, "sent")) * time.Millisecond)}}
		}
		list = append(list, c)
	}
	return list
}

// checkExplanation holds an explanation against the choice that it explains.
func checkExplanation(rt *rapid.T, e *Explanation, candidates []Candidate, chosen int) {
	if len(e.Scores) != len(candidates) || e.Policy == "" {
		rt.Fatalf("%d scores of %q for %d candidates", len(e.Scores), e.Policy, len(candidates))
	}
	chances := 0.0
	for i, s := range e.Scores {
		sum := 0.0
		for _, term := range s.Terms {
			sum += term.Value
		}
		if math.Abs(sum-s.Total) > 1e-9*(1+math.Abs(s.Total)) {
			rt.Fatalf("the terms %v of candidate %d add up to %v, its total is %v", s.Terms, i, sum, s.Total)
		}
		if s.Chance != nil {
			chances += *s.Chance
		}
	}
	if e.How == HowDraw && math.Abs(chances-1) > 1e-9 {
		rt.Fatalf("the chances add up to %v", chances)
	}
	if winners := e.Winners(); !slices.Contains(winners, chosen) {
		rt.Fatalf("candidate %d was chosen, by %+v it is one of %v", chosen, e, winners)
	}
}

func TestTheSmallestTreeIsToldAsWhatDecided(t *testing.T) {
	settings := DefaultSettings()
	settings.Ties = tiesSmallestTree
	p, err := New("kv", settings)
	if err != nil {
		t.Fatal(err)
	}
	why := new(Explanation)
	chosen := p.Choose(Query{Tokens: 640, BlockSize: 64, Explain: why}, []Candidate{{TreeBlocks: 2}, {TreeBlocks: 1}}, rand.New(rand.NewPCG(1, 1)))
	if winners := why.Winners(); chosen != 1 || !slices.Equal(winners, []int{1}) {
		t.Errorf("candidate %d, by its explanation %v, want 1", chosen, winners)
	}
}

// Every choice can be computed again from its explanation, more than 1,000 for each
// policy; and asking for it changes nothing: a twin of the policy that is not asked
// chooses the same and draws as often.
func TestAnExplanationGivesTheChoice(t *testing.T) {
	decisions := uint64(12)
	if testkit.RaceDetector {
		decisions = 3
	}
	for name, make := range explained(t) {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				asked, twin := make(), make()
				seed := rapid.Uint64().Draw(rt, "seed")
				random, other := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 1))
				now := time.Unix(1_700_000_000, 0)
				for number := range decisions {
					now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(rt, "passed")) * time.Millisecond)
					q := drawQuery(rt, now, number+1)
					candidates := drawCandidates(rt, q)
					plain := twin.Choose(q, candidates, other)
					q.Explain = &Explanation{}
					chosen := asked.Choose(q, candidates, random)
					checkExplanation(rt, q.Explain, candidates, chosen)
					if plain != chosen || random.Uint64() != other.Uint64() {
						rt.Fatalf("explained it chooses %d, else %d", chosen, plain)
					}
					f := Feedback{Decision: q.Decision, Worker: candidates[chosen].Target.Key, Now: now, Ending: Ending(rapid.IntRange(0, 2).Draw(rt, "ending")), Latency: time.Second, TokensIn: q.Tokens, TokensOut: 10}
					o := Outcome{Worker: f.Worker, Leg: q.Leg, Uncached: q.Tokens, Output: 10, Alone: true, FirstToken: 50 * time.Millisecond, Decode: time.Second, Before: Meanwhile{Prompts: 1, Tokens: q.Tokens}}
					for _, p := range []Policy{asked, twin} {
						if judged, is := p.(Judged); is {
							judged.Judge(f)
						}
						if learner, is := p.(Learner); is {
							learner.Learn(o)
						}
					}
				}
			})
		})
	}
}

func TestWinnersAndMargin(t *testing.T) {
	low, high := 1.0, 2.0
	for _, test := range []struct {
		name    string
		scores  []Score
		winners []int
		margin  float64 // of the first winner
	}{
		{"the highest", []Score{{Total: 1}, {Total: 3}}, []int{1}, 2},
		{"a tie", []Score{{Total: 1}, {Total: 1}, {Total: 0}}, []int{0, 1}, 0},
		{"a tie that something decides", []Score{{Total: 1, TieBreak: &low}, {Total: 1, TieBreak: &high}}, []int{1}, 0},
		{"one that could not be chosen", []Score{{Total: 9, Excluded: "queue_limit"}, {Total: 1}, {Total: 0.5}}, []int{1}, 0.5},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := Explanation{How: HowHighest, Scores: test.scores}
			if got := e.Winners(); !slices.Equal(got, test.winners) {
				t.Errorf("winners %v, want %v", got, test.winners)
			}
			if margin := e.Margin(test.winners[0]); margin == nil || *margin != test.margin {
				t.Errorf("margin %v, want %v", margin, test.margin)
			}
		})
	}
	if alone := (&Explanation{Scores: []Score{{Total: 1}}}).Margin(0); alone != nil {
		t.Errorf("the margin of the only candidate is %v", *alone)
	}
}

func TestWhatIsExplainedIsFinite(t *testing.T) {
	for _, test := range []struct{ v, want float64 }{{math.NaN(), 0}, {math.Inf(1), math.MaxFloat64}, {math.Inf(-1), -math.MaxFloat64}, {1.5, 1.5}} {
		if got := Finite(test.v); got != test.want {
			t.Errorf("Finite(%v) is %v, want %v", test.v, got, test.want)
		}
	}
	if math.Signbit(Finite(math.Copysign(0, -1))) {
		t.Error("−0 stays −0, which JSON shows")
	}
}
