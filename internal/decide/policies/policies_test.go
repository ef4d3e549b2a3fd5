package policies

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
)

// explained are the policies whose explanations are tested, some with settings.
func explained(t *testing.T) map[string]func() policy.Policy {
	t.Helper()
	list := map[string]func() policy.Policy{}
	with := func(label, name string, change func(*Settings)) {
		settings := testkit.Defaults[Settings]()
		change(&settings)
		list[label] = func() policy.Policy {
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
	with("kv by the smallest tree", "kv", func(s *Settings) { s.Ties = "smallest-tree" })
	with("thompson as the original", "thompson", func(s *Settings) { s.Thompson.ThompsonOverride = []string{"fixes=none"} })
	with("variance with a low limit", "variance", func(s *Settings) { s.VarianceK, s.CacheThreshold = 0.5, 0.1 })
	with("cache-threshold with a low gate", "cache-threshold", func(s *Settings) { s.CacheThreshold, s.BalanceAbsThreshold = 0, 1 })
	with("thompson by usage", "thompson", func(s *Settings) { s.Thompson.ThompsonOverride = []string{"infrastructure.router_type=kv_load"} })
	return list
}

// drawQuery draws a request; number is that of the decision.
func drawQuery(rt *rapid.T, now time.Time, number uint64) policy.Query {
	return policy.Query{
		Now: now, Tokens: rapid.IntRange(0, 2000).Draw(rt, "tokens"), BlockSize: 64, Decision: number,
		FreePrefill: rapid.Bool().Draw(rt, "free prefill"), Leg: kv.Leg(rapid.IntRange(0, 2).Draw(rt, "leg")), Retry: rapid.Bool().Draw(rt, "retry"),
		Prefix: hints.Prefix{ID: rapid.SampledFrom([]string{"", "a", "b"}).Draw(rt, "series"), Total: rapid.IntRange(0, 5).Draw(rt, "total"), OSL: hints.Level(rapid.IntRange(0, 2).Draw(rt, "osl"))},
	}
}

// drawCandidates draws the workers; small ranges make for ties.
func drawCandidates(rt *rapid.T, q policy.Query) []policy.Candidate {
	var list []policy.Candidate
	for i := range rapid.IntRange(1, 6).Draw(rt, "workers") {
		c := policy.Candidate{
			Target:  &kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1},
			Overlap: rapid.IntRange(0, q.Tokens/q.BlockSize).Draw(rt, "overlap"), NewBlocks: rapid.IntRange(0, 3).Draw(rt, "new"), TreeBlocks: rapid.IntRange(0, 2).Draw(rt, "tree"),
			Load: &policy.Load{
				Published: policy.Published{Running: rapid.IntRange(0, 2).Draw(rt, "running"), Waiting: rapid.IntRange(0, 2).Draw(rt, "waiting"), KVUsage: rapid.SampledFrom([]float64{0, 0.25, 1}).Draw(rt, "usage")},
				Fresh:     rapid.Bool().Draw(rt, "fresh"), InFlight: rapid.IntRange(0, 40).Draw(rt, "in flight"), Foreign: rapid.IntRange(0, 2).Draw(rt, "foreign"),
				PrefillTokens: rapid.IntRange(0, 3).Draw(rt, "prefill") * 500, ContextTokens: rapid.IntRange(0, 3).Draw(rt, "context") * 500, ActiveBlocks: rapid.IntRange(0, 9).Draw(rt, "active"),
			},
		}
		if c.Load.PrefillTokens > 0 {
			c.Load.Prefills = []policy.Prefill{{Tokens: c.Load.PrefillTokens, Sent: q.Now.Add(-time.Duration(rapid.IntRange(0, 50).Draw(rt, "sent")) * time.Millisecond)}}
		}
		list = append(list, c)
	}
	return list
}

// checkExplanation holds an explanation against the choice that it explains.
func checkExplanation(rt *rapid.T, e *policy.Explanation, candidates []policy.Candidate, chosen int) {
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
	if e.How == policy.HowDraw && math.Abs(chances-1) > 1e-9 {
		rt.Fatalf("the chances add up to %v", chances)
	}
	if winners := e.Winners(); !slices.Contains(winners, chosen) {
		rt.Fatalf("candidate %d was chosen, by %+v it is one of %v", chosen, e, winners)
	}
}

// Every choice can be computed again from its explanation, more than 1,000 for each
// policy; and asking for it changes nothing: a twin of the policy that is not asked
// chooses the same and draws as often.
func TestAnExplanationGivesTheChoice(t *testing.T) {
	const decisions = uint64(12)
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
					q.Explain = &policy.Explanation{}
					chosen := asked.Choose(q, candidates, random)
					checkExplanation(rt, q.Explain, candidates, chosen)
					if plain != chosen || random.Uint64() != other.Uint64() {
						rt.Fatalf("explained it chooses %d, else %d", chosen, plain)
					}
					f := policy.Feedback{Decision: q.Decision, Worker: candidates[chosen].Target.Key, Now: now, Ending: policy.Ending(rapid.IntRange(0, 2).Draw(rt, "ending")), Latency: time.Second, TokensIn: q.Tokens, TokensOut: 10}
					o := policy.Outcome{Worker: f.Worker, Leg: q.Leg, Uncached: q.Tokens, Output: 10, Alone: true, FirstToken: 50 * time.Millisecond, Decode: time.Second, Before: policy.Meanwhile{Prompts: 1, Tokens: q.Tokens}}
					for _, p := range []policy.Policy{asked, twin} {
						if judged, is := p.(policy.Judged); is {
							judged.Judge(f)
						}
						if learner, is := p.(policy.Learner); is {
							learner.Learn(o)
						}
					}
				}
			})
		})
	}
}

