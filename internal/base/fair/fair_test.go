package fair

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// dawn is when tests begin.
var dawn = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// seconds is an instant after dawn.
func seconds(s float64) time.Time { return dawn.Add(time.Duration(s * float64(time.Second))) }

// of is an item of a tenant in class standard.
func of(tenant, value string, cost float64) *Item[string] {
	return &Item[string]{Value: value, Tenant: Tenant{Name: tenant}, Cost: cost, Since: dawn}
}

// queue returns a queue in which those items wait.
func queue(t testing.TB, items ...*Item[string]) *Queue[string] {
	t.Helper()
	q := New[string](Settings{Limit: 100, Tenants: 100})
	for _, it := range items {
		if out := q.Push(it); out != nil {
			t.Fatalf("%s has to leave", out.Value)
		}
	}
	return q
}

// serve takes n items of the queue, and returns their values.
func serve(t testing.TB, q *Queue[string], n int) string {
	t.Helper()
	var served []string
	q.Walk(func(it *Item[string], _ bool) Verdict {
		if n--; n < 0 {
			return Stop
		}
		q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}).End(it.Cost)
		served = append(served, it.Value)
		return Taken
	})
	if err := q.Check(); err != nil {
		t.Fatal(err)
	}
	return strings.Join(served, " ")
}

