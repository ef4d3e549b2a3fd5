package router

import (
	"cmp"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// units are the block sizes of the workers that are up. Each worker is matched in blocks of its own
// size. What is compared among workers is counted in blocks of unit tokens, which divides all sizes.
type units struct {
	unit  int   // tokens
	sizes []int // tokens, ascending; the first is unit
}

// unitsOf returns the units of workers with blocks of these sizes, more than 0 tokens each. There is
// at least one size.
func unitsOf(sizes []int) *units {
	sizes = slices.Compact(slices.Sorted(slices.Values(sizes)))
	unit := sizes[0]
	for _, size := range sizes {
		unit = kv.CommonBlock(unit, size)
	}
	if unit != sizes[0] { // policies know prompts in blocks of the unit
		sizes = slices.Insert(sizes, 0, unit)
	}
	return &units{unit, sizes}
}

// view is a prompt in blocks of one size.
type view struct {
	size      int        // tokens
	times     int        // units in a block
	local     []uint64   // local block hashes
	lookahead [][]uint64 // those of workers whose blocks depend on the tokens behind them
	sequence  []uint64   // sequence hashes, if shared blocks count once
	distinct  int        // units of active blocks where no other request is
	usable    int        // leading units that a worker can have of it, by the policy's reckoning
}

// viewOf returns the prompt in blocks of size tokens. A worker of a size that was not there when the
// prompt was looked up has nothing of it.
func (p *prompt) viewOf(size int) *view {
	for i := range p.views {
		if p.views[i].size == size {
			return &p.views[i]
		}
	}
	return &p.none
}

// hash fills the prompt's views with the local hashes of its blocks. scratch has their buffers.
func (r *Router) hash(p *prompt, scratch *workspace, wanted bool) {
	all := r.fleet.units.Load()
	p.unit = all.unit
	for len(scratch.views) < len(all.sizes) {
		scratch.views = append(scratch.views, view{})
	}
	p.views = scratch.views[:len(all.sizes)]
	for i, size := range all.sizes {
		local := p.views[i].local[:0]
		p.views[i] = view{size: size, times: size / all.unit, local: local}
		switch v := &p.views[i]; {
		case wanted && len(p.Tokens) > 0:
			v.local = p.hashes(local, size, all.unit)
		case size == cmp.Or(p.BlockSize, all.unit):
			v.local = append(local, p.Local...)
		}
	}
}

// hashes is Hashes in blocks of another size than that of the words of Media.
func (q *Request) hashes(dst []uint64, size, blockSize int) []uint64 {
	return kv.HashMediaBlocks(dst, q.plain(size, blockSize), size, q.LoRA, q.Salt, q.words(size, blockSize))
}

// plain returns the leading tokens whose blocks of size tokens can be hashed: the words of Media are
// those of blocks of blockSize tokens.
func (q *Request) plain(size, blockSize int) []uint32 {
	if len(q.Items) == 0 && size != blockSize {
		if at := slices.IndexFunc(q.Media, func(words []uint64) bool { return len(words) > 0 }); at >= 0 {
			return q.Tokens[:min(at*blockSize, len(q.Tokens))]
		}
	}
	return q.Tokens
}

// words returns the words of the prompt's media in blocks of size tokens.
func (q *Request) words(size, blockSize int) [][]uint64 {
	switch {
	case len(q.Items) > 0:
		return kv.MediaBlocks(q.Items, size)
	case size == blockSize:
		return q.Media
	}
	return nil
}

// lookAhead fills the views with the hashes for workers whose blocks depend on the tokens behind them.
func (r *Router) lookAhead(p *prompt) {
	kinds := r.index.Lookaheads()
	if len(kinds) == 0 {
		return
	}
	for i := range p.views {
		v := &p.views[i]
		for _, l := range kinds {
			tokens := p.plain(v.size, p.unit)
			if len(tokens) >= p.NumTokens {
				tokens = tokens[:max(0, len(tokens)-l.Cut)]
			}
			v.lookahead = append(v.lookahead, kv.HashLookaheadBlocks(make([]uint64, 0, len(tokens)/v.size), tokens, v.size, l.Tokens,
				p.LoRA, p.Salt, p.words(v.size, p.unit)))
		}
	}
}

// match appends to dst, by worker, how many leading units of p each has. A worker with both kinds of
// blocks, of which one is assumed, has the longer match.
func (r *Router) match(dst []kv.Match, p *prompt, parts kv.MatchParts) []kv.Match {
	start := len(dst)
	longest := func(before int) {
		if before > start && len(dst) > before {
			dst = dst[:start+len(radix.Longest(dst[start:]))]
		}
	}
	for i := range p.views {
		v, before := &p.views[i], len(dst)
		usable := len(v.local)
		if p.tokens > 0 {
			usable = usableBlocks(p.tokens, v.size)
		}
		dst = r.matchBlocks(dst, v, v.local, usable, parts)
		longest(before)
		for _, local := range v.lookahead {
			before = len(dst)
			dst = r.matchBlocks(dst, v, local, min(usable, len(local)), parts)
			longest(before)
		}
	}
	return dst
}

// matchBlocks appends to dst what workers have of one kind of the view's blocks.
func (r *Router) matchBlocks(dst []kv.Match, v *view, local []uint64, usable int, parts kv.MatchParts) []kv.Match {
	before := len(dst)
	dst = r.fleet.matchCells(r.index.Match(local, usable, parts, dst), before, local)
	if v.times > 1 {
		for i := range dst[before:] {
			dst[before+i].Scale(v.times)
		}
	}
	return dst
}

// usableBlocks is how many cached blocks an engine can use of a prompt of that many tokens: it always
// computes the last token itself, so a prompt of exactly k blocks uses at most k − 1.
func usableBlocks(tokens, size int) int { return max(0, tokens-1) / size }
