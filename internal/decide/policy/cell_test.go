package policy

import (
	"math/rand/v2"
	"testing"
	"time"

	"kvrouter/internal/base/fair"
)

// cellLoad is the load of a cell of so many workers that reports so long a wait, that far away.
func cellLoad(workers int, wait, network time.Duration, l Load) Load {
	l.Cell = &Cell{CellReport: CellReport{Workers: workers, Network: network, Load: Published{At: testNow}}}
	for i := range l.Cell.Waits {
		l.Cell.Waits[i] = wait
	}
	return l
}

func TestWorkWeighsCells(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64}
	ms := time.Millisecond
	half := cellLoad(4, 0, 0, Load{})
	for range cellFinds {
		half.Cell.Found(100, 3200)
	}
	tardy := cellLoad(4, 0, 0, Load{})
	for range cellLate {
		tardy.Cell.Late(testNow, 500*ms)
	}
	crowded := cellLoad(4, 0, 0, Load{})
	crowded.Cell.Context = 4 * 100_000
	answering := cellLoad(4, 0, 0, waiting(2*time.Second, 640, 640))
	answering.FirstToken = testNow.Add(-ms)
	tests := []struct {
		name string
		pool *pool
		want int
	}{
		{"the nearer of equal cells wins", new(pool).add(0, cellLoad(4, 0, 30*ms, Load{})).add(0, cellLoad(4, 0, 10*ms, Load{})), 1},
		{"a prefix outweighs a short way", new(pool).add(90, cellLoad(4, 0, 30*ms, Load{})).add(0, cellLoad(4, 0, 10*ms, Load{})), 0},
		{"a long way outweighs a prefix", new(pool).add(50, cellLoad(4, 0, 300*ms, Load{})).add(0, cellLoad(4, 0, 10*ms, Load{})), 1},
		{"a told wait outweighs a prefix", new(pool).add(50, cellLoad(4, 500*ms, 0, Load{})).add(0, cellLoad(4, 0, 0, Load{})), 1},
		{"the shorter told wait wins", new(pool).add(0, cellLoad(4, 50*ms, 0, Load{})).add(0, cellLoad(4, 20*ms, 0, Load{})), 1},
		{"what was sent since then counts", new(pool).add(0, cellLoad(2, 0, 0, waiting(-ms, 6400, 6400))).add(0, cellLoad(2, 0, 0, Load{})), 1},
		{"what was sent since then is shared out", new(pool).add(0, cellLoad(2, 0, 0, waiting(-ms, 6400))).add(0, cellLoad(16, 0, 0, waiting(-ms, 6400))), 1},
		{"what was sent before is in the told wait", new(pool).add(0, cellLoad(2, 0, ms, waiting(2*ms, 6400, 6400))).add(0, cellLoad(2, 0, 100*ms, Load{})), 0},
		{"what was under way then counts", new(pool).add(0, cellLoad(2, 0, 10*ms, waiting(2*ms, 6400, 6400))).add(0, cellLoad(2, 0, 20*ms, Load{})), 1},
		{"a cell whose first tokens come late loses", new(pool).add(50, tardy).add(0, cellLoad(4, 0, 0, Load{})), 1},
		{"a cell whose first tokens are due loses", new(pool).add(50, cellLoad(4, 0, 0, waiting(2*time.Second, 640, 640))).add(0, cellLoad(4, 0, 0, Load{})), 1},
		{"what others decode in a cell counts", new(pool).add(0, crowded).add(0, cellLoad(4, 0, 0, Load{})), 1},
		{"a cell that gives first tokens owes none", new(pool).add(50, answering).add(0, cellLoad(4, 0, 0, Load{})), 0},
		{"an idle worker beside a cell far away wins", new(pool).add(0, cellLoad(4, 0, 30*ms, Load{})).add(0, Load{}), 1},
		{"a busy worker loses against a cell", new(pool).add(0, cellLoad(4, 0, 10*ms, Load{})).add(0, waiting(0, 9000, 9000)), 0},
		{"an overlap that is seldom found weighs little", new(pool).add(50, half).add(30, cellLoad(4, 0, 0, Load{})), 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if counts := draws(NewWork(), query, test.pool.candidates); counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
		})
	}
}

