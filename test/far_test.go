package test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit/netspace"
)

// farTime is KVROUTER_FAR, such as 2m (`make test-cells` sets it): how long each of the tests of
// cells far apart takes, about. Without it they are short, and hold only what does not depend on
// the machine's load.
func farTime(t *testing.T) (d time.Duration, long bool) {
	t.Helper()
	text := os.Getenv("KVROUTER_FAR")
	if text == "" {
		return 0, false
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("KVROUTER_FAR: %v: give a time such as 2m", err)
	}
	return d, true
}

// millisecond rounds for a log.
func millisecond(times ...time.Duration) (rounded []time.Duration) {
	for _, d := range times {
		rounded = append(rounded, d.Round(time.Millisecond))
	}
	return rounded
}

// TestCellsFarApartLoseNothing: three cells and three upper routers, 2 to 90 ms apart. A cell and
// an upper router are killed and come back, a cell is cut off and another one from one upper
// router only, under conversations of three regions.
func TestCellsFarApartLoseNothing(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	if !netspace.Enter(t) {
		return
	}
	d, long := farTime(t)
	f := startFar(t, func(upper, cell int) int { // 40, 60 and 90 ms
		if upper == cell {
			return 2
		}
		return [...]int{40, 60, 90}[upper+cell-1]
	}, "--speedup-ratio=4")
	texts := documents(11, 2*farRegions)
	prompts := f.prompts(texts)
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(f.asking.Wait)
	t.Cleanup(stop)
	f.asking.Go(func() { f.arrive(ctx, 30*time.Millisecond, texts) })
	f.goOn(60, "at first")

	for began, round := time.Now(), 0; round == 0 || long && time.Since(began) < d; round++ {
		f.killCell(round % farRegions)
		f.killUpper((round+1)%farRegions, prompts, long)
		f.cutOff((round+2)%farRegions, round%farRegions, long)
	}

	wrong, looks := 0, 0
	for upper := range farRegions {
		w, l := f.falseMatches(upper, prompts)
		wrong, looks = wrong+w, looks+l
	}
	t.Logf("told matches beyond what a cell holds: %d of %d", wrong, looks)
	if wrong > 0 {
		t.Errorf("%d of %d told matches are wrong", wrong, looks)
	}
	stop()
	f.asking.Wait()
	wrong, looks = 0, 0
	for i, p := range f.prompts(documents(13, 60)) {
		for _, blocks := range p.runs(f.uppers[i%farRegions]) {
			if looks++; blocks > 0 {
				wrong++
			}
		}
	}
	t.Logf("%d of %d look-ups for prompts that nobody has sent were false; stated are %.3f %%", wrong, looks, 100*summary.FalsePositive)
	if wrong > 1 {
		t.Errorf("%d of %d matches are wrong", wrong, looks)
	}
	for upper := range farRegions {
		f.exactFor(upper, prompts)
	}
	f.report()
}

// killCell kills a cell, and starts it again.
func (f *far) killCell(cell int) {
	f.Helper()
	all := []int{0, 1, 2}
	f.faults.Add(1)
	f.cells[cell].Kill()
	out := f.reached(cell, false, all...)
	f.faults.Add(1)
	f.goOn(30, "without a cell")
	f.startCell(cell, "--speedup-ratio=4")
	f.cells[cell].WaitReady(farWorkers, 30*time.Second)
	in := f.reached(cell, true, all...)
	f.Logf("cell %d killed: out after %v, in again %v after its workers were up", cell, millisecond(out...), millisecond(in...))
}

// killUpper kills an upper router, and starts it again.
func (f *far) killUpper(upper int, prompts []prompt, long bool) {
	f.Helper()
	f.down[upper].Store(true)
	f.ends[upper].Add(1)
	f.uppers[upper].Kill()
	f.goOn(30, "without an upper router")
	f.openUpper(upper)
	began := time.Now()
	f.uppers[upper].WaitReady(farRegions, 30*time.Second)
	attached := time.Now()
	f.down[upper].Store(false)
	exact := f.exactFor(upper, prompts).Sub(attached)
	f.Logf("upper router %d killed: all cells attached %v after its ports were open; %v later it was found to know all that they hold", upper, millisecond(attached.Sub(began)), millisecond(exact))
	if long && exact > farInterval {
		f.Errorf("exact %v after its streams were complete: more than an interval, %v", exact, farInterval)
	}
}

