package fair

import (
	"container/list"
	"math"
	"time"
)

// flow is one tenant in one class: its items, and the counter of its service.
type flow[T any] struct {
	lane     *lane[T]
	name     string
	weight   float64
	served   float64    // service received divided by weight, ms
	pending  float64    // the same of running requests, as charged
	items    []*Item[T] // in order
	waiting  float64    // their cost, ms
	staying  float64    // of that, of those that do not leave
	running  int        // charges that have not ended
	yields   int        // items of others served before its yielding ones, since it waits
	yielding bool       // others are offered first in this walk
	next     int        // of items, that walk offers
	walk     uint64     // that next is for
	used     *list.Element
	began    time.Time // a request of it, last

	received  float64 // service divided by weight, ms, that has not been reported
	runs      float64 // elsewhere, whole ms
	elsewhere float64 // of that, what counts
}

// counter decides the turn.
func (f *flow[T]) counter() float64 { return f.served + f.pending + f.elsewhere }

// lane is one class.
type lane[T any] struct {
	class      Class
	backlogged []*flow[T] // those with items, in no order
	clock      float64    // floor while any waited last
	running    int        // charges that have not ended
	began      time.Time  // a request of it, last
	passed     uint64     // the last walk in which an item said PassClass
}

// floor is the service to which a flow that begins to wait is lifted.
func (l *lane[T]) floor() float64 {
	if len(l.backlogged) == 0 {
		return l.clock
	}
	least := math.Inf(1)
	for _, f := range l.backlogged {
		least = min(least, f.served)
	}
	return least
}

// length is the number of items.
func (l *lane[T]) length() (n int) {
	for _, f := range l.backlogged {
		n += len(f.items)
	}
	return n
}

// cost is the predicted cost of the items, ms.
func (l *lane[T]) cost() (ms float64) {
	for _, f := range l.backlogged {
		ms += f.waiting
	}
	return ms
}

// staying is the predicted cost of the items that are served however late, ms.
func (l *lane[T]) staying() (ms float64) {
	for _, f := range l.backlogged {
		ms += f.staying
	}
	return ms
}

// join lifts a flow that is about to wait.
func (l *lane[T]) join(f *flow[T]) {
	floor := l.floor()
	f.served = min(max(f.served, floor), floor+MostDebt)
	f.weigh()
}

// first returns the flow whose item is to be offered in that walk; nil: all have been.
// There are at most as many flows as items, so a search is fast enough.
func (l *lane[T]) first(walk uint64) (best *flow[T]) {
	if l.passed == walk {
		return nil
	}
	for _, f := range l.backlogged {
		if f.walk != walk {
			f.walk, f.next = walk, 0
		}
		if f.yielding || f.next == len(f.items) {
			continue
		}
		if best == nil || f.counter() < best.counter() || f.counter() == best.counter() && f.items[f.next].number < best.items[best.next].number {
			best = f
		}
	}
	return best
}

// cost returns a cost within its bounds.
func cost(ms float64) float64 {
	if !(ms > 0) { // NaN too
		return 0
	}
	return min(ms, MostCost)
}
