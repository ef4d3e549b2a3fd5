// Package router chooses the worker for a request and counts the in-flight requests
// of each worker. It looks the prompt up in the index, collects the workers that
// may serve it, calls the policy and books the request, all under one lock, so that
// concurrent requests see each other. Every booking ends exactly once. The package
// does not depend on HTTP.
package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// Errors of Route and Book.
var (
	ErrNoWorker      = errors.New("no worker is ready")
	ErrBusy          = errors.New("all eligible workers are busy")
	ErrDuplicate     = errors.New("the request id is in use")
	ErrUnknownWorker = errors.New("no such worker")
)

// Request describes one request to the Router. A request without
// Tokens and Local is routed by load alone.
type Request struct {
	ID        string     // of its booking; empty: none. Only one booking at a time may have it
	Tokens    []uint32   // the leading tokens that fully determine their part of the prompt
	Local     []uint64   // its local block hashes, if the caller has them instead of Tokens
	Sequence  []uint64   // its sequence hashes, if the caller has them; must not change afterwards
	NumTokens int        // its complete length; 0: that of Tokens
	Text      bool       // Tokens are words of the prompt's text
	Media     [][]uint64 // of Tokens' blocks of Router.Unit, as kv.HashMediaBlocks takes them; nil: plain text
	Items     []kv.Media // the prompt's media, instead of Media
	BlockSize int        // tokens of the blocks of Local and Sequence; 0: Router.Unit
	Cached    *int       // cached tokens, 0 to its length, if the caller knows them; nil: as in the index
	LoRA      string     // adapter, empty: none
	Salt      string     // cache salt, empty: none
	Model     string     // only workers that serve it; empty: any
	Client    string     // whose request it is, for the blame where a worker fails it; empty: unknown

	Exclude  []uint64         // workers on which this request has failed
	Allowed  []uint64         // only these workers; nil: any
	Pinned   *kv.WorkerKey    // this worker or an error, never another
	Override *policy.Override // of settings, for this request
	Leg      kv.Leg           // only workers whose role permits it
	Kinds    kv.Kinds         // only workers of these kinds; none: any
	SGLang   bool             // only workers that run SGLang

	Work            // what it asks of its engine besides
	Beside     bool // it is sent elsewhere already: it does not wait, and no worker in doubt takes it
	Unanswered bool // also workers whose URL has never answered: the client sends the request itself

	PinnedPrefill *kv.WorkerKey // as Pinned, for the prefill leg of a disaggregated request

	Tenant    fair.Tenant   // who is charged for it in a fair queue
	Class     fair.Class    // its place there
	Deadline  time.Time     // by which its first token should come; zero: none
	TPOT      time.Duration // in which each further token should come; 0: none
	Sheddable bool          // it may be refused where that is predicted to come too late

	Prefix         hints.Prefix
	ExpectedOutput int           // tokens of the answer; 0: unknown
	PriorityJump   float64       // seconds of precedence in the queue
	StrictPriority uint32        // in the queue; higher values first
	Session        uint64        // of SessionOf; 0: none
	SessionID      string        // of SessionID: the session's id among routers; empty: not shared
	Versions       VersionPolicy // of the weights; zero: any
	WaitsForPaused bool          // a worker that rests and has most of its prompt is waited for, though others run
	Home           *uint64       // preferred worker, as of a session: used if healthy and no other answers sooner; nil: none
	Alternatives   int           // maximum number of further workers in the decision
	Pulls          bool          // the caller can name the worker a source to pull blocks from

	QueryOnly     bool // dry run: choose without a booking or any other change
	ChooseOnly    bool // the end of the request will not be reported: book nothing
	AnsweredWhole bool // its first token will not be reported
	Explain       bool // return the receipts of its decisions
}

// Work is what explains how long an engine is silent over a request, besides its prompt's
// uncached tokens.
type Work struct {
	Task     health.Task
	Output   int // maximum tokens of the answer; 0: no limit is known
	Unseen   int // prompt tokens beyond NumTokens, estimated
	Logprobs int // log probabilities in the answer
}

// Hashes appends to dst the local block hashes of the request's Tokens.
func (q *Request) Hashes(dst []uint64, blockSize int) []uint64 {
	return q.hashes(dst, blockSize, blockSize)
}

