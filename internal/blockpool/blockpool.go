package blockpool

import "math/bits"

// blockPool is a simulated worker's paged KV memory: a fixed number of blocks,
// each free, active (referenced by one request or more) or inactive (referenced
// by none, its contents kept under a key until the memory is needed). Inactive
// blocks are taken again in the order of their release, oldest first. Blocks
// have numbers from 1. It is not safe for concurrent use.
type Pool struct {
	Blocks   []block // by number; blocks[0] is the head of the inactive list
	Free     []uint32
	buckets  []uint32 // by the key's lower bits: the first block with a key, active or inactive
	inactive int      // blocks in the inactive list
}

// poolBlock is one block. Inactive ones are in a ring through block 0, oldest
// release first.
type block struct {
	key        uint64
	Refs       int32
	keyed      bool // its bucket leads here
	prev, next uint32
	// before and after are its neighbours in its bucket, 0 at the ends.
	before, after uint32
}

func New(size int) *Pool {
	p := &Pool{Blocks: make([]block, size+1), Free: make([]uint32, size), buckets: make([]uint32, bucketsFor(size))}
	for i := range p.Free {
		p.Free[i] = uint32(size - i)
	}
	return p
}

// bucketsFor is one or two a block; keys are hashes, so few share one.
func bucketsFor(size int) int { return 1 << bits.Len(uint(size)) }

// Find returns the block with that key, or 0.
func (p *Pool) Find(key uint64) uint32 {
	b := *p.bucket(key)
	for b != 0 && p.Blocks[b].key != key {
		b = p.Blocks[b].after
	}
	return b
}

func (p *Pool) bucket(key uint64) *uint32 { return &p.buckets[key&uint64(len(p.buckets)-1)] }

// Available is how many blocks can be taken.
func (p *Pool) Available() int { return len(p.Free) + p.inactive }

// Size is how many blocks there are.
func (p *Pool) Size() int { return len(p.Blocks) - 1 }

// Held is how many blocks are not free.
func (p *Pool) Held() int { return p.Size() - len(p.Free) }

// Active is how many blocks requests refer to.
func (p *Pool) Active() int { return p.Size() - p.Available() }

// Acquire adds a reference to block b, which has a key.
func (p *Pool) Acquire(b uint32) {
	if p.Blocks[b].Refs == 0 {
		p.unlink(b)
	}
	p.Blocks[b].Refs++
}

// Take returns a block with one reference and no key. If its memory had to be
// taken from an inactive block, evicted is that one's key. It returns 0 if every
// block is active.
func (p *Pool) Take() (b uint32, evicted uint64, hasEvicted bool) {
	if len(p.Free) == 0 {
		if b = p.Oldest(); b == 0 {
			return 0, 0, false
		}
		evicted, hasEvicted = p.Evict(b), true
	}
	n := len(p.Free)
	b, p.Free = p.Free[n-1], p.Free[:n-1]
	p.Blocks[b].Refs = 1
	return b, evicted, hasEvicted
}

// Oldest returns the inactive block that was released longest ago, or 0.
func (p *Pool) Oldest() uint32 { return p.Blocks[0].next }

// Evict frees the inactive block b and returns its key.
func (p *Pool) Evict(b uint32) (key uint64) {
	key = p.Blocks[b].key
	p.unlink(b)
	p.unkey(b)
	p.Free = append(p.Free, b)
	return key
}

// Grow adds free blocks up to that many in all.
func (p *Pool) Grow(size int) {
	first := len(p.Blocks)
	p.Blocks = append(p.Blocks, make([]block, size+1-first)...)
	for b := size; b >= first; b-- {
		p.Free = append(p.Free, uint32(b))
	}
	p.buckets = make([]uint32, bucketsFor(size))
	for b := 1; b < first; b++ {
		if p.Blocks[b].keyed {
			p.SetKey(uint32(b), p.Blocks[b].key)
		}
	}
}

// SetKey puts the contents of block b, which has no key, under one that no
// block has.
func (p *Pool) SetKey(b uint32, key uint64) {
	first := p.bucket(key)
	p.Blocks[b].key, p.Blocks[b].keyed, p.Blocks[b].before, p.Blocks[b].after = key, true, 0, *first
	p.Blocks[*first].before = b // of block 0 nobody reads it
	*first = b
}

// Release drops one reference to block b. With the last one a block with a key
// becomes the newest inactive one, another becomes free.
func (p *Pool) Release(b uint32) {
	block := &p.Blocks[b]
	if block.Refs--; block.Refs > 0 {
		return
	}
	if !block.keyed {
		p.Free = append(p.Free, b)
		return
	}
	newest := p.Blocks[0].prev
	block.prev, block.next = newest, 0
	p.Blocks[newest].next = b
	p.Blocks[0].prev = b
	p.inactive++
}

// Reset takes the keys of all blocks and frees the inactive ones.
func (p *Pool) Reset() {
	for b := uint32(1); int(b) < len(p.Blocks); b++ {
		if !p.Blocks[b].keyed {
			continue
		}
		p.unkey(b)
		if p.Blocks[b].Refs == 0 {
			p.unlink(b)
			p.Free = append(p.Free, b)
		}
	}
}

func (p *Pool) unlink(b uint32) {
	block := &p.Blocks[b]
	p.Blocks[block.prev].next = block.next
	p.Blocks[block.next].prev = block.prev
	block.prev, block.next = 0, 0
	p.inactive--
}

func (p *Pool) unkey(b uint32) {
	block := &p.Blocks[b]
	if block.before == 0 {
		*p.bucket(block.key) = block.after
	} else {
		p.Blocks[block.before].after = block.after
	}
	p.Blocks[block.after].before = block.before
	block.keyed = false
}
