// Package policy implements the policies that choose a worker for a request.
//
// Each policy is a type with Choose, its settings and their checks, and one line in
// New.
package policy

import (
	"fmt"
	"math/rand/v2"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/hints"
)

// Query is a request as policies see it.
type Query struct {
	Now         time.Time
	Tokens      int       // prompt length; 0: unknown
	BlockSize   int       // tokens a block
	FreePrefill bool      // prompt tokens are not counted as load
	Override    *Override // of settings; nil: none
	Leg         kv.Leg    // that a worker is wanted for
	Sequence    []uint64  // the prompt's sequence hashes; nil if the router does not count shared active blocks
	DryRun      bool      // nothing is sent: the policy learns nothing from the choice
	Prefix      hints.Prefix
	Pulling     int          // pulls of any worker that are under way
	Workers     int          // that are up for that leg, including excluded ones
	Backlog     float64      // cost of the requests of its class, and of those before it, that wait in a fair queue, for each worker, ms
	Retry       bool         // another worker has failed it before
	Adapter     string       // LoRA adapter; empty: none
	Class       fair.Class   // its place in a fair queue
	Decision    uint64       // number for the feedback to a judged policy; 0: there is none
	Explain     *Explanation // filled in by Choose; nil: not wanted
}

// Candidate is a worker that may serve the request. What most decisions read of it is its first 64
// of 128 bytes, a line of the processor's cache.
type Candidate struct {
	Target  *kv.Target
	Load    *Load // to be read only
	Overlap int   // leading blocks of the prompt in its device cache
	// NewBlocks is the number of the prompt's full blocks that no in-flight request
	// on it has; counted only for policies that request it.
	NewBlocks int
	// Network is the round trip to the worker; 0: the same to all candidates. A policy around
	// this one sets it; that of a cell is in its Load.
	Network time.Duration
	// Lower counts the blocks that continue Overlap in its lower tiers, which it loads
	// instead of computing them.
	Lower kv.LowerBlocks
	// Held is kv.Match.Held: more than Overlap if the first KV-cache group holds more leading
	// blocks than another one accepts, otherwise 0.
	Held int32
	Pull Pull // that it could begin with

	Doubtful bool // Lower, if it has any, may have been emptied without an event
	// TreeBlocks is the number of the worker's blocks in the index, 0 for a worker
	// without a match; counted only for policies that request it.
	TreeBlocks int

	// Indexed is Overlap as the index has it. Where blocks count as cached without an event, Overlap is the
	// part that is expected to be there.
	Indexed int
}

// Pull is what a worker can have of a prompt from another one instead of computing it.
type Pull struct {
	Blocks int // that continue Overlap and Lower; 0: there is no such worker
	From   kv.WorkerKey
	Ahead  int    // tokens that other requests pull from that worker now
	Source *Tiers // what is known of that worker; nil: nothing

	// Tokens are those of Blocks that are expected to come. Choose sets it on the
	// chosen candidate if the request is to pull; 0: it is to compute them.
	Tokens int
}

// Policy chooses one of at least one candidate and returns its index. It is called
// under the router's lock, one call at a time, so its state needs no lock.
type Policy interface {
	Choose(q Query, candidates []Candidate, random *rand.Rand) int
	Traits() Traits
}

// Traits are the counts that a policy needs. A policy's traits do not change.
type Traits struct {
	// ActiveBlocks requests Load.ActiveBlocks and Candidate.NewBlocks. For other
	// policies the router counts them only for requests with an ID, whose bookings
	// can be queried.
	ActiveBlocks bool
	// Siblings counts the blocks of in-flight requests on a worker as cached there:
	// an engine computes prompts in order of arrival, so a later sibling will find
	// them. It requires ActiveBlocks.
	Siblings bool
	// WholeMatch counts all matched blocks of a prompt as saved work, even those of
	// a complete match, of which an engine computes the last block again.
	WholeMatch bool
	// TreeBlocks requests Candidate.TreeBlocks.
	TreeBlocks bool
	// HostCredit and DiskCredit are how much of a block counts as computed that is loaded
	// from host memory, or from a slower tier: 0 to 1. Without either, lower tiers do not
	// count.
	HostCredit, DiskCredit float64
	// Staged counts the lower tiers as Dynamo does: one after the other, whether they
	// delivered what they were expected to or not, and none that is in doubt.
	Staged bool
	// Logged has each decision logged as information, with the lines of the Toolkit's processor.
	Logged bool
}

