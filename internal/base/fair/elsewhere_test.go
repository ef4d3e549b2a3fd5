package fair

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestTell(t *testing.T) {
	q := queue(t)
	heavy := q.Begin(Tenant{Name: "heavy", Weight: 2}, Standard, 100, time.Time{})
	q.Begin(Tenant{Name: "quick"}, Interactive, 7, time.Time{}).End(9.5)
	heavy.Set(300.2)
	want := func(what string, want ...Service) {
		t.Helper()
		if got := q.Report(); !slices.Equal(got, want) {
			t.Errorf("%s: told %+v, want %+v", what, got, want)
		}
		if err := q.Check(); err != nil {
			t.Error(err)
		}
	}
	want("at first", Service{"heavy", Standard, 0, 150}, Service{"quick", Interactive, 9, 0})
	want("what runs is told again", Service{"heavy", Standard, 0, 150})
	heavy.End(41)
	want("what it has received is told once", Service{"heavy", Standard, 20, 0})
	want("nothing runs")
	q.Begin(Tenant{Name: "quick"}, Interactive, 1, time.Time{}).End(0.5)
	want("parts of a ms are kept", Service{"quick", Interactive, 1, 0})
	q.Begin(Tenant{Name: "failed"}, Batch, 9, time.Time{}).End(0)
	want("what a worker failed costs nothing")
}

func TestTellIsBounded(t *testing.T) {
	q := New[string](Settings{Limit: 1, Tenants: 2 * MostReported})
	for i := range MostReported + 3 {
		q.Begin(Tenant{Name: fmt.Sprint(i)}, Standard, 1, time.Time{}).End(float64(1 + i))
	}
	first, second := q.Report(), q.Report()
	if len(first) != MostReported || first[0].Received != MostReported+3 || len(second) != 3 || second[2].Received != 1 {
		t.Errorf("told %d and %d services: %+v", len(first), len(second), second)
	}
}

