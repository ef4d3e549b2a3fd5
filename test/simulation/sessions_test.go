package simulation

import (
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
)

// home is where a router has a session.
type home struct {
	worker      *worker
	generation  int
	since, used time.Time
	unsure      bool // it may have moved since
}

// homeOf names the place of a session for a leg.
func homeOf(session string, leg kv.Leg) string {
	if leg == kv.LegPrefill {
		return session + " prefill"
	}
	return session
}

// queueTimeout is the maximum wait in a fair queue.
const queueTimeout = 10 * time.Second

// longestTry is the time limit of one attempt at a request.
func (s *setup) longestTry() time.Duration {
	if s.Fair {
		return requestTimeout + legTimeout + 2*queueTimeout // of two legs
	}
	return requestTimeout + legTimeout
}

// router returns the settings of routers.
func (s *setup) router(d router.Settings) router.Settings {
	if s.Sessions > 0 {
		d.SessionHeader, d.SessionTTL, d.SessionLimit = "x-session-id", s.SessionTTL, s.SessionLimit
	}
	if s.Fair {
		d.RouterQueuePolicy, d.RouterQueueTimeout, d.RouterQueueLimit, d.RouterBatchShare = "fair", queueTimeout, 20, 0.2
	}
	return d
}

// calmness is whether a router had nothing against any worker at a moment.
type calmness struct {
	at      time.Time
	well    bool
	spotted []uint64 // workers with a failure of late, or with requests, for which a session may have to wait
}

// calm is that for a request of a session.
func (n *node) calm(session string) (c calmness) {
	if session == "" {
		return c
	}
	c.at, c.well = time.Now(), true
	for _, load := range n.router.Loads() {
		if load.ActiveRequests > 0 {
			c.spotted = append(c.spotted, load.Key.Worker)
		}
	}
	list, _ := n.router.Health.Records()
	for _, record := range list {
		c.well = c.well && record.State == health.StateIn
		if record.Row > 0 || record.SuccessRate < 1 {
			c.spotted = append(c.spotted, record.Worker.Worker)
		}
	}
	return c
}

// settled is called with each decision for a request of a session, and with what the
// router knew of the workers before. A session stays on its worker while that is well,
// unless another router has moved it.
func (c *client) settled(seen calmness, leg kv.Leg, exclude []uint64, d router.Decision) {
	if c.session == "" {
		return
	}
	n, w, now, name := c.node, c.world, time.Now(), homeOf(c.session, leg)
	after := n.calm(c.session)
	to := w.workers[d.Target.Key.Worker]
	n.mu.Lock()
	defer n.mu.Unlock()
	calm := seen.well && after.well && !now.After(seen.at) // else it may be a trial, which takes no session along
	was, known := n.homes[name]
	stays := known && was.worker == to && was.generation == d.Target.Generation
	switch {
	case known && !calm:
		was.unsure = was.unsure || !stays
		n.homes[name] = was
	case stays && !was.unsure:
		was.used = now
		n.homes[name] = was
	default:
		if known && !was.unsure && w.setup.SessionLimit > legs*w.setup.Sessions && now.Sub(was.used) < w.setup.SessionTTL && was.worker.role.Takes(leg) &&
			!slices.Contains(exclude, was.worker.id) && !slices.Contains(seen.spotted, was.worker.id) &&
			n.router.IsUp(kv.Target{Key: was.worker.key(), Generation: was.generation}) && !w.moved(n, name, was) {
			w.fail("%s: session %s goes from worker %d to %d, although that is well and no other router has moved it", n.host, name, was.worker.id, to.id)
		}
		since := now
		switch {
		case was.unsure: // it may have been here for as long, and a later binding be on its way
			since = was.since
		case w.hadThere(n, name, to): // it may be that router's binding
			since = time.Time{}
		}
		n.homes[name] = home{worker: to, generation: d.Target.Generation, since: since, used: now, unsure: !calm}
	}
	w.bind(n, name, to, now)
}

// unpaired is called where a request got no pair. A session without a place may have one since, at
// the prefill worker.
func (c *client) unpaired() {
	if c.session == "" {
		return
	}
	n, now, name := c.node, time.Now(), homeOf(c.session, kv.LegPrefill)
	n.mu.Lock()
	defer n.mu.Unlock()
	if was, known := n.homes[name]; !known || now.Sub(was.used) >= c.world.setup.SessionTTL {
		n.homes[name] = home{since: now, used: now, unsure: true}
	}
}

// binding is a session that a router has had on a worker.
type binding struct {
	name   string
	router int
	worker uint64
}

// bind notes a decision.
func (w *world) bind(n *node, name string, to *worker, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bound[binding{name, n.id, to.id}] = now
}

// hadThere reports whether another router than n has had a session on a worker.
func (w *world) hadThere(n *node, name string, there *worker) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for b := range w.bound {
		if b.name == name && b.router != n.id && b.worker == there.id {
			return true
		}
	}
	return false
}

// moved reports whether another router than n has had a session elsewhere since n has had
// it at was.
func (w *world) moved(n *node, name string, was home) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for b, at := range w.bound {
		if b.name == name && b.router != n.id && b.worker != was.worker.id && !at.Before(was.since) {
			return true
		}
	}
	return false
}

// owners asks every router where each session is, and reports one that is on two workers.
func (w *world) owners() string {
	if w.setup.SessionLimit <= legs*w.setup.Sessions {
		return ""
	}
	for s := range w.setup.Sessions {
		session, first := fmt.Sprintf("s%d", s+1), -1
		for _, n := range w.nodes {
			worker, ok := n.ownerOf(session)
			switch {
			case !ok:
			case first < 0:
				first = worker
			case first != worker:
				return fmt.Sprintf("session %s is on worker %d, and on %d by %s", session, first, worker, n.host)
			}
		}
	}
	return ""
}

// ownerOf asks the router for a session's worker; with pairs, for that of its prompts.
func (n *node) ownerOf(session string) (worker int, ok bool) {
	request := router.Request{Tokens: n.world.prompts[0].tokens[:1], QueryOnly: true, Session: n.router.SessionOf("", session)}
	if n.world.setup.Kind == kv.KindNone {
		d, err := n.router.Route(n.ctx, request)
		return int(d.Target.Key.Worker), err == nil
	}
	pair, err := n.router.RoutePair(n.ctx, request, router.PairRule{Enforce: true})
	return int(pair.Prefill.Target.Key.Worker), err == nil
}
