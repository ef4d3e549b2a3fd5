package workers

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
)

// Predictions of cached tokens are compared with what the engine reports. Each rank
// keeps the last comparedKept results. A share of exact ones below exactLow is
// reported once, by the worker's name, until it is exactGood again.
const (
	comparedKept     = 64
	comparedLeast    = 32 // results before a share is reported
	exactLow         = 0.8
	exactGood        = 0.95
	dropsAfter       = 6 // results in a row that are off by one block of the engine
	maxComparedRanks = 64
)

// results are the last ones of predictions.
type results struct {
	exact [comparedKept]bool
	count int // of results; the last comparedKept are in exact
}

// add adds a result.
func (r *results) add(exact bool) {
	r.exact[r.count%comparedKept] = exact
	r.count++
}

// accuracy is how exact the predictions for one rank were lately.
type accuracy struct {
	results
	lower  results // of those that expected blocks in lower tiers
	high   int     // in a row: one block of the engine too high
	low    int     // in a row: one block too low
	drops  bool
	warned bool
}

// share returns the share of exact predictions, and the number of those that it is of.
func (r *results) share() (share float64, of int) {
	of = min(r.count, comparedKept)
	exact := 0
	for _, was := range r.exact[:of] {
		if was {
			exact++
		}
	}
	return float64(exact) / float64(max(1, of)), of
}

// Compared notes a prediction for a prompt, by tier, and what the engine found of it in
// all tiers, tokens.
//
// An engine whose drafter needs the last block of a match again finds one block less
// each time. Neither its events nor its answers name the drafter, so that this is
// learned from results in a row.
func (f *Fleet) Compared(key kv.WorkerKey, expected kv.TierTokens, found int) {
	w, predicted := f.byID(key.Worker), expected.Total()
	if w == nil || predicted == 0 && found == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	stream := w.streams[key]
	if stream == nil || stream.Stats().Cold.Load() {
		return
	}
	a := w.accuracy[key]
	if a == nil {
		if len(w.accuracy) >= maxComparedRanks {
			return
		}
		a = &accuracy{drops: w.traits.DropsLast}
		w.accuracy[key] = a
	}
	a.add(predicted == found)
	if predicted > expected.Device {
		a.lower.add(predicted == found)
	}
	unit := stream.Src.BlockSize
	if groups := stream.Stats().Layout().Groups; len(groups) > 0 {
		unit = groups[0].Block
	}
	switch drops := predicted - found; {
	case predicted > expected.Device && drops != 0: // a lower tier may be to blame
	case drops == unit:
		a.high, a.low = a.high+1, 0
	case drops == -unit:
		a.high, a.low = 0, a.low+1
	default:
		a.high, a.low = 0, 0
	}
	if !a.drops && a.high >= dropsAfter || a.drops && a.low >= dropsAfter {
		a.drops, a.high, a.low = !a.drops, 0, 0
		traits := w.traits
		traits.DropsLast = a.drops
		stream.SetTraits(traits)
		f.log.Info(fmt.Sprintf("%s: learned from its answers whether it computes the last block of a match again, as with an EAGLE or MTP "+
			"drafter", w), "rank", key.Rank, "drops_last", a.drops)
		return
	}
	w.warnOfMisses(a, key, stream, f.log)
}

// warnOfMisses logs that the share of exact predictions has fallen, or that it has risen
// again.
func (w *worker) warnOfMisses(a *accuracy, key kv.WorkerKey, stream *events.Stream, log *slog.Logger) {
	share, of := a.share()
	if of < comparedLeast {
		return
	}
	args := []any{"rank", key.Rank, "exact", share, "of", of}
	if lower, n := a.lower.share(); n > 0 {
		args = append(args, "exact_in_lower_tiers", lower, "of_lower", n)
	}
	args = append(args, "kv_cache_groups", stream.Stats().Layout().String())
	switch {
	case !a.warned && share < exactLow:
		a.warned = true
		log.Warn(fmt.Sprintf("%s: few predictions of cached tokens are exact; docs/predictions.md names the models and settings for which "+
			"they are", w), args...)
	case a.warned && share >= exactGood:
		a.warned = false
		log.Info(fmt.Sprintf("%s: predictions of cached tokens are exact again", w), args...)
	}
}

