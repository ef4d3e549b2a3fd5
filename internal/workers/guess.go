package workers

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"kvrouter/internal/events"
)

// publishing is what is known of where a worker publishes KV events. The worker's mu
// guards it.
type publishing struct {
	host      string   // of its URL
	given     string   // endpoint of rank 0 by the flags; empty: none, or it is discovered
	told      bool     // it has said where, or that nowhere
	endpoints []string // that it has named
}

// guess is where a worker is taken to publish that has no route to say so. Only the
// goroutine that follows the worker uses it.
type guess struct {
	endpoints []string // of its ranks; none: nothing is guessed
	contested bool     // another may be who publishes there, so it is not followed
	warned    bool     // of that
	failures  int      // in a row of the page that names the ranks
}

// mostPagesInVain is how often the page that names a worker's ranks may fail before the
// worker counts as one of a single rank.
const mostPagesInVain = 2

// hasTold notes where the worker itself says that it publishes.
func (w *worker) hasTold(sources []events.Source) {
	w.guess.endpoints, w.guess.contested = nil, false
	endpoints := plainEndpoints(sources)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.publishes.told, w.publishes.endpoints = true, endpoints
}

// guesses notes that the worker has no route to say where it publishes, and tells
// whether it alone can be who does at these.
func (f *Fleet) guesses(w *worker, sources []events.Source) bool {
	w.mu.Lock()
	w.publishes.told, w.publishes.endpoints = false, nil
	w.mu.Unlock()
	w.guess.endpoints = plainEndpoints(sources)
	w.guess.contested = f.contested(w)
	if w.guess.contested && !w.guess.warned {
		w.guess.warned = true
		f.log.Warn(fmt.Sprintf("%s: its KV events are not followed: it does not say where it publishes them, and another worker of its host may be who does at the usual port", w),
			"url", w.Spec.URL, "port", w.Spec.EventsPort, "remedy", "name kv-events of each worker of this host in a file for --discovery, or in --worker; or run a vLLM with /kv_event_sources")
	}
	return !w.guess.contested
}

// contested tells whether another worker may be who publishes where w is taken to: one
// that names such an endpoint, or one of the same host that has not said where it does.
// Ranks of a Pod have ports of their own.
func (f *Fleet) contested(w *worker) bool {
	if len(w.guess.endpoints) == 0 {
		return false
	}
	host := plainHost(hostOf(w.Spec.URL))
	return slices.ContainsFunc(f.Members(), func(other *worker) bool {
		return other != w && other.mayPublish(host, w.Spec.EventsPort, w.guess.endpoints)
	})
}

// mayPublish tells whether the worker may be who publishes at these endpoints of a
// host, of which the first is at this port.
func (w *worker) mayPublish(host string, port uint16, endpoints []string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	given, usual := w.publishes.given, uint16(0)
	if w.found != nil {
		given, usual = w.found.now.KVEvents, w.found.now.EventsPort
	}
	if slices.ContainsFunc(w.publishes.endpoints, func(e string) bool { return slices.Contains(endpoints, e) }) {
		return true
	}
	if given != "" {
		return slices.Contains(endpoints, plain(given))
	}
	return !w.publishes.told && w.publishes.host == host && (usual == 0 || usual == port)
}

func plainEndpoints(sources []events.Source) []string {
	endpoints := make([]string, len(sources))
	for i, source := range sources {
		endpoints[i] = plain(source.Endpoint)
	}
	return endpoints
}

// plain is an endpoint with its host as plainHost has it.
func plain(endpoint string) string {
	address, isTCP := strings.CutPrefix(endpoint, "tcp://")
	host, port, err := net.SplitHostPort(address)
	if !isTCP || err != nil {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(plainHost(host), port)
}

// plainHost is a host, with one name for all that this machine calls itself.
func plainHost(host string) string {
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() {
		return "localhost"
	}
	return strings.ToLower(host)
}
