// Package quota divides a bound that all clients have in common, so that none takes all of it.
package quota

import "sync"

// share is how many times what it leaves free a client may have: alone, 15 of 16 units, and
// of n greedy clients each 15 of 15n+1. What is left is there for a client that comes.
const share = 15

// Pool is a number of units, such as bytes or requests, that clients take for a time. A client
// is named as in docs/outlier-ejection.md; all unknown ones are "". It is safe for concurrent
// use.
type Pool struct {
	all int64

	mu   sync.Mutex       // guards the rest
	held int64            // by all clients
	of   map[string]int64 // units of the clients that have some
}

// New returns a pool of so many units.
func New(all int64) *Pool { return &Pool{all: all, of: map[string]int64{}} }

// All returns the number of units.
func (p *Pool) All() int64 { return p.all }

// Held returns the units that are taken.
func (p *Pool) Held() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held
}

// Take takes n more units for a request of a client that has so many already, if they are
// left, and within the client's share. A client's only request may have all that is left: so
// a request of the maximum size is served. Give must follow.
func (p *Pool) Take(client string, has, n int64) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := p.all - p.held - n
	if left < 0 {
		return false
	}
	if units := p.of[client]; units > has && units+n > share*left {
		return false
	}
	p.held += n
	p.of[client] += n
	return true
}

// Give returns n units of a client.
func (p *Pool) Give(client string, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held -= n
	if p.of[client] -= n; p.of[client] == 0 {
		delete(p.of, client)
	}
}