// Follow applies the client's hints to the request, except the session.
func (q *Request) Follow(h hints.Hints) {
	q.QueryOnly, q.Pinned, q.PinnedPrefill = h.Query, h.Pinned, h.PinnedPrefill
	q.PriorityJump, q.StrictPriority = h.PriorityJump, h.StrictPriority
	q.ExpectedOutput, q.Prefix = h.ExpectedOutput, h.Prefix
}

// Decision is the worker chosen for a request, with the cached part of its prompt.
type Decision struct {
	Target        kv.Target
	Tokens        int            // prompt length; 0: unknown
	BlockSize     int            // tokens of the blocks in which all below is counted
	Overlap       int            // blocks of the prompt in the worker's device cache that it can use
	Lower         kv.LowerBlocks // blocks that continue them in lower tiers
	OverlapTokens int            // Predicted in all
	Predicted     kv.TierTokens  // tokens that the engine is expected to find cached
	Guessed       kv.TierTokens  // tokens of Lower that may be gone without an event, not in Predicted
	Booking       *Booking
	Version       string      // of the weights of the worker; empty: unknown
	Alternatives  []kv.Target // fallbacks if Target is unreachable, best first
	Source        *kv.Target  // the worker from which Target is to pull blocks; nil: none

	Reachable int // prompt tokens that the eligible worker with the most of them is expected to find cached

	MatchedBlocks          int            // of the prompt in the worker's device cache, by the policy's reckoning
	MatchedLower           kv.LowerBlocks // that continue them in lower tiers, by the policy's reckoning
	EffectivePrefillTokens int            // prompt tokens to be computed, by the policy's reckoning
	PotentialDecodeBlocks  int            // active blocks of the worker once it has this prompt; 0: not counted
	Sequence               []uint64       // booked sequence hashes; must not be changed

	HashTime     time.Duration // spent on block hashes
	LookupTime   time.Duration // spent in the index
	SequenceTime time.Duration // spent on sequence hashes
	ScheduleTime time.Duration // spent on choosing and booking, the wait for the lock included
	QueueTime    time.Duration // spent in the queue, not part of the times above

	Receipts []*Receipt // explain it, if requested
}

// Settings are the settings of the Router, with Dynamo's names and
// defaults.
type Settings struct {
	SchedulingSettings
	RouterTrackOutputBlocks bool `group:"Routing" default:"false" negatable:"" help:"Also count the blocks of answers as they grow."`
	RecordDecisions         bool `group:"Requests" default:"false" help:"Add the explanation of the routing decision to each line of --record: the score terms of every worker and the reason of each exclusion."`

	ObjectiveSettings
	SessionSettings
	HoldSettings
	SaturationSettings
}

// SchedulingSettings are those that simulations use, too.
type SchedulingSettings struct {
	RouterTrackActiveBlocks  bool `group:"Routing" default:"true" negatable:"" help:"Count the prompt blocks of in-flight requests; shared blocks count once. Without it, policy kv uses prompt tokens only."`
	RouterTrackPrefillTokens bool `group:"Routing" default:"true" negatable:"" help:"Count the prompt tokens of requests without a first token."`
	RouterAssumeKVReuse      bool `name:"router-assume-kv-reuse" group:"Routing" default:"true" negatable:"" help:"Count a prompt block shared by several in-flight requests once; without it, once per request."`

	QueueSettings
	BusyThresholds
	health.Settings
}

// Validate checks the settings; its errors name the flag.
func (k Settings) Validate() error {
	if k.RouterTrackOutputBlocks && !k.RouterTrackActiveBlocks {
		return errors.New("--router-track-output-blocks adds to the active blocks: remove --no-router-track-active-blocks")
	}
	if k.Fair() && !k.RouterTrackPrefillTokens {
		return errors.New("--router-queue-policy fair counts prompt tokens: remove --no-router-track-prefill-tokens")
	}
	if err := k.BusyThresholds.Validate(); err != nil {
		return fmt.Errorf("--%w", err)
	}
	return cmp.Or(k.Settings.Validate(), k.ObjectiveSettings.validate(), k.QueueSettings.validate(), k.SessionSettings.validate(),
		k.HoldSettings.validate(k.RouterQueueLimit), k.SaturationSettings.validate())
}

