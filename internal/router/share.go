package router

import (
	"encoding/binary"

	"kvrouter/internal/kv"
)

// Kinds of Change.
const (
	ChangeAdd     = "add"
	ChangePrefill = "prefill_complete"
	ChangeFree    = "free"
	ChangeAlive   = "alive" // nothing changed: the router is still there
)

// Change is one change of a router's books, as others are told it.
type Change struct {
	Router        uint64 `json:"router_id"`
	Kind          string `json:"kind"`
	Booking       uint64 `json:"booking,omitempty"` // counts the router's bookings
	Worker        uint64 `json:"worker_id,omitempty"`
	Rank          uint32 `json:"dp_rank,omitempty"`
	Tokens        int    `json:"isl_tokens,omitempty"`
	Uncached      int    `json:"prefill_tokens,omitempty"`
	AnsweredWhole bool   `json:"silent,omitempty"`          // nobody tells when the first token comes
	Leg           kv.Leg `json:"leg,omitempty"`             // that the worker was chosen for
	Sequence      []byte `json:"sequence_hashes,omitempty"` // 8 bytes each, little-endian
}

// Change returns a change of the booking as others are told it. What it reads of
// the booking never changes, so it needs no lock.
func (b *Booking) Change(kind string) Change {
	change := Change{Kind: kind, Booking: b.number}
	if kind == ChangeAdd {
		change.Worker, change.Rank = b.worker.Worker, b.worker.Rank
		change.Tokens, change.Uncached, change.AnsweredWhole, change.Leg = b.prompt, b.uncached, b.answeredWhole, b.leg
		for _, h := range b.sequence {
			change.Sequence = binary.LittleEndian.AppendUint64(change.Sequence, h)
		}
	}
	return change
}

// Share has the router tell each change of its books to tell, which is called
// under the router's lock and must not wait; nil: nobody is told.
func (r *Router) Share(tell func(kind string, b *Booking)) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	r.tell = tell
}

// share tells the other routers of a change of the books. The caller holds the
// lock.
func (r *Router) share(kind string, b *Booking) {
	if r.tell == nil || b.remote || kind == ChangePrefill && b.Ended() {
		return // with its end a request's prefill is known to be over
	}
	if kind == ChangeAdd {
		r.told++
		b.number = r.told
	}
	if b.number != 0 {
		r.tell(kind, b)
	}
}

// BookRemote books what another router has booked. It returns nil for a worker
// that is not up here.
func (r *Router) BookRemote(change Change) *Booking {
	b := &Booking{
		router: r, remote: true, worker: kv.WorkerKey{Worker: change.Worker, Rank: change.Rank},
		prompt: max(0, change.Tokens), uncached: max(0, change.Uncached), answeredWhole: change.AnsweredWhole, leg: change.Leg,
	}
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if _, up := r.target(b.worker); !up {
		return nil
	}
	if r.traits.ActiveBlocks && r.Knobs.RouterTrackActiveBlocks {
		for rest := change.Sequence; len(rest) >= 8; rest = rest[8:] {
			b.sequence = append(b.sequence, binary.LittleEndian.Uint64(rest))
		}
	}
	r.loads.begin(b, r.Now())
	return b
}
