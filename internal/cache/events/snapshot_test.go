package events

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// savedStream returns a stream that has applied the batches, as a complete history.
func savedStream(t testing.TB, endpoint string, batches ...[]byte) *Stream {
	t.Helper()
	s := NewStream(Source{Worker: testkit.EventWorker, Endpoint: endpoint, Replay: "tcp://replay", Topic: "kv", BlockSize: testkit.BlockSize}, radix.NewTree(), Options{}, slog.New(slog.DiscardHandler))
	s.Begin(0)
	for i, b := range batches {
		s.Apply(uint64(i), b, true)
	}
	return s
}

func savedBatches(t testing.TB) [][]byte {
	return [][]byte{
		testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 4)),
		testkit.Payload(t, 2, testkit.StoredEvent(1, 4, 6), testkit.StoredEvent(2, 0, 3)),
		testkit.Payload(t, 3, testkit.RemovedEvent(2, 2, 3)),
	}
}

// snapshotFile writes a snapshot of the streams and returns its name.
func snapshotFile(t testing.TB, streams ...*Stream) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "index")
	s := OpenSnapshot(Settings{IndexSnapshot: name}, testkit.BlockSize, slog.New(slog.DiscardHandler))
	if err := s.save(t.Context(), streams); err != nil {
		t.Fatal(err)
	}
	return name
}

// opened opens a snapshot and returns it with what it has logged.
func opened(name string, blockSize int) (*Snapshot, *testkit.LogBuffer) {
	log := new(testkit.LogBuffer)
	return OpenSnapshot(Settings{IndexSnapshot: name, IndexSnapshotInterval: time.Hour}, blockSize, slog.New(slog.NewTextHandler(log, nil))), log
}

func TestASnapshotHoldsWhatTheIndexDoes(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		var batches [][]byte
		held := map[int]int{} // blocks by prompt
		for range 50 {
			number, event := random.IntN(30), testkit.Event(nil)
			if has := held[number]; has > 0 && random.IntN(3) == 0 {
				held[number] = random.IntN(has)
				event = testkit.RemovedEvent(number, held[number], has)
			} else {
				held[number] += 1 + random.IntN(5)
				event = testkit.StoredEvent(number, has, held[number])
			}
			batches = append(batches, testkit.Payload(t, random.Float64(), event))
		}
		from := savedStream(t, "tcp://a", batches...)
		snapshot, _ := opened(snapshotFile(t, from), testkit.BlockSize)
		to := savedStream(t, "tcp://a")
		snapshot.Resume(to)
		if blocks := to.index.Blocks(testkit.EventWorker); blocks != 0 {
			t.Fatalf("%d blocks count before the worker has proved that it is the same", blocks)
		}
		to.restore()
		asSet := func(s *Stream) map[radix.PlacedBlock]int {
			set := map[radix.PlacedBlock]int{}
			for block := range s.index.DumpOf(testkit.EventWorker) {
				set[block]++
			}
			return set
		}
		if !maps.Equal(asSet(from), asSet(to)) {
			t.Fatalf("%d blocks went in, %d came out", from.index.Blocks(testkit.EventWorker), to.index.Blocks(testkit.EventWorker))
		}
		if to.position() != from.position() || to.Stats().Cold.Load() {
			t.Fatalf("goes on at %+v, cold %v, want %+v", to.position(), to.Stats().Cold.Load(), from.position())
		}
	}
}

func TestASnapshotTellsThatBlocksAreMissing(t *testing.T) {
	hole := [][]byte{testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 4)), testkit.Payload(t, 2, testkit.RemovedEvent(1, 1, 2))}
	// Two copies of the first block: as many blocks as there would be without the hole.
	copied := append(hole, testkit.Payload(t, 3, testkit.StoredEvent(1, 0, 1)), testkit.Payload(t, 4, testkit.StoredEvent(1, 0, 1)))
	cold := savedStream(t, "tcp://a", savedBatches(t)...)
	cold.Stats().Cold.Store(true)
	for name, c := range map[string]struct {
		stream *Stream
		blocks int
	}{
		"behind a hole":                {savedStream(t, "tcp://a", hole...), 1},
		"behind a hole, beside copies": {savedStream(t, "tcp://a", copied...), 1},
		"ever since":                   {cold, 8},
	} {
		snapshot, _ := opened(snapshotFile(t, c.stream), testkit.BlockSize)
		to := savedStream(t, "tcp://a")
		snapshot.Resume(to)
		to.restore()
		if held := to.index.Blocks(testkit.EventWorker); held != c.blocks || !to.Stats().Cold.Load() {
			t.Errorf("%s: %d blocks, cold %v; want %d, true", name, held, to.Stats().Cold.Load(), c.blocks)
		}
	}
}

