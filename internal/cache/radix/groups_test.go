package radix

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit"
)

// engineCache is the KV-cache groups of one engine as vLLM 0.32.0 keeps them: copies by
// engine hash. Its methods follow v1/core/kv_cache_coordinator.py and
// v1/core/single_type_kv_cache_manager.py line by line. Lengths are in tokens.
type engineCache struct {
	layout kv.Layout
	unit   int
	held   []map[uint64]int // by place in the layout
}

// cached reports whether all of the groups hold block i, in their own blocks, of a prompt.
func (c *engineCache) cached(groups []int, prompt []uint64, index, i int) bool {
	last := (i + 1) * c.layout.Groups[groups[0]].Block / index
	return last <= len(prompt) && !slices.ContainsFunc(groups, func(g int) bool { return c.held[g][prompt[last-1]] == 0 })
}

// longest is find_longest_cache_hit of the manager of groups with one specification.
func (c *engineCache) longest(g []int, prompt []uint64, index, most int, drop bool) int {
	group := c.layout.Groups[g[0]]
	size, blocks := group.Block, most/group.Block
	hit := func(n int) int { return n / c.unit * c.unit }
	switch group.Attention {
	case kv.FullAttention:
		n := 0
		for n < blocks && c.cached(g, prompt, index, n) {
			n++
		}
		if drop && n > 0 {
			n--
		}
		return hit(n * size)
	case kv.SlidingWindow:
		need := (group.Window - 1 + size - 1) / size
		if drop {
			need++
		}
		count := 0
		for i := blocks - 1; i >= 0; i-- {
			if !c.cached(g, prompt, index, i) {
				count = 0
				continue
			}
			after := i + 1
			if drop {
				after = i
			}
			if count == 0 && after*size%c.unit != 0 {
				continue
			}
			if count++; count >= need {
				return c.popped(i+count, size, drop)
			}
		}
		for count*size%c.unit != 0 {
			count--
		}
		return c.popped(count, size, drop)
	case kv.ChunkedLocal:
		n := most / group.Window * group.Window / size
		for n < blocks && c.cached(g, prompt, index, n) {
			n++
		}
		return n * size
	case kv.State:
		for i := blocks - 1; i >= 0; i-- {
			if c.cached(g, prompt, index, i) && (i+1)*size%c.unit == 0 {
				return (i + 1) * size
			}
		}
	}
	return 0
}

// popped is the end of the sliding window's lookup: the drafter's block goes.
func (c *engineCache) popped(n, size int, drop bool) int {
	if drop && n > 0 {
		for n--; n*size%c.unit != 0; n-- {
		}
	}
	return n * size
}

// find is find_longest_cache_hit of the coordinator for a prompt with these engine
// hashes, in blocks of index tokens, of which most tokens may be used.
func (c *engineCache) find(prompt []uint64, index, most int) int {
	if len(c.layout.Groups) == 1 {
		return c.longest([]int{0}, prompt, index, most, c.layout.DropsLast)
	}
	var specs []kv.CacheGroup // without their numbers, full attention first
	var of [][]int            // groups of each
	for _, full := range []bool{true, false} {
		for i, g := range c.layout.Groups {
			if g.Index = 0; (g.Attention == kv.FullAttention) != full {
				continue
			} else if at := slices.Index(specs, g); at >= 0 {
				of[at] = append(of[at], i)
			} else {
				specs, of = append(specs, g), append(of, []int{i})
			}
		}
	}
	length := most
	looked := map[int]int{}
	for verified := map[int]bool{}; ; {
		current := length
		for i, spec := range specs {
			if hit, has := looked[i]; has {
				current = min(current, hit)
				continue
			}
			drop, limit := c.layout.DropsLast && !verified[i], current
			if drop && spec.Attention != kv.State {
				limit = min(current+spec.Block, len(prompt)*index)
			}
			found := c.longest(of[i], prompt, index, limit, drop)
			if drop {
				verified[i] = true
			} else if found < current {
				clear(verified)
			}
			if current = found; spec.Attention == kv.FullAttention {
				looked[i] = found
			}
		}
		if current >= length {
			return current
		}
		if length = current; len(specs) == 2 && specs[0].Attention == kv.FullAttention {
			return length
		}
	}
}

const groupBlock = 4 // tokens of a block of the index

