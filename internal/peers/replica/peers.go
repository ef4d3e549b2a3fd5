package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
)

// zmqLink is the Link over ZeroMQ: each router publishes at a port of its own, and subscribes to
// those of all others.
type zmqLink struct {
	discover func(ctx context.Context, use func(addresses []string)) // see Deps
	pub      *zmq.Publisher
	seal     *seal // nil: messages are sent as they are
	edges    *guard.Edges
	log      *slog.Logger
	timing   *timing
	refused  *atomic.Uint64 // messages that are malformed or not encrypted with our key

	mu        sync.Mutex // guards the rest
	running   context.Context
	ears      Ears // of Run
	want      map[string]origin
	followed  map[string]context.CancelFunc
	followers sync.WaitGroup
}

// openZMQ opens the port for other routers. Errors name the flag.
func (r *Mesh) openZMQ(settings Settings, deps Deps) (err error) {
	z := &zmqLink{
		discover: deps.Find, edges: deps.Edges, log: deps.Log, timing: &r.timing, refused: &r.Refused,
		want: map[string]origin{}, followed: map[string]context.CancelFunc{},
	}
	if settings.ReplicaKey != "" {
		if z.seal, err = newSeal(settings.ReplicaKey); err != nil {
			return err
		}
	}
	guarded := zmq.WithGuard(func(f func() error) error { return deps.Edges.Do(guard.ReplicaServer, deps.Log, f) })
	address := net.JoinHostPort(settings.ReplicaSyncHost, strconv.Itoa(settings.ReplicaSyncPort))
	if z.pub, err = zmq.NewPublisher(address, guarded); err != nil {
		return fmt.Errorf("--replica-sync-port %d: %w: free the port or choose another", settings.ReplicaSyncPort, err)
	}
	for _, peer := range settings.ReplicaPeers {
		z.want[peer] = named
	}
	r.link, r.zmq = z, z
	return nil
}

// Publish implements Link.
func (z *zmqLink) Publish(topic string, text []byte) {
	z.pub.Publish([]byte(topic), z.seal.close(topic, text))
}

// Limit implements Link.
func (z *zmqLink) Limit() int { return messageLimit }

// Followed implements Link.
func (z *zmqLink) Followed() bool { return z.pub.Subscribers() > 0 }

// Joined implements Link.
func (z *zmqLink) Joined() uint64 { return z.pub.Joined() }

// Close implements Link.
func (z *zmqLink) Close() { z.pub.Close() }

// Run implements Link.
func (z *zmqLink) Run(ctx context.Context, ears Ears) {
	z.mu.Lock()
	z.running, z.ears = ctx, ears
	z.reconcile()
	if z.discover != nil {
		z.followers.Go(func() { z.discover(ctx, z.usePeers) })
	}
	z.mu.Unlock()
	z.warnOfRefused(ctx)
	z.mu.Lock()
	z.running = nil // no other router is followed from now on
	z.mu.Unlock()
	z.followers.Wait()
}

