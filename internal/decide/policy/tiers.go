package policy

import "kvrouter/internal/base/kv"

// Tiers is what is known of the tiers of one worker: the share of the blocks expected there that
// requests found of late, and how long loads from below the device take. On the device, blocks are
// expected that count as cached without an event. The zero value, and nil, trusts all tiers and knows
// no times. The router's lock guards it.
type Tiers struct {
	missing [1 + len(kv.LowerTiers)]float64 // by tier: share of the expected blocks that were not there, of late
	asked   [1 + len(kv.LowerTiers)]bool    // by tier: an answer has shown that
	fits    [len(kv.LowerTiers)]loadFit
	assumed assumedRecord

	pulls  pullRecord // of what it pulled from others
	serves pullRecord // of what others pulled from it

	pullCounts PullCounts

	counted    *Transfers // the engine's counters, as last read; nil: not yet
	peer       rate       // bytes: from other workers to host memory
	host, disk rate       // bytes: from host memory to the device, from slower tiers to host memory
	lookups    rate       // in slower tiers
	tokens     rate       // bytes loaded into the device, for each token
}

const (
	// tierForget is the weight of the last answer in the share that a tier delivers: after
	// ten misses in a row 11 % of it is left, after twenty 1 %.
	tierForget = 0.2
	// tierDoubt is what a tier counts that may have been emptied without an event.
	tierDoubt = 0.5
	// tierGuess is the assumed time of a load relative to that of computing the same tokens,
	// until one has been measured. On a CPU 0.01 was measured.
	tierGuess = 0.2
	// mostTransferred bounds what counters may show between two readings.
	mostTransferred = 1 << 60
	// tierForgetRate is the weight that what counters show loses with each later reading.
	tierForgetRate = 0.1
)

// tierAt returns the place of a lower tier in arrays.
func tierAt(t kv.Tier) int { return int(t - kv.Host) }

// Trust returns the share of the tokens expected in a tier that requests found there of late, 0 to 1.
func (t *Tiers) Trust(tier kv.Tier) float64 {
	if t == nil {
		return 1
	}
	return 1 - t.missing[tier]
}

// Came notes how many of the blocks that a request was expected to load the engine
// found. A run of blocks ends at the first that is not there, and mostly goes from the
// faster to the slower tiers: so the missing ones are of the tier in which it ended, and
// nothing is known of the tiers behind.
func (t *Tiers) Came(expected kv.LowerBlocks, found int) {
	for _, tier := range kv.LowerTiers {
		n := expected.Of(tier)
		if n == 0 {
			continue
		}
		if found = max(found, 0); !t.cameFrom(tier, n, min(n, found)) {
			return
		}
		found -= n
	}
}

// CameFrom is Came with the tokens of each tier, as the engine reports them.
func (t *Tiers) CameFrom(expected kv.LowerBlocks, found kv.TierTokens, blockSize int) {
	for _, tier := range kv.LowerTiers {
		if n := expected.Of(tier); n > 0 {
			t.cameFrom(tier, n, min(n, found.Of(tier)/blockSize))
		}
	}
}

// cameFrom notes how many of the blocks expected in a tier were there, and reports whether
// all were.
func (t *Tiers) cameFrom(tier kv.Tier, expected, found int) (all bool) {
	t.came(tier, float64(found)/float64(expected))
	return found == expected
}

// Asked reports whether Trust of the tier is known.
func (t *Tiers) Asked(tier kv.Tier) bool { return t != nil && t.asked[tier] }

// came notes the share of the blocks expected in a tier that was there.
func (t *Tiers) came(tier kv.Tier, share float64) {
	t.asked[tier] = true
	t.missing[tier] += tierForget * (1 - share - t.missing[tier])
}

// expected returns how many blocks of a lower tier a request to the candidate is
// expected to load of those that the index has.
func (c *Candidate) expected(tier kv.Tier) float64 {
	n := float64(c.Lower.Of(tier)) * c.Load.Tiers.Trust(tier)
	if c.Doubtful {
		n *= tierDoubt
	}
	return n
}