// Learner is a policy that learns from finished requests. Learn is called under the
// router's lock, as Choose.
type Learner interface{ Learn(o Outcome) }

// Outcome is the result of a request with a complete answer.
type Outcome struct {
	Worker     kv.WorkerKey
	Leg        kv.Leg
	Prompt     int           // tokens
	Uncached   int           // prompt tokens to be computed
	Loads      kv.TierTokens // prompt tokens that it was expected to load
	Pulled     int           // prompt tokens that it was expected to pull from another worker
	Loaded     bool          // the engine reports as many cached tokens as were expected
	Adapter    AdapterState  // of its LoRA adapter, when it was sent
	Tiers      *Tiers        // of its worker; nil: nothing is known
	Output     int           // tokens of the answer
	Alone      bool          // its worker had no other prompt to compute when it was sent
	FirstToken time.Duration // from when it was sent
	Decode     time.Duration // from the first token to the end
	Before     Meanwhile     // until its first token, it included
	During     Meanwhile     // from then on
}

// Judged is a policy that learns from the outcome of each of its decisions,
// including those without an answer. Judge is called under the router's lock, once
// for every decision with a number unless the process ends before; known is false
// if no decision with that number is pending.
type Judged interface {
	Judge(f Feedback) (verdict Verdict, known bool)
}

// Verdict is the policy's evaluation of a feedback; zero numbers: none.
type Verdict struct {
	Worker   kv.WorkerKey
	Baseline float64 // latency, or latency per token, that it was compared with, ms
	Reward   float64 // 0 to 1
}

// Feedback is the outcome of a decision.
type Feedback struct {
	Decision   uint64
	Worker     kv.WorkerKey
	Now        time.Time
	Ending     Ending
	Latency    time.Duration // from when the request was sent to its end
	FirstToken time.Duration // the same to its first token; 0: unknown
	TokensIn   int           // of the prompt; 0: unknown
	TokensOut  int           // of the answer; 0: unknown
	Finish     string        // why the answer ended, as the client or the engine reports it; empty: unknown
}

// Ending is the reason why a request is no longer in flight.
type Ending uint8

// Values of Ending.
const (
	Abandoned Ending = iota // the client disconnected, or the cause is unknown: not counted as a failure
	Failed                  // the worker failed
	Finished                // with a complete answer
)

// Meanwhile is the work of a worker in a period of time.
type Meanwhile struct {
	Prompts int     // that got their first token
	Passes  int     // that gave those: prompts may share one
	Tokens  int     // uncached ones of the prompts
	Context float64 // mean of Load.ContextTokens
}

// Aborted reports whether an answer's finish reason means that it was stopped on
// purpose.
func Aborted(finish string) bool { return finish == "abort" || finish == "cancelled" }

// New returns the policy of that name, of those in this package. Settings of other
// policies are ignored.
func New(name string, settings Settings) (Policy, error) {
	switch name {
	case "kv":
		return kvPolicy{settings.Resolved()}, nil
	case "standalone":
		return standalone{}, nil
	case "work":
		return NewWork(), nil
	case "cache-threshold":
		return &cacheThreshold{newCacheRouting(settings.CacheSettings)}, nil
	case "variance":
		return &variance{newCacheRouting(settings.CacheSettings)}, nil
	case "least-loaded":
		return leastLoaded{}, nil
	case "power-of-two":
		return powerOfTwo{}, nil
	case "round-robin":
		return &RoundRobin{}, nil
	case "random":
		return randomChoice{}, nil
	}
	return nil, fmt.Errorf("unknown policy %q", name)
}

// standalone is the rule of Dynamo's router_standalone example: the highest of
//
//	2·overlap − kv_usage − waiting/max(waiting)
//
// where overlap is the matched share of the prompt, up to 1, kv_usage and waiting
// are as the worker published them, the last term is 0 while none waits, and
// ties are broken at random. A worker's waiting counts the requests sent to it since
// it last published.
type standalone struct{}

func (standalone) Traits() Traits { return Traits{WholeMatch: true} }

func (standalone) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	longest := 0.0
	for i := range candidates {
		longest = max(longest, candidates[i].Load.each(candidates[i].Load.QueueLength()))
	}
	if q.Explain != nil {
		q.Explain.Rank("standalone", candidates, func(c *Candidate) Score { return standaloneTermsOf(&q, c, longest).explain() })
	}
	return Best(candidates, random, func(c *Candidate) float64 { return standaloneTermsOf(&q, c, longest).score() })
}

