// Package blockpool models paged KV memory: reference-counted blocks with LRU eviction.
package blockpool

import "math/bits"

// Pool is a simulated worker's paged KV memory: a fixed number of blocks,
// each free, active (referenced by one request or more) or inactive (referenced
// by none, its contents kept under a key until the memory is needed). Inactive
// blocks are taken again in the order of their release, oldest first. Blocks
// have numbers from 1. It is not safe for concurrent use.
type Pool struct {
	blocks   []block // by number; blocks[0] is the head of the inactive list
	free     []uint32
	buckets  []uint32 // by the key's lower bits: the first block with a key, active or inactive
	inactive int      // blocks in the inactive list
}

// block is one block. Inactive ones are in a ring through block 0, oldest
// release first.
type block struct {
	key        uint64
	refs       int32
	keyed      bool // its bucket leads here
	prev, next uint32
	// before and after are its neighbours in its bucket, 0 at the ends.
	before, after uint32
}

// New returns a pool of size free blocks.
func New(size int) *Pool {
	p := &Pool{blocks: make([]block, size+1), free: make([]uint32, size), buckets: make([]uint32, bucketsFor(size))}
	for i := range p.free {
		p.free[i] = uint32(size - i)
	}
	return p
}

// bucketsFor returns the number of buckets that a pool of that size has: one or two for
// each block. Keys are hashes, so few share a bucket.
func bucketsFor(size int) int { return 1 << bits.Len(uint(size)) }

// Find returns the block with that key, or 0.
func (p *Pool) Find(key uint64) uint32 {
	b := *p.bucket(key)
	for b != 0 && p.blocks[b].key != key {
		b = p.blocks[b].after
	}
	return b
}

func (p *Pool) bucket(key uint64) *uint32 { return &p.buckets[key&uint64(len(p.buckets)-1)] }

// Available returns the number of blocks that Take can return: free and inactive
// ones.
func (p *Pool) Available() int { return len(p.free) + p.inactive }

// Size returns the number of blocks.
func (p *Pool) Size() int { return len(p.blocks) - 1 }

// Held returns the number of blocks that are active or inactive.
func (p *Pool) Held() int { return p.Size() - len(p.free) }

// Active returns the number of blocks that requests reference.
func (p *Pool) Active() int { return p.Size() - p.Available() }

// Refs returns the number of references to block b.
func (p *Pool) Refs(b uint32) int { return int(p.blocks[b].refs) }

// FreeBlocks returns the number of blocks that are free.
func (p *Pool) FreeBlocks() int { return len(p.free) }

// Acquire adds a reference to block b, which has a key.
func (p *Pool) Acquire(b uint32) {
	if p.blocks[b].refs == 0 {
		p.unlink(b)
	}
	p.blocks[b].refs++
}

// Take returns a block with one reference and no key. If no block was free, it
// evicts the oldest inactive one and returns that one's key as evicted. It returns
// block 0 if every block is active.
func (p *Pool) Take() (b uint32, evicted uint64, hasEvicted bool) {
	if len(p.free) == 0 {
		if b = p.Oldest(); b == 0 {
			return 0, 0, false
		}
		evicted, hasEvicted = p.Evict(b), true
	}
	n := len(p.free)
	b, p.free = p.free[n-1], p.free[:n-1]
	p.blocks[b].refs = 1
	return b, evicted, hasEvicted
}

// Oldest returns the inactive block that was released longest ago, or 0.
func (p *Pool) Oldest() uint32 { return p.blocks[0].next }

// Evict frees the inactive block b and returns its key.
func (p *Pool) Evict(b uint32) (key uint64) {
	key = p.blocks[b].key
	p.unlink(b)
	p.unkey(b)
	p.free = append(p.free, b)
	return key
}

// Grow adds free blocks until there are size in all; size must not be less than Size.
func (p *Pool) Grow(size int) {
	first := len(p.blocks)
	p.blocks = append(p.blocks, make([]block, size+1-first)...)
	for b := size; b >= first; b-- {
		p.free = append(p.free, uint32(b))
	}
	p.buckets = make([]uint32, bucketsFor(size))
	for b := 1; b < first; b++ {
		if p.blocks[b].keyed {
			p.SetKey(uint32(b), p.blocks[b].key)
		}
	}
}

// SetKey sets the key of block b, which has none; no other block may have that key.
func (p *Pool) SetKey(b uint32, key uint64) {
	first := p.bucket(key)
	p.blocks[b].key, p.blocks[b].keyed, p.blocks[b].before, p.blocks[b].after = key, true, 0, *first
	p.blocks[*first].before = b // never read of block 0
	*first = b
}

// Release drops one reference to block b. After the last one, a block with a key
// becomes the newest inactive block, and a block without a key becomes free.
func (p *Pool) Release(b uint32) {
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

// Reset removes the keys of all blocks and frees the inactive ones.
func (p *Pool) Reset() {
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

func (p *Pool) unlink(b uint32) {
	block := &p.blocks[b]
	p.blocks[block.prev].next = block.next
	p.blocks[block.next].prev = block.prev
	block.prev, block.next = 0, 0
	p.inactive--
}

func (p *Pool) unkey(b uint32) {
	block := &p.blocks[b]
	if block.before == 0 {
		*p.bucket(block.key) = block.after
	} else {
		p.blocks[block.before].after = block.after
	}
	p.blocks[block.after].before = block.before
	block.keyed = false
}
