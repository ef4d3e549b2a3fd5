package workers

import (
	"fmt"
	"slices"
	"sync"

	"kvrouter/internal/cache/events"
)

// claims says whose the event and replay endpoints are: the blocks of an engine are those of one worker.
// Inferred endpoints are claimed by none, see contested. The zero value is empty.
type claims struct {
	mu sync.Mutex
	of map[string]*worker // by endpoint, with its host as oneName has it
}

// take makes the endpoint w's, unless it is another's, which is returned.
func (c *claims) take(endpoint string, w *worker) (owner *worker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	endpoint = endpointOf(endpoint, oneName)
	if owner = c.of[endpoint]; owner != nil && owner != w {
		return owner
	}
	if c.of == nil {
		c.of = map[string]*worker{}
	}
	c.of[endpoint] = w
	return nil
}

// free reports whether no worker has claimed the endpoint.
func (c *claims) free(endpoint string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of[endpointOf(endpoint, oneName)] == nil
}

// leave frees those of the endpoints that are w's.
func (c *claims) leave(w *worker, endpoints []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, endpoint := range endpoints {
		if endpoint = endpointOf(endpoint, oneName); c.of[endpoint] == w {
			delete(c.of, endpoint)
		}
	}
}

// claiming is what a worker has claimed, and what it cannot. Only the goroutine that follows the worker
// uses it.
type claiming struct {
	now, before []string // its endpoints, and those of when it was followed last
	rival       *worker  // has one that is named for this worker, too
	awaited     string   // that one
}

// renew begins the claims of a worker that is followed anew. What it had stays its own until settle.
func (c *claiming) renew() { *c = claiming{before: append(c.before, c.now...)} }

// settle frees what the worker no longer claims.
func (f *Fleet) settle(w *worker) {
	c := &w.claims
	c.before = slices.DeleteFunc(c.before, func(endpoint string) bool { return slices.Contains(c.now, endpoint) })
	f.claims.leave(w, c.before)
	c.before = nil
}

// claim claims the endpoints of an event stream for the worker, and reports whether it may be followed.
// A replay endpoint of another worker is taken out of source.
func (in *incarnation) claim(source *events.Source) bool {
	if len(in.w.inferred.endpoints) > 0 {
		return true
	}
	if !in.claimOne("KV events", source.Endpoint) {
		return false
	}
	if source.Replay != "" && !in.claimOne("replay", source.Replay) {
		source.Replay = ""
	}
	return true
}

func (in *incarnation) claimOne(what, endpoint string) bool {
	c := &in.w.claims
	if owner := in.f.claims.take(endpoint, in.w); owner != nil {
		c.rival, c.awaited = owner, endpoint
		in.f.log.Warn(fmt.Sprintf("%s: its %s endpoint is not used: it is that of %s; give each worker its own", in.w, what, owner),
			"endpoint", endpoint, "url", in.w.spec.URL)
		return false
	}
	c.now = append(c.now, endpoint)
	return true
}

// unrivaled reports whether an endpoint that was another worker's is free now.
func (in *incarnation) unrivaled() bool {
	return in.w.claims.awaited != "" && in.f.claims.free(in.w.claims.awaited)
}
