package router

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"kvrouter/internal/base/kv"
)

// Kinds of Change.
const (
	ChangeAdd     = "add"
	ChangePrefill = "prefill_complete"
	ChangeFree    = "free"
)

// Change is one change of a router's bookings, as sent to others.
type Change struct {
	Kind          string
	Request       string // id of the booking; empty: none of its own
	Worker        kv.WorkerKey
	Tokens        int           // of the prompt
	Uncached      int           // uncached ones
	Loads         kv.TierTokens // tokens of the prompt that the worker is expected to load
	Expected      int           // tokens of the answer; 0: unknown
	AnsweredWhole bool
	Leg           kv.Leg // that the worker was chosen for
	LoRA          string
	Sequence      []uint64 // sequence hashes of its active blocks; not to be changed
	BlockSize     int      // tokens of those blocks
}

// Change returns a change of the booking as sent to others. The fields
// it reads never change, so it needs no lock.
func (b *Booking) Change(kind string) Change {
	return Change{
		Kind: kind, Request: b.id, Worker: b.worker, Tokens: b.prompt, Uncached: b.uncached, Loads: b.loads, Expected: b.expected,
		AnsweredWhole: b.answeredWhole, Leg: b.leg, LoRA: b.lora, Sequence: b.sequence, BlockSize: b.blockSize,
	}
}

// SessionBinding is the worker of a session. Of two bindings the one with the
// higher sequence counts, of two with the same sequence the one of the higher
// writer.
type SessionBinding struct {
	ID       string // of SessionID
	Worker   kv.WorkerKey
	AnyRank  bool   // of the worker
	Sequence uint64 // nanoseconds since 1970, or the highest known to its writer plus one
	Writer   uint64
}

// sessionVersion orders the bindings of one session.
type sessionVersion struct{ sequence, writer uint64 }

func (v sessionVersion) compare(other sessionVersion) int {
	return cmp.Or(cmp.Compare(v.sequence, other.sequence), cmp.Compare(v.writer, other.writer))
}

// Sharing sends the router's changes to others. Its functions must not block;
// Booking and Session are called under the router's lock.
type Sharing struct {
	Writer   uint64 // identifies this router in its bindings
	Booking  func(kind string, b *Booking)
	Session  func(SessionBinding)
	Ejection func(w kv.WorkerKey, long time.Duration)
}

const (
	// maxSessionID bounds the name of a session sent to others, bytes, as
	// Dynamo does.
	maxSessionID = 256
	// sessionSentEvery is the part of its life after which it is sent again
	// that a session is still where it was.
	sessionSentEvery = 8
	// sequenceAhead is how far a binding's sequence may be ahead of the clock:
	// a later one would win forever.
	sequenceAhead = time.Hour
	// prefillMark ends the name of a session's place for prompts that are computed
	// apart.
	prefillMark = "\x00prefill"
)

// SessionID returns the id of a session among routers; empty: not shared. Without
// an owner it is the session's name.
func SessionID(owner, name string) string {
	id := name
	if owner != "" && name != "" {
		id = owner + "\x00" + name // which no header holds
	}
	if len(id)+len(prefillMark) > maxSessionID || !utf8.ValidString(id) {
		return ""
	}
	return id
}

// Share makes the router send its changes through with; nil: not sent.
func (r *Router) Share(with *Sharing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sharing = with
}

// share sends a change of the books to the other routers. The caller holds the
// lock.
func (b *Booking) share(kind string) {
	with := b.router.sharing
	if with == nil || b.remote || kind == ChangePrefill && b.Ended() {
		return // with its end a request's prefill is known to be over
	}
	b.shared = b.shared || kind == ChangeAdd
	if b.shared {
		with.Booking(kind, b)
	}
}

// BookRemote books the load of another router's booking. It returns nil for a
// worker that is not up here. Blocks of another size than the worker's do not count as active.
func (r *Router) BookRemote(change Change) *Booking {
	b := &Booking{
		router: r, remote: true, worker: change.Worker, prompt: max(0, change.Tokens), uncached: max(0, change.Uncached),
		loads: change.Loads, answeredWhole: change.AnsweredWhole, leg: change.Leg, lora: change.LoRA,
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at, up := r.fleet.target(b.worker)
	if !up {
		return nil
	}
	b.unit, b.blockSize = r.Unit(), int(r.fleet.targets[at].BlockSize)
	if change.BlockSize == b.blockSize && r.decider.traits.ActiveBlocks && r.settings.RouterTrackActiveBlocks {
		b.sequence = change.Sequence
	}
	r.fleet.loads.begin(b, r.now())
	return b
}

// shareSession sends the other routers the place of p's session, unless they know. The
// caller holds the lock.
func (r *Router) shareSession(p *prompt, s *session, now time.Time) {
	if r.sharing == nil || p.SessionID == "" || p.sessionGoes == SessionKept && now.Sub(s.sent) < r.settings.SessionTTL/sessionSentEvery {
		return
	}
	r.sessions.last = max(r.sessions.last+1, uint64(now.UnixNano()))
	s.version, s.sent = sessionVersion{r.sessions.last, r.sharing.Writer}, now
	id := p.SessionID
	if p.Leg == kv.LegPrefill {
		id += prefillMark
	}
	r.sharing.Session(SessionBinding{ID: id, Worker: s.worker, Sequence: s.version.sequence, Writer: s.version.writer})
}

// TakeSession records the worker to which another router has bound a session. It
// returns false if a later binding is known, the worker is not up here, or no
// request can name a session.
func (r *Router) TakeSession(b SessionBinding) (took bool) {
	if len(b.ID) == 0 || len(b.ID) > maxSessionID || !r.settings.NamesSessions() {
		return false
	}
	id, prefill := strings.CutSuffix(b.ID, prefillMark)
	owner, name, owned := strings.Cut(id, "\x00")
	if !owned {
		owner, name = "", owner
	}
	hash := r.sessions.hash(owner, name)
	if prefill {
		hash = ^hash
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if b.Sequence > uint64(now.Add(sequenceAhead).UnixNano()) {
		return false
	}
	r.sessions.last = max(r.sessions.last, b.Sequence)
	ranks := r.fleet.ranksOf(b.Worker.Worker)
	at := slices.IndexFunc(ranks, func(t kv.Target) bool { return b.AnyRank || t.Key == b.Worker })
	if at < 0 {
		return false
	}
	version := sessionVersion{b.Sequence, b.Writer}
	if known := r.sessions.at(hash, r.settings.SessionTTL, now); known != nil && version.compare(known.version) < 0 {
		return false
	}
	s := r.sessions.put(hash, &ranks[at], &r.settings.SessionSettings, now)
	s.version, s.sent = version, now
	return true
}
