package radix

import (
	"cmp"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/sets"
)

// rules say how many leading blocks of a prompt a request finds in a worker's groups.
// Lengths are in blocks of the index where no other unit is named.
//
// They are vLLM's (find_longest_cache_hit in v1/core/kv_cache_coordinator.py and
// v1/core/single_type_kv_cache_manager.py, read in 0.32.0): the longest prefix, a
// multiple of unit and short enough to leave one token to compute, that each group
// accepts.
type rules struct {
	tokens int  // of a block of the index
	unit   int  // least common multiple of the groups' block sizes
	rooted bool // the first group needs all blocks from the first one on
	drops  bool // the last block is computed again
	quick  int  // blocks of all other groups up to a match's end with which they accept it; 0: not known
	// kinds are the groups, those of one specification together, full attention first.
	kinds []rule
}

// rule is the rule of groups with one specification. They accept what each of them does.
type rule struct {
	attention kv.Attention
	block     int   // size of a block
	need      int   // of a sliding window: blocks of the group up to the end of the match
	chunk     int   // of chunked local attention: its length, tokens
	index     int   // the engine's number of the first of them
	places    []int // in the Layout
}

// beyond reports whether a match depends on blocks behind those that the first group
// holds.
func (r *rules) beyond() bool { return !r.rooted || r.drops && len(r.kinds) > 1 }

// maxUnit bounds the least common multiple, in blocks of the index.
const maxUnit = 1 << 24

// rulesOf returns the rules for a layout whose block sizes are multiples of block tokens.
func rulesOf(layout kv.Layout, block int) rules {
	r := rules{tokens: block, unit: 1, rooted: true, drops: layout.DropsLast}
	for i, g := range layout.Groups {
		next := rule{attention: g.Attention, block: max(1, g.Block/block), index: g.Index}
		switch g.Attention {
		case kv.SlidingWindow:
			next.need = (g.Window - 1 + g.Block - 1) / g.Block
		case kv.ChunkedLocal:
			next.chunk = g.Window
		}
		if i == 0 {
			r.rooted = g.Attention == kv.FullAttention
		}
		r.unit = min(lcm(r.unit, next.block), maxUnit)
		at := slices.IndexFunc(layout.Groups[:i], func(o kv.CacheGroup) bool {
			return o.Attention == g.Attention && o.Window == g.Window && o.Block == g.Block
		})
		if at < 0 {
			next.places = []int{i}
			r.kinds = append(r.kinds, next)
			continue
		}
		for k := range r.kinds {
			if slices.Contains(r.kinds[k].places, at) {
				r.kinds[k].places = append(r.kinds[k].places, i)
			}
		}
	}
	slices.SortStableFunc(r.kinds, func(a, b rule) int {
		return cmp.Compare(min(a.attention, 1), min(b.attention, 1)) // full attention is 0
	})
	r.quick = r.sufficient()
	return r
}

// sufficient returns quick: for windows and states beside one group of full attention,
// with blocks of one size.
func (r *rules) sufficient() (blocks int) {
	if len(r.kinds) < 2 || !r.rooted || r.drops || r.unit > 1 || len(r.kinds[0].places) > 1 {
		return 0
	}
	for _, k := range r.kinds[1:] {
		if k.attention != kv.SlidingWindow && k.attention != kv.State {
			return 0
		}
		blocks = max(1, blocks, k.need)
	}
	return blocks
}

