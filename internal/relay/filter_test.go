package relay

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit/radixtest"
)

var start = time.Unix(1_700_000_000, 0)

// producerOf returns a producer whose filter is for that many blocks.
func producerOf(blocks int) Producer {
	return Producer{
		Pool:        PoolID{Semantics: Digest{Sum: digestOf("a"), Source: Explicit}, Scope: Digest{Sum: digestOf("b"), Source: Derived}, DataCenter: 3},
		Incarnation: 9, Generation: 1, Format: FormatFor(blocks),
	}
}

// told is holdings, and a stream that follows them.
type told struct {
	*Holdings
	subscriber *subscriber
	stream     *Stream
}

func tell(t rapid.TB, p Producer) *told {
	return (&told{Holdings: newHoldings(Identity{1, 2}, p, func() time.Time { return start })}).subscribeTo(t)
}

// subscribeTo begins a stream with its snapshot.
func (x *told) subscribeTo(t rapid.TB) *told {
	t.Helper()
	words, sequence, s := x.subscribe()
	x.subscriber, x.stream = s, must[*Stream](t)(NewStream(x.producer))
	for i := range chunksOf(len(words)) {
		u := Update{Relay: x.relay, Producer: x.producer, Base: sequence, Sequence: sequence, Kind: Snapshot, Payload: encodeChunk(&x.producer, sequence, words, i)}
		if err := x.stream.Apply(must[*Update](t)(DecodeUpdate(u.Encode()))); err != nil {
			t.Fatal(err)
		}
	}
	return x
}

// catchUp publishes what has changed, and applies it.
func (x *told) catchUp(t rapid.TB) *Filter {
	t.Helper()
	x.publish()
	for len(x.subscriber.queue) > 0 {
		message := <-x.subscriber.queue
		x.took(x.subscriber, message)
		if err := x.stream.Apply(must[*Update](t)(DecodeUpdate(message))); err != nil {
			t.Fatal(err)
		}
	}
	return x.stream.Filter()
}

// TestWhatWorkersHoldIsFound has ranks store, remove and lose chains of blocks at random,
// and compares what a follower finds with what they hold.
func TestWhatWorkersHoldIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := tell(t, producerOf(rapid.SampledFrom([]int{4, 64, 1 << 12}).Draw(t, "blocks")))
		index := x.Follow(radix.NewTree(), 4)
		keys := []kv.WorkerKey{{Worker: 1}, {Worker: 1, Rank: 1}, {Worker: 2}}
		chain := func() []uint64 { // of local hashes
			return rapid.SliceOfN(rapid.Uint64Range(1, 3), 1, 5).Draw(t, "chain")
		}
		held := map[kv.WorkerKey]map[uint64]int{} // copies by engine hash, which is the sequence hash
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			w := rapid.SampledFrom(keys).Draw(t, "rank")
			if held[w] == nil {
				held[w] = map[uint64]int{}
			}
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				radixtest.Clear(index, w)
				delete(held, w)
			case 1:
				radixtest.Forget(index, w.Worker)
				for key := range held {
					if key.Worker == w.Worker {
						delete(held, key)
					}
				}
			case 2, 3, 4: // a chain's last block, as an engine evicts
				hashes := kv.SequenceHashes(nil, chain())
				last := hashes[len(hashes)-1]
				if held[w][last] > 0 {
					if held[w][last]--; held[w][last] == 0 {
						delete(held[w], last)
					}
				}
				radixtest.Remove(index, w, []uint64{last})
			case 5:
				x.subscribeTo(t)
			default:
				local := chain()
				hashes := kv.SequenceHashes(nil, local)
				from := 0
				for from < len(hashes)-1 && held[w][hashes[from]] > 0 {
					from++
				}
				var blocks []kv.StoredBlock
				for i := from; i < len(hashes); i++ {
					blocks = append(blocks, kv.StoredBlock{Engine: hashes[i], Local: local[i]})
					held[w][hashes[i]]++
				}
				var parent uint64
				if from > 0 {
					parent = hashes[from-1]
				}
				if err := radixtest.Store(index, w, parent, from > 0, blocks); err != nil {
					t.Fatal(err)
				}
			}
		}
		filter := x.catchUp(t)
		any := map[uint64]bool{}
		for _, blocks := range held {
			for hash := range blocks {
				any[hash] = true
			}
		}
		counts := x.Counts()
		if !x.table.check() {
			t.Fatalf("the table counts wrongly")
		}
		if filter.Held() != counts.Blocks || counts.Omitted == 0 && counts.Blocks != len(any) {
			t.Fatalf("%d blocks are told, %d counted, %d omitted: want %d", filter.Held(), counts.Blocks, counts.Omitted, len(any))
		}
		for range 20 {
			hashes := kv.SequenceHashes(nil, chain())
			want := 0
			for want < len(hashes) && any[hashes[want]] {
				want++
			}
			got := filter.Prefix(hashes)
			if got < want && counts.Omitted == 0 {
				t.Fatalf("%d blocks are found: want %d", got, want)
			}
			if got > want && x.producer.Format.Buckets > 1<<10 {
				t.Fatalf("%d blocks are found of a large filter: want %d", got, want)
			}
		}
	})
}

