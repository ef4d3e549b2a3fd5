package radix_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

const (
	lookupWorkers = 4096
	lookupBlocks  = 10_000_000             // that all workers hold together
	lookupRate    = 1_000_000              // block operations a second beside the lookups
	lookupEvery   = 250 * time.Microsecond // beside them: about what decisions among so many workers take
	lookupTime    = 3 * time.Second
	lookupCovered = 400_000 // blocks of the prompts of each length that lookupHolders workers hold
	lookupHolders = 4
	lookupOther   = 62   // blocks of each other prompt, which one worker holds
	lookupTaken   = 1000 // other prompts that are out of the index while the next ones are taken out
)

// lookupIndex is an index of lookupBlocks blocks.
type lookupIndex struct {
	tree    *radix.Tree
	held    int // blocks of all workers
	prompts int
	others  []heldPrompt
}

// heldPrompt is a prompt that one worker holds.
type heldPrompt struct {
	worker kv.WorkerKey
	chain  []kv.StoredBlock
	remove []uint64 // its engine hashes, the last first
}

// spread stores a new prompt of so many blocks on so many workers, on each to another length,
// and returns its local hashes.
func (x *lookupIndex) spread(b *testing.B, blocks, holders int) []uint64 {
	local := testkit.Prompt(uint64(x.prompts), blocks)
	chain := testkit.Chain(local)
	for i := range holders {
		part := chain[:max(1, blocks*(i+1)/holders)]
		w := kv.WorkerKey{Worker: uint64((x.prompts*holders + i) % lookupWorkers)}
		if err := radixtest.Store(x.tree, w, 0, false, part); err != nil {
			b.Fatal(err)
		}
		x.held += len(part)
	}
	x.prompts++
	return local
}

// fill stores other prompts until lookupBlocks are held.
func (x *lookupIndex) fill(b *testing.B) {
	for ; x.held < lookupBlocks; x.prompts, x.held = x.prompts+1, x.held+lookupOther {
		local := testkit.Prompt(uint64(x.prompts), lookupOther)
		p := heldPrompt{worker: kv.WorkerKey{Worker: uint64(x.prompts % lookupWorkers)}, chain: testkit.Chain(local), remove: testkit.EngineHashes(local)}
		slices.Reverse(p.remove)
		if err := radixtest.Store(x.tree, p.worker, 0, false, p.chain); err != nil {
			b.Fatal(err)
		}
		if len(x.others) < 20*lookupTaken {
			x.others = append(x.others, p)
		}
	}
}

// write takes prompts out of the index and stores those again that it took out lookupTaken
// prompts before, at lookupRate until stop, and returns the rate that it reached.
func (x *lookupIndex) write(b *testing.B, stop <-chan struct{}) (rate float64) {
	began, done, next := time.Now(), 0, 0
	out := func(i int) {
		p := &x.others[i%len(x.others)]
		if unknown := radixtest.Remove(x.tree, p.worker, p.remove); unknown > 0 {
			b.Errorf("%d removed blocks are unknown", unknown)
		}
	}
	in := func(i int) {
		p := &x.others[i%len(x.others)]
		if err := radixtest.Store(x.tree, p.worker, 0, false, p.chain); err != nil {
			b.Error(err)
		}
	}
	defer func() {
		for i := max(0, next-lookupTaken); i < next; i++ {
			in(i)
		}
	}()
	defer func() { rate = float64(done) / time.Since(began).Seconds() }()
	for {
		select {
		case <-stop:
			return
		default:
		}
		out(next)
		done += lookupOther
		if next >= lookupTaken {
			in(next - lookupTaken)
			done += lookupOther
		}
		next++
		pace(began, float64(done)/lookupRate)
	}
}

// pace sleeps until so many seconds after began, when the next operation of a constant rate is due.
func pace(began time.Time, seconds float64) {
	time.Sleep(time.Until(began.Add(time.Duration(seconds * float64(time.Second)))))
}

// BenchmarkIndexLookup times lookups in an index of 4,096 workers and 10 M blocks: one right after
// the other, and 4,000 a second beside 1 M block operations a second. Each prompt is held by four
// workers, or one prompt by all of them; each worker holds another length of it. Run it with
// -benchtime 1x (make index-bench).
func BenchmarkIndexLookup(b *testing.B) {
	x := lookupIndex{tree: radix.NewTree()}
	type load struct {
		name    string
		holders int
		prompts [][]uint64
	}
	var loads []load
	for _, blocks := range []int{62, 1000} {
		few := load{name: fmt.Sprintf("blocks=%d/workers=%d", blocks, lookupHolders), holders: lookupHolders}
		for range lookupCovered / blocks {
			few.prompts = append(few.prompts, x.spread(b, blocks, lookupHolders))
		}
		all := load{name: fmt.Sprintf("blocks=%d/workers=all", blocks), holders: lookupWorkers}
		all.prompts = append(all.prompts, x.spread(b, blocks, lookupWorkers))
		loads = append(loads, few, all)
	}
	x.fill(b)
	for _, load := range loads {
		for _, beside := range []string{"nothing", "1M"} {
			b.Run(load.name+"/beside="+beside, func(b *testing.B) {
				for range b.N {
					x.time(b, load.prompts, load.holders, beside != "nothing")
				}
			})
		}
	}
}

// time reports the times of lookups of the prompts in turn, each held by so many workers.
func (x *lookupIndex) time(b *testing.B, prompts [][]uint64, holders int, writes bool) {
	stop, reached := make(chan struct{}), make(chan float64, 1)
	if writes {
		go func() { reached <- x.write(b, stop) }() // ends below
	}
	took := make([]time.Duration, 0, 4<<20)
	dst := make([]kv.Match, 0, lookupWorkers)
	used := testkit.CPUTime()
	for began := time.Now(); time.Since(began) < lookupTime && len(took) < cap(took); {
		if writes {
			pace(began, float64(len(took))*lookupEvery.Seconds())
		}
		prompt := prompts[len(took)%len(prompts)]
		start := time.Now()
		dst = x.tree.Match(prompt, len(prompt), 0, dst[:0])
		took = append(took, time.Since(start))
		if len(dst) != holders {
			b.Fatalf("%d workers match, want %d", len(dst), holders)
		}
	}
	used = testkit.CPUTime() - used
	close(stop)
	if writes {
		b.ReportMetric(<-reached/1e6, "Mblocks/s")
	} else {
		b.ReportMetric(float64(used.Nanoseconds())/float64(len(took))/1000, "cpu-us")
	}
	slices.Sort(took)
	at := func(q float64) float64 { return float64(took[int(q*float64(len(took)-1))].Nanoseconds()) / 1000 }
	b.ReportMetric(at(0.5), "p50-us")
	b.ReportMetric(at(0.99), "p99-us")
	b.ReportMetric(at(0.999), "p99.9-us")
}
