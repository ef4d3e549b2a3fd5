package router

import (
	"container/list"
	"errors"
	"fmt"
	"hash/maphash"
	"time"

	"kvrouter/internal/base/kv"
)

// SessionSettings define which requests form a session, and how long it stays on
// one worker.
type SessionSettings struct {
	SessionHeader string        `group:"Routing" placeholder:"NAME" help:"Request header with the session id, such as x-session-id. Requests of a session go to one worker unless it is unhealthy or another one would answer sooner."`
	SessionCookie string        `group:"Routing" placeholder:"NAME" help:"Cookie with the session id of requests without that header. The router reads it only; a proxy in front of it must set it."`
	SessionTTL    time.Duration `name:"session-ttl" group:"Routing" default:"30m" help:"Idle time after which a session expires."`
	SessionLimit  int           `group:"Routing" default:"65536" hidden:"" help:"Maximum number of sessions; the least recently used is evicted."`
}

// NamesSessions reports whether requests can name a session.
func (s SessionSettings) NamesSessions() bool { return s.SessionHeader != "" || s.SessionCookie != "" }

// validate checks the settings; its errors name the flag.
func (s SessionSettings) validate() error {
	switch {
	case s.SessionTTL <= 0:
		return fmt.Errorf("--session-ttl %s: give more than 0", s.SessionTTL)
	case s.SessionLimit < 1:
		return fmt.Errorf("--session-limit %d: give at least 1", s.SessionLimit)
	case !isToken(s.SessionHeader):
		return fmt.Errorf("--session-header %q: give the name of a header, such as x-session-id", s.SessionHeader)
	case !isToken(s.SessionCookie):
		return errors.New("--session-cookie: give the name of a cookie, letters, digits, - and _")
	}
	return nil
}

// isToken reports whether a header or a cookie may have that name; the empty one is none
// and well.
func isToken(name string) bool {
	for _, c := range []byte(name) {
		if c != '-' && c != '_' && !('0' <= c && c <= '9') && !('a' <= c && c <= 'z') && !('A' <= c && c <= 'Z') {
			return false
		}
	}
	return true
}

// sessionFloor is the least time that a session saves by a move: that of a pass of an engine with so many prompt tokens.
const sessionFloor = 8192

// Results of a decision for a request with a session.
const (
	SessionNew   = "new"   // it was unknown or had expired
	SessionKept  = "kept"  // it stays on its worker
	SessionMoved = "moved" // its worker could not serve the request, or another one answers sooner
)

// session is the entry of one session: a hash in place of its name.
type session struct {
	hash       uint64
	worker     kv.WorkerKey
	generation int // of the worker: its next incarnation has nothing of the session
	used       time.Time

	version sessionVersion // of the router that bound it last
	sent    time.Time      // when it was last sent to the others
}

// sessions are those of the last requests. The router's lock guards them.
type sessions struct {
	seed   maphash.Seed // so that clients cannot forge colliding names
	byHash map[uint64]*list.Element
	order  list.List // of *session, that used longest ago first
	counts SessionCounts
	last   uint64 // highest sequence of a version so far
}

// SessionCounts count the decisions for requests with a session by result.
type SessionCounts struct{ New, Kept, Moved uint64 }

// Add adds the other's counts.
func (c *SessionCounts) Add(other SessionCounts) {
	c.New, c.Kept, c.Moved = c.New+other.New, c.Kept+other.Kept, c.Moved+other.Moved
}

func newSessions() *sessions {
	return &sessions{seed: maphash.MakeSeed(), byHash: map[uint64]*list.Element{}}
}

// SessionOf returns the value of Request.Session for a session of that name and
// owner. Sessions of different owners are separate. The name is not stored. An
// empty name means no session.
func (r *Router) SessionOf(owner, name string) uint64 {
	if name == "" {
		return 0
	}
	return r.sessions.hash(owner, name)
}

// hash returns what stands for a session of that name and owner here.
func (s *sessions) hash(owner, name string) uint64 {
	var h maphash.Hash
	h.SetSeed(s.seed)
	h.WriteString(owner)
	h.WriteByte(0) // which no header holds
	h.WriteString(name)
	return max(1, h.Sum64())
}

// sessionKey is p's session as the table knows it. Where prompts are computed apart, a
// session has a worker for that, too: it holds the prompts of all turns before.
func (p *prompt) sessionKey() uint64 {
	if p.Leg == kv.LegPrefill {
		return ^p.Session
	}
	return p.Session
}

// at returns the session as of now; nil: it is not known.
func (s *sessions) at(hash uint64, ttl time.Duration, now time.Time) *session {
	if e := s.byHash[hash]; e != nil {
		if known := e.Value.(*session); now.Sub(known.used) < ttl {
			return known
		}
	}
	return nil
}

// put notes where a session is now. Those that are forgotten go, and the one used
// longest ago if there are too many.
func (s *sessions) put(hash uint64, target *kv.Target, k *SessionSettings, now time.Time) *session {
	e := s.byHash[hash]
	if e != nil {
		s.order.MoveToBack(e)
	} else {
		e = s.order.PushBack(&session{hash: hash})
		s.byHash[hash] = e
	}
	put := e.Value.(*session)
	put.worker, put.generation, put.used = target.Key, target.Generation, now
	for e := s.order.Front(); len(s.byHash) > k.SessionLimit || now.Sub(e.Value.(*session).used) >= k.SessionTTL; e = s.order.Front() {
		delete(s.byHash, s.order.Remove(e).(*session).hash)
	}
	return put
}

