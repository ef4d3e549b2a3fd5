package health

import (
	"testing"
	"time"

	"kvrouter/internal/base/kv"
)

// usual has requests of a class wait for so long.
func (b *bench) usual(c Class, wait time.Duration) {
	for range 20 {
		b.Waited(b.sent(1), c, wait, 0, 0)
	}
}

// waits is a request that has waited for worker i for so long.
func (b *bench) waits(i int, q Waiting, silent time.Duration) Waiting {
	if q.Worker = key(i); q.Generation == 0 {
		q.Generation = 1
	}
	q.Sent = b.now.Add(-silent)
	q.Since = q.Sent
	b.Begin(q.Worker, q.Logprobs, q.Sent)
	return q
}

// judged is the verdict on the first of requests at one worker.
func (b *bench) judged(all ...Waiting) Verdict {
	b.Silence(all, b.now)
	return all[0].Verdict
}

func TestWhatExplainsASilence(t *testing.T) {
	const s = time.Second
	whole, bounded := ClassOf(kv.LegWhole, true, 0, Generate), ClassOf(kv.LegWhole, true, 400, Generate)
	story := Waiting{Class: whole, Whole: true}
	stream, limited, recording := Waiting{}, story, Waiting{Class: ClassOf(kv.LegWhole, true, 0, Hear), Task: Hear, Whole: true}
	limited.Class, limited.Output = bounded, 400
	for _, test := range []struct {
		name    string
		q       Waiting
		usual   time.Duration // time to the first byte
		also    []Waiting     // at the same worker
		prepare func(b *bench)
		silent  time.Duration
		want    Verdict
	}{
		{"a short one", stream, s / 10, nil, nil, 2 * s, Wait},
		{"far longer than usual", stream, s / 10, nil, nil, 3 * s, Hedge},
		{"little is known", stream, 0, nil, nil, 50 * s, Wait},
		{"others are slow", stream, s, nil, nil, 7 * s, Wait},
		{"slower than slow others", stream, s, nil, nil, 8 * s, Hedge},
		{"a long prompt", Waiting{Tokens: 10_000}, s / 10, nil, nil, 50 * s, Wait},
		{"a long prompt on engines that are fast", Waiting{Tokens: 10_000}, s / 10, nil, func(b *bench) {
			for range paceLeast {
				b.Waited(b.sent(1), 0, s/10, 1000, 0)
			}
		}, 8 * s, Hedge},
		{"a long prompt on the one that is slow", Waiting{Tokens: 10_000}, s / 10, nil, func(b *bench) {
			for range baselineSize {
				b.Waited(b.sent(1), 0, s/10, 1000, 0)
			}
			b.Waited(b.sent(0), 0, 2*s, 1000, 0)
		}, 50 * s, Wait},
		{"a whole answer", story, s / 10, nil, nil, 2 * s, Wait},
		{"a whole answer that is long", story, s / 10, nil, nil, 20 * s, Avoid},
		{"a whole answer that is never so long", story, s / 10, nil, nil, 30 * s, Hedge},
		{"three whole answers that are long", story, s / 10, []Waiting{story, story}, nil, 4 * s, Hedge},
		{"three whole answers of up to 400 tokens", limited, s / 10, []Waiting{limited, limited}, nil, 12 * s, Wait},
		{"a whole answer of up to 400 tokens", limited, s / 10, nil, nil, 12 * s, Wait},
		{"a whole answer of up to 400 tokens beside those that took long because they were", limited, 20 * s, nil, func(b *bench) {
			for range baselineSize {
				b.Wrote(b.sent(1), 400, 20*s)
				b.Waited(b.sent(1), bounded, 20*s, 0, 400)
			}
		}, 24 * s, Hedge},
		{"a whole answer of up to 400 tokens that is late", limited, s / 10, nil, nil, 23 * s, Hedge},
		{"a whole answer of an engine that shows its work otherwise", story, s / 10, nil, func(b *bench) { b.Lives(key(0), 1, b.now.Add(-time.Hour)) }, 24 * s, Hedge},
		{"life otherwise", stream, s / 10, nil, func(b *bench) { b.Lives(key(0), 1, b.now.Add(-s)) }, 50 * s, Wait},
		{"life of another request", stream, s / 10, nil, func(b *bench) { b.Answers(key(0), 1, b.now.Add(-s)) }, 50 * s, Wait},
		{"life of another incarnation", stream, s / 10, nil, func(b *bench) { b.Lives(key(0), 2, b.now) }, 3 * s, Hedge},
		{"within an answer", Waiting{Begun: true}, s / 10, nil, nil, 9 * s, Wait},
		{"long within an answer", Waiting{Begun: true}, s / 10, nil, nil, 10 * s, Avoid},
		{"within an answer beside a long prompt", Waiting{Begun: true}, s / 10, []Waiting{{Tokens: 5000}}, nil, 42 * s, Wait},
		{"a trial that writes up to 400 tokens", Waiting{Attempt: Attempt{Trial: true}, Class: bounded, Whole: true, Output: 400}, s / 10, nil, nil, 10 * s, Wait},
		{"a trial", Waiting{Attempt: Attempt{Trial: true}}, s / 10, nil, nil, s, Hedge},
		{"for too long", Waiting{Begun: true}, s / 10, nil, nil, 60 * s, GiveUp},
		{"for too long, but for what a parser may hold back", Waiting{Begun: true, Output: 400}, s / 10, nil, nil, 79 * s, Avoid},
		{"for too long, with counters that stand still", Waiting{Begun: true, Output: 400}, s / 10, nil, func(b *bench) { b.Lives(key(0), 1, b.now.Add(-time.Hour)) }, 60 * s, GiveUp},
		{"for too long, but for a prompt beside it", Waiting{Begun: true}, s / 10, []Waiting{{Tokens: 5000}}, nil, 90 * s, Avoid},
		{"for too long, but for a whole answer beside it", stream, s / 10, []Waiting{limited}, nil, 79 * s, Hedge},
		{"for longer than that takes", stream, s / 10, []Waiting{limited}, nil, 81 * s, GiveUp},
		{"all log probabilities of a prompt", Waiting{Class: bounded, Whole: true, Output: 400, Logprobs: 1 << 20}, s / 10, nil, nil, 33 * s, Wait},
		{"all log probabilities of a prompt, for longer than that takes", Waiting{Class: bounded, Whole: true, Output: 400, Logprobs: 1 << 20}, s / 10, nil, nil, 59 * s, Avoid},
		{"few log probabilities of a prompt, for longer than that takes", Waiting{Class: bounded, Whole: true, Output: 400, Logprobs: 1 << 10}, s / 10, nil, nil, 25 * s, Hedge},
		{"beside all log probabilities of a prompt", stream, s / 10, []Waiting{{Class: bounded, Whole: true, Output: 1, Logprobs: 1 << 22}}, nil, 140 * s, Hedge},
		{"beside all log probabilities of a prompt, for longer than that takes", stream, s / 10, []Waiting{{Class: bounded, Whole: true, Output: 1, Logprobs: 1 << 22}}, nil, 144 * s, GiveUp},
		{"beside all log probabilities of a very long prompt", stream, s / 10, []Waiting{{Class: bounded, Whole: true, Output: 1, Logprobs: 1 << 40}}, nil, 360 * s, GiveUp},
		{"for too long, but for a recording beside it", stream, s / 10, []Waiting{recording}, nil, time.Hour, Hedge},
		{"for too long, while no other worker shows life", stream, s / 10, nil, func(b *bench) { b.pass(2 * othersWithin) }, 10 * time.Minute, Hedge},
		{"without ejection", stream, s / 10, nil, func(b *bench) { b.settings.EjectAfter = 0 }, time.Hour, Wait},
		{"without a limit", stream, s / 10, nil, func(b *bench) { b.settings.SilenceTimeout = 0 }, time.Hour, Hedge},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(4)
			b.good(1)
			if test.usual > 0 {
				b.usual(test.q.Class, test.usual)
			}
			if test.prepare != nil {
				test.prepare(b)
			}
			all := []Waiting{b.waits(0, test.q, test.silent)}
			for _, other := range test.also {
				all = append(all, b.waits(0, other, test.silent))
			}
			verdict := b.judged(all...)
			if verdict != test.want || b.IsSilent(key(0)) != (verdict == Avoid || verdict == Hedge) && !test.q.Trial || (b.level(0) == Out) != (verdict == GiveUp) {
				t.Errorf("verdict %d, want %d; silent: %v, level %d", verdict, test.want, b.IsSilent(key(0)), b.level(0))
			}
			if n := b.Records(b.now)[0].Ejections[Stuck]; n > 0 != (verdict == GiveUp) {
				t.Errorf("%d ejections", n)
			}
		})
	}
}

