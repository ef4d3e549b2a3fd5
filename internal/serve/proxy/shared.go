package proxy

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// Response headers on the prefill leg.
const (
	HeaderPrefillWorker = "X-Kvrouter-Prefill-Worker-Id"
	HeaderPrefillTime   = "X-Kvrouter-Prefill-Ms"
	HeaderHandoverTime  = "X-Kvrouter-Handover-Ms"
)

// Results of disaggregated requests. The values are metric labels.
const (
	SharedOK              = "ok"
	sharedRecomputed      = "recomputed" // the prefill worker named no blocks: the decode worker computed the prompt again
	SharedRefused         = "refused"    // a worker rejected the request as invalid
	SharedPrefillFailed   = "prefill_failed"
	SharedPrefillTimeout  = "prefill_timeout"
	SharedHandoverTimeout = "handover_timeout"
	SharedDecodeFailed    = "decode_failed"
	SharedAbandoned       = "abandoned" // the client disconnected
)

// SharedRequest is the common state of both legs of a request. Its methods are safe
// for concurrent use.
type SharedRequest struct {
	Worker string // label of the prefill worker
	now    func() time.Time

	mu       sync.Mutex // guards the rest
	took     time.Duration
	computed time.Time     // the prefill leg has ended well
	usage    Usage         // as the prefill worker reports it
	handover time.Duration // from computed to the decode request; 0: none, or the legs run together
	first    time.Duration // from computed to the first byte of the answer; 0: none, or that came first
	lost     bool          // the prefill worker did not say where the blocks are
	started  bool          // the first byte of the answer goes to the client
	over     bool          // the wait has ended
	timer    *time.Timer   // of the wait for the decode worker's first event; nil: none
}

// note calls change with r locked.
func (r *SharedRequest) note(change func(*SharedRequest)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(r)
}

// begin is called right before the first byte of the answer goes to the client,
// with its headers.
func (r *SharedRequest) begin(header http.Header) {
	r.note(func(r *SharedRequest) {
		r.started = true
		if !r.computed.IsZero() {
			r.first = r.now().Sub(r.computed)
		}
		if r.timer != nil {
			r.timer.Stop()
		}
		header.Set(HeaderPrefillWorker, r.Worker)
		for name, d := range map[string]time.Duration{HeaderPrefillTime: r.took, HeaderHandoverTime: r.handover} {
			if d > 0 {
				header.Set(name, strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', 3, 64))
			}
		}
	})
}

// hasStarted reports whether the first byte of the answer goes to the client.
func (r *SharedRequest) hasStarted() (started bool) {
	r.note(func(r *SharedRequest) { started = r.started })
	return started
}

// firstByte returns the time from the prefill leg's end to the answer's first byte.
func (r *SharedRequest) firstByte() (first time.Duration) {
	r.note(func(r *SharedRequest) { first = r.first })
	return first
}

// stop ends the wait for the decode worker's first event.
func (r *SharedRequest) stop() {
	r.note(func(r *SharedRequest) {
		if r.over = true; r.timer != nil {
			r.timer.Stop()
		}
	})
}

// reported returns the prefill worker's report on its cache.
func (r *SharedRequest) reported() (known bool, tokens int) {
	r.note(func(r *SharedRequest) { known, tokens = r.usage.CachedKnown, r.usage.CachedTokens })
	return known, tokens
}

// result returns the result of a disaggregated request that ended with err, or with an
// answer of that HTTP status.
func (r *SharedRequest) result(ctx context.Context, status int, err error) string {
	var late *LegTimeout
	var refusal *prefillRefusal
	var prefill *PrefillFailure
	switch {
	case err != nil && ctx.Err() != nil, errors.Is(err, errOutrun):
		return SharedAbandoned
	case err == nil && status >= http.StatusInternalServerError:
		return SharedDecodeFailed
	case err == nil && status >= http.StatusBadRequest:
		return SharedRefused
	case err == nil && r.lost:
		return sharedRecomputed
	case err == nil:
		return SharedOK
	case errors.As(err, &late):
		return late.result
	case errors.As(err, &refusal), resent(err):
		return SharedRefused
	case errors.As(err, &prefill):
		return SharedPrefillFailed
	}
	return SharedDecodeFailed
}
