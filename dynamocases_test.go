package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

// The cases of Dynamo's own tests are spread over the tests of the rooms:
//
//	indexer, approximate   index_test.go, approx_test.go, ranks_test.go
//	recovery               eventlog_test.go (TestEventLogAnswersRangesAndElseAllBlocks,
//	                       TestEventStreamTakesAGapFromAnotherRouter, ...), events_test.go
//	scheduler, queue       kvpolicy_test.go (TestScheduler...), queue_test.go
//	sequences              booking_test.go (TestSequences...), replica_test.go
//	end to end             here, admission_e2e_test.go (overload, queue), busy_test.go,
//	                       nvext_test.go (query_instance_id, headers of direct mode),
//	                       reservations_test.go (slot tracker), selectpeers_test.go (P2P)
//
// Left out: taints, the shared cache and policy classes, which are not built; the
// sampled logit, which no answer has; the epoch barrier of a cleared cache, since
// a recovery and the live events of a worker are one goroutine's; JetStream,
// NATS and file discovery and bindings, which there are none of; high
// availability, beyond two routers; disaggregated serving.

// TestReplayInvariants takes the first 1,000 lines of a trace through the index:
// no worker stores a block that it has, none removes one that it has not, and
// when all that is left has been removed, nothing is left.
func TestReplayInvariants(t *testing.T) {
	s := simulation(loadTraces(t)["conversation"][:1000], "kv", 64)
	s.Engine.Blocks = 2048 // so that blocks are evicted too
	run := newSimulator(s, mustPolicy(t, "kv"))
	held := make([]map[uint64]bool, s.Workers)
	removed := 0
	for i := range run.workers {
		held[i] = map[uint64]bool{}
		run.workers[i].engine = NewSimEngine(s.Engine, func(event SimEvent) {
			for _, b := range event.Blocks {
				if held[i][b.Engine] {
					t.Fatalf("worker %d stores block %x a second time", i, b.Engine)
				}
				held[i][b.Engine] = true
			}
			for _, h := range event.Removed {
				delete(held[i], h)
				removed++
			}
			run.cacheChanged(i, event)
		})
	}
	if err := run.loop(); err != nil { // as a removal of an unknown block does
		t.Fatal(err)
	}
	if removed == 0 {
		t.Error("nothing was evicted")
	}
	for i, blocks := range held {
		key := WorkerKey{Worker: uint64(i)}
		if n := run.index.Blocks(key); n != len(blocks) {
			t.Errorf("worker %d: %d blocks in the index, %d in its cache", i, n, len(blocks))
		}
		left := make([]uint64, 0, len(blocks))
		for h := range blocks {
			left = append(left, h)
		}
		if unknown := run.index.Remove(key, left); unknown > 0 {
			t.Errorf("worker %d: the index did not know %d blocks", i, unknown)
		}
	}
	if dump := dumpLines(run.index); len(dump) > 0 {
		t.Errorf("%d blocks are left in the index", len(dump))
	}
}

// dumpLines is all that an index holds, in order.
func dumpLines(index Index) []string {
	var lines []string
	for _, entry := range dumped(index) {
		lines = append(lines, fmt.Sprintf("%+v", entry))
	}
	slices.Sort(lines)
	return lines
}

// TestTwoRoutersHoldTheSameIndex has a second router join while the first is at
// work: it learns what was before through replay.
func TestTwoRoutersHoldTheSameIndex(t *testing.T) {
	first := startMockSite(t, 2, "--mock-num-gpu-blocks=40", "--block-size=16", "--mock-data-parallel-size=2")
	load := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := first.chat(t.Context(), say(strings.Repeat(fmt.Sprintf("words of chat %d ", i), 12)), i%2 == 0, 4); err != nil {
				t.Fatal(err)
			}
		}
	}
	load(0, 20)
	port := freePorts(t, 2)
	args := []string{"--engine=none", "--block-size=16", fmt.Sprintf("--http-port=%d", port), fmt.Sprintf("--router-port=%d", port+1)}
	for i := range 2 {
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", first.workerURL(i), i))
	}
	second, end := runRooms(t, io.Discard, args...)
	eventually(t, 20*time.Second, "the second router follows all ranks", func() bool {
		n := 0
		for _, stats := range second.fleet.Streams() {
			if stats.Connected.Load() {
				n++
			}
		}
		return n == 4
	})
	load(20, 40)
	first.settle()
	want := dumpLines(first.rooms.index)
	if len(want) == 0 {
		t.Fatal("the first index is empty")
	}
	eventually(t, 20*time.Second, "both indexes are equal", func() bool { return slices.Equal(dumpLines(second.index), want) })
	if err := end(); err != nil {
		t.Error(err)
	}
	second.proxy.client.CloseIdleConnections()
}

// TestGrowingPrefixesStayOnOneWorker continues chats turn by turn.
func TestGrowingPrefixesStayOnOneWorker(t *testing.T) {
	for _, flags := range [][]string{{"--policy=kv"}, {"--policy=work"}, {"--policy=kv", "--no-kv-events"}, {"--policy=kv", "--mock-data-parallel-size=2"}} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			s := startMockSite(t, 2, append(flags, "--block-size=16")...)
			for c := range 4 {
				parts := []string{strings.Repeat(fmt.Sprintf("chat %d begins at length ", c), 10)}
				var home uint64
				for turn := range 4 {
					a, err := s.chat(t.Context(), say(parts...), false, 8)
					if err != nil {
						t.Fatal(err)
					}
					if turn == 0 {
						home = a.worker
					} else if a.worker != home || a.cached == 0 {
						t.Errorf("turn %d of chat %d went to worker %d and found %d tokens; want worker %d and some", turn, c, a.worker, a.cached, home)
					}
					if s.rooms.config.KVEvents() {
						s.settle()
					}
					parts = append(parts, a.text, strings.Repeat("and goes on ", 5))
				}
			}
		})
	}
}