// layouts are those of the models in docs/models.md, and odd ones.
var layouts = []string{
	"0:full_attention/4",
	"1:full_attention/4 0:sliding_window=9/4",
	"2:full_attention/4 0:sliding_window=6/4 1:sliding_window=17/4",
	"0:full_attention/4 1:full_attention/4 2:sliding_window=1/4",
	"0:full_attention/8 1:sliding_window=9/4",
	"0:full_attention/4 1:sliding_window=20/12",
	"1:full_attention/4 0:mamba/4",
	"1:full_attention/8 0:mamba/8 2:mamba/8 3:sliding_window=9/8",
	"0:full_attention/4 1:chunked_local_attention=16/4",
	"0:full_attention/4 1:chunked_local_attention=8/4 2:chunked_local_attention=8/4",
	"0:sliding_window=13/4",
	"0:full_attention/4 1:sliding_window=9223372036854775807/4",
}

func TestGroupsFindWhatTheEngineFinds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SampledFrom(layouts).Draw(t, "layout")
		layout, err := kv.ParseLayout(text)
		if err != nil {
			t.Skip("not a layout that can be")
		}
		chunked := slices.ContainsFunc(layout.Groups, func(g kv.CacheGroup) bool { return g.Attention == kv.ChunkedLocal })
		layout.DropsLast = !chunked && // the engine refuses both
			rapid.Bool().Draw(t, "drops")
		tree := NewTreeWithBook(summary.NewBook())
		w := kv.WorkerKey{Worker: 1}
		tree.layoutSet(w, layout, groupBlock)
		// A plain worker beside it holds prompts of its own.
		plain := kv.WorkerKey{Worker: 2}
		engine := engineCache{layout: layout, unit: groupBlock}
		for _, g := range layout.Groups {
			engine.unit = lcm(engine.unit, g.Block)
			engine.held = append(engine.held, map[uint64]int{})
		}
		parts := layout.Groups[0].Block / groupBlock

		var prompts [][]kv.StoredBlock // of an even number of the first group's blocks
		for range rapid.IntRange(1, 4).Draw(t, "prompts") {
			n := rapid.IntRange(1, 6).Draw(t, "length") * 2 * parts
			var p []kv.StoredBlock
			if len(prompts) > 0 {
				from := rapid.SampledFrom(prompts).Draw(t, "from")
				p = slices.Clone(from[:rapid.IntRange(0, len(from)/parts).Draw(t, "shared")*parts])
			}
			for len(p) < n {
				id := uint64(1000*(len(prompts)+1) + len(p))
				p = append(p, kv.StoredBlock{Engine: id, Local: id ^ 0xabc})
			}
			prompts = append(prompts, p)
		}
		unplaced := map[uint64]bool{} // held by another group before the first, which in an engine stores all blocks
		steps := map[string]func(*rapid.T){
			"store": func(t *rapid.T) {
				p := rapid.SampledFrom(prompts).Draw(t, "prompt")
				n := rapid.IntRange(1, len(p)/parts).Draw(t, "blocks") * parts
				from := 0
				for from < n && tree.has(w, p[from].Engine) && rapid.IntRange(0, 3).Draw(t, "again") > 0 {
					from += parts
				}
				parent, hasParent := uint64(0), from > 0
				if hasParent {
					parent = p[from-1].Engine
				}
				if err := tree.stored(w, parent, hasParent, nil, p[from:n]); err != nil {
					t.Fatal(err)
				}
				for i := from; i < n; i++ {
					engine.held[0][p[i].Engine]++
					delete(unplaced, p[i].Engine)
				}
			},
			"store for another": func(t *rapid.T) {
				p := rapid.SampledFrom(prompts).Draw(t, "prompt")
				if err := tree.stored(plain, 0, false, nil, p); err != nil {
					t.Fatal(err)
				}
			},
			"hold": func(t *rapid.T) {
				if len(layout.Groups) == 1 {
					return
				}
				g := rapid.IntRange(1, len(layout.Groups)-1).Draw(t, "group")
				p := rapid.SampledFrom(prompts).Draw(t, "prompt")
				step := layout.Groups[g].Block / groupBlock
				from := rapid.IntRange(0, len(p)/step).Draw(t, "from")
				to := rapid.IntRange(from, len(p)/step).Draw(t, "to")
				var hashes []uint64
				for i := from; i < to; i++ {
					hashes = append(hashes, p[(i+1)*step-1].Engine)
				}
				tree.held(w, g, hashes)
				for _, h := range hashes {
					engine.held[g][h]++
					unplaced[h] = unplaced[h] || engine.held[0][h] == 0
				}
			},
			"remove": func(t *rapid.T) {
				g := rapid.IntRange(0, len(layout.Groups)-1).Draw(t, "group")
				keys := slices.Sorted(maps.Keys(engine.held[g]))
				if len(keys) == 0 {
					return
				}
				hash := rapid.SampledFrom(keys).Draw(t, "hash")
				hashes := []uint64{hash}
				if g == 0 { // all parts of the engine's block
					hashes = nil
					for _, p := range prompts {
						if i := slices.IndexFunc(p, func(b kv.StoredBlock) bool { return b.Engine == hash }); i >= 0 && hashes == nil {
							for _, b := range p[i/parts*parts : i/parts*parts+parts] {
								hashes = append(hashes, b.Engine)
							}
						}
					}
				}
				unknown := 0
				if g == 0 {
					unknown = tree.removed(w, hashes)
				} else {
					unknown = tree.dropped(w, g, hashes)
				}
				if unknown != 0 {
					t.Fatalf("group %d: %d of %v are unknown", g, unknown, hashes)
				}
				for _, h := range hashes {
					if engine.held[g][h]--; engine.held[g][h] == 0 {
						delete(engine.held[g], h)
					}
				}
			},
			"clear": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "clear") > 0 {
					return
				}
				tree.cleared(w)
				clear(unplaced)
				for i := range engine.held {
					engine.held[i] = map[uint64]int{}
				}
			},
			"copy": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "copy") > 0 {
					return
				}
				// What lies behind a hole of the first group loses its place in a copy.
				rules := rulesOf(layout, groupBlock)
				beyond := rules.beyond()
				held := tree.HeldOf(w)
				blocks := slices.Collect(tree.DumpOf(w))
				other := NewTree()
				other.layoutSet(w, tree.LayoutOf(w), groupBlock)
				for _, b := range blocks {
					if err := other.stored(w, b.Parent, b.HasParent, nil, []kv.StoredBlock{b.StoredBlock}); err != nil {
						t.Fatal(err)
					}
				}
				for _, b := range held {
					for range b.Copies {
						other.held(w, b.Group, []uint64{b.Engine})
					}
				}
				if err := other.Check(); err != nil {
					t.Fatal(err)
				}
				for _, p := range prompts {
					local := locals(p)
					if got, want := matchOf(other, w, local, len(local)), matchOf(tree, w, local, len(local)); got != want && !beyond {
						t.Fatalf("a copy matches %+v, the original %+v", got, want)
					}
				}
			},
			"": func(t *rapid.T) {
				if err := tree.Check(); err != nil {
					t.Fatal(err)
				}
				for _, p := range prompts {
					n := rapid.IntRange(1, len(p)).Draw(t, "asked")
					usable := n - rapid.IntRange(0, 1).Draw(t, "whole") // a prompt of whole blocks computes the last again
					ids := make([]uint64, n)
					for i := range ids {
						ids[i] = p[i].Engine
					}
					want := engine.find(ids, groupBlock, usable*groupBlock) / groupBlock
					got := matchOf(tree, w, locals(p[:n]), usable)
					for g := 1; g < len(layout.Groups); g++ {
						for hash := range engine.held[g] {
							if unplaced[hash] {
								want = min(got.Blocks, usable) // the index cannot know
							}
						}
					}
					if min(got.Blocks, usable) != want {
						t.Fatalf("%s: %d of %d blocks usable: %+v, the engine finds %d", layout, usable, n, got, want)
					}
				}
			},
		}
		t.Repeat(steps)
	})
}

