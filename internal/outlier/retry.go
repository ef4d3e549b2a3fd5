package outlier

import (
	"fmt"
	"sync"
	"time"
)

// RetrySettings are the flags for retries before the first byte of an answer.
type RetrySettings struct {
	Retries     int     `group:"Failing workers" default:"2" help:"Maximum number of further workers to try when a worker fails before the first byte of its answer. 0 disables retries."`
	RetryBudget float64 `group:"Failing workers" default:"0.2" help:"Maximum retries as a share of the requests of the last 10 s; 10 are always allowed. Retries of requests on ejected workers are not counted."`
}

// Validate checks the settings; its errors name the flag.
func (k RetrySettings) Validate() error {
	switch {
	case k.Retries < 0 || k.Retries > maxRetries:
		return fmt.Errorf("--retries %d: give 0 to %d", k.Retries, maxRetries)
	case !(k.RetryBudget >= 0 && k.RetryBudget <= maxRetries):
		return fmt.Errorf("--retry-budget %v: give a share of the requests, 0 to %d", k.RetryBudget, maxRetries)
	}
	return nil
}

const (
	maxRetries = 10
	// BudgetSeconds is the period over which retries are counted, and BudgetLeast
	// the number of retries in it that is always allowed, so that small loads are
	// retried too.
	BudgetSeconds, BudgetLeast = 10, 10
	// maxLettings is the number of times that one request is taken off a worker that is down or
	// stuck, beside its retries.
	maxLettings = 3
)

// Tries counts the retries of a request.
type Tries struct {
	Retries  int
	lettings int // it was taken off a worker that is down or stuck
}

// Left reports whether a failure of the next attempt may be retried; most is the
// maximum number of retries.
func (t *Tries) Left(most int) bool { return t.Retries < most }

// LetGo reports whether a request aborted on a worker that is down or stuck is
// retried, and counts the retry.
func (t *Tries) LetGo(most int) bool {
	if most == 0 || t.lettings == maxLettings {
		return false
	}
	t.lettings++
	return true
}

// Again reports whether a failed request is retried, and counts the retry. out
// means that the worker has been ejected: the retry does not count against the
// budget. denied means that only the budget prevents the retry.
func (t *Tries) Again(b *Budget, most int, out bool, now time.Time) (again, denied bool) {
	switch {
	case !t.Left(most):
		return false, false
	case !out && !b.Take(now):
		return false, true
	}
	t.Retries++
	return true, false
}

// Budget limits retries to a share of the requests, so that they do not multiply
// the load if all workers fail. It is safe for concurrent use; nil has no limit.
type Budget struct {
	share float64

	mu     sync.Mutex // guards window
	window [BudgetSeconds]struct {
		at                int64 // Unix time
		requests, retries int
	}
}

// NewBudget returns a budget with that share of the requests.
func NewBudget(share float64) *Budget { return &Budget{share: share} }

// Request counts a request.
func (b *Budget) Request(now time.Time) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.second(now).requests++
}

// Take counts a retry if the budget allows one.
func (b *Budget) Take(now time.Time) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	requests, retries := 0, 0
	for _, s := range b.window {
		if age := now.Unix() - s.at; age >= 0 && age < BudgetSeconds {
			requests, retries = requests+s.requests, retries+s.retries
		}
	}
	if float64(retries) >= BudgetLeast+b.share*float64(requests) {
		return false
	}
	b.second(now).retries++
	return true
}

// second returns the counts of this second. b is locked.
func (b *Budget) second(now time.Time) *struct {
	at                int64
	requests, retries int
} {
	s := &b.window[uint64(now.Unix())%BudgetSeconds]
	if s.at != now.Unix() {
		s.at, s.requests, s.retries = now.Unix(), 0, 0
	}
	return s
}
