package events

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// The file of a Snapshot is snapshotMagic, the block size (uint32), the ranks, a zero
// byte and the XXH3-64 of all before. Numbers are little-endian. See appendRank and
// appendChange for a rank.
const (
	snapshotName  = "kvrouter index snapshot "
	snapshotMagic = snapshotName + "3\n" // with the version
	// snapshotTail is the zero byte after the ranks and the checksum.
	snapshotTail = 1 + 8
	// maxSnapshotBytes bounds the file; a block takes 16 bytes in it.
	maxSnapshotBytes = 1 << 30
)

// Reasons why a file is no snapshot to start from.
var (
	errNoSnapshot     = errors.New("it is not an index snapshot, and left unchanged: use another file")
	errBrokenSnapshot = errors.New("it is corrupt")
)

func readSnapshotFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errNoSnapshot
	case info.Size() > maxSnapshotBytes:
		return nil, fmt.Errorf("it has %d bytes, more than the maximum of %d", info.Size(), maxSnapshotBytes)
	}
	return os.ReadFile(name)
}

// snapshotWriter writes a bounded file and keeps its checksum.
type snapshotWriter struct {
	out  *bufio.Writer
	sum  *xxh3.Hasher
	size int
	most int   // blocks of a rank, copies too
	err  error // the first
}

func (w *snapshotWriter) write(data []byte) {
	if w.size += len(data); w.size+snapshotTail > maxSnapshotBytes && w.err == nil {
		w.err = fmt.Errorf("the index exceeds the maximum of %d bytes of a snapshot", maxSnapshotBytes)
	}
	if w.err == nil {
		_, _ = w.sum.Write(data) // never fails
		_, w.err = w.out.Write(data)
	}
}

// newSnapshotWriter writes a file's head.
func newSnapshotWriter(file io.Writer, blockSize int) *snapshotWriter {
	w := &snapshotWriter{out: bufio.NewWriterSize(file, 256<<10), sum: xxh3.New(), most: maxHeld}
	w.write(binary.LittleEndian.AppendUint32([]byte(snapshotMagic), uint32(blockSize)))
	return w
}

// close ends a file with its checksum.
func (w *snapshotWriter) close() error {
	w.write([]byte{0})
	if w.err == nil {
		_, w.err = w.out.Write(binary.LittleEndian.AppendUint64(nil, w.sum.Sum64()))
	}
	if w.err == nil {
		w.err = w.out.Flush()
	}
	return w.err
}

// writeSnapshot writes the streams' ranks, and those waiting. It
// returns what each stream's rank is as of, and the size in bytes.
func writeSnapshot(ctx context.Context, file io.Writer, blockSize int, streams []*Stream,
	waiting []*savedRank) (written map[kv.WorkerKey]position, size int, err error) {
	w := newSnapshotWriter(file, blockSize)
	written = map[kv.WorkerKey]position{}
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
			w.write(appendRankEnd(nil, rank))
		}
	}
	err = w.close()
	return written, w.size, err
}

// stream writes a stream's rank. Blocks that are left out, behind a hole or beyond the
// most, make it incomplete. Not ok: its place in the sequence is not known.
func (w *snapshotWriter) stream(ctx context.Context, stream *Stream) (at position, ok bool) {
	src := stream.Src
	at, complete, held, blocks, others, lower := stream.history.held()
	if at.next == 0 || !fitsSnapshot(src) {
		return at, false
	}
	rank := &savedRank{worker: src.Worker, endpoint: src.Endpoint, topic: src.Topic, at: at, pinned: stream.pinned.Load(), lower: lower}
	w.write(appendRank(nil, rank))
	counted := func(yield func(radix.PlacedBlock) bool) {
		var last radix.PlacedBlock
		count := 0
		for block := range blocks {
			if count++; count > w.most {
				complete = false
				return
			}
			if count == 1 || block != last { // copies come one after the other
				held--
			}
			if last = block; !yield(block) {
				return
			}
		}
	}
	var buffer []byte
	for c := range changesOf(counted, others, lower) {
		buffer = appendChange(buffer[:0], c, rank.lower.Stores)
		if w.write(buffer); w.err == nil {
			w.err = ctx.Err()
		}
		if w.err != nil {
			return at, false
		}
	}
	rank.complete = complete && held == 0
	w.write(appendRankEnd(nil, rank))
	return at, true
}

