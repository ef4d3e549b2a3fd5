// Package replica keeps the bookings of several routers over the same workers in
// step. Each router publishes its own bookings by ZeroMQ and books what the others
// publish.
package replica

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"kvrouter/internal/guard"
	"kvrouter/internal/kv"
	"kvrouter/internal/router"
	"kvrouter/internal/zmq"
)

// Settings holds the settings of several routers over the same workers.
type Settings struct {
	ReplicaSync     bool     `group:"Replicas" help:"Tell other routers over the same workers, whose --worker ids must be the same, what is in flight from here, and count what they tell."`
	ReplicaSyncPort int      `group:"Replicas" default:"7100" help:"Port that the other routers learn it from (ZeroMQ PUB); 0 is any free one."`
	ReplicaSyncHost string   `group:"Replicas" placeholder:"HOST" help:"Address that this port listens on. Default: that of --host."`
	ReplicaKey      string   `group:"Replicas" name:"replica-key" placeholder:"KEY" help:"Key that all these routers share, at least 16 characters: what they tell is sealed by it. Better given as environment variable or in the file of settings."`
	ReplicaPeers    []string `group:"Replicas" placeholder:"HOST:PORT" help:"The other routers' --replica-sync-port; several are separated by commas."`
}

// Validate checks the settings; its errors name the flag.
func (c Settings) Validate() error {
	if !c.ReplicaSync && len(c.ReplicaPeers) > 0 {
		return errors.New("--replica-peers: give --replica-sync, too")
	}
	if n := len(c.ReplicaKey); n > 0 && n < keySize {
		return fmt.Errorf("--replica-key: it has %d characters; give at least %d", n, keySize)
	}
	for _, peer := range c.ReplicaPeers {
		host, port, err := net.SplitHostPort(peer)
		if n, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil || n == 0 || host == "" {
			return fmt.Errorf("--replica-peers %s: want HOST:PORT", peer)
		}
	}
	return nil
}

// Bounds of what routers tell each other.
const (
	// queueLimit is how many changes wait to be sent; what comes when it is
	// full is lost.
	queueLimit = 100_000
	// bookingLimit is how many bookings of one other router are kept at a time.
	bookingLimit = 100_000
	// hashLimit is how many sequence hashes they have together: 128 MB.
	hashLimit = 1 << 24
	// messageLimit bounds the bytes of one change: the sequence hashes of 2^27
	// tokens in blocks of 64 take 22 MB.
	messageLimit = 32 << 20
	// replicaTopic begins every message.
	replicaTopic = "active_sequences_events"
)

// Mesh shares bookings between several routers over the same workers: it publishes
// the bookings of this router and books what the others publish. It works on best
// effort: a lost change stays lost, requests in flight before two routers connect
// stay unknown, and blocks of answers are not shared. When a router falls silent,
// all of its bookings end.
type Mesh struct {
	router *router.Router
	id     uint64 // drawn at each start
	peers  []string
	log    *slog.Logger
	pub    *zmq.Publisher
	edges  *guard.Edges
	queue  chan queuedChange
	timing timing
	seal   *seal // nil: messages are sent as they are

	Sent     atomic.Uint64 // changes
	Received atomic.Uint64 // changes, without those that say nothing new
	Dropped  atomic.Uint64 // changes lost because a queue or table was full, or because they make no sense
	Lost     atomic.Uint64 // times that a peer was forgotten
	Held     atomic.Int64  // bookings of other routers
}

// timing holds the waits, so that tests can shorten them.
type timing struct {
	alive          time.Duration // between messages that say nothing else
	silence        time.Duration // after which a peer is gone
	retry, retryTo time.Duration // between attempts to connect: first and longest
}

// queuedChange is a change before it is put into bytes.
type queuedChange struct {
	kind    string
	booking *router.Booking
}

// New listens for other routers at address, host:port. Run publishes the changes of
// router and follows peers. edges counts the panics of what parses their messages.
func New(router *router.Router, address string, peers []string, edges *guard.Edges, log *slog.Logger) (*Mesh, error) {
	pub, err := zmq.NewPublisher(address, zmq.WithGuard(func(f func() error) error { return edges.Do(guard.ReplicaServer, log, f) }))
	if err != nil {
		return nil, err
	}
	return &Mesh{
		router: router, id: rand.Uint64(), peers: peers, log: log, pub: pub, edges: edges, queue: make(chan queuedChange, queueLimit),
		timing: timing{alive: time.Second, silence: 5 * time.Second, retry: 100 * time.Millisecond, retryTo: 5 * time.Second},
	}, nil
}

// Close ends the listening that New began. Run does so by itself.
func (r *Mesh) Close() { r.pub.Close() }

// Run publishes and follows changes until ctx ends. Then it ends all bookings of
// other routers, and every goroutine that it started has ended.
func (r *Mesh) Run(ctx context.Context) {
	r.router.Share(r.put)
	defer r.router.Share(nil)
	defer r.pub.Close()
	done := make(chan struct{})
	for _, peer := range r.peers {
		go func() {
			defer func() { done <- struct{}{} }()
			r.follow(ctx, peer)
		}()
	}
	r.tell(ctx)
	for range r.peers {
		<-done
	}
}

