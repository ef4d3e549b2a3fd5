package page

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
)

const (
	// maxNodes, maxBlocks and maxDepth bound the tree of prompts: its nodes, the blocks
	// of all of them, and those of one prompt. The least recently used goes first.
	maxNodes  = 512
	maxBlocks = 1 << 17
	maxDepth  = 2048
	// maxShown is the number of nodes that are shown, those with the most hits.
	maxShown = 120
	// hitStep and hitSteps say for how long a hit counts, and how exactly: 5 minutes. nodeLife
	// is after how long without a hit a node goes.
	hitStep, hitSteps = 10 * time.Second, 30
	nodeLife          = 10 * time.Minute
	// maxText bounds the text of a node, in characters, and textTokens the tokens that
	// are decoded for it.
	maxText, textTokens = 120, 96
)

// prompts is a tree of the prompts that came while the dashboard was open. Prompts that begin
// alike share nodes. The index itself is not walked: it is far larger, and busy.
type prompts struct {
	names *kv.Names // of workers; nil: all are called by their ids

	mu        sync.Mutex // guards the rest; the locks of the index and of the tokenizer may be taken under it
	blockSize int        // tokens
	root      node
	nodes     int
	blocks    int // of all nodes
	truncated bool
}

// node is a run of blocks.
type node struct {
	parent   *node
	children map[uint64]*node // by the hash of the first block
	hashes   []uint64         // local block hashes
	depth    int              // blocks before it
	id       uint64           // sequence hash of its last block
	hits     [hitSteps]uint32 // of each step, the last one is not over
	step     int64            // Unix time of the last of hits, in steps
	last     time.Time
	text     string
}

func newPrompts(names *kv.Names) *prompts { return &prompts{names: names} }

// resize empties a tree whose blocks had another number of tokens. The caller holds the lock.
func (t *prompts) resize(blockSize int) {
	if t.blockSize != blockSize {
		t.blockSize, t.root, t.nodes, t.blocks, t.truncated = blockSize, node{}, 0, 0, false
	}
}

// add counts a prompt in blocks of blockSize tokens. text, if it is not nil, returns the beginning
// of what comes after that many blocks.
func (t *prompts) add(blockSize int, local []uint64, now time.Time, text func(blocks int) string) {
	local = local[:min(len(local), maxDepth)]
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resize(blockSize)
	for at, depth := &t.root, 0; depth < len(local); {
		rest := local[depth:]
		next := at.children[rest[0]]
		if next == nil {
			next = t.grow(at, rest, depth)
		} else if same := alike(next.hashes, rest); same < len(next.hashes) {
			next = t.split(next, same)
		}
		if next.hit(now); next.text == "" && text != nil {
			next.text = text(depth)
		}
		at, depth = next, depth+len(next.hashes)
	}
	if t.nodes > maxNodes || t.blocks > maxBlocks {
		t.shed()
	}
}

// alike counts the first elements that both have.
func alike(a, b []uint64) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// grow adds a leaf to at.
func (t *prompts) grow(at *node, hashes []uint64, depth int) *node {
	leaf := &node{parent: at, hashes: slices.Clone(hashes), depth: depth}
	leaf.id = leaf.sequence()
	at.adopt(leaf)
	t.nodes++
	t.blocks += len(hashes)
	return leaf
}

// split parts a node after that many blocks and returns the upper part.
func (t *prompts) split(lower *node, blocks int) *node {
	upper := &node{parent: lower.parent, depth: lower.depth, hits: lower.hits, step: lower.step, last: lower.last, text: lower.text}
	upper.hashes = slices.Clone(lower.hashes[:blocks])
	upper.id = upper.sequence()
	lower.parent.children[lower.hashes[0]] = upper
	lower.hashes, lower.depth, lower.parent, lower.text = slices.Clone(lower.hashes[blocks:]), lower.depth+blocks, upper, ""
	upper.adopt(lower)
	t.nodes++
	return upper
}

func (n *node) adopt(child *node) {
	if n.children == nil {
		n.children = map[uint64]*node{}
	}
	n.children[child.hashes[0]] = child
}

// hit counts a prompt.
func (n *node) hit(now time.Time) {
	n.pass(now)
	n.hits[hitSteps-1]++
	n.last = now
}

// pass forgets the hits of 5 minutes ago.
func (n *node) pass(now time.Time) {
	step := now.Unix() / int64(hitStep/time.Second)
	if gone := step - n.step; gone > 0 {
		gone = min(gone, hitSteps)
		copy(n.hits[:], n.hits[gone:])
		clear(n.hits[hitSteps-gone:])
		n.step = step
	}
}