// warnOfRefused logs refused connections until ctx is done.
func (z *zmqLink) warnOfRefused(ctx context.Context) {
	ticker := time.NewTicker(z.timing.tick)
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
const maxPeers = 128

// origin is the sources of an address: a bit for each.
type origin uint8

const (
	named origin = 1 << iota // the settings, or a client of the router port
	found                    // discovery
)

// ErrTooManyPeers means that the maximum number of peers is reached.
var ErrTooManyPeers = fmt.Errorf("there are %d peers, which is the maximum", maxPeers)

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

// register subscribes to the router at an endpoint, tcp://host:port. added is
// false for a known one. Errors other than ErrTooManyPeers mean that the endpoint
// is invalid.
func (z *zmqLink) register(endpoint string) (added bool, err error) {
	address, err := parseEndpoint(endpoint)
	if err != nil {
		return false, err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	switch known := z.want[address]; {
	case known&named != 0:
		return false, nil
	case known == 0 && len(z.want) >= maxPeers:
		return false, ErrTooManyPeers
	}
	z.want[address] |= named
	z.reconcile()
	return true, nil
}

// deregister unsubscribes from the router at an endpoint, unless it was
// discovered. removed is false for an unknown one.
func (z *zmqLink) deregister(endpoint string) (removed bool, err error) {
	address, err := parseEndpoint(endpoint)
	if err != nil {
		return false, err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.want[address]&named == 0 {
		return false, nil
	}
	z.unwant(address, named)
	z.reconcile()
	return true, nil
}

// peers returns the endpoints of all peers, sorted.
func (z *zmqLink) peers() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	list := []string{}
	for address := range z.want {
		list = append(list, "tcp://"+address)
	}
	slices.Sort(list)
	return list
}

// usePeers follows the routers that discovery has found, host:port, in place of those
// found before.
func (z *zmqLink) usePeers(addresses []string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for address := range maps.Clone(z.want) {
		if !slices.Contains(addresses, address) {
			z.unwant(address, found)
		}
	}
	lost := 0
	for _, address := range addresses {
		if _, err := parseEndpoint("tcp://" + address); err != nil || z.want[address] == 0 && len(z.want) >= maxPeers {
			lost++
			continue
		}
		z.want[address] |= found
	}
	if lost > 0 {
		z.log.Warn("discovered routers ignored: too many, or without an address", "found", len(addresses), "left_out", lost, "most", maxPeers)
	}
	z.reconcile()
}

// unwant notes that an address is not named by that origin any more; z.mu is held.
func (z *zmqLink) unwant(address string, by origin) {
	if z.want[address] &^= by; z.want[address] == 0 {
		delete(z.want, address)
	}
}

// reconcile follows the addresses that are wanted, and no others, while Run runs;
// z.mu is held.
func (z *zmqLink) reconcile() {
	if z.running == nil {
		return
	}
	for address, end := range z.followed {
		if z.want[address] == 0 {
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

var (
	// errPeerSilent means that a peer has sent nothing for too long.
	errPeerSilent = errors.New("no messages received")
	// errSelf means that an address leads to this router.
	errSelf = errors.New("it is this router")
)

// follow hands on what the router at an address sends until ctx ends.
func (z *zmqLink) follow(ctx context.Context, address string) {
	pause := z.timing.retry
	warned, f := false, follower{address: address, opener: z.opener()}
	for ctx.Err() == nil {
		f.heard, f.own = false, false
		err := z.edges.Do(guard.Replica, z.log, func() error { return z.hear(ctx, &f) })
		if ctx.Err() != nil {
			return
		}
		if f.heard {
			pause, f.refused = z.timing.retry, nil
		}
		switch self := errors.Is(err, errSelf); {
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
	opener  *opener
	heard   bool  // it has said something by this connection
	own     bool  // it is a kvrouter
	refused error // why a message was, which was logged; nil: none was
}

// hear hands on what one connection to a router sends, until it fails.
func (z *zmqLink) hear(ctx context.Context, f *follower) error {
	conn, err := zmq.DialSub(ctx, "tcp://"+f.address, slotTopic, sessionTopic, replicaTopic)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.Limit(messageLimit)
	defer z.ears.Gone(f.address)
	last := time.Now()
	for {
		silence := z.timing.foreign // a Dynamo at rest sends heartbeats alone
		if f.own || z.seal != nil {
			silence = z.timing.silence
		}
		ready, err := conn.Wait(last.Add(silence))
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
			if !f.own && z.seal == nil {
				last = time.Now()
				z.ears.Alive(f.address)
			}
			continue
		}
		switch err := z.take(f, frames); {
		case errors.Is(err, errSelf):
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

// take opens a message and hands it on.
func (z *zmqLink) take(f *follower, frames [][]byte) error {
	if len(frames) != 2 {
		z.refused.Add(1)
		return fmt.Errorf("it has %d frames, want 2", len(frames))
	}
	topic := string(frames[0])
	text, err := f.opener.open(topic, frames[1])
	if err != nil {
		z.refused.Add(1)
		return err
	}
	err = z.ears.Take(f.address, topic, text)
	f.own = f.own || err == nil && topic == replicaTopic
	return err
}

// validAddress checks an address of the settings.
func validAddress(address string) bool {
	host, port, err := net.SplitHostPort(address)
	_, ok := kv.ParsePort(port)
	return err == nil && ok && host != ""
}
