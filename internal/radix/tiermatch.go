package radix

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/sets"
)

// matchLower continues the match of a worker, which is dst[start] if it has any, in the
// worker's lower tiers and the stores that it reads, as engines do: the blocks behind
// those on the device, each from the fastest tier that has it, up to the first that none
// has. usable and whole are those of matchLayouts.
//
// With chunks of several blocks it is vLLM's _lookup_complete_chunks
// (v1/offloading/scheduler.py, read in 0.32.0): it looks up whole chunks from the one on in
// which the device's blocks end, and ignores less than a chunk.
func (r *Tree) matchLower(p *workerPlace, walked *path, usable, whole int, parts kv.MatchParts, start int, dst []kv.Match) []kv.Match {
	s := &r.slots[p.slot]
	if s.groups != nil && !s.groups.rules.simple() {
		return dst
	}
	lower := s.lower
	if len(lower.present) == 0 {
		return dst
	}
	matched := len(dst) > start
	if !matched {
		dst = appendMatch(dst, p.key, 0)
	}
	m := &dst[start] // is written in place: many copies are slow
	held, most := m.Blocks, min(whole, walked.length)
	if parts&kv.HostedPart != 0 {
		m.Hosted = int32(hostedRun(lower, walked, most))
	}
	if parts&kv.StagedPart != 0 {
		m.Staged = stagedRun(lower, walked, held, most)
	}
	sure := held
	if lower.chunk <= 1 {
		_, sure = lower.read(walked, held, min(usable, most), &m.Lower)
	} else {
		sure = lower.readChunks(walked, held, usable, most, &m.Lower)
	}
	m.Sure = int32(sure - held)
	if !matched && m.Hosted == 0 && m.Lower == (kv.LowerBlocks{}) && m.Staged == (kv.LowerBlocks{}) {
		return dst[:start]
	}
	return dst
}

// readChunks adds to found the whole chunks that continue the held blocks of a path, of
// which the engine uses so many, and returns the end of what is sure. Less than a chunk
// is not loaded.
func (l *lowerTiers) readChunks(walked *path, held, usable, most int, found *kv.LowerBlocks) (sure int) {
	sure = held
	if held >= usable {
		return sure
	}
	chunk, end := l.chunk, held
	var all kv.LowerBlocks
	for at := held / chunk * chunk; at+chunk <= most; at += chunk {
		var blocks kv.LowerBlocks
		to, certain := l.read(walked, at, at+chunk, &blocks)
		if to < at+chunk {
			break
		}
		if certain == to && sure >= at {
			sure = min(certain, usable)
		}
		// The chunk is where its last block is.
		last := walked.runs[walked.runAt(to-1)].set
		add(&all, l.fastest(walked.sets.Words(last)), min(to, usable)-max(at, held))
		end = to
	}
	if end-held < chunk {
		return held
	}
	*found = all
	return sure
}

// read adds to found the blocks of a path from one on up to end, each in its fastest tier,
// and returns the first that no tier has. sure is the first that may be gone without an
// event: no engine announces what it removes from files or from a store.
func (l *lowerTiers) read(walked *path, from, end int, found *kv.LowerBlocks) (at, sure int) {
	at, sure = from, from
	for i := walked.runAt(from); at < end; i++ {
		words := walked.sets.Words(walked.runs[i].set)
		tier := l.fastest(words)
		if tier == kv.Device {
			break
		}
		until := min(end, walked.end(i))
		add(found, tier, until-at)
		if sure == at && tier == kv.Host && (!l.doubtful || sets.Has(words, l.sure[kv.Host-1])) {
			sure = until
		}
		at = until
	}
	return at, sure
}

// stagedRun returns kv.Match.Staged from block at on: like Dynamo, of the worker's own
// tiers, blocks alone, and none that may have been emptied.
func stagedRun(lower *lowerTiers, walked *path, at, end int) (staged kv.LowerBlocks) {
	own := &lower.own
	if lower.doubtful {
		own = &lower.sure
	}
	for place, tier := range kv.LowerTiers {
		for at < end {
			run := walked.runAt(at)
			if !sets.Has(walked.sets.Words(walked.runs[run].set), own[place]) {
				break
			}
			until := min(end, walked.end(run))
			add(&staged, tier, until-at)
			at = until
		}
	}
	return staged
}

// hostedRun returns kv.Match.Hosted. Chunks that are not whole cannot be looked up.
func hostedRun(lower *lowerTiers, walked *path, end int) (blocks int) {
	slot := lower.own[kv.Host-1]
	if lower.doubtful {
		slot = lower.sure[kv.Host-1]
	}
	for blocks < end {
		run := walked.runAt(blocks)
		if !sets.Has(walked.sets.Words(walked.runs[run].set), slot) {
			break
		}
		blocks = min(end, walked.end(run))
	}
	chunk := max(1, lower.chunk)
	return blocks / chunk * chunk
}

// fastest returns the fastest lower tier among slots, kv.Device if none is.
func (l *lowerTiers) fastest(slots []uint64) kv.Tier {
	for _, t := range l.present {
		if sets.Has(slots, t.slot) {
			return t.tier
		}
	}
	return kv.Device
}

// end returns the first block behind run i.
func (p *path) end(i int) int {
	if i+1 < len(p.runs) {
		return p.runs[i+1].start
	}
	return p.length
}

// runAt returns the run that has block i.
func (p *path) runAt(i int) int {
	at := min(p.last, len(p.runs)-1)
	for p.runs[at].start > i {
		at--
	}
	for at+1 < len(p.runs) && p.runs[at+1].start <= i {
		at++
	}
	p.last = at
	return at
}

func add(to *kv.LowerBlocks, tier kv.Tier, blocks int) {
	switch tier {
	case kv.Host:
		to.Host += int32(blocks)
	case kv.Disk:
		to.Disk += int32(blocks)
	case kv.External:
		to.External += int32(blocks)
	}
}

// simple reports whether the match of the first group is the whole rule: one group of full
// attention, whose last block is not computed again.
func (r *rules) simple() bool {
	return r.rooted && !r.drops && len(r.kinds) == 1 && len(r.kinds[0].places) == 1
}
