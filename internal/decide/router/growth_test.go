package router_test

import (
	"encoding/csv"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
)

// growthTokens is the length of the prompts whose routing is measured.
const growthTokens = 4000

// The numbers of workers and of blocks that are measured, and the sizes of a block in tokens, of
// which the first one is used where the size is not the question.
var (
	growthWorkers = []int{8, 64, 512, 4096}
	growthBlocks  = []int{10_000, 100_000, 1_000_000, 10_000_000}
	growthSizes   = []int{64, 16, 1}

	growthPolicies = []string{"work", "kv", "standalone"}
)

// growth is an index in which so many workers hold about so many blocks of a size together.
type growth struct {
	workers, blocks, size int
}

// prompt is how many whole blocks a prompt has.
func (g growth) prompt() int { return growthTokens / g.size }

// hot returns the blocks of prompt 0.
func (g growth) hot() []uint64 { return kv.HashBlocks(nil, growthTokensOf(0), g.size, "", "") }

// growthTokensOf returns the tokens of a prompt.
func growthTokensOf(prompt int) []uint32 {
	tokens := make([]uint32, growthTokens)
	for i := range tokens {
		tokens[i] = uint32(prompt*growthTokens + i)
	}
	return tokens
}

// index returns the index. Worker i of n holds the first (i+1)/n of prompt 0; the other
// prompts are held by one worker each.
func (g growth) index(tb testing.TB) *radix.Tree {
	tb.Helper()
	tree := radix.NewTree()
	store := func(w int, local []uint64) {
		if err := radixtest.Store(tree, kv.WorkerKey{Worker: uint64(w)}, 0, false, testkit.Chain(local)); err != nil {
			tb.Fatal(err)
		}
	}
	hot := g.hot()
	held := 0
	for w := range g.workers {
		part := hot[:max(1, len(hot)*(w+1)/g.workers)]
		store(w, part)
		held += len(part)
	}
	for i := 0; held < g.blocks; i, held = i+1, held+g.prompt() {
		store(i%g.workers, testkit.Prompt(uint64(i), g.prompt()))
	}
	return tree
}

// held is the number of blocks that all workers hold, a block of two workers twice.
func held(tree *radix.Tree) (blocks int) {
	for _, w := range tree.Workers() {
		blocks += tree.Blocks(w)
	}
	return blocks
}

// router returns a router over workers that are up, with two requests each: one decodes;
// the other, which has the first half of prompt 0, waits for its first token.
func (g growth) router(tb testing.TB, rule string, index radix.Index) *router.Router {
	tb.Helper()
	r := router.New(testkit.Defaults[router.Settings](), router.Deps{Index: index, Policy: policytest.MustPolicy(tb, rule), BlockSize: g.size, Seed: 1})
	for w := range g.workers {
		key := kv.WorkerKey{Worker: uint64(w)}
		r.Up(kv.Target{Key: key, URL: fmt.Sprintf("http://127.0.0.1:%d", 8100+w), Models: []string{"m"}, Ranks: 1, Generation: 1, TotalBlocks: 1 << 22 / g.size, MaxBatchedTokens: 8192})
		for i := range 2 {
			tokens := growthTokensOf(1 + 2*w + i)
			if i == 1 {
				copy(tokens, growthTokensOf(0)[:growthTokens/2])
			}
			b, err := r.Book(router.Request{Tokens: tokens, Model: "m"}, key)
			if err != nil {
				tb.Fatal(err)
			}
			if i == 0 {
				b.FirstToken()
			}
		}
	}
	return r
}

// growthTable is what `make growth` measures, a line a value.
type growthTable struct {
	*testing.T
	out *csv.Writer
}

func (t *growthTable) add(what string, g growth, value float64) {
	line := []string{what, strconv.Itoa(g.workers), strconv.Itoa(g.blocks), strconv.FormatFloat(value, 'g', 4, 64)}
	t.Log(line)
	if err := t.out.Write(line); err != nil {
		t.Error(err)
	}
	t.out.Flush()
}

