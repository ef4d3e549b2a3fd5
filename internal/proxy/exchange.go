package proxy

import (
	"strconv"
	"time"

	"kvrouter/internal/policy"
	"kvrouter/internal/router"
)

// Usage is the token counts that a worker reports for a finished request.
type Usage struct {
	Known        bool // the worker reported them
	PromptTokens int
	OutputTokens int
	CachedKnown  bool // the worker reports cached tokens at all
	CachedTokens int
	CachedUntold bool // it does not, though the answer has a place for them
}

// Exchange describes one request and its answer, as far as they have come.
type Exchange struct {
	Route      string
	Status     int    // HTTP status, 499 where the client went away
	Worker     string // worker id, "none" where no worker answered
	Model      string // as the request names it
	Arrived    time.Time
	FirstChunk time.Time // of a stream; zero: none came
	Source     string    // of the prompt's tokens; empty: not a prompt
	Decision   router.Decision
	Usage      Usage
	Shared     *SharedRequest // with a prefill worker; nil: it is served whole
	Ending     policy.Ending  // of an answer that was relayed to its end

	// Receipts explain its decisions, where somebody wants to know: those of all
	// tries, of a shared one the prefill worker's first.
	Receipts []*router.Receipt

	finish   string      // why the answer ended, as the worker tells it; empty: it does not
	refusal  refusal     // what the status of a relayed answer says of its worker
	suspects []suspicion // workers that refused it, until one accepts it
	tried    bool        // a worker has failed it
	moved    bool        // it was taken off a stuck worker: that happens once
}

// WorkerLabel returns a worker's id as headers, logs and metrics show it.
func WorkerLabel(id uint64) string { return strconv.FormatUint(id, 10) }
