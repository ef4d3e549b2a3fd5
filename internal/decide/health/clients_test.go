package health

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
)

// sentBy is a client's attempt, sent to a worker now.
func (b *bench) sentBy(client string, i int) Attempt {
	a := b.sent(i)
	a.Client = client
	return a
}

// failBy records a client's failed request on a worker, goodBy a successful one.
func (b *bench) failBy(client string, i int, kind Kind) {
	a := b.sentBy(client, i)
	b.pass(time.Millisecond)
	b.Failed(a, kind, "test", b.now)
}

func (b *bench) goodBy(client string, i int) {
	a := b.sentBy(client, i)
	b.pass(time.Millisecond)
	b.Succeeded(a, b.now)
}

func TestWhoIsDiscredited(t *testing.T) {
	both := func(b *bench, bad func(i int)) {
		for range 3 {
			for i := range 4 {
				bad(i)
				b.goodBy("good", i)
			}
		}
	}
	for _, test := range []struct {
		name string
		do   func(b *bench)
		want bool
	}{
		{"one whose requests fail where others' do not", func(b *bench) { both(b, func(i int) { b.failBy("bad", i, Status) }) }, true},
		{"one whose connections break", func(b *bench) { both(b, func(i int) { b.failBy("bad", i, Dropped) }) }, true},
		{"one whose answers break off", func(b *bench) { both(b, func(i int) { b.failBy("bad", i, Broken) }) }, true},
		{"one that has workers ask for pauses", func(b *bench) { both(b, func(i int) { b.Pressed(b.sentBy("bad", i), time.Minute, b.now) }) }, true},
		{"one whose questions are not answered", func(b *bench) {
			both(b, func(i int) {
				b.pass(time.Millisecond)
				b.AskFailed(Attempt{Worker: key(i), Generation: 1, Sent: b.now, Client: "bad"}, b.now)
			})
		}, true},
		{"one that fails at a third", func(b *bench) {
			n := 0
			both(b, func(i int) {
				if n++; n%3 == 0 {
					b.failBy("bad", i, Status)
				} else {
					b.goodBy("bad", i)
				}
			})
		}, true},
		{"one whose connections are refused", func(b *bench) { both(b, func(i int) { b.failBy("bad", i, Refused) }) }, false},
		{"one that finds workers misconfigured", func(b *bench) { both(b, func(i int) { b.failBy("bad", i, Misconfigured) }) }, false},
		{"one that fails at one worker", func(b *bench) {
			for range 10 {
				b.failBy("bad", 0, Status)
				for i := range 4 {
					b.goodBy("good", i)
				}
			}
		}, false},
		{"one that is alone", func(b *bench) {
			for range 10 {
				for i := range 4 {
					b.failBy("bad", i, Status)
					b.goodBy("bad", i)
				}
			}
		}, false},
		{"one before whose failures the others were served", func(b *bench) {
			for i := range 4 {
				b.goodBy("good", i)
			}
			for range 3 {
				for i := range 4 {
					b.failBy("bad", i, Status)
				}
			}
		}, false},
		{"one that fails as often as the others", func(b *bench) {
			for n := range 40 {
				for i := range 2 {
					for _, client := range []string{"bad", "good"} {
						if n%2 == 0 {
							b.failBy(client, i, Status)
						} else {
							b.goodBy(client, i)
						}
					}
				}
			}
		}, false},
		{"one that is not known", func(b *bench) { both(b, func(i int) { b.fail(i, Status) }) }, false},
		{"one of which it was long ago", func(b *bench) {
			both(b, func(i int) { b.failBy("bad", i, Status) })
			b.pass(discreditedFor)
		}, false},
		{"one that is served again like others", func(b *bench) {
			both(b, func(i int) { b.failBy("bad", i, Status) })
			for range 40 {
				for i := range 4 {
					b.goodBy("bad", i)
				}
			}
			b.failBy("bad", 0, Status)
		}, false},
		{"one at workers that have restarted since", func(b *bench) {
			b.failBy("bad", 0, Status)
			b.failBy("bad", 1, Status)
			b.Leave(key(0), b.now)
			b.Join(key(0), 1, kv.RoleBoth, b.now)
			b.goodBy("good", 0)
			b.goodBy("good", 1)
			b.failBy("bad", 1, Status)
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(4)
			test.do(b)
			if got := b.Discredited("bad", b.now) || b.Discredited("", b.now); got != test.want {
				t.Errorf("discredited: %v, want %v", got, test.want)
			}
			if b.Discredited("good", b.now) {
				t.Error("the other is")
			}
			if n := b.CountDiscredited(b.now); (n == 1) != test.want {
				t.Errorf("%d clients are counted", n)
			}
		})
	}
}

