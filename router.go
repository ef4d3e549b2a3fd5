package main

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// ErrNoWorker is returned while no worker that may serve the request is up.
var ErrNoWorker = errors.New("no worker is ready")

// Target is one place that requests can go to: a worker, or one rank of it.
type Target struct {
	Key        WorkerKey
	URL        string // without a slash at the end
	Ranks      int    // data-parallel ranks of the worker; with several, a request names its own
	Generation int    // counts the worker's incarnations, from 1
	Models     []string
	Adapters   []string // those of Models that are LoRA adapters
}

// Serves tells whether the target serves the model; an empty name means its
// default, and a target that names no models takes any.
func (t Target) Serves(model string) bool {
	return model == "" || len(t.Models) == 0 || slices.Contains(t.Models, model)
}

// Request is what the Router needs to know of one request. A prompt whose
// tokens could not be had has none, and is routed by load alone.
type Request struct {
	Tokens    []uint32 // the prompt, as far as its tokens say all about it
	Local     []uint64 // its local block hashes, where the caller has them instead of Tokens
	NumTokens int      // its whole length; 0: that of Tokens
	LoRA      string   // adapter, empty: none
	Salt      string   // cache salt, empty: none
	Model     string   // only workers that serve it; empty: any
	Exclude   []uint64 // workers that have failed this request
	Unbooked  bool     // the caller cannot tell when the request ends: book nothing
	Silent    bool     // the caller cannot tell when its first token comes
}

// Decision is the Router's answer: where the request goes and what it finds
// there.
type Decision struct {
	Target        Target
	Tokens        int // prompt length; 0: unknown
	Overlap       int // blocks of the prompt in the worker's cache that it can use
	OverlapTokens int // the same in tokens
	Booking       *Booking
	HashTime      time.Duration // spent on block hashes
	LookupTime    time.Duration // spent in the index
	ScheduleTime  time.Duration // spent on choosing and booking, the wait for the lock included
}

// Router chooses the worker of each request and keeps the books of what is in
// flight where. It owns the one lock under which requests are decided.
type Router struct {
	index     *Radix
	blockSize int
	now       func() time.Time
	scratch   sync.Pool // of *lookup
	active    bool      // the policy wants active blocks counted
	siblings  bool      // what requests in flight have computed by then counts as cached

	mu         sync.Mutex // guards all below
	targets    []Target   // the workers that are up, by key
	loads      *Loads
	policy     Policy
	random     *rand.Rand
	candidates []Candidate // reused by every decision
}

// needsActiveBlocks is a policy that reads Load.ActiveBlocks or
// Candidate.NewBlocks. For the others those are not counted and stay 0.
type needsActiveBlocks interface{ needsActiveBlocks() }

// expectsSiblings is a policy for which the blocks of requests in flight on a
// worker count as cached there: an engine computes prompts in the order in which
// they came, so a sibling sent after them will find them.
type expectsSiblings interface {
	needsActiveBlocks
	expectsSiblings()
}

// lookup is the memory of one walk of the index, used again by later ones.
type lookup struct {
	local   []uint64
	matches []Match
}

// NewRouter returns a router without workers. blockSize is in tokens and must
// be the engines'; seed is the source of all its chances.
func NewRouter(index *Radix, policy Policy, blockSize int, seed uint64) *Router {
	_, active := policy.(needsActiveBlocks)
	_, siblings := policy.(expectsSiblings)
	return &Router{
		index:     index,
		blockSize: blockSize,
		now:       time.Now,
		active:    active,
		siblings:  siblings,
		scratch:   sync.Pool{New: func() any { return new(lookup) }},
		loads:     NewLoads(),
		policy:    policy,
		random:    rand.New(rand.NewPCG(seed, seed)),
	}
}

// BlockSize is the number of tokens a block.
func (r *Router) BlockSize() int { return r.blockSize }

