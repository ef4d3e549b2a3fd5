package policy

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// outcomeOf is what an engine of that timing would give.
func outcomeOf(truth *EngineTiming, noise float64, random *rand.Rand) Outcome {
	ms := func(x float64) time.Duration {
		return time.Duration(x * (1 + noise*random.NormFloat64()) * float64(time.Millisecond))
	}
	o := Outcome{Output: 20 + random.IntN(400), Alone: random.IntN(2) == 0, Uncached: 1 + random.IntN(workPass)}
	o.Before = Meanwhile{Prompts: 1, Tokens: o.Uncached}
	o.FirstToken = ms(truth.Pass + truth.Token*float64(o.Uncached))
	o.During = Meanwhile{Prompts: random.IntN(20), Context: float64(random.IntN(500_000))}
	o.During.Tokens = o.During.Prompts * random.IntN(8000)
	o.During.Passes = min(o.During.Prompts, o.Output-1)
	o.Decode = ms(float64(o.During.Passes)*truth.Pass + float64(o.During.Tokens)*truth.Token + float64(o.Output-1)*(truth.decode+truth.context*o.During.Context))
	return o
}

func TestTimingIsLearnedFromFinishedRequests(t *testing.T) {
	for name, truth := range map[string]*EngineTiming{
		"like the first guess":    {Pass: 16, Token: 0.018, decode: 6, context: 4e-5},
		"a CPU":                   {Pass: 5, Token: 1, decode: 55, context: 1e-3},
		"faster, no fixed part":   {Pass: 0.01, Token: 0.004, decode: 3, context: 1e-6},
		"slow decode, long reads": {Pass: 30, Token: 0.01, decode: 20, context: 3e-4},
	} {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 2))
			learned := NewEngineTiming()
			for range 2000 {
				learned.Learn(outcomeOf(truth, 0.05, random))
			}
			for _, n := range []int{100, 8000} {
				near(t, "prefill", learned.Pass+learned.Token*float64(n), truth.Pass+truth.Token*float64(n), 0.1)
			}
			for _, c := range []int{1000, 400_000} {
				near(t, "decoding", learned.Decoding(c), truth.Decoding(c), 0.1)
			}
		})
	}
}

func TestTimingFollowsAnEngineThatChanges(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	learned := NewEngineTiming()
	for _, truth := range []*EngineTiming{{Pass: 16, Token: 0.018, decode: 6, context: 4e-5}, {Pass: 16, Token: 0.054, decode: 18, context: 1.2e-4}} {
		for range 5000 {
			learned.Learn(outcomeOf(truth, 0.05, random))
		}
		near(t, "prefill", learned.Prefill(8000), truth.Prefill(8000), 0.1)
		near(t, "decoding", learned.Decoding(100_000), truth.Decoding(100_000), 0.1)
	}
}

func TestTimingStaysSaneWhateverItIsTold(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	learned := NewEngineTiming()
	for range 20_000 {
		learned.Learn(Outcome{
			Output: random.IntN(1000), Alone: random.IntN(2) == 0,
			FirstToken: time.Duration(random.ExpFloat64() * 1e9), Decode: time.Duration(random.ExpFloat64() * 1e10),
			Before: Meanwhile{Tokens: random.IntN(100_000), Context: random.ExpFloat64() * 1e5},
			During: Meanwhile{Prompts: random.IntN(9), Passes: random.IntN(9), Tokens: random.IntN(100_000), Context: random.ExpFloat64() * 1e5},
		})
		for _, v := range []float64{learned.Pass, learned.Token, learned.decode, learned.context} {
			if v < 0 || math.IsNaN(v) || math.IsInf(v, 0) {
				t.Fatalf("timing is %+v", learned)
			}
		}
	}
}

// TestTimingDoesNotRunAway: answers of a few tokens beside many prompts that share
// passes, more of them than the model knows of. No timing explains those, but what is
// learned must stay near what they took.
func TestTimingDoesNotRunAway(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	learned := NewEngineTiming()
	for range 20_000 {
		o := Outcome{Output: 9 + random.IntN(4), Decode: time.Duration(100+random.IntN(200)) * time.Millisecond}
		prompts := 6 + random.IntN(90)
		o.During = Meanwhile{Prompts: prompts, Passes: min(prompts, o.Output-1), Tokens: prompts * (100 + random.IntN(200)), Context: 2e5 + 2e5*random.Float64()}
		learned.Learn(o)
		passes := float64(o.Output - 1)
		took := passes*(learned.Pass+learned.Decoding(int(o.During.Context))) + learned.Token*float64(o.During.Tokens)
		if !(took > 20 && took < 2000) {
			t.Fatalf("an answer that took %v is taken to take %.4g ms by %+v", o.Decode, took, *learned)
		}
	}
}

// TestAnswersInOnePieceDoNotSpoilTheTiming: one worker in twenty sends its answers whole.
func TestAnswersInOnePieceDoNotSpoilTheTiming(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 9))
	learned, truth := NewEngineTiming(), NewEngineTiming()
	for range 20_000 {
		prompts := random.IntN(8)
		o := Outcome{Output: 50 + random.IntN(400)}
		o.During = Meanwhile{Prompts: prompts, Passes: prompts, Tokens: prompts * (100 + random.IntN(2000)), Context: 1e5 * random.Float64()}
		passes := float64(o.Output - 1)
		took := passes*truth.Decoding(int(o.During.Context)) + truth.Pass*float64(o.During.Passes) + truth.Token*float64(o.During.Tokens)
		if random.IntN(20) == 0 {
			took = 1 + random.Float64()
		}
		o.Decode = time.Duration(took * float64(time.Millisecond))
		learned.Learn(o)
	}
	for name, got := range map[string][2]float64{"decode": {learned.decode, truth.decode}, "token": {learned.Token, truth.Token}} {
		if ratio := got[0] / got[1]; !(ratio > 0.25 && ratio < 2) {
			t.Errorf("%s is learned as %v, true is %v", name, got[0], got[1])
		}
	}
}

// TestRepeatedOutcomesDoNotWindUp feeds outcomes of one direction only, for
// which forgetting makes everything else ever less certain.
func TestRepeatedOutcomesDoNotWindUp(t *testing.T) {
	learned := NewEngineTiming()
	o := Outcome{Output: 101, Decode: 600 * time.Millisecond}
	for range 100_000 {
		learned.Learn(o)
	}
	near(t, "decode", learned.decode, 6, 0.1)
	o.During = Meanwhile{Prompts: 2, Tokens: 8000, Context: 10_000}
	o.Decode = 800 * time.Millisecond
	for i, v := range learned.widest {
		if !(learned.covariance[i][i] <= 1.001*v) {
			t.Errorf("variance %d is %v, more than %v", i, learned.covariance[i][i], v)
		}
	}
	learned.Learn(o)
	if learned.Token > 1 || learned.Pass > 500 {
		t.Errorf("one outcome made the timing %+v", learned)
	}
}

func near(t *testing.T, what string, got, want, share float64) {
	t.Helper()
	if math.Abs(got-want) > share*math.Abs(want) {
		t.Errorf("%s %.4g ms, want %.4g ± %.0f %%", what, got, want, 100*share)
	}
}
