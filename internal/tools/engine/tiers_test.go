package engine

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
)

// tiered returns an engine of few blocks of 4 tokens above the given stores, which
// loads at once, and what it has asked to load.
func tiered(blocks int, events func(Event), lower ...*Store) (e *Engine, loading *[]*Request) {
	e = smallEngine(blocks, events)
	e.Cfg.MaxBatchedTokens, e.Lower = 64, lower
	loading = new([]*Request)
	e.LoadNow = func(r *Request) { *loading = append(*loading, r) }
	return e, loading
}

// serve has the engine serve one request alone, with its loads.
func serve(t testing.TB, e *Engine, loading *[]*Request, r *Request) *Request {
	t.Helper()
	if err := e.Submit(r); err != nil {
		t.Fatal(err)
	}
	for r.Generated < r.Output {
		if _, busy := e.Begin(); busy {
			e.End()
		} else if len(*loading) == 0 {
			t.Fatal("the request waits for nothing")
		}
		for _, loads := range *loading {
			e.Loaded(loads)
		}
		*loading = nil
	}
	return r
}

func TestEvictedBlocksAreLoadedFromTheFastestTier(t *testing.T) {
	host, disk := NewStore(kv.Host, 4, Loads{}), NewStore(kv.Disk, 100, Loads{})
	e, loading := tiered(6, nil, host, disk)
	a, b := []uint64{1, 2, 3, 4}, []uint64{11, 12, 13, 14}
	for i, step := range []struct {
		local []uint64
		want  kv.LowerBlocks
	}{
		{a, kv.LowerBlocks{}},
		{b, kv.LowerBlocks{}},                 // evicts all but the first block of a, and a from the host
		{a, kv.LowerBlocks{Disk: 3}},          // promoted to the host
		{[]uint64{1, 2, 3}, kv.LowerBlocks{}}, // on the device
		{[]uint64{21, 22, 23, 24, 25}, kv.LowerBlocks{}},
		{[]uint64{21, 22, 23, 24, 26}, kv.LowerBlocks{}},
		{b, kv.LowerBlocks{Disk: 4}},
	} {
		r := serve(t, e, loading, simRequest(4, step.local, 1, 1))
		if r.Lower != step.want {
			t.Errorf("request %d: %+v of %d cached, want %+v", i, r.Lower, r.Cached, step.want)
		}
		if r.Reused != r.Cached {
			t.Errorf("request %d: reused %d, cached %d", i, r.Reused, r.Cached)
		}
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if host.Held() != 4 {
		t.Errorf("the host has %d blocks of 4", host.Held())
	}
}

func TestAPromotionIsToldBeforeTheLoadedBlocks(t *testing.T) {
	host, disk := NewStore(kv.Host, 4, Loads{}), NewStore(kv.Disk, 100, Loads{})
	disk.Unpublished = true
	type change struct {
		tier   kv.Tier
		stored bool
		n      int
	}
	var published []change
	e, loading := tiered(5, func(event Event) {
		published = append(published, change{event.Tier, event.Stored, len(event.Blocks) + len(event.Removed)})
	}, host, disk)
	serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1))
	serve(t, e, loading, simRequest(4, []uint64{11, 12, 13, 14}, 1, 1))
	published = nil
	r := serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1))
	want := []change{{kv.Device, false, 3}, {kv.Host, false, 4}, {kv.Host, true, 4}, {kv.Device, true, 4}, {kv.Device, false, 1}}
	if !slices.Equal(published, want) || r.Lower != (kv.LowerBlocks{Disk: 4}) {
		t.Errorf("%+v, published %+v, want %+v", r.Lower, published, want)
	}
}

func TestALoadTakesTheTimeOfItsTier(t *testing.T) {
	host := NewStore(kv.Host, 100, Loads{Fixed: 3 * time.Millisecond, Bandwidth: 2, BytesPerToken: 1_000_000})
	e, loading := tiered(6, nil, host)
	serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1))
	e.Reset()
	r := serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1))
	if got, want := e.LoadTime(r), 11*time.Millisecond; r.Lower.Host != 4 || got != want {
		t.Errorf("%+v: %v, want %v", r.Lower, got, want)
	}
	e.ResetLower()
	e.Reset()
	if r := serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1)); r.Cached != 0 {
		t.Errorf("%d cached after both resets", r.Cached)
	}
}

// TestNoBlockIsLoadedTwiceAtATime: vLLM's connector delays a request of which a load under
// way brings blocks, and the scheduler continues with those behind it.
func TestNoBlockIsLoadedTwiceAtATime(t *testing.T) {
	e, loading := tiered(30, nil, NewStore(kv.Host, 100, Loads{}))
	serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1))
	e.Reset()
	first, second := simRequest(4, []uint64{1, 2, 3, 4}, 1, 1), simRequest(4, []uint64{1, 2, 3, 5}, 1, 1)
	other := simRequest(4, []uint64{11, 12}, 1, 1)
	for _, r := range []*Request{first, second, other} {
		if err := e.Submit(r); err != nil {
			t.Fatal(err)
		}
	}
	e.Begin()
	e.End()
	if len(*loading) != 1 || other.Generated != 1 || second.Generated != 0 {
		t.Fatalf("%d loads, the request behind has %d tokens, the one of the same blocks %d; want 1, 1, 0", len(*loading), other.Generated, second.Generated)
	}
	e.Loaded(first)
	for second.Generated == 0 {
		if _, busy := e.Begin(); !busy {
			t.Fatal("the request waits after the load is over")
		}
		e.End()
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if len(*loading) != 1 || first.Lower.Host != 4 || second.Lower.Total() != 0 || second.Cached != 12 {
		t.Errorf("%d loads; %+v of the first, %+v of the second, which found %d tokens; want 1, 4, none, 12", len(*loading), first.Lower, second.Lower, second.Cached)
	}
}