func TestAFullFilterLeavesBlocksOutAndTakesNoneBack(t *testing.T) {
	x := tell(t, producerOf(64)) // 128 slots
	w := kv.WorkerKey{Worker: 1}
	var all []uint64
	for i := range uint64(400) {
		all = append(all, i+1)
		x.store(w, 0, false, []kv.StoredBlock{{Engine: i + 1, Local: i + 1}})
	}
	counts := x.Counts()
	if counts.Blocks+int(counts.Omitted) != 400 || counts.Blocks < 110 || counts.Blocks > 128 || !x.table.check() {
		t.Fatalf("of 400 blocks in 128 slots, %+v", counts)
	}
	filter := x.catchUp(t)
	for hash := range x.table.owners {
		if filter.Prefix([]uint64{hash}) != 1 {
			t.Fatalf("block %d has a slot and is not found", hash)
		}
	}
	x.remove(w, all)
	if filter = x.catchUp(t); filter.Held() != 0 || x.Counts().Blocks != 0 || !x.table.check() {
		t.Errorf("%d blocks are left, want none", filter.Held())
	}
}

func TestFalsePositivesAreAsStated(t *testing.T) {
	const blocks, asked = 1 << 16, 2_000_000
	x := tell(t, producerOf(blocks))
	random := rand.New(rand.NewPCG(1, 2))
	w, seen := kv.WorkerKey{Worker: 1}, map[uint64]bool{}
	for range blocks {
		hash := random.Uint64()
		seen[hash] = true
		x.store(w, 0, false, []kv.StoredBlock{{Engine: hash, Local: hash}})
	}
	filter, found := x.subscribeTo(t).stream.Filter(), 0
	for range asked {
		if hash := random.Uint64(); !seen[hash] {
			found += filter.Prefix([]uint64{hash})
		}
	}
	stated := filter.FalsePositives()
	if share := float64(found) / asked; share < stated*0.6 || share > stated*1.4 || stated > 1e-4 {
		t.Errorf("%.2g of %d blocks are found that are not held: stated are %.2g, at most 1e-4 at half load", share, asked, stated)
	}
}

func TestAFollowedIndexTakesEachKindOfChange(t *testing.T) {
	radixtest.PassesEachKind(t, tell(t, producerOf(64)).Follow(radix.NewTree(), 4))
}

