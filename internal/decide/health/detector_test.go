package health

import (
	"bytes"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// bench is a detector over some workers with a clock that the test moves.
type bench struct {
	*Detector
	now    time.Time
	random *rand.Rand
}

func newBench(workers int) *bench {
	b := &bench{Detector: New(testkit.Defaults[Settings]()), now: time.Unix(1_000_000, 0), random: rand.New(rand.NewPCG(1, 1))}
	for i := range workers {
		b.Join(key(i), 1, kv.RoleBoth, b.now)
	}
	return b
}

func key(i int) kv.WorkerKey { return kv.WorkerKey{Worker: uint64(i)} }

func (b *bench) pass(d time.Duration) { b.now = b.now.Add(d) }

// sent is an attempt that is sent to a worker now.
func (b *bench) sent(i int) Attempt {
	return Attempt{Worker: key(i), Generation: 1, Sent: b.now, Trial: b.Begin(key(i), 0, b.now)}
}

// fail has a worker fail one request, and good answer one.
func (b *bench) fail(i int, kind Kind) {
	a := b.sent(i)
	b.pass(time.Millisecond)
	b.Failed(a, kind, "test", b.now)
}

func (b *bench) good(i int) {
	a := b.sent(i)
	b.pass(time.Millisecond)
	b.Succeeded(a, b.now)
}

func (b *bench) level(i int) Level { return b.Level(key(i), b.now, b.random) }

func TestWhatTakesAWorkerOut(t *testing.T) {
	tests := []struct {
		name string
		do   func(b *bench)
		want Level
	}{
		{"nothing", func(*bench) {}, In},
		{"two failures", func(b *bench) { b.fail(0, Status); b.fail(0, Status) }, In},
		{"three failures in a row", func(b *bench) { b.fail(0, Status); b.fail(0, Engine); b.fail(0, Refused) }, Out},
		{"two answers that broke off", func(b *bench) { b.fail(0, Broken); b.fail(0, Broken) }, Out},
		{"an answer that broke off", func(b *bench) { b.fail(0, Broken) }, In},
		{"three failures with an answer between", func(b *bench) { b.fail(0, Status); b.fail(0, Status); b.good(0); b.fail(0, Status) }, In},
		{"what others accept", func(b *bench) { b.Suspect(b.sent(0), 401, b.now); b.Convict(b.sent(0), 401, b.now) }, Out},
		{"a suspicion", func(b *bench) { b.Suspect(b.sent(0), 404, b.now) }, Held},
		{"a suspicion that is over", func(b *bench) { b.Suspect(b.sent(0), 404, b.now); b.Acquit(b.sent(0), 404, true, b.now) }, In},
		{"a suspicion on which nobody decides", func(b *bench) { b.Suspect(b.sent(0), 404, b.now); b.pass(suspectFor) }, In},
		{"a pause", func(b *bench) { b.Pressed(b.sent(0), 2*time.Second, b.now); b.pass(time.Second) }, Held},
		{"a pause that is over", func(b *bench) { b.Pressed(b.sent(0), 2*time.Second, b.now); b.pass(2 * time.Second) }, In},
		{"a pause without end", func(b *bench) { b.Pressed(b.sent(0), time.Hour, b.now); b.pass(LongestPause) }, In},
		{"a question that it did not answer", func(b *bench) {
			asked := b.now
			b.pass(time.Second)
			b.AskFailed(Attempt{Worker: key(0), Generation: 1, Sent: asked}, b.now)
		}, Silent},
		{"three questions for which its server was too busy", func(b *bench) {
			for range 3 {
				asked := b.now
				b.pass(askedSlowly)
				b.AskFailed(Attempt{Worker: key(0), Generation: 1, Sent: asked}, b.now)
			}
		}, Silent},
		{"three questions that it refused", func(b *bench) {
			for range 3 {
				b.AskFailed(Attempt{Worker: key(0), Generation: 1, Sent: b.now}, b.now)
			}
		}, Out},
		{"a question during which it answered another request", func(b *bench) {
			asked := b.now
			b.good(0)
			b.AskFailed(Attempt{Worker: key(0), Generation: 1, Sent: asked}, b.now)
		}, In},
		{"a question that it did not answer, before an answer", func(b *bench) {
			asked, a := b.now, b.sent(0)
			b.pass(time.Second)
			b.AskFailed(Attempt{Worker: key(0), Generation: 1, Sent: asked}, b.now)
			b.Heard(a, b.now)
		}, In},
		{"a question that it did not answer, before a pause and an answer", func(b *bench) {
			asked, a := b.now, b.sent(0)
			b.pass(time.Second)
			b.AskFailed(Attempt{Worker: key(0), Generation: 1, Sent: asked}, b.now)
			b.Pressed(b.sent(0), 2*time.Second, b.now)
			b.Heard(a, b.now)
		}, Held},
		{"a pause before a question that it did not answer, and an answer", func(b *bench) {
			asked, a := b.now, b.sent(0)
			b.pass(time.Second)
			b.Pressed(b.sent(0), 2*time.Second, b.now)
			b.AskFailed(Attempt{Worker: key(0), Generation: 1, Sent: asked}, b.now)
			b.Heard(a, b.now)
		}, Held},
		{"failures of its last incarnation", func(b *bench) {
			for range 5 {
				b.Failed(Attempt{Worker: key(0), Sent: b.now}, Status, "test", b.now)
			}
		}, In},
		{"one failure in three, as the others", func(b *bench) {
			for n := range 90 {
				for i := range 4 {
					if n%3 == 0 {
						b.fail(i, Status)
					} else {
						b.good(i)
					}
				}
			}
		}, In},
		{"one failure in three, which the others do not have", func(b *bench) {
			for n := 0; n < 30 && b.level(0) == In; n++ {
				for i := range 4 {
					if i == 0 && n%3 == 0 {
						b.fail(i, Status)
					} else {
						b.good(i)
					}
				}
			}
		}, Out},
		{"one failure in ten", func(b *bench) {
			for n := range 100 {
				for i := range 4 {
					if i == 0 && n%10 == 0 {
						b.fail(i, Status)
					} else {
						b.good(i)
					}
				}
			}
		}, In},
		{"failures that were taken back", func(b *bench) {
			for range 5 {
				a := b.sent(0)
				b.Failed(a, Status, "test", b.now)
				b.Forgive(a, b.now)
			}
		}, In},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(4)
			test.do(b)
			if got := b.level(0); got != test.want {
				t.Errorf("level %d, want %d", got, test.want)
			}
			for i := 1; i < 4; i++ {
				if got := b.level(i); got != In {
					t.Errorf("worker %d has level %d", i, got)
				}
			}
		})
	}
}

