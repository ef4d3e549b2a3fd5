// Package fair orders the requests that wait for a worker: by class, inside a class fairly
// over tenants by the service that each has received, and inside a tenant by deadline.
//
// Service is the time that workers spend on a tenant's requests, ms: prompt tokens that
// must be computed times their cost, and answer tokens times theirs. A request whose
// prompt is cached costs little, and no tenant pays for work that its worker did not do.
//
// Each tenant has a counter for each class: the service that it has received and that its
// running requests are predicted to cost, divided by its weight. Of the waiting tenants, the
// one with the lowest counter is next (Sheng et al., Fairness in Serving Large Language Models,
// OSDI 2024). A request is charged its predicted cost when it begins, more if its answer gets
// longer, and its true cost when it ends:
//
//   - The service received of a tenant that begins to wait is lifted to the least of the
//     waiting tenants: idle time earns no credit. It exceeds that least by at most MostDebt.
//   - Requests that end while no request of their class waits are not charged.
//
// So for two tenants f and g of a class of which requests wait all the time between two
// instants, and may go to the same workers, the service S of the requests that began between
// them obeys
//
//	|S(f)/w(f) − S(g)/w(g)| ≤ d + (1+y)·C/w + 2·(n(f)·E/w(f) + n(g)·E/w(g))
//
// d is the difference of their counters at the first instant, C the most that one request
// costs, w the lower of their weights, n how many requests of a tenant run at once, and E the
// most by which a prediction is wrong. y is the number of requests served before others that
// yielded for their prefix, at most MostYields per tenant. The reason: f is chosen only
// while its counter is not above g's, or g yields, and then gains on g by one request. Counters
// differ from true costs by the errors of what runs, at both instants.
//
// Classes are served in order, but a share s of the service can be reserved for class Batch.
// Between two instants while requests of that and of another class wait all the time, and may
// go to the same workers, the service B of those of class Batch and the service S of all that
// began between them obey
//
//	|B − s·S| ≤ d + (1+y)·C + 2·n·E
//
// d is what class Batch is owed of its share at the first instant, n how many requests run at
// once, and C, E and y are as above, y of all tenants together. The reason: class Batch is served
// first only while it is owed service, and the others only while it is not. The debt is at most
// MostDebt in either direction, so no prediction counts for more, neither when it is charged nor
// when an excess is given back.
//
// Several routers over the same workers have a queue each. They report to each other what tenants
// receive (Report, Elsewhere), and a counter is the sum of all. The first bound then holds for the
// service by all routers together, of tenants that wait at all of them, with 2·u more: u is the
// maximum, divided by the weight, that a router has begun of a tenant's requests and not reported.
// Reported service takes a tenant at most MostDebt behind the others.
package fair

import (
	"container/list"
	"slices"
	"time"
)

const (
	// MostDebt is the maximum service divided by the weight, ms, by which a tenant that
	// begins to wait is behind the others for earlier service.
	MostDebt = 10_000
	// MostCost bounds the cost of one request, ms.
	MostCost = 3_600_000
	// LeastWeight and MostWeight bound the weight of a tenant.
	LeastWeight, MostWeight = 0.001, 1000
	// Patience is the time after its arrival at which a request without a deadline is due, so
	// that those with one cannot starve it.
	Patience = 30 * time.Second
)

// Tenant receives the service of a request.
type Tenant struct {
	Name   string  // empty: the common tenant of all that have no name
	Weight float64 // of its share of a class, LeastWeight to MostWeight; 0: 1
}

// weight returns the weight within its bounds.
func (t Tenant) weight() float64 {
	if !(t.Weight > 0) { // NaN too
		return 1
	}
	return min(max(t.Weight, LeastWeight), MostWeight)
}

