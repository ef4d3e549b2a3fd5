package simulation

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/peers/replica"
)

// routeDead is how long a broken route between two routers takes all messages unseen.
const routeDead = 5 * time.Second

// link is the replica.Link of one incarnation of a router. Messages between two routers take a
// route, which keeps the order; its faults are those of the network.
type link struct {
	net    *network
	host   string
	name   string // of this incarnation
	losses *losses
	sent   map[string]*route // by the name of the receiver
	inbox  []letter          // in the order of arrival
	wake   chan struct{}
}

// route is the way from one router to another.
type route struct {
	id    uint64
	count uint64    // messages so far
	last  time.Time // the latest arrival
	dead  time.Time // until when messages vanish
}

// letter is a message on its way.
type letter struct {
	at          time.Time
	from        *link
	topic, text string
}

// openLink returns the link of a router that starts.
func (n *network) openLink(host string, incarnation uint64, faults *losses) *link {
	n.mu.Lock()
	defer n.mu.Unlock()
	name := fmt.Sprintf("%s-%d", host, incarnation)
	l := &link{net: n, host: host, name: name, losses: faults, sent: map[string]*route{}, wake: make(chan struct{})}
	n.links = append(n.links, l)
	return l
}

// signal wakes Run. The network is locked.
func (l *link) signal() {
	close(l.wake)
	l.wake = make(chan struct{})
}

// Publish implements replica.Link.
func (l *link) Publish(topic string, text []byte) {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	for _, to := range l.net.links {
		if to != l {
			l.send(to, letter{from: l, topic: topic, text: string(text)})
		}
	}
}

// send sends a message to one router. The network is locked.
func (l *link) send(to *link, m letter) {
	n, now := l.net, time.Now()
	r := l.sent[to.name]
	if r == nil {
		r = &route{id: mix(n.seed, xxh3.HashString(l.name), xxh3.HashString(to.name))}
		l.sent[to.name] = r
	}
	number := r.count
	r.count++
	if now.Before(r.dead) {
		return
	}
	m.at = now.Add(time.Duration((0.1 + n.chance(r.id, number)) * float64(n.delay)))
	if n.faulty && n.spike > 0 && n.chance(r.id, number, 1) < n.spike {
		m.at = m.at.Add(time.Duration(n.chance(r.id, number, 2) * 2e9))
		n.met.Delayed++
	}
	if !m.at.After(r.last) {
		m.at = r.last.Add(1)
	}
	if n.faulty {
		before := slices.IndexFunc(to.inbox, func(other letter) bool { return other.from == l && other.at.Equal(r.last) })
		switch chance := n.chance(r.id, number, 3); {
		case chance < l.losses.Drop:
			n.met.Lost++
			return
		case chance < l.losses.Drop+l.losses.Twice:
			to.put(m)
			m.at = m.at.Add(1)
			n.met.Doubled++
		case chance < l.losses.Drop+l.losses.Twice+l.losses.Swap && before >= 0:
			other := &to.inbox[before]
			other.topic, m.topic, other.text, m.text = m.topic, other.topic, m.text, other.text
			n.met.Swapped++
		}
	}
	r.last = m.at
	to.put(m)
	to.signal()
}

// put adds a message to those that arrive. The network is locked.
func (l *link) put(m letter) {
	at, _ := slices.BinarySearchFunc(l.inbox, m.at, func(other letter, at time.Time) int {
		if other.at.After(at) {
			return 1
		}
		return -1
	})
	l.inbox = slices.Insert(l.inbox, at, m)
}

// Limit implements replica.Link.
func (l *link) Limit() int { return 1 << 20 }

// Followed implements replica.Link.
func (l *link) Followed() bool { return true }

// Joined implements replica.Link.
func (l *link) Joined() uint64 { return 0 }

// Network implements replica.Link.
func (l *link) Network() replica.Network { return replica.Network{Connected: true} }

// Run implements replica.Link.
func (l *link) Run(ctx context.Context, ears replica.Ears) {
	for ctx.Err() == nil {
		m, ok, wake, next := l.next()
		if ok {
			_ = ears.Take(m.from.name, m.topic, []byte(m.text))
			continue
		}
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
		case <-wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// next takes a message that has arrived. If there is none, there may be one after next or wake.
func (l *link) next() (m letter, ok bool, wake chan struct{}, next time.Duration) {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	now := time.Now()
	for i, m := range l.inbox {
		switch {
		case l.net.cut[pair(l.host, m.from.host)]:
		case m.at.After(now):
			return letter{}, false, l.wake, m.at.Sub(now)
		default:
			l.inbox = slices.Delete(l.inbox, i, i+1)
			return m, true, nil, 0
		}
	}
	return letter{}, false, l.wake, time.Hour
}

// Close implements replica.Link.
func (l *link) Close() {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	l.net.links = slices.DeleteFunc(l.net.links, func(other *link) bool { return other == l })
}

// between calls f for the links of each two routers of which one is at a, the other at b; empty:
// at any host. The network is locked.
func (n *network) between(a, b string, f func(to, from *link)) {
	for _, to := range n.links {
		for _, from := range n.links {
			if to != from && (b == "" && (to.host == a || from.host == a) || b != "" && pair(to.host, from.host) == pair(a, b)) {
				f(to, from)
			}
		}
	}
}

// loseLetters loses what is on its way between two hosts, or to and from one, and what is sent
// until dead. The network is locked.
func (n *network) loseLetters(a, b string, dead time.Time) {
	n.between(a, b, func(to, from *link) {
		to.inbox = slices.DeleteFunc(to.inbox, func(m letter) bool { return m.from == from })
		if r := from.sent[to.name]; r != nil {
			r.dead = dead
		}
	})
}

// mendLetters delivers what a partition has held back. The network is locked.
func (n *network) mendLetters(a, b string) {
	n.between(a, b, func(to, from *link) {
		r, now, held := from.sent[to.name], time.Now(), []letter(nil)
		to.inbox = slices.DeleteFunc(to.inbox, func(m letter) bool {
			if m.from == from {
				held = append(held, m)
			}
			return m.from == from
		})
		for i, m := range held {
			if at := now.Add(time.Duration(n.chance(r.id, r.count, 5)*float64(n.delay)) + time.Duration(i)); m.at.Before(at) {
				m.at = at
			}
			r.last = m.at
			to.put(m)
		}
		to.signal()
	})
}
