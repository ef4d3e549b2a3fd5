package router

import (
	"cmp"
	"fmt"
	"math"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// BusyThresholds are the limits beyond which a worker is busy: one of them is
// exceeded on all its ranks. Busy workers get no requests; if all are busy,
// requests are refused. The names are Dynamo's. nil: no threshold.
type BusyThresholds struct {
	ActiveDecodeBlocksThreshold      *float64 `group:"Routing" placeholder:"SHARE" help:"Reject requests while every worker uses more than this share of its KV cache, 0 to 1." json:"active_decode_blocks_threshold"`
	ActivePrefillTokensThreshold     *int     `group:"Routing" placeholder:"TOKENS" help:"Reject requests while every worker has more uncached prompt tokens pending than this." json:"active_prefill_tokens_threshold"`
	ActivePrefillTokensThresholdFrac *float64 `group:"Routing" placeholder:"NUMBER" help:"The same threshold in passes of the worker (--max-num-batched-tokens)." json:"active_prefill_tokens_threshold_frac"`
}

// Validate checks the numbers; its errors name the threshold.
func (t BusyThresholds) Validate() error {
	switch {
	case t.ActiveDecodeBlocksThreshold != nil && !(*t.ActiveDecodeBlocksThreshold >= 0 && *t.ActiveDecodeBlocksThreshold <= 1):
		return fmt.Errorf("active-decode-blocks-threshold %v: give a share of the KV cache, 0 to 1", *t.ActiveDecodeBlocksThreshold)
	case t.ActivePrefillTokensThreshold != nil && *t.ActivePrefillTokensThreshold < 0:
		return fmt.Errorf("active-prefill-tokens-threshold %d: give a number of tokens, at least 0", *t.ActivePrefillTokensThreshold)
	case t.ActivePrefillTokensThresholdFrac != nil && (!(*t.ActivePrefillTokensThresholdFrac >= 0) ||
		math.IsInf(*t.ActivePrefillTokensThresholdFrac, 1)):
		return fmt.Errorf("active-prefill-tokens-threshold-frac %v: give a number of at least 0", *t.ActivePrefillTokensThresholdFrac)
	}
	return nil
}

// exceeded reports whether a rank with that load is busy.
func (t BusyThresholds) exceeded(target *kv.Target, load *policy.Load) bool {
	if limit := t.ActiveDecodeBlocksThreshold; limit != nil {
		used := 0.0
		if load.Fresh {
			used = load.KVUsage
		}
		if target.TotalBlocks > 0 {
			used = max(used, float64(load.ActiveBlocks)/float64(target.TotalBlocks))
		}
		if used > *limit {
			return true
		}
	}
	tokens := float64(load.PrefillTokens)
	if limit := t.ActivePrefillTokensThreshold; limit != nil && tokens > float64(*limit) {
		return true
	}
	limit := t.ActivePrefillTokensThresholdFrac
	return limit != nil && target.MaxBatchedTokens > 0 && tokens > *limit*float64(target.MaxBatchedTokens)
}

// Set reports whether there is any threshold.
func (t BusyThresholds) Set() bool { return t != BusyThresholds{} }

// ChangeBusyThresholds sets the thresholds that are not nil in change, and returns
// all.
func (a *Admission) ChangeBusyThresholds(change BusyThresholds) BusyThresholds {
	r := a.router
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &a.thresholds
	t.ActiveDecodeBlocksThreshold = cmp.Or(change.ActiveDecodeBlocksThreshold, t.ActiveDecodeBlocksThreshold)
	t.ActivePrefillTokensThreshold = cmp.Or(change.ActivePrefillTokensThreshold, t.ActivePrefillTokensThreshold)
	t.ActivePrefillTokensThresholdFrac = cmp.Or(change.ActivePrefillTokensThresholdFrac, t.ActivePrefillTokensThresholdFrac)
	a.dispatch(r.now())
	return *t
}

// SetBusyThresholds sets all thresholds: nil ones are removed.
func (a *Admission) SetBusyThresholds(t BusyThresholds) {
	r := a.router
	r.mu.Lock()
	defer r.mu.Unlock()
	a.thresholds = t
	a.dispatch(r.now())
}

// BusyThresholds returns the thresholds.
func (a *Admission) BusyThresholds() BusyThresholds {
	a.router.mu.Lock()
	defer a.router.mu.Unlock()
	return a.thresholds
}