// put queues a change. It never waits.
func (r *Mesh) put(kind string, b *router.Booking) {
	select {
	case r.queue <- queuedChange{kind, b}:
	default:
		r.Dropped.Add(1)
	}
}

// tell publishes what is queued until ctx ends.
func (r *Mesh) tell(ctx context.Context) {
	ticker := time.NewTicker(r.timing.alive)
	defer ticker.Stop()
	refused := uint64(0)
	for {
		change := router.Change{Kind: router.ChangeAlive}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if n := r.pub.Refused(); n > refused {
				r.log.Warn("connections to the replica port were refused: it has as many as it takes", "port", r.pub.Endpoint(), "refused", n-refused)
				refused = n
			}
		case queued := <-r.queue:
			if r.pub.Subscribers() == 0 {
				continue
			}
			change = queued.booking.Change(queued.kind)
			r.Sent.Add(1)
		}
		change.Router = r.id
		if text, err := json.Marshal(change); err == nil {
			r.pub.Publish([]byte(replicaTopic), r.seal.close(text))
		}
	}
}

// follow books what a peer tells until ctx ends.
func (r *Mesh) follow(ctx context.Context, peer string) {
	pause := r.timing.retry
	for told := false; ctx.Err() == nil; {
		heard := false
		err := r.edges.Do(guard.Replica, r.log, func() error { return r.hear(ctx, peer, &heard) })
		if ctx.Err() != nil {
			return
		}
		if heard {
			pause = r.timing.retry
		}
		if heard || !told {
			told = true
			r.log.Warn("another router is not heard", "peer", peer, "error", err)
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		pause = min(2*pause, r.timing.retryTo)
	}
}

// errPeerSilent says that a peer has sent nothing for too long.
var errPeerSilent = errors.New("it has fallen silent")

// hear books what one connection to a peer tells, until it fails; then the
// peer's bookings end. It sets heard once the peer has said something.
func (r *Mesh) hear(ctx context.Context, peer string, heard *bool) error {
	conn, err := zmq.DialSub(ctx, "tcp://"+peer, replicaTopic)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.Limit(messageLimit)
	from := r.opener()
	p := otherRouter{mesh: r, open: map[uint64]heldBooking{}}
	defer func() {
		p.forget()
		if *heard {
			r.Lost.Add(1)
		}
	}()
	for {
		ready, err := conn.Wait(time.Now().Add(r.timing.silence))
		if err == nil && !ready {
			err = errPeerSilent
		}
		if err != nil {
			return err
		}
		frames, err := conn.Recv()
		if err != nil {
			return err
		}
		text, err := from.open(frames[len(frames)-1])
		if err != nil {
			return err
		}
		var change router.Change
		if err := json.Unmarshal(text, &change); err != nil {
			return fmt.Errorf("message of another router: %w", err)
		}
		if change.Router == r.id { // the list of peers has ourselves in it
			continue
		}
		if !*heard {
			*heard = true
			r.log.Info("another router is heard", "peer", peer)
		}
		p.take(change)
	}
}

// otherRouter holds the bookings of one other router. One goroutine uses it.
type otherRouter struct {
	mesh   *Mesh
	id     uint64
	open   map[uint64]heldBooking
	hashes int // of all of them
}

// heldBooking is a booking and how many sequence hashes it has.
type heldBooking struct {
	*router.Booking
	hashes int
}

// sensible tells whether a booking can be: no prompt is longer than kv.MaxTokens,
// none has more to compute than it has tokens, and none has more full blocks.
// Negative numbers count as 0.
func sensible(change router.Change) bool {
	return change.Tokens <= kv.MaxTokens && change.Uncached <= max(0, change.Tokens) && len(change.Sequence)/8 <= max(0, change.Tokens) && change.Leg <= kv.LegDecode
}

// take applies a change that the other router published.
func (p *otherRouter) take(change router.Change) {
	if change.Router != p.id { // another one answers there now
		p.forget()
		p.id = change.Router
	}
	r := p.mesh
	if change.Kind == router.ChangeAlive {
		return
	}
	r.Received.Add(1)
	b, known := p.open[change.Booking]
	switch {
	case change.Kind == router.ChangeAdd && !known:
		hashes := len(change.Sequence) / 8
		if len(p.open) >= bookingLimit || p.hashes+hashes > hashLimit || !sensible(change) {
			r.Dropped.Add(1)
			return
		}
		if b := r.router.BookRemote(change); b != nil {
			p.open[change.Booking] = heldBooking{b, hashes}
			p.hashes += hashes
			r.Held.Add(1)
		}
	case change.Kind == router.ChangePrefill && known:
		b.FirstToken()
	case change.Kind == router.ChangeFree && known:
		b.End()
		delete(p.open, change.Booking)
		p.hashes -= b.hashes
		r.Held.Add(-1)
	}
}

// forget ends all that the peer has booked.
func (p *otherRouter) forget() {
	for _, b := range p.open {
		b.End()
	}
	p.mesh.Held.Add(-int64(len(p.open)))
	clear(p.open)
	p.hashes = 0
}