// TestASilentWorkerIsAvoidedUntilItShowsLife: it gets one request at times, and is not ejected.
func TestASilentWorkerIsAvoidedUntilItShowsLife(t *testing.T) {
	b := newBench(4)
	b.usual(0, 100*time.Millisecond)
	b.judged(b.waits(0, Waiting{}, 3*time.Second))
	for _, pause := range []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 20 * time.Second} {
		if b.level(0) != Silent || !b.IsOut(key(0), b.now) || b.Ejected(key(0), b.now) {
			t.Fatalf("level %d", b.level(0))
		}
		b.pass(pause - time.Millisecond)
		if b.Begin(key(0), 0, b.now) {
			t.Fatalf("a trial after less than %s", pause)
		}
		b.pass(time.Millisecond)
		if !b.Begin(key(0), 0, b.now) || b.Begin(key(0), 0, b.now) {
			t.Fatalf("no single trial after %s", pause)
		}
	}
	b.Lives(key(0), 1, b.now)
	if r := b.Records(b.now)[0]; b.level(0) != In || !b.Quiet() || r.Row != 0 || r.Requests != 0 || len(r.Ejections) > 0 {
		t.Errorf("level %d, %+v", b.level(0), r)
	}
	b.pass(time.Second)
	b.judged(b.waits(0, Waiting{}, 3*time.Second))
	if b.pass(5 * time.Second); b.level(0) != In {
		t.Error("a silence that began before the last sign of life counts")
	}
}

