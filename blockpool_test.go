package main

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// check tells what is inconsistent in the pool: every block is free, inactive
// or active, and keys lead to the blocks that have them.
func (p *blockPool) check() error {
	seen := make([]bool, len(p.blocks))
	for _, b := range p.free {
		if seen[b] || p.blocks[b].refs != 0 || p.blocks[b].keyed {
			return fmt.Errorf("free block %d: listed twice %v, %d references, keyed %v", b, seen[b], p.blocks[b].refs, p.blocks[b].keyed)
		}
		seen[b] = true
	}
	inactive := p.order()
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
			if found := p.find(block.key); found != uint32(b) {
				return fmt.Errorf("key %d of block %d leads to %d", block.key, b, found)
			}
		}
	}
	if linked := p.keys(); keyed != linked {
		return fmt.Errorf("%d keyed blocks, %d in buckets", keyed, linked)
	}
	return nil
}

// keys counts the blocks that the buckets lead to.
func (p *blockPool) keys() int {
	linked := 0
	for _, b := range p.buckets {
		for ; b != 0; b = p.blocks[b].after {
			linked++
		}
	}
	return linked
}

// order returns the inactive blocks, oldest release first.
func (p *blockPool) order() []uint32 {
	var blocks []uint32
	for b := p.blocks[0].next; b != 0; b = p.blocks[b].next {
		blocks = append(blocks, b)
	}
	return blocks
}

// TestPoolAgainstAListOfKeys compares the pool with the plainest one: a map of
// references and a list of inactive keys.
func TestPoolAgainstAListOfKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 6).Draw(t, "size")
		pool := newBlockPool(size)
		type reference struct {
			block uint32
			key   uint64
			keyed bool
		}
		var held []reference
		var lru []uint64
		active := func() int {
			distinct := map[uint32]bool{}
			for _, r := range held {
				distinct[r.block] = true
			}
			return len(distinct)
		}
		t.Repeat(map[string]func(*rapid.T){
			"use key": func(t *rapid.T) {
				key := rapid.Uint64Range(1, 8).Draw(t, "key")
				known := slices.Contains(lru, key) || slices.ContainsFunc(held, func(r reference) bool { return r.keyed && r.key == key })
				if b := pool.find(key); b != 0 {
					if !known {
						t.Fatalf("key %d is found but should be gone", key)
					}
					pool.acquire(b)
					held = append(held, reference{b, key, true})
					lru = slices.DeleteFunc(lru, func(k uint64) bool { return k == key })
					return
				}
				if known {
					t.Fatalf("key %d is lost", key)
				}
				b, evicted, hasEvicted := pool.take()
				if (b == 0) != (active() == size) {
					t.Fatalf("take gave block %d with %d of %d active", b, active(), size)
				}
				if hasEvicted {
					if evicted != lru[0] {
						t.Fatalf("evicted %d, the oldest is %d", evicted, lru[0])
					}
					lru = lru[1:]
				}
				if b != 0 {
					pool.setKey(b, key)
					held = append(held, reference{b, key, true})
				}
			},
			"take nameless": func(t *rapid.T) {
				full := active() == size
				b, _, hasEvicted := pool.take()
				if (b == 0) != full {
					t.Fatalf("take gave block %d, full %v", b, full)
				}
				if hasEvicted {
					lru = lru[1:]
				}
				if b != 0 {
					held = append(held, reference{block: b})
				}
			},
			"release": func(t *rapid.T) {
				if len(held) == 0 {
					return
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				r := held[i]
				held = slices.Delete(held, i, i+1)
				pool.release(r.block)
				if r.keyed && !slices.ContainsFunc(held, func(o reference) bool { return o.block == r.block }) {
					lru = append(lru, r.key)
				}
			},
			"reset": func(t *rapid.T) {
				pool.reset()
				lru = nil
				for i := range held {
					held[i].keyed = false
				}
			},
			"": func(t *rapid.T) {
				if err := pool.check(); err != nil {
					t.Fatal(err)
				}
				if pool.active() != active() || pool.inactive != len(lru) {
					t.Fatalf("%d active, %d inactive; want %d, %d", pool.active(), pool.inactive, active(), len(lru))
				}
				for _, r := range held {
					n := 0
					for _, o := range held {
						if o.block == r.block {
							n++
						}
					}
					if int(pool.blocks[r.block].refs) != n {
						t.Fatalf("block %d has %d references, want %d", r.block, pool.blocks[r.block].refs, n)
					}
				}
			},
		})
	})
}