// Up lets requests go to t. A target with the same key is replaced.
func (r *Router) Up(t Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, found := slices.BinarySearchFunc(r.targets, t.Key, func(have Target, key WorkerKey) int { return have.Key.Compare(key) })
	if found {
		r.targets[at] = t
	} else {
		r.targets = slices.Insert(r.targets, at, t)
	}
}

// Down takes w out of the choice. What is booked on it stays booked until those
// requests end.
func (r *Router) Down(w WorkerKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.targets = slices.DeleteFunc(r.targets, func(t Target) bool { return t.Key == w })
	r.loads.Silence(w)
}

// Publish takes over the load that w reports.
func (r *Router) Publish(w WorkerKey, p Published) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.loads.Publish(w, p)
}

// Targets returns the workers that are up, by key.
func (r *Router) Targets() []Target {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.targets)
}

// Load returns the load of w.
func (r *Router) Load(w WorkerKey) Load {
	r.mu.Lock()
	defer r.mu.Unlock()
	load := r.loads.Get(w, r.now())
	load.Prefills = slices.Clone(load.Prefills)
	return load
}

// Serves tells whether a worker that is up serves the model, and whether any
// worker is up at all.
func (r *Router) Serves(model string) (serves, up bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.targets, func(t Target) bool { return t.Serves(model) }), len(r.targets) > 0
}

// Adapter returns model if it is the name of a LoRA adapter, else nothing.
func (r *Router) Adapter(model string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.ContainsFunc(r.targets, func(t Target) bool { return slices.Contains(t.Adapters, model) }) {
		return model
	}
	return ""
}

// Idlest returns the worker with the fewest requests in flight; not ok: none is
// up. Nothing is booked.
func (r *Router) Idlest() (t Target, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.targets) == 0 {
		return Target{}, false
	}
	now := r.now()
	return slices.MinFunc(r.targets, func(a, b Target) int {
		return r.loads.Get(a.Key, now).InFlight - r.loads.Get(b.Key, now).InFlight
	}), true
}

// Route chooses a worker for the request and books the request on it. Unless
// the request is Unbooked, the caller must end the decision's Booking. It fails
// with ErrNoWorker.
func (r *Router) Route(request Request) (Decision, error) {
	scratch := r.scratch.Get().(*lookup)
	defer r.scratch.Put(scratch)

	decision := Decision{Tokens: request.NumTokens}
	began := r.now()
	local := request.Local
	if len(request.Tokens) > 0 {
		decision.Tokens = max(request.NumTokens, len(request.Tokens))
		scratch.local = HashBlocks(scratch.local[:0], request.Tokens, r.blockSize, request.LoRA, request.Salt)
		local = scratch.local
	}
	hashed := r.now()
	scratch.matches = r.index.Match(local, scratch.matches[:0])
	lookedUp := r.now()
	var sequence []uint64
	if r.active {
		sequence = SequenceHashes(make([]uint64, 0, len(local)), local) // the booking keeps it
	}
	err := r.schedule(&decision, request, scratch.matches, sequence)
	scheduled := r.now()

	decision.HashTime = hashed.Sub(began)
	decision.LookupTime = lookedUp.Sub(hashed)
	decision.ScheduleTime = scheduled.Sub(lookedUp)
	return decision, err
}

