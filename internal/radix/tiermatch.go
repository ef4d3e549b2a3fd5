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
func (r *Tree) matchLower(p *workerPlace, walked *path, usable, whole, start int, dst []kv.Match) []kv.Match {
	s := &r.slots[p.slot]
	if s.groups != nil && !s.groups.rules.simple() {
		return dst
	}
	held := 0
	if len(dst) > start {
		held = dst[start].Blocks
	}
	lower := s.lower
	if len(lower.present) == 0 {
		return dst
	}
	if staged := r.stagedRun(lower, walked, held, min(whole, walked.length)); staged != (kv.LowerBlocks{}) {
		if len(dst) == start {
			dst = append(dst, kv.Match{Worker: p.key})
		}
		dst[start].Staged = staged
	}
	if r.countsHosted {
		if hosted := r.hostedRun(lower, walked, min(whole, walked.length)); hosted > 0 {
			if len(dst) == start {
				dst = append(dst, kv.Match{Worker: p.key})
			}
			dst[start].Hosted = int32(hosted)
		}
	}
	if held >= usable {
		return dst
	}
	chunk := max(1, lower.chunk)
	var found kv.LowerBlocks
	end, sure := held, held // the end of what is sure
	if chunk == 1 {
		end = r.runLower(lower, walked, held, min(usable, walked.length), &found, &sure)
	} else {
		most := min(whole, walked.length)
		for at := held / chunk * chunk; at+chunk <= most; at += chunk {
			var blocks kv.LowerBlocks
			certain := at
			if r.runLower(lower, walked, at, at+chunk, &blocks, &certain) < at+chunk {
				break
			}
			if certain == at+chunk && sure >= at {
				sure = min(certain, usable)
			}
			// The chunk is where its last block is.
			from, to := max(at, held), min(at+chunk, usable)
			last := walked.runs[walked.runAt(at+chunk-1)].set
			add(&found, lower.fastest(walked.sets.Words(last)), to-from)
			end = at + chunk
		}
		if end-held < chunk {
			return dst
		}
	}
	if end == held {
		return dst
	}
	if len(dst) == start {
		dst = append(dst, kv.Match{Worker: p.key})
	}
	m := &dst[start]
	m.Lower, m.Sure = found, int32(sure-held)
	return dst
}

// stagedRun returns kv.Match.Staged from block at on: like Dynamo, of the worker's own
// tiers, blocks alone, and none that may have been emptied.
func (r *Tree) stagedRun(lower *lowerTiers, walked *path, at, end int) (staged kv.LowerBlocks) {
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
			until := end
			if run+1 < len(walked.runs) {
				until = min(until, walked.runs[run+1].start)
			}
			add(&staged, tier, until-at)
			at = until
		}
	}
	return staged
}

// hostedRun returns kv.Match.Hosted. Chunks that are not whole cannot be looked up.
func (r *Tree) hostedRun(lower *lowerTiers, walked *path, end int) (blocks int) {
	slot := lower.own[kv.Host-1]
	if lower.doubtful {
		slot = lower.sure[kv.Host-1]
	}
	for blocks < end {
		run := walked.runAt(blocks)
		if !sets.Has(walked.sets.Words(walked.runs[run].set), slot) {
			break
		}
		blocks = end
		if run+1 < len(walked.runs) {
			blocks = min(end, walked.runs[run+1].start)
		}
	}
	chunk := max(1, lower.chunk)
	return blocks / chunk * chunk
}

// CountHosted makes later matches have kv.Match.Hosted.
func (r *Tree) CountHosted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countsHosted = true
}

// runLower adds to found the blocks from at on, in their fastest tier, and returns the
// first that no tier has, or end. sure is moved from at to the first block that may be
// gone without an event: no engine announces what it removes from files or from a store.
func (r *Tree) runLower(lower *lowerTiers, walked *path, at, end int, found *kv.LowerBlocks, sure *int) int {
	for i := walked.runAt(at); at < end; i++ {
		words := walked.sets.Words(walked.runs[i].set)
		tier := lower.fastest(words)
		if tier == kv.Device {
			return at
		}
		until := end
		if i+1 < len(walked.runs) {
			until = min(end, walked.runs[i+1].start)
		}
		add(found, tier, until-at)
		if *sure == at && tier == kv.Host && (!lower.doubtful || sets.Has(words, lower.sure[kv.Host-1])) {
			*sure = until
		}
		at = until
	}
	return end
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
