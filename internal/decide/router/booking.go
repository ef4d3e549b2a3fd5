package router

import (
	"slices"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
)

// Booking is the load of one request on a worker. Its methods may be called any
// number of times, from any goroutine.
type Booking struct {
	router        *Router
	worker        kv.WorkerKey
	client        string         // whose request it is; empty: unknown
	generation    int            // of the worker
	trial         bool           // it shows whether an ejected worker is well again
	id            string         // empty: none
	sequence      []uint64       // sequence hashes booked as active blocks
	unit          int            // tokens of the blocks in which it is counted
	blockSize     int            // tokens of the worker's blocks
	prompt        int            // tokens
	text          bool           // it is counted in words of its text
	uncached      int            // those of them to be computed
	device        int            // blocks that the worker was expected to find on its device
	lower         kv.LowerBlocks // blocks that it was expected to load
	loads         kv.TierTokens  // the same in tokens
	doubt         uint32         // the number of the doubt about its lower tiers; 0: none
	sure          kv.LowerBlocks // those of lower that are then still there
	pull          policy.Pull    // what it is to pull from another worker; Tokens 0: nothing
	expected      int            // tokens of the answer; 0: unknown
	promised      time.Duration  // predicted time to first token, of a cell, without its lateness
	answeredWhole bool           // its first token is not reported
	asks          Work
	leg           kv.Leg
	moves         bool             // its request's session moves to its worker with the pair
	lora          string           // adapter; empty: none
	adapters      *policy.Adapters // those of the worker's incarnation, if it has one
	adapter       policy.AdapterState
	remote        bool   // of another router
	decision      uint64 // of a judged policy; 0: none
	ended         atomic.Bool

	charge  *fair.Charge[*waiter] // of its tenant; nil: the queue is not fair
	price   price                 // of its tokens then
	expects float64               // tokens of its answer that were predicted

	// All below is guarded by router.mu.
	shared       bool // sent to the other routers
	pulled       policy.PullResult
	pulledBlocks int // that came
	sent         time.Time
	queued       int    // uncached prompt tokens on the worker then, its own included
	fault        *fault // how the worker failed it; nil: not reported
	alone        bool   // no other prompt was to be computed when it was sent
	atSent       tally  // of the worker
	computed     bool   // the first token has come
	first        time.Time
	atFirst      tally
	assumed      *radix.Assumed // what of it an approximate index counts as cached
	presumed     int            // tokens of it that counted as cached when it was sent
	cached       int            // blocks of it that the engine found cached; -1: not reported
	outputs      int            // blocks of the answer
	outputWeight float64        // their total weight
	answered     int            // tokens of the answer, as reported by Answered
	heard        time.Time      // time of the last message about it
	older, newer *Booking       // its neighbours in loads, by that time
}

// Worker returns the worker of the booking.
func (b *Booking) Worker() kv.WorkerKey { return b.worker }

// Ended reports whether the booking has ended: its request ended, or it had no
// update for BookingExpiry.
func (b *Booking) Ended() bool { return b.ended.Load() }

// prefill returns the booking as policies see prompts that wait for their first
// token.
func (b *Booking) prefill() policy.Prefill {
	return policy.Prefill{
		Tokens: b.uncached, Queued: b.queued, Loads: b.loads, Pulled: b.pull.Tokens, Sent: b.sent, AnsweredWhole: b.answeredWhole,
	}
}

// locked runs f with the router's lock held, which guards the booking.
func (b *Booking) locked(f func(r *Router, now time.Time)) {
	r := b.router
	r.mu.Lock()
	defer r.unlock()
	f(r, r.now())
}

// FirstToken records that the prompt has been computed.
func (b *Booking) FirstToken() {
	b.locked(func(r *Router, now time.Time) {
		if !b.computed {
			b.answerBegins(now)
			b.prefillDone(now)
			r.Admission.dispatch(now)
		}
		r.fleet.loads.heard(b, now)
	})
}