func TestBlocksOfWorkersWithOtherRulesAreNotTold(t *testing.T) {
	x := tell(t, producerOf(64))
	index := x.Follow(radix.NewTree(), 4)
	w := kv.WorkerKey{Worker: 1}
	one := []kv.StoredBlock{{Engine: 1, Local: 1}}
	store := func() {
		if err := radixtest.Store(index, w, 0, false, one); err != nil {
			t.Fatal(err)
		}
	}
	store()
	if n := x.catchUp(t).Held(); n != 1 {
		t.Fatalf("%d blocks are told, want 1", n)
	}
	radixtest.SetLayout(index, w, kv.Layout{Groups: []kv.CacheGroup{{Block: 4}, {Index: 1, Attention: kv.SlidingWindow, Window: 8, Block: 4}}}, 4)
	store()
	if n := x.catchUp(t).Held(); n != 0 {
		t.Errorf("%d blocks are told of a worker with a sliding window, want none", n)
	}
	radixtest.Forget(index, 1)
	radixtest.SetLayout(index, w, kv.Layout{Groups: []kv.CacheGroup{{Block: 4}}}, 4)
	store()
	if n := x.catchUp(t).Held(); n != 1 {
		t.Errorf("%d blocks are told of a plain worker, want 1", n)
	}
	if _, err := index.Apply(w, &radix.Change{Kind: radix.Stored, Skipped: []uint64{5}, Blocks: []kv.StoredBlock{{Engine: 7, Local: 7}}}); err != nil {
		t.Fatal(err)
	}
	if n := x.catchUp(t).Held(); n != 0 {
		t.Errorf("%d blocks are told of a worker that lost the first ones of a prompt, want none", n)
	}
}

func TestWhatIsDoubtfulEmptiesTheFilter(t *testing.T) {
	x := tell(t, producerOf(64))
	w := kv.WorkerKey{Worker: 1}
	x.store(w, 0, false, []kv.StoredBlock{{Engine: 1, Local: 1}})
	words, p := x.table.words, x.producer
	whole := func() []byte { return encodeChunk(&p, 5, words, 0) }
	delta := func(base, sequence uint64, buckets ...uint32) []byte {
		return encodeDelta(&p, base, sequence, buckets, words)
	}
	put := func(frame []byte, at int, b ...byte) []byte {
		copy(frame[at:], b)
		return seal(frame)
	}
	big := p
	big.Format.Buckets *= 2
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
		{"a bucket outside", put(delta(5, 6, 1), headerSize+deltaHead, 0xff, 0xff, 0, 0), Delta, nil, 5, "bucket outside"},
		{"a bucket twice", delta(5, 6, 1, 1), Delta, nil, 5, "twice"},
		{"more images than bytes", put(delta(5, 6, 1), headerSize+8, 9), Delta, nil, 5, "9 images"},
		{"a wrong checksum", append(delta(5, 6, 1), 0), Delta, nil, 5, "checksum"},
		{"a short frame", delta(5, 6, 1)[:40], Delta, nil, 5, "40 bytes"},
		{"another magic", put(delta(5, 6, 1), 0, 'X'), Delta, nil, 5, "CBI1"},
		{"another frame version", put(delta(5, 6, 1), 4, 2), Delta, nil, 5, "version 2"},
		{"another width", put(delta(5, 6, 1), 8, 12), Delta, nil, 5, "12 bits"},
		{"another seed", put(delta(5, 6, 1), 12, 1), Delta, nil, 5, "seed"},
		{"another size", encodeDelta(&big, 5, 6, []uint32{1}, words), Delta, nil, 5, "size"},
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
		{"a part without words", seal(whole()[:headerSize+chunkHead]), Snapshot, func(u *Update) { u.Base, u.Sequence = 5, 5 }, 5, "part 0"},
		{"a snapshot that is too short", seal(whole()[:headerSize+chunkHead+8]), Snapshot, func(u *Update) { u.Base, u.Sequence = 5, 5 }, 5, "1 buckets"},
	} {
		t.Run(one.name, func(t *testing.T) {
			s := must[*Stream](t)(NewStream(p))
			apply := func(u Update) error { return s.Apply(&u) }
			first := Update{Relay: x.relay, Producer: p, Base: 5, Sequence: 5, Kind: Snapshot, Payload: whole()}
			if err := apply(first); err != nil || s.Filter().Prefix([]uint64{1}) != 1 {
				t.Fatalf("a snapshot: %v", err)
			}
			u := Update{Relay: x.relay, Producer: p, Base: one.base, Sequence: one.base + 1, Kind: one.kind, Payload: one.payload}
			if one.change != nil {
				one.change(&u)
			}
			if err := apply(u); err == nil || !strings.Contains(err.Error(), one.want) {
				t.Errorf("%v, want an error about %q", err, one.want)
			}
			if s.Filter().Known() || s.Filter().Prefix([]uint64{1}) != 0 || s.Filter().Held() != 0 {
				t.Error("the filter still holds blocks")
			}
			if apply(first) == nil {
				t.Error("the stream goes on after an error")
			}
		})
	}
}