func TestPausesOfUnknownLengthGrow(t *testing.T) {
	b := newBench(2)
	for n, want := range []time.Duration{1, 2, 4, 8, 8} {
		b.pass(time.Millisecond)
		first, second := b.sent(0), b.sent(0)
		b.pass(time.Millisecond)
		b.Pressed(first, 0, b.now)
		b.pass(100 * time.Millisecond)
		b.Pressed(second, 0, b.now) // which was sent before
		b.pass(want*time.Second - 101*time.Millisecond)
		if b.level(0) != Held {
			t.Errorf("pause %d is over before %d s", n, want)
		}
		b.pass(2 * time.Millisecond)
		if b.level(0) != In {
			t.Errorf("pause %d is not over after %d s", n, want)
		}
	}
	b.good(0)
	b.pass(time.Millisecond)
	b.Pressed(b.sent(0), 0, b.now)
	if b.pass(time.Second); b.level(0) != In {
		t.Error("after an answer the pause is longer than a second")
	}
}

func TestEjectionsGrowAndShrinkAgain(t *testing.T) {
	b := newBench(4)
	for range 3 {
		b.fail(0, Status)
	}
	for n, want := range []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 20 * time.Second} {
		out := b.now
		b.pass(want - 20*time.Millisecond)
		if _, due := b.TrialDue(key(0), b.now); due {
			t.Fatalf("ejection %d: its trial is due after %s", n, b.now.Sub(out))
		}
		b.pass(20 * time.Millisecond)
		if _, due := b.TrialDue(key(0), b.now); !due {
			t.Fatalf("ejection %d: no trial is due after %s", n, b.now.Sub(out))
		}
		trial := b.sent(0)
		if !trial.Trial {
			t.Fatal("the request is no trial")
		}
		if b.sent(0).Trial {
			t.Fatal("two requests are trials")
		}
		b.Failed(trial, Status, "test", b.now)
	}
	b.pass(20 * time.Second)
	b.good(0)
	if b.level(0) == Out {
		t.Error("it is out after a trial that went well")
	}
	b.pass(testkit.Defaults[Settings]().SlowStart)
	if got := b.level(0); got != In || !b.Quiet() {
		t.Errorf("level %d after the slow start, quiet %v", got, b.Quiet())
	}
	b.pass(5 * wellFor)
	for range 3 {
		b.fail(0, Status)
	}
	b.pass(5 * time.Second)
	if _, due := b.TrialDue(key(0), b.now); !due {
		t.Error("after some minutes in, an ejection is no shorter")
	}
}

