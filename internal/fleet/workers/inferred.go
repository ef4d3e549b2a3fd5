package workers

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
)

// publishing is the known places where a worker publishes KV events. The worker's mu
// guards it.
type publishing struct {
	host      string   // of its URL
	given     string   // endpoint of rank 0 by the flags; empty: none, or it is discovered
	reported  bool     // the worker has reported its endpoints, perhaps none
	endpoints []string // reported ones
}

// inference is where a worker is assumed to publish that has no route that names its
// endpoints. Only the goroutine that follows the worker uses it.
type inference struct {
	endpoints []string // of its ranks; none: nothing is inferred
	contested bool     // another worker could own them, so they are not subscribed to
	warned    bool     // of that
	failures  int      // in a row, of the page that names the ranks
}

// reports notes the endpoints that the worker itself reports.
func (w *worker) reports(sources []events.Source) {
	w.inferred.endpoints, w.inferred.contested = nil, false
	endpoints := plainEndpoints(sources)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.publishes.reported, w.publishes.endpoints = true, endpoints
}

// infers notes that the worker has no route that names its endpoints, and reports
// whether no other worker could own these.
func (f *Fleet) infers(w *worker, sources []events.Source) bool {
	w.mu.Lock()
	w.publishes.reported, w.publishes.endpoints = false, nil
	w.mu.Unlock()
	w.inferred.endpoints = plainEndpoints(sources)
	w.inferred.contested = f.contested(w)
	if w.inferred.contested && !w.inferred.warned {
		w.inferred.warned = true
		f.log.Warn(fmt.Sprintf("%s: its KV events are not followed: it does not report its endpoint, and another worker of its host could own "+
			"the default port", w),
			"url", w.spec.URL, "port", w.spec.EventsPort, "remedy",
			"set kv-events of each worker of this host in a file of --discovery or in --worker, or run a vLLM with /kv_event_sources")
	}
	return !w.inferred.contested
}

// contested reports whether another worker could own the endpoints inferred for w: one
// that names such an endpoint, or one of the same host that has not reported its own.
// Ranks of a Pod have ports of their own.
func (f *Fleet) contested(w *worker) bool {
	if len(w.inferred.endpoints) == 0 {
		return false
	}
	host := plainHost(probe.HostOf(w.spec.URL))
	return slices.ContainsFunc(f.all(), func(other *worker) bool {
		return other != w && other.mayPublish(host, w.spec.EventsPort, w.inferred.endpoints)
	})
}

// mayPublish reports whether the worker could own these endpoints of a host, of which
// the first is at this port.
func (w *worker) mayPublish(host string, port uint16, endpoints []string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	given, inferred := w.publishes.given, uint16(0)
	if w.discovered != nil {
		given, inferred = w.discovered.now.KVEvents, w.discovered.now.EventsPort
	}
	if slices.ContainsFunc(w.publishes.endpoints, func(e string) bool { return slices.Contains(endpoints, e) }) {
		return true
	}
	if given != "" {
		return slices.Contains(endpoints, plain(given))
	}
	return !w.publishes.reported && w.publishes.host == host && (inferred == 0 || inferred == port)
}

func plainEndpoints(sources []events.Source) []string {
	endpoints := make([]string, len(sources))
	for i, source := range sources {
		endpoints[i] = plain(source.Endpoint)
	}
	return endpoints
}

// plain is an endpoint with its host as plainHost has it.
func plain(endpoint string) string { return endpointOf(endpoint, plainHost) }

// endpointOf is an endpoint with its host written as name does.
func endpointOf(endpoint string, name func(host string) string) string {
	address, isTCP := strings.CutPrefix(endpoint, "tcp://")
	host, port, err := net.SplitHostPort(address)
	if !isTCP || err != nil {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(name(host), port)
}

// plainHost is a host in lower case, with one name for all loopback addresses.
func plainHost(host string) string {
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() {
		return "localhost"
	}
	return strings.ToLower(host)
}

// oneName is a host in lower case, with one name for the usual loopback address. Other ones can have servers
// of their own.
func oneName(host string) string {
	if host = strings.ToLower(host); host == "localhost" {
		return "127.0.0.1"
	}
	return host
}
