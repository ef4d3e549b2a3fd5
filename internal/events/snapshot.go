package events

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/kv"
)

// A snapshot is the blocks of every followed rank in a file, each rank with the
// last batch that they are as of: its number and the hash of its bytes. Whoever
// starts from it asks the rank's replay for that batch. Only if it comes back
// unchanged do the blocks count, and the batches after it are applied to them. A
// batch holds the time when it was made, so a restarted engine cannot send the same
// one. Every other answer leaves the rank empty.
//
// The file is snapshotMagic, the block size (uint32), the ranks, a zero byte and
// the XXH3-64 of all before. Numbers are little-endian. See appendRank and
// appendRun for a rank.

// Settings are the flags of a Snapshot.
type Settings struct {
	IndexSnapshot         string        `group:"Routing" placeholder:"FILE" help:"Keep the index of KV events in FILE, and start from it: each worker whose replay proves that it is still the same goes on where the file ends, the others start empty. One file for each router."`
	IndexSnapshotInterval time.Duration `group:"Routing" default:"30s" help:"Time between two writes of --index-snapshot. What a worker has published since the last must still be in its replay buffer."`
}

// Validate checks the settings.
func (s Settings) Validate() error {
	switch {
	case s.IndexSnapshotInterval < minSnapshotInterval:
		return fmt.Errorf("--index-snapshot-interval %v: give at least %v", s.IndexSnapshotInterval, minSnapshotInterval)
	case s.IndexSnapshot == "":
		return nil
	}
	if info, err := os.Stat(filepath.Dir(s.IndexSnapshot)); err != nil || !info.IsDir() {
		return fmt.Errorf("--index-snapshot %s: there is no folder %s: create it", s.IndexSnapshot, filepath.Dir(s.IndexSnapshot))
	}
	return nil
}

const (
	snapshotName  = "kvrouter index snapshot "
	snapshotMagic = snapshotName + "1\n" // with the version
	// snapshotTail is the zero byte after the ranks and the checksum.
	snapshotTail = 1 + 8

	minSnapshotInterval = 100 * time.Millisecond
	// maxSnapshotBytes bounds the file; a block takes 16 bytes in it.
	maxSnapshotBytes = 1 << 30
	// snapshotEnd is the longest time for the last write, at the router's end;
	// snapshotLimit for one before.
	snapshotEnd, snapshotLimit = 10 * time.Second, time.Minute
	// snapshotKept is how long after the start the file's blocks of a rank are
	// kept that has not been heard of yet.
	snapshotKept = 10 * time.Minute
)

// Reasons why a file is no snapshot to start from.
var (
	errNoSnapshot     = errors.New("it is no index snapshot and stays as it is: name another file")
	errBrokenSnapshot = errors.New("it is broken")
)

// savedRank is what a snapshot holds of one rank.
type savedRank struct {
	worker          kv.WorkerKey
	endpoint, topic string
	at              position
	complete        bool // no block that the rank held is missing
	blocks          int
	runs            []byte // as in the file
	// settled says that its blocks are in the index, or never will be.
	settled atomic.Bool
}

// Snapshot keeps the index in a file. A nil one does nothing.
type Snapshot struct {
	settings  Settings
	blockSize int
	log       *slog.Logger
	opened    time.Time
	off       bool // the file is somebody else's: it is not written

	mu    sync.Mutex // guards ranks
	ranks map[kv.WorkerKey]*savedRank

	written map[kv.WorkerKey]position // what the file is as of; belongs to Run
}

// OpenSnapshot reads the file, if there is one; no file set: nil. What is wrong with
// the file is logged, and nothing of it counts.
func OpenSnapshot(settings Settings, blockSize int, log *slog.Logger) *Snapshot {
	if settings.IndexSnapshot == "" {
		return nil
	}
	s := &Snapshot{settings: settings, blockSize: blockSize, log: log.With("file", settings.IndexSnapshot), opened: time.Now()}
	data, err := readSnapshotFile(settings.IndexSnapshot)
	if errors.Is(err, fs.ErrNotExist) {
		return s
	}
	if err == nil {
		s.ranks, err = parseSnapshot(data, blockSize)
	}
	if err != nil {
		s.off = errors.Is(err, errNoSnapshot)
		s.log.Warn("--index-snapshot cannot be used: starting with an empty index", "error", err)
		return s
	}
	blocks := 0
	for _, rank := range s.ranks {
		blocks += rank.blocks
	}
	s.log.Info("read the index snapshot; workers must prove that they are still the same", "ranks", len(s.ranks), "blocks", blocks)
	return s
}

func readSnapshotFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errNoSnapshot
	case info.Size() > maxSnapshotBytes:
		return nil, fmt.Errorf("it has %d bytes, more than the %d that are read", info.Size(), maxSnapshotBytes)
	}
	return os.ReadFile(name)
}

// Resume lets the stream go on from the file's blocks of its rank, once the rank
// has proved that it is still the same. Without a replay endpoint it cannot. Call it
// before the stream's Run.
func (s *Snapshot) Resume(stream *Stream) {
	if s == nil || stream.Src.Replay == "" || stream.Src.Seeded {
		return
	}
	s.mu.Lock()
	rank := s.ranks[stream.Src.Worker]
	s.mu.Unlock()
	if rank == nil || rank.settled.Load() {
		return
	}
	if rank.endpoint != stream.Src.Endpoint || rank.topic != stream.Src.Topic {
		rank.settled.Store(true)
		stream.log.Info("left out the worker's blocks of --index-snapshot: its KV events came from elsewhere", "from", rank.endpoint)
		return
	}
	stream.saved, stream.sure = rank, true
	stream.next, stream.sum, stream.group, stream.groupKnown = rank.at.next, rank.at.sum, rank.at.group, rank.at.groupKnown
}

// restore puts the snapshot's blocks into the index: the publisher has proved that
// they are its own.
func (s *Stream) restore() {
	rank := s.saved
	if rank == nil {
		return
	}
	cold := !rank.complete
	s.index.Clear(s.Src.Worker)
	for r := (snapshotReader{data: rank.runs}); len(r.data) > 0; {
		var parent uint64
		var hasParent bool
		s.blocks, parent, hasParent = r.run(s.blocks[:0])
		if s.index.Store(s.Src.Worker, parent, hasParent, s.blocks) != nil {
			cold = true
		}
	}
	s.stats.Cold.Store(cold)
	s.stats.LastSeq.Store(rank.at.next - 1)
	s.settle()
	s.log.Info("goes on from the worker's blocks of --index-snapshot", "batch", rank.at.next-1, "blocks", s.index.Blocks(s.Src.Worker))
}

// settle ends the wait for a proof of the snapshot's blocks.
func (s *Stream) settle() {
	if s.saved != nil {
		s.saved.settled.Store(true)
		s.saved = nil
	}
}

// Run writes what the streams know to the file every interval until ctx ends, and
// once more then. Writes that fail are logged; the file stays as it was.
func (s *Snapshot) Run(ctx context.Context, streams func() []*Stream) {
	ticker := time.NewTicker(s.settings.IndexSnapshotInterval)
	defer ticker.Stop()
	for running := true; running; {
		limit := snapshotLimit
		select {
		case <-ctx.Done():
			running, limit = false, snapshotEnd
		case <-ticker.C:
		}
		writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
		if err := s.save(writing, streams()); err != nil {
			s.log.Warn("cannot write --index-snapshot: the file stays as it was", "error", err)
		}
		cancel()
	}
}

// save replaces the file if something has changed since it last did. Whoever reads
// it meanwhile finds the old one or the new one, whole.
func (s *Snapshot) save(ctx context.Context, streams []*Stream) error {
	waiting := s.waiting()
	if s.off || s.unchanged(streams) {
		return nil
	}
	temporary := s.settings.IndexSnapshot + ".tmp" // always the same, so that crashes leave one at most
	file, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	written, err := writeSnapshot(ctx, file, s.blockSize, streams, waiting)
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(temporary, s.settings.IndexSnapshot)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	s.written = written
	return nil
}

// waiting returns the ranks of the file that have not been heard of yet: they go
// into the next file as they are. Those that are settled, or all after
// snapshotKept, are forgotten.
func (s *Snapshot) waiting() (ranks []*savedRank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := time.Since(s.opened) > snapshotKept
	for key, rank := range s.ranks {
		if late || rank.settled.Load() {
			delete(s.ranks, key)
			continue
		}
		ranks = append(ranks, rank)
	}
	return ranks
}

// unchanged tells whether the file is as of where the streams are now.
func (s *Snapshot) unchanged(streams []*Stream) bool {
	known := 0
	for _, stream := range streams {
		at := stream.history.position()
		if at.next == 0 {
			continue
		}
		if known++; s.written[stream.Src.Worker] != at {
			return false
		}
	}
	return known == len(s.written)
}

// snapshotWriter writes a bounded file and keeps its checksum.
type snapshotWriter struct {
	out  *bufio.Writer
	sum  *xxh3.Hasher
	size int
	err  error // the first
}

func (w *snapshotWriter) write(data []byte) {
	if w.size += len(data); w.size+snapshotTail > maxSnapshotBytes && w.err == nil {
		w.err = fmt.Errorf("the index is larger than the %d bytes that a snapshot may have", maxSnapshotBytes)
	}
	if w.err == nil {
		_, _ = w.sum.Write(data) // never fails
		_, w.err = w.out.Write(data)
	}
}

