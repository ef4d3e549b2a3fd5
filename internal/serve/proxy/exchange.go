package proxy

import (
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/tracing"
)

// Usage is the token counts that a worker reports for a finished request.
type Usage struct {
	Known        bool // the worker reported them
	PromptTokens int
	OutputTokens int
	CachedKnown  bool // the worker reports cached tokens at all
	CachedTokens int
	CachedByTier kv.TierTokens // of CachedTokens; all 0: the worker does not report tiers
	CachedUntold bool          // it does not, though the answer has a place for them
	Partial      bool          // it may have computed more prompt tokens than are counted
}

// Exchange describes one request and its answer so far.
type Exchange struct {
	ID         string // X-Request-Id
	Route      string
	Status     int    // HTTP status; 499: the client disconnected
	Worker     string // name of the worker; kv.NoWorker: none answered
	Model      string // as the request names it
	Arrived    time.Time
	FirstChunk time.Time // of a stream; zero: none so far
	Source     string    // of the prompt's tokens; empty: not a prompt
	Decision   router.Decision
	Usage      Usage
	Shared     *SharedRequest // disaggregated; nil: aggregated
	Ending     policy.Ending  // of an answer that was relayed completely
	Trusted    bool           // its client's trace context is followed
	Refused    error          // why no worker may take it; nil: one may
	Served     string         // Model, if it is one that is served: clients make up names, which are no labels
	Reached    bool           // a worker may have got it
	Prepared   time.Duration  // until the prompt was known, without the wait for a worker
	Below      Below          // what a router below this one has decided
	Serial     uint64         // number of the request in the dashboard's list; 0: none

	Request *router.Request // as routed; nil: not routed, as with a dry run
	Default bool            // it is for the default model

	// Receipts explain its decisions, if requested: of all attempts, of a
	// disaggregated one the prefill worker's first.
	Receipts []*router.Receipt

	Trace *tracing.Request // nil: it is not traced

	last     *judged     // of an answer that was continued: as its last worker had it; nil: it was not
	finish   string      // why the answer ended, as the worker reports it; empty: it does not
	refusal  refusal     // meaning of a relayed answer's status for its worker
	suspects []suspicion // workers that refused it, until one accepts it
	tried    bool        // a worker has failed it
}

// judged is a decision with the usage that it predicted.
type judged struct {
	decision router.Decision
	usage    Usage
}

// Predicted returns the decision that predicted the cached tokens of the usage beside it. Of an answer
// that was continued, both are those of its last worker, whose prompt had what was answered before.
func (x *Exchange) Predicted() (*router.Decision, *Usage) {
	if x.last != nil {
		return &x.last.decision, &x.last.usage
	}
	return &x.Decision, &x.Usage
}

// leg is the part of the request done by the worker that answers.
func (x *Exchange) leg() kv.Leg {
	if x.Shared != nil {
		return kv.LegDecode
	}
	return kv.LegWhole
}

// EndTrace ends the trace of a finished exchange.
func (x *Exchange) EndTrace(now time.Time) {
	if x.Trace == nil {
		return
	}
	o := tracing.Outcome{
		At: now, Status: x.Status, Model: x.Model, Worker: x.Worker, Finish: x.finish, FirstToken: x.FirstChunk,
		UsageKnown: x.Usage.Known, InputTokens: x.Usage.PromptTokens, OutputTokens: x.Usage.OutputTokens,
		CachedKnown: x.Usage.CachedKnown, CachedTokens: x.Usage.CachedTokens, PredictedTokens: x.Decision.OverlapTokens,
	}
	if x.Shared != nil {
		o.Prefill = x.Shared.Worker
	}
	x.Trace.End(x.Arrived, o)
}
