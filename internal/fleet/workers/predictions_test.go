package workers

import (
	"log/slog"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit"
)

func TestWorkerWithAGroupThatCannotBeFollowedIsShown(t *testing.T) {
	var log testkit.LogBuffer
	f, key, _ := comparedFleet(t, &log)
	if got := f.Workers()[0]; got.Predictions != "" {
		t.Errorf("%+v", got)
	}
	e := testkit.StoredEvent(1, 0, 1)
	e["group_idx"], e["kv_cache_spec_kind"] = 2, "odd"
	f.workers[0].streams[key].Apply(0, testkit.Payload(t, 1, e), true)
	if got := f.Workers()[0].Predictions; !strings.HasPrefix(got, "upper bound: a KV-cache group") {
		t.Errorf("predictions %q", got)
	}
	if !strings.Contains(log.String(), "cannot be followed") {
		t.Errorf("log:\n%s", &log)
	}
}

// TestPredictionsThatCannotBeExactHaveAReason: from the first event on that leaves out what
// decides, not from the first wrong prediction.
func TestPredictionsThatCannotBeExactHaveAReason(t *testing.T) {
	const full, sliding = "full_attention", "sliding_window"
	stored := func(number, blocks, group int, kind string, window int, kept ...uint64) testkit.Event {
		e := testkit.StoredEvent(number, 0, blocks)
		e["group_idx"], e["kv_cache_spec_kind"] = group, kind
		if window > 0 {
			e["kv_cache_spec_sliding_window"] = window
		}
		if len(kept) > 0 {
			e["stored"] = kept
		}
		return e
	}
	part := func() testkit.Event {
		e := stored(2, 1, 0, full, 0)
		e["parent"] = uint64(77) // no event has named it
		return e
	}
	whole := func() testkit.Event {
		e := stored(1, 4, 0, full, 0, 9)
		e["block_size"] = 4 * testkit.BlockSize
		return e
	}
	for name, c := range map[string]struct {
		events  []testkit.Event
		traits  kv.Traits
		started bool
		want    string // its beginning
	}{
		"full attention":                     {events: []testkit.Event{stored(1, 3, 0, full, 0)}},
		"windows beside it":                  {events: []testkit.Event{stored(1, 3, 0, full, 0), stored(1, 3, 1, sliding, 8)}},
		"windows alone, all kept":            {events: []testkit.Event{stored(1, 3, 0, sliding, 64)}},
		"windows alone, some kept":           {events: []testkit.Event{stored(1, 9, 0, sliding, 2*testkit.BlockSize, 1, 2)}, want: "upper bound: all layers have sliding windows"},
		"windows alone, an odd number kept":  {events: []testkit.Event{stored(1, 9, 0, sliding, 2*testkit.BlockSize, 1, 2, 3, 4, 5)}, want: "estimate: all layers have sliding windows"},
		"parts of blocks":                    {events: []testkit.Event{whole(), part()}, want: "lower bound: KV events do not say which parts"},
		"a drafter":                          {events: []testkit.Event{stored(1, 3, 0, full, 0)}, traits: kv.Traits{DropsLast: true}},
		"a drafter beside windows, attached": {events: []testkit.Event{stored(1, 3, 0, full, 0), stored(1, 3, 1, sliding, 8)}, traits: kv.Traits{DropsLast: true}, want: "estimate: KV events do not say which KV-cache groups a drafter"},
		"EAGLE beside windows, started":      {events: []testkit.Event{stored(1, 3, 0, full, 0), stored(1, 3, 1, sliding, 8)}, traits: kv.Traits{DropsLast: true}, started: true},
		"MTP beside windows, started":        {events: []testkit.Event{stored(1, 3, 0, full, 0), stored(1, 3, 1, sliding, 8)}, traits: kv.Traits{DropsLast: true, DropsSome: true}, started: true, want: "estimate: "},
	} {
		t.Run(name, func(t *testing.T) {
			var log testkit.LogBuffer
			f, key, _ := comparedFleet(t, &log)
			w := f.workers[0]
			w.attached, w.traits = !c.started, c.traits
			w.streams[key].SetTraits(c.traits)
			w.streams[key].Apply(0, testkit.Payload(t, 1, c.events...), true)
			got := f.Workers()[0].Predictions
			if c.want == "" && got != "" || !strings.HasPrefix(got, c.want) {
				t.Errorf("%q, want %q", got, c.want)
			}
			if stats := w.streams[key].Stats(); stats.Cold.Load() || stats.DecodeErrors.Load() > 0 {
				t.Errorf("cold %v, %d invalid events:\n%s", stats.Cold.Load(), stats.DecodeErrors.Load(), &log)
			}
		})
	}
}

