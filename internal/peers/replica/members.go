package replica

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// MaxPeers is how many other routers there are at most.
const MaxPeers = 128

var (
	// ErrTooManyPeers means that the maximum number of other routers is reached.
	ErrTooManyPeers = fmt.Errorf("there are %d peers, which is the maximum", MaxPeers)
	// ErrSelf means that a message is of this router itself.
	ErrSelf = errors.New("it is this router")
)

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

// Take implements Ears.
func (r *Mesh) Take(from, topic string, text []byte) error {
	r.books.Lock()
	defer r.books.Unlock()
	p := r.members[from]
	if p == nil {
		if len(r.members) >= MaxPeers {
			r.Refused.Add(1)
			return ErrTooManyPeers
		}
		p = newOther(r)
		p.last = time.Now()
		r.members[from] = p
	}
	err := p.message(topic, text)
	if err == nil {
		p.last = time.Now()
	} else if !errors.Is(err, ErrSelf) {
		r.Refused.Add(1)
	}
	if !p.heard && p.id != 0 {
		p.heard = true
		r.log.Info("peer router connected", "peer", from)
	}
	if p.left {
		r.log.Info("peer router left", "peer", from)
		r.gone(from)
	}
	return err
}

// Bounds of the routers that this one asks for their stored responses: one can tell all that all of
// its side of a partition know.
const (
	recallMost  = 2
	recallEvery = 10 * time.Second
)

// recall asks a router that has joined for its stored responses, or this one has joined it; r.books
// is held.
func (r *Mesh) recall(of uint64) {
	if now := time.Now(); now.Sub(r.recallsFrom) > recallEvery {
		r.recallsFrom, r.recalls = now, 0
	}
	if r.recalls++; r.stored != nil && r.recalls <= recallMost {
		r.say(ownMessage{Kind: kindRecall, Of: of})
	}
}

// Alive implements Ears.
func (r *Mesh) Alive(from string) {
	r.books.Lock()
	defer r.books.Unlock()
	if p := r.members[from]; p != nil && !p.own {
		p.last = time.Now()
	}
}

// Gone implements Ears.
func (r *Mesh) Gone(from string) {
	r.books.Lock()
	defer r.books.Unlock()
	r.gone(from)
}

// gone forgets a member; r.books is held.
func (r *Mesh) gone(from string) {
	p := r.members[from]
	if p == nil {
		return
	}
	p.forget()
	delete(r.members, from)
	if p.heard {
		r.Lost.Add(1)
	}
}

// look forgets the members that have been silent for too long, and books for the others what
// waited for a worker.
func (r *Mesh) look(now time.Time) {
	r.books.Lock()
	defer r.books.Unlock()
	for _, from := range slices.Sorted(maps.Keys(r.members)) {
		p, silence := r.members[from], r.timing.foreign
		if p.own {
			silence = r.timing.silence
		}
		if now.Sub(p.last) > silence {
			r.gone(from)
			r.log.Warn("peer router timed out", "peer", from, "silent", now.Sub(p.last).Round(time.Millisecond))
			continue
		}
		p.retry(now)
	}
}

// forgetAll forgets all members.
func (r *Mesh) forgetAll() {
	r.books.Lock()
	defer r.books.Unlock()
	for _, from := range slices.Sorted(maps.Keys(r.members)) {
		r.gone(from)
	}
}

// message takes one message of the other router.
func (p *otherRouter) message(topic string, text []byte) error {
	switch topic {
	case SlotTopic:
		d, err := decodeSlot(text)
		if err == nil {
			err = p.from(d.router, func() { p.take(d) })
		}
		return err
	case SessionTopic:
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
// that router already. Its error is ErrSelf.
func (p *otherRouter) from(id uint64, take func()) error {
	if id == p.mesh.id {
		return ErrSelf
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
	if !p.own {
		p.own = true
		r.recall(p.id)
	}
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
	case kindRecall:
		if m.Of == r.id {
			r.recalled.Store(true)
		}
	case kindLeave:
		p.left = true
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
