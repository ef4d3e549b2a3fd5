package router

import (
	"slices"
	"sync/atomic"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
)

// Booking is one request that is booked on a worker. Its methods may be called any
// number of times, from any goroutine.
type Booking struct {
	router        *Router
	worker        kv.WorkerKey
	client        string   // whose request it is; empty: unknown
	generation    int      // of the worker
	trial         bool     // it shows whether an ejected worker is well again
	id            string   // empty: none
	sequence      []uint64 // sequence hashes booked as active blocks
	prompt        int      // tokens
	uncached      int      // those of them to be computed
	expected      int      // tokens of the answer; 0: unknown
	answeredWhole bool     // its first token is not reported
	leg           kv.Leg
	lora          string // adapter; empty: none
	remote        bool   // of another router
	decision      uint64 // of a judged policy; 0: none
	ended         atomic.Bool

	// All below is guarded by router.mu.
	shared       bool // sent to the other routers
	sent         time.Time
	queued       int    // uncached prompt tokens on the worker then, its own included
	fault        *fault // how the worker failed it; nil: not reported
	alone        bool   // no other prompt was to be computed when it was sent
	atSent       tally  // of the worker
	computed     bool   // the first token has come
	first        time.Time
	atFirst      tally
	assumed      *radix.Assumed // what of it an approximate index counts as cached
	cached       int            // blocks of it that the engine found cached; -1: not reported
	outputs      int            // blocks of the answer
	outputWeight float64        // their total weight
	heard        time.Time      // time of the last message about it
	older, newer *Booking       // its neighbours in Loads, by that time
}

// Worker returns the worker that the request is booked on.
func (b *Booking) Worker() kv.WorkerKey { return b.worker }

// Ended reports whether the booking has ended: its request ended, or the
// booking was not mentioned for BookingExpiry.
func (b *Booking) Ended() bool { return b.ended.Load() }

// prefill returns the booking as policies see prompts that wait for their first
// token.
func (b *Booking) prefill() policy.Prefill {
	return policy.Prefill{Tokens: b.uncached, Queued: b.queued, Sent: b.sent, AnsweredWhole: b.answeredWhole}
}

// FirstToken notes that the prompt has been computed.
func (b *Booking) FirstToken() {
	r := b.router
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if !b.computed {
		r.answerBegins(b, now)
	}
	r.prefillDone(b, now)
	r.loads.heard(b, now)
}

// OutputBlock adds a block to the request's answer. With a decayFraction, 0 to 1,
// each block that only this request has counts that much from now on: the less is
// to come, the sooner the blocks are free.
func (b *Booking) OutputBlock(decayFraction *float64) {
	r := b.router
	r.mu.Lock()
	defer r.mu.Unlock()
	if b.ended.Load() {
		return
	}
	r.loads.outputBlock(b, decayFraction)
	r.loads.heard(b, r.now())
}

// Generated sets the answer's tokens so far and books the blocks that they have
// begun. These blocks count less as the answer nears its expected length.
func (b *Booking) Generated(tokens int) {
	r := b.router
	r.mu.Lock()
	defer r.mu.Unlock()
	var share *float64
	if b.expected > 0 {
		fraction := max(0, 1-float64(tokens)/float64(b.expected))
		share = &fraction
	}
	blocks := func(tokens int) int { return (tokens + r.blockSize - 1) / r.blockSize }
	for want := blocks(b.prompt+tokens) - blocks(b.prompt); b.outputs < want && !b.ended.Load(); {
		r.loads.outputBlock(b, share)
		r.loads.heard(b, r.now())
	}
}

// Cached sets how many of the prompt's tokens the engine found in its cache, as its
// answer says. It has no effect after the end.
func (b *Booking) Cached(tokens int) {
	b.router.mu.Lock()
	defer b.router.mu.Unlock()
	if b.ended.Load() {
		return
	}
	b.cached = tokens / b.router.blockSize
	b.router.loads.of(b.worker).reportsCached = true
}

// CachedUnreported notes that the answer reports its tokens but no cached ones, by
// an API that has a place for them. vLLM leaves it empty where there were none
// (and, unless --enable-prompt-tokens-details is set, always): so from a worker
// that has reported some before it means none, and CachedUnreported returns true.
func (b *Booking) CachedUnreported() (none bool) {
	b.router.mu.Lock()
	defer b.router.mu.Unlock()
	if b.ended.Load() || !b.router.loads.of(b.worker).reportsCached {
		return false
	}
	b.cached = 0
	return true
}

// End ends the booking of a request without an answer whose worker is not at fault.
func (b *Booking) End() { b.end(policy.Abandoned) }

// Fail ends the booking of a request that its worker failed.
func (b *Booking) Fail() { b.end(policy.Failed) }

// Finish ends the booking of a request with an answer of that many tokens; 0:
// unknown.
func (b *Booking) Finish(output int) { b.FinishAs(output, "") }

// FinishAs is Finish with the engine's finish reason.
func (b *Booking) FinishAs(output int, reason string) {
	r := b.router
	r.mu.Lock()
	defer r.unlock()
	r.finishAs(b, policy.Finished, output, reason, r.now())
}

// Free notes that the request has ended, but not how. One whose first token has
// come counts as finished; of others nothing is known, since a worker that
// fails at once is freed at once.
func (b *Booking) Free() {
	r := b.router
	r.mu.Lock()
	defer r.unlock()
	how := policy.Abandoned
	if b.computed {
		how = policy.Finished
	}
	r.finish(b, how, 0, r.now())
}

