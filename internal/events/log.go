package events

import (
	"sync"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

// Bounds of a Log. Blocks take 16 bytes each.
const (
	LoggedBatches = 1024
	loggedBlocks  = 128 << 10
)

// Log keeps the last event batches of one worker rank as they were applied,
// for other routers that have missed some. Its stream writes it; any goroutine
// may ask.
type Log struct {
	worker kv.WorkerKey
	index  radix.Index
	stats  *Stats

	mu      sync.Mutex // guards all below; held while a batch is applied, so that a dump is of one moment between two
	open    bool       // a batch is being applied
	batches []loggedBatch
	blocks  int // in them
}

// loggedBatch is what a batch did to the index.
type loggedBatch struct {
	seq, digest uint64
	blocks      int // named in events
	events      []peerEvent
}

// peerEvent is one event as routers tell each other. Those of a batch share its
// sequence number as id; in a dump ids only count.
type peerEvent struct {
	ID   uint64 `json:"event_id"`
	Data struct {
		Stored  *dumpStored `json:"stored,omitempty"`
		Removed []uint64    `json:"removed,omitempty"` // engine hashes
		Cleared bool        `json:"cleared,omitempty"`
	} `json:"data"`
}

// Kinds of Answer.
const (
	kindEvents = "events"    // those asked for
	kindDump   = "tree_dump" // all blocks, because the events asked for are not kept any more
	kindTooNew = "too_new"   // the events asked for have not come yet
)

// Answer answers GET /events.
type Answer struct {
	Kind      string      `json:"kind"`
	WorkerID  uint64      `json:"worker_id"`
	DPRank    uint32      `json:"dp_rank"`
	BlockSize int         `json:"block_size"`
	Events    []peerEvent `json:"events"`
	Complete  bool        `json:"complete"` // nothing before them is missing
	// Last is the batch after which the index is as told, or the newest there is:
	// where to go on from, never an event's id. Without one nothing is known.
	Last *uint64 `json:"last_event_id"`
	// Digests of batches as they came from the engine (XXH3-64), where they are
	// still known: equal ones prove that both routers follow the same publisher.
	LastDigest   *uint64 `json:"last_digest"`
	BeforeDigest *uint64 `json:"before_digest"` // of the one before start
	CheckDigest  *uint64 `json:"check_digest"`  // of the one named by check
}

// beginBatch opens the log for what the batch does; endBatch must follow.
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

// stored, removed and cleared note what the open batch has done to the index.
func (l *Log) stored(parent uint64, hasParent bool, blocks []kv.StoredBlock) {
	var e peerEvent
	e.Data.Stored = &dumpStored{Blocks: make([]dumpBlock, len(blocks))}
	if hasParent {
		e.Data.Stored.ParentHash = &parent
	}
	for i, b := range blocks {
		e.Data.Stored.Blocks[i] = dumpBlock{BlockHash: b.Engine, TokensHash: b.Local}
	}
	l.note(e, len(blocks))
}

func (l *Log) removed(engine []uint64) {
	var e peerEvent
	e.Data.Removed = append(e.Data.Removed, engine...)
	l.note(e, len(engine))
}

func (l *Log) note(e peerEvent, blocks int) {
	b := l.newest()
	e.ID = b.seq
	b.events = append(b.events, e)
	b.blocks += blocks
}

// cleared also serves outside of a batch: what was known is then doubtful, and
// the log begins afresh.
func (l *Log) cleared() {
	if l.open {
		var e peerEvent
		e.Data.Cleared = true
		l.note(e, 0)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget()
}

// digest returns that of a batch, nil if it is not kept.
func (l *Log) digest(seq uint64) *uint64 {
	if len(l.batches) == 0 || seq < l.batches[0].seq || seq > l.newest().seq {
		return nil
	}
	digest := l.batches[seq-l.batches[0].seq].digest
	return &digest
}

// Query returns the batches from start to end (clamped to what there is), or
// all blocks where start is nil or so old that it is not kept any more. check is
// a batch whose digest is asked for, too.
func (l *Log) Query(start, end, check *uint64) Answer {
	answer := Answer{Kind: kindDump, WorkerID: l.worker.Worker, DPRank: l.worker.Rank, Events: []peerEvent{}}
	l.mu.Lock()
	defer l.mu.Unlock()
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
		answer.Events = l.dump()
		return answer
	}
	if *start > *answer.Last {
		answer.Kind = kindTooNew
		return answer
	}
	answer.Kind = kindEvents
	for _, b := range l.batches[*start-l.batches[0].seq:] {
		if end != nil && b.seq > *end {
			break
		}
		answer.Events = append(answer.Events, b.events...)
		answer.Last, answer.LastDigest = &b.seq, &b.digest
	}
	return answer
}

// dump returns store events for all blocks, parents before children, blocks that
// follow each other in one event. The worker's events wait meanwhile.
func (l *Log) dump() []peerEvent {
	events := []peerEvent{}
	l.index.Dump(func(w kv.WorkerKey, parent uint64, hasParent bool, block kv.StoredBlock) bool {
		if w != l.worker {
			return w.Compare(l.worker) < 0
		}
		b := dumpBlock{BlockHash: block.Engine, TokensHash: block.Local}
		if n := len(events); n > 0 && hasParent {
			if last := events[n-1].Data.Stored; last.Blocks[len(last.Blocks)-1].BlockHash == parent {
				last.Blocks = append(last.Blocks, b)
				return true
			}
		}
		e := peerEvent{ID: uint64(len(events))}
		e.Data.Stored = &dumpStored{Blocks: []dumpBlock{b}}
		if hasParent {
			e.Data.Stored.ParentHash = &parent
		}
		events = append(events, e)
		return true
	})
	return events
}
