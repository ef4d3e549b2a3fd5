package page

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// none matches nothing.
func none([]uint64, int, kv.MatchParts, []kv.Match) []kv.Match { return nil }

// outline writes a cache as a person would.
func outline(c Cache) string {
	var lines []string
	at := map[string]int{}
	for i, n := range c.Nodes {
		at[n.ID] = i
		parent := "-"
		if n.Parent != "" {
			parent = fmt.Sprint(at[n.Parent])
		}
		lines = append(lines, fmt.Sprintf("%d<%s depth %d tokens %d hits %d workers %v %s", i, parent, n.Depth, n.Tokens, n.Hits, n.Workers, n.Text))
	}
	return strings.Join(lines, "\n")
}

func TestPromptsThatBeginAlikeShareABranch(t *testing.T) {
	tree, now := newPrompts(nil), time.Unix(6000, 0)
	shared := testkit.Prompt(1, 10)
	a, b := append(slices.Clone(shared), testkit.Prompt(2, 5)...), append(slices.Clone(shared), testkit.Prompt(3, 2)...)
	text := func(which string) func(int) string {
		return func(blocks int) string { return fmt.Sprintf("%s from %d", which, blocks) }
	}
	tree.add(4, a, now, text("a"))
	tree.add(4, a, now, text("a"))
	tree.add(4, b, now, text("b"))
	tree.add(4, a, now.Add(time.Second), nil)
	match := func(local []uint64, _ int, _ kv.MatchParts, _ []kv.Match) []kv.Match {
		held := []kv.Match{{Worker: kv.WorkerKey{Worker: 3}, Blocks: 10}, {Worker: kv.WorkerKey{Worker: 5}, Blocks: 9}, {Worker: kv.WorkerKey{Worker: 7, Rank: 1}, Blocks: len(local)}, {Worker: kv.WorkerKey{Worker: 7, Rank: 2}, Blocks: len(local)}}
		return held
	}
	want := `0<- depth 0 tokens 40 hits 4 workers [3 7] a from 0
1<0 depth 10 tokens 20 hits 3 workers [7] 
2<0 depth 10 tokens 8 hits 1 workers [7] b from 10`
	if got := outline(tree.hottest(4, now.Add(2*time.Second), match)); got != want {
		t.Errorf("the tree is\n%s\nwant\n%s", got, want)
	}
	cache := tree.hottest(4, now, match)
	if hashes := kv.SequenceHashes(nil, a); cache.Nodes[0].ID != name(hashes[9]) || cache.Nodes[1].ID != name(hashes[14]) {
		t.Error("ids are not the hashes of the paths")
	}
	tree.add(4, a, now, text("a"))
	if got := tree.hottest(4, now, match).Nodes[1].Text; got != "a from 10" {
		t.Errorf("the part that was split off has the text %q once a prompt passes", got)
	}
}

func TestHitsAndBranchesFade(t *testing.T) {
	tree, now := newPrompts(nil), time.Unix(6000, 0)
	tree.add(4, testkit.Prompt(1, 3), now, nil)
	for _, step := range []struct {
		after time.Duration
		want  int
	}{{0, 1}, {4 * time.Minute, 1}, {5*time.Minute - time.Second, 1}, {5 * time.Minute, 0}, {10 * time.Minute, 0}, {11 * time.Minute, -1}} {
		cache := tree.hottest(4, now.Add(step.after), none)
		got := -1
		if len(cache.Nodes) > 0 {
			got = cache.Nodes[0].Hits
		}
		if got != step.want {
			t.Errorf("after %s: %d hits, want %d (-1: it is gone)", step.after, got, step.want)
		}
	}
	if tree.nodes != 0 || tree.blocks != 0 {
		t.Errorf("%d nodes, %d blocks are left", tree.nodes, tree.blocks)
	}
}

// TestTheTreeIsWhatItWasTold compares the tree with a list of all prompts, and looks at
// its counts and bounds.
func TestTheTreeIsWhatItWasTold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tree, now := newPrompts(nil), time.Unix(6000, 0)
		var told [][]uint64
		for range rapid.IntRange(1, 60).Draw(t, "prompts") {
			prompt := rapid.SliceOfN(rapid.Uint64Range(1, 3), 1, 8).Draw(t, "prompt")
			told = append(told, prompt)
			now = now.Add(time.Second / 10)
			tree.add(4, prompt, now, nil)
		}
		nodes, blocks := 0, 0
		tree.root.walk(func(n *node) {
			nodes, blocks = nodes+1, blocks+len(n.hashes)
			path, through := n.path(), 0
			for _, prompt := range told {
				if len(prompt) >= len(path) && slices.Equal(prompt[:len(path)], path) {
					through++
				}
			}
			if got := n.recent(now); got != through {
				t.Fatalf("%v: %d hits, %d prompts begin so", path, got, through)
			}
			if n.parent.children[n.hashes[0]] != n || n.depth != len(path)-len(n.hashes) || n.id != kv.SequenceHashes(nil, path)[len(path)-1] {
				t.Fatalf("%v hangs wrong", path)
			}
		})
		if nodes != tree.nodes || blocks != tree.blocks {
			t.Fatalf("%d nodes with %d blocks, counted %d and %d", nodes, blocks, tree.nodes, tree.blocks)
		}
		seen := map[string]bool{"": true}
		for _, n := range tree.hottest(4, now, none).Nodes {
			if !seen[n.Parent] {
				t.Fatalf("%s comes before its parent %s", n.ID, n.Parent)
			}
			seen[n.ID] = true
		}
	})
}

func TestTheTreeIsBounded(t *testing.T) {
	tree, now := newPrompts(nil), time.Unix(6000, 0)
	for i := range uint64(3 * maxNodes) {
		now = now.Add(time.Millisecond)
		tree.add(4, testkit.Prompt(i, 40), now, nil)
	}
	if cache := tree.hottest(4, now, none); tree.nodes > maxNodes || len(cache.Nodes) != maxShown || !cache.Truncated {
		t.Errorf("%d nodes, %d shown, truncated: %v", tree.nodes, len(cache.Nodes), cache.Truncated)
	}
	for i := range uint64(200) {
		now = now.Add(time.Millisecond)
		tree.add(4, testkit.Prompt(1000+i, 3*maxDepth), now, nil)
	}
	if tree.blocks > maxBlocks {
		t.Errorf("%d blocks", tree.blocks)
	}
	newest := testkit.Prompt(1199, maxDepth)
	if !slices.ContainsFunc(tree.hottest(4, now, none).Nodes, func(n Node) bool { return n.ID == name(kv.SequenceHashes(nil, newest)[maxDepth-1]) }) {
		t.Error("the newest prompt is gone")
	}
}

func TestPromptsAreInBlocksOfOneSize(t *testing.T) {
	tree, now := newPrompts(nil), time.Unix(6000, 0)
	none := func([]uint64, int, kv.MatchParts, []kv.Match) []kv.Match { return nil }
	tree.add(4, testkit.Prompt(1, 3), now, nil)
	tree.add(8, testkit.Prompt(2, 5), now, nil)
	if nodes := tree.hottest(8, now, none).Nodes; len(nodes) != 1 || nodes[0].Tokens != 40 {
		t.Errorf("%+v", nodes)
	}
	if nodes := tree.hottest(4, now, none).Nodes; len(nodes) != 0 {
		t.Errorf("of blocks of another size: %+v", nodes)
	}
}