func locals(p []kv.StoredBlock) []uint64 {
	local := make([]uint64, len(p))
	for i, b := range p {
		local[i] = b.Local
	}
	return local
}

// matchOf returns the match of one worker.
func matchOf(tree *Tree, w kv.WorkerKey, local []uint64, usable int) kv.Match {
	for _, m := range tree.Match(local, usable, kv.AllParts, nil) {
		if m.Worker == w {
			return m
		}
	}
	return kv.Match{Worker: w}
}

// has reports whether the first group of w holds a block.
func (r *Tree) has(w kv.WorkerKey, engine uint64) bool {
	slot, known := r.slot(w)
	return known && r.slots[slot].blocks.Get(engine, 0) != 0
}

func TestMatchNamesTheGroupThatEndsIt(t *testing.T) {
	x := newIndex(t)
	layout, err := kv.ParseLayout("3:full_attention/4 0:sliding_window=9/4")
	if err != nil {
		t.Fatal(err)
	}
	x.Tree.layoutSet(testkit.W1, layout, 4)
	p := testkit.Prompt(1, 8)
	x.store(testkit.W1, p...)
	x.wants(p, kv.Match{Worker: testkit.W1, Held: 8, Limit: 0})
	chain := testkit.Chain(p)
	x.Tree.held(testkit.W1, 1, []uint64{chain[3].Engine, chain[4].Engine})
	x.checked()
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 5, Held: 8, Limit: 0})
	x.wants(p[:5], kv.Match{Worker: testkit.W1, Blocks: 5})
	x.remove(testkit.W1, chain[4].Engine)
	x.wants(p, kv.Match{Worker: testkit.W1, Held: 4, Limit: 0})
}