// Item is one waiting request.
type Item[T any] struct {
	Value    T
	Tenant   Tenant
	Class    Class
	Cost     float64       // predicted, ms
	Priority uint32        // among those of its tenant in its class: higher ones first
	Since    time.Time     // its arrival
	Deadline time.Time     // for its first token; zero: none
	Jump     time.Duration // by which it counts as due earlier
	Leaves   bool          // it is shed instead of served late, and no work ahead of others

	flow   *flow[T] // in which it waits; nil: none
	number uint64   // of its arrival
	passed int      // number of items served before it
}

// due is the deadline of the item's first token.
func (it *Item[T]) due() time.Time {
	if it.Deadline.IsZero() {
		return it.Since.Add(Patience - it.Jump)
	}
	return it.Deadline.Add(-it.Jump)
}

// stays is the cost of an item that is served however late, ms.
func (it *Item[T]) stays() float64 {
	if it.Leaves {
		return 0
	}
	return it.Cost
}

// before orders the items of one flow.
func (it *Item[T]) before(other *Item[T]) bool {
	if it.Priority != other.Priority {
		return it.Priority > other.Priority
	}
	if order := it.due().Compare(other.due()); order != 0 {
		return order < 0
	}
	return it.number < other.number
}

// Settings bound a queue.
type Settings struct {
	Limit   int // maximum number of waiting items, at least 1
	Tenants int // maximum number of stored tenants of a class; further ones share the flow of the common tenant

	BatchShare float64 // of the service, and of Limit, reserved for class Batch, 0 to 1
}

// Queue holds the items that wait and the service of their tenants. It has no lock: its
// owner guards it.
type Queue[T any] struct {
	settings   Settings
	lanes      [len(Classes)]lane[T]
	flows      [len(Classes)]map[string]*flow[T]
	used       [len(Classes)]*list.List // of flows, the one used last at the back
	unreported map[*flow[T]]bool        // that run, or have unreported service
	length     int
	yielding   []*flow[T] // of which an item said Yield in this walk
	walk       uint64
	arrived    uint64
	owed       float64 // to class Batch of its share, ms; below 0: it has received more
}

// New returns an empty queue.
func New[T any](s Settings) *Queue[T] {
	q := &Queue[T]{settings: Settings{Limit: max(1, s.Limit), Tenants: max(1, s.Tenants), BatchShare: shareWithin(s.BatchShare)},
		unreported: map[*flow[T]]bool{}}
	for i := range q.flows {
		q.lanes[i].class = Classes[i]
		q.flows[i], q.used[i] = map[string]*flow[T]{}, list.New()
	}
	return q
}

// Len returns the number of items.
func (q *Queue[T]) Len() int { return q.length }

// Waiting returns the cost of the items of a class and of those that go before it, ms.
func (q *Queue[T]) Waiting(c Class) (ms float64) {
	for i := range q.lanes[:c.Place()+1] {
		ms += q.lanes[i].cost()
	}
	return ms
}

// Owes reports whether service is owed to requests of the class.
func (q *Queue[T]) Owes(c Class) bool { return c.known() == Batch && q.owed > 0 }

// RunningAfter returns the number of running requests of classes after c.
func (q *Queue[T]) RunningAfter(c Class) (n int) {
	for i := c.Place() + 1; i < len(q.lanes); i++ {
		n += q.lanes[i].running
	}
	return n
}

// Presses reports whether a tenant runs its share of so many seats or more, while another one of its class runs and
// waits for less than its own: of those that have begun a request since then.
func (q *Queue[T]) Presses(t Tenant, c Class, seats int, since time.Time) (presses bool) {
	own := q.flows[c.Place()][t.Name]
	if own == nil {
		return false
	}
	weights := q.weights(c, since, nil)
	if float64(own.running) < own.weight/weights*float64(seats) {
		return false
	}
	q.recent(c, since, func(f *flow[T]) {
		presses = presses || f != own && f.uses() < f.weight/weights*float64(seats)
	})
	return presses
}