// Report ends the booking with the feedback of a client that forwarded the request
// itself. f.TokensIn may be 0. known means that a judged policy still waited for the
// feedback; verdict is its result.
func (b *Booking) Report(f policy.Feedback) (verdict policy.Verdict, known bool) {
	r := b.router
	r.mu.Lock()
	defer r.unlock()
	f.Decision, f.Worker, f.Now = b.decision, b.worker, r.now()
	if f.TokensIn == 0 {
		f.TokensIn = b.prompt
	}
	if p, is := r.policy.(policy.Judged); is && !b.ended.Load() {
		verdict, known = p.Judge(f)
		b.decision = 0 // it has been judged
	}
	r.finish(b, f.Ending, f.TokensOut, f.Now)
	return verdict, known
}

// end ends the booking without an answer.
func (b *Booking) end(how policy.Ending) {
	r := b.router
	r.mu.Lock()
	defer r.unlock()
	r.finish(b, how, 0, r.now())
}

// finish is finishAs without a reason.
func (r *Router) finish(b *Booking, how policy.Ending, output int, now time.Time) {
	r.finishAs(b, how, output, "", now)
}

// finishAs takes b off the books, unless it is already, with an answer of that many
// tokens (0: unknown) which ended for that reason (empty: unknown). The caller holds
// the lock.
func (r *Router) finishAs(b *Booking, how policy.Ending, output int, reason string, now time.Time) {
	if b.ended.Load() {
		return
	}
	b.ended.Store(true)
	r.judge(b, how, now)
	told := b.computed
	r.prefillDone(b, now)
	if told && !b.answeredWhole && output > 0 {
		outcome := r.loads.outcome(b, output, now)
		if learner, ok := r.policy.(policy.Learner); ok {
			learner.Learn(outcome)
		}
		if r.forecast != r.policy {
			r.forecast.Learn(outcome)
		}
	}
	if judged, ok := r.policy.(policy.Judged); ok && b.decision != 0 {
		f := policy.Feedback{Decision: b.decision, Worker: b.worker, Now: now, Ending: how, Latency: now.Sub(b.sent), TokensIn: b.prompt, TokensOut: output, Finish: reason}
		if told && !b.answeredWhole {
			f.FirstToken = b.first.Sub(b.sent)
		}
		judged.Judge(f)
	}
	r.loads.end(b, now)
	if how == policy.Failed {
		b.assumed.Fail()
	} else {
		b.assumed.End((b.prompt+output)/r.blockSize-b.prompt/r.blockSize, b.cached)
	}
	r.share(ChangeFree, b)
	r.dispatch(now)
}

// prefillDone notes that b's prompt has been computed, unless it is known. The
// caller holds the lock.
func (r *Router) prefillDone(b *Booking, now time.Time) {
	if !b.computed {
		b.computed = true
		r.loads.firstToken(b, now)
		r.share(ChangePrefill, b)
		r.dispatch(now)
	}
}

const (
	// BookingExpiry is the time after which a booking without a message counts
	// as forgotten.
	BookingExpiry = time.Hour
	// expiryEvery is the least time between two searches for such bookings.
	expiryEvery = 30 * time.Second
)

// expire ends the bookings that were forgotten. It runs with every decision and
// every look at the books, so it needs no clock of its own.
func (r *Router) expire(now time.Time) {
	if now.Sub(r.expired) < expiryEvery {
		return
	}
	r.expired = now
	for b := r.loads.oldest; b != nil && now.Sub(b.heard) >= BookingExpiry; b = r.loads.oldest {
		if b.id == "" && !b.remote { // its owner ends it; a stream may be longer than that
			r.loads.heard(b, now)
			continue
		}
		r.finish(b, policy.Abandoned, 0, now)
	}
}

// Booking returns the booking under that id, or nil.
func (r *Router) Booking(id string) *Booking {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expire(r.now())
	return r.loads.booking(id)
}

// WorkerLoad is the load of one worker, now or with one more request.
type WorkerLoad struct {
	Key                    kv.WorkerKey
	PotentialPrefillTokens int
	PotentialDecodeBlocks  int
	ActiveRequests         int     // without the one more
	Role                   kv.Role // with which the worker is up, or was last; set by Loads
}

// Loads returns the load of every worker that is up or has bookings, by key.
func (r *Router) Loads() []WorkerLoad {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	r.expire(now)
	keys := r.loads.booked()
	for i := range r.targets {
		keys = append(keys, r.targets[i].Key)
	}
	slices.SortFunc(keys, kv.WorkerKey.Compare)
	var loads []WorkerLoad
	for _, key := range slices.Compact(keys) {
		load := r.loads.get(key, now)
		loads = append(loads, WorkerLoad{Key: key, PotentialPrefillTokens: load.PrefillTokens, PotentialDecodeBlocks: load.ActiveBlocks, ActiveRequests: load.InFlight, Role: r.loads.role(key)})
	}
	return loads
}

// PotentialLoads returns, by key, the load that each worker which may serve the
// request would have with it. It books nothing.
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
	r.snapshot(&p)
	for i := range r.targets {
		t := &r.targets[i]
		if !p.mayUse(t) {
			continue
		}
		var c policy.Candidate
		r.candidate(&c, &p, i, now)
		load := WorkerLoad{Key: t.Key, PotentialPrefillTokens: c.Load.PrefillTokens, PotentialDecodeBlocks: c.Load.ActiveBlocks + c.NewBlocks, ActiveRequests: c.Load.InFlight}
		if r.tracksPrefill(&p) {
			load.PotentialPrefillTokens += p.tokens - c.Overlap*r.blockSize
		}
		loads = append(loads, load)
	}
	return loads
}
