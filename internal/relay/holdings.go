package relay

import (
	"encoding/binary"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

// publishDelay is the time for which changes are collected before they are told.
const publishDelay = 10 * time.Millisecond

// Bounds of the messages that wait for a subscriber. One that is slower must begin anew.
const (
	queueMessages = 64
	queueBytes    = 16 << 20
)

// Holdings are the blocks that a router's workers hold, as a filter that subscribers
// follow. Follow fills it. Its memory is about 110 bytes for each block of each worker,
// beside that of the index. Its methods are safe for concurrent use.
type Holdings struct {
	relay    Identity
	producer Producer
	now      func() time.Time
	wake     chan struct{} // buffered: something has changed

	mu          sync.Mutex // guards the rest
	table       *table
	ranks       map[kv.WorkerKey]*rank
	sequence    uint64
	subscribers map[*subscriber]struct{}
}

// rank is what one KV cache holds.
type rank struct {
	blocks map[uint64]held // by engine hash
	// apart: a match is not the leading blocks alone, so that its blocks would promise too
	// much.
	apart bool
}

type held struct {
	sequence uint64
	copies   uint32
	omitted  bool // it has no slot
}

// subscriber is a stream that gets all messages after its snapshot.
type subscriber struct {
	queue chan []byte
	bytes int  // in queue; Holdings.mu guards it
	slow  bool // it has missed messages; likewise. queue is closed then
}

func newHoldings(relay Identity, p Producer, now func() time.Time) *Holdings {
	return &Holdings{relay: relay, producer: p, now: now, wake: make(chan struct{}, 1), table: newTable(p.Format), ranks: map[kv.WorkerKey]*rank{}, subscribers: map[*subscriber]struct{}{}}
}

// changing locks h for a change, and tells publish of it at the end.
func (h *Holdings) changing() (changed func()) {
	h.mu.Lock()
	return func() {
		dirty := len(h.table.changed) > 0
		h.mu.Unlock()
		if dirty {
			select {
			case h.wake <- struct{}{}:
			default:
			}
		}
	}
}

// store adds blocks behind a parent of w, as radix.Index does.
func (h *Holdings) store(w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) {
	defer h.changing()()
	r := h.ranks[w]
	if r == nil {
		r = &rank{blocks: map[uint64]held{}}
		h.ranks[w] = r
	}
	if r.apart {
		return
	}
	previous := held{}
	if hasParent {
		var known bool
		if previous, known = r.blocks[parent]; !known {
			return // stored before the layout was known, or in a lower tier
		}
	}
	for i, b := range blocks {
		sequence := b.Local
		if hasParent || i > 0 {
			sequence = follow(previous.sequence, b.Local)
		}
		one, known := r.blocks[b.Engine]
		if known && one.sequence == sequence {
			one.copies++
		} else {
			if known && !one.omitted {
				h.table.drop(one.sequence)
			}
			one = held{sequence: sequence, copies: 1, omitted: !h.table.add(sequence)}
		}
		r.blocks[b.Engine], previous = one, one
	}
}

// follow returns the sequence hash of a block with that local hash behind another.
func follow(previous, local uint64) uint64 {
	var pair [16]byte
	binary.LittleEndian.PutUint64(pair[:8], previous)
	binary.LittleEndian.PutUint64(pair[8:], local)
	return xxh3.HashSeed(pair[:], kv.HashSeed)
}

func (h *Holdings) remove(w kv.WorkerKey, engine []uint64) {
	defer h.changing()()
	r := h.ranks[w]
	if r == nil {
		return
	}
	for _, hash := range engine {
		one, known := r.blocks[hash]
		if !known {
			continue
		}
		if one.copies--; one.copies > 0 {
			r.blocks[hash] = one
			continue
		}
		delete(r.blocks, hash)
		if !one.omitted {
			h.table.drop(one.sequence)
		}
	}
}

// clear removes all blocks of w.
func (h *Holdings) clear(w kv.WorkerKey) {
	h.mu.Lock()
	var blocks map[uint64]held
	if r := h.ranks[w]; r != nil {
		blocks, r.blocks = r.blocks, map[uint64]held{}
	}
	h.mu.Unlock()
	h.dropAll(blocks)
}

// forget removes a worker with all its ranks.
func (h *Holdings) forget(worker uint64) {
	h.mu.Lock()
	var gone []map[uint64]held
	for w, r := range h.ranks {
		if w.Worker == worker {
			gone = append(gone, r.blocks)
			delete(h.ranks, w)
		}
	}
	h.mu.Unlock()
	for _, blocks := range gone {
		h.dropAll(blocks)
	}
}

// setApart says whether w's blocks are left out, because a match of w is not its leading
// blocks alone.
func (h *Holdings) setApart(w kv.WorkerKey, apart bool) {
	h.mu.Lock()
	r := h.ranks[w]
	if r == nil {
		r = &rank{blocks: map[uint64]held{}}
		h.ranks[w] = r
	}
	var blocks map[uint64]held
	if r.apart = apart; apart {
		blocks, r.blocks = r.blocks, map[uint64]held{}
	}
	h.mu.Unlock()
	h.dropAll(blocks)
}

// dropPart is the number of blocks that are dropped before others may change h.
const dropPart = 4096

// dropAll drops blocks that no rank has any more.
func (h *Holdings) dropAll(blocks map[uint64]held) {
	if len(blocks) == 0 {
		return
	}
	changed, n := h.changing(), 0
	for _, one := range blocks {
		if !one.omitted {
			h.table.drop(one.sequence)
		}
		if n++; n%dropPart == 0 {
			changed()
			changed = h.changing()
		}
	}
	changed()
}

// publish tells all subscribers what has changed since the last time.
func (h *Holdings) publish() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tell()
}

