package fair

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// shared returns an empty queue that keeps a share for class batch.
func shared(limit int, share float64) *Queue[string] {
	return New[string](Settings{Limit: limit, Tenants: 10, BatchShare: share})
}

// classed is an item of the common tenant.
func classed(c Class, value string, cost float64) *Item[string] {
	return &Item[string]{Value: value, Class: c, Cost: cost, Since: dawn}
}

func TestShareOfBatch(t *testing.T) {
	for name, test := range map[string]struct {
		share float64
		costs [2]float64 // of interactive and of batch requests
		want  string
	}{
		"none":                        {0, [2]float64{1, 1}, "i0 i1 i2 i3 i4 i5 b0 b1"},
		"one of four":                 {0.25, [2]float64{1, 1}, "i0 b0 i1 i2 i3 b1 i4 i5"},
		"half":                        {0.5, [2]float64{1, 1}, "i0 b0 i1 b1 i2 b2 i3 b3"},
		"half of the time":            {0.5, [2]float64{1, 3}, "i0 b0 i1 i2 i3 b1 i4 i5"},
		"all":                         {1, [2]float64{1, 1}, "i0 b0 b1 b2 b3 b4 b5 i1"},
		"a share that is none is 0":   {math.NaN(), [2]float64{1, 1}, "i0 i1 i2 i3 i4 i5 b0 b1"},
		"a share below 0 is 0":        {-1, [2]float64{1, 1}, "i0 i1 i2 i3 i4 i5 b0 b1"},
		"a share above 1 is 1":        {7, [2]float64{1, 1}, "i0 b0 b1 b2 b3 b4 b5 i1"},
		"requests that cost nothing":  {0.5, [2]float64{0, 0}, "i0 i1 i2 i3 i4 i5 b0 b1"},
		"a debt is bounded":           {0.5, [2]float64{1, MostCost}, "i0 b0 i1 i2 i3 i4 i5 b1"},
		"so is what batch is owed of": {0.5, [2]float64{MostCost, MostDebt / 2}, "i0 b0 b1 b2 b3 i1 b4 b5"},
	} {
		t.Run(name, func(t *testing.T) {
			q := shared(100, test.share)
			for i := range 6 {
				q.Push(classed(Batch, fmt.Sprint("b", i), test.costs[1]))
				q.Push(classed(Interactive, fmt.Sprint("i", i), test.costs[0]))
			}
			if got := serve(t, q, 8); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

// TestIdleBatchIsOwedNothing: what it did not ask for is not kept.
func TestIdleBatchIsOwedNothing(t *testing.T) {
	q := shared(100, 0.5)
	for i := range 10 {
		q.Push(classed(Standard, fmt.Sprint("s", i), 1))
	}
	serve(t, q, 5)
	for i := range 3 {
		q.Push(classed(Batch, fmt.Sprint("b", i), 1))
	}
	if got, want := serve(t, q, 5), "s5 b0 s6 b1 s7"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestAFullQueueKeepsPlacesForBatch(t *testing.T) {
	q := shared(4, 0.5)
	push := func(c Class, value, want string) {
		t.Helper()
		leaves(t, q, classed(c, value, 1), want)
	}
	for i := range 4 {
		push(Interactive, fmt.Sprint("i", i), "")
	}
	push(Batch, "b0", "i3")
	push(Batch, "b1", "i2")
	push(Batch, "b2", "b2")
	push(Interactive, "i4", "i4")
	push(Standard, "s0", "s0")
}

func TestAheadWithAShareOfBatch(t *testing.T) {
	for share, want := range map[float64][2]float64{0: {30, 37}, 0.5: {37, 8 + 7}, 1: {37, 7}} {
		q := shared(100, share)
		for range 3 {
			q.Push(classed(Standard, "", 10))
		}
		q.Push(classed(Batch, "", 7))
		if got := [2]float64{q.Ahead(classed(Standard, "", 1)), q.Ahead(classed(Batch, "", 1))}; got != want {
			t.Errorf("share %v: %v ms before a standard and a batch request, want %v", share, got, want)
		}
	}
}

// TestBatchReceivesItsShare plays random arrivals, predictions that are wrong, and endings, and
// holds the bound of the package's comment while requests of class batch and of others wait.
func TestBatchReceivesItsShare(t *testing.T) {
	const most, wrong = 100.0, 60.0 // ms that a request costs, and by which predictions are wrong
	type running struct {
		charge *Charge[string]
		actual float64
	}
	rapid.Check(t, func(t *rapid.T) {
		share := rapid.SampledFrom([]float64{0, 0.1, 0.5, 0.8, 1}).Draw(t, "share")
		miss := rapid.SampledFrom([]float64{0, wrong, -wrong}).Draw(t, "miss")
		q := shared(1000, share)
		var all []running
		batch, sum := 0.0, 0.0 // service of requests that have begun, their true costs
		both, from, owed, runs := false, 0.0, 0.0, 0
		check := func() {
			if !q.contends(&q.lanes[Interactive.Place()]) || !q.contends(q.batch()) {
				both = false
				return
			}
			now := batch - share*sum
			if !both {
				both, from, owed, runs = true, now, math.Abs(q.owed), len(all)
			}
			runs = max(runs, len(all))
			if got, bound := math.Abs(now-from), owed+most+2*float64(runs)*math.Abs(miss); got > bound+1e-6 {
				t.Fatalf("class batch is off its share by %v ms, the bound is %v", got, bound)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				class := rapid.SampledFrom(Classes[:]).Draw(t, "class")
				for range rapid.IntRange(1, 8).Draw(t, "requests") {
					it := classed(class, "", rapid.Float64Range(0, most).Draw(t, "cost"))
					it.Tenant.Name = rapid.SampledFrom([]string{"a", "b"}).Draw(t, "tenant")
					q.Push(it)
					check()
				}
			},
			"serve": func(t *rapid.T) {
				n := rapid.IntRange(1, 6).Draw(t, "requests")
				q.Walk(func(it *Item[string], _ bool) Verdict {
					if n--; n < 0 {
						return Stop
					}
					actual := min(max(it.Cost+miss, 0), most)
					all = append(all, running{q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}), actual})
					if sum += actual; it.Class == Batch {
						batch += actual
					}
					runs = max(runs, len(all))
					return Taken
				})
			},
			"end": func(t *rapid.T) {
				if len(all) > 0 {
					at := rapid.IntRange(0, len(all)-1).Draw(t, "which")
					all[at].charge.End(all[at].actual)
					all = slices.Delete(all, at, at+1)
				}
			},
			"": func(t *rapid.T) {
				if err := q.Check(); err != nil {
					t.Fatal(err)
				}
				check()
			},
		})
	})
}

// TestAWrongPredictionIsNotOwed: a class that predicts an hour for each short request is not
// given that hour when it ends.
func TestAWrongPredictionIsNotOwed(t *testing.T) {
	for name, predicted := range map[string]map[Class]float64{
		"right":                     {Batch: 10, Interactive: 10},
		"batch says an hour":        {Batch: MostCost, Interactive: 10},
		"batch says nothing":        {Batch: 0, Interactive: 10},
		"batch says what is capped": {Batch: 2 * MostDebt, Interactive: 10},
	} {
		t.Run(name, func(t *testing.T) {
			const share, actual, seats, rounds = 0.1, 10.0, 2, 4000
			q := shared(100, share)
			var running []*Charge[string]
			done := map[Class]int{}
			for _, c := range []Class{Batch, Interactive} {
				for range 6 {
					q.Push(classed(c, "", predicted[c]))
				}
			}
			for range rounds {
				q.Walk(func(it *Item[string], _ bool) Verdict {
					if len(running) == seats {
						return Stop
					}
					running = append(running, q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}))
					done[it.Class]++
					return Taken
				})
				for _, c := range []Class{Batch, Interactive} {
					for q.lanes[c.Place()].length() < 6 {
						q.Push(classed(c, "", predicted[c]))
					}
				}
				running[0].End(actual)
				running = running[1:]
				if err := q.Check(); err != nil {
					t.Fatal(err)
				}
			}
			if got := float64(done[Batch]) / rounds; math.Abs(got-share) > 0.02 {
				t.Errorf("class batch has a share of %.3f", got)
			}
		})
	}
}