func TestASnapshotIsForTheSameEndpointWithReplayOnly(t *testing.T) {
	name := snapshotFile(t, savedStream(t, "tcp://a", savedBatches(t)...))
	for what, c := range map[string]struct {
		change func(*Source)
		want   bool
	}{
		"the same":                {func(*Source) {}, true},
		"another endpoint":        {func(src *Source) { src.Endpoint = "tcp://b" }, false},
		"another topic":           {func(src *Source) { src.Topic = "" }, false},
		"another worker":          {func(src *Source) { src.Worker.Worker++ }, false},
		"another rank":            {func(src *Source) { src.Worker.Rank++ }, false},
		"no replay":               {func(src *Source) { src.Replay = "" }, false},
		"blocks of a peer's dump": {func(src *Source) { src.Seeded = true }, false},
	} {
		snapshot, _ := opened(name, testkit.BlockSize)
		to := savedStream(t, "tcp://a")
		c.change(&to.Src)
		snapshot.Resume(to)
		if got := to.saved != nil; got != c.want {
			t.Errorf("%s: goes on from the snapshot: %v, want %v", what, got, c.want)
		}
	}
}

// sealed returns a body with the checksum that belongs to it.
func sealed(body string) string {
	return string(binary.LittleEndian.AppendUint64([]byte(body), xxh3.HashString(body)))
}

func TestBadSnapshotsAreLeftOutWithOneLine(t *testing.T) {
	data, err := os.ReadFile(snapshotFile(t, savedStream(t, "tcp://a", savedBatches(t)...)))
	if err != nil {
		t.Fatal(err)
	}
	good, body := string(data), string(data[:len(data)-8])
	const head = len(snapshotMagic) + 4
	rank := body[head : len(body)-1]
	flipped := func(at int) string {
		b := []byte(good)
		b[at] ^= 1
		return string(b)
	}
	for name, c := range map[string]struct {
		text, want string
		blockSize  int
		kept       bool // the file is not ours to write
	}{
		"empty":               {"", "it is corrupt", testkit.BlockSize, false},
		"somebody else's":     {"worker: 1\n", "it is not an index snapshot", testkit.BlockSize, true},
		"a byte changed":      {flipped(len(good) / 2), "checksum", testkit.BlockSize, false},
		"checksum changed":    {flipped(len(good) - 1), "checksum", testkit.BlockSize, false},
		"cut":                 {good[:len(good)-20], "checksum", testkit.BlockSize, false},
		"head only":           {good[:head], "it is corrupt", testkit.BlockSize, false},
		"more behind it":      {good + "x", "checksum", testkit.BlockSize, false},
		"its version is not":  {strings.Replace(good, "snapshot 3", "snapshot 9", 1), "its version is not", testkit.BlockSize, false},
		"another block size":  {good, "its block size is", testkit.BlockSize * 2, false},
		"cut and sealed":      {sealed(body[:len(body)-20]), "it is corrupt", testkit.BlockSize, false},
		"a rank twice":        {sealed(body[:head] + rank + rank + "\x00"), "it is corrupt", testkit.BlockSize, false},
		"no end":              {sealed(body[:len(body)-1]), "it is corrupt", testkit.BlockSize, false},
		"more than its ranks": {sealed(body + "\x00"), "it is corrupt", testkit.BlockSize, false},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "index")
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			snapshot, log := opened(file, c.blockSize)
			if lines := strings.Count(log.String(), "\n"); lines != 1 || !strings.Contains(log.String(), c.want) {
				t.Errorf("logged %d lines, want one with %q:\n%s", lines, c.want, log)
			}
			if len(snapshot.ranks) != 0 {
				t.Errorf("%d ranks of it count", len(snapshot.ranks))
			}
			if err := snapshot.save(t.Context(), []*Stream{savedStream(t, "tcp://a", savedBatches(t)...)}); err != nil {
				t.Fatal(err)
			}
			after, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if kept := string(after) == c.text; kept != c.kept {
				t.Errorf("the file is kept: %v, want %v", kept, c.kept)
			}
		})
	}
}

