package router

import (
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// workspace holds the buffers of one look-up, reused by later ones.
type workspace struct {
	local   []uint64
	matches []kv.Match
}

// lookUp hashes a request's prompt and looks it up in the index. It needs no lock.
func (r *Router) lookUp(request Request, scratch *workspace) (p prompt, d Decision) {
	p = prompt{Request: request, local: request.Local}
	p.tokens = max(request.NumTokens, len(request.Tokens))
	p.counted = r.settings.RouterTrackActiveBlocks && (r.decider.traits.ActiveBlocks || p.ID != "" || p.QueryOnly)
	began := r.now()
	if len(request.Tokens) > 0 && (p.counted || r.index.CanMatch()) {
		scratch.local = request.Hashes(scratch.local[:0], r.blockSize)
		p.local = scratch.local
	}
	if r.index.CanMatch() {
		p.lookahead = request.lookaheadHashes(r.index.Lookaheads(), r.blockSize)
	}
	hashed := r.now()
	scratch.matches = r.match(scratch.matches[:0], &p, r.parts())
	p.matches = scratch.matches
	lookedUp := r.now()
	p.shared = r.settings.RouterAssumeKVReuse
	if p.Override != nil && p.Override.AssumeKVReuse != nil {
		p.shared = *p.Override.AssumeKVReuse
	}
	p.shared = p.shared || p.Sequence != nil // it has its own shared blocks
	if p.counted && p.shared {
		if p.sequence = p.Sequence; p.sequence == nil {
			p.sequence = kv.SequenceHashes(make([]uint64, 0, len(p.local)), p.local) // the booking keeps it
		}
	}
	sequenced := r.now()
	return p, Decision{Tokens: p.tokens, HashTime: hashed.Sub(began), LookupTime: lookedUp.Sub(hashed), SequenceTime: sequenced.Sub(lookedUp)}
}

// parts returns the parts of a match that the choice of a worker needs.
func (r *Router) parts() (parts kv.MatchParts) {
	if r.decider.traits.Staged {
		parts |= kv.StagedPart
	}
	if r.fleet.pulls.Load() {
		parts |= kv.HostedPart
	}
	return parts
}

// match appends to dst, by worker, how many leading blocks of p each has. A worker
// with both kinds of blocks, of which one is assumed, has the longer match.
func (r *Router) match(dst []kv.Match, p *prompt, parts kv.MatchParts) []kv.Match {
	start := len(dst)
	dst = r.fleet.matchCells(r.index.Match(p.local, r.decider.usableOf(p), parts, dst), start, p.local)
	for _, local := range p.lookahead {
		before := len(dst)
		dst = r.fleet.matchCells(r.index.Match(local, min(r.decider.usableOf(p), len(local)), parts, dst), before, local)
		if before > start && len(dst) > before {
			dst = dst[:start+len(radix.Longest(dst[start:]))]
		}
	}
	return dst
}

// usableBlocks is how many cached blocks an engine can use of a prompt of that
// many tokens: it always computes the last token itself, so a prompt of exactly
// k blocks uses at most k − 1.
func (d *decider) usableBlocks(tokens int) int {
	if tokens <= 0 {
		return 0
	}
	return (tokens - 1) / d.router.blockSize
}

// usableOf is usableBlocks of p; all of its blocks if the number of its tokens is unknown.
func (d *decider) usableOf(p *prompt) int {
	if p.tokens <= 0 {
		return len(p.local)
	}
	return d.usableBlocks(p.tokens)
}

// Overlap is the number of a prompt's leading blocks that one worker holds.
type Overlap struct {
	Worker kv.WorkerKey
	Blocks int            // on the device
	Staged kv.LowerBlocks // as of kv.Match
}

// Overlaps returns the overlap of every worker that is up, and the number of the
// prompt's full blocks. It chooses nothing.
func (r *Router) Overlaps(request Request) (overlaps []Overlap, blocks int) {
	local := request.Local
	if len(request.Tokens) > 0 {
		local = request.Hashes(nil, r.blockSize)
	}
	p := prompt{Request: request, local: local, tokens: max(request.NumTokens, len(request.Tokens))}
	p.lookahead = request.lookaheadHashes(r.index.Lookaheads(), r.blockSize)
	matches := r.match(nil, &p, kv.StagedPart)
	for _, t := range r.Targets() {
		overlap := Overlap{Worker: t.Key}
		if i := slices.IndexFunc(matches, func(m kv.Match) bool { return m.Worker == t.Key }); i >= 0 {
			overlap.Blocks, overlap.Staged = matches[i].Blocks, matches[i].Staged
		}
		overlaps = append(overlaps, overlap)
	}
	return overlaps, len(local)
}
