package router

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
)

// IndexSettings holds the settings of the index. Those of approximate indexes have
// the names and defaults of Dynamo's, those of prefix trees of SGLang's.
type IndexSettings struct {
	NoKVEvents             bool     `group:"Index" name:"no-kv-events" help:"Follow no KV events and have started workers publish none: a prompt counts as cached where it was routed, until that worker's memory (its size is on its /metrics) must have been taken by others or an answer's cached_tokens say otherwise."`
	RouterTTLSecs          *float64 `group:"Index" name:"router-ttl-secs" placeholder:"SECONDS" help:"With --no-kv-events: seconds from its last use for which a prompt counts as cached, on a worker that tells the size of its cache until that is used up if it is sooner. Default: 120 on workers that do not tell it, on others their size alone counts."`
	RouterMaxTreeSize      int      `group:"Index" name:"router-max-tree-size" default:"1048576" help:"With --no-kv-events: most blocks that count as cached on all workers that do not tell the size of their cache."`
	RouterPruneTargetRatio float64  `group:"Index" name:"router-prune-target-ratio" default:"0.8" help:"Share of --router-max-tree-size that is left once it was exceeded; the blocks used longest ago go."`
	RouterPredictedTTLSecs float64  `group:"Index" name:"router-predicted-ttl-secs" default:"0" help:"Besides following KV events, count a prompt as cached where it was routed until so many seconds after its answer, for others like it that come before its events; 0: do not. Policies work, cache-threshold and variance do so by themselves until the answer's end."`
	PrefixSource           string   `group:"Index" placeholder:"events|approx" help:"Where policies cache-threshold and variance know from what is cached: events, the index of KV events; approx, a tree of the prompts that were routed to each worker. Default: events, with --no-kv-events approx."`
	MaxTreeSize            int      `group:"Index" default:"16777216" help:"With --prefix-source approx: tokens that each worker's tree keeps; what was used longest ago goes. A block takes some 200 bytes."`
	EvictionInterval       float64  `group:"Index" default:"60" help:"Seconds from one such eviction to the next; a tree may grow to twice its size in between."`
	CacheCorrection        bool     `group:"Index" default:"true" negatable:"" help:"With --no-kv-events or --prefix-source approx: take back what an answer's cached_tokens show that an engine has lost. vLLM tells of them with --enable-prompt-tokens-details, SGLang with --enable-cache-report."`
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
	case c.RouterTTLSecs != nil && !c.NoKVEvents:
		return errors.New("--router-ttl-secs goes with --no-kv-events: KV events tell what a worker has given up")
	case c.RouterTTLSecs != nil && !slices.ContainsFunc(policies, func(name string) bool { return !c.HasTrees(name) }):
		return errors.New("--router-ttl-secs does not bound the prefix trees of --policy cache-threshold and variance: give --max-tree-size and --eviction-interval")
	case c.RouterMaxTreeSize < 1:
		return fmt.Errorf("--router-max-tree-size %d: give at least 1 block", c.RouterMaxTreeSize)
	case !(c.RouterPruneTargetRatio >= 0 && c.RouterPruneTargetRatio <= 1):
		return fmt.Errorf("--router-prune-target-ratio %v: give a share from 0 to 1", c.RouterPruneTargetRatio)
	case !(c.RouterPredictedTTLSecs >= 0) || c.RouterPredictedTTLSecs > maxIndexTTL:
		return fmt.Errorf("--router-predicted-ttl-secs %v: give 0 to %g", c.RouterPredictedTTLSecs, maxIndexTTL)
	case c.NoKVEvents && c.RouterPredictedTTLSecs > 0:
		return errors.New("--router-predicted-ttl-secs goes with KV events: with --no-kv-events all is predicted")
	case !slices.Contains([]string{"", PrefixEvents, PrefixApprox}, c.PrefixSource):
		return fmt.Errorf("--prefix-source %s: give %s or %s", c.PrefixSource, PrefixEvents, PrefixApprox)
	case c.PrefixSource != "" && !slices.ContainsFunc(policies, policy.RoutesByMatch):
		return fmt.Errorf("--prefix-source %s goes with --policy cache-threshold or variance; for others there is --no-kv-events", c.PrefixSource)
	case c.NoKVEvents && c.PrefixSource == PrefixEvents:
		return errors.New("--prefix-source events and --no-kv-events exclude each other: leave one out")
	case c.RouterPredictedTTLSecs > 0 && c.PrefixSource == PrefixApprox:
		return errors.New("--router-predicted-ttl-secs goes with KV events: with --prefix-source approx all is predicted")
	case c.MaxTreeSize < 1 || c.MaxTreeSize > maxTreeTokens:
		return fmt.Errorf("--max-tree-size %d: give 1 to %d tokens", c.MaxTreeSize, maxTreeTokens)
	case !(c.EvictionInterval > 0) || c.EvictionInterval > maxIndexTTL:
		return fmt.Errorf("--eviction-interval %v: give more than 0 and at most %g seconds", c.EvictionInterval, maxIndexTTL)
	}
	return nil
}

const (
	// defaultTTL is the time to live, seconds, on workers that do not tell the size of
	// their cache: Dynamo's.
	defaultTTL = 120.0
	// maxIndexTTL is the longest time to live, seconds: a year.
	maxIndexTTL = 366 * 24 * 3600.0
	// maxTreeTokens is the largest tree: its blocks have 32-bit numbers.
	maxTreeTokens = 1 << 30
)

// indexless tells whether the policy of that name gives cached blocks no weight.
func indexless(name string, settings policy.Settings) bool {
	settings = settings.Resolved()
	return name == "kv" && settings.PrefillLoadScale == 0 && settings.OverlapScoreCredit == 0
}

// HasTrees tells whether the index of the policy of that name is a prefix tree for
// each worker.
func (c IndexSettings) HasTrees(name string) bool {
	return policy.RoutesByMatch(name) && (c.NoKVEvents || c.PrefixSource == PrefixApprox)
}

// Follows tells whether KV events feed the index of the policy of that name.
func (c IndexSettings) Follows(name string, settings policy.Settings) bool {
	return !c.NoKVEvents && !c.HasTrees(name) && !indexless(name, settings)
}

// NewIndex returns the index that c asks for with the policy of that name.
// blockSize is in tokens. now is the clock by which assumed blocks expire.
func NewIndex(c IndexSettings, name string, settings policy.Settings, blockSize int, now func() time.Time) radix.Index {
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	switch {
	case indexless(name, settings):
		return radix.NewBlind()
	case c.HasTrees(name):
		trees := radix.NewTrees(max(1, c.MaxTreeSize/blockSize), seconds(c.EvictionInterval), now)
		trees.SetCorrected(c.CacheCorrection)
		return trees
	case c.NoKVEvents:
		ttl := defaultTTL
		if c.RouterTTLSecs != nil {
			ttl = *c.RouterTTLSecs
		}
		routed := radix.NewApprox(seconds(ttl), c.RouterMaxTreeSize, c.RouterPruneTargetRatio, now)
		routed.SetTTLForAll(c.RouterTTLSecs != nil)
		routed.SetCorrected(c.CacheCorrection)
		return routed
	case c.RouterPredictedTTLSecs > 0:
		return radix.NewPredicting(radix.NewTree(), radix.NewApprox(seconds(c.RouterPredictedTTLSecs), c.RouterMaxTreeSize, c.RouterPruneTargetRatio, now))
	}
	return radix.NewTree()
}
