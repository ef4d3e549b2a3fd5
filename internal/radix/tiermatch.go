package radix

import (
	"kvrouter/internal/kv"
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
	if lower.own == noSlots() && len(lower.stores) == 0 {
		return dst
	}
	if staged := r.stagedRun(lower, walked, held, min(whole, walked.length)); staged != (kv.LowerBlocks{}) {
		if len(dst) == start {
			dst = append(dst, kv.Match{Worker: p.key})
		}
		dst[start].Staged = staged
	}
	if held >= usable {
		return dst
	}
	chunk := max(1, lower.chunk)
	var found kv.LowerBlocks
	end := held
	if chunk == 1 {
		end = r.runLower(lower, walked, held, min(usable, walked.length), &found)
	} else {
		most := min(whole, walked.length)
		for at := held / chunk * chunk; at+chunk <= most; at += chunk {
			var blocks kv.LowerBlocks
			if r.runLower(lower, walked, at, at+chunk, &blocks) < at+chunk {
				break
			}
			// The chunk is where its last block is.
			from, to := max(at, held), min(at+chunk, usable)
			tier, _ := r.tierAt(lower, walked, at+chunk-1)
			add(&found, tier, to-from)
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
	m.Lower = found
	// No engine announces what it removes from files or from a store.
	m.Doubtful = lower.doubtful || found.Disk+found.External > 0
	return dst
}

// stagedRun returns kv.Match.Staged from block at on: like Dynamo, of the worker's own
// tiers, blocks alone, and none that may have been emptied.
func (r *Tree) stagedRun(lower *lowerTiers, walked *path, at, end int) (staged kv.LowerBlocks) {
	if lower.doubtful {
		return staged
	}
	for place, tier := range kv.LowerTiers {
		for at < end {
			words, until := walked.at(at)
			if !hasSlot(words, lower.own[place]) {
				break
			}
			until = min(until, end)
			add(&staged, tier, until-at)
			at = until
		}
	}
	return staged
}

// runLower adds to found the blocks from at on, in their fastest tier, and returns the
// first that no tier has, or end.
func (r *Tree) runLower(lower *lowerTiers, walked *path, at, end int, found *kv.LowerBlocks) int {
	for at < end {
		tier, until := r.tierAt(lower, walked, at)
		if tier == kv.Device {
			return at
		}
		until = min(until, end)
		add(found, tier, until-at)
		at = until
	}
	return end
}

// tierAt returns the fastest lower tier that has block i of the prompt, kv.Device if none
// does, and the end of the blocks of which the same is true.
func (r *Tree) tierAt(lower *lowerTiers, walked *path, i int) (tier kv.Tier, until int) {
	words, until := walked.at(i)
	for place, tier := range kv.LowerTiers {
		if hasSlot(words, lower.own[place]) {
			return tier, until
		}
		for _, store := range lower.stores {
			if hasSlot(words, store.slots[place]) {
				return tier, until
			}
		}
	}
	return kv.Device, until
}

// at returns the slots that have block i, and the end of the blocks that the same have.
func (p *path) at(i int) (slots []uint64, until int) {
	at := len(p.runs) - 1
	for p.runs[at].start > i {
		at--
	}
	until = p.length
	if at+1 < len(p.runs) {
		until = p.runs[at+1].start
	}
	return p.sets.words(p.runs[at].set), until
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