// TestGrowth is `make growth`: it appends to the file that $KVROUTER_GROWTH names how
// costs grow with workers and blocks, as CSV. Times are CPU time, of several runs the
// least: this machine does other things, too. 10 M blocks take 2 GB.
func TestGrowth(t *testing.T) {
	path := os.Getenv("KVROUTER_GROWTH")
	if path == "" {
		t.Skip("run `make growth`")
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, n := range growthWorkers {
		t.Run(fmt.Sprintf("workers=%d", n), func(t *testing.T) {
			for _, blocks := range growthBlocks {
				(&growthTable{t, csv.NewWriter(file)}).index(growth{n, blocks, growthSizes[0]})
			}
		})
	}
}

// index measures what happens inside one process.
func (t *growthTable) index(g growth) {
	testkit.LiveHeap() // what was freed by it is gone after the second
	before := testkit.LiveHeap()
	tree := g.index(t)
	t.add("index memory, bytes a block", g, float64(testkit.LiveHeap()-before)/float64(held(tree)))
	if len(tree.Workers()) != g.workers {
		t.Fatal("the index lacks workers")
	}
	least := func(bench func(b *testing.B)) float64 {
		least := 0.0
		for i := range 3 {
			if cpu := testing.Benchmark(bench).Extra["cpu-ns/op"] / 1000; i == 0 || cpu < least {
				least = cpu
			}
		}
		return least
	}
	if err := flag.Set("test.benchtime", "0.1s"); err != nil {
		t.Fatal(err)
	}
	t.add("lookup, us", g, least(func(b *testing.B) { benchLookup(b, g, tree) }))
	t.add("store and remove, us", g, least(func(b *testing.B) { benchStore(b, g, tree) }))
	for _, rule := range growthPolicies {
		t.add("decision "+rule+", us", g, least(func(b *testing.B) { benchDecision(b, g, rule, tree) }))
	}
}

// BenchmarkGrowthDecision routes prompts of 4,000 tokens that all workers hold, each to
// another length, and ends them.
func BenchmarkGrowthDecision(b *testing.B) {
	for _, rule := range growthPolicies {
		b.Run("policy="+rule, func(b *testing.B) {
			eachGrowth(b, func(b *testing.B, g growth, tree *radix.Tree) { benchDecision(b, g, rule, tree) })
		})
	}
}

// BenchmarkGrowthSize is what policy work takes for the same tokens in blocks of other sizes, and
// the index in bytes a token.
func BenchmarkGrowthSize(b *testing.B) {
	for _, size := range growthSizes {
		for _, tokens := range []int{1_000_000, 10_000_000} {
			g := growth{growthWorkers[0], tokens / size, size}
			b.Run(fmt.Sprintf("size=%d/tokens=%d", size, tokens), func(b *testing.B) {
				testkit.LiveHeap() // as in TestGrowth
				before := testkit.LiveHeap()
				tree := g.index(b)
				bytes := testkit.LiveHeap() - before
				b.Run("decision", func(b *testing.B) {
					benchDecision(b, g, growthPolicies[0], tree)
					b.ReportMetric(float64(bytes)/float64(tokens), "index-bytes/token")
				})
				b.Run("lookup", func(b *testing.B) { benchLookup(b, g, tree) })
				b.Run("store", func(b *testing.B) { benchStore(b, g, tree) })
			})
		}
	}
}

func benchDecision(b *testing.B, g growth, rule string, tree *radix.Tree) {
	r := g.router(b, rule, tree)
	request := router.Request{Tokens: growthTokensOf(0), Model: "m"}
	defer reportCPU(b)()
	for b.Loop() {
		d, err := r.Route(b.Context(), request)
		if err != nil {
			b.Fatal(err)
		}
		d.Booking.Finish(100)
	}
}

// BenchmarkGrowthLookup looks the prompt up that all workers hold.
func BenchmarkGrowthLookup(b *testing.B) { eachGrowth(b, benchLookup) }

func benchLookup(b *testing.B, g growth, tree *radix.Tree) {
	hot := g.hot()
	var matches []kv.Match
	defer reportCPU(b)()
	for b.Loop() {
		matches = tree.Match(hot, len(hot), 0, matches[:0])
	}
	if len(matches) != g.workers {
		b.Fatalf("%d workers match", len(matches))
	}
}

// BenchmarkGrowthStore stores a prompt and takes it out again, worker by worker; a
// prompt is what is counted.
func BenchmarkGrowthStore(b *testing.B) { eachGrowth(b, benchStore) }

func benchStore(b *testing.B, g growth, tree *radix.Tree) {
	local := testkit.Prompt(1<<40, g.prompt())
	chain, engine := testkit.Chain(local), testkit.EngineHashes(local)
	slices.Reverse(engine)
	defer reportCPU(b)()
	for i := 0; b.Loop(); i++ {
		w := kv.WorkerKey{Worker: uint64(i % g.workers)}
		if err := radixtest.Store(tree, w, 0, false, chain); err != nil {
			b.Fatal(err)
		}
		if unknown := radixtest.Remove(tree, w, engine); unknown > 0 {
			b.Fatalf("%d blocks were unknown", unknown)
		}
	}
}

// BenchmarkGrowthBooks books the two requests of each worker. The memory is that of a
// block in flight.
func BenchmarkGrowthBooks(b *testing.B) {
	for _, n := range growthWorkers {
		g := growth{n, 0, growthSizes[0]}
		b.Run(fmt.Sprintf("workers=%d", n), func(b *testing.B) {
			index, bytes := g.index(b), uint64(0)
			defer reportCPU(b)()
			for b.Loop() {
				before := testkit.LiveHeap()
				r := g.router(b, "work", index)
				bytes += testkit.LiveHeap() - before
				runtime.KeepAlive(r)
			}
			b.ReportMetric(float64(bytes)/float64(b.N)/float64(2*n*g.prompt()), "bytes/block")
		})
	}
}

// reportCPU begins to count the process's CPU time, which other processes disturb less
// than the time by the clock; the function that it returns reports it.
func reportCPU(b *testing.B) (end func()) {
	b.ReportAllocs()
	began := testkit.CPUTime()
	return func() { b.ReportMetric(float64((testkit.CPUTime()-began).Nanoseconds())/float64(b.N), "cpu-ns/op") }
}

func eachGrowth(b *testing.B, run func(b *testing.B, g growth, tree *radix.Tree)) {
	for _, n := range growthWorkers {
		for _, blocks := range growthBlocks {
			g := growth{n, blocks, growthSizes[0]}
			b.Run(fmt.Sprintf("workers=%d/blocks=%d", n, blocks), func(b *testing.B) { run(b, g, g.index(b)) })
		}
	}
}
