package engine

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestAnAdapterIsLoadedBeforeItsPass(t *testing.T) {
	cfg := Settings{Blocks: 100, BlockSize: 4, MaxSeqs: 8, MaxBatchedTokens: 64, Timing: DefaultTiming(), Adapters: AdapterSettings{Slots: 1, LoadMS: 200}}
	cfg.Timing.Speedup = 2
	e := New(cfg, nil)
	pass := func(adapter string) time.Duration {
		r := &Request{Prompt: 4, Output: 1, Adapter: adapter}
		if err := e.Submit(r); err != nil {
			t.Fatal(err)
		}
		return runPass(t, e)
	}
	bare := pass("")
	for i, step := range []struct {
		adapter string
		loads   bool
	}{{"a", true}, {"a", false}, {"b", true}, {"", false}, {"b", false}, {"a", true}} {
		want := bare
		if step.loads {
			want += 100 * time.Millisecond
		}
		if got := pass(step.adapter); got != want {
			t.Errorf("pass %d with %q takes %s, want %s", i, step.adapter, got, want)
		}
	}
	if e.AdapterLoads != 3 {
		t.Errorf("%d loads", e.AdapterLoads)
	}
}

func TestARequestWaitsForASlotAndOthersGoBeforeIt(t *testing.T) {
	e := New(Settings{Blocks: 100, BlockSize: 4, MaxSeqs: 8, MaxBatchedTokens: 64, Timing: DefaultTiming(), Adapters: AdapterSettings{Slots: 2}}, nil)
	var requests []*Request
	for _, adapter := range []string{"a", "b", "c", "a", ""} {
		r := &Request{Prompt: 4, Output: 2, Adapter: adapter}
		requests = append(requests, r)
		if err := e.Submit(r); err != nil {
			t.Fatal(err)
		}
	}
	runPass(t, e)
	for i, want := range []int{1, 1, 0, 1, 1} {
		if requests[i].Generated != want {
			t.Errorf("request %d has %d tokens, want %d", i, requests[i].Generated, want)
		}
	}
	if got := e.Adapters(); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("adapters %v", got)
	}
	runPass(t, e)
	runPass(t, e)
	if requests[2].Generated != 1 {
		t.Error("the adapter has no slot although the others have ended")
	}
}

// TestABatchHasNoMoreAdaptersThanSlots submits, aborts and runs requests at random.
func TestABatchHasNoMoreAdaptersThanSlots(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		slots := rapid.IntRange(1, 3).Draw(rt, "slots")
		e := New(Settings{Blocks: 30, BlockSize: 4, MaxSeqs: 6, MaxBatchedTokens: 16, Timing: DefaultTiming(), Adapters: AdapterSettings{Slots: slots, LoadMS: 1}}, nil)
		var open []*Request
		pass := func() {
			if _, busy := e.Begin(); !busy {
				if _, waiting, _ := e.Load(); waiting > 0 {
					rt.Fatal("requests wait for an idle engine")
				}
				return
			}
			if n := len(e.inBatch()); n > slots || len(e.loaded) > slots {
				rt.Fatalf("%d adapters in the batch, %d loaded, %d slots", n, len(e.loaded), slots)
			}
			e.End()
		}
		rt.Repeat(map[string]func(*rapid.T){
			"submit": func(rt *rapid.T) {
				r := &Request{Prompt: rapid.IntRange(1, 40).Draw(rt, "prompt"), Output: rapid.IntRange(1, 10).Draw(rt, "output"), Adapter: rapid.SampledFrom([]string{"", "a", "b", "c", "d"}).Draw(rt, "adapter")}
				if err := e.Submit(r); err != nil {
					rt.Fatal(err)
				}
				open = append(open, r)
			},
			"abort": func(rt *rapid.T) {
				if len(open) > 0 {
					e.Abort(open[rapid.IntRange(0, len(open)-1).Draw(rt, "which")])
				}
			},
			"pass": func(*rapid.T) { pass() },
		})
		for range 10_000 {
			if running, waiting, _ := e.Load(); running+waiting == 0 {
				return
			}
			pass()
		}
		rt.Fatal("requests never end")
	})
}
