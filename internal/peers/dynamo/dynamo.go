// Package dynamo shares in-flight load and sessions with Dynamo's selection services over ZeroMQ.
package dynamo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/peers/replica"
)

// Settings holds the settings of a mesh with Dynamo's selection services.
type Settings struct {
	ReplicaSync     bool     `group:"Cluster" hidden:"" help:"Share in-flight load and sessions with Dynamo's selection services of the same workers (worker ids must match). Between kvrouters use --cluster."`
	ReplicaSyncPort int      `group:"Cluster" hidden:"" default:"7100" help:"Port that publishes this router's load to Dynamo (ZeroMQ PUB). 0 selects a free port."`
	ReplicaSyncHost string   `group:"Cluster" hidden:"" placeholder:"HOST" help:"Listen address of that port. Default: that of --host."`
	ReplicaPeers    []string `group:"Cluster" hidden:"" placeholder:"HOST:PORT" help:"Comma-separated replica sync addresses of Dynamo's selection services."`
}

// Validate checks the settings; its errors name the flag.
func (c Settings) Validate() error {
	switch {
	case !c.ReplicaSync && len(c.ReplicaPeers) > 0:
		return errors.New("--replica-peers requires --replica-sync")
	case len(c.ReplicaPeers) > maxPeers:
		return fmt.Errorf("--replica-peers: %d peers exceed the limit of %d", len(c.ReplicaPeers), maxPeers)
	}
	for _, peer := range c.ReplicaPeers {
		if _, err := parseEndpoint("tcp://" + peer); err != nil {
			return fmt.Errorf("--replica-peers %s: want HOST:PORT", peer)
		}
	}
	return nil
}

// messageLimit bounds the bytes of a message.
const messageLimit = 32 << 20

// timing holds the waits, so that tests can shorten them.
type timing struct {
	look           time.Duration // between looks for refused connections
	silence        time.Duration // after which a router is gone: it sends a heartbeat every 5 s
	retry, retryTo time.Duration // between attempts to connect: first and longest
	self           time.Duration // until an address that led to this router is tried again
}

// Link is the replica.Link of Dynamo: each router publishes at a port of its own, and subscribes to
// those of all others.
type Link struct {
	pub    *zmq.Publisher
	edges  *guard.Edges
	log    *slog.Logger
	timing timing

	mu        sync.Mutex // guards the rest
	running   context.Context
	ears      replica.Ears        // of Run
	want      map[string]struct{} // addresses
	followed  map[string]context.CancelFunc
	followers sync.WaitGroup
}

// Deps are the parts that a Link works with.
type Deps struct {
	Edges *guard.Edges // counts panics of message parsers
	Log   *slog.Logger
}

// Open opens the port for other routers. Errors name the flag.
func Open(settings Settings, deps Deps) (z *Link, err error) {
	z = &Link{
		edges: deps.Edges, log: deps.Log, want: map[string]struct{}{}, followed: map[string]context.CancelFunc{},
		timing: timing{look: time.Second, silence: replica.ForeignSilence, retry: 100 * time.Millisecond, retryTo: 5 * time.Second, self: time.Minute},
	}
	guarded := zmq.WithGuard(func(f func() error) error { return deps.Edges.Do(guard.ReplicaServer, deps.Log, f) })
	address := net.JoinHostPort(settings.ReplicaSyncHost, strconv.Itoa(settings.ReplicaSyncPort))
	if z.pub, err = zmq.NewPublisher(address, guarded); err != nil {
		return nil, fmt.Errorf("--replica-sync-port %d: %w: free the port or choose another", settings.ReplicaSyncPort, err)
	}
	for _, peer := range settings.ReplicaPeers {
		z.want[peer] = struct{}{}
	}
	return z, nil
}

// Publish implements replica.Link. Topics that Dynamo does not have are left out.
func (z *Link) Publish(topic string, text []byte) {
	if isDynamos(topic) {
		z.pub.Publish([]byte(topic), text)
	}
}

// isDynamos reports whether a topic is one of Dynamo's. Other topics need a link that authenticates its peers.
func isDynamos(topic string) bool { return topic == replica.SlotTopic || topic == replica.SessionTopic }

// Limit implements replica.Link.
func (z *Link) Limit() int { return messageLimit }

// Followed implements replica.Link.
func (z *Link) Followed() bool { return z.pub.Subscribers() > 0 }

// Joined implements replica.Link.
func (z *Link) Joined() uint64 { return z.pub.Joined() }

// Network implements replica.Link. It is connected while another router hears this one.
func (z *Link) Network() replica.Network {
	return replica.Network{Kind: replica.KindDynamo, Connected: z.Followed()}
}

// Close implements replica.Link.
func (z *Link) Close() { z.pub.Close() }

// Run implements replica.Link.
func (z *Link) Run(ctx context.Context, ears replica.Ears) {
	z.mu.Lock()
	z.running, z.ears = ctx, ears
	z.reconcile()
	z.mu.Unlock()
	z.warnOfRefused(ctx)
	z.mu.Lock()
	z.running = nil // no other router is followed from now on
	z.mu.Unlock()
	z.followers.Wait()
}

// warnOfRefused logs refused connections until ctx is done.
func (z *Link) warnOfRefused(ctx context.Context) {
	ticker := time.NewTicker(z.timing.look)
	defer ticker.Stop()
	for refused := uint64(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if n := z.pub.Refused(); n > refused {
				z.log.Warn("replica port: connection limit reached, connections refused", "port", z.pub.Endpoint(), "refused", n-refused)
				refused = n
			}
		}
	}
}

