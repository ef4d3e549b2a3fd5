package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
)

// adapted is a worker with slots for so many adapters, on which those named were used one
// after the other a second before testNow; a name with a star is in flight since.
func adapted(slots int, names ...string) Load {
	a := &Adapters{slots: slots}
	l := Load{Adapters: a}
	for i, name := range names {
		at := testNow.Add(-time.Second + time.Duration(i)*time.Millisecond)
		if bare := name[:len(name)-1]; name[len(name)-1] == '*' {
			a.Begin(bare, at)
			l.InFlight++
			continue
		}
		a.Begin(name, at)
		a.End(name, at)
	}
	return l
}

func TestWorkWeighsAdapters(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Adapter: "a", DryRun: true}
	busy := func(l Load, tokens ...int) Load {
		w := waiting(0, tokens...)
		w.Adapters = l.Adapters
		return w
	}
	// Of two idle workers that know nothing, "a" prefers one.
	first := 0
	if placement("a", kv.WorkerKey{Worker: 1}, false) < placement("a", kv.WorkerKey{}, false) {
		first = 1
	}
	tests := []struct {
		name string
		pool *pool
		want int
	}{
		{"the worker that has it loaded wins", new(pool).add(0, adapted(2, "b")).add(0, adapted(2, "a", "c")), 1},
		{"one with the adapter in flight has it loaded", new(pool).add(0, adapted(2)).add(0, adapted(2, "a*")), 1},
		{"one that has evicted it has not", new(pool).add(0, adapted(2, "a", "b", "c")).add(0, adapted(2, "a")), 1},
		{"a free slot wins against an eviction", new(pool).add(0, adapted(2, "b", "c")).add(0, adapted(2, "b")), 1},
		{"a slot that is free wins against a wait for one", new(pool).add(0, adapted(1, "b*")).add(0, adapted(2, "b*")), 1},
		{"a wait for a slot outweighs a long prefix", new(pool).add(99, adapted(2, "b*", "c*")).add(0, adapted(2)), 1},
		{"an adapter in flight needs no slot of its own", new(pool).add(0, adapted(2, "a*", "b*")).add(0, adapted(2, "b*", "c*")), 0},
		{"of two waits the shorter one wins", new(pool).add(0, adapted(1, "b*", "b*", "b*")).add(0, adapted(1, "b*")), 1},
		{"a long prefix outweighs the load of an adapter", new(pool).add(0, adapted(4, "a")).add(99, adapted(4)), 1},
		{"a long queue outweighs the load of an adapter", new(pool).add(0, busy(adapted(4, "a"), 20000, 20000)).add(0, adapted(4)), 1},
		{"requests that decode do not", new(pool).add(0, Load{InFlight: 2, ContextTokens: 2000, Adapters: adapted(4, "a").Adapters}).add(0, adapted(4)), 0},
		{"without known slots all that were used are loaded", new(pool).add(0, adapted(0, "a", "b", "c", "d")).add(0, adapted(0, "b")), 0},
		{"where nothing is known its own place wins", new(pool).add(0, Load{}).add(0, Load{}), first},
		{"a queue outweighs its own place", new(pool).add(0, waiting(0, 6400*(1-first))).add(0, waiting(0, 6400*first)), 1 - first},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p := NewWork()
			for range 5 {
				p.adapterUses.add("b", testNow)
			}
			if counts := draws(p, query, test.pool.candidates); counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
		})
	}
}

// TestAnAdapterInUseIsCopied: what a load of it costs is shared by the requests to come, and
// what is not used any more can be evicted.
func TestAnAdapterInUseIsCopied(t *testing.T) {
	busy := adapted(2, "a")
	busy.InFlight, busy.ContextTokens = 10, 20_000
	for _, test := range []struct {
		name  string
		uses  map[string]int
		ago   time.Duration
		other Load
		want  int
	}{
		{"a rare adapter stays", map[string]int{"a": 1}, 0, adapted(2), 0},
		{"one in use goes where a slot is free", map[string]int{"a": 500}, 0, adapted(2), 1},
		{"one in use takes no other's slot that is in use", map[string]int{"a": 500, "b": 500}, 0, adapted(2, "b", "c"), 0},
		{"but that of an idle one", map[string]int{"a": 500, "c": 500}, 0, adapted(2, "b", "c"), 1},
		{"uses are forgotten", map[string]int{"a": 500}, 10 * adapterLife, adapted(2), 0},
	} {
		p := NewWork()
		for name, n := range test.uses {
			for range n {
				p.adapterUses.add(name, testNow.Add(-test.ago))
			}
		}
		candidates := new(pool).add(0, busy).add(0, test.other).candidates
		q := Query{Now: testNow, Tokens: 640, BlockSize: 64, Adapter: "a", DryRun: true}
		if counts := draws(p, q, candidates); counts[test.want] != 1000 {
			t.Errorf("%s: chosen %v times, want always candidate %d", test.name, counts, test.want)
		}
	}
}

