package events

import (
	"bufio"
	"encoding/json"
	"io"
	"iter"
	"slices"
	"sync"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

// Bounds of a Log. Blocks take 16 bytes each, events 48.
const (
	LoggedBatches = 1024
	loggedBlocks  = 128 << 10 // an event counts as one block at least
)

// Log keeps the last applied event batches of one worker rank, for other routers
// that have missed some. Its stream writes it; any goroutine may query it.
type Log struct {
	worker kv.WorkerKey
	index  radix.Index
	stats  *Stats

	mu      sync.Mutex // guards all below; held while a batch is applied, so that a dump is of one moment between two
	open    bool       // a batch is being applied
	batches []loggedBatch
	blocks  int      // in them
	layout  string   // of the rank
	at      position // that the rank's blocks are as of
}

// loggedBatch is the changes of the index by a batch.
type loggedBatch struct {
	seq, digest uint64
	blocks      int // named in events, which count as one each at least
	events      []peerEvent
	tooLarge    bool // events are not kept
	lowered     bool // some were of lower tiers
}

// position is the place in a publisher's sequence that a rank's blocks are as of.
type position struct {
	next, sum uint64 // the batch that comes next, and the hash of the one before it; next 0: not known
	layout    string // as kv.Layout's String writes it
}

// peerEvent is one event as routers exchange it. Those of a batch share its
// sequence number as id; in a dump ids only count.
type peerEvent struct {
	ID   uint64 `json:"event_id"`
	Data struct {
		Stored  *dumpStored `json:"stored,omitempty"`
		Removed []uint64    `json:"removed,omitempty"` // engine hashes
		Cleared bool        `json:"cleared,omitempty"`
		// Kept is what remains of the lower tiers when the blocks are Cleared; empty: nothing.
		Kept string `json:"kept,omitempty"`
		// Of KV-cache groups other than the first:
		Held    *groupBlocks `json:"held,omitempty"`
		Dropped *groupBlocks `json:"dropped,omitempty"`
		Lower   *lowerChange `json:"lower,omitempty"`
	} `json:"data"`
}

// groupBlocks is blocks of a KV-cache group by their engine hashes.
type groupBlocks struct {
	Group  int      `json:"group"` // place in the layout, at least 1
	Blocks []uint64 `json:"blocks"`
}

// Kinds of Kept.
const (
	keptLower = "lower" // all of them, doubtful
	keptFiles = "files" // those below the host
)

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

	Events []peerEvent `json:"events"` // the last member: see Write
	// dump yields the events in place of Events, of an answer yet to be written.
	dump iter.Seq[peerEvent]
}

// all yields the events.
func (a *Answer) all() iter.Seq[peerEvent] {
	if a.dump != nil {
		return a.dump
	}
	return slices.Values(a.Events)
}

// Write writes the answer as JSON, event by event, because the text of a dump is
// larger than its blocks.
func (a *Answer) Write(to io.Writer) error {
	head := *a
	head.Events = []peerEvent{}
	text, err := json.Marshal(head)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(to, 64<<10)
	const end = "]}"                     // of the events, and of the answer
	out.Write(text[:len(text)-len(end)]) // an error stays in out until Flush
	first := true
	for e := range a.all() {
		if !first {
			out.WriteByte(',')
		}
		first = false
		event, _ := json.Marshal(e) // plain values always can be
		if _, err := out.Write(event); err != nil {
			return err
		}
	}
	out.WriteString(end)
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

// stored, removed and cleared note changes of the index by the open batch.
func (l *Log) stored(parent uint64, hasParent bool, blocks []kv.StoredBlock) {
	var e peerEvent
	e.Data.Stored = run{parent, hasParent, blocks}.stored()
	l.note(e, len(blocks))
}

func (l *Log) removed(engine []uint64) {
	if len(engine) == 0 {
		return
	}
	var e peerEvent
	e.Data.Removed = append(e.Data.Removed, engine...)
	l.note(e, len(engine))
}

// holds and dropped note changes of a group other than the first.
func (l *Log) holds(group int, engine []uint64) {
	if len(engine) > 0 {
		var e peerEvent
		e.Data.Held = &groupBlocks{group, slices.Clone(engine)}
		l.note(e, len(engine))
	}
}

func (l *Log) dropped(group int, engine []uint64) {
	if len(engine) > 0 {
		var e peerEvent
		e.Data.Dropped = &groupBlocks{group, slices.Clone(engine)}
		l.note(e, len(engine))
	}
}

// relay makes requests for the open batch's events be answered by all blocks.
func (l *Log) relay() {
	b := l.newest()
	b.events, b.blocks, b.tooLarge = nil, 0, true
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
		if l.blocks -= b.blocks; l.open && i == len(l.batches)-1 {
			l.blocks += b.blocks // an open batch is counted at its end
		}
		b.events, b.blocks, b.tooLarge = nil, 0, true
	}
}

