package selection

import (
	"container/list"
	"errors"
	"fmt"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/quota"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/router"
)

// Limits on the state that clients of the router port may leave behind.
const (
	maxReservations     = 1 << 20
	maxReservationID    = 1024    // bytes
	maxReservedBlocks   = 1 << 24 // of all their prompts
	maxPending          = 4096    // selections not reserved yet; the oldest are evicted
	maxPendingBlocks    = 1 << 24 // of all their prompts
	pendingFor          = 120 * time.Second
	firstReservationsGC = 1024
	reservationsGCEvery = time.Second // at most, where blocks are missing
)

// errTooMany is returned once there are maxReservations.
var errTooMany = fmt.Errorf("there are %d reservations, which is the maximum: free those whose requests have ended", maxReservations)

// errTooManyBlocks is returned once they have maxReservedBlocks.
var errTooManyBlocks = fmt.Errorf("the reservations have %d blocks, which is the maximum, or your share of it: free those whose "+
	"requests have ended", maxReservedBlocks)

// errLongID is returned for an id longer than maxReservationID.
var errLongID = fmt.Errorf("selection_id is longer than %d bytes", maxReservationID)

// errReserved is returned for an id that is in use.
type errReserved string

func (id errReserved) Error() string {
	return fmt.Sprintf("selection %s is already reserved or being reserved", string(id))
}

// reservations are the bookings of clients of the router port, by the ids that the
// clients gave. An id is claimed before its booking is made, so that two requests cannot
// use the same one. It is safe for concurrent use.
type reservations struct {
	now    func() time.Time
	blocks *quota.Pool // of their prompts

	mu      sync.Mutex // guards the rest; the router's lock may be taken under it
	byID    map[string]reservation
	cleanAt int       // size at which expired ones are removed
	cleaned time.Time // when they last were
}

// reservation is what an id stands for.
type reservation struct {
	booking *router.Booking // nil: the id is claimed
	client  string
	blocks  int64
}

// newReservations returns an empty table of reservations.
func newReservations() *reservations {
	return &reservations{now: time.Now, blocks: quota.New(maxReservedBlocks), byID: map[string]reservation{}, cleanAt: firstReservationsGC}
}

// claim reserves a client's id for a booking of so many blocks that is about to be made;
// install or release must follow.
func (r *reservations) claim(id, client string, blocks int) error {
	if len(id) > maxReservationID {
		return errLongID
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if old, found := r.byID[id]; found {
		if old.booking == nil || !old.booking.Ended() {
			return errReserved(id)
		}
		r.remove(id)
	}
	if len(r.byID) >= r.cleanAt {
		r.clean()
		if len(r.byID) >= maxReservations {
			return errTooMany
		}
		r.cleanAt = min(max(firstReservationsGC, 2*len(r.byID)), maxReservations)
	}
	one := reservation{client: client, blocks: int64(blocks)}
	if !r.blocks.Take(client, 0, one.blocks) {
		if r.now().Sub(r.cleaned) < reservationsGCEvery {
			return errTooManyBlocks
		}
		if r.clean(); !r.blocks.Take(client, 0, one.blocks) {
			return errTooManyBlocks
		}
	}
	r.byID[id] = one
	return nil
}

// clean removes the bookings that have ended. r.mu is held.
func (r *reservations) clean() {
	r.cleaned = r.now()
	for id, one := range r.byID {
		if one.booking != nil && one.booking.Ended() {
			r.remove(id)
		}
	}
}

// remove removes a claim or a booking. r.mu is held.
func (r *reservations) remove(id string) {
	if one, found := r.byID[id]; found {
		r.blocks.Give(one.client, one.blocks)
		delete(r.byID, id)
	}
}

// install completes a claim.
func (r *reservations) install(id string, booking *router.Booking) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := r.byID[id]
	one.booking = booking
	r.byID[id] = one
}

// release removes a claim or a booking.
func (r *reservations) release(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.remove(id)
}

// get returns the booking of an id; nil: there is none, it is still being made, or it has
// expired.
func (r *reservations) get(id string) *router.Booking {
	r.mu.Lock()
	defer r.mu.Unlock()
	booking := r.byID[id].booking
	if booking != nil && booking.Ended() {
		r.remove(id)
		return nil
	}
	return booking
}

// take is get, and removes the booking.
func (r *reservations) take(id string) *router.Booking {
	booking := r.get(id)
	if booking != nil {
		r.release(id)
	}
	return booking
}

// releaseWorker ends every reservation on a worker that has been removed.
func (r *reservations) releaseWorker(worker uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, one := range r.byID {
		if one.booking != nil && one.booking.Worker().Worker == worker {
			one.booking.End()
			r.remove(id)
		}
	}
}

// pendingSelection is a selection that can still be reserved.
type pendingSelection struct {
	key     pendingKey
	at      time.Time
	request router.Request // with Local in place of Tokens
	worker  kv.WorkerKey
}

type pendingKey struct {
	of events.Partition
	id string
}

// pendingSelections keeps selections for pendingFor by their ids. It is safe for
// concurrent use.
type pendingSelections struct {
	now func() time.Time

	mu     sync.Mutex // guards the rest
	byKey  map[pendingKey]*list.Element
	order  *list.List // of pendingSelection, the oldest first
	blocks int        // of all prompts
}

func newPendingSelections() *pendingSelections {
	return &pendingSelections{now: time.Now, byKey: map[pendingKey]*list.Element{}, order: list.New()}
}

// put stores a selection in place of an earlier one of the same id.
func (p *pendingSelections) put(s pendingSelection) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.at = p.now()
	p.remove(s.key)
	for p.order.Len() > 0 {
		oldest := p.order.Front().Value.(pendingSelection)
		if p.order.Len() < maxPending && p.blocks+len(s.request.Local) <= maxPendingBlocks && s.at.Sub(oldest.at) <= pendingFor {
			break
		}
		p.remove(oldest.key)
	}
	p.blocks += len(s.request.Local)
	p.byKey[s.key] = p.order.PushBack(s)
}

// get returns the selection of an id.
func (p *pendingSelections) get(key pendingKey) (s pendingSelection, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	element := p.byKey[key]
	if element == nil {
		return pendingSelection{}, false
	}
	s = element.Value.(pendingSelection)
	return s, p.now().Sub(s.at) <= pendingFor
}

// drop removes the selection of an id.
func (p *pendingSelections) drop(key pendingKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.remove(key)
}

func (p *pendingSelections) remove(key pendingKey) {
	if element := p.byKey[key]; element != nil {
		p.blocks -= len(p.order.Remove(element).(pendingSelection).request.Local)
		delete(p.byKey, key)
	}
}

// errNoPending is returned for a reservation of a selection that is not kept.
func errNoPending(key pendingKey) error {
	return errors.New("no pending selection " + key.id + " for " + key.of.String() + " (expired, already used, or never selected)")
}