// cutOff cuts a cell off from all upper routers, and another one from the upper router of the
// first one's region only.
func (f *far) cutOff(cell, other int, long bool) {
	f.Helper()
	lonely := cell
	rest := slices.DeleteFunc([]int{0, 1, 2}, func(upper int) bool { return upper == lonely })
	failed := func(upper int) float64 {
		return f.uppers[upper].Metrics()[fmt.Sprintf(`kvrouter_retries_total{worker_id="%d"}`, cell)]
	}
	var before [farRegions]float64
	for upper := range farRegions {
		before[upper] = failed(upper)
	}
	f.faults.Add(1)
	at := time.Now()
	for upper := range farRegions {
		f.network.Cut(upperNode(upper), cellNode(cell))
	}
	f.network.Cut(upperNode(lonely), cellNode(other))
	out := f.reached(cell, false, 0, 1, 2)
	gone := time.Now()
	f.reached(other, false, lonely)
	f.faults.Add(1)
	f.goOn(30, "without the cell")
	for _, upper := range rest {
		if record, _ := f.uppers[upper].Record(uint64(other)); record.Lifecycle != "schedulable" {
			f.Errorf("upper router %d has lost cell %d, from which only upper router %d was cut", upper, other, lonely)
		}
	}
	whole := time.Now()
	for upper := range farRegions {
		f.network.Mend(upperNode(upper), cellNode(cell))
	}
	f.network.Mend(upperNode(lonely), cellNode(other))
	in := f.reached(cell, true, 0, 1, 2)
	f.reached(other, true, lonely)
	f.Logf("cell %d cut off: out after %v, in again %v after the network was whole", cell, millisecond(out...), millisecond(in...))
	for upper := range farRegions {
		usual := share(f.between(upper, at.Add(-3*time.Second), at), cell)
		sent := f.between(upper, at, at.Add(out[upper]))
		waited := failed(upper) - before[upper]
		// Beside those that came, those are retried that were under way when it was cut off.
		flight := f.underWay(upper, at)
		late := 0
		for _, a := range sent {
			if a.began.Sub(a.sent) > out[upper]/2 {
				late++
			}
		}
		f.Logf("  upper router %d: %.0f requests were retried, of %d under way and %d that came until it was out, of which %d waited for long; its share before was %.2f", upper, waited, flight, len(sent), late, usual)
		if most := float64(flight) + usual*float64(len(sent)); long && waited > most+3*math.Sqrt(most+1) {
			f.Errorf("upper router %d: %.0f requests were sent to a cell that was cut off, more than its share of about %.0f", upper, waited, most)
		}
		if limit := 3 * time.Second; long && out[upper] > limit {
			f.Errorf("upper router %d sent requests to a cell that was cut off for %v", upper, out[upper])
		}
		if n := share(f.between(upper, gone, whole), cell); n > 0 {
			f.Errorf("upper router %d: a share of %.3f of the answers came from a cell that was cut off", upper, n)
		}
	}
}

// report prints what came of the requests, and fails on what must not be.
func (f *far) report() {
	f.Helper()
	wrong, calm, exact, cached, prompt := 0, 0, 0, 0, 0
	for _, a := range f.answers {
		cached, prompt = cached+a.cached, prompt+a.prompt
		if !a.calm {
			continue
		}
		calm++
		if a.found > a.cached {
			wrong++
		}
		if a.found == a.cached {
			exact++
		}
	}
	for region := range farRegions {
		var own []farAnswer
		for _, a := range f.answers {
			if a.region == region && a.calm {
				own = append(own, a)
			}
		}
		f.Logf("region %d: %d requests outside of faults, shares of the cells %.2f %.2f %.2f", region, len(own), share(own, 0), share(own, 1), share(own, 2))
	}
	f.Logf("%d answers, hit rate %.3f; %d lost before the first byte, %d hung, %d cut with their upper router after it, %d went to another upper router",
		len(f.answers), float64(cached)/float64(max(1, prompt)), len(f.lost), len(f.hung), f.cut-f.broken, f.retried)
	f.Logf("of %d answers outside of faults the engine had what the cell predicted in %d, less in %d", calm, exact, wrong)
	if len(f.lost)+len(f.hung) > 0 {
		f.Errorf("lost %d: %.2000q; hung %d: %.2000q", len(f.lost), f.lost, len(f.hung), f.hung)
	}
	if wrong > 0 {
		f.Errorf("%d of %d predictions are wrong", wrong, calm)
	}
}

// herdFar is how evenly requests were spread, and how long they waited.
type herdFar struct {
	spread float64 // mean over time of the most requests in flight of a cell / mean of the cells
	first  time.Duration
	rate   float64 // requests per second
	hits   float64 // share of the prompts' tokens that were cached
}

