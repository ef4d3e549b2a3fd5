package selection

import (
	"container/list"
	"errors"
	"fmt"
	"sync"
	"time"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/router"
)

// Bounds of what clients of the router port may leave behind.
const (
	maxReservations     = 1 << 20
	maxReservationID    = 1024    // bytes
	maxPending          = 4096    // selections that wait to be reserved, the oldest go first
	maxPendingBlocks    = 1 << 24 // of their prompts together
	pendingFor          = 120 * time.Second
	firstReservationsGC = 1024
)

// errTooMany is the answer once maxReservations are held.
var errTooMany = fmt.Errorf("more than %d reservations are held: free those whose requests have ended", maxReservations)

// errLongID is the answer to an id longer than maxReservationID.
var errLongID = fmt.Errorf("selection_id is longer than %d bytes", maxReservationID)

// errReserved is the answer for an id that is in use.
type errReserved string

func (id errReserved) Error() string {
	return fmt.Sprintf("selection %s is already reserved or being reserved", string(id))
}

// reservations are the bookings that clients of the router port hold, by the
// ids that they gave them. An id is claimed before its booking is made, so that
// two requests cannot book under one. It is safe for concurrent use.
type reservations struct {
	mu      sync.Mutex
	held    map[string]*router.Booking // nil: claimed
	cleanAt int                        // size at which expired ones are looked for
}

// NewReservations returns an empty table of reservations.
func NewReservations() *reservations {
	return &reservations{held: map[string]*router.Booking{}, cleanAt: firstReservationsGC}
}

// claim takes an id for a booking that is about to be made; install or release
// must follow.
func (r *reservations) claim(id string) error {
	if len(id) > maxReservationID {
		return errLongID
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if booking, found := r.held[id]; found && (booking == nil || !booking.Ended()) {
		return errReserved(id)
	}
	if len(r.held) >= r.cleanAt {
		for old, booking := range r.held {
			if booking != nil && booking.Ended() {
				delete(r.held, old)
			}
		}
		if len(r.held) >= maxReservations {
			return errTooMany
		}
		r.cleanAt = min(max(firstReservationsGC, 2*len(r.held)), maxReservations)
	}
	r.held[id] = nil
	return nil
}

// Install completes a claim.
func (r *reservations) Install(id string, booking *router.Booking) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held[id] = booking
}

// release gives up a claim, or forgets a booking.
func (r *reservations) release(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.held, id)
}

// get returns the booking under an id; nil: there is none, it is still being
// made, or it has expired.
func (r *reservations) get(id string) *router.Booking {
	r.mu.Lock()
	defer r.mu.Unlock()
	booking := r.held[id]
	if booking != nil && booking.Ended() {
		delete(r.held, id)
		return nil
	}
	return booking
}

// take is get, and forgets the booking.
func (r *reservations) take(id string) *router.Booking {
	booking := r.get(id)
	if booking != nil {
		r.release(id)
	}
	return booking
}

// ReleaseWorker ends every booking on a worker that has been taken out.
func (r *reservations) ReleaseWorker(worker uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, booking := range r.held {
		if booking != nil && booking.Worker().Worker == worker {
			booking.End()
			delete(r.held, id)
		}
	}
}

// pendingSelection is a choice that may still be reserved.
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

// pendingSelections keeps choices for a while by their ids. It is safe for
// concurrent use.
type pendingSelections struct {
	now func() time.Time

	mu     sync.Mutex
	byKey  map[pendingKey]*list.Element
	order  *list.List // of pendingSelection, the oldest first
	blocks int        // of all prompts
}

func newPendingSelections() *pendingSelections {
	return &pendingSelections{now: time.Now, byKey: map[pendingKey]*list.Element{}, order: list.New()}
}

// put keeps a choice in place of an earlier one of the same id.
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

// get returns the choice of that id.
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

// drop forgets the choice of that id.
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

// errNoPending is the answer to a reservation of a choice that is not kept.
func errNoPending(key pendingKey) error {
	return errors.New("no pending selection " + key.id + " for " + key.of.String() + " (expired, already used, or never selected)")
}
