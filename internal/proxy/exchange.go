package proxy

import (
	"strconv"
	"time"

	"kvrouter/internal/policy"
	"kvrouter/internal/router"
)

// Usage is what a worker reports of a finished request; Known says that it did.
type Usage struct {
	Known        bool
	PromptTokens int
	OutputTokens int
	CachedKnown  bool // the worker reports cached tokens at all
	CachedTokens int
	CachedUntold bool // it does not, though the answer has a place for them
}

// Exchange is one request's way, as far as it came.
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
}

// WorkerLabel is a worker's id as headers, logs and metrics show it.
func WorkerLabel(id uint64) string { return strconv.FormatUint(id, 10) }
