package radix

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/sets"
)

// extend continues the match of a worker in its lower tiers and the stores that it
// reads, as engines do: the blocks behind those on the device, each from the fastest tier
// that has it, up to the first that none has. usable is that of Match.
//
// With chunks of several blocks it is vLLM's _lookup_complete_chunks
// (v1/offloading/scheduler.py, read in 0.32.0): it looks up whole chunks from the one on in
// which the device's blocks end, and ignores less than a chunk.
func (l *lowerTiers) extend(m *kv.Match, walked *path, usable int, parts kv.MatchParts) {
	if parts&kv.HostedPart != 0 {
		m.Hosted = int32(l.hostedRun(walked))
	}
	if parts&kv.StagedPart != 0 {
		m.Staged = l.stagedRun(walked, m.Blocks)
	}
	if l.chunk <= 1 {
		l.read(m, walked, min(usable, walked.length))
	} else {
		l.readChunks(m, walked, usable)
	}
}

// read adds the blocks behind m to it, up to end, each in its fastest tier, up to the first
// that no tier has. No engine announces what it removes from files or from a store.
func (l *lowerTiers) read(m *kv.Match, walked *path, end int) {
	at, sure := m.Blocks, true
	for i := walked.runAt(at); at < end; i++ {
		words := walked.sets.Words(walked.runs[i].set)
		tier := l.fastest(words)
		if tier == kv.Device {
			return
		}
		until := min(end, walked.end(i))
		add(&m.Lower, tier, until-at)
		sure = sure && tier == kv.Host && (!l.doubtful || sets.Has(words, l.sure[kv.Host-1]))
		if sure {
			m.Sure += int32(until - at)
		}
		at = until
	}
}

// readChunks does so with whole chunks. Less than a chunk is not loaded.
func (l *lowerTiers) readChunks(m *kv.Match, walked *path, usable int) {
	held, chunk := m.Blocks, l.chunk
	if held >= usable {
		return
	}
	end, sure := held, held // the end of what is sure
	var found kv.LowerBlocks
	for at := held / chunk * chunk; at+chunk <= walked.length; at += chunk {
		one := kv.Match{Blocks: at}
		l.read(&one, walked, at+chunk)
		if one.Lower.Total() < chunk {
			break
		}
		end = at + chunk
		if int(one.Sure) == chunk && sure >= at {
			sure = min(end, usable)
		}
		// The chunk is where its last block is.
		last := walked.runs[walked.runAt(end-1)].set
		add(&found, l.fastest(walked.sets.Words(last)), min(end, usable)-max(at, held))
	}
	if end-held >= chunk {
		m.Lower, m.Sure = found, int32(sure-held)
	}
}

// stagedRun returns kv.Match.Staged from block at on: like Dynamo, of the worker's own
// tiers, blocks alone, and none that may have been emptied.
func (l *lowerTiers) stagedRun(walked *path, at int) (staged kv.LowerBlocks) {
	own := &l.own
	if l.doubtful {
		own = &l.sure
	}
	for place, tier := range kv.LowerTiers {
		for at < walked.length {
			run := walked.runAt(at)
			if !sets.Has(walked.sets.Words(walked.runs[run].set), own[place]) {
				break
			}
			until := walked.end(run)
			add(&staged, tier, until-at)
			at = until
		}
	}
	return staged
}

// hostedRun returns kv.Match.Hosted. Chunks that are not whole cannot be looked up.
func (l *lowerTiers) hostedRun(walked *path) (blocks int) {
	slot := l.own[kv.Host-1]
	if l.doubtful {
		slot = l.sure[kv.Host-1]
	}
	for blocks < walked.length {
		run := walked.runAt(blocks)
		if !sets.Has(walked.sets.Words(walked.runs[run].set), slot) {
			break
		}
		blocks = walked.end(run)
	}
	chunk := max(1, l.chunk)
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