func TestChangedLayoutKeepsTheGroupsThatStay(t *testing.T) {
	x := newIndex(t)
	set := func(text string) {
		t.Helper()
		layout, err := kv.ParseLayout(text)
		if err != nil {
			t.Fatal(err)
		}
		x.Tree.layoutSet(testkit.W1, layout, 4)
		x.checked()
	}
	p := testkit.Prompt(1, 8)
	chain := testkit.Chain(p)
	x.store(testkit.W1, p...)
	set("0:full_attention/4 1:sliding_window=5/4")
	x.Tree.held(testkit.W1, 1, []uint64{chain[6].Engine})
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 7, Held: 8, Limit: 1})
	set("0:full_attention/4 1:sliding_window=5/4 2:mamba/4")
	x.wants(p, kv.Match{Worker: testkit.W1, Held: 8, Limit: 2})
	x.Tree.held(testkit.W1, 2, []uint64{chain[6].Engine, 99})
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 7, Held: 8, Limit: 1})
	if got := x.AllBlocks(testkit.W1); got != 8+1+2 {
		t.Errorf("%d blocks, want 11", got)
	}
	set("0:full_attention/4")
	x.swept()
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 8})
	set("1:full_attention/4 0:mamba/4")
	x.swept()
	set("0:full_attention/4 1:mamba/4") // another first group: empty
	x.swept()
	x.wants(p)
	x.forget(testkit.W1.Worker)
	x.swept()
	if fmt.Sprint(x.Workers()) != "[]" || x.nodes.used != 1 {
		t.Errorf("workers %v and %d nodes remain", x.Workers(), x.nodes.used)
	}
}

// TestSufficientBlocksGiveTheMatchOfTheRules looks up a prompt with and without the
// shortcut, for all blocks that a window and a state can hold of it.
func TestSufficientBlocksGiveTheMatchOfTheRules(t *testing.T) {
	const blocks = 5
	layout, err := kv.ParseLayout("2:full_attention/4 0:sliding_window=9/4 1:mamba/4")
	if err != nil {
		t.Fatal(err)
	}
	p := testkit.Prompt(1, blocks)
	chain := testkit.Chain(p)
	quick := 0
	for held := range 1 << (2 * blocks) {
		tree := NewTree()
		tree.layoutSet(testkit.W1, layout, 4)
		if err := tree.stored(testkit.W1, 0, false, nil, chain); err != nil {
			t.Fatal(err)
		}
		for i := range 2 * blocks {
			if held>>i&1 != 0 {
				tree.held(testkit.W1, 1+i/blocks, []uint64{chain[i%blocks].Engine})
			}
		}
		slot, _ := tree.slot(testkit.W1)
		rules := &tree.slots[slot].groups.rules
		for usable := range blocks + 1 {
			got := matchOf(tree, testkit.W1, p, usable)
			enough := rules.quick
			rules.quick = 0
			want := matchOf(tree, testkit.W1, p, usable)
			rules.quick = enough
			if got != want {
				t.Fatalf("held %010b, %d usable: %+v, want %+v", held, usable, got, want)
			}
			if enough == 2 && usable > 0 && got.Blocks == usable {
				quick++
			}
		}
	}
	if quick == 0 {
		t.Error("no match was as long as it could be")
	}
}

