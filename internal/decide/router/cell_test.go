package router

import (
	"testing"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// newCells returns a router over so many cells, which tell nothing so far.
func newCells(t *testing.T, cells int) *Router {
	t.Helper()
	r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "work"), BlockSize: testkit.BlockSize, Seed: 1})
	for i := range cells {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: "http://cell", Models: []string{"m"}, Disagg: kv.Disagg{Kind: kv.KindRouter}})
	}
	return r
}

// viewOf is a view of these prefixes.
func viewOf(t *testing.T, sequence ...uint64) *summary.View {
	t.Helper()
	book, view := summary.NewBook(), &summary.View{}
	for _, hash := range sequence {
		book.Hold(hash)
	}
	book.Publish(summary.MaxMessage)
	messages, _ := book.Snapshot()
	for _, m := range messages {
		if err := view.Apply(m); err != nil {
			t.Fatal(err)
		}
	}
	return view
}

func report(workers int, wait time.Duration) policy.CellReport {
	r := policy.CellReport{Workers: workers, Load: policy.Published{At: time.Now()}}
	for i := range r.Waits {
		r.Waits[i] = wait
	}
	return r
}

func TestRequestsGoToTheCellThatHoldsTheirPrefix(t *testing.T) {
	r := newCells(t, 3)
	tokens := make([]uint32, 20*testkit.BlockSize+1)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	request := Request{Tokens: tokens, Model: "m"}
	sequence := kv.SequenceHashes(nil, request.Hashes(nil, testkit.BlockSize))
	for i := range uint64(3) {
		view := viewOf(t)
		if i == 1 {
			view = viewOf(t, sequence[:15]...)
		}
		r.ShowCell(kv.WorkerKey{Worker: i}, report(4, 0), view)
	}
	d, err := r.Route(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	if d.Target.Key.Worker != 1 || d.Overlap != 15 {
		t.Errorf("cell %d with %d blocks", d.Target.Key.Worker, d.Overlap)
	}
	if overlaps, _, blocks := r.Overlaps(request); blocks != 20 || overlaps[1].Blocks != 15 || overlaps[0].Blocks != 0 {
		t.Errorf("overlaps %v", overlaps)
	}
	for range 100 {
		d.Booking.Found(0) // its worker had nothing
	}
	if finds := r.Load(d.Target.Key).Cell.Finds(); finds != 0 {
		t.Errorf("finds %v", finds)
	}
	d.Booking.End()
	d.Booking.Found(15 * testkit.BlockSize) // too late
	if finds := r.Load(d.Target.Key).Cell.Finds(); finds != 0 {
		t.Errorf("finds %v after the end", finds)
	}
	r.Down(kv.WorkerKey{Worker: 1})
	if overlaps, _, _ := r.Overlaps(request); len(overlaps) != 2 || overlaps[0].Blocks+overlaps[1].Blocks != 0 {
		t.Errorf("a cell that is down holds %v", overlaps)
	}
	r.ShowCell(kv.WorkerKey{Worker: 1}, report(4, 0), viewOf(t, sequence...)) // is not up
	if r.Load(kv.WorkerKey{Worker: 1}).Cell != nil {
		t.Error("a report of a cell that is not up counts")
	}
	for _, w := range []uint64{0, 2} {
		r.Down(kv.WorkerKey{Worker: w})
	}
	if r.fleet.cells.Load() != nil {
		t.Error("summaries of cells that are down are kept")
	}
}

func TestARouterSumsUpItsWorkers(t *testing.T) {
	r := newCells(t, 1)
	r.Up(kv.Target{Key: kv.WorkerKey{Worker: 7}, URL: "http://worker", Models: []string{"m"}, TotalBlocks: 100})
	cell := report(4, 30*time.Millisecond)
	cell.Load.Running, cell.Load.Waiting, cell.Load.KVUsage, cell.Context = 9, 3, 0.5, 700
	r.ShowCell(kv.WorkerKey{}, cell, viewOf(t))
	if s := r.Sum(); s != (Sum{Workers: 5, Running: 9, Waiting: 3, Usage: 0.4, Blocks: 100, Context: 700}) {
		t.Errorf("%+v", s)
	}
	waits, up := r.Admission.Waits()
	if !up || waits[fair.Standard.Place()] != 0 {
		t.Errorf("waits %v beside an idle worker", waits)
	}
	r.Down(kv.WorkerKey{Worker: 7})
	if waits, _ = r.Admission.Waits(); waits[0] < 20*time.Millisecond || waits[0] > 30*time.Millisecond {
		t.Errorf("waits %v of the cell alone", waits)
	}
	r.Down(kv.WorkerKey{})
	if _, up = r.Admission.Waits(); up || r.Sum() != (Sum{}) {
		t.Error("no worker is up")
	}
}

func TestPairsLeaveCellsAlone(t *testing.T) {
	cell := kv.Disagg{Kind: kv.KindRouter}
	if !cell.Takes(kv.LegWhole) || cell.Takes(kv.LegPrefill) || cell.Takes(kv.LegDecode) {
		t.Error("a cell takes whole requests")
	}
	if !kv.KindsOf(kv.KindNone).Allow(kv.KindRouter) || kv.KindsOf(kv.KindNIXL).Allow(kv.KindRouter) {
		t.Error("a cell is like a worker without a KV connector")
	}
}

// TestACellThatDoesNotAnswerLosesItsTraffic: although it continues to report that nobody waits.
func TestACellThatDoesNotAnswerLosesItsTraffic(t *testing.T) {
	clock := new(testkit.StandingClock)
	r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "work"), BlockSize: testkit.BlockSize, Seed: 1, Now: clock.Now})
	show := func() {
		for i := range uint64(2) {
			told := report(64, 0)
			told.Network, told.Load.At = time.Duration(1+30*i)*time.Millisecond, clock.Now()
			r.ShowCell(kv.WorkerKey{Worker: i}, told, viewOf(t))
		}
	}
	for i := range uint64(2) {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: i}, URL: "http://cell", Models: []string{"m"}, Disagg: kv.Disagg{Kind: kv.KindRouter}})
	}
	show()
	var bookings []*Booking
	send := func(n int) (sent [2]int) {
		for range n {
			d, err := r.Route(t.Context(), Request{NumTokens: 100, Model: "m"})
			if err != nil {
				t.Fatal(err)
			}
			sent[d.Target.Key.Worker]++
			bookings = append(bookings, d.Booking)
		}
		return sent
	}
	if sent := send(5); sent[0] != 5 {
		t.Errorf("sent %v: the nearer cell first", sent)
	}
	clock.Advance(2 * time.Second)
	show()
	if sent := send(20); sent[1] != 20 {
		t.Errorf("sent %v: the nearer cell has not answered for 2 s", sent)
	}
	for _, b := range bookings {
		b.End()
	}
}