// CountsPasses reports whether the unit of a setting is a pass of the worker.
func (k Settings) CountsPasses() bool {
	return k.ActivePrefillTokensThresholdFrac != nil || k.RouterQueueThreshold != nil
}

// Router chooses a worker for each request and counts the in-flight requests of each
// worker. It owns the lock under which requests are decided.
type Router struct {
	settings  Settings
	index     Index
	blockSize int
	now       func() time.Time
	names     *kv.Names
	log       *slog.Logger
	scratch   sync.Pool // of *workspace

	mu        sync.Mutex // guards all below, and their fields; the index's locks may be taken under it
	Health    *Health
	Admission *Admission
	Receipts  *Receipts
	fleet     fleet
	decider   decider
	sessions  *sessions
	sharing   *Sharing // with other routers; nil: none
}

// prompt is a request with the results of lookUp, which needs no lock.
type prompt struct {
	Request
	tokens    int        // its length; 0: unknown
	unit      int        // tokens of the blocks in which all else is counted
	views     []view     // in blocks of the workers' sizes, that of the unit first
	none      view       // for workers of other sizes
	matches   []kv.Match // by worker, in units
	next      int        // of matches, where matched continues
	matchedAt time.Time  // when they were looked up
	workers   int        // that are up for the leg, whether they may serve it or not
	reachable int        // units of it that some eligible worker has
	sources   [2]source  // the best workers to pull from; blocks 0: there is none
	counted   bool       // its blocks count as active
	shared    bool       // those that other requests have too count once

	seated      bool   // its candidates are those whose engine would run it at once, and others are not
	keeps       bool   // its candidates are those that are predicted to keep its objectives, and others are not
	stays       bool   // its session's worker is the only candidate for that reason
	sessionGoes string // what becomes of its session; empty: it has none, or nothing is decided

	decided func(Decision, error) // called once it need not wait any more; nil: the waiter is woken
}

// newBlocks is how many active blocks the view of the prompt has where no other request is.
func (p *prompt) newBlocks(v *view) int {
	switch {
	case !p.counted:
		return 0
	case p.shared:
		return len(v.sequence)
	}
	return len(v.local)
}

// Index is what a Router needs of an index: it looks prompts up, and settles doubts about lower
// tiers.
type Index interface {
	radix.Matcher
	radix.Applier
}

// Deps are the parts of a router.
type Deps struct {
	Index     Index
	Assumer   radix.Assumer // of Index, as NewIndex returns it; nil: it does not learn from decisions
	Policy    policy.Policy
	BlockSize int              // of engines that do not report theirs, tokens
	Seed      uint64           // of all random choices
	Names     *kv.Names        // of its workers; nil: they have none
	Log       *slog.Logger     // for ejections and, at debug level, decisions; nil: none
	Now       func() time.Time // nil: time.Now
}

// New returns a router without workers.
func New(settings Settings, deps Deps) *Router {
	if deps.Now == nil {
		deps.Now = time.Now
	}
	r := &Router{
		settings:  settings,
		index:     deps.Index,
		blockSize: deps.BlockSize,
		now:       deps.Now,
		names:     cmp.Or(deps.Names, new(kv.Names)),
		log:       deps.Log,
		scratch:   sync.Pool{New: func() any { return new(workspace) }},
		fleet:     fleet{loads: newLoads()},
		sessions:  newSessions(),
	}
	r.fleet.units.Store(unitsOf([]int{deps.BlockSize}))
	r.decider = newDecider(r, deps)
	r.Receipts = &Receipts{router: r}
	r.Admission = newAdmission(r)
	r.Health = &Health{router: r, outliers: health.New(settings.Settings), cordons: map[uint64]cordon{}}
	return r
}

// Index returns the index of the router's lookups.
func (r *Router) Index() Index { return r.index }

// Names returns the names of its workers.
func (r *Router) Names() *kv.Names { return r.names }

// Unit returns the number of tokens in the blocks in which workers are compared: that of the workers
// that are up if all have the same, else the greatest common divisor.
func (r *Router) Unit() int { return r.fleet.units.Load().unit }

// Route chooses a worker for the request and books the request on it. Unless the
// request is QueryOnly or ChooseOnly, the caller must end the decision's Booking.
// If all workers are at capacity, it waits until one has capacity or ctx is done.
// It fails with ErrNoWorker, ErrBusy, ErrQueueFull, ErrQueueTimeout, ErrShed, ErrDuplicate
// or the cause for which ctx ended.
func (r *Router) Route(ctx context.Context, request Request) (Decision, error) {
	scratch := r.scratch.Get().(*workspace)
	defer r.scratch.Put(scratch)
	p, decision := r.lookUp(request, scratch)
	return r.place(ctx, &p, decision)
}