// TestRanksAreNoWitnessesForEachOther: they share a server, which may be the cause.
func TestRanksAreNoWitnessesForEachOther(t *testing.T) {
	b := newBench(1)
	second := key(0)
	second.Rank = 1
	b.Join(second, 1, kv.RoleBoth, b.now)
	for range 3 {
		for _, k := range []Attempt{{Worker: key(0), Generation: 1}, {Worker: second, Generation: 1}} {
			b.pass(time.Millisecond)
			k.Sent = b.now
			bad, good := k, k
			bad.Client, good.Client = "bad", "good"
			b.Failed(bad, Engine, "test", b.now)
			b.Succeeded(good, b.now)
		}
	}
	if b.Discredited("bad", b.now) {
		t.Error("two ranks of one server are said to be two workers")
	}
}

// TestWhatADiscreditedClientDidIsUndone: until others were served there, the workers seemed
// to be the cause.
func TestWhatADiscreditedClientDidIsUndone(t *testing.T) {
	b := newBench(6)
	for range 3 {
		b.failBy("bad", 0, Status) // out
		b.failBy("bad", 3, Status) // out, and not for it alone
		b.fail(3, Status)
	}
	b.failBy("bad", 1, Status)
	b.failBy("bad", 1, Status) // nearly
	b.Pressed(b.sentBy("bad", 2), time.Minute, b.now)
	b.Pressed(b.sentBy("good", 4), time.Minute, b.now)
	b.Pressed(b.sentBy("bad", 4), time.Minute, b.now)
	for i, want := range []Level{Out, In, Held, Out, Held, In} {
		if got := b.level(i); got != want {
			t.Fatalf("worker %d has level %d before, want %d", i, got, want)
		}
	}
	b.goodBy("good", 1)
	b.failBy("bad", 5, Status)
	b.goodBy("good", 5)
	b.failBy("bad", 5, Status)
	if !b.Discredited("bad", b.now) {
		t.Fatal("it is not discredited")
	}
	for i, want := range []Level{In, In, In, Out, Held, In} {
		if got := b.level(i); got != want {
			t.Errorf("worker %d has level %d after, want %d", i, got, want)
		}
	}
	for range 10 {
		for i := range 6 {
			b.failBy("bad", i, Stuck)
			b.Pressed(b.sentBy("bad", i), time.Minute, b.now)
		}
	}
	for i, want := range []Level{In, In, In, Out, Held, In} {
		if got := b.level(i); got != want {
			t.Errorf("worker %d has level %d in the end, want %d", i, got, want)
		}
	}
	b.pass(5 * time.Second)
	trial := b.sentBy("bad", 3)
	if b.Failed(trial, Status, "test", b.now); !trial.Trial || b.workers[key(3)].until.After(b.now) {
		t.Error("a trial that it fails prolongs an ejection")
	}
	b.goodBy("good", 3)
	if b.level(3) == Out {
		t.Error("a trial of another client does not bring it back")
	}
	b.usual(0, 100*time.Millisecond)
	q := b.waits(1, Waiting{Attempt: b.sentBy("bad", 1)}, time.Hour)
	if verdict := b.judged(q); verdict != Wait {
		t.Errorf("its silence has the verdict %d", verdict)
	}
}

// TestTwoClientsFindAWorkerThatFailsNowAndThen: both fail on two of four workers, which
// sometimes serve the other. Neither may stay discredited.
func TestTwoClientsFindAWorkerThatFailsNowAndThen(t *testing.T) {
	for seed := range uint64(20) {
		b := newBench(4)
		random := rand.New(rand.NewPCG(seed, 1))
		first := 0
		for n := 1; n <= 2000 && first == 0; n++ {
			i, client := random.IntN(4), []string{"a", "b"}[random.IntN(2)]
			if b.level(i) == Out {
				continue
			}
			if i < 2 && random.Float64() < 0.4 {
				b.failBy(client, i, Status)
			} else {
				b.goodBy(client, i)
			}
			b.pass(10 * time.Millisecond)
			if out, _ := b.out(kv.RoleBoth); out == 2 {
				first = n
			}
		}
		if first == 0 || !b.IsOut(key(0), b.now) || !b.IsOut(key(1), b.now) {
			t.Errorf("seed %d: after %d requests the two are not out", seed, 2000)
		} else if first > 600 {
			t.Errorf("seed %d: the two are out after %d requests", seed, first)
		}
	}
}