// FuzzRules holds that no layout makes a lookup fail, or find other than what the engine
// finds.
func FuzzRules(f *testing.F) {
	for _, text := range layouts {
		f.Add(text, uint8(8), uint8(8), uint64(0xf0), true)
	}
	f.Add("0:sliding_window=0/4", uint8(3), uint8(2), uint64(1), false)
	f.Add("0:full_attention/4 1:sliding_window=9223372036854775808/4", uint8(3), uint8(2), uint64(1), false)
	f.Fuzz(func(t *testing.T, text string, stored, asked uint8, held uint64, drops bool) {
		layout, err := kv.ParseLayout(text)
		if err != nil || slices.ContainsFunc(layout.Groups, func(g kv.CacheGroup) bool { return g.Block%4 != 0 }) {
			return
		}
		if again, err := kv.ParseLayout(layout.String()); err != nil || !again.Equal(layout) {
			t.Fatalf("%q becomes %q: %v", text, again, err)
		}
		layout.DropsLast = layout.DropsLast || drops
		x := newIndex(t)
		x.Tree.layoutSet(testkit.W1, layout, 4)
		p := testkit.Prompt(1, max(int(stored), int(asked)))
		chain := testkit.Chain(p)
		if err := x.Tree.stored(testkit.W1, 0, false, nil, chain[:stored]); err != nil {
			t.Fatal(err)
		}
		engine := engineCache{layout: layout, unit: 1}
		for _, g := range layout.Groups {
			engine.unit = lcm(engine.unit, g.Block)
			engine.held = append(engine.held, map[uint64]int{})
		}
		ids := make([]uint64, asked)
		for i := range chain {
			if i < int(asked) {
				ids[i] = chain[i].Engine
			}
			for g := range layout.Groups {
				switch {
				case g == 0 && i < int(stored):
					engine.held[0][chain[i].Engine] = 1
				case g > 0 && held>>((i+g)%64)&1 != 0:
					x.Tree.held(testkit.W1, g, []uint64{chain[i].Engine})
					if i < int(stored) { // others have no place
						engine.held[g][chain[i].Engine] = 1
					}
				}
			}
		}
		x.checked()
		// The engine has no other layouts: full attention first, and chunks in blocks of one size, without a drafter.
		usual := len(layout.Groups) > 0
		for i, g := range layout.Groups {
			usual = usual && (g.Attention != kv.FullAttention || i == 0 || layout.Groups[0].Attention == kv.FullAttention)
			usual = usual && (g.Attention != kv.ChunkedLocal || !layout.DropsLast && g.Block == engine.unit && g.Window%g.Block == 0)
		}
		most := min(int(stored), int(asked))
		if len(layout.Groups) > 0 && layout.Groups[0].Attention == kv.ChunkedLocal {
			most = int(asked) // before its last chunk, it needs no block
		}
		for usable := range int(asked) + 1 {
			m := matchOf(x.Tree, testkit.W1, p[:asked], usable)
			if m.Blocks < 0 || m.Blocks > most || int(m.Held) > most || !layout.Plain(4) && m.Blocks > usable {
				t.Fatalf("%s: %+v with %d blocks stored, %d asked and %d usable", layout, m, stored, asked, usable)
			}
			if !usual {
				continue
			}
			if want := engine.find(ids, 4, usable*4) / 4; min(m.Blocks, usable) != want {
				t.Fatalf("%s: %+v with %d blocks stored, %d asked and %d usable; the engine finds %d", layout, m, stored, asked, usable, want)
			}
		}
	})
}

func TestTailBehindTooManyBarePrefixesIsRefused(t *testing.T) {
	x := newIndex(t)
	chain := testkit.Chain(testkit.Prompt(1, 1))
	if err := x.Tree.stored(testkit.W1, 0, false, make([]uint64, maxBare+1), chain); !errors.Is(err, ErrTooManyBare) {
		t.Errorf("error %v", err)
	}
	x.wantsCounts(testkit.W1, 0, 0)
	if err := x.Tree.stored(testkit.W1, 0, false, []uint64{7, 8}, chain); err != nil {
		t.Fatal(err)
	}
	x.checked()
	if x.bare() != 2 {
		t.Errorf("%d bare nodes, want 2", x.bare())
	}
	x.remove(testkit.W1, chain[0].Engine)
	if x.bare() != 0 || x.nodes.used != 1 {
		t.Errorf("%d bare nodes of %d remain", x.bare(), x.nodes.used)
	}
}