// writeSnapshot writes what the streams know of their ranks, and those waiting. It
// returns what each stream's rank is as of.
func writeSnapshot(ctx context.Context, file *os.File, blockSize int, streams []*Stream, waiting []*savedRank) (map[kv.WorkerKey]position, error) {
	w := &snapshotWriter{out: bufio.NewWriterSize(file, 256<<10), sum: xxh3.New()}
	w.write(binary.LittleEndian.AppendUint32([]byte(snapshotMagic), uint32(blockSize)))
	written := map[kv.WorkerKey]position{}
	for _, stream := range streams {
		at, ok := w.stream(ctx, stream)
		if ok {
			written[stream.Src.Worker] = at
		}
	}
	for _, rank := range waiting {
		if _, twice := written[rank.worker]; !twice {
			w.write(appendRank(nil, rank))
			w.write(rank.runs)
			w.write(appendRankEnd(nil, rank.complete))
		}
	}
	w.write([]byte{0})
	if w.err == nil {
		_, w.err = w.out.Write(binary.LittleEndian.AppendUint64(nil, w.sum.Sum64()))
	}
	if w.err == nil {
		w.err = w.out.Flush()
	}
	return written, w.err
}

// stream writes a stream's rank. Not ok: its place in the sequence is not known.
func (w *snapshotWriter) stream(ctx context.Context, stream *Stream) (at position, ok bool) {
	src := stream.Src
	at, complete, held, blocks := stream.history.held()
	if at.next == 0 || len(src.Endpoint) > maxSnapshotText || len(src.Topic) > maxSnapshotText {
		return at, false
	}
	w.write(appendRank(nil, &savedRank{worker: src.Worker, endpoint: src.Endpoint, topic: src.Topic, at: at}))
	var run snapshotRun
	var buffer []byte
	flush := func() {
		if len(run.blocks) > 0 {
			buffer = appendRun(buffer[:0], run)
			w.write(buffer)
		}
	}
	for block := range blocks {
		held--
		n := len(run.blocks)
		if n > 0 && n < dumpedTogether && block.HasParent && run.blocks[n-1].Engine == block.Parent {
			run.blocks = append(run.blocks, block.StoredBlock)
			continue
		}
		flush()
		run = snapshotRun{parent: block.Parent, hasParent: block.HasParent, blocks: append(run.blocks[:0], block.StoredBlock)}
		if w.err == nil {
			w.err = ctx.Err()
		}
		if w.err != nil {
			return at, false
		}
	}
	flush()
	w.write(appendRankEnd(nil, complete && held <= 0)) // blocks behind a hole are left out
	return at, true
}

// snapshotRun is blocks that follow each other; the first follows parent, or begins
// a prompt.
type snapshotRun struct {
	parent    uint64
	hasParent bool
	blocks    []kv.StoredBlock
}

// maxSnapshotText bounds an endpoint or a topic, bytes.
const maxSnapshotText = 1 << 12

// Flags of a rank and of its end.
const (
	snapshotGroup    = 1 // the KV-cache group is known
	snapshotComplete = 1 // no block is missing
)

// appendRank appends a rank's head: a 1, worker, rank, the number of the last batch,
// its hash, flags, KV-cache group, and length and text of endpoint and topic. Runs
// and appendRankEnd follow it.
func appendRank(to []byte, rank *savedRank) []byte {
	to = append(to, 1)
	to = binary.LittleEndian.AppendUint64(to, rank.worker.Worker)
	to = binary.LittleEndian.AppendUint32(to, rank.worker.Rank)
	to = binary.LittleEndian.AppendUint64(to, rank.at.next-1)
	to = binary.LittleEndian.AppendUint64(to, rank.at.sum)
	flags := byte(0)
	if rank.at.groupKnown {
		flags |= snapshotGroup
	}
	to = append(to, flags)
	to = binary.LittleEndian.AppendUint64(to, uint64(rank.at.group))
	for _, text := range []string{rank.endpoint, rank.topic} {
		to = binary.LittleEndian.AppendUint16(to, uint16(len(text)))
		to = append(to, text...)
	}
	return to
}

// appendRun appends the number of blocks, 1 if they have a parent else 0, the
// parent, and of each block the engine's hash and the local one.
func appendRun(to []byte, run snapshotRun) []byte {
	to = binary.LittleEndian.AppendUint32(to, uint32(len(run.blocks)))
	hasParent := byte(0)
	if run.hasParent {
		hasParent = 1
	}
	to = binary.LittleEndian.AppendUint64(append(to, hasParent), run.parent)
	for _, b := range run.blocks {
		to = binary.LittleEndian.AppendUint64(to, b.Engine)
		to = binary.LittleEndian.AppendUint64(to, b.Local)
	}
	return to
}

