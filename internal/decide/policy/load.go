package policy

import (
	"time"

	"kvrouter/internal/base/kv"
)

// Published is a worker's load as reported by the worker.
type Published struct {
	At      time.Time // time of its arrival; zero: never
	Running int       // requests in the engine's batch
	Waiting int       // requests in the engine's queue
	KVUsage float64   // share of the KV cache in use, 0..1
}

// Load is one worker's load: its published load and this router's bookings
// on it.
//
// Policy work reads the first two lines of 64 bytes of each worker's, others the second and the
// third. Published lies across the end of the second one.
type Load struct {
	Prefills   []Prefill // the requests without a first token, as they were sent; to be read under the router's lock
	Cell       *Cell     // of a router whose workers are below it, likewise; nil: it is a worker
	Remote     int32     // those of InFlight that other routers sent and reported
	Fetching   int32     // of Prefills, those that load from lower tiers or pull
	FirstToken time.Time // when a first token last came from it; zero: never

	ContextTokens int            // prompt tokens of the requests in flight that decode
	AwaitedTokens int            // prompt tokens that other workers compute, of requests that will decode here
	InFlight      int            // requests sent and not yet ended
	Foreign       int            // requests in the engine by Published, where Fresh, beyond those that this router knows of
	Bumped        int32          // requests sent since the last Published
	Fresh         bool           // Published is recent enough to be used
	State         kv.EngineState // what a trainer has done to its engine
	Published

	PrefillTokens int // uncached prompt tokens of requests without a first token
	ActiveBlocks  int // blocks of requests in flight, shared ones once and by their weights; see Traits
	Fill          int // requests that its engine runs at once, as learned by a fair queue; 0: not known

	Tiers    *Tiers    // what is known of its lower tiers; to be read under the router's lock; nil: nothing
	Adapters *Adapters // what is known of its LoRA adapters, likewise; nil: nothing
}

// Prefill is a prompt that a worker computes, or will.
type Prefill struct {
	Sent          time.Time
	Tokens        int           // uncached ones
	AnsweredWhole bool          // its first token will not be reported
	Queued        int           // uncached ones of all that were to be computed there when it was sent, its own included
	Loads         kv.TierTokens // those of its tokens that are to be loaded from lower tiers
	Pulled        int           // those that are to be pulled from another worker
}

// requests is how many are on the worker, from all routers.
func (l *Load) requests() int { return l.InFlight + l.Foreign }

// Context returns the prompt tokens of the requests that decode on the worker, or will without
// computing them: those that this router knows of, and of a cell at least those that it reports.
func (l *Load) Context() int {
	own := l.ContextTokens + l.AwaitedTokens
	if l.Cell != nil {
		return max(own, l.Cell.Context)
	}
	return own
}

// QueueLength returns the number of requests waiting on the worker: its published
// queue plus the requests sent since then. For a worker that publishes nothing it
// returns InFlight.
func (l *Load) QueueLength() int {
	if !l.Fresh {
		return l.InFlight
	}
	return l.Waiting + int(l.Bumped)
}
