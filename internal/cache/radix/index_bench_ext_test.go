package radix_test

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/blockpool"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
	"kvrouter/internal/tools/simulate"
)

// The benchmark of an index on the method that Dynamo's lib/bench describes: a
// trace, copied with other contents, is dealt out to many workers at random; each
// worker's share goes through the block memory of an engine, which gives its
// events; and lookups and events are replayed together in the order of time.
const (
	traceWorkers     = 128
	traceDuplication = 20    // copies of the trace, with no block in common
	traceLength      = 4     // blocks that one hash of the trace stands for
	traceBlockSize   = 128   // tokens
	traceCache       = 16384 // blocks of each worker

	traceEventThreads = 1 // apply events, each those of its own workers
	traceIssuers      = 1 // look up prompts and hand out events
)

// traceOp is one step of the replay: a lookup, if prompt is set, or an event.
type traceOp struct {
	at      time.Duration // of the trace
	worker  uint64
	prompt  []uint64 // local hashes to look up
	stored  []kv.StoredBlock
	parent  uint64
	follows bool // stored follows parent
	removed []uint64
}

// blockOps counts as Dynamo's benchmark does: hashes looked up and blocks stored.
func (o *traceOp) blockOps() int { return len(o.prompt) + len(o.stored) }

// traceOps makes the replay. Removals come with the request that needs the
// memory, answers' blocks one by one after the prompt's.
func traceOps(b *testing.B) []traceOp {
	b.Helper()
	requests, err := simulate.ReadTrace("../../../testdata/traces/conversation_trace.jsonl.gz")
	if err != nil {
		b.Fatal(err)
	}
	highest := uint64(0)
	for i := range requests {
		highest = max(highest, slices.Max(requests[i].Hashes))
	}
	random := rand.New(rand.NewPCG(42, 42))
	pools := make([]*blockpool.Pool, traceWorkers)
	for w := range pools {
		pools[w] = blockpool.New(traceCache)
	}
	answer := uint64(1) << 63
	var ops []traceOp
	for i := range requests {
		r := &requests[i]
		for copy := range uint64(traceDuplication) {
			w := random.Uint64N(traceWorkers)
			local := make([]uint64, 0, r.Prompt/traceBlockSize)
			for _, h := range r.Hashes {
				for part := range uint64(traceLength) {
					var word [8]byte
					binary.LittleEndian.PutUint64(word[:], (h+(highest+1)*copy)*traceLength+part)
					local = append(local, xxh3.HashSeed(word[:], kv.HashSeed))
				}
			}
			local = local[:min(len(local), r.Prompt/traceBlockSize)]
			ops = append(ops, traceOp{at: r.Arrival, worker: w, prompt: local})

			sequence := kv.SequenceHashes(make([]uint64, 0, len(local)), local)
			pool := pools[w]
			var held []uint32
			for _, h := range sequence {
				found := pool.Find(h)
				if found == 0 {
					break
				}
				pool.Acquire(found)
				held = append(held, found)
			}
			var removed []uint64
			take := func(key uint64) {
				taken, evicted, hasEvicted := pool.Take()
				if hasEvicted {
					removed = append(removed, evicted)
				}
				pool.SetKey(taken, key)
				held = append(held, taken)
			}
			cached := len(held)
			store := traceOp{at: r.Arrival, worker: w, follows: cached > 0}
			if cached > 0 {
				store.parent = sequence[cached-1]
			}
			for i := cached; i < len(local); i++ {
				take(sequence[i])
				store.stored = append(store.stored, kv.StoredBlock{Engine: sequence[i], Local: local[i]})
			}
			events := []traceOp{store}
			for range (r.Prompt+r.Output)/traceBlockSize - len(local) {
				answer++
				last := events[len(events)-1]
				next := traceOp{at: r.Arrival, worker: w, stored: []kv.StoredBlock{{Engine: answer, Local: answer}}, follows: len(held) > 0}
				if n := len(last.stored); n > 0 {
					next.parent = last.stored[n-1].Engine
				} else {
					next.parent = last.parent
				}
				take(answer)
				events = append(events, next)
			}
			for _, block := range slices.Backward(held) {
				pool.Release(block)
			}
			if len(removed) > 0 {
				ops = append(ops, traceOp{at: r.Arrival, worker: w, removed: removed})
			}
			for _, event := range events {
				if len(event.stored) > 0 {
					ops = append(ops, event)
				}
			}
		}
	}
	return ops
}

// traceReplay is what one replay showed.
type traceReplay struct {
	took, drained time.Duration   // until the last was handed out, and until all was applied
	lookups       []time.Duration // each, from the call to its answer
	waits         []time.Duration // from when each was due until it was called
}