func TestASnapshotCanFollowDeltas(t *testing.T) {
	x := tell(t, producerOf(64))
	w := kv.WorkerKey{Worker: 1}
	x.store(w, 0, false, []kv.StoredBlock{{Engine: 1, Local: 1}})
	x.catchUp(t)
	u := Update{Relay: x.relay, Producer: x.producer, Base: 9, Sequence: 9, Kind: Snapshot, Payload: encodeChunk(&x.producer, 9, make([]uint64, x.producer.Format.Buckets), 0)}
	if err := x.stream.Apply(&u); err != nil {
		t.Fatal(err)
	}
	if f := x.stream.Filter(); !f.Known() || f.Held() != 0 || x.stream.Sequence() != 9 {
		t.Errorf("after an empty snapshot of sequence 9: %d blocks, sequence %d", f.Held(), x.stream.Sequence())
	}
}

func TestALargeSnapshotComesInParts(t *testing.T) {
	p := producerOf(4 << 20)
	if chunksOf(p.Format.Buckets) != 4 {
		t.Fatalf("%d buckets", p.Format.Buckets)
	}
	x := tell(t, p)
	x.store(kv.WorkerKey{Worker: 1}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 1}, {Engine: 2, Local: 2}})
	if f := x.subscribeTo(t).stream.Filter(); f.Held() != 2 {
		t.Errorf("%d blocks, want 2", f.Held())
	}
}

func TestFiltersShareTheirMemory(t *testing.T) {
	p := producerOf(256) // 128 buckets: 1 KiB
	var budget atomic.Int64
	budget.Store(1500)
	words := make([]uint64, p.Format.Buckets)
	u := Update{Relay: Identity{1, 2}, Producer: p, Kind: Snapshot, Payload: encodeChunk(&p, 0, words, 0)}
	first, second := must[*Stream](t)(newStream(p, &budget)), must[*Stream](t)(newStream(p, &budget))
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

func TestASlowSubscriberMustBeginAnew(t *testing.T) {
	x := tell(t, producerOf(1<<12))
	for i := range uint64(queueMessages + 1) {
		x.store(kv.WorkerKey{Worker: 1}, 0, false, []kv.StoredBlock{{Engine: i + 1, Local: i + 1}})
		x.publish()
	}
	for range queueMessages {
		<-x.subscriber.queue
	}
	if _, open := <-x.subscriber.queue; open || x.Counts().Subscribers != 0 {
		t.Error("a subscriber that has missed a message is served on")
	}
	if x.subscribeTo(t).stream.Filter().Held() != queueMessages+1 {
		t.Error("its next snapshot is not complete")
	}
}

func TestHashesCoverFullBlocksOnly(t *testing.T) {
	pool := Pool{BlockSize: 4, Format: Standard}
	eagle := Pool{BlockSize: 4, Format: Eagle}
	for n, want := range map[uint32][2]int{0: {0, 0}, 3: {0, 0}, 4: {1, 0}, 5: {1, 1}, 8: {2, 1}, 9: {2, 2}} {
		prompt := &Prompt{Tokens: upTo(n)}
		if got := [2]int{len(pool.Hashes(prompt, "")), len(eagle.Hashes(prompt, ""))}; got != want {
			t.Errorf("%d tokens have %v blocks, want %v", n, got, want)
		}
	}
	if got := pool.Hashes(&Prompt{Tokens: upTo(4)}, "")[0]; got != 14643705804678351452 { // DESIGN's and Dynamo's example
		t.Errorf("the hash of 1 to 4 is %d", got)
	}
}

func TestUsageOfSilentRanksIsNotKnown(t *testing.T) {
	for _, one := range []struct {
		load  PoolLoad
		want  float64
		known bool
	}{
		{PoolLoad{Used: 1, Total: 4, Observed: 1, Expected: 1}, 0.25, true},
		{PoolLoad{Used: 9, Total: 4, Observed: 1, Expected: 1}, 1, true},
		{PoolLoad{Used: 1, Total: 4, Observed: 1, Expected: 2}, 0, false},
		{PoolLoad{Used: 0, Total: 0, Observed: 1, Expected: 1}, 0, false},
		{PoolLoad{}, 0, false},
	} {
		if got, known := one.load.Usage(); got != one.want || known != one.known {
			t.Errorf("%+v: %v, %v", one.load, got, known)
		}
	}
}

// TestSlotIsFoundAsOneByOne compares the search of a word with a plain one.
func TestSlotIsFoundAsOneByOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b [8]byte
		few := rapid.SampledFrom([]uint16{0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF})
		for i := range slotsPerBucket {
			binary.LittleEndian.PutUint16(b[2*i:], few.Draw(t, "slot"))
		}
		word, fingerprint := binary.LittleEndian.Uint64(b[:]), few.Draw(t, "fingerprint")
		want, taken := slotsPerBucket, 0
		for i := range slotsPerBucket {
			v := binary.LittleEndian.Uint16(b[2*i:])
			if v == fingerprint && want == slotsPerBucket {
				want = i
			}
			if v != 0 {
				taken++
			}
		}
		if got := slot(word, fingerprint); got != want || used(word) != taken {
			t.Fatalf("%#x has %#x in slot %d and %d taken: want %d, %d", word, fingerprint, got, used(word), want, taken)
		}
	})
}

