package router

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// NewClockedRouter is NewTestRouter for policy kv with a clock of its own.
func NewClockedRouter(t testing.TB, workers int, knobs Settings) (*Router, *testkit.StandingClock) {
	t.Helper()
	return newClockedRouter(t, "kv", workers, knobs)
}

// newClockedRouter is NewClockedRouter for any policy.
func newClockedRouter(t testing.TB, rule string, workers int, knobs Settings) (*Router, *testkit.StandingClock) {
	t.Helper()
	clock := new(testkit.StandingClock)
	r := New(knobs, Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, rule), BlockSize: testkit.BlockSize, Seed: 1})
	r.now = clock.Now
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Models: []string{"m"}})
	}
	return r, clock
}

// MustRoute routes a request and fails the test if no worker is found.
func MustRoute(t testing.TB, r *Router, request Request) Decision {
	t.Helper()
	d, err := r.Route(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// expectLoad compares worker 0's books.
func expectLoad(t testing.TB, r *Router, prefill, blocks, requests int) {
	t.Helper()
	want := WorkerLoad{PotentialPrefillTokens: prefill, PotentialDecodeBlocks: blocks, ActiveRequests: requests}
	if got := r.Loads(); len(got) != 1 || got[0] != want {
		t.Errorf("loads %+v, want %+v", got, want)
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

func TestSequencesFirstAddAndLastRemoveMembership(t *testing.T) {
	r, _ := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	a := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 8)}).Booking
	expectLoad(t, r, 8, 2, 1)
	b := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 12)}).Booking
	expectLoad(t, r, 20, 3, 2)
	b.End()
	expectLoad(t, r, 8, 2, 1)
	a.End()
	expectLoad(t, r, 0, 0, 0)
}

func TestSequencesPrefillTokensLeaveWithTheFirstToken(t *testing.T) {
	r, _ := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	Hold(r, 0, testkit.Tokens(1, 8))
	d := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 14)})
	if d.EffectivePrefillTokens != 6 || d.PotentialDecodeBlocks != 3 {
		t.Errorf("%d tokens to compute, %d blocks; want 6 and 3", d.EffectivePrefillTokens, d.PotentialDecodeBlocks)
	}
	expectLoad(t, r, 6, 3, 1)
	d.Booking.FirstToken()
	expectLoad(t, r, 0, 3, 1)
	d.Booking.FirstToken()
	expectLoad(t, r, 0, 3, 1)
}

// TestSequencesFractionalDecay has the figures that Dynamo 1.6.1's service gave
// for its first two steps.
func TestSequencesFractionalDecay(t *testing.T) {
	r, _ := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	fraction := func(f float64) *float64 { return &f }
	a := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 12)}).Booking
	expectLoad(t, r, 12, 3, 1)
	a.OutputBlock(fraction(0.5))
	expectLoad(t, r, 12, 2, 1) // 4 blocks at a half
	b := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 4)}).Booking
	a.OutputBlock(fraction(0.25))
	expectLoad(t, r, 16, 2, 2) // the shared block stays at 0.5: 0.5 + 4 × 0.25 = 1.5
	a.OutputBlock(nil)
	expectLoad(t, r, 16, 3, 2) // 2.5
	b.OutputBlock(fraction(7)) // more than 1 counts as 1
	expectLoad(t, r, 16, 4, 2) // 3.5
	a.End()
	expectLoad(t, r, 4, 2, 1) // the block kept its half: 1.5
	b.OutputBlock(fraction(1))
	expectLoad(t, r, 4, 3, 1)
	b.End()
	expectLoad(t, r, 0, 0, 0)
	b.OutputBlock(nil)
	expectLoad(t, r, 0, 0, 0)
}

func TestSequencesAnswersGrowBlockByBlock(t *testing.T) {
	r, _ := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	plain := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 10)}).Booking // 2 blocks and a half
	for tokens, blocks := range []int{2, 2, 2, 3, 3, 3, 3, 4} {
		plain.Generated(tokens)
		expectLoad(t, r, 10, blocks, 1)
	}
	plain.End()
	expected := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 8), ExpectedOutput: 16}).Booking
	for _, step := range []struct{ tokens, blocks int }{{1, 3}, {5, 3}, {13, 1}, {40, 0}} {
		expected.Generated(step.tokens)
		expectLoad(t, r, 8, step.blocks, 1)
	}
}