// maxSnapshotText bounds an endpoint or a topic, bytes.
const maxSnapshotText = 1 << 12

// fitsSnapshot reports whether a rank is written at all.
func fitsSnapshot(src Source) bool {
	return len(src.Endpoint) <= maxSnapshotText && len(src.Topic) <= maxSnapshotText
}

// Flags at a rank's end.
const (
	snapshotComplete = 1 // no block of the device is missing
	snapshotDoubtful = 2 // its lower tiers are doubtful
	snapshotPinned   = 4 // Stream.pinned
)

// Kinds of a run.
const (
	runBegins    = 0 // its blocks begin a prompt
	runFollows   = 1 // they follow the parent
	runHeld      = 2 // they are of a group other than the first, which stands for the parent; copies stand for local hashes
	runPlaceless = 3 // of a lower tier, without a place and a local hash

	// A run of a lower tier also has the tier, and the place of the store plus 1 among those
	// of the rank; 0: it is the rank's own.
	runKinds      = 3
	runTierShift  = 2
	runStoreShift = 4
)

// maxCopies bounds the copies of a block that a file may name.
const maxCopies = 1 << 10

// appendRank appends a rank's head: a 1, worker, rank, the number of the last batch,
// its hash, length and text of layout, endpoint and topic, and the number of the stores that
// it reads, with length and text of each name. Runs and appendRankEnd follow it.
func appendRank(to []byte, rank *savedRank) []byte {
	to = append(to, 1)
	to = binary.LittleEndian.AppendUint64(to, rank.worker.Worker)
	to = binary.LittleEndian.AppendUint32(to, rank.worker.Rank)
	to = binary.LittleEndian.AppendUint64(to, rank.at.next-1)
	to = binary.LittleEndian.AppendUint64(to, rank.at.sum)
	for _, text := range []string{rank.at.layout, rank.endpoint, rank.topic} {
		to = binary.LittleEndian.AppendUint16(to, uint16(len(text)))
		to = append(to, text...)
	}
	stores := rank.lower.Stores[:min(len(rank.lower.Stores), maxSavedStores)]
	to = append(to, byte(len(stores)))
	for _, name := range stores {
		to = binary.LittleEndian.AppendUint16(to, uint16(len(name)))
		to = append(to, name...)
	}
	return to
}

// maxSavedStores bounds the stores of a rank: their places have four bits.
const maxSavedStores = 15

// appendChange appends the run of a change that restores a rank: the number of blocks, the kind,
// the parent, and of each block the engine's hash and the local one. It appends nothing for a
// change without blocks, which the rank's head and end have, and for one of a store beyond
// maxSavedStores.
func appendChange(to []byte, c *radix.Change, stores []string) []byte {
	store := 0
	if c.Shared {
		store = 1 + slices.Index(stores, c.Store)
	}
	if c.Shared && store == 0 || store > maxSavedStores {
		return to
	}
	place := byte(c.Tier)<<runTierShift | byte(store)<<runStoreShift
	switch c.Kind {
	case radix.Stored:
		kind := byte(runBegins)
		if c.HasParent {
			kind = runFollows
		}
		to = appendRunHead(to, len(c.Blocks), kind|place, c.Parent)
		for _, b := range c.Blocks {
			to = appendPair(to, b.Engine, b.Local)
		}
	case radix.Held:
		if c.Tier == kv.Device {
			return appendHeld(to, c)
		}
		to = appendRunHead(to, len(c.Hashes), runPlaceless|place, 0)
		for _, hash := range c.Hashes {
			to = appendPair(to, hash, 0)
		}
	case radix.LowerRestored: // see appendRank and appendRankEnd
	// none restores a rank
	case radix.Removed, radix.Cleared, radix.DeviceCleared, radix.Forgotten, radix.LayoutSet, radix.LookaheadStored, radix.ChunkSet,
		radix.DoubtSettled:
	}
	return to
}

// appendHeld appends a run of a group other than the first: copies of a block, which follow each
// other, in one entry.
func appendHeld(to []byte, c *radix.Change) []byte {
	at := len(to)
	to = appendRunHead(to, 0, runHeld, uint64(c.Group))
	entries := uint32(0)
	for i, n := 0, 1; i < len(c.Hashes); i, n = i+n, 1 {
		for i+n < len(c.Hashes) && c.Hashes[i+n] == c.Hashes[i] {
			n++
		}
		to = appendPair(to, c.Hashes[i], uint64(n))
		entries++
	}
	binary.LittleEndian.PutUint32(to[at:], entries)
	return to
}

