package radix

import (
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/sets"
)

// setParts sets the parts of m that only some callers need.
func (l *lowerTiers) setParts(m *kv.Match, walked *path, parts kv.MatchParts) {
	if parts&kv.HostedPart != 0 {
		m.Hosted = int32(l.hostedRun(walked))
	}
	if parts&kv.StagedPart != 0 {
		m.Staged = l.stagedRun(walked, m.Blocks)
	}
}

// read continues the match of a worker in its lower tiers and the stores that it reads, as
// engines do: with the blocks behind those on the device, up to end, each from the fastest tier
// that has it, up to the first that none has. No engine announces what it removes from files or
// from a store.
func (l *lowerTiers) read(m *kv.Match, walked *path, end int) {
	at := m.Blocks
	for i := walked.runAt(at); at < end; i++ {
		words, until := walked.runs[i].words, min(end, walked.end(i))
		blocks := int32(until - at)
		switch l.fastest(words) {
		case kv.Device:
			return
		case kv.Host:
			sure := m.Sure == m.Lower.Host && m.Lower.Disk|m.Lower.External == 0 // all before it
			if sure && (l.doubt == 0 || sets.Has(words, l.sure[kv.Host-1])) {
				m.Sure += blocks
			}
			m.Lower.Host += blocks
		case kv.Disk:
			m.Lower.Disk += blocks
		case kv.External:
			m.Lower.External += blocks
		}
		at = until
	}
}

// readChunks is read for an engine that loads chunks of several blocks. It is vLLM's
// _lookup_complete_chunks (v1/offloading/scheduler.py, read in 0.32.0): it looks up whole chunks
// from the one on in which the device's blocks end, and ignores less than a chunk. usable is that
// of Match.
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
		last := walked.runs[walked.runAt(end-1)]
		add(&found, l.fastest(last.words), min(end, usable)-max(at, held))
	}
	if end-held >= chunk {
		m.Lower, m.Sure = found, int32(sure-held)
	}
}

// stagedRun returns kv.Match.Staged from block at on: like Dynamo, of the worker's own
// tiers, blocks alone, and none that may have been emptied.
func (l *lowerTiers) stagedRun(walked *path, at int) (staged kv.LowerBlocks) {
	own := &l.own
	if l.doubt != 0 {
		own = &l.sure
	}
	for place, tier := range kv.LowerTiers {
		for at < walked.length {
			run := walked.runAt(at)
			if !sets.Has(walked.runs[run].words, own[place]) {
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
	if l.doubt != 0 {
		slot = l.sure[kv.Host-1]
	}
	for blocks < walked.length {
		run := walked.runAt(blocks)
		if !sets.Has(walked.runs[run].words, slot) {
			break
		}
		blocks = walked.end(run)
	}
	chunk := max(1, l.chunk)
	return blocks / chunk * chunk
}

// fastest returns the fastest lower tier among slots, kv.Device if none is.
func (l *lowerTiers) fastest(slots []uint64) kv.Tier {
	for i := range l.present {
		if t := &l.present[i]; t.word < len(slots) && slots[t.word]&t.bits != 0 {
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
	at := p.last
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