// standaloneTerms are the parts of a score.
type standaloneTerms struct{ overlap, usage, waiting float64 }

// standaloneTermsOf returns those of c; longest is the longest queue.
func standaloneTermsOf(q *Query, c *Candidate, longest float64) (t standaloneTerms) {
	if q.Tokens > 0 {
		t.overlap = 2 * float64(c.Overlap*q.BlockSize) / float64(q.Tokens)
	}
	if c.Load.Fresh {
		t.usage = c.Load.KVUsage
	}
	if longest > 0 {
		t.waiting = c.Load.each(c.Load.QueueLength()) / longest
	}
	return t
}

func (t standaloneTerms) score() float64 { return t.overlap - t.usage - t.waiting }

func (t standaloneTerms) explain() Score {
	return Score{Terms: []Term{{"overlap", t.overlap}, {"kv_usage", -t.usage}, {"waiting", -t.waiting}}, Total: t.score()}
}

// leastLoaded takes the worker with the fewest requests of ours in flight.
type leastLoaded struct{}

func (leastLoaded) Traits() Traits { return Traits{} }

func (leastLoaded) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	score := func(c *Candidate) float64 { return -c.Load.each(c.Load.InFlight) }
	if q.Explain != nil {
		q.Explain.Rank("least-loaded", candidates, func(c *Candidate) Score { return OneTerm("in_flight", score(c)) })
	}
	return Best(candidates, random, score)
}

// powerOfTwo draws two different workers and takes the one with fewer requests
// in flight.
type powerOfTwo struct{}

func (powerOfTwo) Traits() Traits { return Traits{} }

func (powerOfTwo) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	if len(candidates) == 1 {
		if q.Explain != nil {
			q.Explain.explainTwo(candidates, 0, 0)
		}
		return 0
	}
	a := random.IntN(len(candidates))
	b := random.IntN(len(candidates) - 1)
	if b >= a {
		b++
	}
	if q.Explain != nil {
		q.Explain.explainTwo(candidates, a, b)
	}
	inFlight := func(load *Load) float64 { return load.each(load.InFlight) }
	if inFlight(candidates[b].Load) < inFlight(candidates[a].Load) {
		return b
	}
	return a
}

// RoundRobin chooses workers in the order of their keys, separately for each leg.
// It continues after the last chosen worker, so that added and removed workers do
// not shift the turns of the others.
type RoundRobin struct {
	turns [kv.LegDecode + 1]struct {
		last    kv.WorkerKey
		started bool
	}
}

// Traits implements Policy: nothing is counted.
func (*RoundRobin) Traits() Traits { return Traits{} }

// Choose returns the candidate whose turn it is.
func (r *RoundRobin) Choose(q Query, candidates []Candidate, _ *rand.Rand) int {
	turn := &r.turns[q.Leg]
	first, next := 0, -1
	for i := range candidates {
		key := candidates[i].Target.Key
		if key.Compare(candidates[first].Target.Key) < 0 {
			first = i
		}
		if turn.started && turn.last.Compare(key) < 0 && (next < 0 || key.Compare(candidates[next].Target.Key) < 0) {
			next = i
		}
	}
	if next < 0 {
		next = first
	}
	if q.Explain != nil {
		q.Explain.explainTurns(candidates, next)
	}
	turn.last, turn.started = candidates[next].Target.Key, true
	return next
}

// randomChoice takes any worker.
type randomChoice struct{}

func (randomChoice) Traits() Traits { return Traits{} }

func (randomChoice) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	if q.Explain != nil {
		q.Explain.Rank("random", candidates, func(*Candidate) Score { return Score{Terms: []Term{}} })
	}
	return random.IntN(len(candidates))
}

// Best returns the index of the candidate with the highest score; of several one at
// random (reservoir sampling).
func Best(candidates []Candidate, random *rand.Rand, score func(*Candidate) float64) int {
	chosen, highest, ties := 0, score(&candidates[0]), 1
	for i := 1; i < len(candidates); i++ {
		switch s := score(&candidates[i]); {
		case s > highest:
			chosen, highest, ties = i, s, 1
		case s == highest:
			ties++
			if random.IntN(ties) == 0 {
				chosen = i
			}
		}
	}
	return chosen
}
