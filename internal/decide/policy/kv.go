package policy

import (
	"fmt"
	"math"
	"math/rand/v2"

	"kvrouter/internal/base/kv"
)

// Settings are the settings of the policies in this package. Those of policy kv
// have the names, meanings and defaults of Dynamo 1.6.1.
type Settings struct {
	PrefillLoadScale          float64  `group:"Policy kv" default:"1" help:"Weight of prompt blocks to compute relative to blocks in use."`
	OverlapScoreCredit        float64  `group:"Policy kv" default:"1" help:"Credit in blocks for each cached block of the prompt; above 1, requests concentrate on workers with their prefix."`
	OverlapScoreCreditDecay   float64  `group:"Policy kv" default:"0" help:"Decay of that credit on workers with more prompt tokens queued than the least busy one. 0 disables it."`
	RouterHostCacheHitWeight  float64  `group:"Policy kv" default:"0.75" help:"Credit in blocks for each block of the prompt in host memory that continues its cached blocks. 0 to 1."`
	RouterDiskCacheHitWeight  float64  `group:"Policy kv" default:"0.25" help:"Credit in blocks for each block on disk or in an external store that continues those in host memory. 0 to 1."`
	DecodeActiveRequestWeight float64  `group:"Policy kv" default:"0" help:"Cost in blocks of each in-flight request, in addition to its own blocks."`
	RouterTemperature         float64  `group:"Policy kv" default:"0" help:"Softmax temperature of the choice. 0 always selects the cheapest worker; 1 is close to random."`
	OverlapScoreWeight        *float64 `group:"Policy kv" placeholder:"NUMBER" help:"Older name of --prefill-load-scale, which it overrides; 0 also sets --overlap-score-credit 0."`
	Ties                      string   `group:"Policy kv" default:"random" enum:"random,smallest-tree" help:"Choice between workers of equal cost: ${enum}. smallest-tree selects, as in Dynamo 1.0, the worker with the fewest blocks in the index; workers without a match count as empty. Ignored when --router-temperature is above 0."`

	CacheSettings
}

// Values of --ties.
const (
	tiesRandom       = "random"
	tiesSmallestTree = "smallest-tree"
)

// Override has settings of policy kv for one request; nil leaves a setting
// unchanged.
type Override struct {
	OverlapScoreWeight *float64 // older name of PrefillLoadScale, see Settings
	OverlapScoreCredit *float64
	PrefillLoadScale   *float64
	RouterTemperature  *float64
	AssumeKVReuse      *bool
	TrackPrefillTokens *bool
}

// Validate checks the settings; its errors name the flag.
func (s Settings) Validate() error {
	if err := checkNotNegative([]flagValue{
		{"--prefill-load-scale", s.PrefillLoadScale},
		{"--overlap-score-credit", s.OverlapScoreCredit},
		{"--overlap-score-credit-decay", s.OverlapScoreCreditDecay},
		{"--decode-active-request-weight", s.DecodeActiveRequestWeight},
		{"--router-temperature", s.RouterTemperature},
		{"--overlap-score-weight", s.Resolved().PrefillLoadScale},
	}); err != nil {
		return err
	}
	for _, f := range []flagValue{{"--router-host-cache-hit-weight", s.RouterHostCacheHitWeight},
		{"--router-disk-cache-hit-weight", s.RouterDiskCacheHitWeight}} {
		if !(f.value >= 0 && f.value <= 1) {
			return fmt.Errorf("%s %v: give a number from 0 to 1", f.flag, f.value)
		}
	}
	return s.CacheSettings.validate()
}

// flagValue is a flag and its value.
type flagValue struct {
	flag  string
	value float64
}

// checkNotNegative refuses a value that is less than 0, or no finite number.
func checkNotNegative(flags []flagValue) error {
	for _, f := range flags {
		if !(f.value >= 0) || math.IsInf(f.value, 1) {
			return fmt.Errorf("%s %v: give a number of at least 0", f.flag, f.value)
		}
	}
	return nil
}

// Resolved returns the settings with OverlapScoreWeight, the older name, applied.
func (s Settings) Resolved() Settings {
	if s.OverlapScoreWeight != nil {
		s.PrefillLoadScale = *s.OverlapScoreWeight
		if s.PrefillLoadScale == 0 {
			s.OverlapScoreCredit = 0
		}
	}
	return s
}

// with applies a request's overrides.
func (s Settings) with(o *Override) Settings {
	if o == nil {
		return s
	}
	for _, setting := range []struct {
		value *float64
		set   *float64
	}{
		{o.PrefillLoadScale, &s.PrefillLoadScale},
		{o.OverlapScoreCredit, &s.OverlapScoreCredit},
		{o.RouterTemperature, &s.RouterTemperature},
	} {
		if setting.value != nil {
			*setting.set = *setting.value
		}
	}
	s.OverlapScoreWeight = o.OverlapScoreWeight
	return s.Resolved()
}