// Within reports whether a tenant runs and waits for less than its share of so many seats beside others of its class
// that have begun a request since then.
func (q *Queue[T]) Within(t Tenant, c Class, seats int, since time.Time) bool {
	own, uses := q.flows[c.Place()][t.Name], 0.0
	if own != nil {
		uses = own.uses()
	}
	others := q.weights(c, since, own)
	return others > 0 && uses < t.weight()/(others+t.weight())*float64(seats)
}

// weights is the sum of the weights of a class's tenants that have begun a request since then, but one.
func (q *Queue[T]) weights(c Class, since time.Time, but *flow[T]) (sum float64) {
	q.recent(c, since, func(f *flow[T]) {
		if f != but {
			sum += f.weight
		}
	})
	return sum
}

// recent calls f with those flows of a class that have begun a request since then, among the last mostTried.
func (q *Queue[T]) recent(c Class, since time.Time, f func(*flow[T])) {
	e := q.used[c.Place()].Back()
	for n := 0; e != nil && n < mostTried; n++ {
		if g := e.Value.(*flow[T]); g.began.After(since) {
			f(g)
		}
		e = e.Prev()
	}
}

// uses is the number of a flow's requests that run and wait.
func (f *flow[T]) uses() float64 { return float64(f.running + len(f.items)) }

func (q *Queue[T]) batch() *lane[T] { return &q.lanes[Batch.Place()] }

// flow returns the flow of a tenant, a new one if there is none.
func (q *Queue[T]) flow(t Tenant, c Class) *flow[T] {
	at := c.Place()
	flows, used := q.flows[at], q.used[at]
	f := flows[t.Name]
	if f == nil && len(flows) >= q.settings.Tenants && !q.forget(at) {
		t = Tenant{}
		f = flows[t.Name]
	}
	if f == nil {
		f = &flow[T]{lane: &q.lanes[at], name: t.Name, served: q.lanes[at].clock}
		f.used = used.PushBack(f)
		flows[t.Name] = f
	}
	used.MoveToBack(f.used)
	f.weight = t.weight()
	return f
}

// mostTried is the number of flows that are tried where one must be dropped.
const mostTried = 32

// forget drops the least recently used flow that neither waits nor runs, except that of the
// common tenant, which others share. Not ok: none was found.
func (q *Queue[T]) forget(at int) (ok bool) {
	e := q.used[at].Front()
	for range mostTried {
		if e == nil {
			break
		}
		if f := e.Value.(*flow[T]); len(f.items) == 0 && f.running == 0 && f.name != "" {
			delete(q.flows[at], f.name)
			delete(q.unreported, f)
			q.used[at].Remove(e)
			return true
		}
		e = e.Next()
	}
	return false
}

// Push adds an item. If the queue is full, out is the item that has to leave, possibly the new
// one: one of the last waiting class, of the tenant with the most waiting items for its weight.
// nil: none has to.
func (q *Queue[T]) Push(it *Item[T]) (out *Item[T]) {
	f := q.flow(it.Tenant, it.Class)
	if q.length >= q.settings.Limit {
		if out = q.last(f); out == nil {
			return it
		}
		q.Remove(out)
	}
	if len(f.items) == 0 {
		if f.lane == q.batch() && len(f.lane.backlogged) == 0 {
			q.owed = min(q.owed, 0) // no credit for the time in which none waited
		}
		f.yields = 0
		f.lane.join(f)
		f.lane.backlogged = append(f.lane.backlogged, f)
	}
	q.arrived++
	it.flow, it.number, it.Cost = f, q.arrived, cost(it.Cost)
	at, _ := slices.BinarySearchFunc(f.items, it, func(a, b *Item[T]) int {
		if a.before(b) {
			return -1
		}
		return 1
	})
	f.items = slices.Insert(f.items, at, it)
	f.waiting += it.Cost
	f.staying += it.stays()
	q.length++
	return out
}

