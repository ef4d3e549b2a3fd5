// Package replica synchronizes the bookings of several routers over the same workers: each router
// publishes its own bookings and sessions, in the form of Dynamo's selection service, and applies those
// of the others. Kvrouters also exchange digests of their bookings, so that lost ones are re-sent.
package replica

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
)

// Bounds of the messages between routers.
const (
	// queueLimit is how many messages wait to be sent; what comes when it is full
	// is lost.
	queueLimit = 100_000
	// bookingLimit is how many bookings of one other router are known at a time.
	bookingLimit = 100_000
	// hashLimit is how many sequence hashes they have together: 128 MB.
	hashLimit = 1 << 24
)

// Mesh shares bookings, the service of tenants, sessions and ejections between several
// routers over the same workers. Lost bookings are detected by digests, which kvrouters exchange
// twice a second, and re-sent; those of Dynamo remain lost. Blocks of answers are
// not shared. When a router times out, all of its bookings end.
type Mesh struct {
	partition func(worker uint64) (model, group string)   // see Deps
	stored    func(response string, worker, owner uint64) // see Deps

	eachStored func(take func(worker, owner uint64, responses []string)) // see Deps

	router *router.Router
	id     uint64 // drawn at each start; never 0
	link   Link
	log    *slog.Logger
	queue  chan message
	timing timing
	asked  atomic.Uint64 // buckets that others want again
	missed atomic.Bool   // a change was lost because queue was full

	recalled atomic.Bool // another router wants all stored responses

	books   sync.Mutex              // guards members and what each holds; taken before mu and the router's lock
	members map[string]*otherRouter // by the name of the link for it

	recalls     int // routers that were asked for their stored responses since recallsFrom
	recallsFrom time.Time

	mu    sync.Mutex              // guards heard
	heard map[uint64]*otherRouter // the member that is heard as a router, by its id

	Sent     atomic.Uint64 // changes of bookings, including re-sent ones, and moves of sessions
	Resent   atomic.Uint64 // bookings that were sent again
	Received atomic.Uint64 // changes and moves, without repeated ones
	Dropped  atomic.Uint64 // changes dropped because a queue or table was full, or because they are invalid
	Refused  atomic.Uint64 // malformed messages, and those of routers beyond MaxPeers
	Lost     atomic.Uint64 // peers that timed out
	Held     atomic.Int64  // bookings of other routers
}

// ForeignSilence is after which silence a Dynamo is gone, which sends a heartbeat every 5 s.
const ForeignSilence = 20 * time.Second

// timing holds the waits, so that tests can shorten them.
type timing struct {
	tick             time.Duration // between answers to what others ask
	digest           int           // ticks between two digests
	silence, foreign time.Duration // after which a kvrouter is gone, and another router
}

// message is something to be sent: a change of a booking of this router's or of another
// one's, which is passed on, a binding of a session, or an ownMessage.
type message struct {
	kind    string
	booking *router.Booking
	passed  *router.Change
	session *router.SessionBinding
	own     *ownMessage
}

// Deps are the parts that a Mesh works with.
type Deps struct {
	Router *router.Router
	Log    *slog.Logger
	Link   Link // carries the messages
	// Partition returns the model and the routing group of a worker, by which Dynamo
	// distinguishes workers. nil: "default" for all.
	Partition func(worker uint64) (model, group string)
	// Stored is called with the worker that has a stored response and a hash of its owner, as
	// another router says; owner 0: it has none, or is not said. It must not block. nil: nothing
	// is done.
	Stored func(response string, worker, owner uint64)
	// EachStored calls take with the stored responses that this router knows, by worker and owner:
	// they are sent to a router that joins. nil: none are.
	EachStored func(take func(worker, owner uint64, responses []string))
	// ID names this router to the others; no two have the same, nor one after a restart.
	// 0: it is drawn.
	ID uint64
}