// OutputBlock adds a block to the request's answer. With a decayFraction, 0 to 1,
// each block that only this request uses counts with that weight from now on: the
// shorter the remaining answer, the sooner its blocks are free.
func (b *Booking) OutputBlock(decayFraction *float64) {
	b.locked(func(r *Router, now time.Time) {
		if !b.ended.Load() {
			r.fleet.loads.outputBlock(b, decayFraction)
			r.fleet.loads.heard(b, now)
		}
	})
}

// Generated sets the answer's tokens so far and books their blocks. The weight of
// these blocks falls as the answer approaches its expected length.
func (b *Booking) Generated(tokens int) {
	r := b.router
	r.mu.Lock()
	defer r.mu.Unlock()
	var share *float64
	if b.expected > 0 {
		fraction := max(0, 1-float64(tokens)/float64(b.expected))
		share = &fraction
	}
	blocks := func(tokens int) int { return (tokens + b.blockSize - 1) / b.blockSize }
	for want := blocks(b.prompt+tokens) - blocks(b.prompt); b.outputs < want && !b.ended.Load(); {
		r.fleet.loads.outputBlock(b, share)
		r.fleet.loads.heard(b, r.now())
	}
}

// Cached sets the number of cached prompt tokens that the answer reports, and those of
// each tier; all 0: it does not report them. It has no effect after the end.
func (b *Booking) Cached(tokens int, tiers kv.TierTokens) {
	b.router.mu.Lock()
	defer b.router.mu.Unlock()
	if b.ended.Load() {
		return
	}
	b.came(tokens/b.unit, tiers)
	b.router.fleet.loads.of(b.worker).reportsCached = true
}

// came notes how many blocks of the prompt the engine found cached, and teaches the
// worker's tiers. Answers with fewer blocks than the device was to have say nothing
// about the tiers behind it. The caller holds the lock.
func (b *Booking) came(blocks int, tiers kv.TierTokens) {
	first := b.cached < 0
	b.cached = blocks
	if first && b.pull.Tokens > 0 {
		b.pullCame(blocks, b.router.now())
	}
	if !first || b.lower == (kv.LowerBlocks{}) || b.leg == kv.LegDecode || blocks < b.device {
		return
	}
	known := b.router.fleet.loads.of(b.worker).tiers()
	if tiers.Total()/b.unit == blocks && blocks > 0 {
		known.CameFrom(b.lower, tiers, b.unit)
	} else {
		known.Came(b.lower, blocks-b.device)
	}
	if b.doubt != 0 {
		settled := radix.Setting{Doubt: b.doubt, Held: blocks > b.device+b.sure.Total()}
		_, _ = b.router.index.Apply(b.worker, &radix.Change{Kind: radix.DoubtSettled, Set: &settled}) // cannot fail
	}
}

// CachedUnreported records that the answer reports its tokens but no cached ones,
// in an API that has a field for them. vLLM omits the field if there were none (and
// always, unless --enable-prompt-tokens-details is set). So if the worker has
// reported some before, it means none, and CachedUnreported returns true.
func (b *Booking) CachedUnreported() (none bool) {
	b.router.mu.Lock()
	defer b.router.mu.Unlock()
	if b.ended.Load() || !b.router.fleet.loads.of(b.worker).reportsCached {
		return false
	}
	b.came(0, kv.TierTokens{})
	return true
}

// End ends the booking of a request without an answer that is not a failure of its
// worker.
func (b *Booking) End() {
	b.locked(func(r *Router, now time.Time) { b.finish(policy.Abandoned, 0, now) })
}

// Finish ends the booking of a request with an answer of that many tokens; 0:
// unknown.
func (b *Booking) Finish(output int) { b.FinishAs(output, "") }

// FinishAs is Finish with the engine's finish reason.
func (b *Booking) FinishAs(output int, reason string) {
	b.locked(func(r *Router, now time.Time) { b.finishAs(policy.Finished, output, reason, now) })
}