func TestATrialWithoutAResultIsMadeAgain(t *testing.T) {
	b := newBench(4)
	for range 3 {
		b.fail(0, Status)
	}
	b.pass(5 * time.Second)
	b.Ended(b.sent(0))
	if !b.sent(0).Trial {
		t.Error("after a trial whose client left there is no other")
	}
	b.pass(trialLimit)
	if !b.sent(0).Trial {
		t.Error("after a trial that goes on for ever there is no other")
	}
}

func TestAStreamOnTrialNeedNotEnd(t *testing.T) {
	b := newBench(4)
	for range 3 {
		b.fail(0, Broken)
	}
	b.pass(5 * time.Second)
	trial := b.sent(0)
	b.Heard(trial, b.now)
	if b.level(0) != Out {
		t.Error("the first byte alone brought it back")
	}
	b.pass(trialFlows)
	if b.level(0) == Out {
		t.Error("it is out although its stream flows")
	}
	b.pass(time.Second)
	b.Failed(trial, Broken, "test", b.now)
	if b.level(0) != Out {
		t.Error("it is in although its stream broke off")
	}
}

func TestItsShareGrowsSlowly(t *testing.T) {
	b := newBench(4)
	for range 3 {
		b.fail(0, Status)
	}
	b.pass(5 * time.Second)
	b.good(0)
	b.pass(time.Second)
	before := 0
	for second := 1; second <= 4; second++ {
		in := 0
		for range 1000 {
			if b.level(0) == In {
				in++
			}
		}
		if want := 200 * second; in < want-60 || in > want+60 || in <= before {
			t.Errorf("after %d of 5 s it takes %d of 1,000 requests, want some %d", second, in, want)
		}
		before = in
		b.pass(time.Second)
	}
	b.fail(1, Status)
	if b.level(1) != In {
		t.Error("one failure of another took that out")
	}
}

func TestOneFailureInSlowStartIsEnough(t *testing.T) {
	b := newBench(4)
	for range 3 {
		b.fail(0, Status)
	}
	early := Attempt{Worker: key(0), Generation: 1, Sent: b.now}
	b.pass(5 * time.Second)
	b.good(0)
	b.Failed(early, Status, "test", b.now)
	if b.level(0) == Out {
		t.Error("a failure of a request from before took it out again")
	}
	b.fail(0, Status)
	if b.level(0) != Out {
		t.Error("a failure did not take it out again")
	}
}

func TestRanksShareTheirServer(t *testing.T) {
	for _, test := range []struct {
		kind Kind
		want bool
	}{{Refused, true}, {Misconfigured, true}, {Status, false}, {Broken, false}, {Stuck, false}} {
		b := newBench(4)
		other := kv.WorkerKey{Worker: 0, Rank: 1}
		b.Join(other, 1, kv.RoleBoth, b.now)
		for range 3 {
			b.fail(0, test.kind)
		}
		if out := b.Level(other, b.now, b.random) == Out; out != test.want {
			t.Errorf("%s: the other rank is out: %v", test.kind, out)
		}
	}
}

func TestANewIncarnationHasACleanRecord(t *testing.T) {
	b := newBench(2)
	for range 3 {
		b.fail(0, Status)
	}
	b.Leave(key(0), b.now)
	if !b.Quiet() {
		t.Error("a worker that is gone counts")
	}
	b.Join(key(0), 2, kv.RoleBoth, b.now)
	if b.level(0) != In {
		t.Error("the new incarnation is out")
	}
	if n := b.Records(b.now)[0].Ejections[Status]; n != 1 {
		t.Errorf("%d ejections are counted, want 1", n)
	}
}

