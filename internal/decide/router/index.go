package router

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
)

// IndexSettings holds the settings of the index. Settings of approximate indexes
// have Dynamo's names and defaults, those of prefix trees SGLang's.
type IndexSettings struct {
	NoKVEvents             bool     `group:"Index" name:"no-kv-events" help:"Use an approximate index for all workers instead of KV events, and start workers without event publishing. A prompt counts as cached on the worker it was routed to, until the worker's cache size (from /metrics) implies its eviction or the cached_tokens of an answer contradict it."`
	RouterTTLSecs          *float64 `group:"Index" name:"router-ttl-secs" placeholder:"SECONDS" help:"On workers without KV events: seconds since its last use for which a prompt counts as cached; on workers that report their cache size, less if the cache is full before. Default: 120 on workers that do not report it, no limit on others."`
	RouterMaxTreeSize      int      `group:"Index" name:"router-max-tree-size" default:"1048576" hidden:"" help:"On workers without KV events: maximum number of blocks that count as cached, over all workers that do not report their cache size."`
	RouterPruneTargetRatio float64  `group:"Index" name:"router-prune-target-ratio" default:"0.8" hidden:"" help:"Share of --router-max-tree-size that remains after it was exceeded; the least recently used blocks are evicted."`
	RouterPredictedTTLSecs float64  `group:"Index" name:"router-predicted-ttl-secs" default:"0" help:"With KV events: also count a prompt as cached on its worker for this many seconds after its answer, until its events arrive. 0 disables it. Policies work, cache-threshold and variance do so until the end of the answer."`
	PrefixSource           string   `group:"Index" placeholder:"events|approx" help:"Source of cached prefixes for policies cache-threshold and variance: events (the index of KV events) or approx (a tree of the prompts routed to each worker). Default: events; approx with --no-kv-events."`
	MaxTreeSize            int      `group:"Index" default:"16777216" hidden:"" help:"With --prefix-source approx: maximum number of tokens per worker tree; the least recently used are evicted. A block takes about 200 bytes."`
	EvictionInterval       float64  `group:"Index" default:"60" hidden:"" help:"Seconds between two evictions; a tree may grow to twice its size in between."`
	CacheCorrection        bool     `group:"Index" default:"true" negatable:"" help:"Without KV events: correct the index by the cached_tokens of answers. vLLM reports them with --enable-prompt-tokens-details, SGLang with --enable-cache-report."`
}

// Values of --prefix-source.
const (
	PrefixEvents = "events"
	PrefixApprox = "approx"
)

// Validate checks the settings together with the policies that may run.
func (c IndexSettings) Validate(policies ...string) error {
	switch {
	case c.RouterTTLSecs != nil && (!(*c.RouterTTLSecs > 0) || *c.RouterTTLSecs > maxIndexTTL):
		return fmt.Errorf("--router-ttl-secs %v: give more than 0 and at most %g", *c.RouterTTLSecs, maxIndexTTL)
	case c.RouterTTLSecs != nil && !slices.ContainsFunc(policies, func(name string) bool { return !c.HasTrees(name) }):
		return errors.New("--router-ttl-secs does not bound the prefix trees of --policy cache-threshold and variance: give --max-tree-size " +
			"and --eviction-interval")
	case c.RouterMaxTreeSize < 1:
		return fmt.Errorf("--router-max-tree-size %d: give at least 1 block", c.RouterMaxTreeSize)
	case !(c.RouterPruneTargetRatio >= 0 && c.RouterPruneTargetRatio <= 1):
		return fmt.Errorf("--router-prune-target-ratio %v: give a share from 0 to 1", c.RouterPruneTargetRatio)
	case !(c.RouterPredictedTTLSecs >= 0) || c.RouterPredictedTTLSecs > maxIndexTTL:
		return fmt.Errorf("--router-predicted-ttl-secs %v: give 0 to %g", c.RouterPredictedTTLSecs, maxIndexTTL)
	case c.NoKVEvents && c.RouterPredictedTTLSecs > 0:
		return errors.New("--router-predicted-ttl-secs requires KV events: remove --no-kv-events")
	case !slices.Contains([]string{"", PrefixEvents, PrefixApprox}, c.PrefixSource):
		return fmt.Errorf("--prefix-source %s: give %s or %s", c.PrefixSource, PrefixEvents, PrefixApprox)
	case c.PrefixSource != "" && !slices.ContainsFunc(policies, policy.RoutesByMatch):
		return fmt.Errorf("--prefix-source %s requires --policy cache-threshold or variance; use --no-kv-events with others", c.PrefixSource)
	case c.NoKVEvents && c.PrefixSource == PrefixEvents:
		return errors.New("--prefix-source events and --no-kv-events are mutually exclusive")
	case c.RouterPredictedTTLSecs > 0 && c.PrefixSource == PrefixApprox:
		return errors.New("--router-predicted-ttl-secs requires KV events: remove --prefix-source approx")
	case c.MaxTreeSize < 1 || c.MaxTreeSize > maxTreeTokens:
		return fmt.Errorf("--max-tree-size %d: give 1 to %d tokens", c.MaxTreeSize, maxTreeTokens)
	case !(c.EvictionInterval > 0) || c.EvictionInterval > maxIndexTTL:
		return fmt.Errorf("--eviction-interval %v: give more than 0 and at most %g seconds", c.EvictionInterval, maxIndexTTL)
	}
	return nil
}