// Free records that the request has ended with an unknown result. After its first
// token it counts as finished; before, nothing is concluded, because a request that
// fails at once is also freed at once.
func (b *Booking) Free() {
	b.locked(func(r *Router, now time.Time) {
		how := policy.Abandoned
		if b.computed {
			how = policy.Finished
		}
		b.finish(how, 0, now)
	})
}

// Report ends the booking with the feedback of a client that forwarded the request
// itself. f.TokensIn may be 0. known means that a judged policy was waiting for the
// feedback; verdict is its result.
func (b *Booking) Report(f policy.Feedback) (verdict policy.Verdict, known bool) {
	b.locked(func(r *Router, now time.Time) {
		f.Decision, f.Worker, f.Now = b.decision, b.worker, now
		if f.TokensIn == 0 {
			f.TokensIn = b.prompt
		}
		if p, ok := r.decider.policy.(policy.Judged); ok && !b.ended.Load() {
			verdict, known = p.Judge(f)
			b.decision = 0 // it has been judged
		}
		b.finish(f.Ending, f.TokensOut, now)
	})
	return verdict, known
}

// finish is finishAs without a reason.
func (b *Booking) finish(how policy.Ending, output int, now time.Time) {
	b.finishAs(how, output, "", now)
}

// finishAs takes b off the books, unless it is already, with an answer of that many
// tokens (0: unknown) which ended for that reason (empty: unknown). The caller holds
// the lock.
func (b *Booking) finishAs(how policy.Ending, output int, reason string, now time.Time) {
	r := b.router
	if b.ended.Load() {
		return
	}
	b.ended.Store(true)
	b.judge(how, output, now)
	if took := now.Sub(b.sent); how == policy.Finished && !b.remote {
		if b.computed && !b.answeredWhole {
			took = now.Sub(b.first)
		}
		r.Health.outliers.Wrote(b.attempt(), output, took)
	}
	if b.charge != nil {
		b.settle(how, output)
	}
	answered := b.computed
	b.prefillDone(now)
	if answered && !b.answeredWhole && output > 0 {
		outcome := r.fleet.loads.outcome(b, output, now)
		if learner, ok := r.decider.policy.(policy.Learner); ok {
			learner.Learn(outcome)
		}
		if r.decider.forecast != r.decider.policy {
			r.decider.forecast.Learn(outcome)
		}
	}
	if judged, ok := r.decider.policy.(policy.Judged); ok && b.decision != 0 {
		f := policy.Feedback{
			Decision: b.decision, Worker: b.worker, Now: now, Ending: how, Latency: now.Sub(b.sent),
			TokensIn: b.prompt, TokensOut: output, Finish: reason,
		}
		if answered && !b.answeredWhole {
			f.FirstToken = b.first.Sub(b.sent)
		}
		judged.Judge(f)
	}
	if b.pulled != policy.PullNone {
		r.fleet.loads.of(b.worker).tiers().PullEnded(b.pulled, b.pulledBlocks*b.unit)
	}
	r.fleet.loads.end(b, now)
	if how == policy.Failed || how == policy.Abandoned && !answered { // its prompt may not have been computed
		b.assumed.Fail()
	} else {
		cached := b.cached
		if cached > 0 {
			cached = cached * b.unit / b.blockSize
		}
		if b.text && cached > 0 { // tokens are no words
			cached = -1
		}
		if share, known := b.assumed.Came(cached); known && b.leg != kv.LegDecode {
			r.fleet.loads.of(b.worker).tiers().Assumed(share)
		}
		b.assumed.End((b.prompt+output)/b.blockSize-b.prompt/b.blockSize, cached)
	}
	b.share(ChangeFree)
	r.Admission.dispatch(now)
}