func TestTheLogSaysWhoIsOut(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	b := newBench(4)
	b.Convict(b.sent(2), 401, b.now)
	b.pass(5 * time.Second)
	b.good(2)
	for range 3 {
		b.fail(0, Broken)
	}
	for _, n := range b.TakeNews() {
		n.Log(log, map[uint64]string{0: "0", 2: "pod-c"}[n.Worker.Worker])
	}
	for _, want := range []string{"level=ERROR msg=\"worker pod-c: MISCONFIGURED: it answers 401", "worker pod-c: returned to service", "worker 0: ejected for 5s: 2 consecutive failures", "reason=broken"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log lacks %q:\n%s", want, &out)
		}
	}
	if b.TakeNews() != nil {
		t.Error("news are told twice")
	}
}

// TestAPauseAskedForBeforeAGoodAnswerIsTheFirst: the answer to an attempt that was sent
// before the last pause may come after a good one.
func TestAPauseAskedForBeforeAGoodAnswerIsTheFirst(t *testing.T) {
	b := newBench(2)
	early, good, late := b.sent(0), b.sent(0), b.sent(0)
	b.Pressed(early, 0, b.now)
	b.pass(time.Second)
	b.Succeeded(good, b.now)
	b.Pressed(late, 0, b.now)
	if held := b.workers[key(0)].held.Sub(b.now); held != firstGuess {
		t.Errorf("the worker is held for %s, want %s", held, firstGuess)
	}
}

// TestDetectorKeepsItsInvariants drives a detector with random calls.
func TestDetectorKeepsItsInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBench(4)
		var flying []Attempt
		longest := b.settings.MaxEjectionTime
		t.Repeat(map[string]func(*rapid.T){
			"send": func(t *rapid.T) { flying = append(flying, b.sent(rapid.IntRange(0, 3).Draw(t, "worker"))) },
			"end": func(t *rapid.T) {
				if len(flying) == 0 {
					return
				}
				i := rapid.IntRange(0, len(flying)-1).Draw(t, "attempt")
				a := flying[i]
				flying = append(flying[:i], flying[i+1:]...)
				switch rapid.IntRange(0, 6).Draw(t, "how") {
				case 0, 1:
					b.Succeeded(a, b.now)
				case 2, 3:
					b.Failed(a, Kind(rapid.IntRange(0, int(kinds)-1).Draw(t, "kind")), "test", b.now)
				case 4:
					b.Pressed(a, time.Duration(rapid.IntRange(0, 100).Draw(t, "pause"))*time.Second, b.now)
				case 5:
					if b.Suspect(a, 404, b.now) {
						b.Acquit(a, 404, rapid.Bool().Draw(t, "agreed"), b.now)
					}
				default:
					b.Ended(a)
				}
			},
			"heard": func(t *rapid.T) {
				if len(flying) > 0 {
					b.Heard(flying[0], b.now)
				}
			},
			"time": func(t *rapid.T) { b.pass(time.Duration(rapid.IntRange(1, 8000).Draw(t, "ms")) * time.Millisecond) },
			"down": func(t *rapid.T) { b.Leave(key(rapid.IntRange(0, 3).Draw(t, "worker")), b.now) },
			"up":   func(t *rapid.T) { b.Join(key(rapid.IntRange(0, 3).Draw(t, "worker")), 1, kv.RoleBoth, b.now) },
			"": func(t *rapid.T) {
				odd, spared := 0, 0
				if out, all := b.out(kv.RoleBoth); out > max(1, all/2) || all == 1 && out > 0 {
					t.Fatalf("%d of %d workers are out", out, all)
				}
				for k, w := range b.workers {
					if w.phase != phaseIn || !w.held.IsZero() || !w.spared.IsZero() {
						odd++
					}
					if !w.spared.IsZero() {
						spared++
					}
					switch {
					case w.phase == phaseOut && w.until.Sub(b.now) > longest:
						t.Fatalf("worker %v is out for %s more", k, w.until.Sub(b.now))
					case w.phase == phaseOut && !w.spared.IsZero():
						t.Fatalf("worker %v is out and spared", k)
					case w.phase != phaseOut && (!w.trial.IsZero() || !w.trialHeard.IsZero()):
						t.Fatalf("worker %v is on trial but not out", k)
					case w.held.Sub(b.now) > LongestPause:
						t.Fatalf("worker %v is held for %s more", k, w.held.Sub(b.now))
					case w.row < 0:
						t.Fatalf("worker %v has %d failures in a row", k, w.row)
					}
					for _, s := range w.window {
						if s.well < 0 || s.failed < 0 {
							t.Fatalf("worker %v counts %+v", k, s)
						}
					}
				}
				if odd != b.odd || spared != b.spared {
					t.Fatalf("%d workers are not simply in and %d spared, %d and %d are counted", odd, spared, b.odd, b.spared)
				}
				if len(b.news) > maxNews {
					t.Fatalf("%d news are kept", len(b.news))
				}
			},
		})
		for i := range 4 {
			b.Join(key(i), 1, kv.RoleBoth, b.now)
		}
		// Whatever was: after good answers and some time every worker is in again.
		for range 200 {
			b.pass(500 * time.Millisecond)
			for i := range 4 {
				b.good(i)
			}
		}
		for i := range 4 {
			if got := b.level(i); got != In {
				t.Fatalf("worker %d has level %d in the end", i, got)
			}
		}
		if !b.Quiet() {
			t.Fatal("the detector is not quiet in the end")
		}
	})
}

