package replica

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
)

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

// RegisterPeer subscribes to the router at an endpoint, tcp://host:port. added is
// false for a known one. Errors other than ErrTooManyPeers mean that the endpoint
// is invalid.
func (r *Mesh) RegisterPeer(endpoint string) (added bool, err error) {
	address, err := parseEndpoint(endpoint)
	if err != nil {
		return false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch known := r.want[address]; {
	case known&named != 0:
		return false, nil
	case known == 0 && len(r.want) >= maxPeers:
		return false, ErrTooManyPeers
	}
	r.want[address] |= named
	r.reconcile()
	return true, nil
}

// DeregisterPeer unsubscribes from the router at an endpoint, unless it was
// discovered. removed is false for an unknown one.
func (r *Mesh) DeregisterPeer(endpoint string) (removed bool, err error) {
	address, err := parseEndpoint(endpoint)
	if err != nil {
		return false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.want[address]&named == 0 {
		return false, nil
	}
	r.unwant(address, named)
	r.reconcile()
	return true, nil
}

// Peers returns the endpoints of all peers, sorted.
func (r *Mesh) Peers() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := []string{}
	for address := range r.want {
		list = append(list, "tcp://"+address)
	}
	slices.Sort(list)
	return list
}

// usePeers follows the routers that discovery has found, host:port, in place of those
// found before.
func (r *Mesh) usePeers(addresses []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for address := range maps.Clone(r.want) {
		if !slices.Contains(addresses, address) {
			r.unwant(address, found)
		}
	}
	lost := 0
	for _, address := range addresses {
		if _, err := parseEndpoint("tcp://" + address); err != nil || r.want[address] == 0 && len(r.want) >= maxPeers {
			lost++
			continue
		}
		r.want[address] |= found
	}
	if lost > 0 {
		r.log.Warn("discovered routers ignored: too many, or without an address", "found", len(addresses), "left_out", lost, "most", maxPeers)
	}
	r.reconcile()
}

// unwant notes that an address is not named by that origin any more; r.mu is held.
func (r *Mesh) unwant(address string, by origin) {
	if r.want[address] &^= by; r.want[address] == 0 {
		delete(r.want, address)
	}
}

// reconcile follows the addresses that are wanted, and no others, while Run runs;
// r.mu is held.
func (r *Mesh) reconcile() {
	if r.running == nil {
		return
	}
	for address, end := range r.followed {
		if r.want[address] == 0 {
			end()
			delete(r.followed, address)
		}
	}
	for address := range r.want {
		if r.followed[address] == nil {
			ctx, end := context.WithCancel(r.running)
			r.followed[address] = end
			r.followers.Go(func() { r.follow(ctx, address) })
		}
	}
}

// claim notes that p hears the router of that id. Not ok: another connection does, as
// where it has two addresses.
func (r *Mesh) claim(id uint64, p *otherRouter) (ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if by := r.heard[id]; by != nil && by != p {
		return false
	}
	r.heard[id] = p
	return true
}

// find returns the booking of another router by the name of its request, and the owner of
// it; nil: there is none. r.books is held.
func (r *Mesh) find(request string) (by *otherRouter, held *heldBooking) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.heard {
		if held := p.open[request]; held != nil {
			return p, held
		}
	}
	return nil, nil
}

// Pass forwards a client's report on a reservation that another router has made:
// its prompt is computed (router.ChangePrefill), or it has ended
// (router.ChangeFree). It returns false if no connected router has made it.
func (r *Mesh) Pass(kind, request string) (known bool) {
	r.books.Lock()
	defer r.books.Unlock()
	by, held := r.find(request)
	if held == nil {
		return false
	}
	r.put(message{kind: kind, passed: &held.change})
	by.change(kind, held)
	return true
}

// release ends claim.
func (r *Mesh) release(id uint64, p *otherRouter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.heard[id] == p {
		delete(r.heard, id)
	}
}

var (
	// errPeerSilent means that a peer has sent nothing for too long.
	errPeerSilent = errors.New("no messages received")
	// errSelf means that an address leads to this router.
	errSelf = errors.New("it is this router")
)