func TestNamesOfOtherRouters(t *testing.T) {
	for name, want := range map[string]string{"round_robin": "round-robin", "power_of_two": "power-of-two", "cache_aware": "work", "cache-aware": "work", "random": "random",
		"kv": "kv", "least_loaded": "least-loaded", "bucket": "bucket", "fastest": "fastest", "": ""} {
		if got := Canonical(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	for name, says := range map[string]string{"bucket": "the nearest is work", "consistent_hash": "work with --session-header", "consistent_hashing": "--session-header", "roundrobin": "the nearest is round-robin;",
		"wrok": "the nearest is work;", "prefix_hash": "the nearest is work;", "cache-treshold": "the nearest is cache-threshold;", "fastest": "choose one of standalone, kv, work"} {
		if _, err := New(name, testkit.Defaults[Settings]()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", name, err, says)
		}
	}
}

func TestEveryPolicyNameIsKnown(t *testing.T) {
	for _, name := range Names {
		if _, err := New(name, testkit.Defaults[Settings]()); err != nil {
			t.Error(err)
		}
	}
	if _, err := New("fastest", testkit.Defaults[Settings]()); err == nil {
		t.Error("an unknown name was taken")
	}
}

// TestTraitsOfEveryPolicy holds what each policy wants counted: a trait that is
// lost changes decisions without an error.
func TestTraitsOfEveryPolicy(t *testing.T) {
	matching := policy.Traits{ActiveBlocks: true, Siblings: true, WholeMatch: true}
	want := map[string]policy.Traits{
		"least-loaded": {}, "power-of-two": {}, "round-robin": {}, "random": {},
		"kv":              {ActiveBlocks: true, WholeMatch: true, Staged: true, HostCredit: 0.75, DiskCredit: 0.25},
		"work":            {ActiveBlocks: true, Siblings: true, HostCredit: 1, DiskCredit: 1},
		"cache-threshold": matching, "variance": matching,
		"standalone": {WholeMatch: true}, "thompson": {WholeMatch: true, Logged: true},
	}
	for _, name := range Names {
		p, err := New(name, testkit.Defaults[Settings]())
		if err != nil {
			t.Fatal(err)
		}
		if traits, known := want[name]; !known {
			t.Errorf("add policy %s to this table: its traits are %+v", name, p.Traits())
		} else if p.Traits() != traits {
			t.Errorf("policy %s has the traits %+v, want %+v", name, p.Traits(), traits)
		}
	}
	settings := testkit.Defaults[Settings]()
	settings.Ties = "smallest-tree"
	p, err := New("kv", settings)
	if got := p.Traits(); err != nil || got != (policy.Traits{ActiveBlocks: true, WholeMatch: true, TreeBlocks: true, Staged: true, HostCredit: 0.75, DiskCredit: 0.25}) {
		t.Errorf("kv with --ties smallest-tree wants %+v counted, %v", got, err)
	}
}

// TestARegisteredPolicyIsKnownByItsName: beside the project's, and made anew each time.
func TestARegisteredPolicyIsKnownByItsName(t *testing.T) {
	t.Cleanup(func() { own = nil })
	made := 0
	Register("my-own", func() policy.Policy {
		made++
		return &policy.RoundRobin{}
	})
	settings := testkit.Defaults[Settings]()
	for _, name := range []string{"my-own", Canonical("my_own")} {
		if p, err := New(name, settings); err != nil || p == nil {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
	if all := All(); made != 2 || !slices.Equal(all, append(slices.Clone(Names), "my-own")) {
		t.Errorf("made %d times; the policies are %v", made, all)
	}
	if _, err := New("myown", settings); err == nil || !strings.Contains(err.Error(), "the nearest is my-own; ") {
		t.Errorf("a misspelt name: %v", err)
	}
	for _, name := range []string{"my-own", "kv", "thompson", "cache-aware", "My-Own", "my_own", "a,b", "", "a--b"} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%q was registered", name)
				}
			}()
			Register(name, nil)
		}()
	}
}