// Exactness is how exact the predictions for a worker were lately, and the KV-cache
// groups and lower tiers by which they are made.
type Exactness struct {
	Groups string   `json:"kv_cache_groups,omitempty"`   // as kv.Layout's String writes them, of the first rank that has shown any
	Exact  *float64 `json:"exact_predictions,omitempty"` // share of the last 64 a rank; nil: none was compared
	// ExactLower is the same of the last 64 that expected blocks in tiers below the device.
	ExactLower *float64 `json:"exact_lower_tier_predictions,omitempty"`

	LowerTiers *LowerTiers `json:"lower_tiers,omitempty"` // nil: it has none
}

// LowerTiers is what the index has of the lower tiers of a worker, blocks of all ranks.
type LowerTiers struct {
	Host     int  `json:"host_blocks"`
	Disk     int  `json:"disk_blocks"`
	External int  `json:"external_blocks"`
	Shared   int  `json:"shared_blocks"` // of the stores that it reads
	Waiting  int  `json:"waiting_blocks,omitempty"`
	Chunk    int  `json:"chunk_blocks,omitempty"` // loaded whole or not at all; of one rank
	Doubtful bool `json:"doubtful,omitempty"`     // of any rank: they may have been emptied
}

// addLower adds the lower tiers of a rank.
func (e *Exactness) addLower(s radix.LowerState) {
	if s == (radix.LowerState{}) {
		return
	}
	if e.LowerTiers == nil {
		e.LowerTiers = new(LowerTiers)
	}
	t := e.LowerTiers
	t.Host += int(s.Own.Host)
	t.Disk += int(s.Own.Disk)
	t.External += int(s.Own.External)
	t.Shared += s.Shared.Total()
	t.Waiting += s.Waiting
	t.Chunk = max(t.Chunk, s.Chunk)
	t.Doubtful = t.Doubtful || s.Doubt != 0
}

// doubt returns why the predictions by a stream may not be exact; empty: there is no reason
// known. attached means that the router does not know the engine's arguments.
func doubt(stream *events.Stream, traits kv.Traits, attached bool) string {
	stats, layout := stream.Stats(), stream.Stats().Layout()
	windows := slices.ContainsFunc(layout.Groups, func(g kv.CacheGroup) bool { return g.Attention == kv.SlidingWindow })
	switch {
	case stats.UnknownGroups.Load() > 0:
		return "upper bound: a KV-cache group of the engine cannot be followed"
	case stats.Misplaced.Load() > 0:
		return "estimate: all layers have sliding windows, and KV events do not say which blocks the engine keeps: its " +
			"--prefix-cache-retention-interval is not known, or it computes prompts in chunks"
	case stats.Ambiguous.Load() > 0:
		return "upper bound: all layers have sliding windows, and KV events do not say whether a prompt ended with a block"
	case layout.DropsLast && windows && len(layout.Groups) > 1 && (attached || traits.DropsSome):
		return "estimate: KV events do not say which KV-cache groups a drafter beside sliding windows needs"
	case stats.PartBlocks.Load() > 0:
		return "lower bound: KV events do not say which parts of blocks --prefix-match-unit makes the engine find"
	}
	return ""
}

// exactness returns that of w, and why predictions for it may not be exact; w.mu is held.
func (w *worker) exactness() (e Exactness, why string) {
	var all, lower mean
	for key, stream := range w.streams {
		why = cmp.Or(why, doubt(stream, w.traits, w.attached))
		e.addLower(stream.Lower())
		if e.Groups == "" {
			e.Groups = stream.Stats().Layout().String()
		}
		if a := w.accuracy[key]; a != nil {
			all.add(a.share())
			lower.add(a.lower.share())
		}
	}
	e.Exact, e.ExactLower = all.value(), lower.value()
	return e, why
}

// mean is that of shares, each of a number of results.
type mean struct {
	sum float64
	of  int
}

func (m *mean) add(share float64, of int) { m.sum, m.of = m.sum+share*float64(of), m.of+of }

// value returns the mean; nil: of nothing.
func (m *mean) value() *float64 {
	if m.of == 0 {
		return nil
	}
	value := m.sum / float64(m.of)
	return &value
}

// byID returns the worker with that id; nil: there is none.
func (f *Fleet) byID(id uint64) *worker {
	for _, w := range f.all() {
		if w.id == id {
			return w
		}
	}
	return nil
}