// New returns a Mesh. Run then publishes the changes of this router and takes those of the others.
func New(deps Deps) *Mesh {
	if deps.Partition == nil {
		deps.Partition = func(uint64) (model, group string) { return "default", "default" }
	}
	r := &Mesh{
		partition: deps.Partition, stored: deps.Stored, eachStored: deps.EachStored,
		router: deps.Router, id: cmp.Or(deps.ID, max(1, rand.Uint64())), link: deps.Link, log: deps.Log,
		queue:   make(chan message, queueLimit),
		timing:  timing{tick: 100 * time.Millisecond, digest: 5, silence: 5 * time.Second, foreign: ForeignSilence},
		members: map[string]*otherRouter{}, heard: map[uint64]*otherRouter{},
	}
	deps.Router.Share(&router.Sharing{ // bookings made before Run are sent by it
		Writer:  r.id,
		Booking: func(kind string, b *router.Booking) { r.put(message{kind: kind, booking: b}) },
		Session: func(b router.SessionBinding) { r.put(message{session: &b}) },
		Ejection: func(w kv.WorkerKey, long time.Duration) {
			r.say(ownMessage{Kind: kindEjection, Worker: &rank{w.Worker, w.Rank}, Milliseconds: uint64(max(0, long.Milliseconds()))})
		},
	})
	return r
}

// Close ends publishing. Run does so itself.
func (r *Mesh) Close() {
	r.router.Share(nil)
	r.link.Close()
}

// Run publishes and receives changes until ctx is done. It returns when all
// bookings of other routers and all of its goroutines have ended.
func (r *Mesh) Run(ctx context.Context) {
	defer r.Close()
	var link sync.WaitGroup
	link.Go(func() { r.link.Run(ctx, r) })
	r.publishQueued(ctx)
	link.Wait()
	r.forgetAll()
}

// put queues a message. It never waits.
func (r *Mesh) put(m message) {
	select {
	case r.queue <- m:
	default:
		r.Dropped.Add(1)
		r.missed.Store(true)
	}
}

// Store sends kvrouters the worker that has a stored response, and a hash of its owner. It never
// waits; what is lost is not sent again.
func (r *Mesh) Store(response string, worker, owner uint64) {
	r.say(ownMessage{Kind: kindStored, Worker: &rank{Worker: worker}, Owner: owner, Requests: []string{response}})
}

// say queues a message to kvrouters.
func (r *Mesh) say(m ownMessage) {
	m.Router = r.id
	r.put(message{own: &m})
}

// publishQueued publishes what is queued until ctx ends, digests of it, and again what others
// request.
func (r *Mesh) publishQueued(ctx context.Context) {
	var books ownBooks
	ticker := time.NewTicker(r.timing.tick)
	defer ticker.Stop()
	joined := uint64(0)
	for ticks := 0; ; {
		select {
		case <-ctx.Done():
			r.publish(replicaTopic, &ownMessage{Router: r.id, Kind: kindLeave})
			return
		case m := <-r.queue:
			r.send(&books, m)
		case <-ticker.C:
			r.look(time.Now())
			if now := r.link.Joined(); now != joined { // a new subscriber knows nothing yet, and Dynamo does not ask
				joined = now
				r.asked.Store(^uint64(0))
			}
			if r.recalled.Swap(false) {
				r.publishStored()
			}
			if len(r.queue) == 0 && r.missed.Swap(false) {
				for _, b := range books.ended() {
					r.send(&books, message{kind: router.ChangeFree, booking: b})
				}
			}
			r.again(&books, r.asked.Swap(0))
			if ticks++; ticks%r.timing.digest == 0 {
				r.digest(&books)
			}
		}
	}
}

// send publishes one message.
func (r *Mesh) send(books *ownBooks, m message) {
	switch {
	case m.own != nil:
		r.publish(replicaTopic, m.own)
	case m.session != nil:
		b := m.session
		model, group := r.partition(b.Worker.Worker)
		r.publish(SessionTopic, &sessionEvent{model, group, b.ID, b.Worker.Worker, &b.Worker.Rank, b.Sequence, b.Writer})
	case m.passed != nil:
		change := router.Change{Kind: m.kind, Worker: m.passed.Worker}
		r.publishSlot(change.BlockSize, slotOf(change, m.passed.Request, r.id), nil)
	default:
		if request := books.apply(m.kind, m.booking, r.id); request != "" {
			r.publishChange(m.kind, m.booking, request)
		}
	}
}

// publishChange publishes a change of a booking that others know by that name, and
// returns its size.
func (r *Mesh) publishChange(kind string, b *router.Booking, request string) (size int) {
	if !r.link.Followed() {
		return 0
	}
	change, detail := b.Change(kind), (*slotDetail)(nil)
	if kind == router.ChangeAdd {
		detail = detailOf(change)
	}
	return r.publishSlot(change.BlockSize, slotOf(change, request, r.id), detail)
}