// TestCountingPoliciesShareACellsLoadOut: a cell of many workers has more of all than one worker.
func TestCountingPoliciesShareACellsLoadOut(t *testing.T) {
	of := func(n int) Load {
		return Load{Published: Published{Waiting: n, At: testNow}, Fresh: true, InFlight: n, PrefillTokens: 1000 * n, ActiveBlocks: 100 * n}
	}
	for _, name := range []string{"kv", "standalone", "least-loaded", "power-of-two", "cache-threshold", "variance"} {
		p, err := New(name, Settings{PrefillLoadScale: 1, OverlapScoreCredit: 1, DecodeActiveRequestWeight: 1})
		if err != nil {
			t.Fatal(err)
		}
		for width, want := range map[int]int{2: 1, 16: 0} {
			candidates := new(pool).add(0, cellLoad(width, 0, 0, of(8))).add(0, of(2)).candidates
			if counts := draws(p, Query{Now: testNow, Tokens: 640, BlockSize: 64}, candidates); counts[want] != 1000 {
				t.Errorf("%s: a cell of %d workers and a worker are chosen %v times, want always candidate %d", name, width, counts, want)
			}
		}
	}
}

func TestACellsTermsAddUp(t *testing.T) {
	e := &Explanation{}
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Explain: e}
	candidates := new(pool).add(10, cellLoad(4, 5*time.Millisecond, 20*time.Millisecond, waiting(0, 100))).add(0, Load{}).candidates
	NewWork().Choose(query, candidates, rand.New(rand.NewPCG(1, 1)))
	sum, network := 0.0, 0.0
	for _, term := range e.Scores[0].Terms {
		if sum += term.Value; term.Name == "network" {
			network = term.Value
		}
	}
	if diff := sum - e.Scores[0].Total; diff > 1e-6 || diff < -1e-6 || network >= -20 {
		t.Errorf("terms add up to %v of %v, network %v", sum, e.Scores[0].Total, network)
	}
	for _, term := range e.Scores[1].Terms {
		if term.Name == "network" {
			t.Error("a worker has a network term")
		}
	}
}

func TestAWaitIsThatOfTheClass(t *testing.T) {
	load := cellLoad(1, 0, 10*time.Millisecond, Load{})
	load.Cell.Waits = [3]time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second}
	p, c := NewWork(), &Candidate{Load: &load}
	first := func(class fair.Class) time.Duration {
		return p.FirstToken(&Query{Now: testNow, Tokens: 64, BlockSize: 64, Class: class}, c)
	}
	if a, b := first(fair.Standard)-first(fair.Interactive), first(fair.Batch)-first(fair.Standard); a != 99*time.Millisecond || b != 900*time.Millisecond {
		t.Errorf("waits differ by %v and %v", a, b)
	}
	if wait := p.Wait(testNow, &load); wait != 100*time.Millisecond {
		t.Errorf("wait %v", wait)
	}
	if wait := p.Wait(testNow.Add(time.Second), &load); wait != 0 {
		t.Errorf("wait %v a second later", wait)
	}
}

func TestWhatIsFoundIsLearned(t *testing.T) {
	var c Cell
	if c.Finds() != 1 {
		t.Error("nothing is known: all is expected")
	}
	c.Found(10, 0) // nothing was reported
	if c.Finds() != 1 {
		t.Error("a request without overlap says nothing")
	}
	for range 200 {
		c.Found(50, 100)
	}
	if f := c.Finds(); f != 0.5 {
		t.Errorf("%v", f)
	}
	for range 400 {
		c.Found(500, 100)
	}
	if f := c.Finds(); f < 0.9 || f > 1 {
		t.Errorf("%v: more than was told is all of it", f)
	}
	var none *Cell
	none.Found(1, 1) // a worker
}

// TestATooShortWaitIsBelievedForSomeRequests: a cell reports no wait, and answers after a second.
func TestATooShortWaitIsBelievedForSomeRequests(t *testing.T) {
	load := cellLoad(4, 0, 0, Load{})
	p, c, q := NewWork(), &Candidate{Load: &load}, &Query{Now: testNow, Tokens: 640, BlockSize: 64}
	for range 20 {
		load.Cell.Late(testNow, time.Second-p.FirstToken(q, c)+load.Lateness(testNow))
	}
	if first := p.FirstToken(q, c); first < 900*time.Millisecond || first > 1100*time.Millisecond {
		t.Errorf("predicted %v", first)
	}
	for range 100 {
		load.Cell.Late(testNow, 20*time.Millisecond-p.FirstToken(q, c)+load.Lateness(testNow))
	}
	if late := load.Cell.Lateness(); late > 20*time.Millisecond {
		t.Errorf("still late by %v", late)
	}
	load.Cell.Late(testNow, 24*time.Hour)
	if late := load.Cell.Lateness(); late > mostLate*time.Millisecond {
		t.Errorf("late by %v", late)
	}
	var none *Cell
	none.Late(testNow, time.Second) // a worker
}