// last returns the item that has to leave for a new one of f; nil: the new one. Class Batch
// keeps its share of the places.
func (q *Queue[T]) last(f *flow[T]) *Item[T] {
	batch := q.batch()
	places := batch.length()
	if f.lane == batch {
		places++
	}
	keeps := places > 0 && float64(places) <= q.settings.BatchShare*float64(q.settings.Limit)
	for i := len(q.lanes) - 1; i >= 0; i-- {
		l := &q.lanes[i]
		if keeps && l == batch {
			continue
		}
		var longest *flow[T]
		for _, g := range l.backlogged {
			if longest == nil || float64(len(g.items))/g.weight > float64(len(longest.items))/longest.weight {
				longest = g
			}
		}
		switch {
		case l == f.lane && (longest == nil || float64(len(longest.items))/longest.weight <= float64(len(f.items)+1)/f.weight):
			return nil
		case longest != nil:
			return longest.items[len(longest.items)-1]
		}
	}
	return nil
}

// Remove takes an item out, and reports whether it waited. It must not be called during
// Walk.
func (q *Queue[T]) Remove(it *Item[T]) bool {
	f := it.flow
	if f == nil {
		return false
	}
	q.take(f, slices.Index(f.items, it))
	return true
}

// take removes an item of a flow.
func (q *Queue[T]) take(f *flow[T], at int) {
	it := f.items[at]
	it.flow = nil
	f.items = slices.Delete(f.items, at, at+1)
	f.waiting -= it.Cost
	f.staying -= it.stays()
	q.length--
	if len(f.items) > 0 {
		return
	}
	f.items, f.waiting, f.staying = nil, 0, 0 // rounding errors
	l := f.lane
	l.clock = l.floor()
	l.backlogged = slices.DeleteFunc(l.backlogged, func(g *flow[T]) bool { return g == f })
}

// Verdict is the decision on an item that Walk offers.
type Verdict int

const (
	Kept       Verdict = iota // it keeps waiting; the next one is offered
	Taken                     // it leaves the queue; the next one is offered
	Later                     // it prefers to wait for another worker: others of its tenant may be served first
	Yield                     // the same, and other tenants may be served first, too
	PassClass                 // it keeps waiting, as do all of its class
	PassTenant                // it keeps waiting, as do all of its tenant
	Stop                      // it keeps waiting, as do all after it
)

const (
	// Window is the number of a tenant's items that are offered before one that says Later.
	Window = 256
	// MostPassed is the maximum number of them that are served before it.
	MostPassed = 32
	// MostYields is the maximum number of other tenants' items that are served before those of a
	// tenant that say Yield, while it waits.
	MostYields = 64
)

// Walk offers the items in order. An item that says Later or Yield is offered again after up to
// Window items of its tenant with the same priority. If none of them is taken, or if MostPassed
// were taken before it, it must be taken if possible. After Yield it is offered once more after all
// tenants. So requests can wait for the workers with their prefixes. Later does not change the
// service of another tenant. offer may call Begin: the order of the remaining items follows it.
// After PassClass, the rest of the class is not offered, at no cost.
func (q *Queue[T]) Walk(offer func(it *Item[T], must bool) Verdict) {
	q.walk++
	last := false // no item yields any more
	for {
		f := q.next()
		if f == nil {
			if last = q.resume(); last {
				continue
			}
			return
		}
		it, at := f.items[f.next], f.next
		must := last || it.passed >= MostPassed
		v := offer(it, must)
		if (v == Later || v == Yield) && !must {
			yields := v == Yield && f.yields < MostYields
			if v, at = q.passing(f, offer); v == Kept && yields {
				f.yielding = true
				q.yielding = append(q.yielding, f)
				continue
			}
			if v == Kept {
				v = offer(it, true)
			}
		}
		switch {
		case v == Stop:
			q.resume()
			return
		case v == PassClass:
			f.lane.passed = q.walk
			continue
		case v == PassTenant:
			f.next = len(f.items)
			continue
		case v != Taken:
			f.next++
			continue
		case at > f.next:
			it.passed++
		}
		q.take(f, at)
		for _, other := range q.yielding {
			other.yields++
		}
	}
}