func TestSettingsThatMakeNoSense(t *testing.T) {
	for _, test := range []struct {
		change func(*Settings)
		want   string
	}{
		{func(*Settings) {}, ""},
		{func(s *Settings) { s.EjectAfter = 0; s.EjectionTime = 0 }, ""},
		{func(s *Settings) { s.EjectAfter = -1 }, "--eject-after"},
		{func(s *Settings) { s.EjectionTime = 0 }, "--ejection-time"},
		{func(s *Settings) { s.MaxEjectionTime = time.Second }, "--max-ejection-time"},
		{func(s *Settings) { s.MaxEjectionPercent = 101 }, "--max-ejection-percent"},
		{func(s *Settings) { s.SlowStart = -1 }, "--slow-start"},
	} {
		s := testkit.Defaults[Settings]()
		test.change(&s)
		if err := s.Validate(); (err == nil) != (test.want == "") || err != nil && !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%+v: %v, want an error about %q", s, err, test.want)
		}
	}
}

func TestHintsHoldAWorkerForAFirstEjectionAtMost(t *testing.T) {
	settings := testkit.Defaults[Settings]()
	now := time.Unix(1_000_000, 0)
	d := New(settings)
	key := func(i int) kv.WorkerKey { return kv.WorkerKey{Worker: uint64(i)} }
	for i := range 4 {
		d.Join(key(i), 0, kv.RoleBoth, now)
	}
	if d.Hint(key(9), time.Second, now) || d.Hint(key(0), 0, now) {
		t.Error("a hint of an unknown worker, or of no time, was taken")
	}
	if !d.Hint(key(0), time.Hour, now) || !d.IsOut(key(0), now) || d.Ejected(key(0), now) {
		t.Fatal("a hint was not taken, or ejects")
	}
	if d.Hint(key(0), time.Hour, now.Add(time.Second)) {
		t.Error("a hint prolongs another one")
	}
	if !d.Hint(key(1), time.Second, now) || d.Hint(key(2), time.Second, now) {
		t.Error("hints hold less, or more, than --max-ejection-percent of the workers")
	}
	if d.IsOut(key(1), now.Add(time.Second)) || !d.IsOut(key(0), now.Add(settings.EjectionTime-1)) || d.IsOut(key(0), now.Add(settings.EjectionTime)) {
		t.Error("a hint holds for another time than it says, --ejection-time at most")
	}
	settings.EjectAfter = 0
	d = New(settings)
	d.Join(key(0), 0, kv.RoleBoth, now)
	d.Join(key(1), 0, kv.RoleBoth, now)
	if d.Hint(key(0), time.Second, now) {
		t.Error("a hint was taken though failures take no worker out")
	}
}
