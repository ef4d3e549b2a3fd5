package thompson

import (
	"math"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// fixedDraws are the same at every draw.
type fixedDraws struct{ normal, reward, uniform float64 }

func (d fixedDraws) NormFloat64() float64    { return d.normal }
func (d fixedDraws) mean(betaBandit) float64 { return d.reward }
func (d fixedDraws) Float64() float64        { return d.uniform }

// ofType is a pool of workers whose policy has these parameters.
func ofType(t *testing.T, workers int, parameters ...string) *pool {
	t.Helper()
	config, err := Settings{ThompsonOverride: append(parameters, "fixes=none")}.parameters()
	if err != nil {
		t.Fatal(err)
	}
	p := newPool(t, "none", workers)
	p.policy = newPolicy(config)
	return p
}

// decideBy sends a request of 1,024 tokens.
func (p *pool) decideBy(draws fixedDraws, hints hints.Prefix) (decision uint64) {
	p.decisions++
	q := policy.Query{Now: p.now, Tokens: 1024, BlockSize: 64, Decision: p.decisions, Prefix: hints}
	p.policy.decide(q, p.candidates, draws)
	return p.decisions
}

func sameScores(t *testing.T, got []float64, want ...float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%v, want %v", got, want)
	}
	for i := range got {
		if !(math.Abs(got[i]-want[i]) <= 1e-12) {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

func TestKVOnlyTakesTheWidestOverlap(t *testing.T) {
	p := ofType(t, 4, "infrastructure.router_type=kv_only")
	for i, overlap := range []int{3, 9, 9, 1} {
		p.candidates[i].Overlap = overlap
	}
	p.candidates[1].Load.Fresh, p.candidates[1].Load.Waiting = true, 50 // load says nothing
	counts := [4]int{}
	for range 200 {
		chosen, _ := p.decide(hints.Prefix{})
		counts[chosen]++
	}
	if counts[0]+counts[3] > 0 || counts[1] < 60 || counts[2] < 60 {
		t.Errorf("chosen %v, want only the two of 9 blocks, about as often", counts)
	}
}

func TestTrivialOverlapsGoRound(t *testing.T) {
	for _, kind := range []string{typeKVOnly, typeModular} {
		p := ofType(t, 3, "infrastructure.router_type="+kind, "kv_thompson.cold_start_threshold=0.1")
		if kind == typeModular {
			p.candidates[2].Overlap = 1 // 1/16 is below 0.1
		}
		var got []int
		for range 7 {
			chosen, _ := p.decide(hints.Prefix{})
			got = append(got, chosen)
		}
		if !slices.Equal(got, []int{0, 1, 2, 0, 1, 2, 0}) {
			t.Errorf("%s: %v", kind, got)
		}
	}
}

func TestBalancedIsDynamosCost(t *testing.T) {
	p := ofType(t, 3, "infrastructure.router_type=kv_load_balanced", "kv_load_balanced.overlap_score_weight=2", "kv_load_balanced.idle_boost=0.25")
	p.candidates[0].Overlap, p.candidates[1].Overlap = 8, 3
	p.decideBy(fixedDraws{}, hints.Prefix{})
	sameScores(t, p.policy.scores, -2*8, -2*12, -2*12) // of 16 blocks at least 4 count as cached
	sameScores(t, p.policy.chances, softmaxOf(nil, []float64{-16, -24, -24}, 0.15)...)
	p.decideBy(fixedDraws{}, hints.Prefix{})
	sameScores(t, p.policy.scores, -2*8-16, -2*12, -2*12) // the first is in flight there
	p.judge(1, policy.Finished, time.Second)
	p.decideBy(fixedDraws{}, hints.Prefix{})
	sameScores(t, p.policy.scores, -2*8-16, -2*12, -2*12) // the second still is
}

func TestModularScore(t *testing.T) {
	const e = 0.4
	load := math.Exp(-2.5 * 4 / 25) // of two that wait
	for _, c := range []struct {
		name       string
		parameters []string
		stays, not float64
		temp       float64
	}{
		{"as in the file", nil, 0.5*load + 0.05/4*e + (0.15+0.02*3)*0.75*load, 0.02 + 0.05/4*e - (0.04 + 0.01*3), 0.25},
		{"no explore", []string{"kv_thompson.enable_adaptive_explore=false"}, 0.5*load + 0.05*e + (0.15+0.02*3)*0.75*load, 0.02 + 0.05*e - (0.04 + 0.01*3), 0.25},
		{"bare", []string{"kv_thompson.enable_affinity=0", "kv_thompson.enable_switching_cost=0", "kv_thompson.enable_lints=0", "kv_thompson.enable_adaptive_temp=0", "kv_thompson.ts_weight=0"}, 0.5 * load, 0.02, 0.30},
		{"floors", []string{"kv_thompson.enable_affinity=0", "kv_thompson.ts_weight=0", "kv_thompson.load_mod_floor=0.9"}, 0.5 * 0.9, 0.02 - 0.07, 0.25},
		{"sticky floor", []string{"kv_thompson.enable_affinity=0", "kv_thompson.ts_weight=0", "kv_thompson.enable_sticky_floor=1", "kv_thompson.sticky_load_floor=0.8"}, 0.5 * 0.8, 0.02 - 0.07, 0.25},
		{"queue weight of all", []string{"kv_thompson.enable_affinity=0", "kv_thompson.ts_weight=0", "kv_thompson.queue_penalty_weight=0"}, 0.5 * math.Exp(-0.5*4/25), 0.02 - 0.07, 0.25},
		// O = 3·(2 + 0.5)·1 of its pin, J = 2.5: 0.5·2 + 0.45·7.5 + 0.2·2.5·2 = 5.375
		{"full load", []string{"kv_thompson.enable_affinity=0", "kv_thompson.ts_weight=0", "kv_thompson.enable_full_load=1", "kv_thompson.load_mod_floor=0"}, 0.5 / 6.375, 0.02 - 0.07, 0.25},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := ofType(t, 2, append(c.parameters, "infrastructure.router_type=kv_thompson")...)
			p.candidates[0].Overlap, p.candidates[0].Load.Fresh, p.candidates[0].Load.Waiting = 8, true, 2
			budget := 3
			p.only(0, func() { p.decideBy(fixedDraws{reward: e}, hints.Prefix{ID: "a", Budget: &budget}) })
			p.decideBy(fixedDraws{reward: e}, hints.Prefix{ID: "a", Budget: &budget})
			sameScores(t, p.policy.scores, c.stays, c.not)
			sameScores(t, p.policy.chances, softmaxOf(nil, []float64{c.stays, c.not}, c.temp)...)
		})
	}
}

func TestModularLearns(t *testing.T) {
	for weight, bound := range map[string]func(float64) float64{
		"-2": func(linear float64) float64 { return 2 * math.Tanh(linear) },
		"3":  func(linear float64) float64 { return 3 * linear },
	} {
		p := ofType(t, 1, "infrastructure.router_type=kv_thompson", "kv_thompson.ts_weight=0", "kv_thompson.lints_weight="+weight)
		p.candidates[0].Overlap = 16
		d := p.decideBy(fixedDraws{}, hints.Prefix{})
		sameScores(t, p.policy.scores, 1) // nothing is known yet
		if verdict := p.judge(d, policy.Finished, time.Second); verdict.Reward != 0.5 {
			t.Fatalf("reward %v", verdict.Reward)
		}
		p.decideBy(fixedDraws{}, hints.Prefix{})
		// b = x/2 and A = I + xxᵀ up to what was forgotten, which keeps I.
		x, square := p.policy.choices[0].x, 0.0
		for _, v := range x {
			square += v * v
		}
		linear := 0.5 * square / (1 + square)
		if got := p.policy.scores[0] - 1; math.Abs(got-bound(linear)) > 1e-6 {
			t.Errorf("weight %s: learned %v, want %v", weight, got, bound(linear))
		}
	}
}