func (h *Holdings) tell() {
	defer h.table.settle()
	if len(h.subscribers) == 0 {
		return
	}
	for changed := h.table.changed; len(changed) > 0; {
		n := min(len(changed), maxImages)
		u := Update{Relay: h.relay, Producer: h.producer, Base: h.sequence, Sequence: h.sequence + 1, Sent: uint64(h.now().UnixMicro()), Kind: Delta}
		u.Payload = encodeDelta(&h.producer, u.Base, u.Sequence, changed[:n], h.table.words)
		message := u.Encode()
		for s := range h.subscribers {
			if s.bytes+len(message) > queueBytes || len(s.queue) == cap(s.queue) {
				s.slow = true
				close(s.queue)
				delete(h.subscribers, s)
				continue
			}
			s.bytes += len(message)
			s.queue <- message
		}
		h.sequence++
		changed = changed[n:]
	}
}

// subscribe returns a copy of the filter, its sequence, and the messages after that.
func (h *Holdings) subscribe() (words []uint64, sequence uint64, s *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tell()
	s = &subscriber{queue: make(chan []byte, queueMessages)}
	h.subscribers[s] = struct{}{}
	return append([]uint64(nil), h.table.words...), h.sequence, s
}

func (h *Holdings) unsubscribe(s *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subscribers, s)
}

// took counts a message that s has taken from its queue.
func (h *Holdings) took(s *subscriber, message []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s.bytes -= len(message)
}

// Counts are what Holdings have now.
type Counts struct {
	Blocks      int    // different ones of all workers
	Omitted     uint64 // that found no room, so far
	Subscribers int
	Sequence    uint64
}

// Counts returns what h has now.
func (h *Holdings) Counts() Counts {
	h.mu.Lock()
	defer h.mu.Unlock()
	return Counts{Blocks: len(h.table.owners), Omitted: h.table.omitted, Subscribers: len(h.subscribers), Sequence: h.sequence}
}

// Follow returns an index that does what index does, and has h hold the same. block is the
// number of tokens a block.
func (h *Holdings) Follow(index radix.Index, block int) radix.Index {
	return &followed{Index: index, holdings: h, block: block}
}

// followed passes the changes of an index on.
type followed struct {
	radix.Index
	holdings *Holdings
	block    int // tokens

	// order keeps what empties a worker apart from what stores: no block may be stored in one
	// before, and in the other after that. Each guards some of the workers.
	order [64]sync.Mutex
}

// alone locks the changes of a worker, until the result is called.
func (f *followed) alone(worker uint64) (unlock func()) {
	m := &f.order[worker%uint64(len(f.order))]
	m.Lock()
	return m.Unlock
}

// Store stores blocks in both.
func (f *followed) Store(w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) error {
	defer f.alone(w.Worker)()
	err := f.Index.Store(w, parent, hasParent, blocks)
	if err == nil {
		f.holdings.store(w, parent, hasParent, blocks)
	}
	return err
}

// Remove removes blocks from both.
func (f *followed) Remove(w kv.WorkerKey, engine []uint64) (unknown int) {
	f.holdings.remove(w, engine)
	return f.Index.Remove(w, engine)
}

// Clear empties w in both.
func (f *followed) Clear(w kv.WorkerKey) {
	defer f.alone(w.Worker)()
	f.holdings.clear(w)
	f.Index.Clear(w)
}

// ClearDevice empties the device of w in both.
func (f *followed) ClearDevice(w kv.WorkerKey, host bool) {
	defer f.alone(w.Worker)()
	f.holdings.clear(w)
	f.Index.ClearDevice(w, host)
}

// Forget removes a worker from both.
func (f *followed) Forget(worker uint64) {
	defer f.alone(worker)()
	f.holdings.forget(worker)
	f.Index.Forget(worker)
}

// SetLayout sets the layout of w. Only of one whose matches are the leading blocks are the
// blocks told.
func (f *followed) SetLayout(w kv.WorkerKey, layout kv.Layout, block int) {
	defer f.alone(w.Worker)()
	f.holdings.setApart(w, !layout.Plain(block) || block != f.block)
	f.Index.SetLayout(w, layout, block)
}

// StoreTail stores blocks that begin within a prompt. The ones before may be missing, so
// that w's blocks are told no longer.
func (f *followed) StoreTail(w kv.WorkerKey, parent uint64, hasParent bool, skipped []uint64, blocks []kv.StoredBlock) error {
	defer f.alone(w.Worker)()
	f.holdings.setApart(w, true)
	return f.Index.StoreTail(w, parent, hasParent, skipped, blocks)
}