// TestARequestBeginsElsewhereIfHealthChecksAreMissed, however little is known of such requests.
// TestAPausedEngineIsNotSilent however long its requests wait and its health checks are missed. From when it goes on, its
// silence counts.
func TestAPausedEngineIsNotSilent(t *testing.T) {
	b := newBench(2)
	b.usual(0, time.Second/10)
	b.Rest(key(0), true, b.now)
	if _, busy := b.Missed(key(0).Worker, 1, b.now); busy.Before(b.now) || b.IsSilent(key(0)) {
		t.Errorf("it is avoided for its health checks, busy until %v", busy)
	}
	if got := b.judged(b.waits(0, Waiting{}, time.Hour)); got != Wait || b.IsSilent(key(0)) {
		t.Errorf("verdict %d while it is paused", got)
	}
	waiting := b.waits(0, Waiting{}, time.Hour)
	b.Rest(key(0), false, b.now)
	b.now = b.now.Add(2 * time.Second)
	if got := b.judged(waiting); got != Wait {
		t.Errorf("verdict %d just after the pause", got)
	}
	b.now = b.now.Add(time.Minute)
	if got := b.judged(waiting); got < Avoid {
		t.Errorf("verdict %d a minute after the pause", got)
	}
}

func TestARequestBeginsElsewhereIfHealthChecksAreMissed(t *testing.T) {
	b := newBench(2)
	b.Missed(key(0).Worker, 1, b.now)
	story := Waiting{Class: ClassOf(kv.LegWhole, true, 0, Generate), Whole: true}
	for silent, want := range map[time.Duration]Verdict{9 * time.Second: Wait, 10 * time.Second: Hedge} {
		if got := b.judged(b.waits(0, story, silent)); got != want {
			t.Errorf("after %s: verdict %d, want %d", silent, got, want)
		}
	}
	long := story
	long.Tokens = 5000
	if got := b.judged(b.waits(0, long, 49*time.Second)); got != Wait {
		t.Errorf("beside a long prompt: verdict %d", got)
	}
}