// follow books what the router at an address sends until ctx ends.
func (r *Mesh) follow(ctx context.Context, address string) {
	pause := r.timing.retry
	warned, f := false, follower{address: address, opener: r.opener()}
	for ctx.Err() == nil {
		f.heard = false
		err := r.edges.Do(guard.Replica, r.log, func() error { return r.hear(ctx, &f) })
		if ctx.Err() != nil {
			return
		}
		if f.heard {
			pause, f.refused = r.timing.retry, nil
		}
		switch self := errors.Is(err, errSelf); {
		case self:
			pause = r.timing.self
		case f.heard || !warned:
			warned = true
			r.log.Warn("peer router unreachable", "peer", address, "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, r.timing.retryTo)
	}
}

// follower is the state of the router at an address. One goroutine uses it.
type follower struct {
	address string
	opener  *opener
	heard   bool  // it has said something by this connection
	refused error // why a message was, which was logged; nil: none was
}

// hear books what one connection to a router sends, until it fails; then the
// router's bookings end.
func (r *Mesh) hear(ctx context.Context, f *follower) error {
	conn, err := r.dial.DialSub(ctx, "tcp://"+f.address, slotTopic, sessionTopic, replicaTopic)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.Limit(messageLimit)
	from, p := f.opener, newOther(r)
	defer func() {
		r.books.Lock()
		defer r.books.Unlock()
		p.forget()
		if f.heard {
			r.Lost.Add(1)
		}
	}()
	last := time.Now()
	for {
		silence := r.timing.foreign // a Dynamo at rest sends heartbeats alone
		if p.own || r.seal != nil {
			silence = r.timing.silence
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
		now := time.Now()
		p.retry(now)
		if frames == nil { // a heartbeat
			if !p.own && r.seal == nil {
				last = now
			}
			continue
		}
		if r.lose != nil && r.lose() {
			continue
		}
		switch err := p.message(from, frames); {
		case errors.Is(err, errSelf):
			return err
		case err != nil:
			r.Refused.Add(1)
			if f.refused == nil {
				r.log.Warn("message of a peer router rejected; further ones are not logged", "peer", f.address, "error", err)
			}
			f.refused = err
			continue
		}
		last = now
		if !f.heard && p.id != 0 {
			f.heard = true
			r.log.Info("peer router connected", "peer", f.address)
		}
	}
}

// message takes one message of the other router.
func (p *otherRouter) message(from *opener, frames [][]byte) error {
	if len(frames) != 2 {
		return fmt.Errorf("it has %d frames, want 2", len(frames))
	}
	topic := string(frames[0])
	text, err := from.open(topic, frames[1])
	if err != nil {
		return err
	}
	p.mesh.books.Lock()
	defer p.mesh.books.Unlock()
	switch topic {
	case slotTopic:
		d, err := decodeSlot(text)
		if err == nil {
			err = p.from(d.router, func() { p.take(d) })
		}
		return err
	case sessionTopic:
		b, err := decodeSession(text) // its writer may be this router: Dynamo forwards sessions
		if err == nil && p.mesh.router.TakeSession(b) {
			p.mesh.Received.Add(1)
		}
		return err
	case replicaTopic:
		m, err := decodeOwn(text)
		if err == nil {
			err = p.from(m.Router, func() { p.takeOwn(&m) })
		}
		return err
	}
	return errShape
}

// from notes which router speaks, and takes its message unless another connection hears
// that router already. Its error is errSelf.
func (p *otherRouter) from(id uint64, take func()) error {
	if id == p.mesh.id {
		return errSelf
	}
	if p.is(id) {
		take()
	}
	return nil
}

// takeOwn applies what a kvrouter sends beyond Dynamo. Kinds of later versions say
// nothing.
func (p *otherRouter) takeOwn(m *ownMessage) {
	r := p.mesh
	p.own = true
	switch m.Kind {
	case kindDigest:
		p.service.Take(m.services())
		if ask := p.compare(m.Sums); ask != 0 {
			r.say(ownMessage{Kind: kindAsk, Of: p.id, Buckets: ask})
		}
	case kindAsk:
		if m.Of == r.id {
			r.asked.Or(m.Buckets)
		}
	case kindHeld:
		p.keep(m.Bucket, m.Requests)
	case kindStored:
		for _, response := range m.Requests {
			if r.stored != nil {
				r.stored(response, m.Worker.Worker, m.Owner)
			}
		}
	case kindEjection:
		w := kv.WorkerKey{Worker: m.Worker.Worker, Rank: m.Worker.Rank}
		long := time.Duration(m.Milliseconds) * time.Millisecond
		if r.router.Health.TakeEjection(w, long) {
			r.log.Info("worker paused: a peer router has ejected it", "worker", w.Worker, "rank", w.Rank, "for", long)
		}
	}
}

// validAddress checks an address of the settings.
func validAddress(address string) bool {
	host, port, err := net.SplitHostPort(address)
	_, ok := kv.ParsePort(port)
	return err == nil && ok && host != ""
}