func lcm(a, b int) int {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// pathRun is nodes of a prompt's path that have the same set of slots.
type pathRun struct {
	start int      // block of the prompt at which they begin
	words []uint64 // of the set
}

// path is the nodes of a prompt, as far as they exist. It is read backwards, run by run.
type path struct {
	runs   []pathRun
	length int // blocks

	slots [kv.MaxCacheGroups]uint32 // that held is about
	count int                       // of them
	last  int                       // run that runAt has found
	run   int                       // that held is about
	held  bool                      // all slots hold the blocks of the run
	full  []int                     // of hit: by kind, what it accepts plus 1
}

// begin makes p answer for the groups at these places in the Layout, from block end-1 on.
func (p *path) begin(g *groupSlots, first uint32, places []int) {
	p.count = 0
	for _, at := range places {
		slot := first
		if at > 0 {
			slot = g.others[at-1]
		}
		p.slots[p.count] = slot
		p.count++
	}
	p.run = len(p.runs) - 1
	p.look()
}

func (p *path) look() {
	words := p.runs[p.run].words
	p.held = true
	for _, slot := range p.slots[:p.count] {
		p.held = p.held && sets.Has(words, slot)
	}
}

// seek goes back to the run of block i, and returns the first block of it. No i may be
// greater than that of the call before.
func (p *path) seek(i int) (start int) {
	if i < p.runs[p.run].start {
		for i < p.runs[p.run].start {
			p.run--
		}
		p.look()
	}
	return p.runs[p.run].start
}

// has reports whether all the groups hold block i of the prompt, which must be below its
// length and not above that of the call before.
func (p *path) has(i int) bool {
	p.seek(i)
	return p.held
}

// hold reports whether all groups but the first hold the blocks of a prompt from start
// to end, which must not be above the path's length.
func (g *groupSlots) hold(p *path, start, end int) bool {
	for i := len(p.runs) - 1; i >= 0; i-- {
		run := p.runs[i]
		if run.start >= end {
			continue
		}
		for _, o := range g.bits {
			if o.word >= len(run.words) || run.words[o.word]&o.bits != o.bits {
				return false
			}
		}
		if run.start <= start {
			return true
		}
	}
	return true
}

// hit returns how many leading blocks of a prompt the worker with groups g and the
// slot first finds, and the number of the group that accepts no more. held is the
// number of leading blocks in the first group, or the path's length if the rules are
// not rooted; usable is the greatest number of blocks that leaves a token to compute,
// and whole the number of full blocks.
//
// It is the fixed point of vLLM's HybridKVCacheCoordinator, in its order: with a
// drafter that order matters, because each specification drops its last block once only.
func (g *groupSlots) hit(first uint32, p *path, held, usable, whole int) (length, limit int) {
	r := &g.rules
	if len(r.kinds) == 0 {
		if length = min(held, usable); r.drops {
			length = max(0, length-1)
		}
		return length, 0
	}
	limit = r.kinds[0].index
	if length = min(held, usable); r.quick > 0 && g.hold(p, length-r.quick, length) {
		return length, limit
	}
	single := len(r.kinds) == 1 && len(r.kinds[0].places) == 1 // vLLM's UnitaryKVCacheCoordinator
	var verified uint64
	p.full = append(p.full[:0], make([]int, len(r.kinds))...)
	for length = usable; ; {
		current := length
		for i := range r.kinds {
			k := &r.kinds[i]
			if p.full[i] > 0 {
				current = min(current, p.full[i]-1)
				continue
			}
			drop := r.drops && verified>>i&1 == 0
			most := current
			if drop && !single && k.attention != kv.State && k.attention != kv.ChunkedLocal {
				most = min(current+k.block, whole)
			}
			if i == 0 && r.rooted {
				most = min(most, held)
			}
			found := 0
			if i == 0 && r.rooted && len(k.places) == 1 { // held says it
				found = k.dropped(most/k.block*k.block, drop, r)
			} else {
				p.begin(g, first, k.places)
				found = k.longest(p, most, drop, r)
			}
			if drop {
				verified |= 1 << i
			} else if found < current {
				verified = 0
			}
			if found < min(current, held) {
				limit = k.index
			}
			if current = found; k.attention == kv.FullAttention {
				p.full[i] = found + 1
			}
		}
		if current >= length || len(r.kinds) == 1 || len(r.kinds) == 2 && r.rooted {
			return current, limit
		}
		length = current
	}
}

// dropped returns what a hit of length blocks is with the last block dropped, if it is,
// and as a multiple of the rules' unit.
func (k *rule) dropped(length int, drop bool, r *rules) int {
	if drop {
		length -= k.block
	}
	return max(0, length) / r.unit * r.unit
}

// longest returns the greatest multiple of the rules' unit that the groups of path p
// accept of the first most blocks; with drop, the last block of it goes.
func (k *rule) longest(p *path, most int, drop bool, r *rules) int {
	step, beyond := k.block, most // behind the path, nothing is held
	most = min(most, p.length) / step * step
	switch k.attention {
	case kv.SlidingWindow:
		return k.longestWindow(p, most, drop, r)
	case kv.State:
		for most = most / r.unit * r.unit; most > 0 && !p.has(most-1); {
			most = min(most-1, p.seek(most-1)) / r.unit * r.unit
		}
		return most
	case kv.ChunkedLocal, kv.FullAttention:
		start, end := 0, most
		if k.attention == kv.ChunkedLocal {
			start, drop = beyond/step*step*r.tokens/k.chunk*k.chunk/r.tokens/step*step, false
			end = max(start, end) // before its chunk it needs nothing
		}
		for at := end; at > start; {
			held, begins := p.has(at-1), at-step
			if step == 1 {
				begins = max(start, p.seek(at-1)) // the run is like its last block
			}
			if !held {
				end = begins
			}
			at = begins
		}
		return k.dropped(end, drop, r)
	}
	return most
}

// longestWindow is longest for a sliding window: need blocks without a gap up to the
// end, or all of them.
func (k *rule) longestWindow(p *path, most int, drop bool, r *rules) int {
	step, need, dropped := k.block, k.need, 0
	if drop {
		dropped = step
		need++
	}
	need = max(1, need) // a window of one token needs none, but vLLM begins at one
	aligned := func(end int) int { return min(end, max(0, end-dropped)/r.unit*r.unit+dropped) }
	end, count := aligned(most), 0
	for at := end; at > 0 && count < need; {
		held, begins := p.has(at-1), at-step
		if step == 1 {
			begins = p.seek(at - 1) // the run is like its last block
		}
		if held {
			count += (at - begins) / step
			at = begins
			continue
		}
		count = 0
		end = aligned(begins)
		at = end
	}
	return k.dropped(end, drop, r)
}