func TestOrder(t *testing.T) {
	with := func(it *Item[string], change func(*Item[string])) *Item[string] {
		change(it)
		return it
	}
	class := func(c Class) func(*Item[string]) { return func(it *Item[string]) { it.Class = c } }
	due := func(s float64) func(*Item[string]) { return func(it *Item[string]) { it.Deadline = seconds(s) } }
	weight := func(w float64) func(*Item[string]) { return func(it *Item[string]) { it.Tenant.Weight = w } }
	for name, test := range map[string]struct {
		items []*Item[string]
		want  string
	}{
		"classes go first":                         {[]*Item[string]{with(of("a", "batch", 1), class(Batch)), of("a", "standard", 1), with(of("b", "interactive", 9), class(Interactive))}, "interactive standard batch"},
		"a class that is none is the nearest":      {[]*Item[string]{with(of("a", "batch", 1), class(77)), of("a", "standard", 1), with(of("b", "interactive", 9), class(-99))}, "interactive standard batch"},
		"one tenant's are in the order of arrival": {[]*Item[string]{of("a", "1", 9), of("a", "2", 1), of("a", "3", 5)}, "1 2 3"},
		"tenants take turns":                       {[]*Item[string]{of("a", "a1", 1), of("a", "a2", 1), of("a", "a3", 1), of("b", "b1", 1), of("b", "b2", 1)}, "a1 b1 a2 b2 a3"},
		"a light tenant goes before a flood":       {[]*Item[string]{of("a", "a1", 9), of("a", "a2", 9), of("a", "a3", 9), of("b", "b1", 1), of("b", "b2", 1), of("b", "b3", 1)}, "a1 b1 b2 b3 a2 a3"},
		"cached prompts cost little":               {[]*Item[string]{of("a", "a1", 2), of("b", "b1", 8), of("a", "a2", 2), of("a", "a3", 2), of("b", "b2", 8), of("a", "a4", 2), of("a", "a5", 2)}, "a1 b1 a2 a3 a4 b2 a5"},
		"a weight of 2 is served twice as much":    {[]*Item[string]{with(of("a", "a1", 2), weight(2)), with(of("a", "a2", 2), weight(2)), with(of("a", "a3", 2), weight(2)), with(of("a", "a4", 2), weight(2)), of("b", "b1", 2), of("b", "b2", 2)}, "a1 b1 a2 a3 b2 a4"},
		"deadlines go before arrival":              {[]*Item[string]{of("a", "none", 1), with(of("a", "late", 1), due(9)), with(of("a", "soon", 1), due(3))}, "soon late none"},
		"patience ends":                            {[]*Item[string]{with(of("a", "late", 1), due(31)), of("a", "none", 1)}, "none late"},
		"a deadline goes before nobody else's":     {[]*Item[string]{of("a", "a1", 1), with(of("b", "b1", 1), due(1)), with(of("b", "b2", 1), due(0.5))}, "a1 b2 b1"},
		"a jump makes it due earlier":              {[]*Item[string]{of("a", "none", 1), with(of("a", "late", 1), func(it *Item[string]) { it.Deadline, it.Jump = seconds(40), 11*time.Second })}, "late none"},
		"a priority goes before deadlines":         {[]*Item[string]{with(of("a", "soon", 1), due(1)), with(of("a", "prior", 1), func(it *Item[string]) { it.Priority = 1 })}, "prior soon"},
		"foreign costs are clamped":                {[]*Item[string]{of("a", "a1", math.NaN()), of("a", "a2", -5), of("a", "a3", math.Inf(1)), of("a", "a4", 1), of("b", "b1", 1), of("b", "b2", 1)}, "a1 a2 a3 b1 b2 a4"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := serve(t, queue(t, test.items...), len(test.items)); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

func TestAnIdleTenantHasNoCredit(t *testing.T) {
	q := queue(t)
	for i := range 20 {
		q.Push(of("a", fmt.Sprint("a", i), 1))
	}
	serve(t, q, 10)
	for i := range 5 {
		q.Push(of("b", fmt.Sprint("b", i), 1))
	}
	if got, want := serve(t, q, 6), "a10 b0 a11 b1 a12 b2"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestATenantPaysForWhatItReceivedWhileOthersWaited(t *testing.T) {
	q := queue(t, of("a", "a1", 1), of("b", "b1", 1), of("b", "b2", 1), of("b", "b3", 1), of("b", "b4", 1))
	first := q.Begin(Tenant{Name: "a"}, Standard, 1, time.Time{})
	first.Set(3) // its answer is longer than predicted
	if got := serve(t, q, 3); got != "b1 b2 b3" {
		t.Error(got)
	}
	first.End(0) // nothing came of it
	if got := serve(t, q, 2); got != "a1 b4" {
		t.Error(got)
	}
}

// TestWhatRunsCounts: a tenant that has many requests running is behind one that has none.
func TestWhatRunsCounts(t *testing.T) {
	q := queue(t)
	for range 3 {
		q.Begin(Tenant{Name: "a"}, Standard, 1, time.Time{})
	}
	for i := range 3 {
		q.Push(of("a", fmt.Sprint("a", i), 1))
	}
	for i := range 5 {
		q.Push(of("b", fmt.Sprint("b", i), 1))
	}
	if got, want := serve(t, q, 6), "b0 b1 b2 a0 b3 a1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestDebtsAreBounded(t *testing.T) {
	q := queue(t, of("b", "b0", 1))
	q.Begin(Tenant{Name: "a"}, Standard, 1, time.Time{}).End(MostCost)
	q.Push(of("a", "a1", 1))
	for i := range 12 {
		q.Push(of("b", fmt.Sprint("b", i+1), MostDebt/10))
	}
	if got, want := serve(t, q, 14), "b0 b1 b2 b3 b4 b5 b6 b7 b8 b9 b10 a1 b11 b12"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestServiceThatNobodyWaitedForIsFree(t *testing.T) {
	q := queue(t)
	for range 100 {
		if got := q.Begin(Tenant{Name: "a"}, Standard, 50, time.Time{}).End(70); got != 70 {
			t.Fatal(got)
		}
	}
	q.Push(of("a", "a1", 1))
	q.Push(of("b", "b1", 1))
	q.Push(of("a", "a2", 1))
	if got := serve(t, q, 3); got != "a1 b1 a2" {
		t.Error(got)
	}
}

func TestAChargeEndsOnce(t *testing.T) {
	q := queue(t, of("b", "b1", 1))
	c := q.Begin(Tenant{Name: "a"}, Standard, 5, time.Time{})
	c.End(7)
	c.Set(9)
	if got := c.End(9); got != 0 || c.Cost() != 7 {
		t.Error(got, c.Cost())
	}
	var none *Charge[string]
	none.Set(3)
	if none.End(4) != 0 || none.Cost() != 0 {
		t.Error("nil charges")
	}
	if err := q.Check(); err != nil {
		t.Error(err)
	}
}

// leaves pushes an item and holds which one has to leave; empty: none.
func leaves(t *testing.T, q *Queue[string], it *Item[string], want string) {
	t.Helper()
	got := ""
	if out := q.Push(it); out != nil {
		got = out.Value
	}
	if got != want {
		t.Errorf("%s: %q has to leave, want %q", it.Value, got, want)
	}
	if err := q.Check(); err != nil {
		t.Error(err)
	}
}

func TestAFullQueueKeepsTheLightTenants(t *testing.T) {
	q := New[string](Settings{Limit: 4, Tenants: 10})
	push := func(tenant, value string, class Class, want string) {
		t.Helper()
		it := of(tenant, value, 1)
		it.Class = class
		leaves(t, q, it, want)
	}
	for i := range 4 {
		push("flood", fmt.Sprint("f", i), Standard, "")
	}
	push("flood", "f4", Standard, "f4")
	push("light", "l0", Standard, "f3")
	push("light", "l1", Standard, "f2")
	push("light", "l2", Standard, "l2")
	push("light", "batch", Batch, "batch")
	push("flood", "urgent", Interactive, "f1")
}

func TestWhatIsKeptIsOfferedOnceAndStays(t *testing.T) {
	q := queue(t, of("a", "a1", 1), of("a", "a2", 1), of("b", "b1", 1), of("b", "b2", 1))
	var offered []string
	q.Walk(func(it *Item[string], _ bool) Verdict {
		offered = append(offered, it.Value)
		if it.Tenant.Name == "b" {
			return Taken
		}
		return Kept
	})
	slices.Sort(offered)
	if got := strings.Join(offered, " "); got != "a1 a2 b1 b2" || q.Len() != 2 {
		t.Errorf("%s were offered, %d stay", got, q.Len())
	}
	if got := serve(t, q, 9); got != "a1 a2" {
		t.Error(got)
	}
}

// TestLaterLetsTheTenantsOwnPass: as many as MostPassed of the next Window items, of no other
// tenant and of no lower priority.
func TestLaterLetsTheTenantsOwnPass(t *testing.T) {
	q := queue(t, of("a", "head", 1), of("b", "b1", 1))
	for i := range Window + 3 {
		q.Push(of("a", fmt.Sprint("a", i), 1))
	}
	// Only one item a walk finds its worker.
	turn := func(wants string) (taken string) {
		q.Walk(func(it *Item[string], must bool) Verdict {
			switch {
			case taken != "":
				return Stop
			case it.Tenant.Name == "a" && it.Value != wants && !must:
				return Later
			}
			taken = it.Value
			q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}).End(it.Cost)
			return Taken
		})
		if err := q.Check(); err != nil {
			t.Fatal(err)
		}
		return taken
	}
	goes := func(wants, want string) {
		t.Helper()
		if got := turn(wants); got != want {
			t.Errorf("%s goes instead of %s", got, want)
		}
	}
	goes("a7", "a7")
	goes("", "b1")                          // a has had its turn
	goes(fmt.Sprint("a", Window+2), "head") // it is beyond the window
	next := 1
	for range MostPassed {
		if next == 7 {
			next++
		}
		name := fmt.Sprint("a", next)
		goes(name, name)
		next++
	}
	goes(fmt.Sprint("a", next), "a0") // has been passed often enough

	high, low := of("a", "high", 1), of("a", "low", 1)
	high.Priority = 1
	q = queue(t, high, low)
	if got := turn("low"); got != "high" {
		t.Errorf("%s passes a higher priority", got)
	}
}

// TestYieldLetsOtherTenantsGoFirst: while that is allowed, and never where a worker would have
// nothing to do.
func TestYieldLetsOtherTenantsGoFirst(t *testing.T) {
	q := queue(t, of("a", "a0", 1))
	for i := range MostYields + 2 {
		q.Push(of("b", fmt.Sprint("b", i), 1000))
	}
	turn := func(wants bool) (taken string) { // the item that goes where a0 does not find its worker
		q.Walk(func(it *Item[string], must bool) Verdict {
			switch {
			case taken != "":
				return Stop
			case it.Tenant.Name == "a" && !wants && !must:
				return Yield
			case it.Tenant.Name == "b" && wants:
				return Kept
			}
			taken = it.Value
			q.Begin(it.Tenant, it.Class, it.Cost, time.Time{})
			return Taken
		})
		if err := q.Check(); err != nil {
			t.Fatal(err)
		}
		return taken
	}
	for i := range MostYields {
		if got, want := turn(false), fmt.Sprint("b", i); got != want {
			t.Fatalf("%s goes instead of %s", got, want)
		}
	}
	if got := turn(false); got != "a0" {
		t.Errorf("%s goes, and a0 has yielded often enough", got)
	}
	q.Push(of("a", "a1", 1))
	if got := turn(false); got != fmt.Sprint("b", MostYields) {
		t.Errorf("%s goes, and a1 may yield: its tenant has not waited", got)
	}
	if got := turn(true); got != "a1" {
		t.Errorf("%s goes instead of a1, which finds its worker", got)
	}
	q.Remove(q.flows[Standard.Place()]["b"].items[0])
	q.Push(of("a", "a2", 1))
	if got := turn(false); got != "a2" {
		t.Errorf("%q goes instead of a2, which is alone", got)
	}
}

// TestATenantPressesBesideOthersWithLess: of 8 seats.
func TestATenantPressesBesideOthersWithLess(t *testing.T) {
	type running struct {
		tenant  string
		weight  float64
		class   Class
		n, ago  int // requests, and when they began, s
		ended   bool
		waiting int
	}
	flood := running{tenant: "flood", n: 4}
	for name, c := range map[string]struct {
		others []running
		want   bool
	}{
		"alone":                         {nil, false},
		"beside one that has ended":     {[]running{{tenant: "light", n: 1, ended: true}}, true},
		"beside one of long ago":        {[]running{{tenant: "light", n: 1, ago: 61, ended: true}}, false},
		"beside one that has as much":   {[]running{{tenant: "heavy", n: 4}}, false},
		"beside one that waits for it":  {[]running{{tenant: "heavy", n: 1, waiting: 3}}, false},
		"a heavier one beside it":       {[]running{{tenant: "heavy", weight: 3, n: 5}}, true},
		"a lighter one beside it":       {[]running{{tenant: "light", weight: 0.5, n: 1}}, false},
		"beside one of another class":   {[]running{{tenant: "chat", class: Interactive, n: 1}}, false},
		"beside more than are examined": {slices.Repeat([]running{{tenant: "light", n: 1, ended: true}}, 2*mostTried), true},
	} {
		t.Run(name, func(t *testing.T) {
			q := queue(t)
			now := dawn.Add(time.Hour)
			for i, r := range append([]running{flood}, c.others...) {
				tenant := Tenant{Name: r.tenant, Weight: r.weight}
				if i > 1 {
					tenant.Name += fmt.Sprint(i)
				}
				for range r.n {
					charge := q.Begin(tenant, r.class, 1, now.Add(-time.Duration(r.ago)*time.Second))
					if r.ended {
						charge.End(1)
					}
				}
				for range r.waiting {
					q.Push(&Item[string]{Tenant: tenant, Class: r.class, Cost: 1})
				}
			}
			if got := q.Presses(Tenant{Name: "flood"}, Standard, 8, now.Add(-time.Minute)); got != c.want {
				t.Errorf("presses: %v", got)
			}
		})
	}
}

// TestATenantIsWithinItsShare: of 8 seats, beside a flood that runs 6.
func TestATenantIsWithinItsShare(t *testing.T) {
	now := dawn.Add(time.Hour)
	for name, c := range map[string]struct {
		running, waiting int
		weight           float64
		ago              time.Duration // of the flood
		want             bool
	}{
		"it comes":                {want: true},
		"it runs less":            {running: 3, want: true},
		"it runs its share":       {running: 4},
		"it waits for its share":  {running: 2, waiting: 2},
		"it weighs more":          {running: 4, weight: 3, want: true},
		"it weighs less":          {running: 2, weight: 0.25},
		"the flood is long over":  {ago: 2 * time.Minute},
		"the flood is just over":  {ago: 59 * time.Second, want: true},
		"it has its share itself": {running: 3, ago: 2 * time.Minute},
	} {
		q, light := queue(t), Tenant{Name: "light", Weight: c.weight}
		for range 6 {
			q.Begin(Tenant{Name: "flood"}, Standard, 1, now.Add(-c.ago))
		}
		for range c.running {
			q.Begin(light, Standard, 1, now)
		}
		for range c.waiting {
			q.Push(&Item[string]{Tenant: light, Class: Standard, Cost: 1})
		}
		if got := q.Within(light, Standard, 8, now.Add(-time.Minute)); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestPassClassCostsWhatIsLookedAt: however much of a class waits, a walk looks at one item of it.
func TestPassClassCostsWhatIsLookedAt(t *testing.T) {
	for name, test := range map[string]struct {
		verdicts []Verdict // on the items of class batch, in order; PassClass on further ones
		want     int       // items of class batch that are offered
	}{
		"at once":             {nil, 1},
		"behind others":       {[]Verdict{Kept, Taken, Kept}, 4},
		"instead of Later":    {[]Verdict{Later}, 2},
		"instead of Yield":    {[]Verdict{Yield}, 2},
		"after others yield":  {[]Verdict{Yield, Kept, Kept, Kept, Kept, Kept, Kept, Kept, Kept}, 10},
		"never; all are kept": {slices.Repeat([]Verdict{Kept}, 3000), 3000},
	} {
		q := queue(t)
		q.settings.Limit = 10_000
		for i := range 3000 {
			it := of(fmt.Sprint(i%3), "batch", 1)
			it.Class = Batch
			q.Push(it)
		}
		for i := range 5 {
			q.Push(of(fmt.Sprint(i), "standard", 1))
		}
		for range 2 { // the second walk begins anew
			standard, batch := 0, 0
			q.Walk(func(it *Item[string], _ bool) Verdict {
				if it.Value == "standard" {
					standard++
					return Kept
				}
				if batch++; batch <= len(test.verdicts) {
					return test.verdicts[batch-1]
				}
				return PassClass
			})
			if standard != 5 || batch != test.want {
				t.Errorf("%s: %d and %d items are offered, want 5 and %d", name, standard, batch, test.want)
			}
			if err := q.Check(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestTenantsAreBounded(t *testing.T) {
	q := New[string](Settings{Limit: 1000, Tenants: 3})
	for i := range 100 {
		q.Begin(Tenant{Name: fmt.Sprint(i)}, Standard, 1, time.Time{}).End(1)
		if err := q.Check(); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 100 {
		q.Push(of(fmt.Sprint(i), "", 1))
		if err := q.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAhead(t *testing.T) {
	q := queue(t, of("a", "", 10), of("a", "", 10), of("a", "", 10), of("b", "", 4))
	batch := of("c", "", 7)
	batch.Class = Batch
	q.Push(batch)
	for _, tenant := range []string{"a", "b", "d"} { // not counted as work ahead
		it := of(tenant, "", 100)
		it.Deadline, it.Leaves = seconds(20), true
		q.Push(it)
	}
	for name, test := range map[string]struct {
		it   *Item[string]
		want float64
	}{
		"a new tenant goes before all that have as much as it": {of("c", "", 1), 0},
		"behind its own and what others receive meanwhile":     {of("b", "", 1), 4 + 4},
		"behind its own and all of a light one":                {of("a", "", 1), 30 + 4},
		"a deadline goes before its own":                       {func() *Item[string] { it := of("a", "", 1); it.Deadline = seconds(1); return it }(), 0},
		"a later class is behind all":                          {func() *Item[string] { it := of("x", "", 1); it.Class = Batch; return it }(), 34},
	} {
		t.Run(name, func(t *testing.T) {
			if got := q.Ahead(test.it); got != test.want {
				t.Errorf("%v ms, want %v", got, test.want)
			}
		})
	}
}

// TestWaiting: items of later classes are not counted.
func TestWaiting(t *testing.T) {
	q := queue(t)
	for class, cost := range map[Class]float64{Interactive: 1, Standard: 10, Batch: 100} {
		for _, tenant := range []string{"a", "b"} {
			it := of(tenant, "", cost)
			it.Class = class
			q.Push(it)
		}
	}
	for class, want := range map[Class]float64{Interactive: 2, Standard: 22, Batch: 222} {
		if got := q.Waiting(class); got != want {
			t.Errorf("%v: %v ms, want %v", class, got, want)
		}
	}
}

func TestClassNames(t *testing.T) {
	for _, c := range Classes {
		if got, ok := ClassOf(c.String()); got != c || !ok {
			t.Errorf("%v is %v", c, got)
		}
	}
	if _, ok := ClassOf("urgent"); ok {
		t.Error("there is no class urgent")
	}
}

// eachPair calls check with each two tenants that wait both, and what has been noted of them since
// they do.
func eachPair[P any](tenants int, noted map[[2]int]*P, waits func(int) bool, check func(f, g int, p *P)) {
	for f := range tenants {
		for g := range f {
			two := [2]int{f, g}
			if !waits(f) || !waits(g) {
				delete(noted, two)
				continue
			}
			if noted[two] == nil {
				noted[two] = new(P)
			}
			check(f, g, noted[two])
		}
	}
}

// TestServiceOfBackloggedTenantsStaysWithinItsBound plays random arrivals, predictions that are
// wrong, and endings, and holds the bound of the package's comment for each two tenants that
// wait all the time.
func TestServiceOfBackloggedTenantsStaysWithinItsBound(t *testing.T) {
	const most, wrong = 100.0, 60.0 // ms that a request costs, and by which predictions are wrong
	type running struct {
		charge *Charge[string]
		tenant int
		actual float64
	}
	weights := []float64{1, 1, 2, 0.5}
	type pair struct {
		since bool
		began float64 // difference of counters then
		from  float64 // difference of services then
		runs  [2]int  // most at once since
		yield int     // requests that went before those of either since
	}
	rapid.Check(t, func(t *rapid.T) {
		q := New[string](Settings{Limit: 1000, Tenants: 10})
		exact := rapid.Bool().Draw(t, "exact")
		bias := rapid.SliceOfN(rapid.SampledFrom([]float64{0, wrong, -wrong}), len(weights), len(weights)).Draw(t, "bias") // of the predictions for each tenant
		service := make([]float64, len(weights))                                                                           // of requests that have begun, their true costs
		runs := make([]int, len(weights))
		var all []running
		pairs := map[[2]int]*pair{}
		tenant := func(i int) Tenant { return Tenant{Name: fmt.Sprint(i), Weight: weights[i]} }
		flowOf := func(i int) *flow[string] { return q.flows[Standard.Place()][fmt.Sprint(i)] }
		waits := func(i int) bool { f := flowOf(i); return f != nil && len(f.items) > 0 }
		check := func() {
			eachPair(len(weights), pairs, waits, func(f, g int, p *pair) {
				now := service[f]/weights[f] - service[g]/weights[g]
				if !p.since {
					*p = pair{since: true, began: math.Abs(flowOf(f).counter() - flowOf(g).counter()), from: now}
				}
				p.runs = [2]int{max(p.runs[0], runs[f]), max(p.runs[1], runs[g])}
				miss := 0.0
				if !exact {
					miss = wrong
				}
				bound := p.began + float64(1+p.yield)*most/min(weights[f], weights[g]) + 2*miss*(float64(p.runs[0])/weights[f]+float64(p.runs[1])/weights[g])
				if p.yield > 2*MostYields {
					t.Fatalf("tenants %d and %d: %d requests went before others, at most %d may for each", f, g, p.yield, MostYields)
				}
				if got := math.Abs(now - p.from); got > bound+1e-6 {
					t.Fatalf("tenants %d and %d: services differ by %v, the bound is %v", f, g, got, bound)
				}
			})
		}
		// What a request really costs is drawn when it begins.
		begin := func(it *Item[string]) {
			actual, i := it.Cost, int(it.Tenant.Name[0]-'0')
			if !exact {
				actual = min(max(it.Cost+bias[i], 0), most)
			}
			all = append(all, running{q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}), i, actual})
			service[i] += actual
			runs[i]++
		}
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				i := rapid.IntRange(0, len(weights)-1).Draw(t, "tenant")
				for range rapid.IntRange(1, 5).Draw(t, "requests") {
					q.Push(&Item[string]{Tenant: tenant(i), Cost: rapid.Float64Range(0, most).Draw(t, "cost"), Since: dawn})
					check()
				}
			},
			"serve": func(t *rapid.T) {
				n := rapid.IntRange(1, 6).Draw(t, "requests")
				yields := map[int]bool{}
				q.Walk(func(it *Item[string], must bool) Verdict {
					if n == 0 {
						return Stop
					}
					i := int(it.Tenant.Name[0] - '0')
					if !must && rapid.IntRange(0, 3).Draw(t, "yields") == 0 {
						yields[i] = true
						return Yield
					}
					n--
					begin(it)
					for other := range yields {
						for two, p := range pairs {
							if other != i && slices.Contains(two[:], other) && slices.Contains(two[:], i) {
								p.yield++
							}
						}
					}
					return Taken
				})
			},
			"pass": func(t *rapid.T) { // one that need not wait
				if q.Len() == 0 {
					i := rapid.IntRange(0, len(weights)-1).Draw(t, "tenant")
					begin(&Item[string]{Tenant: tenant(i), Cost: rapid.Float64Range(0, most).Draw(t, "cost")})
				}
			},
			"end": func(t *rapid.T) {
				if len(all) > 0 {
					at := rapid.IntRange(0, len(all)-1).Draw(t, "which")
					all[at].charge.End(all[at].actual)
					runs[all[at].tenant]--
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

// TestWrongPredictionsEvenOut: what a tenant's requests truly cost decides in the end.
func TestWrongPredictionsEvenOut(t *testing.T) {
	const predicted, together = 10, 4
	costs := map[string]float64{"short": 1, "right": 10, "long": 100}
	q := New[string](Settings{Limit: 3000, Tenants: 10})
	for tenant := range costs {
		for range 1000 {
			q.Push(of(tenant, "", predicted))
		}
	}
	type running struct {
		charge *Charge[string]
		cost   float64
	}
	var runs []running
	service := map[string]float64{}
	q.Walk(func(it *Item[string], _ bool) Verdict {
		if service["right"] >= 1000 {
			return Stop
		}
		if len(runs) == together {
			runs[0].charge.End(runs[0].cost)
			runs = runs[1:]
		}
		cost := costs[it.Tenant.Name]
		runs = append(runs, running{q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}), cost})
		service[it.Tenant.Name] += cost
		return Taken
	})
	for tenant, got := range service {
		if miss := math.Abs(got - service["right"]); miss > 100+2*together*90 {
			t.Errorf("tenant %s received %v, another %v", tenant, got, service["right"])
		}
	}
}

// TestEveryItemIsServedOnceOrLeaves compares the queue with a set of the items that are there.
func TestEveryItemIsServedOnceOrLeaves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := New[int](Settings{Limit: 8, Tenants: 3})
		there := map[int]*Item[int]{}
		next := 0
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				next++
				it := &Item[int]{
					Value: next, Tenant: Tenant{Name: rapid.SampledFrom([]string{"", "a", "b", "c", "d", "e"}).Draw(t, "tenant"), Weight: rapid.Float64Range(-1, 3).Draw(t, "weight")},
					Class: Class(rapid.IntRange(-2, 2).Draw(t, "class")), Cost: rapid.Float64().Draw(t, "cost"), Priority: rapid.Uint32Range(0, 2).Draw(t, "priority"), Since: dawn,
				}
				if rapid.Bool().Draw(t, "due") {
					it.Deadline = seconds(rapid.Float64Range(0, 60).Draw(t, "deadline"))
				}
				before := len(there)
				there[next] = it
				if out := q.Push(it); out != nil {
					if before < 8 {
						t.Fatal("one has to leave a queue that is not full")
					}
					delete(there, out.Value)
				}
			},
			"remove": func(t *rapid.T) {
				for value, it := range there {
					if !q.Remove(it) || q.Remove(it) {
						t.Fatal("an item leaves once")
					}
					delete(there, value)
					break
				}
			},
			"walk": func(t *rapid.T) {
				seen, musts := map[int]bool{}, map[int]bool{}
				stopped, offers, most := false, 0, (Window+3)*q.Len()
				passed, left := map[int]bool{}, map[*flow[int]]bool{} // places of classes, tenants
				q.Walk(func(it *Item[int], must bool) Verdict {
					if there[it.Value] != it || stopped || passed[it.Class.Place()] || left[it.flow] || must && musts[it.Value] {
						t.Fatalf("item %d is gone, comes after Stop, PassClass or PassTenant, or must go twice", it.Value)
					}
					seen[it.Value] = true
					if must {
						musts[it.Value] = true
					}
					if offers++; offers > most {
						t.Fatal("a walk without an end")
					}
					v := Verdict(rapid.IntRange(int(Kept), int(Stop)).Draw(t, "verdict"))
					if v == Taken {
						q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}).End(it.Cost)
						delete(there, it.Value)
					}
					stopped = v == Stop
					passed[it.Class.Place()], left[it.flow] = v == PassClass, v == PassTenant
					return v
				})
				q.Each(func(it *Item[int]) {
					if !stopped && !seen[it.Value] && !passed[it.Class.Place()] && !left[it.flow] {
						t.Fatalf("item %d was not offered", it.Value)
					}
				})
			},
			"": func(t *rapid.T) {
				if err := q.Check(); err != nil {
					t.Fatal(err)
				}
				n := 0
				q.Each(func(it *Item[int]) {
					if n++; there[it.Value] != it {
						t.Fatalf("item %d is not there", it.Value)
					}
				})
				if n != len(there) || n != q.Len() {
					t.Fatalf("%d items wait, want %d", n, len(there))
				}
			},
		})
	})
}

// BenchmarkTurn is one item served and one pushed, with a thousand tenants waiting.
func BenchmarkTurn(b *testing.B) {
	q := New[int](Settings{Limit: 2000, Tenants: 2000})
	for i := range 1000 {
		q.Push(&Item[int]{Tenant: Tenant{Name: fmt.Sprint(i)}, Cost: float64(i%7 + 1)})
	}
	b.ReportAllocs()
	for b.Loop() {
		var again *Item[int]
		q.Walk(func(it *Item[int], _ bool) Verdict {
			if again != nil {
				return Stop
			}
			q.Begin(it.Tenant, it.Class, it.Cost, time.Time{}).End(it.Cost)
			again = it
			return Taken
		})
		q.Push(again)
	}
}
