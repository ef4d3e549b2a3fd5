package relay

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/base/cuckoo"
	"kvrouter/internal/testkit/relaytest"
)

// producerOf returns the producer of a pool.
func producerOf(pool relaytest.Pool) Producer {
	p, err := decodePool(pool.Encode())
	if err != nil {
		panic(err)
	}
	return p.Producer
}

// streamOf returns a stream with memory for any filter.
func streamOf(p Producer) *Stream {
	budget := new(atomic.Int64)
	budget.Store(maxMemory)
	return NewStream(p, budget)
}

// applyTo applies a frame to a stream.
func applyTo(t rapid.TB, s *Stream, kind Kind, base, sequence uint64, frame []byte) {
	t.Helper()
	if err := s.Apply(&Update{Producer: s.producer, Base: base, Sequence: sequence, Kind: kind, Payload: frame}); err != nil {
		t.Fatal(err)
	}
}

// snapshotOf returns the filter of a pool with those words.
func snapshotOf(t rapid.TB, pool relaytest.Pool, words []uint64) *Filter {
	t.Helper()
	s := streamOf(producerOf(pool))
	for part := range pool.Parts() {
		applyTo(t, s, Snapshot, 0, 0, pool.Snapshot(0, words, part))
	}
	return s.Filter()
}

// TestAFilterFollowsItsStream changes words at random, by deltas and by snapshots.
func TestAFilterFollowsItsStream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pool := relaytest.NewPool(rapid.SampledFrom([]int{2, 64, 1 << 10}).Draw(t, "buckets"))
		words, sequence := make([]uint64, pool.Buckets), uint64(0)
		s := streamOf(producerOf(pool))
		for step := range rapid.IntRange(1, 20).Draw(t, "steps") {
			buckets := rapid.SliceOfNDistinct(rapid.Uint32Range(0, uint32(pool.Buckets-1)), 0, 10, rapid.ID).Draw(t, "changed")
			for _, bucket := range buckets {
				words[bucket] = rapid.Uint64().Draw(t, "word")
			}
			if step == 0 || rapid.IntRange(0, 4).Draw(t, "snapshot") == 0 {
				sequence += rapid.Uint64Range(0, 3).Draw(t, "skipped")
				applyTo(t, s, Snapshot, sequence, sequence, pool.Snapshot(sequence, words, 0))
				continue
			}
			sequence++
			applyTo(t, s, Delta, sequence-1, sequence, pool.Delta(sequence-1, sequence, words, buckets...))
		}
		taken := 0
		for _, word := range words {
			taken += cuckoo.Used(word)
		}
		if f := s.Filter(); !slices.Equal(*f.words.Load(), words) || f.Held() != taken {
			t.Fatalf("%d slots, want %d", f.Held(), taken)
		}
	})
}

func TestBlocksOfAFilterAreFound(t *testing.T) {
	pool, random := relaytest.NewPool(1<<10), rand.New(rand.NewPCG(1, 2))
	var hashes []uint64
	for range 500 {
		hashes = append(hashes, random.Uint64())
	}
	filter := snapshotOf(t, pool, pool.Words(hashes[:400]...))
	for i, hash := range hashes {
		if found := filter.Prefix([]uint64{hash}) == 1; found != (i < 400) {
			t.Errorf("block %d is found: %v", i, found)
		}
	}
	if got := filter.Prefix(append(slices.Clone(hashes[:7]), hashes[400:]...)); got != 7 || filter.Held() != 400 {
		t.Errorf("%d leading blocks of %d, want 7 of 400", got, filter.Held())
	}
}

