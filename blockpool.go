package main

import "math/bits"

// blockPool is a simulated worker's paged KV memory: a fixed number of blocks,
// each free, active (referenced by one request or more) or inactive (referenced
// by none, its contents kept under a key until the memory is needed). Inactive
// blocks are taken again in the order of their release, oldest first. Blocks
// have numbers from 1. It is not safe for concurrent use.
type blockPool struct {
	blocks   []poolBlock // by number; blocks[0] is the head of the inactive list
	free     []uint32
	buckets  []uint32 // by the key's lower bits: the first block with a key, active or inactive
	inactive int      // blocks in the inactive list
}

// poolBlock is one block. Inactive ones are in a ring through block 0, oldest
// release first.
type poolBlock struct {
	key        uint64
	refs       int32
	keyed      bool // its bucket leads here
	prev, next uint32
	// before and after are its neighbours in its bucket, 0 at the ends.
	before, after uint32
}

func newBlockPool(size int) *blockPool {
	p := &blockPool{blocks: make([]poolBlock, size+1), free: make([]uint32, size), buckets: make([]uint32, bucketsFor(size))}
	for i := range p.free {
		p.free[i] = uint32(size - i)
	}
	return p
}

// bucketsFor is one or two a block; keys are hashes, so few share one.
func bucketsFor(size int) int { return 1 << bits.Len(uint(size)) }

// find returns the block with that key, or 0.
func (p *blockPool) find(key uint64) uint32 {
	b := *p.bucket(key)
	for b != 0 && p.blocks[b].key != key {
		b = p.blocks[b].after
	}
	return b
}

func (p *blockPool) bucket(key uint64) *uint32 { return &p.buckets[key&uint64(len(p.buckets)-1)] }

// available is how many blocks can be taken.
func (p *blockPool) available() int { return len(p.free) + p.inactive }

// size is how many blocks there are.
func (p *blockPool) size() int { return len(p.blocks) - 1 }

// held is how many blocks are not free.
func (p *blockPool) held() int { return p.size() - len(p.free) }

// active is how many blocks requests refer to.
func (p *blockPool) active() int { return p.size() - p.available() }

// acquire adds a reference to block b, which has a key.
func (p *blockPool) acquire(b uint32) {
	if p.blocks[b].refs == 0 {
		p.unlink(b)
	}
	p.blocks[b].refs++
}

// take returns a block with one reference and no key. If its memory had to be
// taken from an inactive block, evicted is that one's key. It returns 0 if every
// block is active.
func (p *blockPool) take() (b uint32, evicted uint64, hasEvicted bool) {
	if len(p.free) == 0 {
		if b = p.oldest(); b == 0 {
			return 0, 0, false
		}
		evicted, hasEvicted = p.evict(b), true
	}
	n := len(p.free)
	b, p.free = p.free[n-1], p.free[:n-1]
	p.blocks[b].refs = 1
	return b, evicted, hasEvicted
}

// oldest returns the inactive block that was released longest ago, or 0.
func (p *blockPool) oldest() uint32 { return p.blocks[0].next }

// evict frees the inactive block b and returns its key.
func (p *blockPool) evict(b uint32) (key uint64) {
	key = p.blocks[b].key
	p.unlink(b)
	p.unkey(b)
	p.free = append(p.free, b)
	return key
}

// grow adds free blocks up to that many in all.
func (p *blockPool) grow(size int) {
	first := len(p.blocks)
	p.blocks = append(p.blocks, make([]poolBlock, size+1-first)...)
	for b := size; b >= first; b-- {
		p.free = append(p.free, uint32(b))
	}
	p.buckets = make([]uint32, bucketsFor(size))
	for b := 1; b < first; b++ {
		if p.blocks[b].keyed {
			p.setKey(uint32(b), p.blocks[b].key)
		}
	}
}

// setKey puts the contents of block b, which has no key, under one that no
// block has.
func (p *blockPool) setKey(b uint32, key uint64) {
	first := p.bucket(key)
	p.blocks[b].key, p.blocks[b].keyed, p.blocks[b].before, p.blocks[b].after = key, true, 0, *first
	p.blocks[*first].before = b // of block 0 nobody reads it
	*first = b
}

// release drops one reference to block b. With the last one a block with a key
// becomes the newest inactive one, another becomes free.
func (p *blockPool) release(b uint32) {
	block := &p.blocks[b]
	if block.refs--; block.refs > 0 {
		return
	}
	if !block.keyed {
		p.free = append(p.free, b)
		return
	}
	newest := p.blocks[0].prev
	block.prev, block.next = newest, 0
	p.blocks[newest].next = b
	p.blocks[0].prev = b
	p.inactive++
}

// reset takes the keys of all blocks and frees the inactive ones.
func (p *blockPool) reset() {
	for b := uint32(1); int(b) < len(p.blocks); b++ {
		if !p.blocks[b].keyed {
			continue
		}
		p.unkey(b)
		if p.blocks[b].refs == 0 {
			p.unlink(b)
			p.free = append(p.free, b)
		}
	}
}

func (p *blockPool) unlink(b uint32) {
	block := &p.blocks[b]
	p.blocks[block.prev].next = block.next
	p.blocks[block.next].prev = block.prev
	block.prev, block.next = 0, 0
	p.inactive--
}

func (p *blockPool) unkey(b uint32) {
	block := &p.blocks[b]
	if block.before == 0 {
		*p.bucket(block.key) = block.after
	} else {
		p.blocks[block.before].after = block.after
	}
	p.blocks[block.after].before = block.before
	block.keyed = false
}