func TestUsesOfAdaptersAreBounded(t *testing.T) {
	u := adapterUses{}
	for i := range 2 * maxUses {
		u.add(fmt.Sprint(i), testNow)
	}
	if len(u) != maxUses {
		t.Errorf("uses of %d adapters are counted", len(u))
	}
	u.add("a", testNow)
	u.add("a", testNow.Add(adapterLife))
	if got := u.of("a", testNow.Add(adapterLife)); math.Abs(got-1-1/math.E) > 1e-9 {
		t.Errorf("%v uses", got)
	}
	if got := u.of("a", testNow.Add(-time.Hour)); !(got < 2) { // a clock that goes back
		t.Errorf("%v uses before the first", got)
	}
}

// TestRequestsWithoutAnAdapterAreDecidedAsBefore: what workers have loaded does not matter
// to them, not even as another draw of a tie.
func TestRequestsWithoutAnAdapterAreDecidedAsBefore(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		with, without := new(pool), new(pool)
		for range rapid.IntRange(1, 6).Draw(rt, "workers") {
			overlap := rapid.IntRange(0, 3).Draw(rt, "overlap")
			load := waiting(0, rapid.SliceOfN(rapid.IntRange(0, 2000), 0, 2).Draw(rt, "prompts")...)
			without.add(overlap, load)
			load.Adapters = adapted(rapid.IntRange(0, 2).Draw(rt, "slots"), rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b*", "c"}), 0, 4).Draw(rt, "adapters")...).Adapters
			with.add(overlap, load)
		}
		q := Query{Now: testNow, Tokens: 640, BlockSize: 64}
		a, b := draws(NewWork(), q, with.candidates), draws(NewWork(), q, without.candidates)
		if !slices.Equal(a, b) {
			rt.Errorf("chosen %v times with adapters on the workers, %v without", a, b)
		}
	})
}

// TestResidentAdaptersAreThoseOfAnLRU compares what is expected to be loaded with an engine
// that evicts what it used first, and never has more adapters in flight than slots.
func TestResidentAdaptersAreThoseOfAnLRU(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		slots := rapid.IntRange(1, 4).Draw(rt, "slots")
		names := []string{"a", "b", "c", "d", "e", "f"}
		a := &Adapters{slots: slots}
		var loaded []string // the last used at the end
		inFlight := map[string]int{}
		use := func(name string) {
			if at := slices.Index(loaded, name); at >= 0 {
				loaded = slices.Delete(loaded, at, at+1)
			} else if len(loaded) == slots {
				at := slices.IndexFunc(loaded, func(other string) bool { return inFlight[other] == 0 })
				loaded = slices.Delete(loaded, at, at+1)
			}
			loaded = append(loaded, name)
		}
		now := testNow
		rt.Repeat(map[string]func(*rapid.T){
			"begin": func(rt *rapid.T) {
				name := rapid.SampledFrom(names).Draw(rt, "name")
				distinct := 0
				for _, n := range inFlight {
					if n > 0 {
						distinct++
					}
				}
				full := inFlight[name] == 0 && distinct == slots
				if waits := a.slotWait(name) > 0; waits != full {
					rt.Fatalf("%s waits for a slot: %t, want %t", name, waits, full)
				}
				if full {
					rt.Skip("no slot")
				}
				want := AdapterReady
				if !slices.Contains(loaded, name) {
					want = AdapterLoads
				}
				now = now.Add(time.Millisecond)
				if got := a.Begin(name, now); got != want {
					rt.Fatalf("%s: state %d, want %d; loaded are %v", name, got, want, loaded)
				}
				use(name)
				inFlight[name]++
			},
			"end": func(rt *rapid.T) {
				name := rapid.SampledFrom(names).Draw(rt, "name")
				if inFlight[name] == 0 {
					rt.Skip("none in flight")
				}
				now = now.Add(time.Millisecond)
				a.End(name, now)
				use(name)
				inFlight[name]--
			},
			"": func(rt *rapid.T) {
				for _, name := range names {
					if got, want := a.Resident(name), slices.Contains(loaded, name); got != want {
						rt.Fatalf("%s is loaded: %t, want %t; loaded are %v", name, got, want, loaded)
					}
				}
				if n := a.residents(""); n != len(loaded) {
					rt.Fatalf("%d adapters, want %d", n, len(loaded))
				}
			},
		})
	})
}