// TestAFalseFilterCannotClaimEverything: each of the 8 slots that are looked at has one of
// 65,535 fingerprints, whatever all slots have.
func TestAFalseFilterCannotClaimEverything(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	pool := relaytest.NewPool(1 << 14)
	for name, one := range map[string]struct {
		word   func() uint64
		stated float64 // probability
		exact  bool    // the stated one is not only the maximum
	}{
		"random": {random.Uint64, cuckoo.FalsePositive, true},
		"half":   {func() uint64 { return random.Uint64() >> 32 }, cuckoo.FalsePositive / 2, true},
		"equal":  {func() uint64 { return 0x0001_0001_0001_0001 }, cuckoo.FalsePositive, false},
		"full":   {func() uint64 { return ^uint64(0) }, cuckoo.FalsePositive, false},
	} {
		words := make([]uint64, pool.Buckets)
		for i := range words {
			words[i] = one.word()
		}
		filter, found := snapshotOf(t, pool, words), 0
		const looks = 2_000_000
		for range looks {
			found += filter.Prefix([]uint64{random.Uint64()})
		}
		if rate := float64(found) / looks; rate > 1.4*one.stated || one.exact && rate < 0.6*one.stated {
			t.Errorf("%s: it has %.4f %% of what nobody has named, want %.4f %%", name, 100*rate, 100*one.stated)
		}
	}
}

func TestWhatIsDoubtfulEmptiesTheFilter(t *testing.T) {
	pool, relay := relaytest.NewPool(32), Identity{1, 2}
	words, p := pool.Words(1), producerOf(pool)
	whole := func() []byte { return pool.Snapshot(5, words, 0) }
	delta := func(base, sequence uint64, buckets ...uint32) []byte {
		return pool.Delta(base, sequence, words, buckets...)
	}
	put := func(frame []byte, at int, b ...byte) []byte {
		copy(frame[at:], b)
		return relaytest.Seal(frame)
	}
	big := pool
	big.Buckets *= 2
	for _, one := range []struct {
		name    string
		payload []byte
		kind    Kind
		change  func(u *Update)
		base    uint64 // after which a delta is sent
		want    string
	}{
		{"a gap", delta(6, 7, 1), Delta, nil, 6, "after 5"},
		{"a delta again", delta(4, 5, 1), Delta, nil, 4, "after 5"},
		{"a delta that skips", delta(5, 7, 1), Delta, func(u *Update) { u.Sequence = 7 }, 5, "after 5"},
		{"another base in the frame", delta(4, 6, 1), Delta, nil, 5, "after 5"},
		{"another sequence in the frame", delta(5, 9, 1), Delta, nil, 5, "sequence 9"},
		{"a bucket outside", put(delta(5, 6, 1), headerSize+deltaHead, 0xff, 0xff, 0, 0), Delta, nil, 5, "beyond the filter"},
		{"a bucket twice", delta(5, 6, 1, 1), Delta, nil, 5, "twice"},
		{"more images than bytes", put(delta(5, 6, 1), headerSize+8, 9), Delta, nil, 5, "9 images"},
		{"a wrong checksum", append(delta(5, 6, 1), 0), Delta, nil, 5, "checksum"},
		{"a short frame", delta(5, 6, 1)[:40], Delta, nil, 5, "40 bytes"},
		{"another magic", put(delta(5, 6, 1), 0, 'X'), Delta, nil, 5, "CBI1"},
		{"another frame version", put(delta(5, 6, 1), 4, 2), Delta, nil, 5, "version 2"},
		{"another width", put(delta(5, 6, 1), 8, 12), Delta, nil, 5, "12 bits"},
		{"another seed", put(delta(5, 6, 1), 12, 1), Delta, nil, 5, "seed"},
		{"another size", big.Delta(5, 6, words, 1), Delta, nil, 5, "size"},
		{"another data center", put(delta(5, 6, 1), 28, 77), Delta, nil, 5, "data center"},
		{"unknown flags", put(delta(5, 6, 1), 6, 3), Delta, nil, 5, "flags 3"},
		{"a snapshot in a delta", put(whole(), 36, 6), Delta, nil, 5, "another kind"},
		{"another producer", delta(5, 6, 1), Delta, func(u *Update) { u.Producer.Incarnation++ }, 5, "producer"},
		{"another relay", delta(5, 6, 1), Delta, func(u *Update) { u.Relay.Incarnation++ }, 5, "relay"},
		{"an unknown kind", nil, 4, nil, 5, "kind 4"},
		{"a heartbeat of another sequence", nil, Heartbeat, nil, 5, "heartbeat"},
		{"a heartbeat with a frame", delta(5, 6, 1), Heartbeat, func(u *Update) { u.Base, u.Sequence = 5, 5 }, 5, "heartbeat"},
		{"an older snapshot", put(whole(), 36, 4), Snapshot, func(u *Update) { u.Base, u.Sequence = 4, 4 }, 5, "after 5"},
		{"a second part", put(whole(), headerSize, 1, 0, 0, 0, 2), Snapshot, func(u *Update) { u.Base, u.Sequence = 5, 5 }, 5, "part 1"},
		{"a part behind the end", put(whole(), headerSize+8, 1), Snapshot, func(u *Update) { u.Base, u.Sequence = 5, 5 }, 5, "fit"},
		{"a part without words", relaytest.Seal(whole()[:headerSize+chunkHead]), Snapshot, func(u *Update) { u.Base, u.Sequence = 5, 5 }, 5, "part 0"},
		{"a snapshot that is too short", relaytest.Seal(whole()[:headerSize+chunkHead+8]), Snapshot, func(u *Update) { u.Base, u.Sequence = 5, 5 }, 5, "1 buckets"},
	} {
		t.Run(one.name, func(t *testing.T) {
			s := streamOf(p)
			apply := func(u Update) error { return s.Apply(&u) }
			first := Update{Relay: relay, Producer: p, Base: 5, Sequence: 5, Kind: Snapshot, Payload: whole()}
			if err := apply(first); err != nil || s.Filter().Prefix([]uint64{1}) != 1 {
				t.Fatalf("a snapshot: %v", err)
			}
			u := Update{Relay: relay, Producer: p, Base: one.base, Sequence: one.base + 1, Kind: one.kind, Payload: one.payload}
			if one.change != nil {
				one.change(&u)
			}
			if err := apply(u); err == nil || !strings.Contains(err.Error(), one.want) {
				t.Errorf("%v, want an error about %q", err, one.want)
			}
			if s.Filter().Known() || s.Filter().Prefix([]uint64{1}) != 0 || s.Filter().Held() != 0 {
				t.Error("the filter still has blocks")
			}
			if apply(first) == nil {
				t.Error("the stream applies a message after an error")
			}
		})
	}
}

