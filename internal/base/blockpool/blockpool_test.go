package blockpool

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestPoolAgainstAListOfKeys compares the pool with the plainest one: a map of
// references and a list of inactive keys.
func TestPoolAgainstAListOfKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 6).Draw(t, "size")
		pool := New(size)
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
				if b := pool.Find(key); b != 0 {
					if !known {
						t.Fatalf("key %d is found but should be gone", key)
					}
					pool.Acquire(b)
					held = append(held, reference{b, key, true})
					lru = slices.DeleteFunc(lru, func(k uint64) bool { return k == key })
					return
				}
				if known {
					t.Fatalf("key %d is lost", key)
				}
				b, evicted, hasEvicted := pool.Take()
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
					pool.SetKey(b, key)
					held = append(held, reference{b, key, true})
				}
			},
			"take nameless": func(t *rapid.T) {
				full := active() == size
				b, _, hasEvicted := pool.Take()
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
				pool.Release(r.block)
				if r.keyed && !slices.ContainsFunc(held, func(o reference) bool { return o.block == r.block }) {
					lru = append(lru, r.key)
				}
			},
			"reset": func(t *rapid.T) {
				pool.Reset()
				lru = nil
				for i := range held {
					held[i].keyed = false
				}
			},
			"": func(t *rapid.T) {
				if err := pool.Check(); err != nil {
					t.Fatal(err)
				}
				if pool.Active() != active() || pool.inactive != len(lru) {
					t.Fatalf("%d active, %d inactive; want %d, %d", pool.Active(), pool.inactive, active(), len(lru))
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
