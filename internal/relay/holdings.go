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

// store adds blocks behind a parent of w.
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
	return &followed{Reader: index, index: index, holdings: h, block: block}
}

// followed passes the changes of an index on.
type followed struct {
	radix.Reader
	index    radix.Applier
	holdings *Holdings
	block    int // tokens

	// order keeps what empties a worker apart from what stores: no block may be stored in one
	// before, and in the other after that. Each guards some of the workers.
	order [64]sync.Mutex
}

// Apply makes a change in both. Only of a rank whose matches are the leading blocks are the
// blocks told.
func (f *followed) Apply(w kv.WorkerKey, c *radix.Change) (radix.Applied, error) {
	if c.Kind != radix.Removed {
		alone := &f.order[w.Worker%uint64(len(f.order))]
		alone.Lock()
		defer alone.Unlock()
	}
	device := c.Tier == kv.Device
	switch c.Kind {
	case radix.Stored:
		if len(c.Skipped) > 0 { // the blocks before may be missing
			f.holdings.setApart(w, true)
			break
		}
		done, err := f.index.Apply(w, c)
		if device && err == nil {
			f.holdings.store(w, c.Parent, c.HasParent, c.Blocks)
		}
		return done, err
	case radix.Removed:
		if device && c.Group == 0 {
			f.holdings.remove(w, c.Hashes)
		}
	case radix.Cleared, radix.DeviceCleared:
		f.holdings.clear(w)
	case radix.Forgotten:
		f.holdings.forget(w.Worker)
	case radix.LayoutSet:
		set := c.Setting()
		f.holdings.setApart(w, !set.Layout.Plain(set.BlockSize) || set.BlockSize != f.block)
	case radix.Held, radix.LookaheadStored, radix.ChunkSet, radix.LowerRestored, radix.DoubtSettled: // of no leading block
	}
	return f.index.Apply(w, c)
}