// note adds an event to the open batch. One batch can be larger than what all
// together may have: then its events are not kept, and a request for them gets
// all blocks.
func (l *Log) note(e peerEvent, blocks int) {
	b := l.newest()
	if b.blocks += max(1, blocks); b.tooLarge || b.blocks > loggedBlocks {
		b.events, b.blocks, b.tooLarge = nil, 0, true
		return
	}
	e.ID = b.seq
	b.events = append(b.events, e)
}

// deviceCleared notes that the open batch has cleared the device, and with host the host.
func (l *Log) deviceCleared(host bool) {
	b := l.newest()
	var e peerEvent
	e.Data.Cleared, e.Data.Kept = true, keptLower
	if host {
		e.Data.Kept = keptFiles
	}
	if !b.lowered { // whatever it did before is undone
		b.events, b.blocks, b.tooLarge = b.events[:0], 0, false
	}
	l.note(e, 0)
}

// cleared also serves outside of a batch: the known blocks are then doubtful, and
// the log begins afresh.
func (l *Log) cleared() {
	if l.open {
		b := l.newest() // whatever it did before is undone
		b.events, b.blocks, b.tooLarge, b.lowered = b.events[:0], 0, false, false
		var e peerEvent
		e.Data.Cleared = true
		l.note(e, 0)
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
func (l *Log) held() (at position, complete bool, count int, blocks iter.Seq[radix.PlacedBlock], others []radix.HeldBlock, lower radix.LowerDump) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at.next == 0 {
		return l.at, false, 0, nil, nil, lower
	}
	return l.at, !l.stats.Cold.Load(), l.index.Blocks(l.worker), l.index.DumpOf(l.worker), l.index.HeldOf(l.worker), l.index.DumpLowerOf(l.worker)
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
	answer := Answer{Kind: kindDump, WorkerID: l.worker.Worker, DPRank: l.worker.Rank}
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
		answer.dump = dumped(l.index, l.worker)
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
		answer.dump = dumped(l.index, l.worker)
		return answer
	}
	answer.Kind = kindEvents
	for _, b := range batches {
		answer.Events = append(answer.Events, b.events...)
		answer.Last, answer.LastDigest = &b.seq, &b.digest
	}
	return answer
}

// dumped yields store events for all blocks of w, parents before children, and then
// those of its other groups and of its lower tiers.
func dumped(index radix.Index, w kv.WorkerKey) iter.Seq[peerEvent] {
	blocks, others, lower := index.DumpOf(w), index.HeldOf(w), index.DumpLowerOf(w)
	return func(yield func(peerEvent) bool) {
		var e peerEvent
		for run := range runsOf(blocks) {
			e.Data.Stored = run.stored()
			if !yield(e) {
				return
			}
			e.ID++
		}
		e.Data.Stored = nil
		for held := range heldTogether(others) {
			e.Data.Held = &held
			if !yield(e) {
				return
			}
			e.ID++
		}
		e.Data.Held = nil
		for change := range lowerChanges(lower) {
			e.Data.Lower = &change
			if !yield(e) {
				return
			}
			e.ID++
		}
	}
}

// heldTogether yields blocks in parts of one group each, copies one by one.
func heldTogether(others []radix.HeldBlock) iter.Seq[groupBlocks] {
	return func(yield func(groupBlocks) bool) {
		var part groupBlocks
		for _, b := range others {
			for range b.Copies {
				if len(part.Blocks) > 0 && (part.Group != b.Group || len(part.Blocks) == dumpedTogether) {
					if !yield(part) {
						return
					}
					part.Blocks = nil
				}
				part.Group, part.Blocks = b.Group, append(part.Blocks, b.Engine)
			}
		}
		if len(part.Blocks) > 0 {
			yield(part)
		}
	}
}