// comparedFleet is a fleet of one worker whose KV events have been followed from the
// start; apply lets the worker publish something.
func comparedFleet(t *testing.T, log *testkit.LogBuffer) (f *Fleet, key kv.WorkerKey, apply func()) {
	t.Helper()
	key = kv.WorkerKey{Worker: 3}
	f = New(Settings{BlockSize: testkit.BlockSize}, Deps{Log: slog.New(slog.NewTextHandler(log, nil))})
	w := newWorker(probe.Server{ID: key.Worker, URL: "http://127.0.0.1:1"}, true, false, StateReady)
	stream := events.NewStream(events.Source{Worker: key, BlockSize: testkit.BlockSize}, radix.NewTree(), events.Options{}, f.log)
	stream.Begin(0)
	w.streams[key] = stream
	f.workers = []*worker{w}
	var seq uint64
	return f, key, func() {
		stream.Apply(seq, testkit.Payload(t, 1), true)
		seq++
	}
}

func TestDroppedBlockIsLearnedFromAnswers(t *testing.T) {
	var log testkit.LogBuffer
	f, key, apply := comparedFleet(t, &log)
	drops := func() bool {
		apply()
		return strings.Contains(f.Workers()[0].Groups, "drops_last")
	}
	compare := func(times, predicted, found int) {
		for range times {
			f.Compared(key, kv.TierTokens{Device: predicted}, found)
		}
	}
	compare(dropsAfter-1, 12, 8)
	compare(1, 12, 12) // one exact prediction: it is no drafter
	compare(dropsAfter-1, 12, 8)
	compare(20, 0, 0) // nothing to be found says nothing
	if drops() {
		t.Error("learned from too few answers")
	}
	compare(1, 12, 8)
	if !drops() {
		t.Errorf("not learned:\n%s", &log)
	}
	compare(dropsAfter, 4, 8) // one block too low now
	if drops() {
		t.Error("it does not get back")
	}
	compare(2*dropsAfter, 16, 8)
	if drops() {
		t.Error("learned from predictions that are two blocks off")
	}
}

func TestWorkerWithFewExactPredictionsIsNamedOnce(t *testing.T) {
	var log testkit.LogBuffer
	f, key, _ := comparedFleet(t, &log)
	const few, again = "worker 3: few predictions", "worker 3: predictions of cached tokens are exact again"
	for i := range 4 * comparedKept {
		f.Compared(key, kv.TierTokens{Device: 40}, 40*(i%3)) // a third is exact
	}
	if n := strings.Count(log.String(), few); n != 1 {
		t.Errorf("said %d times, want once:\n%s", n, &log)
	}
	if exact := f.Workers()[0].Exact; exact == nil || *exact > 0.4 || *exact < 0.25 {
		t.Errorf("a share of %v, want a third", exact)
	}
	for range 2 * comparedKept {
		f.Compared(key, kv.TierTokens{Device: 40}, 40)
	}
	if n := strings.Count(log.String(), again); n != 1 {
		t.Errorf("the end is said %d times, want once:\n%s", n, &log)
	}
	f.Compared(kv.WorkerKey{Worker: 9}, kv.TierTokens{Device: 4}, 8) // unknown workers and ranks are ignored
	f.Compared(kv.WorkerKey{Worker: 3, Rank: 7}, kv.TierTokens{Device: 4}, 8)
}

