package policy

import "testing"

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