func TestFollowedClientsAreBounded(t *testing.T) {
	b := newBench(3 * followedWorkers)
	for n := range 3 * followedClients {
		for i := range 3 * followedWorkers {
			b.failBy(fmt.Sprint(n), i, Status)
		}
	}
	if n := len(b.clients); n > followedClients {
		t.Errorf("%d clients are followed", n)
	}
	for name, c := range b.clients {
		if len(c.visits) > followedWorkers {
			t.Errorf("%s is followed at %d workers", name, len(c.visits))
		}
	}
	b.pass(followedFor)
	b.failBy("last", 0, Status)
	if n := len(b.clients); n != 1 {
		t.Errorf("%d clients are followed after %s", n, followedFor)
	}
}

// TestOneClientsFailuresTakeNoWorkerOut drives a detector with a client that fails
// everywhere, one that fails on failing workers only, and one that is served elsewhere.
func TestOneClientsFailuresTakeNoWorkerOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBench(6)
		ill := rapid.IntRange(0, 2).Draw(t, "ill") // workers, the first ones
		inARow := make([]int, ill)                 // failures of those since they were in, while others did not fail alike
		kind := rapid.SampledFrom([]Kind{Status, Engine, Dropped, Timeout})
		t.Repeat(map[string]func(*rapid.T){
			"bad": func(t *rapid.T) {
				for range rapid.IntRange(1, 5).Draw(t, "n") {
					b.failBy("bad", rapid.IntRange(0, 5).Draw(t, "worker"), kind.Draw(t, "kind"))
				}
			},
			"good": func(t *rapid.T) {
				client := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "client")
				if i := rapid.IntRange(0, 5).Draw(t, "worker"); i < ill {
					if inARow[i]++; b.level(i) == Out || b.failAlike(key(i), b.workers[key(i)], b.now) {
						inARow[i] = 0
					}
					b.failBy(client, i, kind.Draw(t, "kind"))
				} else {
					b.goodBy(client, i)
				}
			},
			"time": func(t *rapid.T) { b.pass(time.Duration(rapid.IntRange(1, 2000).Draw(t, "ms")) * time.Millisecond) },
			"": func(t *rapid.T) {
				if out, _ := b.out(kv.RoleBoth); out > 3 {
					t.Fatalf("%d of 6 are out", out)
				}
				for _, name := range []string{"a", "b"} {
					if b.Discredited(name, b.now) {
						t.Fatalf("%s is discredited", name)
					}
				}
				discredited := b.Discredited("bad", b.now)
				for i := range 6 {
					w := b.workers[key(i)]
					if i >= ill && discredited && (w.phase == phaseOut || w.row > 0) {
						t.Fatalf("worker %d is well and has phase %d, %d failures in a row", i, w.phase, w.row)
					}
					if i < ill && w.phase == phaseOut {
						inARow[i] = 0
					}
					if i < ill && inARow[i] >= 3 && w.spared.IsZero() {
						t.Fatalf("worker %d is in after %d failures in a row", i, inARow[i])
					}
				}
				for name, c := range b.clients {
					for _, v := range c.visits {
						if rest := v.worker.seen.minus(v.before).minus(v.counted); b.workers[v.key] == v.worker && (rest.well < 0 || rest.failed < 0 || v.own.well < v.counted.well || v.own.failed < v.counted.failed) {
							t.Fatalf("%s at %v: %+v of others, %+v of its own, %+v of it counted", name, v.key, rest, v.own, v.counted)
						}
					}
				}
			},
		})
		// Once others are served beside it, the one that fails is known.
		for range 3 {
			for i := ill; i < 6; i++ {
				b.failBy("bad", i, Status)
				b.goodBy("a", i)
			}
		}
		if !b.Discredited("bad", b.now) {
			t.Fatal("the one that fails everywhere is not known in the end")
		}
	})
}

func BenchmarkSucceeded(b *testing.B) {
	for _, followed := range []int{0, followedClients} {
		b.Run(fmt.Sprintf("followed=%d", followed), func(b *testing.B) {
			bench := newBench(8)
			for n := range followed {
				bench.failBy(fmt.Sprint(n), n%8, Status)
				bench.now = time.Unix(1_000_000, 0)
			}
			a := bench.sentBy("7", 7)
			for b.Loop() {
				bench.Succeeded(a, bench.now)
			}
		})
	}
}
