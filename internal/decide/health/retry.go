package health

import (
	"fmt"
	"time"
)

// RetrySettings are the flags for retries before the first byte of an answer.
type RetrySettings struct {
	Retries     int     `group:"Failing workers" default:"2" help:"Maximum number of further workers to try when a worker fails before the first byte of its answer. 0 disables retries."`
	RetryBudget float64 `group:"Failing workers" default:"0.2" help:"Maximum retries as a share of the requests of the last 10 s; 10 more are allowed. Each client (API key, or address) has its share. Retries of requests on ejected workers are not counted."`
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
	// maxLettings is the maximum number of times that a request is aborted on a worker that
	// is down or stuck and sent again, in addition to its retries.
	maxLettings = 3
)

// Tries counts the retries of a request.
type Tries struct {
	Retries  int
	lettings int // aborts on workers that are down or stuck
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

// Again reports whether a client's request that failed on a worker is retried, and counts
// the retry. out means that the worker is ejected or paused: such a retry does not count
// against the budget. denied is the reason if only the budget prevents the retry, otherwise
// empty.
func (t *Tries) Again(b *Budget, client string, most int, out bool, now time.Time) (again bool, denied Denial) {
	if !t.Left(most) {
		return false, ""
	}
	if !out {
		if denied = b.Take(client, now); denied != "" {
			return false, denied
		}
	}
	t.Retries++
	return true, ""
}