// TestUpperRoutersFarApartDoNotHerd: three upper routers with a third of the traffic each, 10 ms
// from each cell, spread it over the cells as one upper router does that has all of it.
func TestUpperRoutersFarApartDoNotHerd(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	if !netspace.Enter(t) {
		return
	}
	d, long := farTime(t)
	rounds, speed := 5, "--speedup-ratio=0.1"
	if d /= time.Duration(2 * rounds); !long {
		rounds, speed, d = 1, "--speedup-ratio=0.3", 2*time.Second
	}
	f := startFar(t, func(int, int) int { return 10 }, speed)
	f.herd(0, farRegions, d/4) // what is learned at first
	var one, three []herdFar
	for round := range rounds {
		for i := range 2 {
			uppers := 1
			if (i+round)%2 == 1 {
				uppers = farRegions
			}
			run := f.herd(uint64(1+round), uppers, d)
			load, _ := loadAverage()
			t.Logf("%d upper routers: fullest cell / mean %.3f, first token %v, hit rate %.3f, %.1f requests/s, load average %.1f", uppers, run.spread, run.first.Round(time.Millisecond), run.hits, run.rate, load)
			if uppers == 1 {
				one = append(one, run)
			} else {
				three = append(three, run)
			}
		}
	}
	median := func(runs []herdFar, of func(herdFar) float64) float64 {
		values := make([]float64, len(runs))
		for i, run := range runs {
			values[i] = of(run)
		}
		slices.Sort(values)
		return values[len(values)/2]
	}
	ratio := func(of func(herdFar) float64) float64 { return median(three, of) / median(one, of) }
	spread, first := ratio(func(r herdFar) float64 { return r.spread }), ratio(func(r herdFar) float64 { return float64(r.first) })
	t.Logf("three upper routers against one: fullest cell %.3f times, first token %.3f times", spread, first)
	switch {
	case long && (spread > 1.05 || first > 1.2): // each knows its own requests at once, those of the others by reports
		t.Error("three upper routers herd: the fullest cell is 5 %, or the first token 20 % worse than with one")
	case spread > 2: // all at one cell were about 3
		t.Error("three upper routers herd at one cell")
	}
	if len(f.lost)+len(f.hung) > 0 {
		t.Errorf("lost %.2000q, hung %.2000q", f.lost, f.hung)
	}
}

// herd sends requests through so many upper routers for d: each client asks again as soon as it
// has its answer. The seed says which documents they are about.
func (f *far) herd(seed uint64, uppers int, d time.Duration) (run herdFar) {
	f.Helper()
	const clients, topics = 48, 12
	texts := documents(100+2*seed+uint64(uppers), topics)
	known := f.count()
	ctx, stop := context.WithTimeout(f.Context(), d)
	defer stop()
	began := time.Now()
	var asking sync.WaitGroup
	for client := range clients {
		asking.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(client)))
			for ctx.Err() == nil {
				f.ask(client%uppers, client%uppers, Say(texts[random.IntN(topics)]+" "+Words(random, 20)), 16+random.IntN(17))
			}
		})
	}
	asking.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	answers := f.answers[known:]
	if len(answers) == 0 {
		f.Fatal("no request was answered")
	}
	from, to := began.Add(d/4), began.Add(d) // without the rush at first
	n, cached, prompt := 0, 0, 0
	for _, a := range answers {
		if a.sent.After(from) || len(answers) < 2*clients {
			n, cached, prompt = n+1, cached+a.cached, prompt+a.prompt
			run.first += a.began.Sub(a.sent)
		}
	}
	run.first /= time.Duration(max(1, n))
	run.rate, run.hits = float64(n)/to.Sub(from).Seconds(), float64(cached)/float64(max(1, prompt))
	run.spread = fullest(answers, from, to)
	return run
}

// fullest is the mean, over a time, of the most requests in flight of a cell over the mean of the
// cells.
func fullest(answers []farAnswer, from, to time.Time) float64 {
	type change struct {
		at   time.Time
		cell int
		by   float64
	}
	var changes []change
	for _, a := range answers {
		changes = append(changes, change{a.sent, a.cell, 1}, change{a.ended, a.cell, -1})
	}
	slices.SortFunc(changes, func(a, b change) int { return a.at.Compare(b.at) })
	var flight [farRegions]float64
	sum, total, last := 0.0, 0.0, from
	for _, c := range changes {
		at := c.at
		if at.After(to) {
			at = to
		}
		all := flight[0] + flight[1] + flight[2]
		if span := at.Sub(last).Seconds(); span > 0 && all > 0 {
			sum += span * slices.Max(flight[:]) * farRegions / all
			total += span
			last = at
		}
		flight[c.cell] += c.by
	}
	if total == 0 {
		return 1
	}
	return sum / total
}

// TestTheFullestCellIsAMeanOverTime holds fullest on a picture that can be read.
func TestTheFullestCellIsAMeanOverTime(t *testing.T) {
	t.Parallel()
	zero := time.Unix(1000, 0)
	at := func(s int) time.Time { return zero.Add(time.Duration(s) * time.Second) }
	answers := []farAnswer{
		{cell: 0, sent: at(0), ended: at(4)}, {cell: 1, sent: at(0), ended: at(4)}, {cell: 2, sent: at(0), ended: at(2)}, // even for 2 s
		{cell: 0, sent: at(2), ended: at(4)}, // then 2, 1, 0
	}
	if got := fullest(answers, zero, at(4)); got != 1.5 {
		t.Errorf("%v, not 1.5", got)
	}
}