// place is Route for a request that has been looked up: decision says how long
// that took.
func (r *Router) place(ctx context.Context, p *prompt, decision Decision) (Decision, error) {
	began := r.now()
	w, err := r.schedule(p, &decision)
	decision.ScheduleTime = r.now().Sub(began)
	if w == nil {
		r.Receipts.log(p, decision.Receipts)
		return decision, err
	}
	decided, err := r.Admission.wait(ctx, w)
	r.Receipts.log(p, decided.Receipts)
	decided.HashTime, decided.LookupTime = decision.HashTime, decision.LookupTime
	decided.SequenceTime, decided.ScheduleTime = decision.SequenceTime, decision.ScheduleTime
	return decided, err
}

// schedule chooses among the workers that are up and books, under the lock, or
// lets the request wait.
func (r *Router) schedule(p *prompt, d *Decision) (*waiter, error) {
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	r.expire(now)
	if r.taken(p) {
		return nil, ErrDuplicate
	}
	if r.Admission.fair != nil {
		r.Admission.dispatchFairly(now) // room may have come with time: who waits goes first
	}
	if err := r.decider.collect(p, now); err != nil {
		r.Receipts.refuse(p, d, err, now)
		return nil, err
	}
	waits := r.Admission.mustWait(p, now)
	if r.Admission.fair != nil && p.reserves() {
		r.Admission.learnReserve(p, waits, now)
	}
	if waits && p.Beside {
		return nil, ErrBusy
	}
	if waits {
		return r.Admission.enqueue(p, now)
	}
	r.choose(p, d, now)
	return nil, nil
}

// taken reports whether another request has the id under which p is to be booked,
// or waits for it.
func (r *Router) taken(p *prompt) bool {
	if p.ID == "" || p.QueryOnly || p.ChooseOnly {
		return false
	}
	taken := r.fleet.loads.byID[p.ID] != nil
	r.Admission.eachWaiting(func(w *waiter) { taken = taken || w.prompt.ID == p.ID })
	return taken
}

// query is p as policies see it.
func (d *decider) query(p *prompt, now time.Time) policy.Query {
	return policy.Query{
		Now: now, Tokens: p.tokens, BlockSize: p.unit, FreePrefill: !d.tracksPrefill(p), Override: p.Override,
		Leg: p.Leg, Sequence: p.views[0].sequence, DryRun: p.QueryOnly, Prefix: p.Prefix, Pulling: d.router.fleet.loads.pulling,
		Workers: p.workers, Retry: len(p.Exclude) > 0, Adapter: p.LoRA, Class: p.Class,
	}
}

// choose lets the policy choose among the candidates and books.
func (r *Router) choose(p *prompt, d *Decision, now time.Time) {
	query := r.decider.query(p, now)
	if r.Admission.fair != nil && r.Admission.fair.Len() > 0 {
		query.Backlog = r.Admission.fair.Waiting(p.Class) / float64(len(r.fleet.targets))
	}
	if _, ok := r.decider.policy.(policy.Judged); ok && !p.QueryOnly && !p.ChooseOnly {
		r.decider.decisions++
		query.Decision = r.decider.decisions
	}
	if p.Explain || r.Receipts.wanted(now) {
		query.Explain = &policy.Explanation{Decision: query.Decision}
	}
	p.seated = r.decider.preferSeats()
	r.decider.preferKeeping(p, &query)
	at := r.decider.policy.Choose(query, r.decider.candidates, r.decider.random)
	p.sessionGoes = r.sessionGoes(p, r.decider.candidates[at].Target, now)
	if query.Explain != nil {
		d.Receipts = []*Receipt{r.Receipts.explain(p, query.Explain, at, now)}
	}
	chosen := &r.decider.candidates[at]
	d.Target, d.Tokens, d.Version = *chosen.Target, p.tokens, r.fleet.loads.of(chosen.Target.Key).engine.version
	r.decider.predict(p, d, chosen)
	d.PotentialDecodeBlocks = chosen.Load.ActiveBlocks + chosen.NewBlocks
	d.Sequence = p.viewOf(int(chosen.Target.BlockSize)).sequence
	d.Alternatives = r.decider.alternatives(p, chosen.Target.Key, now)
	if p.QueryOnly {
		return
	}
	r.noteSession(p, chosen.Target, now)
	if p.ChooseOnly {
		r.fleet.loads.bump(chosen.Target.Key)
		r.decider.assume(chosen.Target, p).End(0, -1)
		return
	}
	d.Booking = r.book(p, chosen, now)
	d.Booking.decision, d.Booking.moves = query.Decision, p.movesLater()
	d.Sequence = d.Booking.sequence
}

