package replica

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
)

// buckets is the number of parts in which the bookings of one router are compared.
// Parts that differ are sent again: a bit of a word for each.
const buckets = 64

// sums are one for each bucket, of the in-flight bookings in it. Two routers that know of
// the same bookings in the same state have the same sums.
type sums [buckets]uint64

// bucketOf returns the bucket of a request's name.
func bucketOf(request string) uint64 { return xxh3.HashString(request) % buckets }

// sumOf is a booking's summand in the sum of its bucket.
func sumOf(request string, c *router.Change, computed bool) uint64 {
	text := append(make([]byte, 0, 128), request...)
	text = binary.LittleEndian.AppendUint64(text, c.Worker.Worker)
	text = binary.LittleEndian.AppendUint32(text, c.Worker.Rank)
	text = binary.LittleEndian.AppendUint64(text, uint64(c.Tokens))
	text = binary.LittleEndian.AppendUint64(text, uint64(c.Uncached))
	if computed {
		text = append(text, 1)
	}
	return xxh3.Hash(text)
}

// ownBooks are the bookings of this router as they were published. One goroutine
// uses them.
type ownBooks struct {
	names   map[*router.Booking]string
	buckets [buckets]map[string]*ownBooking
	sums    sums
	made    uint64 // names so far
	next    int    // first bucket to send again
}

// ownBooking is a booking sent to the others.
type ownBooking struct {
	*router.Booking
	computed bool // the others know that its prompt is
	sum      uint64
}

// apply notes a change, and returns the name of its request; empty: it was not sent
// the booking.
func (o *ownBooks) apply(kind string, b *router.Booking, id uint64) (request string) {
	request, known := o.names[b]
	if !known {
		if kind != router.ChangeAdd {
			return ""
		}
		change := b.Change(kind)
		if request = change.Request; request == "" || len(request) > idLimit {
			o.made++
			request = fmt.Sprintf("%016x-%d", id, o.made)
		}
		if o.names == nil {
			o.names = map[*router.Booking]string{}
		}
		o.names[b] = request
		in := &o.buckets[bucketOf(request)]
		if *in == nil {
			*in = map[string]*ownBooking{}
		}
		if old := (*in)[request]; old != nil { // its end was lost on the way here
			delete(o.names, old.Booking)
			o.sums[bucketOf(request)] -= old.sum
		}
		held := &ownBooking{Booking: b, sum: sumOf(request, &change, false)}
		(*in)[request] = held
		o.sums[bucketOf(request)] += held.sum
		return request
	}
	at := bucketOf(request)
	held := o.buckets[at][request]
	o.sums[at] -= held.sum
	if kind == router.ChangeFree {
		delete(o.buckets[at], request)
		delete(o.names, b)
		return request
	}
	change := b.Change(kind)
	held.computed, held.sum = true, sumOf(request, &change, true)
	o.sums[at] += held.sum
	return request
}

// ended lists the bookings whose end was not sent.
func (o *ownBooks) ended() (list []*router.Booking) {
	for b := range o.names {
		if b.Ended() {
			list = append(list, b)
		}
	}
	return list
}

// otherRouter holds the bookings of one other router. Mesh.books guards all but mesh.
type otherRouter struct {
	mesh    *Mesh
	id      uint64 // 0: it has said nothing yet, or is heard by another connection
	own     bool   // it is a kvrouter
	open    map[string]*heldBooking
	sums    sums
	added   uint64 // bookings so far
	hashes  int    // of all that are open
	booked  int    // bookings on workers that are up here
	waiting int    // bookings on workers that are not
	tried   time.Time
	since   time.Time // of its first message
	last    time.Time // of its last message
	heard   bool      // it was once: id was not 0
	left    bool      // it has said so
	asked   int       // digests in a row that differed in as many buckets as the one before, or in more
	differ  int       // buckets of the last one
	service *router.Elsewhere

	differing int // digests in a row that differed
}

// heldBooking is a booking of another router.
type heldBooking struct {
	*router.Booking // nil: its worker is not up here, or it cannot be
	change          router.Change
	number          uint64 // of those of its router, in the order in which they came
	refused         bool   // it cannot be
	computed        bool
	sum             uint64
}

func newOther(mesh *Mesh) *otherRouter {
	return &otherRouter{mesh: mesh, open: map[string]*heldBooking{}, service: mesh.router.Admission.Elsewhere()}
}

// sensible reports whether a booking can be: no prompt is longer than kv.MaxTokens,
// none has more to compute or to load than it has tokens, and none has more full blocks.
func sensible(c *router.Change) bool {
	return c.Tokens >= 0 && c.Tokens <= kv.MaxTokens && c.Uncached >= 0 && c.Uncached <= c.Tokens && c.Loads.Total() <= c.Tokens &&
		len(c.Sequence) <= c.Tokens && c.Leg <= kv.LegDecode
}

// is notes which router speaks. Not ok: another connection hears it already.
func (p *otherRouter) is(id uint64) (ok bool) {
	if p.id == id {
		return true
	}
	p.forget() // another one answers there now
	if !p.mesh.claim(id, p) {
		return false
	}
	p.id, p.since = id, time.Now()
	return true
}