// replayTrace replays ops: as fast as it goes if window is 0, else each at its
// time, with the trace's time scaled to the window.
func replayTrace(b *testing.B, index *radix.Tree, ops []traceOp, window time.Duration) traceReplay {
	b.Helper()
	queues := make([]chan *traceOp, traceEventThreads)
	var appliers, issuers sync.WaitGroup
	for i := range queues {
		queues[i] = make(chan *traceOp, len(ops)) // unbounded, as there
		appliers.Go(func() {
			for op := range queues[i] {
				w := kv.WorkerKey{Worker: op.worker}
				if len(op.removed) > 0 {
					if unknown := radixtest.Remove(index, w, op.removed); unknown > 0 {
						b.Errorf("%d removed blocks are unknown", unknown)
					}
				} else if err := radixtest.Store(index, w, op.parent, op.follows, op.stored); err != nil {
					b.Error(err)
				}
			}
		})
	}
	var all traceReplay
	var mu sync.Mutex
	scale := float64(window) / float64(ops[len(ops)-1].at+1)
	began := time.Now()
	for issuer := range traceIssuers {
		issuers.Go(func() {
			var r traceReplay
			dst := make([]kv.Match, 0, traceWorkers)
			for i := range ops {
				op := &ops[i]
				if op.worker%traceIssuers != uint64(issuer) {
					continue
				}
				due := time.Duration(float64(op.at) * scale)
				for window > 0 && time.Since(began) < due {
					if due-time.Since(began) > 200*time.Microsecond {
						time.Sleep(100 * time.Microsecond)
					} else {
						runtime.Gosched()
					}
				}
				if op.prompt == nil {
					queues[op.worker%traceEventThreads] <- op
					continue
				}
				start := time.Now()
				dst = index.Match(op.prompt, len(op.prompt), 0, dst[:0])
				r.lookups = append(r.lookups, time.Since(start))
				r.waits = append(r.waits, start.Sub(began)-due)
			}
			mu.Lock()
			defer mu.Unlock()
			all.lookups, all.waits = append(all.lookups, r.lookups...), append(all.waits, r.waits...)
		})
	}
	issuers.Wait()
	all.took = time.Since(began)
	for _, queue := range queues {
		close(queue)
	}
	appliers.Wait()
	all.drained = time.Since(began)
	slices.Sort(all.lookups)
	slices.Sort(all.waits)
	return all
}

// BenchmarkIndexTrace replays the trace once as fast as the index takes it, and
// then at a quarter and at half of that rate, which it keeps up with if all is
// applied within 1.1 of the window. Lookups are timed at those rates. Run it with
// -benchtime 1x (make index-bench); it takes a minute and 4 GB.
func BenchmarkIndexTrace(b *testing.B) {
	ops := traceOps(b)
	blockOps, requests, events := 0, 0, 0
	for i := range ops {
		blockOps += ops[i].blockOps()
		if ops[i].prompt != nil {
			requests++
		} else {
			events++
		}
	}
	b.Logf("%d workers, %d copies: %d requests, %d events, %d block operations", traceWorkers, traceDuplication, requests, events, blockOps)
	at := func(sorted []time.Duration, q float64) float64 {
		return float64(sorted[int(q*float64(len(sorted)-1))].Nanoseconds()) / 1000
	}
	var capacity float64
	b.Run("overload", func(b *testing.B) {
		for range b.N {
			before := testkit.LiveHeap()
			index := radix.NewTree()
			r := replayTrace(b, index, ops, 0)
			memory, members := testkit.LiveHeap()-before, 0
			for _, w := range index.Workers() {
				members += index.Blocks(w)
			}
			capacity = float64(blockOps) / r.drained.Seconds()
			b.ReportMetric(capacity/1e6, "Mblocks/s")
			b.ReportMetric((r.drained - r.took).Seconds(), "drain-s")
			b.ReportMetric(float64(members)/1e6, "Mmembers")
			b.ReportMetric(float64(memory-8*uint64(cap(r.lookups)+cap(r.waits)))/float64(members), "bytes/member")
			runtime.KeepAlive(index)
			runtime.KeepAlive(r)
		}
	})
	for _, share := range []struct {
		name string
		of   float64
	}{{"quarter", 0.25}, {"half", 0.5}} {
		b.Run(share.name, func(b *testing.B) {
			if capacity == 0 {
				b.Skip("needs the rate of overload")
			}
			window := time.Duration(float64(blockOps) / (capacity * share.of) * float64(time.Second))
			for range b.N {
				r := replayTrace(b, radix.NewTree(), ops, window)
				b.ReportMetric(float64(blockOps)/window.Seconds()/1e6, "offered-Mblocks/s")
				b.ReportMetric(r.drained.Seconds()/window.Seconds(), "of-window")
				b.ReportMetric(at(r.lookups, 0.5), "p50-us")
				b.ReportMetric(at(r.lookups, 0.99), "p99-us")
				b.ReportMetric(at(r.lookups, 0.999), "p99.9-us")
				b.ReportMetric(at(r.waits, 0.5), "wait-p50-us")
				b.ReportMetric(at(r.waits, 0.99), "wait-p99-us")
			}
		})
	}
}