// book enters p into the books of the candidate.
func (r *Router) book(p *prompt, c *policy.Candidate, now time.Time) *Booking {
	v := p.viewOf(int(c.Target.BlockSize))
	b := &Booking{
		router: r, worker: c.Target.Key, unit: p.unit, blockSize: int(c.Target.BlockSize), client: p.Client, id: p.ID, prompt: p.tokens, expected: p.ExpectedOutput,
		text: p.Text, sequence: v.sequence, answeredWhole: p.AnsweredWhole, asks: p.Work, leg: p.Leg, lora: p.LoRA,
		assumed: r.decider.assume(c.Target, p), cached: -1, generation: c.Target.Generation,
		trial: r.Health.outliers.Begin(c.Target.Key, p.Work.Logprobs, now),
	}
	if b.presumed = b.assumed.Expected() * b.blockSize; b.text || b.leg == kv.LegDecode {
		b.presumed = 0
	} else if b.presumed > 0 {
		r.fleet.loads.of(b.worker).tiers().Expect(b.presumed)
	}
	b.device, b.lower = r.decider.finds(p, c)
	b.loads = b.lower.Tokens(p.unit)
	if r.decider.doubted(p, c) {
		b.doubt = r.index.LowerOf(b.worker).Doubt
	}
	b.sure, _ = p.certain(c, b.device, b.lower)
	if c.Pull.Tokens > 0 {
		b.pull, b.pulled = c.Pull, policy.PullUnreported
	}
	if r.decider.tracksPrefill(p) {
		b.uncached = r.decider.uncached(p, c)
		if p.Cached != nil { // which need not be whole blocks
			b.uncached = p.tokens - *p.Cached
		}
	}
	if p.counted && !p.shared {
		b.sequence = make([]uint64, len(v.local))
		for i := range b.sequence {
			b.sequence[i] = r.decider.random.Uint64()
		}
	}
	if r.Admission.fair != nil {
		r.Admission.charge(b, p, c, now)
	}
	if c.Load.Cell != nil {
		query := policy.Query{Now: now, Tokens: p.tokens, BlockSize: p.unit, Leg: p.Leg, Class: p.Class}
		b.promised = r.decider.forecast.FirstToken(&query, c) - c.Load.Lateness(now)
	}
	r.fleet.loads.bump(b.worker)
	r.fleet.loads.begin(b, now)
	b.share(ChangeAdd)
	return b
}

// Book books the request on a given worker, which was chosen before or elsewhere.
// It fails with ErrUnknownWorker or ErrDuplicate.
func (r *Router) Book(request Request, worker kv.WorkerKey) (*Booking, error) {
	booking, _, err := r.bookOn(request, worker)
	return booking, err
}

// bookOn is Book that returns what is cached on the worker, too.
func (r *Router) bookOn(request Request, worker kv.WorkerKey) (*Booking, Decision, error) {
	var c policy.Candidate
	var d Decision
	scratch := r.scratch.Get().(*workspace)
	defer r.scratch.Put(scratch)
	p, _ := r.lookUp(request, scratch)
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	r.expire(now)
	at, found := r.fleet.target(worker)
	if !found {
		return nil, d, ErrUnknownWorker
	}
	if r.taken(&p) {
		return nil, d, ErrDuplicate
	}
	r.decider.snapshot(&p, now)
	r.decider.candidate(&c, &p, at)
	d.Target = *c.Target
	r.decider.predict(&p, &d, &c)
	return r.book(&p, &c, now), d, nil
}

// WithPolicy runs f with the router's policy, under its lock.
func (r *Router) WithPolicy(f func(policy.Policy)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(r.decider.policy)
}