func TestASnapshotOfNoFileIsLeftAlone(t *testing.T) {
	folder := t.TempDir()
	snapshot, log := opened(folder, testkit.BlockSize)
	if !snapshot.off || strings.Count(log.String(), "\n") != 1 {
		t.Errorf("a folder is to be written: %v; log: %s", !snapshot.off, log)
	}
	large := filepath.Join(folder, "large")
	if err := os.WriteFile(large, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(large, maxSnapshotBytes+1); err != nil {
		t.Fatal(err)
	}
	if _, log := opened(large, testkit.BlockSize); !strings.Contains(log.String(), "more than the") {
		t.Errorf("a file that is too large is read: %s", log)
	}
}

func TestASnapshotThatCannotBeWrittenLeavesTheOldOne(t *testing.T) {
	stream := savedStream(t, "tcp://a", savedBatches(t)...)
	name := snapshotFile(t, stream)
	before, _ := os.ReadFile(name)
	snapshot, _ := opened(name, testkit.BlockSize)
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if err := snapshot.save(late, []*Stream{stream}); err == nil {
		t.Error("a write past its time is no error")
	}
	if after, _ := os.ReadFile(name); string(after) != string(before) || len(before) == 0 {
		t.Error("a failed write has changed the file")
	}
	if left, _ := filepath.Glob(name + ".*"); len(left) > 0 {
		t.Errorf("a failed write leaves %v", left)
	}
}

// TestASnapshotIsWrittenToNoOtherFile: whatever has the name of its temporary file.
func TestASnapshotIsWrittenToNoOtherFile(t *testing.T) {
	stream := savedStream(t, "tcp://a", savedBatches(t)...)
	other := filepath.Join(t.TempDir(), "other")
	for name, make := range map[string]func(at string) error{
		"a link":        func(at string) error { return os.Symlink(other, at) },
		"a second name": func(at string) error { return os.Link(other, at) },
		"a pipe":        func(at string) error { return syscall.Mkfifo(at, 0o600) },
	} {
		if err := os.WriteFile(other, []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "index")
		if err := make(file + ".tmp"); err != nil {
			t.Fatal(err)
		}
		snapshot, _ := opened(file, testkit.BlockSize)
		if err := snapshot.save(t.Context(), []*Stream{stream}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if text, err := os.ReadFile(other); err != nil || string(text) != "mine" {
			t.Errorf("%s: the other file has %q, %v", name, text, err)
		}
		if info, err := os.Lstat(file); err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

func TestASnapshotKeepsWhatHasNotBeenHeardOfYet(t *testing.T) {
	name := snapshotFile(t, savedStream(t, "tcp://a", savedBatches(t)...))
	snapshot, _ := opened(name, testkit.BlockSize)
	other := savedStream(t, "tcp://b", savedBatches(t)...)
	other.Src.Worker.Worker = 77
	again := func() map[kv.WorkerKey]*savedRank {
		if err := snapshot.save(t.Context(), []*Stream{other}); err != nil {
			t.Fatal(err)
		}
		next, _ := opened(name, testkit.BlockSize)
		return next.ranks
	}
	ranks := again()
	if rank := ranks[testkit.EventWorker]; len(ranks) != 2 || rank == nil || rank.blocks != 8 || !rank.complete || rank.endpoint != "tcp://a" {
		t.Fatalf("a worker that is not there yet is lost: %+v", ranks)
	}
	snapshot.ranks[testkit.EventWorker].settled.Store(true)
	other.Apply(3, testkit.Payload(t, 4, testkit.StoredEvent(5, 0, 1)), true)
	if ranks := again(); len(ranks) != 1 || ranks[testkit.EventWorker] != nil {
		t.Errorf("a worker that is another now is kept: %+v", ranks)
	}
}

func TestASnapshotIsWrittenOnlyWhenThereIsNews(t *testing.T) {
	stream := savedStream(t, "tcp://a", savedBatches(t)...)
	name := filepath.Join(t.TempDir(), "index")
	snapshot, _ := opened(name, testkit.BlockSize)
	written := func() bool {
		_ = os.Remove(name)
		if err := snapshot.save(t.Context(), []*Stream{stream}); err != nil {
			t.Fatal(err)
		}
		_, err := os.Stat(name)
		return err == nil
	}
	if !written() || written() {
		t.Error("want the first write and no second")
	}
	stream.Apply(3, testkit.Payload(t, 4, testkit.StoredEvent(5, 0, 1)), true)
	if !written() {
		t.Error("a new batch is not written")
	}
	stream.forget("test")
	if !written() {
		t.Error("the end of what is known is not written")
	}
}

// One rank of too many blocks, copies among them, must not cost the others.
func TestASnapshotHoldsTheFirstBlocksOfARankThatHasTooMany(t *testing.T) {
	const most = 5
	copies := [][]byte{testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2))}
	for range most {
		copies = append(copies, testkit.Payload(t, 2, testkit.StoredEvent(1, 1, 2)))
	}
	other := savedStream(t, "tcp://b", savedBatches(t)[:1]...)
	other.Src.Worker.Worker = 77
	for name, c := range map[string]struct {
		batches [][]byte
		held    int
	}{
		"blocks": {savedBatches(t), most},
		"copies": {copies, 2},
	} {
		var file bytes.Buffer
		w := newSnapshotWriter(&file, testkit.BlockSize)
		w.most = most
		large := savedStream(t, "tcp://a", c.batches...)
		for _, stream := range []*Stream{large, other} {
			if _, ok := w.stream(t.Context(), stream); !ok {
				t.Fatalf("%s: a rank is left out", name)
			}
		}
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
		ranks, err := parseSnapshot(file.Bytes(), testkit.BlockSize)
		if err != nil {
			t.Fatal(name, err)
		}
		rank := ranks[large.Src.Worker]
		if rank.blocks != most || rank.complete || !ranks[other.Src.Worker].complete {
			t.Errorf("%s: %d blocks, complete %v; want %d, false", name, rank.blocks, rank.complete, most)
		}
		to := savedStream(t, "tcp://a")
		to.saved = rank
		to.restore()
		if held := to.index.Blocks(testkit.EventWorker); held != c.held || !to.Stats().Cold.Load() {
			t.Errorf("%s: %d different blocks come out, want %d", name, held, c.held)
		}
	}
	if w := newSnapshotWriter(new(bytes.Buffer), testkit.BlockSize); w.most != maxHeld {
		t.Errorf("writes %d blocks of a rank, reads %d", w.most, maxHeld)
	}
}

// A worker that ends while a snapshot is on its way to it loses its blocks.
func TestASnapshotHoldsNothingOfAStreamThatHasEnded(t *testing.T) {
	stream := savedStream(t, "tcp://a", savedBatches(t)...)
	stream.Close()
	radixtest.Forget(stream.index, stream.Src.Worker.Worker)
	if _, ok := newSnapshotWriter(new(bytes.Buffer), testkit.BlockSize).stream(t.Context(), stream); ok {
		t.Error("an ended stream's rank is written")
	}
}

func TestASnapshotIsDueBeforeTheReplayForgetsIt(t *testing.T) {
	const interval = time.Minute
	written := uint64(len(savedBatches(t)))
	for name, c := range map[string]struct {
		age, rest time.Duration
		buffer    int
		batches   uint64 // since the last write
		want      bool
	}{
		"nothing new":                     {time.Second, 0, 100, 0, false},
		"less than a quarter":             {time.Second, 0, 100, 24, false},
		"a quarter":                       {time.Second, 0, 100, 25, true},
		"a quarter, but writing is slow":  {time.Second, 2 * time.Second, 100, 25, false},
		"the interval":                    {interval, 2 * interval, 100, 0, true},
		"less than a quarter of 10,000":   {time.Second, 0, 0, 2499, false},
		"a quarter of 10,000":             {time.Second, 0, 0, 2500, true},
		"the smallest buffer":             {time.Second, 0, 1, 1, true},
		"the smallest buffer, no news":    {time.Second, 0, 1, 0, false},
		"the engine counts from 0 anew":   {time.Second, 0, 100, -written + 1, true},
		"its place is not known any more": {time.Second, 0, 100, -written, false},
	} {
		stream := savedStream(t, "tcp://a", savedBatches(t)...)
		stream.Src.Buffer = c.buffer
		s := &Snapshot{
			settings: Settings{IndexSnapshotInterval: interval}, rest: c.rest, began: time.Unix(1000, 0),
			written: map[kv.WorkerKey]position{testkit.EventWorker: stream.position()},
		}
		at := stream.position()
		at.next += c.batches
		stream.history.reach(at)
		if got := s.due(s.began.Add(c.age), []*Stream{stream}); got != c.want {
			t.Errorf("%s: due %v, want %v", name, got, c.want)
		}
	}
}

// What can never be in the file, or is of no use there, must not have it written again
// and again.
func TestASnapshotIsNotDueForARankThatItCannotHelp(t *testing.T) {
	for name, change := range map[string]func(*Source){
		"no replay":        func(src *Source) { src.Replay = "" },
		"too long a topic": func(src *Source) { src.Topic = strings.Repeat("t", maxSnapshotText+1) },
	} {
		stream := savedStream(t, "tcp://a", savedBatches(t)...)
		stream.Src.Buffer = 1
		change(&stream.Src)
		s := &Snapshot{settings: Settings{IndexSnapshotInterval: time.Minute}, began: time.Unix(1000, 0)}
		if s.due(s.began.Add(time.Second), []*Stream{stream}) {
			t.Errorf("%s: due", name)
		}
		if fits := fitsSnapshot(stream.Src); !fits && !s.unchanged([]*Stream{stream}) {
			t.Errorf("%s: changed", name)
		}
	}
}

// Blocks of a peer's dump may be newer than the batch that was applied last: a later
// replay of what lies between would store them twice.
func TestASnapshotHoldsNoPeersBlocksBeforeTheReplayIsThrough(t *testing.T) {
	stream := savedStream(t, "tcp://a", savedBatches(t)...)
	stream.history.cleared()
	stream.seeded = true
	stream.Apply(3, testkit.Payload(t, 4, testkit.StoredEvent(5, 0, 1)), true)
	if at := stream.history.position(); at.next != 0 {
		t.Errorf("is said to be as of %+v", at)
	}
}

func FuzzSnapshot(f *testing.F) {
	data, err := os.ReadFile(snapshotFile(f, savedStream(f, "tcp://a", savedBatches(f)...)))
	if err != nil {
		f.Fatal(err)
	}
	body := data[len(snapshotMagic)+4 : len(data)-8]
	f.Add(body)
	f.Add(body[:len(body)-5])
	f.Fuzz(func(t *testing.T, body []byte) {
		head := binary.LittleEndian.AppendUint32([]byte(snapshotMagic), testkit.BlockSize)
		ranks, err := parseSnapshot([]byte(sealed(string(head)+string(body))), testkit.BlockSize)
		if err != nil {
			return
		}
		for key, rank := range ranks {
			if rank.blocks*16 > len(rank.runs) {
				t.Fatalf("%d blocks out of %d bytes", rank.blocks, len(rank.runs))
			}
			s := NewStream(Source{Worker: key, Endpoint: rank.endpoint, Topic: rank.topic, Replay: "tcp://replay", BlockSize: testkit.BlockSize}, radix.NewTree(), Options{}, slog.New(slog.DiscardHandler))
			snapshot := &Snapshot{ranks: ranks}
			if snapshot.Resume(s); s.saved != rank {
				t.Fatal("the rank is not taken")
			}
			s.restore()
			if held := s.index.Blocks(key); held > rank.blocks {
				t.Fatalf("holds %d blocks of %d", held, rank.blocks)
			}
		}
	})
}
