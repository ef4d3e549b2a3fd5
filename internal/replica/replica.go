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
	// topic begins every message.
	topic = "active_sequences_events"
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
	queue  chan queuedChange
	timing timing
	seal   *seal // nil: messages are sent as they are

	Sent     atomic.Uint64 // changes
	Received atomic.Uint64 // changes, without those that say nothing new
	Dropped  atomic.Uint64 // changes lost because a queue or table was full
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
// router and follows peers.
func New(router *router.Router, address string, peers []string, log *slog.Logger) (*Mesh, error) {
	pub, err := zmq.NewPublisher(address)
	if err != nil {
		return nil, err
	}
	return &Mesh{
		router: router, id: rand.Uint64(), peers: peers, log: log, pub: pub, queue: make(chan queuedChange, queueLimit),
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
	for {
		change := router.Change{Kind: router.ChangeAlive}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case queued := <-r.queue:
			if r.pub.Subscribers() == 0 {
				continue
			}
			change = queued.booking.Change(queued.kind)
			r.Sent.Add(1)
		}
		change.Router = r.id
		if text, err := json.Marshal(change); err == nil {
			r.pub.Publish([]byte(topic), r.seal.close(text))
		}
	}
}

// follow books what a peer tells until ctx ends.
func (r *Mesh) follow(ctx context.Context, peer string) {
	pause := r.timing.retry
	for told := false; ctx.Err() == nil; {
		heard, err := r.hear(ctx, peer)
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
// peer's bookings end. heard: the peer has said something.
func (r *Mesh) hear(ctx context.Context, peer string) (heard bool, err error) {
	conn, err := zmq.DialSub(ctx, "tcp://"+peer, topic)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	from := r.opener()
	p := otherRouter{mesh: r, open: map[uint64]*router.Booking{}}
	defer func() {
		p.forget()
		if heard {
			r.Lost.Add(1)
		}
	}()
	for {
		ready, err := conn.Wait(time.Now().Add(r.timing.silence))
		if err == nil && !ready {
			err = errPeerSilent
		}
		if err != nil {
			return heard, err
		}
		frames, err := conn.Recv()
		if err != nil {
			return heard, err
		}
		text, err := from.open(frames[len(frames)-1])
		if err != nil {
			return heard, err
		}
		var change router.Change
		if err := json.Unmarshal(text, &change); err != nil {
			return heard, fmt.Errorf("message of another router: %w", err)
		}
		if change.Router == r.id { // the list of peers has ourselves in it
			continue
		}
		if !heard {
			heard = true
			r.log.Info("another router is heard", "peer", peer)
		}
		p.take(change)
	}
}

// otherRouter holds the bookings of one other router. One goroutine uses it.
type otherRouter struct {
	mesh *Mesh
	id   uint64
	open map[uint64]*router.Booking
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
	b := p.open[change.Booking]
	switch {
	case change.Kind == router.ChangeAdd && b == nil:
		if len(p.open) >= bookingLimit {
			r.Dropped.Add(1)
			return
		}
		if b = r.router.BookRemote(change); b != nil {
			p.open[change.Booking] = b
			r.Held.Add(1)
		}
	case change.Kind == router.ChangePrefill && b != nil:
		b.FirstToken()
	case change.Kind == router.ChangeFree && b != nil:
		b.End()
		delete(p.open, change.Booking)
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
}