// take applies a change that the other router published.
func (p *otherRouter) take(d decoded) {
	r, c := p.mesh, &d.change
	held := p.open[c.Request]
	switch {
	case c.Kind == router.ChangeAdd:
		if held != nil {
			if held.change.Worker == c.Worker && held.change.Tokens == c.Tokens && held.change.Uncached == c.Uncached {
				return // it was sent again
			}
			p.drop(held)
		}
		p.add(c)
	case held == nil:
		p.foreign(c)
		return
	case held.change.Worker != c.Worker, c.Kind == router.ChangePrefill && held.computed:
		return
	default:
		p.change(c.Kind, held)
	}
	r.Received.Add(1)
}

// add books a request of the other router. What there is no room for is not known
// here; what cannot be is, so that it is not requested again.
func (p *otherRouter) add(c *router.Change) {
	r := p.mesh
	if len(p.open) >= bookingLimit || p.hashes+len(c.Sequence) > hashLimit {
		r.Dropped.Add(1)
		return
	}
	p.added++
	held := &heldBooking{change: *c, number: p.added, sum: sumOf(c.Request, c, false), refused: !sensible(c)}
	if held.refused {
		r.Dropped.Add(1)
		held.change.Sequence = nil
	}
	p.open[c.Request] = held
	p.hashes += len(held.change.Sequence)
	p.sums[bucketOf(c.Request)] += held.sum
	if !held.refused {
		p.waiting++
		p.book(held)
	}
}

// book books what waits for its worker.
func (p *otherRouter) book(held *heldBooking) {
	if held.Booking = p.mesh.router.BookRemote(held.change); held.Booking == nil {
		return
	}
	p.waiting--
	p.booked++
	p.mesh.Held.Add(1)
	if held.computed {
		held.FirstToken()
	}
}

// compute notes that the prompt of a booking has been computed.
func (p *otherRouter) compute(held *heldBooking) {
	at := bucketOf(held.change.Request)
	p.sums[at] -= held.sum
	held.computed, held.sum = true, sumOf(held.change.Request, &held.change, true)
	p.sums[at] += held.sum
	if held.Booking != nil {
		held.FirstToken()
	}
}

// drop ends a booking.
func (p *otherRouter) drop(held *heldBooking) {
	switch {
	case held.Booking != nil:
		held.End()
		p.booked--
		p.mesh.Held.Add(-1)
	case !held.refused:
		p.waiting--
	}
	p.sums[bucketOf(held.change.Request)] -= held.sum
	p.hashes -= len(held.change.Sequence)
	delete(p.open, held.change.Request)
}

// foreign applies a change by the other router of a reservation that it has not
// made: a client may end that at any router.
func (p *otherRouter) foreign(c *router.Change) {
	by, held := p.mesh.find(c.Request)
	switch b := p.mesh.router.Booking(c.Request); {
	case b != nil && b.Worker() == c.Worker:
		if p.mesh.Received.Add(1); c.Kind == router.ChangeFree {
			b.Free()
		} else {
			b.FirstToken()
		}
	case held != nil && held.change.Worker == c.Worker:
		p.mesh.Received.Add(1)
		by.change(c.Kind, held)
	}
}

// change applies a change to a booking.
func (p *otherRouter) change(kind string, held *heldBooking) {
	if kind == router.ChangeFree {
		p.drop(held)
	} else if !held.computed {
		p.compute(held)
	}
}

// retryEvery is the pause between two looks for the workers of bookings that wait for
// theirs.
const retryEvery = time.Second

// retry books what waited for its worker, which may have come up.
func (p *otherRouter) retry(now time.Time) {
	if p.waiting == 0 || now.Sub(p.tried) < retryEvery {
		return
	}
	p.tried = now
	for _, held := range p.open {
		if held.Booking == nil && !held.refused {
			p.book(held)
		}
	}
}

const (
	// askAtOnce is how many digests in a row are followed by a question while
	// questions do not help. After that only each askSeldom-th is.
	askAtOnce, askSeldom = 16, 64
)

// compare returns the buckets that the other router must send again, by what its
// digest says is in flight: none, or none yet.
func (p *otherRouter) compare(digest []uint64) (ask uint64) {
	var theirs sums
	copy(theirs[:], digest)
	for i := range theirs {
		if theirs[i] != p.sums[i] {
			ask |= 1 << i
		}
	}
	differ := bits.OnesCount64(ask)
	if differ < p.differ {
		p.asked = 0
	}
	if p.differ = differ; differ == 0 {
		p.differing = 0
		return 0
	}
	p.differing++
	if p.asked++; p.asked > askAtOnce && p.asked%askSeldom != 0 {
		return 0
	}
	return ask
}

// keep ends the bookings of a bucket that the other router does not name any more.
func (p *otherRouter) keep(bucket uint64, requests []string) {
	named := make(map[string]bool, len(requests))
	for _, request := range requests {
		named[request] = true
	}
	for request, held := range p.open {
		if bucketOf(request) == bucket && !named[request] {
			p.drop(held)
		}
	}
}

// forget ends what tenants run at the other router, and all that it has booked, the latest first:
// a worker's prompts are in the order in which they came, and to take out one of them moves those
// behind it.
func (p *otherRouter) forget() {
	all := slices.SortedFunc(maps.Values(p.open), func(a, b *heldBooking) int { return cmp.Compare(b.number, a.number) })
	for _, held := range all {
		p.drop(held)
	}
	p.service.End()
	if p.id != 0 {
		p.mesh.release(p.id, p)
	}
	p.id, p.own, p.asked, p.differing = 0, false, 0, 0
}