// kvPolicy is the rule of Dynamo's KvRouter 1.6.1: the lowest of
//
//	prefill_load_scale·max(0, queued + prompt − cached) +
//	active + new + decode_active_request_weight·in flight
//
// in blocks: queued are the uncached prompt tokens of requests without a first
// token, cached is
//
//	credit·overlap + host_cache_hit_weight·host + disk_cache_hit_weight·(disk + external)
//
// active the distinct prompt blocks in use and new those that this prompt would add.
// The credit is overlap_score_credit / (1 + decay·excess / ⌈prompt⌉), where
// excess is the queue beyond the worker with the least. The lower tiers continue
// the overlap, one after the other (dynamo-kv-router, scheduling/selector/reference.rs
// and indexer/lower_tier_indexers.rs).
// Ties are broken at random, or as in Dynamo 1.0 by the smallest tree and then at
// random. A temperature above 0 draws instead, by the softmax of −cost / (highest
// − lowest cost) / temperature. Where prompt tokens are not tracked, they cost
// nothing, and the credit goes off the blocks.
type kvPolicy struct{ settings Settings }

func (p kvPolicy) Traits() Traits {
	return Traits{
		ActiveBlocks: true, WholeMatch: true, TreeBlocks: p.settings.Ties == tiesSmallestTree,
		Staged: true, HostCredit: p.settings.RouterHostCacheHitWeight, DiskCredit: p.settings.RouterDiskCacheHitWeight,
	}
}

func (p kvPolicy) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	p.settings = p.settings.with(q.Override)
	least := math.Inf(1)
	for i := range candidates {
		least = min(least, candidates[i].Load.each(candidates[i].Load.PrefillTokens))
	}
	byTree := p.settings.Ties == tiesSmallestTree && p.settings.RouterTemperature == 0
	if q.Explain != nil {
		q.Explain.Rank("kv", candidates, func(c *Candidate) Score {
			s := p.terms(&q, c, least).explain()
			if fewer := -float64(c.TreeBlocks); byTree {
				s.TieBreak = &fewer
			}
			return s
		})
	}
	if p.settings.RouterTemperature > 0 {
		return softmaxOfCosts(candidates, p.settings.RouterTemperature, random,
			func(c *Candidate) float64 { return p.terms(&q, c, least).cost() }, q.Explain)
	}
	score := func(c *Candidate) float64 { return -p.terms(&q, c, least).cost() }
	if byTree {
		return bestOfSmallestTree(candidates, random, score)
	}
	return Best(candidates, random, score)
}

// bestOfSmallestTree is best, but that of several with the highest score those with
// the fewest TreeBlocks go before the others.
func bestOfSmallestTree(candidates []Candidate, random *rand.Rand, score func(*Candidate) float64) int {
	highest := math.Inf(-1)
	for i := range candidates {
		highest = max(highest, score(&candidates[i]))
	}
	return Best(candidates, random, func(c *Candidate) float64 {
		if score(c) < highest {
			return math.Inf(-1)
		}
		return -float64(c.TreeBlocks)
	})
}

// kvTerms are the parts of a cost, in blocks.
type kvTerms struct{ prefill, decode, requests float64 }

func (t kvTerms) cost() float64 { return t.prefill + t.decode + t.requests }

func (t kvTerms) explain() Score {
	return Score{Terms: []Term{{"prefill", -t.prefill}, {"decode", -t.decode}, {"requests", -t.requests}}, Total: -t.cost()}
}

// terms returns the cost of c; least is the least PrefillTokens of all candidates. Those of a cell
// are Load.each.
func (p *kvPolicy) terms(q *Query, c *Candidate, least float64) kvTerms {
	block, queued := float64(q.BlockSize), c.Load.each(c.Load.PrefillTokens)
	credit := p.settings.OverlapScoreCredit
	if excess := queued - least; excess > 0 && q.Tokens > 0 && p.settings.OverlapScoreCreditDecay > 0 {
		credit /= 1 + p.settings.OverlapScoreCreditDecay*(excess/block)/math.Ceil(float64(q.Tokens)/block)
	}
	cached := credit * float64(c.Overlap)
	if c.Lower != (kv.LowerBlocks{}) && (!q.FreePrefill || credit > 0) {
		cached += p.Traits().Loaded(c)
	}
	decode := c.Load.each(c.Load.ActiveBlocks) + float64(c.NewBlocks)
	requests := p.settings.DecodeActiveRequestWeight * c.Load.each(c.Load.InFlight)
	if q.FreePrefill {
		return kvTerms{decode: max(0, decode-cached), requests: requests}
	}
	prefill := max(0, (queued+float64(q.Tokens))/block-cached)
	return kvTerms{p.settings.PrefillLoadScale * prefill, decode, requests}
}

// softmaxOfCosts draws a candidate, the cheaper the more likely. If explain is not
// nil it notes the chances and the draw there.
func softmaxOfCosts(candidates []Candidate, temperature float64, random *rand.Rand, cost func(*Candidate) float64,
	explain *Explanation) int {
	costs := make([]float64, len(candidates))
	lowest, highest := math.Inf(1), math.Inf(-1)
	for i := range candidates {
		costs[i] = cost(&candidates[i])
		lowest, highest = min(lowest, costs[i]), max(highest, costs[i])
	}
	if lowest == highest {
		return random.IntN(len(candidates))
	}
	sum := 0.0
	for i, c := range costs {
		costs[i] = math.Exp(-(c - lowest) / (highest - lowest) / temperature)
		sum += costs[i]
	}
	draw := random.Float64()
	if explain != nil {
		explain.Drawn(costs, draw, temperature)
	}
	draw *= sum
	for i, weight := range costs {
		if draw -= weight; draw < 0 {
			return i
		}
	}
	return len(costs) - 1
}