// maxPeers is how many addresses of other routers there are at most.
const maxPeers = replica.MaxPeers

// endpointError returns the fault of an endpoint, in Dynamo's words.
func endpointError(endpoint, why string) error {
	return fmt.Errorf("invalid ZMQ endpoint `%s`: %s", endpoint, why)
}

// parseEndpoint returns the host:port of tcp://host:port.
func parseEndpoint(endpoint string) (address string, err error) {
	scheme, address, ok := strings.Cut(endpoint, "://")
	at := strings.LastIndexByte(address, ':')
	switch {
	case !ok:
		return "", endpointError(endpoint, "missing scheme")
	case address == "":
		return "", endpointError(endpoint, "missing address")
	case scheme != "tcp":
		return "", endpointError(endpoint, "unsupported scheme `"+scheme+"`")
	case at < 0:
		return "", endpointError(endpoint, "missing TCP port")
	case at == 0:
		return "", endpointError(endpoint, "missing TCP host")
	}
	switch host := address[:at]; {
	case host[0] == '[' && host[at-1] != ']':
		return "", endpointError(endpoint, "missing closing `]`")
	case host[0] != '[' && strings.Contains(host, ":"):
		return "", endpointError(endpoint, "missing TCP port")
	}
	if _, ok := kv.ParsePort(address[at+1:]); !ok {
		return "", endpointError(endpoint, "invalid TCP port: want 1 to 65535")
	}
	return address, nil
}

// Register subscribes to the router at an endpoint, tcp://host:port. added is
// false for a known one. Errors other than replica.ErrTooManyPeers mean that the endpoint
// is invalid.
func (z *Link) Register(endpoint string) (added bool, err error) {
	address, err := parseEndpoint(endpoint)
	if err != nil {
		return false, err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if _, known := z.want[address]; known {
		return false, nil
	}
	if len(z.want) >= maxPeers {
		return false, replica.ErrTooManyPeers
	}
	z.want[address] = struct{}{}
	z.reconcile()
	return true, nil
}

// Deregister unsubscribes from the router at an endpoint. removed is false for an unknown one.
func (z *Link) Deregister(endpoint string) (removed bool, err error) {
	address, err := parseEndpoint(endpoint)
	if err != nil {
		return false, err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if _, known := z.want[address]; !known {
		return false, nil
	}
	delete(z.want, address)
	z.reconcile()
	return true, nil
}

// Peers returns the endpoints of all routers that are followed, sorted.
func (z *Link) Peers() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	list := []string{}
	for address := range z.want {
		list = append(list, "tcp://"+address)
	}
	slices.Sort(list)
	return list
}

// reconcile follows the addresses that are wanted, and no others, while Run runs;
// z.mu is held.
func (z *Link) reconcile() {
	if z.running == nil {
		return
	}
	for address, end := range z.followed {
		if _, wanted := z.want[address]; !wanted {
			end()
			delete(z.followed, address)
		}
	}
	for address := range z.want {
		if z.followed[address] == nil {
			ctx, end := context.WithCancel(z.running)
			z.followed[address] = end
			z.followers.Go(func() { z.follow(ctx, address) })
		}
	}
}

// errPeerSilent means that a router has sent nothing for too long.
var errPeerSilent = errors.New("no messages received")

// follow hands on what the router at an address sends until ctx ends.
func (z *Link) follow(ctx context.Context, address string) {
	pause := z.timing.retry
	warned, f := false, follower{address: address}
	for ctx.Err() == nil {
		f.heard = false
		err := z.edges.Do(guard.Replica, z.log, func() error { return z.hear(ctx, &f) })
		if ctx.Err() != nil {
			return
		}
		if f.heard {
			pause, f.refused = z.timing.retry, nil
		}
		switch self := errors.Is(err, replica.ErrSelf); {
		case self:
			pause = z.timing.self
		case f.heard || !warned:
			warned = true
			z.log.Warn("peer router unreachable", "peer", address, "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, z.timing.retryTo)
	}
}

// follower is the state of the router at an address. One goroutine uses it.
type follower struct {
	address string
	heard   bool  // it has said something by this connection
	refused error // why a message was, which was logged; nil: none was
}

// hear hands on what one connection to a router sends, until it fails.
func (z *Link) hear(ctx context.Context, f *follower) error {
	conn, err := zmq.DialSub(ctx, "tcp://"+f.address, replica.SlotTopic, replica.SessionTopic)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.Limit(messageLimit)
	defer z.ears.Gone(f.address)
	last := time.Now()
	for {
		ready, err := conn.Wait(last.Add(z.timing.silence))
		if err == nil && !ready {
			if err = errPeerSilent; f.refused != nil {
				err = fmt.Errorf("%w, except for the refused: %w", err, f.refused)
			}
		}
		if err != nil {
			return err
		}
		frames, err := conn.Next()
		if err != nil {
			return err
		}
		if frames == nil { // a heartbeat
			last = time.Now()
			z.ears.Alive(f.address)
			continue
		}
		switch err := z.take(f, frames); {
		case errors.Is(err, replica.ErrSelf):
			return err
		case err != nil:
			if f.refused == nil {
				z.log.Warn("message of a peer router rejected; further ones are not logged", "peer", f.address, "error", err)
			}
			f.refused = err
			continue
		}
		last, f.heard = time.Now(), true
	}
}

// take hands on a message.
func (z *Link) take(f *follower, frames [][]byte) error {
	if len(frames) != 2 || !isDynamos(string(frames[0])) {
		return z.ears.Take(f.address, "", nil) // no message has that topic
	}
	return z.ears.Take(f.address, string(frames[0]), frames[1])
}
