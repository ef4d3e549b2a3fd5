package blockpool

import "fmt"

// Check returns the first inconsistency of the pool: every block must be free,
// inactive or active, and every key must lead to its block.
func (p *Pool) Check() error {
	seen := make([]bool, len(p.blocks))
	for _, b := range p.free {
		if seen[b] || p.blocks[b].refs != 0 || p.blocks[b].keyed {
			return fmt.Errorf("free block %d: listed twice %v, %d references, keyed %v", b, seen[b], p.blocks[b].refs, p.blocks[b].keyed)
		}
		seen[b] = true
	}
	inactive := p.Order()
	if len(inactive) != p.inactive {
		return fmt.Errorf("%d inactive blocks in the list, %d counted", len(inactive), p.inactive)
	}
	for _, b := range inactive {
		if seen[b] || p.blocks[b].refs != 0 || !p.blocks[b].keyed {
			return fmt.Errorf("inactive block %d: listed twice %v, %d references, keyed %v", b, seen[b], p.blocks[b].refs, p.blocks[b].keyed)
		}
		seen[b] = true
	}
	keyed := 0
	for b := 1; b < len(p.blocks); b++ {
		block := p.blocks[b]
		if !seen[b] && block.refs <= 0 {
			return fmt.Errorf("block %d is in no list and has %d references", b, block.refs)
		}
		if block.keyed {
			keyed++
			if found := p.Find(block.key); found != uint32(b) {
				return fmt.Errorf("key %d of block %d leads to %d", block.key, b, found)
			}
		}
	}
	if linked := p.Keys(); keyed != linked {
		return fmt.Errorf("%d keyed blocks, %d in buckets", keyed, linked)
	}
	return nil
}

// Keys counts the blocks that the buckets lead to.
func (p *Pool) Keys() int {
	linked := 0
	for _, b := range p.buckets {
		for ; b != 0; b = p.blocks[b].after {
			linked++
		}
	}
	return linked
}

// Order returns the inactive blocks, oldest release first.
func (p *Pool) Order() []uint32 {
	var blocks []uint32
	for b := p.blocks[0].next; b != 0; b = p.blocks[b].next {
		blocks = append(blocks, b)
	}
	return blocks
}

// References returns the number of references to each block, by the block's number.
func (p *Pool) References() []int32 {
	refs := make([]int32, len(p.blocks))
	for b := range p.blocks {
		refs[b] = p.blocks[b].refs
	}
	return refs
}
