package summary

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/testkit"
)

// failer is what a test and a rapid one have in common.
type failer interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// pass applies messages to a view, and fails the test at an error.
func pass(t failer, v *View, messages ...[]byte) {
	t.Helper()
	for _, m := range messages {
		if len(m) > MaxMessage {
			t.Fatalf("a message of %d bytes", len(m))
		}
		if err := v.Apply(m); err != nil {
			t.Fatal(err)
		}
	}
}

// publish publishes all changes.
func publish(b *Book) {
	for before := b.Publish(MaxMessage); ; {
		at := b.Publish(MaxMessage)
		if at == before {
			return
		}
		before = at
	}
}

// follow brings a view to the book's position, by deltas if they are kept. It reports whether
// they were.
func follow(t failer, v *View, b *Book) (resumed bool) {
	t.Helper()
	if at, ok := v.Position(); ok {
		if deltas, ok := b.Since(at); ok {
			pass(t, v, deltas...)
			return true
		}
	}
	snapshot, _ := b.Snapshot()
	pass(t, v, snapshot...)
	return false
}

// TestViewFollowsTheSet compares views with an exact set under random operations: they hold each
// listed hash, and others no more often than stated.
func TestViewFollowsTheSet(t *testing.T) {
	falls, looks := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		random := rand.New(rand.NewPCG(seed, 1))
		hash := func(i int) uint64 { return rand.New(rand.NewPCG(seed, uint64(i)+2)).Uint64() }
		book, set := NewBook(), map[int]int{}
		universe := rapid.SampledFrom([]int{10, 300, 3000}).Draw(t, "universe")
		views := []*View{{}, {}}
		compare := func(v *View) {
			for i := range universe {
				held := v.Run([]uint64{hash(i)}) == 1
				if set[i] > 0 && !held {
					t.Fatalf("hash %d is held %d times and not found", i, set[i])
				}
				if set[i] == 0 {
					if looks++; held {
						falls++
					}
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"hold": func(t *rapid.T) {
				for range rapid.IntRange(1, 400).Draw(t, "n") {
					i := random.IntN(universe)
					set[i]++
					book.Hold(hash(i))
				}
			},
			"drop": func(t *rapid.T) {
				for range rapid.IntRange(1, 400).Draw(t, "n") {
					if i := random.IntN(universe); set[i] > 0 {
						set[i]--
						book.Drop(hash(i))
					}
				}
			},
			"dropUnknown": func(*rapid.T) { book.Drop(random.Uint64()) },
			"publishSome": func(*rapid.T) { book.Publish(0) },
			"cut":         func(*rapid.T) { views[1].Empty() },
			"gap": func(t *rapid.T) {
				delta := binary.LittleEndian.AppendUint64([]byte{kindDelta}, random.Uint64()>>1+1<<62)
				if err := views[1].Apply(delta); !errors.Is(err, ErrGap) {
					t.Fatalf("a gap: %v", err)
				}
				if run := views[1].Run([]uint64{hash(0)}); run != 0 {
					t.Fatal("a view with a gap is not empty")
				}
			},
			"follow": func(t *rapid.T) {
				publish(book)
				for _, v := range views {
					follow(t, v, book)
					compare(v)
				}
			},
			"": func(t *rapid.T) {
				if err := book.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
	if most := 10 + 3*float64(looks)*FalsePositive; float64(falls) > most {
		t.Errorf("%d of %d look-ups were false: more than %.0f", falls, looks, most)
	}
}

func TestFalsePositivesStayBelowTheStatedRate(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	book, view := NewBook(), &View{}
	const held, looks = 200_000, 2_000_000
	for range held {
		book.Hold(random.Uint64())
	}
	publish(book)
	follow(t, view, book)
	falls := 0
	for range looks {
		falls += view.Run([]uint64{random.Uint64()})
	}
	rate := float64(falls) / looks
	t.Logf("%d hashes in %d bytes: %.5f %% false, stated %.5f %%", held, view.Bytes(), 100*rate, 100*FalsePositive)
	if rate > 1.1*FalsePositive {
		t.Errorf("%.5f %% of the look-ups were false, stated are %.5f %%", 100*rate, 100*FalsePositive)
	}
}

func TestRunEndsAtTheFirstMissingHash(t *testing.T) {
	book, view := NewBook(), &View{}
	for _, hash := range []uint64{1, 2, 4} {
		book.Hold(hash)
	}
	publish(book)
	if run := view.Run([]uint64{1, 2}); run != 0 {
		t.Errorf("an empty view holds %d", run)
	}
	snapshot, _ := book.Snapshot()
	pass(t, view, snapshot[:len(snapshot)-1]...)
	if run := view.Run([]uint64{1, 2}); run != 0 {
		t.Errorf("half a snapshot holds %d", run)
	}
	pass(t, view, snapshot[len(snapshot)-1])
	if run := view.Run([]uint64{1, 2, 3, 4}); run != 2 {
		t.Errorf("run of %d, want 2", run)
	}
}

func TestReadersResumeOrGetASnapshot(t *testing.T) {
	book, view := NewBook(), &View{}
	book.Hold(1)
	publish(book)
	if follow(t, view, book) {
		t.Error("the first messages are a snapshot")
	}
	book.Hold(2)
	publish(book)
	book.Drop(1)
	publish(book)
	if !follow(t, view, book) {
		t.Error("two deltas are kept")
	}
	if view.Run([]uint64{2}) != 1 || view.Run([]uint64{1}) != 0 {
		t.Error("the deltas were not applied")
	}
	for hash := range uint64(5000) { // the filter grows: another epoch
		book.Hold(hash)
	}
	publish(book)
	if follow(t, view, book) {
		t.Error("deltas lead from one filter to another")
	}
	if view.Run([]uint64{4999}) != 1 {
		t.Error("the snapshot was not applied")
	}
	if _, ok := book.Since(Position{Epoch: 1, Seq: 1}); ok {
		t.Error("a position that never was is resumed")
	}
	if at, _ := view.Position(); true {
		at.Seq += 7
		if _, ok := book.Since(at); ok {
			t.Error("a position in the future is resumed")
		}
	}
}

// TestASnapshotMayBeSentWhileTheSetChanges: in parts, of which each has what is sent by then. The
// deltas since its beginning complete it.
func TestASnapshotMayBeSentWhileTheSetChanges(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	book, view := NewBook(), &View{}
	hash := func(i int) uint64 { return uint64(i+1) * 0x9e3779b97f4a7c15 }
	const universe = 200_000
	held := make([]bool, universe)
	turn := func(n int) {
		for range n {
			i := random.IntN(universe)
			if held[i] = !held[i]; held[i] {
				book.Hold(hash(i))
			} else {
				book.Drop(hash(i))
			}
		}
		publish(book)
	}
	turn(2 * universe)
	message, at := book.Begin()
	parts := 0
	for bucket, same := 0, true; message != nil; parts++ {
		pass(t, view, message)
		turn(5_000)
		if message, bucket, same = book.Part(at, bucket); !same {
			t.Fatal("the filter has grown")
		}
	}
	if !follow(t, view, book) {
		t.Fatal("the deltas since its beginning are not kept")
	}
	falls := 0
	for i := range universe {
		switch found := view.Run([]uint64{hash(i)}) == 1; {
		case held[i] && !found:
			t.Fatalf("hash %d is held and not found", i)
		case found && !held[i]:
			falls++
		}
	}
	if most := 10 + 2*universe*FalsePositive; parts < 4 || float64(falls) > most {
		t.Errorf("%d parts; %d hashes are found that are not held, at most %.0f", parts, falls, most)
	}
	book.grow()
	if _, _, same := book.Part(at, 0); same {
		t.Error("a snapshot goes on with another filter")
	}
}

func TestABurstIsToldInBoundedDeltas(t *testing.T) {
	book, view := NewBook(), &View{}
	for hash := range uint64(100_000) {
		book.Hold(hash)
	}
	publish(book)
	follow(t, view, book)
	for hash := range uint64(20_000) {
		book.Drop(hash)
		book.Hold(1_000_000 + hash)
	}
	const most = 8 << 10
	before := book.Publish(most)
	for rounds := 0; ; rounds++ {
		deltas, ok := book.Since(before)
		if !ok {
			t.Fatal("no delta is kept")
		}
		for _, d := range deltas {
			if len(d) > most {
				t.Fatalf("a delta of %d bytes", len(d))
			}
		}
		if at := book.Publish(most); at == before {
			t.Logf("sent in %d deltas of up to %d bytes", rounds, most)
			break
		} else {
			before = at
		}
	}
	follow(t, view, book)
	for hash := range uint64(20_000) {
		if view.Run([]uint64{1_000_000 + hash}) != 1 {
			t.Fatalf("hash %d is not listed", hash)
		}
	}
}

func TestMalformedMessagesEmptyTheView(t *testing.T) {
	book := NewBook()
	book.Hold(1)
	publish(book)
	snapshot, at := book.Snapshot()
	delta := func(changes ...byte) []byte {
		return append(binary.LittleEndian.AppendUint64([]byte{kindDelta}, at.Seq+1), changes...)
	}
	for name, message := range map[string][]byte{
		"empty":            {},
		"unknown kind":     {'x'},
		"short reset":      snapshot[0][:10],
		"too many buckets": append(append([]byte{}, snapshot[0][:17]...), MaxBits+1, 0, 0, 0, 0, 0, 0, 0, 0),
		"short delta":      {kindDelta, 1},
		"cut change":       delta(0x11, 1),
		"no lane":          delta(0x10, 1, 1),
		"bucket beyond":    delta(0xff, 0xff, 0xff, 0xff, 0x7f, 1, 1),
		"part outside":     {kindPart},
		"end outside":      {kindEnd},
		"huge":             make([]byte, MaxMessage+1),
	} {
		view := &View{}
		pass(t, view, snapshot...)
		if err := view.Apply(message); err == nil {
			t.Errorf("%s: accepted", name)
		}
		if _, ok := view.Position(); ok || view.Run([]uint64{1}) != 0 || view.Bytes() != 0 {
			t.Errorf("%s: the view is not empty", name)
		}
	}
}

// TestAFalseSummaryCannotClaimEverything: each lane of the largest bucket pair counts for one
// fingerprint of 65,535.
func TestAFalseSummaryCannotClaimEverything(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for name, lane := range map[string]func() uint64{
		"random": random.Uint64,
		"equal":  func() uint64 { return 0x0001_0001_0001_0001 },
		"full":   func() uint64 { return ^uint64(0) },
	} {
		view, part := &View{}, []byte{kindPart}
		for range 1 << minBits {
			part = appendChange(part, 1, 0, lane()|0x0001_0001_0001_0001)
		}
		reset := append(make([]byte, resetSize-9), minBits)
		reset[0] = kindReset
		pass(t, view, append(reset, make([]byte, 8)...), part, []byte{kindEnd})
		falls := 0
		const looks = 500_000
		for range looks {
			falls += view.Run([]uint64{random.Uint64()})
		}
		if rate := float64(falls) / looks; rate > 1.3*FalsePositive {
			t.Errorf("%s: it holds %.4f %% of what nobody has named, stated are %.4f %%", name, 100*rate, 100*FalsePositive)
		}
	}
}

// FuzzView applies foreign messages: whatever they say, memory stays bounded, and a hash that
// nobody has named is not found but by chance.
func FuzzView(f *testing.F) {
	book := NewBook()
	for hash := range uint64(100) {
		book.Hold(hash)
	}
	publish(book)
	snapshot, _ := book.Snapshot()
	book.Hold(1000)
	publish(book)
	joined := func(messages ...[]byte) (all []byte) {
		for _, m := range messages {
			all = append(binary.LittleEndian.AppendUint32(all, uint32(len(m))), m...)
		}
		return all
	}
	f.Add(joined(snapshot...))
	f.Add(joined(append(snapshot, book.log...)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		view := &View{}
		for len(data) >= 4 {
			n := int(min(uint64(binary.LittleEndian.Uint32(data)), uint64(len(data)-4)))
			err := view.Apply(data[4 : 4+n])
			if _, ok := view.Position(); ok && err != nil {
				t.Fatal("a view after an error is not empty")
			}
			data = data[4+n:]
		}
		if view.Bytes() > 8<<MaxBits {
			t.Fatalf("%d bytes", view.Bytes())
		}
		view.Run([]uint64{1, 2, 3})
	})
}

// BenchmarkDeltas publishes 100,000 block operations a second in intervals of 200 ms, with 1 M and 10 M
// blocks held; bytes/s is the traffic of one reader, ns/op the time for one interval, and
// ms/publish the CPU time of publishing in that.
func BenchmarkDeltas(b *testing.B) {
	for _, held := range []uint64{1_000_000, 10_000_000} {
		b.Run(fmt.Sprintf("held=%dM", held/1_000_000), func(b *testing.B) {
			const perInterval = 20_000
			book := NewBook()
			for hash := range held {
				book.Hold(hash)
			}
			publish(book)
			next, bytes, messages, published := held, 0, 0, time.Duration(0)
			for b.Loop() {
				for range perInterval / 2 {
					book.Drop(next - held)
					book.Hold(next)
					next++
				}
				before, began := book.at, testkit.CPUTime()
				book.Publish(200 << 10)
				published += testkit.CPUTime() - began
				deltas, ok := book.Since(before)
				if !ok {
					continue // the filter has grown
				}
				for _, d := range deltas {
					bytes += len(d)
					messages++
				}
			}
			b.ReportMetric(float64(bytes)/float64(messages)*5, "bytes/s")
			b.ReportMetric(8*float64(book.Size().Buckets)/float64(held), "bytes/block")
			b.ReportMetric(published.Seconds()*1000/float64(messages), "ms/publish")
		})
	}
}

func BenchmarkRun(b *testing.B) {
	const held = 1_000_000
	book, view := NewBook(), &View{}
	for hash := range uint64(held) {
		book.Hold(hash)
	}
	publish(book)
	follow(b, view, book)
	sequence := make([]uint64, 128)
	for i := range sequence {
		sequence[i] = uint64(i * 7000)
	}
	for b.Loop() {
		if view.Run(sequence) != len(sequence) {
			b.Fatal("a hash is missing")
		}
	}
}

// TestMessagesStayThoseOfOtherVersions pins the messages of a book whose filter is nearly full
// and grows: both ends place hashes alike, also if one of them is older.
func TestMessagesStayThoseOfOtherVersions(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	b, sum := NewBookFrom(random.Uint64), sha256.New()
	var held []uint64
	for range 40 {
		for range 60 {
			held = append(held, random.Uint64())
			b.Hold(held[len(held)-1])
		}
		b.Drop(held[0])
		held = held[1:]
		at := b.Position()
		b.Publish(MaxMessage)
		deltas, _ := b.Since(at)
		snapshot, _ := b.Snapshot()
		for _, message := range append(deltas, snapshot...) {
			sum.Write(message)
		}
	}
	if got := fmt.Sprintf("%x", sum.Sum(nil)[:8]); got != "31896beab3a249ce" {
		t.Errorf("the messages have the checksum %s", got)
	}
}