// appendRankEnd appends a run of no blocks, shortened to its number, and flags.
func appendRankEnd(to []byte, complete bool) []byte {
	to = append(to, 0, 0, 0, 0)
	if complete {
		return append(to, snapshotComplete)
	}
	return append(to, 0)
}

// parseSnapshot checks a whole file. The ranks in the answer share its memory.
func parseSnapshot(data []byte, blockSize int) (map[kv.WorkerKey]*savedRank, error) {
	head := string(data[:min(len(data), len(snapshotMagic))])
	switch {
	case len(data) == 0:
		return nil, errBrokenSnapshot // a disk was full
	case !strings.HasPrefix(head, snapshotName):
		return nil, errNoSnapshot
	case head != snapshotMagic:
		return nil, fmt.Errorf("it has another version than %q, the one that this program reads", strings.TrimSpace(snapshotMagic))
	case len(data) < len(snapshotMagic)+4+snapshotTail:
		return nil, errBrokenSnapshot
	}
	body, sum := data[:len(data)-8], binary.LittleEndian.Uint64(data[len(data)-8:])
	if xxh3.Hash(body) != sum {
		return nil, fmt.Errorf("%w: its checksum is wrong", errBrokenSnapshot)
	}
	r := snapshotReader{data: body[len(snapshotMagic):]}
	if size := r.uint32(); int64(size) != int64(blockSize) {
		return nil, fmt.Errorf("its block size is %d, the router's is %d", size, blockSize)
	}
	ranks := map[kv.WorkerKey]*savedRank{}
	for r.byte() == 1 && !r.short {
		rank := r.rank()
		if r.short || ranks[rank.worker] != nil || len(ranks) >= maxDumpRanks {
			return nil, fmt.Errorf("%w: rank %d of it", errBrokenSnapshot, len(ranks))
		}
		ranks[rank.worker] = rank
	}
	if r.short || len(r.data) > 0 {
		return nil, fmt.Errorf("%w: it does not end after rank %d", errBrokenSnapshot, len(ranks))
	}
	return ranks, nil
}

// snapshotReader reads the parts of a file. Past its end they are zero, and short
// says so; no memory is taken for them.
type snapshotReader struct {
	data  []byte
	short bool // the data ended too early or make no sense
}

func (r *snapshotReader) bytes(n int) []byte {
	if n > len(r.data) {
		r.short, r.data = true, nil
		return nil
	}
	part := r.data[:n]
	r.data = r.data[n:]
	return part
}

func (r *snapshotReader) byte() byte {
	if b := r.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *snapshotReader) uint32() uint32 {
	if b := r.bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *snapshotReader) uint64() uint64 {
	if b := r.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *snapshotReader) text() string {
	length := 0
	if b := r.bytes(2); b != nil {
		length = int(binary.LittleEndian.Uint16(b))
	}
	if length > maxSnapshotText {
		r.short = true
		return ""
	}
	return string(r.bytes(length))
}

// rank reads what follows the 1 of a rank. Its runs are checked and stay as they are.
func (r *snapshotReader) rank() *savedRank {
	rank := &savedRank{worker: kv.WorkerKey{Worker: r.uint64(), Rank: r.uint32()}}
	rank.at.next, rank.at.sum = r.uint64()+1, r.uint64()
	rank.at.groupKnown = r.byte()&snapshotGroup != 0
	rank.at.group = int(r.uint64())
	rank.endpoint, rank.topic = r.text(), r.text()
	if rank.at.next == 0 { // the number that ends a replay
		r.short = true
	}
	const runHead, perBlock = 1 + 8, 8 + 8
	all := r.data
	size := 0
	for !r.short {
		count := r.uint32()
		if count == 0 {
			break
		}
		if rank.blocks += int(count); count > dumpedTogether || rank.blocks > maxHeld {
			r.short = true
			break
		}
		r.bytes(runHead + int(count)*perBlock)
		size = len(all) - len(r.data)
	}
	rank.complete = r.byte()&snapshotComplete != 0
	if !r.short {
		rank.runs = all[:size]
	}
	return rank
}

// run reads a run of a checked rank into blocks.
func (r *snapshotReader) run(blocks []kv.StoredBlock) (_ []kv.StoredBlock, parent uint64, hasParent bool) {
	count := r.uint32()
	hasParent = r.byte() == 1
	parent = r.uint64()
	for range count {
		blocks = append(blocks, kv.StoredBlock{Engine: r.uint64(), Local: r.uint64()})
	}
	return blocks, parent, hasParent
}
