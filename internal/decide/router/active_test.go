package router

import (
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
)

// TestActiveBlocksAreThoseOfTheRequestsInFlight compares with a list of the requests,
// whose prompts are paths in a small tree.
func TestActiveBlocksAreThoseOfTheRequestsInFlight(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type request struct {
			worker   uint32
			sequence []uint64
		}
		var requests []request
		a := newActiveBlocks()
		prompt := rapid.Custom(func(t *rapid.T) (sequence []uint64) {
			depth, branch := rapid.IntRange(0, 40).Draw(t, "depth"), rapid.IntRange(0, 40).Draw(t, "branch")
			for i := range depth {
				number := uint64(0)
				if i >= branch {
					number = uint64(branch) + 1
				}
				sequence = append(sequence, 1+number*1000+uint64(i))
			}
			return sequence
		})
		worker := rapid.SampledFrom([]uint32{0, 1, 2, 63, 64, 200})
		has := func(r request, sequence []uint64) (blocks int) {
			for blocks < min(len(r.sequence), len(sequence)) && r.sequence[blocks] == sequence[blocks] {
				blocks++
			}
			return blocks
		}
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(t *rapid.T) {
				r := request{worker.Draw(t, "worker"), prompt.Draw(t, "prompt")}
				for i, h := range r.sequence {
					first := true
					for _, other := range requests {
						first = first && (other.worker != r.worker || has(other, r.sequence) <= i)
					}
					if a.add(h, r.worker) != first {
						t.Fatalf("block %d of worker %d is the first: %v, want %v", h, r.worker, !first, first)
					}
				}
				requests = append(requests, r)
			},
			"end": func(t *rapid.T) {
				if len(requests) == 0 {
					t.Skip("none is in flight")
				}
				i := rapid.IntRange(0, len(requests)-1).Draw(t, "request")
				r := requests[i]
				requests = append(requests[:i], requests[i+1:]...)
				for i, h := range r.sequence {
					last := true
					for _, other := range requests {
						last = last && (other.worker != r.worker || has(other, r.sequence) <= i)
					}
					if a.remove(h, r.worker) != last {
						t.Fatalf("block %d of worker %d is the last: %v, want %v", h, r.worker, !last, last)
					}
				}
			},
			"": func(t *rapid.T) {
				sequence := prompt.Draw(t, "asked")
				held := a.prefixes(sequence, nil)
				want := make([]int32, max(201, len(held)))
				counts := map[uint64]map[uint32]uint32{}
				for _, r := range requests {
					want[r.worker] = max(want[r.worker], int32(has(r, sequence)))
					for _, h := range r.sequence {
						if counts[h] == nil {
							counts[h] = map[uint32]uint32{}
						}
						counts[h][r.worker]++
					}
				}
				pairs := 0
				for h, by := range counts {
					pairs += len(by)
					for w, n := range by {
						if got := a.requests(h, w); got != n {
							t.Fatalf("%d requests of worker %d have block %d, want %d", got, w, h, n)
						}
					}
				}
				if a.pairs != pairs || a.entries.Len() != len(counts) {
					t.Fatalf("%d pairs of %d blocks, want %d of %d", a.pairs, a.entries.Len(), pairs, len(counts))
				}
				for w, n := range want {
					if w < len(held) && held[w] != n || w >= len(held) && n != 0 {
						t.Fatalf("worker %d has another number of the prompt's blocks than %d: %v", w, n, held)
					}
				}
			},
		})
	})
}

func TestTheSearchForActiveBlocksFindsTheirEnd(t *testing.T) {
	sequence := kv.SequenceHashes(nil, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11})
	w := kv.WorkerKey{Worker: 7}
	for active := range len(sequence) + 1 {
		l := newLoads()
		l.activate(w, sequence[:active])
		for asked := range len(sequence) + 1 {
			l.snapshot([]view{{size: 1, times: 1, sequence: sequence[:asked]}})
			if got, want := l.activeOn(l.byWorker[w].number), min(active, asked); got != want {
				t.Errorf("%d of %d active: found %d", active, asked, got)
			}
		}
		if got := l.activeOn(l.byWorker[w].number + 1); got != 0 {
			t.Errorf("another worker has %d active", got)
		}
	}
}