// prefillDone notes that b's prompt has been computed, unless it is known. The
// caller holds the lock.
func (b *Booking) prefillDone(now time.Time) {
	if !b.computed {
		b.computed = true
		if b.presumed > 0 {
			b.router.fleet.loads.of(b.worker).tiers().Expected(b.presumed, !b.ended.Load())
		}
		b.router.fleet.loads.firstToken(b, now)
		b.share(ChangePrefill)
	}
}

const (
	// BookingExpiry is the time after which a booking without updates expires.
	BookingExpiry = time.Hour
	// expiryEvery is the least time between two searches for such bookings.
	expiryEvery = 30 * time.Second
)

// expire ends the bookings that were forgotten. It runs with every decision and
// every look at the books, so it needs no clock of its own.
func (r *Router) expire(now time.Time) {
	if now.Sub(r.fleet.loads.expired) < expiryEvery {
		return
	}
	r.fleet.loads.expired = now
	for b := r.fleet.loads.oldest; b != nil && now.Sub(b.heard) >= BookingExpiry; b = r.fleet.loads.oldest {
		if b.id == "" && !b.remote { // its owner ends it; a stream may be longer than that
			r.fleet.loads.heard(b, now)
			continue
		}
		b.finish(policy.Abandoned, 0, now)
	}
}

// Booking returns the booking under that id, or nil.
func (r *Router) Booking(id string) *Booking {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expire(r.now())
	return r.fleet.loads.byID[id]
}

// WorkerLoad is the load of one worker, currently or with one more request.
type WorkerLoad struct {
	Key                    kv.WorkerKey
	PotentialPrefillTokens int
	PotentialDecodeBlocks  int
	ActiveRequests         int     // without the additional one
	Role                   kv.Role // current or last role of the worker; set by Loads
}

// Loads returns the load of every worker that is up or has bookings, by key.
func (r *Router) Loads() []WorkerLoad {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	r.expire(now)
	list := make([]WorkerLoad, 0, len(r.fleet.loads.byWorker))
	add := func(key kv.WorkerKey, entry *workerLoad) {
		load := asOf(entry.Load, now)
		list = append(list, WorkerLoad{
			Key: key, PotentialPrefillTokens: load.PrefillTokens, PotentialDecodeBlocks: load.ActiveBlocks,
			ActiveRequests: load.InFlight, Role: entry.role,
		})
	}
	for i := range r.fleet.targets { // by key
		add(r.fleet.targets[i].Key, r.fleet.targetLoads[i].workerLoad)
	}
	if len(list) == len(r.fleet.loads.byWorker) {
		return list
	}
	for key, entry := range r.fleet.loads.byWorker {
		if _, up := r.fleet.target(key); !up && entry.InFlight > 0 {
			add(key, entry)
		}
	}
	slices.SortFunc(list, func(a, b WorkerLoad) int { return a.Key.Compare(b.Key) })
	return list
}

// PotentialLoads returns, by key, the load with the request of each worker that may
// serve it. It books nothing.
func (r *Router) PotentialLoads(request Request) []WorkerLoad {
	scratch := r.scratch.Get().(*workspace)
	defer r.scratch.Put(scratch)
	request.QueryOnly = true
	p, _ := r.lookUp(request, scratch)
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	r.expire(now)
	var loads []WorkerLoad
	r.decider.snapshot(&p, now)
	for i := range r.fleet.targets {
		t := &r.fleet.targets[i]
		if !p.mayUse(t) {
			continue
		}
		var c policy.Candidate
		r.decider.candidate(&c, &p, i)
		load := WorkerLoad{
			Key: t.Key, PotentialPrefillTokens: c.Load.PrefillTokens, PotentialDecodeBlocks: c.Load.ActiveBlocks + c.NewBlocks,
			ActiveRequests: c.Load.InFlight,
		}
		if r.decider.tracksPrefill(&p) {
			load.PotentialPrefillTokens += r.decider.uncached(&p, &c)
		}
		loads = append(loads, load)
	}
	return loads
}