// resume lets Walk continue with the flows that yield, and reports whether there are any.
func (q *Queue[T]) resume() (any bool) {
	any = len(q.yielding) > 0
	for _, f := range q.yielding {
		f.yielding = false
	}
	clear(q.yielding)
	q.yielding = q.yielding[:0]
	return any
}

// next returns the flow whose item Walk offers; nil: all have been offered.
func (q *Queue[T]) next() *flow[T] {
	if q.owed > 0 {
		if f := q.batch().first(q.walk); f != nil {
			return f
		}
	}
	for i := range q.lanes {
		if f := q.lanes[i].first(q.walk); f != nil {
			return f
		}
	}
	return nil
}

// passing offers the items behind the next one of a flow; Kept: none of them is taken.
func (q *Queue[T]) passing(f *flow[T], offer func(it *Item[T], must bool) Verdict) (v Verdict, at int) {
	for at = f.next + 1; at < len(f.items) && at <= f.next+Window && f.items[at].Priority == f.items[f.next].Priority; at++ {
		if v = offer(f.items[at], false); v == Taken || v == PassClass || v == PassTenant || v == Stop {
			return v, at
		}
	}
	return Kept, f.next
}

// Each calls f with every item, in no particular order.
func (q *Queue[T]) Each(f func(*Item[T])) {
	for i := range q.lanes {
		for _, flow := range q.lanes[i].backlogged {
			for _, it := range flow.items {
				f(it)
			}
		}
	}
}

// Ahead returns the cost, ms, of the items that will be served before it, which does not wait
// yet, if no others arrive and predictions are right: earlier ones of its tenant, the service of
// each other tenant of its class until the counters are equal, and items of earlier classes. Items
// that leave are not counted: they are served or shed by their deadline.
func (q *Queue[T]) Ahead(it *Item[T]) float64 {
	at := it.Class.Place()
	l, f := &q.lanes[at], q.flows[at][it.Tenant.Name]
	begins, own := l.floor(), 0.0
	if f != nil {
		begins = f.pending + f.elsewhere + max(f.served, begins)
		it.number = q.arrived + 1
		for _, other := range f.items {
			if other.before(it) {
				own += other.stays()
			}
		}
	}
	begins += own / it.Tenant.weight()
	ms := own
	for _, g := range l.backlogged {
		if g != f {
			ms += min(g.staying, max(0, begins-g.counter())*g.weight)
		}
	}
	earlier := 0.0
	for i := range at {
		earlier += q.lanes[i].staying()
	}
	switch share := q.settings.BatchShare; {
	case share == 0:
		return ms + earlier
	case it.Class.known() == Batch:
		return ms + min(earlier, (ms+cost(it.Cost))*(1-share)/share)
	case share == 1:
		return ms + earlier + q.batch().staying()
	default:
		return ms + earlier + min(q.batch().staying(), (ms+earlier)*share/(1-share))
	}
}

// contends reports whether service of that lane competes with class Batch, or that of class Batch
// with the others.
func (q *Queue[T]) contends(l *lane[T]) bool {
	batch := q.batch()
	if l != batch {
		return len(batch.backlogged) > 0
	}
	for i := range q.lanes {
		if other := &q.lanes[i]; other != batch && len(other.backlogged) > 0 {
			return true
		}
	}
	return false
}

// share replaces the counted cost of a charge that contends. A prediction beyond MostDebt has
// changed the debt by less, and no more than that is given back.
func (q *Queue[T]) share(c *Charge[T]) {
	before := q.owed - c.owed
	after := before + c.cost*q.settings.BatchShare
	if c.flow.lane == q.batch() {
		after -= c.cost
	}
	q.owed = min(max(after, -MostDebt), MostDebt)
	c.owed = q.owed - before
}

// shareWithin returns a share within its bounds.
func shareWithin(s float64) float64 {
	if !(s > 0) { // NaN too
		return 0
	}
	return min(s, 1)
}