const (
	// defaultTTL is the time to live, seconds, on workers that do not report the size of
	// their cache: Dynamo's.
	defaultTTL = 120.0
	// maxIndexTTL is the longest time to live, seconds: a year.
	maxIndexTTL = 366 * 24 * 3600.0
	// maxTreeTokens is the largest tree: its blocks have 32-bit numbers.
	maxTreeTokens = 1 << 30
)

// indexless reports whether the policy of that name gives cached blocks no weight.
func indexless(name string, settings policy.Settings) bool {
	settings = settings.Resolved()
	return name == "kv" && settings.PrefillLoadScale == 0 && settings.OverlapScoreCredit == 0
}

// HasTrees reports whether the policy of that name uses a prefix tree for each
// worker.
func (c IndexSettings) HasTrees(name string) bool {
	return policy.RoutesByMatch(name) && (c.NoKVEvents || c.PrefixSource == PrefixApprox)
}

// Follows reports whether the policy of that name uses an index of KV events.
func (c IndexSettings) Follows(name string, settings policy.Settings) bool {
	return !c.NoKVEvents && !c.HasTrees(name) && !indexless(name, settings)
}

// Assumes reports whether prompts count as cached on workers that are not known exactly, for the
// policy of that name.
func (c IndexSettings) Assumes(name string, settings policy.Settings) bool {
	return !indexless(name, settings)
}

// NewIndex returns the index of these settings for the policy of that name, and what of it
// learns from routing decisions; nil: nothing does. blockSize is in tokens. now is the clock by
// which assumed blocks expire.
func NewIndex(c IndexSettings, name string, settings policy.Settings, blockSize int, now func() time.Time) (radix.Index, radix.Assumer) {
	return NewIndexOf(radix.NewTree(), c, name, settings, blockSize, now)
}

// NewIndexOf is NewIndex where exact is the empty index of KV events, if they are followed.
func NewIndexOf(exact *radix.Tree, c IndexSettings, name string, settings policy.Settings, blockSize int,
	now func() time.Time) (radix.Index, radix.Assumer) {
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	switch {
	case indexless(name, settings):
		return radix.NewBlind(), nil
	case c.HasTrees(name):
		trees := radix.NewTrees(max(1, c.MaxTreeSize/blockSize), seconds(c.EvictionInterval), now)
		trees.SetCorrected(c.CacheCorrection)
		return trees, trees
	}
	ttl := defaultTTL
	if c.RouterTTLSecs != nil {
		ttl = *c.RouterTTLSecs
	}
	routed := radix.NewApprox(seconds(ttl), c.RouterMaxTreeSize, c.RouterPruneTargetRatio, now)
	routed.SetTTLForAll(c.RouterTTLSecs != nil)
	routed.SetCorrected(c.CacheCorrection)
	if c.NoKVEvents {
		return routed, routed
	}
	var recent *radix.Approx
	if c.RouterPredictedTTLSecs > 0 {
		recent = radix.NewApprox(seconds(c.RouterPredictedTTLSecs), c.RouterMaxTreeSize, c.RouterPruneTargetRatio, now)
	}
	return radix.NewMixed(exact, routed, recent)
}