// end forgets a session.
func (s *sessions) end(hash uint64) (known bool) {
	e := s.byHash[hash]
	if e == nil {
		return false
	}
	s.order.Remove(e)
	delete(s.byHash, hash)
	return true
}

// EndSession forgets where a session of SessionOf is, as no more of its requests come. It reports whether that was
// known. Other routers forget it after --session-ttl.
func (r *Router) EndSession(session uint64) (known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known = r.sessions.end(session)
	return r.sessions.end(^session) || known
}

// keepSession leaves of the candidates the worker of p's session, or p's home, alone, if
// that is well and no other answers sooner: then the policy has no other choice.
func (d *decider) keepSession(p *prompt, now time.Time) (kept bool) {
	r := d.router
	known := r.sessions.at(p.sessionKey(), r.settings.SessionTTL, now)
	stays := func(t *kv.Target) bool { return t.Key == known.worker && t.Generation == known.generation }
	switch {
	case p.Session != 0 && known != nil:
	case p.Home != nil:
		stays = func(t *kv.Target) bool { return t.Key.Worker == *p.Home }
	default:
		return false
	}
	for i := range d.candidates {
		c := &d.candidates[i]
		if !stays(c.Target) || r.Health.outliers.IsOut(c.Target.Key, now) || r.Health.outliers.Spared(c.Target.Key, now) {
			continue
		}
		if !r.Admission.hasCapacity(c.Target, c.Load, now) || d.movePays(p, i, now) {
			continue
		}
		d.candidates[0] = *c
		d.candidates = d.candidates[:1]
		return true
	}
	return false
}

// trialStarves reports whether an ejected worker gets no request on trial:
// where all requests have a session that stays elsewhere, one of those must be it.
func (d *decider) trialStarves(now time.Time) bool {
	if d.router.Health.outliers.Quiet() {
		return false
	}
	for i := range d.candidates {
		if since, due := d.router.Health.outliers.TrialDue(d.candidates[i].Target.Key, now); due && now.Sub(since) >= trialOverdue {
			return true
		}
	}
	return false
}

// movePays reports whether p would get its first token so much earlier from another candidate that is well than from the
// one at that place that its session moves: the wait that it saves is more than the time to compute what only this one
// has, by a pass.
func (d *decider) movePays(p *prompt, at int, now time.Time) bool {
	query, least, found := d.query(p, now), time.Duration(0), false
	for i := range d.candidates {
		c := &d.candidates[i]
		if i == at || d.router.Health.outliers.IsOut(c.Target.Key, now) || !d.router.Admission.hasCapacity(c.Target, c.Load, now) {
			continue
		}
		if first := d.forecast.FirstToken(&query, c); !found || first < least {
			least, found = first, true
		}
	}
	return found && d.forecast.FirstToken(&query, &d.candidates[at])-least > d.forecast.Alone(sessionFloor)
}

// sessionGoes returns what becomes of p's session now that p goes to target; the
// empty string: it has none, or p goes there on trial, which takes no session along.
func (r *Router) sessionGoes(p *prompt, target *kv.Target, now time.Time) string {
	if p.Session == 0 {
		return ""
	}
	if _, trial := r.Health.outliers.TrialDue(target.Key, now); trial {
		return ""
	}
	known := r.sessions.at(p.sessionKey(), r.settings.SessionTTL, now)
	switch {
	case known == nil:
		return SessionNew
	case known.worker == target.Key && known.generation == target.Generation:
		return SessionKept
	}
	return SessionMoved
}

// noteSession remembers where p's session is. One that leaves the worker of its prompts stays
// there until that request has a worker for its answer, too: see Pair.moveSession.
func (r *Router) noteSession(p *prompt, target *kv.Target, now time.Time) {
	if p.sessionGoes != "" && !p.movesLater() {
		r.putSession(p, target, now)
	}
}

// movesLater reports whether p's session moves once its request has a worker for the answer.
func (p *prompt) movesLater() bool {
	return p.sessionGoes == SessionMoved && p.Leg == kv.LegPrefill && !p.ChooseOnly
}

// moveSession does what noteSession has left for p, the pair's prefill leg.
func (pair *Pair) moveSession(p *prompt) {
	if b := pair.Prefill.Booking; b != nil && b.moves {
		b.locked(func(r *Router, now time.Time) {
			p.sessionGoes = SessionMoved
			r.putSession(p, &pair.Prefill.Target, now)
		})
	}
}

// putSession remembers that p's session is on target, counts that and sends it to the others.
func (r *Router) putSession(p *prompt, target *kv.Target, now time.Time) {
	switch p.sessionGoes {
	case SessionNew:
		r.sessions.counts.New++
	case SessionKept:
		r.sessions.counts.Kept++
	case SessionMoved:
		r.sessions.counts.Moved++
	}
	r.shareSession(p, r.sessions.put(p.sessionKey(), target, &r.settings.SessionSettings, now), now)
}

// Sessions returns the number of stored sessions, and the results of the decisions
// so far.
func (r *Router) Sessions() (known int, counts SessionCounts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sessions.byHash), r.sessions.counts
}