func TestSequencesExpireWhenNobodySpeaksOfThem(t *testing.T) {
	r, clock := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	forgotten := MustRoute(t, r, Request{ID: "forgotten", Tokens: testkit.Tokens(1, 8)}).Booking
	alive := MustRoute(t, r, Request{ID: "alive", Tokens: testkit.Tokens(1, 8)}).Booking
	clock.Advance(BookingExpiry - time.Minute)
	alive.OutputBlock(nil)
	expectLoad(t, r, 16, 3, 2)
	clock.Advance(time.Minute)
	expectLoad(t, r, 8, 3, 1)
	if !forgotten.Ended() || alive.Ended() || r.Booking("forgotten") != nil || r.Booking("alive") != alive {
		t.Error("the wrong booking ended")
	}
	forgotten.FirstToken()
	forgotten.End()
	expectLoad(t, r, 8, 3, 1)
	clock.Advance(BookingExpiry)
	MustRoute(t, r, Request{ID: "alive", Tokens: testkit.Tokens(1, 8)}).Booking.End() // its id is free again
	expectLoad(t, r, 0, 0, 0)
}

func TestSequencesOfLongStreamsAreNotForgotten(t *testing.T) {
	r, clock := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	streams := [2]*Booking{}
	for i := range streams {
		streams[i] = MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 8)}).Booking
	}
	for range 3 {
		clock.Advance(BookingExpiry)
		expectLoad(t, r, 16, 2, 2)
	}
	streams[0].End()
	streams[1].End()
	expectLoad(t, r, 0, 0, 0)
}

func TestSequencesRefuseADuplicateID(t *testing.T) {
	r, _ := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	first := MustRoute(t, r, Request{ID: "a", Tokens: testkit.Tokens(1, 8)})
	if _, err := r.Route(t.Context(), Request{ID: "a", Tokens: testkit.Tokens(1, 8)}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("a second booking under an id: %v", err)
	}
	if _, err := r.Book(Request{ID: "a", Tokens: testkit.Tokens(1, 8)}, kv.WorkerKey{}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("the same without choosing: %v", err)
	}
	if d := MustRoute(t, r, Request{ID: "a", Tokens: testkit.Tokens(1, 8), QueryOnly: true}); d.Booking != nil {
		t.Error("a query was booked")
	}
	expectLoad(t, r, 8, 2, 1)
	first.Booking.End()
	MustRoute(t, r, Request{ID: "a", Tokens: testkit.Tokens(1, 8)})
	expectLoad(t, r, 8, 2, 1)
}

func TestSequencesFreeIsIdempotent(t *testing.T) {
	r, _ := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	other := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 8)})
	b := MustRoute(t, r, Request{ID: "a", Tokens: testkit.Tokens(1, 8)}).Booking
	for range 3 {
		b.End()
		b.Finish(9)
		b.FirstToken()
		b.Generated(99)
		expectLoad(t, r, 8, 2, 1)
	}
	other.Booking.End()
	expectLoad(t, r, 0, 0, 0)
}

