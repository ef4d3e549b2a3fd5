package policy

import (
	"cmp"
	"math"
	"testing"
	"time"
)

func TestPriceOfTokens(t *testing.T) {
	p := NewWork()
	*p.Timing = EngineTiming{Pass: 8.192, Token: 0.01, decode: 6, context: 0.001}
	for _, test := range []struct {
		prompt, together   int
		computed, answered float64
	}{
		{0, 1, 0.011, 6}, {0, 0, 0.011, 6}, {-5, -5, 0.011, 6}, {1000, 3, 0.011, 2 + 1},
	} {
		if computed, answered := p.Price(test.prompt, test.together); computed != test.computed || answered != test.answered {
			t.Errorf("%+v: %v, %v", test, computed, answered)
		}
	}
	if got := p.UsualOutput(); got != workFirstOutput {
		t.Errorf("before any answer: %v tokens", got)
	}
	p.LearnUsual(Outcome{Output: 10})
	p.LearnUsual(Outcome{Output: 20})
	if got := p.UsualOutput(); got != 15 {
		t.Errorf("%v tokens", got)
	}
}

func TestTimeOfAPromptAlone(t *testing.T) {
	p := NewWork()
	*p.Timing = EngineTiming{Pass: 16, Token: 0.01}
	for tokens, want := range map[int]float64{-1: 16.01, 0: 16.01, 1: 16.01, 100: 17, workPass: 97.92, workPass + 100: 97.92 + 17, 2 * workPass: 2 * 97.92} {
		if got := milliseconds(p.Alone(tokens)); got < want-0.001 || got > want+0.001 {
			t.Errorf("%d tokens: %v ms, want %v", tokens, got, want)
		}
	}
}

func TestTimeToTheFirstToken(t *testing.T) {
	now := time.Unix(1000, 0)
	ready := &Adapters{}
	ready.Begin("sql", now)
	for name, test := range map[string]struct {
		q    Query
		c    Candidate
		want float64 // ms
	}{
		"an idle worker":                  {Query{Tokens: 1000}, Candidate{}, 26},
		"half of it cached":               {Query{Tokens: 1000}, Candidate{Overlap: 5}, 21},
		"all of it cached":                {Query{Tokens: 1000}, Candidate{Overlap: 10}, 16.01},
		"a prompt before it":              {Query{Tokens: 1000}, Candidate{Load: &Load{InFlight: 1, Prefills: []Prefill{{Tokens: 8192, Queued: 8192, Sent: now}}}}, 97.92 + 26},
		"foreign requests before it":      {Query{Tokens: 1000}, Candidate{Load: &Load{Published: Published{Waiting: 2, Running: 4}, Foreign: 2}}, 500 + 26},
		"an adapter that is to be loaded": {Query{Tokens: 1000, Adapter: "sql"}, Candidate{}, 26 + adapterGuess},
		"an adapter that is there":        {Query{Tokens: 1000, Adapter: "sql"}, Candidate{Load: &Load{Adapters: ready}}, 26},
	} {
		p := NewWork()
		*p.Timing = EngineTiming{Pass: 16, Token: 0.01, decode: 6}
		p.decoding.add(1000)
		test.q.Now, test.q.BlockSize, test.c.Load = now, 100, cmp.Or(test.c.Load, &Load{})
		if got := milliseconds(p.FirstToken(&test.q, &test.c)); math.Abs(got-test.want) > 0.001 {
			t.Errorf("%s: %v ms, want %v", name, got, test.want)
		}
	}
}

// TestTimeOfFurtherTokens: as learned from answers beside prompts.
func TestTimeOfFurtherTokens(t *testing.T) {
	p := NewWork()
	*p.Timing = EngineTiming{Pass: 16, Token: 0.01, decode: 6, context: 0.001}
	q, c := Query{Tokens: 1000}, Candidate{Load: &Load{ContextTokens: 2000, AwaitedTokens: 1000}}
	want := func(what string, ms float64) {
		t.Helper()
		if got := milliseconds(p.TokenTime(&q, &c)); math.Abs(got-ms) > 0.001 {
			t.Errorf("%s: %v ms, want %v", what, got, ms)
		}
	}
	want("at first", 10)
	answer := func(o Outcome) { p.learnStretch(&o) } // and not the timing
	answer(Outcome{Output: 101, Decode: 2 * time.Second, During: Meanwhile{Context: 4000}})
	want("answers take twice as long", 20)
	answer(Outcome{Output: 3, Decode: time.Hour, During: Meanwhile{Context: 4000}})
	want("a short answer says nothing", 20)
	answer(Outcome{Output: 101, Decode: time.Hour, During: Meanwhile{Context: 4000}})
	want("one answer says so much at most", 10*(2+mostStretch)/2)
	q.Tokens, c.Load.ContextTokens = 1<<62, 1<<62
	if got := p.TokenTime(&q, &c); got < 0 || got > mostForecast {
		t.Errorf("foreign numbers: %v", got)
	}
}