func TestPredictionsOfLowerTiersAreKeptApart(t *testing.T) {
	var log testkit.LogBuffer
	f, key, apply := comparedFleet(t, &log)
	for range comparedKept {
		f.Compared(key, kv.TierTokens{Device: 40}, 40)
	}
	w := f.Workers()[0]
	if w.Exact == nil || *w.Exact != 1 || w.ExactLower != nil {
		t.Errorf("shares %v, %v before any block of a lower tier was expected", w.Exact, w.ExactLower)
	}
	for range 2 * dropsAfter { // the tier delivers a block less: that is no drafter
		f.Compared(key, kv.TierTokens{Device: 8, Host: 8}, 12)
	}
	apply()
	w = f.Workers()[0]
	if w.ExactLower == nil || *w.ExactLower != 0 || *w.Exact > 0.9 || strings.Contains(w.Groups, "drops_last") {
		t.Errorf("shares %v, %v, groups %q", *w.Exact, w.ExactLower, w.Groups)
	}
	for range comparedKept {
		f.Compared(key, kv.TierTokens{Host: 8}, 8)
	}
	if w = f.Workers()[0]; *w.ExactLower != 1 {
		t.Errorf("share %v, want 1", *w.ExactLower)
	}
}

func TestLowerTiersAreShown(t *testing.T) {
	var log testkit.LogBuffer
	f, key, _ := comparedFleet(t, &log)
	if got := f.Workers()[0].LowerTiers; got != nil {
		t.Errorf("%+v without any", got)
	}
	stored := func(from, to int, medium, locality string) testkit.Event {
		e := testkit.StoredEvent(1, from, to)
		e["medium"], e["locality"] = medium, locality
		return e
	}
	removed := testkit.RemovedEvent(1, 1, 3)
	removed["medium"] = "CPU"
	f.workers[0].streams[key].Apply(0, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 4), stored(0, 2, "CPU", "LOCAL"), stored(2, 4, "STORAGE", ""), stored(0, 4, "STORAGE", "REMOTE"), removed, testkit.Event{"cleared": true}), true)
	want := LowerTiers{Host: 1, Disk: 2, Shared: 4, Chunk: 4, Doubtful: true}
	if got := f.Workers()[0].LowerTiers; got == nil || *got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	page := testkit.Scrape(t, NewCollector(nil, f.Samples(noBooks{}), nil))
	for name, want := range map[string]float64{
		`kvrouter_kv_tier_blocks{dp_rank="0",owner="worker",tier="host",worker_id="3"}`:                     1,
		`kvrouter_kv_tier_blocks{dp_rank="0",owner="worker",tier="disk",worker_id="3"}`:                     2,
		`kvrouter_kv_tier_blocks{dp_rank="0",owner="store",tier="disk",worker_id="3"}`:                      4,
		`kvrouter_kv_tier_event_blocks_total{dp_rank="0",kind="stored",tier="disk",worker_id="3"}`:          6,
		`kvrouter_kv_tier_event_blocks_total{dp_rank="0",kind="removed",tier="host",worker_id="3"}`:         1,
		`kvrouter_kv_tier_event_blocks_total{dp_rank="0",kind="unknown_removed",tier="host",worker_id="3"}`: 1,
		`kvrouter_kv_tier_doubtful{dp_rank="0",worker_id="3"}`:                                              1,
		`kvrouter_kv_tier_waiting_blocks{dp_rank="0",worker_id="3"}`:                                        0,
	} {
		if got, shown := page[name]; !shown || got != want {
			t.Errorf("%s is %v (shown: %v), want %v", name, got, shown, want)
		}
	}
}

// noBooks is a router without workers.
type noBooks struct{}

func (noBooks) Has(func(*kv.Target) bool) bool               { return false }
func (noBooks) LoadOf(kv.WorkerKey) policy.Load              { return policy.Load{} }
func (noBooks) Blocks(kv.WorkerKey) int                      { return 0 }
func (noBooks) Engine(kv.WorkerKey) (kv.EngineState, string) { return 0, "" }