func TestSequencesManyWorkersDrainToZero(t *testing.T) {
	r, _ := NewClockedRouter(t, 50, testkit.Defaults[Settings]())
	var bookings []*Booking
	for i := range 1000 {
		bookings = append(bookings, MustRoute(t, r, Request{Tokens: testkit.Tokens(uint32(i%7), 4+i%90)}).Booking)
	}
	for i, b := range bookings {
		if i%2 == 0 {
			b.FirstToken()
		}
		b.OutputBlock(nil)
	}
	for i := range 50 {
		if i%3 == 0 {
			r.Down(kv.WorkerKey{Worker: uint64(i)})
		}
	}
	if n := len(r.Loads()); n != 50 {
		t.Errorf("%d workers with bookings, want 50", n)
	}
	for _, b := range bookings {
		b.End()
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
	loads := r.Loads()
	if len(loads) != 33 || r.fleet.loads.active.pairs != 0 || len(r.fleet.loads.byWorker) != 33 {
		t.Errorf("%d workers, %d blocks, %d entries are left; want 33, 0, 33", len(loads), r.fleet.loads.active.pairs, len(r.fleet.loads.byWorker))
	}
	for _, load := range loads {
		if load != (WorkerLoad{Key: load.Key}) {
			t.Errorf("left: %+v", load)
		}
	}
}

func TestBookTakesTheWorkerItIsGiven(t *testing.T) {
	r, _ := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	Hold(r, 0, testkit.Tokens(1, 4))
	if _, err := r.Book(Request{Tokens: testkit.Tokens(1, 8)}, kv.WorkerKey{Worker: 5}); !errors.Is(err, ErrUnknownWorker) {
		t.Errorf("an unknown worker: %v", err)
	}
	b, err := r.Book(Request{Tokens: testkit.Tokens(1, 8)}, kv.WorkerKey{})
	if err != nil || b.Worker() != (kv.WorkerKey{}) {
		t.Fatal(b, err)
	}
	expectLoad(t, r, 4, 2, 1)
	none := 0
	if _, err := r.Book(Request{Sequence: []uint64{1, 2, 3}, NumTokens: 13, Cached: &none}, kv.WorkerKey{}); err != nil {
		t.Fatal(err)
	}
	expectLoad(t, r, 17, 5, 2)
	if got, want := r.PotentialLoads(Request{Tokens: testkit.Tokens(1, 12)}), (WorkerLoad{PotentialPrefillTokens: 25, PotentialDecodeBlocks: 6, ActiveRequests: 2}); len(got) != 1 || got[0] != want {
		t.Errorf("with one more %+v, want %+v", got, want)
	}
	expectLoad(t, r, 17, 5, 2)
	some := 5
	if _, err := r.Book(Request{Tokens: testkit.Tokens(90, 8), Cached: &some}, kv.WorkerKey{}); err != nil {
		t.Fatal(err)
	}
	expectLoad(t, r, 20, 7, 3)
}

// TestBooksEqualANaiveCount drives policy kv at random, with every way a request
// can end, and compares the books with a count that keeps each block's owners.
func TestBooksEqualANaiveCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_000_000, 0)
		r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "kv"), BlockSize: testkit.BlockSize, Seed: rapid.Uint64().Draw(t, "seed")})
		r.now = func() time.Time { return now }
		const workers = 3
		up, rests := map[uint64]bool{}, map[uint64]bool{}
		generation := 0
		serving := func() (n int) {
			for w := range up {
				if !rests[w] {
					n++
				}
			}
			return n
		}
		raise := func(w uint64) {
			generation++ // of a new incarnation, also where the one before was not seen to go
			r.Up(kv.Target{Key: kv.WorkerKey{Worker: w}, Generation: generation})
			up[w] = true
		}
		for w := range uint64(workers) {
			raise(w)
		}
		type block struct {
			owners int
			weight float64
		}
		type open struct {
			id      string
			booking *Booking
			blocks  []uint64
			prefill int
			outputs []float64
			heard   time.Time
		}
		var running []*open
		var ended []*Booking
		blocks := map[kv.WorkerKey]map[uint64]*block{}
		release := func(o *open) {
			held := blocks[o.booking.Worker()]
			for _, h := range o.blocks {
				if held[h].owners--; held[h].owners == 0 {
					delete(held, h)
				}
			}
			ended = append(ended, o.booking)
			running = slices.DeleteFunc(running, func(other *open) bool { return other == o })
		}
		draw := func(t *rapid.T) *open {
			if len(running) == 0 {
				t.Skip("none runs")
			}
			return rapid.SampledFrom(running).Draw(t, "which")
		}
		next := 0
		t.Repeat(map[string]func(*rapid.T){
			"route": func(t *rapid.T) {
				next++
				o := &open{id: fmt.Sprint(next), heard: now}
				n := rapid.IntRange(1, 40).Draw(t, "tokens")
				d, err := r.Route(t.Context(), Request{ID: o.id, Tokens: testkit.Tokens(rapid.Uint32Range(0, 1).Draw(t, "first"), n)})
				if serving() == 0 {
					if !errors.Is(err, ErrNoWorker) {
						t.Fatalf("no worker takes requests: %v", err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if rests[d.Target.Key.Worker] {
					t.Fatalf("worker %d rests and got a request", d.Target.Key.Worker)
				}
				o.booking, o.blocks, o.prefill = d.Booking, d.Sequence, n
				running = append(running, o)
				w := d.Target.Key
				if blocks[w] == nil {
					blocks[w] = map[uint64]*block{}
				}
				for _, h := range o.blocks {
					if blocks[w][h] == nil {
						blocks[w][h] = &block{weight: 1}
					}
					blocks[w][h].owners++
				}
			},
			"route twice": func(t *rapid.T) {
				if _, err := r.Route(t.Context(), Request{ID: draw(t).id}); serving() > 0 && !errors.Is(err, ErrDuplicate) {
					t.Fatalf("a used id: %v", err)
				}
			},
			"first token": func(t *rapid.T) {
				o := draw(t)
				o.booking.FirstToken()
				o.prefill, o.heard = 0, now
			},
			"output block": func(t *rapid.T) {
				o := draw(t)
				o.heard = now
				o.outputs = append(o.outputs, 1)
				if !rapid.Bool().Draw(t, "decays") {
					o.booking.OutputBlock(nil)
					return
				}
				share := float64(rapid.IntRange(0, 8).Draw(t, "eighths")) / 8
				o.booking.OutputBlock(&share)
				for i := range o.outputs {
					o.outputs[i] = share
				}
				for _, h := range o.blocks {
					if b := blocks[o.booking.Worker()][h]; b.owners == 1 {
						b.weight = share
					}
				}
			},
			"end": func(t *rapid.T) {
				o := draw(t)
				switch rapid.IntRange(0, 2).Draw(t, "how") {
				case 0:
					o.booking.End()
				case 1:
					o.booking.Finish(5)
				case 2:
					r.Booking(o.id).End()
				}
				release(o)
			},
			"end again": func(t *rapid.T) {
				if len(ended) > 0 {
					b := rapid.SampledFrom(ended).Draw(t, "which")
					b.End()
					b.FirstToken()
					b.OutputBlock(nil)
				}
			},
			"worker goes": func(t *rapid.T) {
				w := rapid.Uint64Range(0, workers-1).Draw(t, "worker")
				r.Down(kv.WorkerKey{Worker: w})
				delete(up, w)
			},
			"worker comes": func(t *rapid.T) { raise(rapid.Uint64Range(0, workers-1).Draw(t, "worker")) },
			"worker rests": func(t *rapid.T) {
				w := rapid.Uint64Range(0, workers-1).Draw(t, "worker")
				if err := r.Health.Cordon(w); (err == nil) != up[w] {
					t.Fatalf("up: %v, rest: %v", up[w], err)
				}
				rests[w] = rests[w] || up[w]
			},
			"worker is readmitted": func(t *rapid.T) {
				w := rapid.Uint64Range(0, workers-1).Draw(t, "worker")
				if err := r.Health.Readmit(w); (err == nil) != (up[w] || rests[w]) {
					t.Fatalf("up: %v, rests: %v, readmit: %v", up[w], rests[w], err)
				}
				delete(rests, w)
			},
			"cordoned worker publishes": func(t *rapid.T) {
				w := kv.WorkerKey{Worker: rapid.Uint64Range(0, workers-1).Draw(t, "worker")}
				waiting := rapid.IntRange(1, 9).Draw(t, "waiting")
				r.Publish(w, policy.Published{At: now, Waiting: waiting})
				if got := r.Load(w).Waiting; up[w.Worker] && got != waiting {
					t.Fatalf("%d wait, %d are known of", waiting, got)
				}
			},
			"time passes": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 50).Draw(t, "minutes")) * time.Minute)
				for _, o := range slices.Clone(running) {
					if now.Sub(o.heard) >= BookingExpiry {
						release(o)
					}
				}
			},
			"": func(t *rapid.T) {
				var want []WorkerLoad
				for w := range uint64(workers) {
					load := WorkerLoad{Key: kv.WorkerKey{Worker: w}}
					sum := 0.0
					for _, o := range running {
						if o.booking.Worker() == load.Key {
							load.ActiveRequests++
							load.PotentialPrefillTokens += o.prefill
							for _, weight := range o.outputs {
								sum += weight
							}
						}
					}
					for _, b := range blocks[load.Key] {
						sum += b.weight
					}
					load.PotentialDecodeBlocks = int(math.Round(sum))
					if up[w] || load.ActiveRequests > 0 {
						want = append(want, load)
					}
				}
				if got := r.Loads(); !slices.Equal(got, want) {
					t.Fatalf("loads %+v, want %+v", got, want)
				}
				if err := r.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// TestNoCachedTokensMeansNoneWhereTheWorkerTellsOfSome is about vLLM, which
// leaves them out where there were none, or always.
func TestNoCachedTokensMeansNoneWhereTheWorkerTellsOfSome(t *testing.T) {
	r, _ := cacheRouter(t, "cache-threshold", PrefixApprox, 1)
	send := func(from uint32, answer func(b *Booking)) (overlap int) {
		t.Helper()
		d := MustRoute(t, r, Request{Tokens: testkit.Tokens(from, 10*testkit.BlockSize)})
		answer(d.Booking)
		d.Booking.Finish(1)
		return d.MatchedBlocks
	}
	untold := func(want bool) func(b *Booking) {
		return func(b *Booking) {
			t.Helper()
			if none := b.CachedUnreported(); none != want {
				t.Errorf("no cached tokens: %v, want %v", none, want)
			}
		}
	}
	for from := range uint32(3) {
		send(1000*from, untold(false))
	}
	if overlap := send(2000, untold(false)); overlap != 10 {
		t.Errorf("%d blocks are left of a worker that never tells, want 10", overlap)
	}
	send(1000, func(b *Booking) { b.Cached(9*testkit.BlockSize, kv.TierTokens{}) })
	send(1000, untold(true)) // so what was used before is gone too
	if a, b := send(0, untold(true)), send(2000, untold(true)); a != 0 || b != 0 {
		t.Errorf("%d and %d blocks are left, want none", a, b)
	}
	r.Down(testkit.W0)
	r.Up(kv.Target{Key: testkit.W0})
	send(1000, untold(false)) // it may be another engine
	d := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 4)})
	d.Booking.End()
	r.Down(testkit.W0)
	if d.Booking.Cached(4, kv.TierTokens{}); d.Booking.CachedUnreported() || r.fleet.loads.byWorker[testkit.W0] != nil {
		t.Error("an answer after the end counts")
	}
}
