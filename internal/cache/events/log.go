package events

import (
	"bufio"
	"encoding/json"
	"io"
	"iter"
	"slices"
	"sync"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// Bounds of a Log. Blocks take 16 bytes each, changes 128.
const (
	LoggedBatches = 1024
	loggedBlocks  = 128 << 10 // a change counts as one block at least
)

// Log keeps the last applied event batches of one worker rank, for other routers
// that have missed some. Its stream writes it; any goroutine may query it.
type Log struct {
	worker    kv.WorkerKey
	blockSize int // tokens
	index     radix.Index
	stats     *Stats

	// mu guards all below. It is held while a batch is applied, so that a dump is of one moment
	// between two. The index's locks, and those that OnLag needs, may be taken under it.
	mu      sync.Mutex
	open    bool // a batch is being applied
	batches []loggedBatch
	blocks  int      // in them
	layout  string   // of the rank
	at      position // that the rank's blocks are as of
}

// loggedBatch is the changes of the index by a batch.
type loggedBatch struct {
	seq, digest uint64
	blocks      int // named in changes, which count as one each at least
	changes     []radix.Change
	tooLarge    bool // changes are not kept
	lowered     bool // some were of lower tiers
}

// drop forgets the changes: requests for them are answered by all blocks.
func (b *loggedBatch) drop() { b.changes, b.blocks, b.tooLarge = nil, 0, true }

// undo forgets the changes of blocks that are cleared now.
func (b *loggedBatch) undo() { b.changes, b.blocks, b.tooLarge = b.changes[:0], 0, false }

// position is the place in a publisher's sequence that a rank's blocks are as of.
type position struct {
	next, sum uint64 // the batch that comes next, and the hash of the one before it; next 0: not known
	layout    string // as kv.Layout's String writes it
}

// peerEvent is one event as routers exchange it. Those of a batch share its
// sequence number as id; in a dump ids only count.
type peerEvent struct {
	ID   uint64     `json:"event_id"`
	Data changeText `json:"data"`
}

// Kinds of Answer.
const (
	kindEvents = "events"    // those requested
	kindDump   = "tree_dump" // all blocks, because the requested events are no longer stored
	kindTooNew = "too_new"   // the requested events have not arrived yet
)

// Answer answers GET /events.
type Answer struct {
	Kind      string `json:"kind"`
	WorkerID  uint64 `json:"worker_id"`
	DPRank    uint32 `json:"dp_rank"`
	BlockSize int    `json:"block_size"`
	Complete  bool   `json:"complete"` // nothing before the events is missing
	// Layout is the KV-cache groups of the rank, as kv.Layout's String writes them.
	Layout string `json:"layout,omitempty"`
	// Last is the number of the batch to continue from: the one after which the
	// index is as sent, or the newest. It is never an event's id. Without it
	// nothing is known.
	Last *uint64 `json:"last_event_id"`
	// Digests of batches as they came from the engine (XXH3-64), where they are
	// still known: equal ones prove that both routers follow the same publisher.
	LastDigest   *uint64 `json:"last_digest"`
	BeforeDigest *uint64 `json:"before_digest"` // of the one before start
	CheckDigest  *uint64 `json:"check_digest"`  // of the one named by check

	Events []radix.Change `json:"-"` // of an answer that was read; Write writes them as the last member

	all iter.Seq2[uint64, *radix.Change] // the events of one to be written, with their ids
}

// Write writes the answer as JSON, event by event, because the text of a dump is
// larger than its blocks.
func (a *Answer) Write(to io.Writer) error {
	text, err := json.Marshal(a)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(to, 64<<10)
	out.Write(text[:len(text)-len("}")]) // an error stays in out until Flush
	out.WriteString(`,"events":[`)
	first := true
	for id, c := range a.all {
		if !first {
			out.WriteByte(',')
		}
		first = false
		event, _ := json.Marshal(peerEvent{id, textOf(c, false)}) // plain values always can be
		if _, err := out.Write(event); err != nil {
			return err
		}
	}
	out.WriteString("]}")
	return out.Flush()
}

// beginBatch opens the log for the batch's changes; endBatch must follow.
func (l *Log) beginBatch(seq, digest uint64) {
	l.mu.Lock()
	if n := len(l.batches); n > 0 && l.batches[n-1].seq+1 != seq {
		l.forget()
	}
	l.batches = append(l.batches, loggedBatch{seq: seq, digest: digest})
	l.open = true
}

func (l *Log) endBatch() {
	l.blocks += l.newest().blocks
	drop := max(0, len(l.batches)-LoggedBatches)
	for _, b := range l.batches[:drop] {
		l.blocks -= b.blocks
	}
	for l.blocks > loggedBlocks && drop < len(l.batches)-1 {
		l.blocks -= l.batches[drop].blocks
		drop++
	}
	clear(l.batches[:drop]) // their events are garbage now
	l.batches = l.batches[drop:]
	l.open = false
	l.mu.Unlock()
}

func (l *Log) newest() *loggedBatch { return &l.batches[len(l.batches)-1] }

// forget drops all batches.
func (l *Log) forget() { l.batches, l.blocks = nil, 0 }

// Apply makes a change of the rank, and notes it in the open batch.
func (l *Log) Apply(c *radix.Change) (radix.Applied, error) {
	done, err := l.index.Apply(l.worker, c)
	if err == nil {
		l.note(c)
	}
	return done, err
}

func (l *Log) note(c *radix.Change) {
	switch c.Kind {
	case radix.Stored, radix.Held, radix.Removed:
		switch {
		case len(c.Skipped) > 0: // no event has them
			l.newest().drop()
		case c.Size() > 0:
			l.add(c)
		}
	case radix.ChunkSet:
		l.add(c)
	case radix.DeviceCleared:
		if b := l.newest(); !b.lowered {
			b.undo()
		}
		l.add(c)
	case radix.Cleared:
		l.cleared()
	case radix.LayoutSet:
		l.relaid(c.Setting().Layout.String())
	case radix.Forgotten, radix.LookaheadStored, radix.LowerRestored, radix.DoubtSettled: // not of a batch
	}
}

// relaid notes a new layout. Events before it name other groups, so that they are
// answered by all blocks.
func (l *Log) relaid(layout string) {
	if !l.open {
		l.mu.Lock()
		defer l.mu.Unlock()
	}
	if l.layout == layout {
		return
	}
	l.layout = layout
	for i := range l.batches {
		b := &l.batches[i]
		if !l.open || i < len(l.batches)-1 { // an open batch is counted at its end
			l.blocks -= b.blocks
		}
		b.drop()
	}
}

// loggedLower is what a change of a lower tier counts beside its blocks: it takes some
// 300 bytes.
const loggedLower = 8

// add adds a change to the open batch. One batch can be larger than what all
// together may have: then its changes are not kept, and a request for them gets
// all blocks.
func (l *Log) add(c *radix.Change) {
	b := l.newest()
	lower := c.Tier != kv.Device || c.Kind == radix.ChunkSet
	b.lowered = b.lowered || lower
	last := len(b.changes) - 1
	joins := last >= 0 && follows(&b.changes[last], c)
	switch {
	case joins:
		b.blocks += c.Size()
	case lower:
		b.blocks += loggedLower + c.Size()
	default:
		b.blocks += max(1, c.Size())
	}
	switch {
	case b.tooLarge || b.blocks > loggedBlocks:
		b.drop()
	case joins:
		b.changes[last].Hashes = append(b.changes[last].Hashes, c.Hashes...)
	default:
		b.changes = append(b.changes, c.Clone())
	}
}

// follows reports whether c does the same as the change before it, with other blocks: engines
// remove blocks one by one.
func follows(before, c *radix.Change) bool {
	return c.Kind != radix.Stored && c.Kind == before.Kind && len(c.Hashes) > 0 && len(before.Hashes) > 0 && c.LowerTier == before.LowerTier &&
		c.Group == before.Group
}

// cleared also serves outside of a batch: the known blocks are then doubtful, and
// the log begins afresh.
func (l *Log) cleared() {
	if l.open {
		b := l.newest() // whatever it did before is undone
		b.undo()
		b.lowered = false
		l.add(&radix.Change{Kind: radix.Cleared})
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget()
	l.at = position{}
}

// reach notes the position of the rank's blocks, outside of a batch.
func (l *Log) reach(at position) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at = at
}

// position returns the position of the rank's blocks.
func (l *Log) position() position {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

// held returns the rank's blocks as they are between two batches, those of groups other
// than the first as others, and what they are as of. complete means that none is
// missing of the device; count is the number of those of the first group, copies
// counted once.
func (l *Log) held() (
	at position, complete bool, count int, blocks iter.Seq[radix.PlacedBlock], others []radix.HeldBlock, lower radix.LowerDump,
) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at.next == 0 {
		return l.at, false, 0, nil, nil, lower
	}
	return l.at, !l.stats.Cold.Load(), l.index.Blocks(l.worker), l.index.DumpOf(l.worker), l.index.HeldOf(l.worker),
		l.index.DumpLowerOf(l.worker)
}

// digest returns that of a batch, nil if it is not kept.
func (l *Log) digest(seq uint64) *uint64 {
	if len(l.batches) == 0 || seq < l.batches[0].seq || seq > l.newest().seq {
		return nil
	}
	digest := l.batches[seq-l.batches[0].seq].digest
	return &digest
}

// Query returns the stored batches from start to end, or all blocks if start is nil
// or no longer stored. check is a batch whose digest is requested, too.
func (l *Log) Query(start, end, check *uint64) Answer {
	answer := Answer{Kind: kindDump, WorkerID: l.worker.Worker, DPRank: l.worker.Rank, BlockSize: l.blockSize, all: logged(nil)}
	l.mu.Lock()
	defer l.mu.Unlock()
	answer.Layout = l.layout
	answer.Complete = !l.stats.Cold.Load()
	if len(l.batches) > 0 {
		newest := *l.newest()
		answer.Last, answer.LastDigest = &newest.seq, &newest.digest
	}
	if check != nil {
		answer.CheckDigest = l.digest(*check)
	}
	if start != nil && *start > 0 {
		answer.BeforeDigest = l.digest(*start - 1)
	}
	if answer.Last == nil || start == nil || *start < l.batches[0].seq {
		answer.all = dumped(l.index, l.worker)
		return answer
	}
	if *start > *answer.Last {
		answer.Kind = kindTooNew
		return answer
	}
	batches := l.batches[*start-l.batches[0].seq:]
	if end != nil {
		n := slices.IndexFunc(batches, func(b loggedBatch) bool { return b.seq > *end })
		if n >= 0 {
			batches = batches[:n]
		}
	}
	if slices.ContainsFunc(batches, func(b loggedBatch) bool { return b.tooLarge }) {
		answer.all = dumped(l.index, l.worker)
		return answer
	}
	answer.Kind = kindEvents
	batches = slices.Clone(batches) // the changes of one that is closed stay as they are
	if n := len(batches); n > 0 {
		answer.Last, answer.LastDigest = &batches[n-1].seq, &batches[n-1].digest
	}
	answer.all = logged(batches)
	return answer
}

// logged yields the changes of batches with the numbers of these.
func logged(batches []loggedBatch) iter.Seq2[uint64, *radix.Change] {
	return func(yield func(uint64, *radix.Change) bool) {
		for i := range batches {
			for j := range batches[i].changes {
				if !yield(batches[i].seq, &batches[i].changes[j]) {
					return
				}
			}
		}
	}
}

// dumped yields what restores all blocks of w, parents before children, and then
// those of its other groups and of its lower tiers.
func dumped(index radix.Reader, w kv.WorkerKey) iter.Seq2[uint64, *radix.Change] {
	blocks, others, lower := index.DumpOf(w), index.HeldOf(w), index.DumpLowerOf(w)
	return func(yield func(uint64, *radix.Change) bool) {
		id := uint64(0)
		for c := range changesOf(blocks, others, lower) {
			if !yield(id, c) {
				return
			}
			id++
		}
	}
}