func TestAReportReplacesTheLastOne(t *testing.T) {
	a := new(Adapters)
	a.Show(AdapterReport{Slots: 2, Active: []string{"a", "b"}, Stamp: 10}, testNow)
	if a.slotWait("c") == 0 || a.slotWait("a") != 0 || !a.Resident("a") {
		t.Error("two of two slots are in use")
	}
	a.Show(AdapterReport{Slots: 2, Active: []string{"c"}, Stamp: 10}, testNow.Add(time.Second)) // an old sample
	if a.Resident("c") {
		t.Error("an old sample counts")
	}
	a.Show(AdapterReport{Slots: 2, Stamp: 11}, testNow.Add(time.Second))
	if a.slotWait("c") != 0 || !a.Resident("a") || a.victim() != "a" {
		t.Errorf("idle adapters stay loaded until another comes; %q goes first", a.victim())
	}
	a.Show(AdapterReport{Slots: -5}, testNow)
	if a.Slots() != 0 || (*Adapters)(nil).Slots() != 0 {
		t.Errorf("%d slots", a.Slots())
	}
	for i := range 3 * maxAdapters {
		a.Begin(fmt.Sprint(i), testNow)
	}
	if len(a.used) != maxAdapters {
		t.Errorf("%d adapters are remembered", len(a.used))
	}
}

// TestEachAdapterHasItsOwnOrderOfWorkers: places are spread evenly, and a worker that goes
// moves only its own adapters.
func TestEachAdapterHasItsOwnOrderOfWorkers(t *testing.T) {
	const workers, adapters = 5, 2000
	place := func(name string, without int) (at int) {
		at = -1
		for w := range workers {
			if w != without && (at < 0 || placement(name, kv.WorkerKey{Worker: uint64(w)}, false) < placement(name, kv.WorkerKey{Worker: uint64(at)}, false)) {
				at = w
			}
		}
		return at
	}
	counts := make([]int, workers)
	for i := range adapters {
		name := fmt.Sprintf("adapter-%d", i)
		at := place(name, -1)
		counts[at]++
		if moved := place(name, 3); at != 3 && moved != at {
			t.Fatalf("%s moves from %d to %d without worker 3", name, at, moved)
		}
	}
	for w, n := range counts {
		if math.Abs(float64(n)-adapters/workers) > 80 { // 4 standard deviations
			t.Errorf("worker %d has %d of %d adapters", w, n, adapters)
		}
	}
}

// TestAdaptersAreSharedOut places one adapter after the other on idle workers.
func TestAdaptersAreSharedOut(t *testing.T) {
	for _, slots := range []int{0, 2} {
		p, random := NewWork(), rand.New(rand.NewPCG(1, 2))
		workers := new(pool)
		for range 4 {
			workers.add(0, adapted(slots))
		}
		for i := range 8 {
			name := fmt.Sprintf("adapter-%d", i)
			now := testNow.Add(time.Duration(i) * time.Second)
			at := p.Choose(Query{Now: now, Tokens: 640, BlockSize: 64, Adapter: name}, workers.candidates, random)
			a := workers.candidates[at].Load.Adapters
			a.Begin(name, now)
			a.End(name, now)
		}
		for w := range workers.candidates {
			if n := workers.candidates[w].Load.Adapters.residents(""); n < 1 || n > 3 || slots > 0 && n != 2 {
				t.Errorf("%d slots: worker %d has %d of 8 adapters", slots, w, n)
			}
		}
	}
}

func TestTheTimeToLoadAnAdapterIsLearned(t *testing.T) {
	p := NewWork()
	if p.adapterTime() != adapterGuess {
		t.Errorf("%v ms at first", p.adapterTime())
	}
	timing := *p.Timing
	o := Outcome{Uncached: 640, Output: 1, Alone: true, Before: Meanwhile{Prompts: 1, Passes: 1, Tokens: 640}}
	for range 100 {
		o.FirstToken = duration(p.Timing.firstToken(&o) + 300)
		o.Adapter = AdapterLoads
		p.Learn(o)
		o.FirstToken = time.Hour
		o.Adapter = AdapterWaits // says nothing of either
		p.Learn(o)
	}
	if math.Abs(p.adapterTime()-300) > 1 {
		t.Errorf("%v ms were learned, want 300", p.adapterTime())
	}
	if *p.Timing != timing {
		t.Errorf("loads of adapters have changed the timing of passes: %+v", *p.Timing)
	}
}

// TestTheTermOfAnAdapterIsExplained: it is there for requests with an adapter alone, and the
// terms add up.
func TestTheTermOfAnAdapterIsExplained(t *testing.T) {
	for _, adapter := range []string{"", "a"} {
		why := new(Explanation)
		q := Query{Now: testNow, Tokens: 640, BlockSize: 64, Adapter: adapter, Explain: why}
		NewWork().Choose(q, new(pool).add(0, adapted(1, "b*")).add(0, adapted(1, "a")).candidates, rand.New(rand.NewPCG(1, 2)))
		for i, score := range why.Scores {
			sum, has := 0.0, false
			for _, term := range score.Terms {
				sum += term.Value
				has = has || term.Name == "adapter"
			}
			if has != (adapter != "") || math.Abs(sum-score.Total) > 1e-6 {
				t.Errorf("adapter %q, candidate %d: %+v", adapter, i, score)
			}
		}
	}
}
