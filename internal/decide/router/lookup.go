package router

import (
	"cmp"
	"slices"

	"kvrouter/internal/base/kv"
)

// workspace holds the buffers of one look-up, reused by later ones.
type workspace struct {
	views   []view
	matches []kv.Match
}

// lookUp hashes a request's prompt and looks it up in the index. It needs no lock.
func (r *Router) lookUp(request Request, scratch *workspace) (p prompt, d Decision) {
	p = prompt{Request: request}
	p.tokens = max(request.NumTokens, len(request.Tokens))
	p.counted = r.settings.RouterTrackActiveBlocks && (r.decider.traits.ActiveBlocks || p.ID != "" || p.QueryOnly)
	began := r.now()
	r.hash(&p, scratch, p.counted || r.index.CanMatch())
	if r.index.CanMatch() {
		r.lookAhead(&p)
	}
	hashed := r.now()
	p.matchedAt = hashed
	scratch.matches = r.match(scratch.matches[:0], &p, r.parts())
	p.matches = scratch.matches
	lookedUp := r.now()
	p.shared = r.settings.RouterAssumeKVReuse
	if p.Override != nil && p.Override.AssumeKVReuse != nil {
		p.shared = *p.Override.AssumeKVReuse
	}
	p.shared = p.shared || p.Sequence != nil // it has its own shared blocks
	for i := range p.views {
		v := &p.views[i]
		switch {
		case !p.counted || !p.shared:
		case p.Sequence == nil:
			v.sequence = kv.SequenceHashes(make([]uint64, 0, len(v.local)), v.local) // the booking keeps it
		case v.size == cmp.Or(p.BlockSize, p.unit):
			v.sequence = p.Sequence
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

// Overlap is the number of a prompt's leading blocks that one worker holds.
type Overlap struct {
	Worker kv.WorkerKey
	Blocks int            // on the device
	Staged kv.LowerBlocks // as of kv.Match
}

// Overlaps returns the overlap of every worker that is up, the tokens of the blocks in which it is
// counted, and the number of the prompt's full blocks. It chooses nothing.
func (r *Router) Overlaps(request Request) (overlaps []Overlap, unit, blocks int) {
	p := prompt{Request: request, tokens: max(request.NumTokens, len(request.Tokens))}
	r.hash(&p, new(workspace), true)
	r.lookAhead(&p)
	matches := r.match(nil, &p, kv.StagedPart)
	for _, t := range r.Targets() {
		overlap := Overlap{Worker: t.Key}
		if i := slices.IndexFunc(matches, func(m kv.Match) bool { return m.Worker == t.Key }); i >= 0 {
			overlap.Blocks, overlap.Staged = matches[i].Blocks, matches[i].Staged
		}
		overlaps = append(overlaps, overlap)
	}
	return overlaps, p.unit, len(p.views[0].local)
}