func BenchmarkPrefix(b *testing.B) {
	x := tell(b, producerOf(1<<20))
	random := rand.New(rand.NewPCG(1, 2))
	var prompt []uint64
	for i := range 1 << 20 {
		hash := random.Uint64()
		if i%1024 == 0 {
			prompt = append(prompt, hash)
		}
		x.store(kv.WorkerKey{Worker: 1}, 0, false, []kv.StoredBlock{{Engine: hash, Local: hash}})
	}
	filter := x.subscribeTo(b).stream.Filter()
	b.ResetTimer()
	b.ReportAllocs()
	for range b.N {
		if filter.Prefix(prompt) != len(prompt) {
			b.Fatal("a block is not found")
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(prompt)), "ns/block")
}

// BenchmarkTell measures what a block costs that a worker stores or removes: time, memory
// beside the index, and bytes for each follower, with 1,000 operations in each message.
func BenchmarkTell(b *testing.B) {
	const held = 1 << 19
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x := tell(b, producerOf(held))
	random := rand.New(rand.NewPCG(1, 2))
	w := kv.WorkerKey{Worker: 1}
	blocks := make([]uint64, held)
	for i := range blocks {
		blocks[i] = random.Uint64()
		x.store(w, 0, false, []kv.StoredBlock{{Engine: blocks[i], Local: blocks[i]}})
	}
	x.subscribeTo(b)
	runtime.GC()
	runtime.ReadMemStats(&after)
	sent := 0
	b.ResetTimer()
	for i := range b.N {
		old, hash := &blocks[random.IntN(held)], random.Uint64()
		x.remove(w, []uint64{*old})
		x.store(w, 0, false, []kv.StoredBlock{{Engine: hash, Local: hash}})
		*old = hash
		if i%500 == 499 {
			x.publish()
			for len(x.subscriber.queue) > 0 {
				message := <-x.subscriber.queue
				x.took(x.subscriber, message)
				sent += len(message)
			}
		}
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/held, "B/block")
	b.ReportMetric(float64(sent)/float64(2*b.N), "B/operation")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(2*b.N), "ns/operation")
}