// publishSlot publishes a change of a worker with blocks of that many tokens as it goes over the
// wire, and returns its size.
func (r *Mesh) publishSlot(blockSize int, change slotChange, detail *slotDetail) (size int) {
	event := slotEvent{BlockSize: uint32(cmp.Or(blockSize, r.router.Unit())), Event: change, Detail: detail}
	event.Model, event.Group = r.partition(change.Worker.Worker)
	if add, ok := change.Data.(map[string]addRequest); ok && len(add[dataAdd].Sequence) > r.link.Limit()/hashSize {
		short := add[dataAdd]
		short.Sequence = nil // its load without its blocks, rather than nothing
		event.Event.Data = map[string]addRequest{dataAdd: short}
	}
	return r.publish(SlotTopic, &event)
}

// hashSize is more than the bytes of a hash in a message, with its share of the rest.
const hashSize = 10

// publish encodes and publishes a message, and returns its size.
func (r *Mesh) publish(topic string, what any) (size int) {
	if !r.link.Followed() {
		return 0
	}
	if topic != replicaTopic {
		r.Sent.Add(1)
	}
	text := encode(what)
	r.link.Publish(topic, text)
	return len(text)
}

// Bounds of what is sent again in one tick: more would overflow the reader's queue.
const (
	againMessages = 2_000
	againBytes    = 4 << 20
)

// again sends all that is in flight of the buckets. Those that are too many for now
// stay requested, and are the first next time.
func (r *Mesh) again(books *ownBooks, ask uint64) {
	messages, size := 0, 0
	for range buckets {
		if messages >= againMessages || size >= againBytes {
			r.asked.Or(ask)
			return
		}
		i := books.next
		books.next = (i + 1) % buckets
		if ask&(1<<i) == 0 {
			continue
		}
		ask &^= 1 << i
		in := books.buckets[i]
		requests := slices.Sorted(maps.Keys(in))
		r.publish(replicaTopic, &ownMessage{Router: r.id, Kind: kindHeld, Bucket: uint64(i), Requests: requests})
		for _, request := range requests {
			held := in[request]
			r.Resent.Add(1)
			messages++
			size += r.publishChange(router.ChangeAdd, held.Booking, request)
			if held.computed {
				messages++
				size += r.publishChange(router.ChangePrefill, held.Booking, request)
			}
		}
	}
}

// storedAtOnce is how many responses one message names at most: less than a MB, by far, of names as
// engines give them.
const storedAtOnce = 4096

// publishStored publishes all stored responses that are known here.
func (r *Mesh) publishStored() {
	if r.eachStored == nil {
		return
	}
	r.eachStored(func(worker, owner uint64, responses []string) {
		for part := range slices.Chunk(responses, storedAtOnce) {
			r.publish(replicaTopic, &ownMessage{Router: r.id, Kind: kindStored, Worker: &rank{Worker: worker}, Owner: owner, Requests: part})
		}
	})
}

// digest sends the sums of the in-flight bookings, and what tenants have received since the last
// one. It also says that this router lives.
func (r *Mesh) digest(books *ownBooks) {
	m := ownMessage{Router: r.id, Kind: kindDigest, Service: servicesOf(r.router.Admission.Service())}
	if len(books.names) > 0 {
		m.Sums = books.sums[:]
	}
	r.publish(replicaTopic, &m)
}

// Counts counts the messages between routers.
type Counts struct {
	Sent     uint64 `json:"sent"`
	Resent   uint64 `json:"resent"`
	Received uint64 `json:"received"`
	Dropped  uint64 `json:"dropped"`
	Refused  uint64 `json:"refused"`
	Lost     uint64 `json:"lost"`

	Held  int64 `json:"-"` // current bookings of other routers
	Peers int   `json:"-"` // connected routers
}

// Counts returns the counts so far.
func (r *Mesh) Counts() Counts {
	r.mu.Lock()
	peers := len(r.heard)
	r.mu.Unlock()
	return Counts{
		Sent: r.Sent.Load(), Resent: r.Resent.Load(), Received: r.Received.Load(), Dropped: r.Dropped.Load(), Refused: r.Refused.Load(),
		Lost: r.Lost.Load(),
		Held: r.Held.Load(), Peers: peers,
	}
}