// TestACellThatWasLateIsTriedAgain: it would be without requests for good.
func TestACellThatWasLateIsTriedAgain(t *testing.T) {
	load, busy := cellLoad(4, 0, 0, Load{}), cellLoad(4, 0, 0, waiting(0, 64))
	busy.Cell = load.Cell
	for range cellLate {
		load.Cell.Late(testNow, time.Second)
	}
	expect := func(what string, l *Load, after, want time.Duration) {
		t.Helper()
		if got := l.Lateness(testNow.Add(after)).Round(time.Millisecond); got != want {
			t.Errorf("%s, after %v: late by %v, not %v", what, after, got, want)
		}
	}
	expect("at once", &load, 999*time.Millisecond, time.Second)
	expect("then", &load, time.Second, 0)
	expect("while a trial is under way", &busy, time.Second, time.Second)
	load.Cell.Late(testNow.Add(2*time.Second), time.Second)
	expect("a trial was late", &load, 3999*time.Millisecond, time.Second)
	expect("twice the time later", &load, 4*time.Second, 0)
	load.Cell.Late(testNow.Add(5*time.Second), 0)
	expect("a trial was not late", &busy, 5*time.Second, 0)
	var worker Load
	expect("a worker", &worker, 0, 0)
}

// TestChanceIsNotLate: first tokens come as often early as late, by as much.
func TestChanceIsNotLate(t *testing.T) {
	load := cellLoad(4, 0, 0, Load{})
	p := NewWork()
	random := rand.New(rand.NewPCG(1, 2))
	sum, most := time.Duration(0), time.Duration(0)
	for range 1000 {
		load.Cell.Late(testNow, time.Duration(random.NormFloat64()*100)*time.Millisecond)
		sum, most = sum+load.Cell.Lateness(), max(most, load.Cell.Lateness())
	}
	if mean := sum / 1000; mean > 3*time.Millisecond || most > 60*time.Millisecond {
		t.Errorf("late by %v, at most by %v", mean, most)
	}
	due := cellLoad(4, 0, 0, waiting(150*time.Millisecond, 64))
	due.Cell.late, due.Cell.lateSquares = load.Cell.late, load.Cell.lateSquares
	if wait := p.cellWait(testNow, &due, 0); wait > 10 {
		t.Errorf("waits %v ms because one prompt is due", wait)
	}
}

// TestACopyInACellIsThatOfOneWorker: a cell of many workers, of which one has a new copy.
func TestACopyInACellIsThatOfOneWorker(t *testing.T) {
	copied := func(loads ...Load) float64 {
		p, pool := NewWork(), new(pool)
		for _, l := range loads {
			pool.add(0, l)
		}
		query := Query{Now: testNow, Tokens: 640, BlockSize: 64, Sequence: []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}
		random := rand.New(rand.NewPCG(1, 2))
		for range 8 {
			p.Choose(query, pool.candidates, random)
		}
		return p.reuse.others(0)
	}
	cells, workers := copied(cellLoad(4, 0, 0, Load{}), cellLoad(4, 0, 0, Load{})), copied(make([]Load, 8)...)
	if cells != workers {
		t.Errorf("others use %v blocks of a copy in two cells of 4 workers, %v of one on 8 workers", cells, workers)
	}
}

func TestOutcomesOfCellsAreThoseOfOneWorker(t *testing.T) {
	o := Outcome{Prompt: 100, Uncached: 40, FirstToken: 50 * time.Millisecond, Before: Meanwhile{Prompts: 5, Passes: 5, Tokens: 440, Context: 800}, During: Meanwhile{Prompts: 8, Passes: 8, Tokens: 800, Context: 500}}
	if got := o.Narrowed(nil); got != o {
		t.Errorf("a worker's: %+v", got)
	}
	got := o.Narrowed(&Cell{CellReport: CellReport{Workers: 4, Network: 10 * time.Millisecond}})
	want := o
	want.FirstToken = 40 * time.Millisecond
	want.Before, want.During = Meanwhile{Prompts: 2, Passes: 2, Tokens: 140, Context: 200}, Meanwhile{Prompts: 2, Passes: 2, Tokens: 200, Context: 200}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