// recent returns the hits of the last 5 minutes, of which the first may lack up to a step.
func (n *node) recent(now time.Time) (hits int) {
	n.pass(now)
	for _, h := range n.hits {
		hits += int(h)
	}
	return hits
}

// walk calls use with every node, children first.
func (n *node) walk(use func(*node)) {
	for _, child := range n.children {
		child.walk(use)
	}
	if n.parent != nil {
		use(n)
	}
}

// shed drops the least recently used, a quarter at once: requests wait for it.
func (t *prompts) shed() {
	t.truncated = true
	all := make([]*node, 0, t.nodes)
	t.root.walk(func(n *node) { all = append(all, n) })
	// A node was last used no earlier than what lies below it.
	slices.SortFunc(all, func(a, b *node) int { return cmp.Or(a.last.Compare(b.last), b.depth-a.depth) })
	for _, n := range all {
		if t.nodes <= maxNodes*3/4 && t.blocks <= maxBlocks*3/4 {
			return
		}
		t.drop(n)
	}
}

// drop removes a leaf.
func (t *prompts) drop(leaf *node) {
	delete(leaf.parent.children, leaf.hashes[0])
	t.nodes--
	t.blocks -= len(leaf.hashes)
}

// path returns the hashes of all blocks up to the node's end.
func (n *node) path() []uint64 {
	path := make([]uint64, n.depth+len(n.hashes))
	for ; n.parent != nil; n = n.parent {
		copy(path[n.depth:], n.hashes)
	}
	return path
}

// sequence is the sequence hash of the node's last block.
func (n *node) sequence() uint64 {
	path := n.path()
	return kv.SequenceHashes(path[:0], path)[len(path)-1]
}

// hottest returns the nodes with the most hits, parents first, with the workers that hold them by
// match, for the prompts that end there. Blocks have blockSize tokens.
func (t *prompts) hottest(blockSize int, now time.Time,
	match func(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match) Cache {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resize(blockSize)
	var all []*node
	t.root.walk(func(n *node) { // children come first: a dropped node has none
		if len(n.children) == 0 && now.Sub(n.last) > nodeLife {
			t.drop(n)
			return
		}
		all = append(all, n)
	})
	if t.nodes == 0 {
		t.truncated = false
	}
	hits := make(map[*node]int, len(all))
	for _, n := range all {
		hits[n] = n.recent(now)
	}
	// A parent has no fewer hits than its children, and is less deep.
	slices.SortFunc(all, func(a, b *node) int {
		return cmp.Or(hits[b]-hits[a], a.depth-b.depth, b.last.Compare(a.last), cmp.Compare(a.id, b.id))
	})
	cache := Cache{Nodes: []Node{}, Truncated: t.truncated || len(all) > maxShown}
	all = all[:min(len(all), maxShown)]
	held := map[*node][]string{}
	for i := len(all) - 1; i >= 0; i-- { // from the leaves up: one look-up covers a whole branch
		if _, done := held[all[i]]; !done {
			path := all[i].path()
			t.note(held, all[i], match(path, len(path), 0, nil))
		}
	}
	for _, n := range all {
		parent := ""
		if n.depth > 0 {
			parent = name(n.parent.id)
		}
		cache.Nodes = append(cache.Nodes, Node{
			ID: name(n.id), Parent: parent, Depth: n.depth, Tokens: len(n.hashes) * t.blockSize, Workers: held[n], Hits: hits[n], Last: unix(n.last),
			Text: n.text,
		})
	}
	return cache
}

// note records the workers that hold a node and all above it.
func (t *prompts) note(held map[*node][]string, n *node, matches []kv.Match) {
	for ; n.parent != nil; n = n.parent {
		if _, done := held[n]; done {
			return
		}
		var workers []uint64
		for _, m := range matches {
			if m.Blocks >= n.depth+len(n.hashes) && !slices.Contains(workers, m.Worker.Worker) {
				workers = append(workers, m.Worker.Worker)
			}
		}
		slices.Sort(workers)
		held[n] = make([]string, len(workers))
		for i, worker := range workers {
			held[n][i] = t.names.Label(worker)
		}
	}
}

// name is a hash as it is shown.
func name(hash uint64) string {
	text := strconv.FormatUint(hash, 16)
	return strings.Repeat("0", 16-len(text)) + text
}