func TestALargeSnapshotComesInParts(t *testing.T) {
	pool := relaytest.NewPool(2 << 20)
	if f := snapshotOf(t, pool, pool.Words(1, 2)); pool.Parts() != 4 || f.Held() != 2 {
		t.Errorf("%d blocks, want 2", f.Held())
	}
}

func TestFiltersShareTheirMemory(t *testing.T) {
	pool := relaytest.NewPool(128) // 1 KiB
	p := producerOf(pool)
	var budget atomic.Int64
	budget.Store(1500)
	u := Update{Relay: Identity{1, 2}, Producer: p, Kind: Snapshot, Payload: pool.Snapshot(0, pool.Words(), 0)}
	first, second := NewStream(p, &budget), NewStream(p, &budget)
	if err := first.Apply(&u); err != nil {
		t.Fatal(err)
	}
	if err := second.Apply(&u); err == nil {
		t.Error("a second filter fits into memory for one")
	}
	first.Close()
	first.Close()
	if n := budget.Load(); n != 1500 {
		t.Errorf("%d bytes are left after all have ended, want 1500", n)
	}
}

func BenchmarkPrefix(b *testing.B) {
	pool, random := relaytest.NewPool(1<<20), rand.New(rand.NewPCG(1, 2))
	hashes := make([]uint64, 1<<17)
	for i := range hashes {
		hashes[i] = random.Uint64()
	}
	filter, prompt := snapshotOf(b, pool, pool.Words(hashes...)), hashes[:1024]
	b.ReportAllocs()
	for b.Loop() {
		if filter.Prefix(prompt) != len(prompt) {
			b.Fatal("a block is not found")
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(prompt)), "ns/block")
}