// Loaded returns how many blocks of the candidate's Lower count as not to be computed.
func (t Traits) Loaded(c *Candidate) float64 {
	if c.Lower == (kv.LowerBlocks{}) {
		return 0
	}
	if t.Staged {
		return t.HostCredit*float64(c.Lower.Host) + t.DiskCredit*float64(c.Lower.Disk+c.Lower.External)
	}
	return t.HostCredit*c.expected(kv.Host) + t.DiskCredit*(c.expected(kv.Disk)+c.expected(kv.External))
}

// counters returns what the engine's counters say about loads from a tier: the ms of a
// load whatever its length, and of each token. What slower tiers have goes through host
// memory.
func (t *Tiers) counters(tier kv.Tier) (fixed, token float64, known bool) {
	if t == nil || !t.host.known() || !t.tokens.known() {
		return 0, 0, false
	}
	seconds := t.host.each()
	if tier != kv.Host {
		if !t.disk.known() {
			return 0, 0, false
		}
		seconds += t.disk.each()
		if t.lookups.known() {
			fixed = 1000 * t.lookups.each()
		}
	}
	return fixed, 1000 * seconds * t.BytesPerToken(), true
}

// BytesPerToken returns the bytes that the engine loads for a token; 0: unknown.
func (t *Tiers) BytesPerToken() float64 {
	if t == nil || !t.tokens.known() {
		return 0
	}
	return t.tokens.each()
}

// Bandwidth returns the measured bytes a second of loads from host memory to the device,
// and for slower tiers of reads into host memory; 0: unknown.
func (t *Tiers) Bandwidth(tier kv.Tier) float64 {
	if t == nil {
		return 0
	}
	of := &t.host
	if tier != kv.Host {
		of = &t.disk
	}
	if !of.known() {
		return 0
	}
	return 1 / of.each()
}

// Transfers are an engine's counters of loads from its lower tiers: totals since its
// start. What an engine does not count is 0.
type Transfers struct {
	HostBytes, HostSeconds float64       // from host memory to the device
	HostTokens             float64       // that HostBytes are
	DiskBytes, DiskSeconds float64       // from slower tiers to host memory
	PeerBytes, PeerSeconds float64       // from other workers to host memory
	Lookups, LookupSeconds float64       // in slower tiers
	Cached                 kv.TierTokens // cached prompt tokens by the tier that they came from
	Hits                   float64       // prompt tokens that were cached on the device; less than 0: not counted
}

// Count takes over the engine's counters as they are now. Counters that have fallen are
// those of a new process.
func (t *Tiers) Count(now Transfers) {
	t.countHits(now.Hits)
	last := t.counted
	t.counted = &now
	if last == nil || now.HostBytes < last.HostBytes || now.DiskBytes < last.DiskBytes || now.PeerBytes < last.PeerBytes ||
		now.HostTokens < last.HostTokens {
		return
	}
	t.host.add(now.HostSeconds-last.HostSeconds, now.HostBytes-last.HostBytes, tierForgetRate)
	t.disk.add(now.DiskSeconds-last.DiskSeconds, now.DiskBytes-last.DiskBytes, tierForgetRate)
	t.peer.add(now.PeerSeconds-last.PeerSeconds, now.PeerBytes-last.PeerBytes, tierForgetRate)
	t.lookups.add(now.LookupSeconds-last.LookupSeconds, now.Lookups-last.Lookups, tierForgetRate)
	t.tokens.add(now.HostBytes-last.HostBytes, now.HostTokens-last.HostTokens, 0)
}

// Counted returns the engine's counters as last read; false: none have been.
func (t *Tiers) Counted() (Transfers, bool) {
	if t == nil || t.counted == nil {
		return Transfers{}, false
	}
	return *t.counted, true
}

// rate is the mean of an amount for each of something.
type rate struct{ amount, of float64 }

// add adds what came in between; what was before loses the share forget.
func (r *rate) add(amount, of, forget float64) {
	if !(amount >= 0 && amount <= mostTransferred && of > 0 && of <= mostTransferred) {
		return
	}
	r.amount, r.of = r.amount*(1-forget)+amount, r.of*(1-forget)+of
}

func (r *rate) known() bool   { return r.of > 0 && r.amount > 0 }
func (r *rate) each() float64 { return r.amount / r.of }