// TestServiceElsewhereCounts: a tenant is behind for what it receives at another router.
func TestServiceElsewhereCounts(t *testing.T) {
	waiting := func() *Queue[string] {
		return queue(t, of("a", "a1", 1), of("a", "a2", 1), of("b", "b1", 1), of("b", "b2", 1), of("b", "b3", 1), of("b", "b4", 1))
	}
	for name, test := range map[string]struct {
		told []Service
		want string
	}{
		"nothing":                           {nil, "a1 b1 a2 b2 b3 b4"},
		"it has received some":              {[]Service{{"a", Standard, 3, 0}}, "b1 b2 b3 a1 b4 a2"},
		"it runs":                           {[]Service{{"a", Standard, 0, 3}}, "b1 b2 b3 a1 b4 a2"},
		"both":                              {[]Service{{"a", Standard, 1, 2}}, "b1 b2 b3 a1 b4 a2"},
		"both tenants alike":                {[]Service{{"a", Standard, 3, 0}, {"b", Standard, 0, 3}}, "a1 b1 a2 b2 b3 b4"},
		"another class":                     {[]Service{{"a", Batch, 3, 0}}, "a1 b1 a2 b2 b3 b4"},
		"a class of another version":        {[]Service{{"a", 77, 3, 0}}, "a1 b1 a2 b2 b3 b4"},
		"a tenant that is not known here":   {[]Service{{"c", Standard, 3, 0}}, "a1 b1 a2 b2 b3 b4"},
		"numbers that are none":             {[]Service{{"a", Standard, math.NaN(), math.Inf(-1)}}, "a1 b1 a2 b2 b3 b4"},
		"the same tenant twice":             {[]Service{{"a", Standard, 1, 1}, {"a", Standard, 0, 1}}, "b1 b2 b3 a1 b4 a2"},
		"a tenant alone with all that runs": {[]Service{{"b", Standard, 5, 5}}, "a1 a2 b1 b2 b3 b4"},
	} {
		t.Run(name, func(t *testing.T) {
			q := waiting()
			q.Elsewhere().Take(test.told)
			if got := serve(t, q, 6); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

// TestWhatIsToldStopsATenantForTheDebtAtMost: however often a peer tells it.
func TestWhatIsToldStopsATenantForTheDebtAtMost(t *testing.T) {
	for name, told := range map[string]Service{
		"received": {"a", Standard, math.Inf(1), 0},
		"running":  {"a", Standard, 0, math.Inf(1)},
		"both":     {"a", Standard, math.MaxFloat64, math.MaxFloat64},
	} {
		t.Run(name, func(t *testing.T) {
			q := queue(t, of("a", "a", 1))
			peers := []*Elsewhere[string]{q.Elsewhere(), q.Elsewhere()}
			for i := range 20 {
				q.Push(of("b", fmt.Sprint("b", i), MostDebt/10))
			}
			for range 10 {
				for _, peer := range peers {
					peer.Take(slices.Repeat([]Service{told}, 2*MostReported))
					if err := q.Check(); err != nil {
						t.Fatal(err)
					}
				}
			}
			if got, want := serve(t, q, 11), "b0 b1 b2 b3 b4 b5 b6 b7 b8 b9 a"; got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
}

// TestAPeerThatLeavesCostsNothing: what ran there does not count any more.
func TestAPeerThatLeavesCostsNothing(t *testing.T) {
	q := queue(t, of("a", "a1", 1), of("b", "b1", 1), of("b", "b2", 1))
	peer := q.Elsewhere()
	peer.Take([]Service{{"a", Standard, 0, 500}})
	peer.Take([]Service{{"a", Standard, 0, 900}})
	peer.End()
	peer.End()
	if got, want := serve(t, q, 3), "a1 b1 b2"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestServiceElsewhereIsFreeWhileNoneWaits, as that of this router is.
func TestServiceElsewhereIsFreeWhileNoneWaits(t *testing.T) {
	q := queue(t, of("a", "a", 1), of("b", "b", 1))
	serve(t, q, 2)
	q.Elsewhere().Take([]Service{{"a", Standard, 5000, 0}})
	q.Push(of("b", "b1", 1))
	q.Push(of("a", "a1", 1))
	q.Push(of("b", "b2", 1))
	if got, want := serve(t, q, 3), "b1 a1 b2"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestAForgottenTenantMayRunElsewhere: its place is not kept for what another router says.
func TestAForgottenTenantMayRunElsewhere(t *testing.T) {
	q := New[string](Settings{Limit: 10, Tenants: 1})
	peer := q.Elsewhere()
	q.Push(of("a", "a1", 1))
	peer.Take([]Service{{"a", Standard, 0, 5000}})
	serve(t, q, 1)
	q.Push(of("b", "b1", 1))
	peer.Take([]Service{{"a", Standard, 0, 5000}, {"b", Standard, 0, 5000}})
	peer.End()
	if got := serve(t, q, 1); got != "b1" {
		t.Error(got)
	}
}

// TestRoutersShareOutTogether plays two queues over the same workers, which tell each other at
// random what tenants receive, and holds the bound of the package's comment for the service of
// both.
func TestRoutersShareOutTogether(t *testing.T) {
	const most = 100.0 // ms that a request costs
	weights := []float64{1, 2, 0.5}
	type running struct {
		charge *Charge[string]
		cost   float64
	}
	type pair struct {
		since      bool
		from, wide float64 // difference of the services then, and the greatest of the counters
		unreported float64 // most since
	}
	rapid.Check(t, func(t *rapid.T) {
		var queues [2]*Queue[string]
		var heard [2]*Elsewhere[string] // by each, of the other
		var unreported [2][]float64     // of each tenant
		service := make([]float64, len(weights))
		for i := range queues {
			queues[i] = New[string](Settings{Limit: 1000, Tenants: 10})
			heard[i], unreported[i] = queues[i].Elsewhere(), make([]float64, len(weights))
		}
		var all []running
		pairs := map[[2]int]*pair{}
		tenant := func(i int) Tenant { return Tenant{Name: fmt.Sprint(i), Weight: weights[i]} }
		flowOf := func(q *Queue[string], i int) *flow[string] { return q.flows[Standard.Place()][fmt.Sprint(i)] }
		waits := func(i int) bool {
			for _, q := range queues {
				if f := flowOf(q, i); f == nil || len(f.items) == 0 {
					return false
				}
			}
			return true
		}
		check := func() {
			eachPair(len(weights), pairs, waits, func(f, g int, p *pair) {
				now := service[f] - service[g]
				if !p.since {
					*p = pair{since: true, from: now}
					for _, q := range queues {
						p.wide = max(p.wide, math.Abs(flowOf(q, f).counter()-flowOf(q, g).counter()))
					}
				}
				for i := range queues {
					p.unreported = max(p.unreported, unreported[i][f], unreported[i][g])
				}
				const rounding = 4 // of what is reported, ms
				bound := p.wide + most/min(weights[f], weights[g]) + 2*p.unreported + rounding
				if got := math.Abs(now - p.from); got > bound {
					t.Fatalf("tenants %d and %d: services differ by %v, the bound is %v", f, g, got, bound)
				}
			})
		}
		which := func(t *rapid.T) int { return rapid.IntRange(0, 1).Draw(t, "router") }
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				q, i := queues[which(t)], rapid.IntRange(0, len(weights)-1).Draw(t, "tenant")
				for range rapid.IntRange(1, 8).Draw(t, "requests") {
					q.Push(&Item[string]{Tenant: tenant(i), Cost: rapid.Float64Range(0, most).Draw(t, "cost"), Since: dawn})
					check()
				}
			},
			"serve": func(t *rapid.T) {
				at, n := which(t), rapid.IntRange(1, 6).Draw(t, "requests")
				q := queues[at]
				q.Walk(func(it *Item[string], _ bool) Verdict {
					if n--; n < 0 {
						return Stop
					}
					i := int(it.Tenant.Name[0] - '0')
					all = append(all, running{q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}), it.Cost})
					service[i] += it.Cost / weights[i]
					unreported[at][i] += it.Cost / weights[i]
					check()
					return Taken
				})
			},
			"end": func(t *rapid.T) {
				if len(all) > 0 {
					at := rapid.IntRange(0, len(all)-1).Draw(t, "which")
					all[at].charge.End(all[at].cost)
					all = slices.Delete(all, at, at+1)
				}
			},
			"tell": func(t *rapid.T) {
				at := which(t)
				heard[1-at].Take(queues[at].Report())
				clear(unreported[at])
			},
			"": func(t *rapid.T) {
				for _, q := range queues {
					if err := q.Check(); err != nil {
						t.Fatal(err)
					}
				}
				check()
			},
		})
	})
}