func appendRunHead(to []byte, blocks int, kind byte, parent uint64) []byte {
	to = binary.LittleEndian.AppendUint32(to, uint32(blocks))
	return binary.LittleEndian.AppendUint64(append(to, kind), parent)
}

func appendPair(to []byte, engine, other uint64) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(to, engine), other)
}

// appendRankEnd appends a run of no blocks, shortened to its number, flags, and the number
// of blocks that are loaded together from lower tiers.
func appendRankEnd(to []byte, rank *savedRank) []byte {
	flags := byte(0)
	for flag, set := range map[byte]bool{snapshotComplete: rank.complete, snapshotDoubtful: rank.lower.Doubtful, snapshotPinned: rank.pinned} {
		if set {
			flags |= flag
		}
	}
	to = append(to, 0, 0, 0, 0, flags)
	return binary.LittleEndian.AppendUint32(to, uint32(rank.lower.Chunk))
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
		return nil, fmt.Errorf("its version is not %q, the one that this program reads", strings.TrimSpace(snapshotMagic))
	case len(data) < len(snapshotMagic)+4+snapshotTail:
		return nil, errBrokenSnapshot
	}
	body, sum := data[:len(data)-8], binary.LittleEndian.Uint64(data[len(data)-8:])
	if xxh3.Hash(body) != sum {
		return nil, fmt.Errorf("%w: its checksum is wrong", errBrokenSnapshot)
	}
	r := snapshotReader{data: body[len(snapshotMagic):], block: blockSize}
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
	block int  // tokens in a block of the index
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
	rank.at.layout = r.text()
	rank.endpoint, rank.topic = r.text(), r.text()
	for range r.byte() {
		rank.lower.Stores = append(rank.lower.Stores, r.text())
	}
	if len(rank.lower.Stores) > maxSavedStores {
		r.short = true
	}
	var err error
	if rank.layout, err = kv.ParseLayout(rank.at.layout); err != nil || !fits(rank.layout, r.block) {
		r.short = true
	}
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
		if rank.blocks += int(count); count > dumpedTogether || rank.blocks > 2*maxHeld { // with those of lower tiers
			r.short = true
			break
		}
		r.bytes(runHead + int(count)*perBlock)
		size = len(all) - len(r.data)
	}
	flags := r.byte()
	rank.complete, rank.lower.Doubtful, rank.pinned = flags&snapshotComplete != 0, flags&snapshotDoubtful != 0, flags&snapshotPinned != 0
	rank.lower.Chunk = int(r.uint32())
	if !r.short {
		rank.runs = all[:size]
	}
	return rank
}

// change reads a run of a checked rank as the change that restores it. blocks and hashes are
// reused for it. Not ok: it is of a store that the rank does not name.
func (r *snapshotReader) change(stores []string, blocks []kv.StoredBlock, hashes []uint64) (c radix.Change, ok bool) {
	count, head := r.uint32(), r.byte()
	parent, kind, store := r.uint64(), head&runKinds, int(head>>runStoreShift)
	c = radix.Change{Kind: radix.Held, Blocks: blocks[:0], Hashes: hashes[:0],
		LowerTier: radix.LowerTier{Tier: kv.Tier(head >> runTierShift & runKinds), Shared: store > 0}}
	if ok = store <= len(stores) && (store == 0 || c.Tier != kv.Device); ok && store > 0 {
		c.Store = stores[store-1]
	}
	switch {
	case kind == runBegins || kind == runFollows:
		c.Kind, c.Parent, c.HasParent = radix.Stored, parent, kind == runFollows
	case kind == runPlaceless:
		ok = ok && c.Tier != kv.Device
	case c.Tier == kv.Device: // runHeld
		c.Group = int32(min(parent, kv.MaxCacheGroups))
	default:
		ok = false
	}
	for range count {
		engine, other := r.uint64(), r.uint64()
		if c.Kind == radix.Stored {
			c.Blocks = append(c.Blocks, kv.StoredBlock{Engine: engine, Local: other})
			continue
		}
		copies := uint64(1)
		if kind == runHeld {
			copies = min(other, maxCopies)
		}
		for range copies {
			c.Hashes = append(c.Hashes, engine)
		}
	}
	return c, ok
}