// schedule chooses among the workers that are up and books, under the lock.
func (r *Router) schedule(decision *Decision, request Request, matches []Match, sequence []uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	usable := r.usableBlocks(decision.Tokens)
	r.candidates = r.candidates[:0]
	for _, t := range r.targets {
		if slices.Contains(request.Exclude, t.Key.Worker) || !t.Serves(request.Model) {
			continue
		}
		overlap := 0
		if i := slices.IndexFunc(matches, func(m Match) bool { return m.Worker == t.Key }); i >= 0 {
			overlap = min(matches[i].Blocks, usable)
		}
		c := Candidate{Target: t, Overlap: overlap, Load: r.loads.Get(t.Key, now)}
		if r.active {
			active := r.loads.Active(t.Key, sequence)
			c.NewBlocks = len(sequence) - active
			if r.siblings {
				c.Overlap = max(c.Overlap, min(active, usable))
			}
		}
		r.candidates = append(r.candidates, c)
	}
	if len(r.candidates) == 0 {
		return ErrNoWorker
	}
	query := Query{Now: now, Tokens: decision.Tokens, BlockSize: r.blockSize}
	chosen := r.candidates[r.policy.Choose(query, r.candidates, r.random)]
	decision.Target = chosen.Target
	decision.Overlap = chosen.Overlap
	decision.OverlapTokens = chosen.Overlap * r.blockSize
	r.loads.Bump(chosen.Target.Key)
	if !request.Unbooked {
		uncached := decision.Tokens - decision.OverlapTokens
		decision.Booking = &Booking{router: r, worker: chosen.Target.Key, prompt: decision.Tokens, uncached: uncached, sequence: sequence, silent: request.Silent}
		r.loads.Begin(decision.Booking, now)
	}
	return nil
}

// usableBlocks is how many cached blocks an engine can use of a prompt of that
// many tokens: it always computes the last token itself, so a prompt of exactly
// k blocks uses at most k − 1.
func (r *Router) usableBlocks(tokens int) int {
	if tokens <= 0 {
		return 0
	}
	return (tokens - 1) / r.blockSize
}

// Overlap is what one worker holds of a prompt.
type Overlap struct {
	Worker WorkerKey
	Blocks int
}

// Overlaps returns what every worker that is up holds of the prompt, without
// choosing, and the number of the prompt's full blocks.
func (r *Router) Overlaps(request Request) (overlaps []Overlap, blocks int) {
	local := request.Local
	if len(request.Tokens) > 0 {
		local = HashBlocks(nil, request.Tokens, r.blockSize, request.LoRA, request.Salt)
	}
	matches := r.index.Match(local, nil)
	for _, t := range r.Targets() {
		overlap := Overlap{Worker: t.Key}
		if i := slices.IndexFunc(matches, func(m Match) bool { return m.Worker == t.Key }); i >= 0 {
			overlap.Blocks = matches[i].Blocks
		}
		overlaps = append(overlaps, overlap)
	}
	return overlaps, len(local)
}

// Booking is one request's entry in the books. Its methods may be called any
// number of times, from any goroutine.
type Booking struct {
	router   *Router
	worker   WorkerKey
	sequence []uint64 // sequence hashes booked as active blocks
	prompt   int      // tokens
	uncached int      // those of them to be computed
	silent   bool     // nobody tells when its first token comes

	// All below is guarded by router.mu.
	sent     time.Time
	alone    bool  // no other prompt was to be computed when it was sent
	atSent   tally // of the worker
	computed bool  // the first token has come
	first    time.Time
	atFirst  tally
	ended    bool
}

func (b *Booking) prefill() Prefill {
	return Prefill{Tokens: b.uncached, Sent: b.sent, Silent: b.silent}
}

// FirstToken tells that the prompt has been computed.
func (b *Booking) FirstToken() {
	b.router.mu.Lock()
	defer b.router.mu.Unlock()
	b.prefillDone(b.router.now())
}

// End tells that the request has ended, however it did.
func (b *Booking) End() { b.end(0) }

// Finish tells that the request has ended with an answer of that many tokens.
func (b *Booking) Finish(output int) { b.end(output) }

func (b *Booking) end(output int) {
	b.router.mu.Lock()
	defer b.router.mu.Unlock()
	if b.ended {
		return
	}
	b.ended = true
	now := b.router.now()
	told := b.computed
	b.prefillDone(now)
	if policy, ok := b.router.policy.(learner); ok && told && !b.silent && output > 0 {
		policy.Learn(b.router.loads.Outcome(b, output, now))
	}
	b.router.loads.End(b, now)
}

func (b *Booking) prefillDone(now time.Time) {
	if !b.computed {
		b.computed = true
		b.router.loads.FirstToken(b, now)
	}
}