func TestASilentTierIsFullAndFindsNothing(t *testing.T) {
	host := NewStore(kv.Host, 100, Loads{})
	e, loading := tiered(6, nil, host)
	e.Cfg.Silent = true
	for range 2 {
		if r := serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1)); r.Lower.Total() != 0 {
			t.Errorf("%+v", r.Lower)
		}
		e.Reset()
	}
	if host.Held() != 4 {
		t.Errorf("%d blocks, want 4", host.Held())
	}
}

func TestASharedStoreServesTheOtherEngine(t *testing.T) {
	disk := NewStore(kv.Disk, 100, Loads{})
	e, loading := tiered(6, nil, disk)
	serve(t, e, loading, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1))
	var published int
	other, loads := tiered(6, func(event Event) {
		if event.Tier == kv.Disk {
			published++
		}
	}, disk)
	if r := serve(t, other, loads, simRequest(4, []uint64{1, 2, 3, 4}, 1, 1)); r.Lower.Disk != 4 || published != 0 {
		t.Errorf("%+v, and %d events of the store", r.Lower, published)
	}
}

// TestTiersAlwaysHoldWhatTheirEventsTell: with aborts, resets and preemptions, every
// request ends, and the events add up to the content of every tier.
func TestTiersAlwaysHoldWhatTheirEventsTell(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		host, disk := NewStore(kv.Host, rapid.IntRange(1, 30).Draw(t, "host"), Loads{}), NewStore(kv.Disk, rapid.IntRange(1, 60).Draw(t, "disk"), Loads{})
		published := map[kv.Tier]map[uint64]bool{kv.Device: {}, kv.Host: {}, kv.Disk: {}}
		e := smallEngine(24, nil)
		e.events = func(event Event) {
			for _, b := range event.Blocks {
				if published[event.Tier][b.Engine] {
					t.Fatalf("%v stores a block that it has", event.Tier)
				}
				published[event.Tier][b.Engine] = true
			}
			for _, hash := range event.Removed {
				if !published[event.Tier][hash] {
					t.Fatalf("%v removes a block that it has not", event.Tier)
				}
				delete(published[event.Tier], hash)
			}
		}
		e.Lower = []*Store{host, disk}
		e.Cfg.Caching = rapid.SampledFrom([]Caching{CacheFilled, CacheComputed}).Draw(t, "caching")
		var loading, open []*Request
		e.LoadNow = func(r *Request) { loading = append(loading, r) }
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0, 1, 2:
				var local []uint64
				for range rapid.IntRange(1, 8).Draw(t, "blocks") {
					local = append(local, rapid.Uint64Range(1, 3).Draw(t, "block"))
				}
				r := simRequest(4, local, rapid.IntRange(0, 3).Draw(t, "rest"), rapid.IntRange(1, 6).Draw(t, "output"))
				r.Prompt = max(1, r.Prompt-4*rapid.IntRange(0, 1).Draw(t, "answer's blocks"))
				if e.Submit(r) == nil {
					open = append(open, r)
				}
			case 3:
				if len(open) > 0 {
					i := rapid.IntRange(0, len(open)-1).Draw(t, "aborted")
					e.Abort(open[i])
					open = slices.Delete(open, i, i+1)
				}
			case 4:
				if rapid.IntRange(0, 4).Draw(t, "resets") == 0 {
					e.Reset()
					clear(published[kv.Device])
				}
			case 5, 6:
				for _, r := range loading {
					e.Loaded(r)
				}
				loading = nil
			default:
				if _, busy := e.Begin(); busy {
					e.End()
				}
			}
			open = slices.DeleteFunc(open, func(r *Request) bool { return r.Generated == r.Output })
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
		}
		for range 2000 {
			for _, r := range loading {
				e.Loaded(r)
			}
			loading = nil
			if _, busy := e.Begin(); busy {
				e.End()
			}
		}
		for _, r := range open {
			if r.Generated < r.Output {
				t.Fatalf("a request of %d tokens has %d of %d", r.Prompt, r.Generated, r.Output)
			}
		}
		for _, s := range e.Lower {
			if len(published[s.Tier]) != s.Held() {
				t.Fatalf("%v has %d blocks, its events have %d", s.Tier, s.Held(), len(published[s.Tier]))
			}
			for hash := range published[s.Tier] {
				if !s.Has(hash) {
					t.Fatalf("%v lacks a block that its events tell", s.Tier)
				}
			}
		}
	})
}
