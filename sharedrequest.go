package main

import (
	"net/http"
	"strconv"
	"sync"
	"time"
)

// Names of the headers by which a client learns how a prefill worker took part.
const (
	headerPrefillWorker = "X-Kvrouter-Prefill-Worker-Id"
	headerPrefillTime   = "X-Kvrouter-Prefill-Ms"
	headerHandoverTime  = "X-Kvrouter-Handover-Ms"
)

// sharedRequest is what both legs of a request know of each other. Its methods
// are safe for concurrent use.
type sharedRequest struct {
	Worker string // label of the prefill worker
	now    func() time.Time

	mu       sync.Mutex // guards the rest
	took     time.Duration
	computed time.Time     // the prefill leg has ended well
	usage    Usage         // as the prefill worker reports it
	handover time.Duration // from computed to the decode request; 0: none, or the legs run together
	first    time.Duration // from computed to the first byte of the answer; 0: none, or that came first
	lost     bool          // the prefill worker did not say where the blocks are
	started  bool          // the first byte of the answer goes to the client
	over     bool          // nobody waits any more
	timer    *time.Timer   // of the wait for the decode worker's first event; nil: none
}

// note changes r.
func (r *sharedRequest) note(change func(*sharedRequest)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(r)
}

// begin is called right before the first byte of the answer goes to the client,
// with its headers.
func (r *sharedRequest) begin(header http.Header) {
	r.note(func(r *sharedRequest) {
		r.started = true
		if !r.computed.IsZero() {
			r.first = r.now().Sub(r.computed)
		}
		if r.timer != nil {
			r.timer.Stop()
		}
		header.Set(headerPrefillWorker, r.Worker)
		for name, d := range map[string]time.Duration{headerPrefillTime: r.took, headerHandoverTime: r.handover} {
			if d > 0 {
				header.Set(name, strconv.FormatFloat(milliseconds(d), 'f', 3, 64))
			}
		}
	})
}

func (r *sharedRequest) hasStarted() (started bool) {
	r.note(func(r *sharedRequest) { started = r.started })
	return started
}

func (r *sharedRequest) firstByte() (first time.Duration) {
	r.note(func(r *sharedRequest) { first = r.first })
	return first
}

// stop ends the wait for the decode worker's first event.
func (r *sharedRequest) stop() {
	r.note(func(r *sharedRequest) {
		if r.over = true; r.timer != nil {
			r.timer.Stop()
		}
	})
}

// reported returns what the prefill worker reports of its cache.
func (r *sharedRequest) reported() (known bool, tokens int) {
	r.note(func(r *sharedRequest) { known, tokens = r.usage.CachedKnown, r.usage.CachedTokens })
	return known, tokens
}
