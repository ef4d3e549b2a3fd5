package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// Simulation is one run: a trace, the workers, and how its requests come.
type Simulation struct {
	Requests    []TraceRequest
	Policy      string
	Knobs       PolicyKnobs
	Workers     int
	Engine      SimConfig
	Concurrency int           // requests in flight, the next one sent when one ends; 0: by their arrival times
	Speedup     float64       // arrival times are divided by it
	EventLag    time.Duration // what the index sees is so much older
	Seed        uint64
	Progress    func(done int) // called now and then; may be nil
}

// simulator replays a trace in virtual time. It is one goroutine, and two runs of
// one Simulation are equal.
type simulator struct {
	Simulation
	now     time.Duration // since the run began
	router  *Router
	index   *Radix
	workers []simWorker
	passes  passHeap    // running passes, by their end
	idle    []int       // workers that must look for work once all that happens now has
	lagging []lateEvent // cache events the index has not seen, oldest first
	next    int         // first request not yet sent
	done    int
	ledger  []*simFlight
	err     error
}

// simWorker is one simulated worker.
type simWorker struct {
	engine *SimEngine
	queued bool // is in simulator.idle
	inPass bool
	busy   time.Duration // sum of its passes
	sent   int
}

// simFlight is one request on its way.
type simFlight struct {
	SimRequest
	worker  int
	booking *Booking
	sent    time.Duration
	first   time.Duration // end of the pass that emitted the first token
	end     time.Duration
	overlap int // predicted cached tokens
}

// lateEvent is a change of a worker's cache that the index sees at a later time.
type lateEvent struct {
	due    time.Duration
	worker int
	event  SimEvent
}

// simEpoch is the router's clock at the start of a run.
var simEpoch = time.Unix(1_000_000_000, 0)

// Simulate runs the trace once for every policy that config names, and writes
// the results to out; if progress is a terminal, a bar goes there meanwhile.
func Simulate(config Config, out, progress *os.File) error {
	settings := config.Simulate
	requests, err := ReadTrace(settings.Trace)
	if err != nil {
		return err
	}
	var reports []*SimReport
	for policy := range strings.SplitSeq(config.Policy, ",") {
		report, err := Simulation{
			Requests: requests, Policy: policy, Knobs: config.PolicyKnobs, Workers: settings.Workers, Engine: config.SimConfig(config.BlockSize),
			Concurrency: settings.Concurrency, Speedup: settings.Speedup,
			EventLag: time.Duration(settings.EventLag * float64(time.Millisecond)),
			Seed:     config.Seed, Progress: progressBar(progress, policy, len(requests)),
		}.Run()
		if err != nil {
			return fmt.Errorf("simulation of policy %s: %w", policy, err)
		}
		reports = append(reports, report)
	}
	if settings.Plot != "" {
		if err := os.WriteFile(settings.Plot, plotReports(reports), 0o644); err != nil {
			return fmt.Errorf("--plot: %w", err)
		}
	}
	if settings.JSON {
		return writeReportsJSON(out, reports)
	}
	return writeReports(out, settings.Trace, reports)
}

// progressBar returns a function that shows how many of total requests are done
// on a terminal, or nil if to is none.
func progressBar(to *os.File, name string, total int) func(done int) {
	if info, err := to.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return nil
	}
	const width = 40
	last := -1
	return func(done int) {
		percent := 100 * done / total
		if percent == last {
			return
		}
		last = percent
		filled := width * done / total
		fmt.Fprintf(to, "\r%-20s [%s%s] %3d %%", name, strings.Repeat("#", filled), strings.Repeat(".", width-filled), percent)
		if done == total {
			fmt.Fprint(to, "\r\x1b[K")
		}
	}
}

// Run replays the trace to its end.
func (s Simulation) Run() (*SimReport, error) {
	switch {
	case s.Workers < 1:
		return nil, errors.New("a simulation needs at least one worker")
	case s.Concurrency < 0 || s.Speedup < 0 || s.Concurrency == 0 && s.Speedup == 0:
		return nil, errors.New("a simulation needs a concurrency or a speedup of more than 0")
	}
	policy, err := NewPolicyWith(s.Policy, s.Knobs)
	if err != nil {
		return nil, err
	}
	run := newSimulator(s, policy)
	if err := run.loop(); err != nil {
		return nil, err
	}
	return run.report(), nil
}

// newSimulator builds the house of a run around idle workers.
func newSimulator(s Simulation, policy Policy) *simulator {
	index := NewRadix()
	run := &simulator{
		Simulation: s,
		index:      index,
		router:     NewRouter(index, policy, s.Engine.BlockSize, s.Seed),
		workers:    make([]simWorker, s.Workers),
		ledger:     make([]*simFlight, 0, len(s.Requests)),
	}
	run.router.now = func() time.Time { return simEpoch.Add(run.now) }
	for i := range run.workers {
		run.workers[i].engine = NewSimEngine(s.Engine, func(event SimEvent) { run.cacheChanged(i, event) })
		run.router.Up(Target{Key: WorkerKey{Worker: uint64(i)}})
	}
	return run
}

// loop lets everything happen in the order of time. What happens at one time
// happens before any pass starts at it.
func (s *simulator) loop() error {
	for s.done < len(s.Requests) {
		s.sendDue()
		for _, w := range s.idle {
			s.workers[w].queued = false
			s.beginPass(w)
		}
		s.idle = s.idle[:0]
		if s.err != nil {
			return s.err
		}
		if arrival, waits := s.nextArrival(); waits && (len(s.passes) == 0 || arrival < s.passes[0].end) {
			s.now = arrival
			continue
		}
		if len(s.passes) == 0 {
			return fmt.Errorf("simulation stands still after %d of %d requests", s.done, len(s.Requests))
		}
		s.now = s.passes[0].end
		for len(s.passes) > 0 && s.passes[0].end == s.now {
			s.endPass(s.passes.pop().worker)
		}
	}
	return nil
}

// nextArrival is when the next request comes by its own time.
func (s *simulator) nextArrival() (at time.Duration, waits bool) {
	if s.Concurrency > 0 || s.next == len(s.Requests) {
		return 0, false
	}
	return time.Duration(float64(s.Requests[s.next].Arrival-s.Requests[0].Arrival) / s.Speedup), true
}

// sendDue sends every request whose time has come.
func (s *simulator) sendDue() {
	for s.next < len(s.Requests) && s.err == nil {
		if arrival, byTime := s.nextArrival(); byTime && arrival > s.now || !byTime && s.next-s.done >= s.Concurrency {
			return
		}
		s.send(s.Requests[s.next])
		s.next++
	}
}

// send routes one request and queues it on its worker.
func (s *simulator) send(request TraceRequest) {
	s.catchUp()
	local, blocks := request.Blocks(s.Engine.BlockSize)
	decision, err := s.router.Route(Request{Local: local, NumTokens: request.Prompt})
	if err != nil {
		s.err = err
		return
	}
	w := int(decision.Target.Key.Worker)
	flight := &simFlight{
		SimRequest: SimRequest{Blocks: blocks, Prompt: request.Prompt, Output: request.Output},
		worker:     w,
		booking:    decision.Booking,
		sent:       s.now,
		overlap:    decision.OverlapTokens,
	}
	flight.Tag = flight
	s.ledger = append(s.ledger, flight)
	s.workers[w].sent++
	if err := s.workers[w].engine.Submit(&flight.SimRequest); err != nil {
		s.err = fmt.Errorf("request %d of the trace: %w", s.next, err)
		return
	}
	s.wake(w)
}

// wake has worker w look for work before time goes on.
func (s *simulator) wake(w int) {
	if worker := &s.workers[w]; !worker.queued && !worker.inPass {
		worker.queued = true
		s.idle = append(s.idle, w)
	}
}

func (s *simulator) beginPass(w int) {
	worker := &s.workers[w]
	d, busy := worker.engine.Begin()
	if !busy {
		return
	}
	worker.inPass = true
	worker.busy += d
	s.passes.push(pass{end: s.now + d, worker: w})
}

func (s *simulator) endPass(w int) {
	worker := &s.workers[w]
	worker.inPass = false
	for _, r := range worker.engine.End() {
		if r.Generated > 1 && r.Generated < r.Output {
			continue
		}
		flight := r.Tag.(*simFlight)
		if r.Generated == 1 {
			flight.first = s.now
			flight.booking.FirstToken()
		}
		if r.Generated == r.Output {
			flight.end = s.now
			flight.booking.End()
			flight.booking, flight.Blocks = nil, nil
			s.done++
			if s.Progress != nil && (s.done%64 == 0 || s.done == len(s.Requests)) {
				s.Progress(s.done)
			}
		}
	}
	running, waiting, usage := worker.engine.Load()
	s.router.Publish(WorkerKey{Worker: uint64(w)}, Published{Running: running, Waiting: waiting, KVUsage: usage, At: simEpoch.Add(s.now)})
	s.wake(w)
}

// cacheChanged takes a change of worker w's cache to the index, at once or late.
func (s *simulator) cacheChanged(w int, event SimEvent) {
	if s.EventLag == 0 {
		s.apply(w, event)
		return
	}
	event.Removed = append([]uint64(nil), event.Removed...)
	s.lagging = append(s.lagging, lateEvent{due: s.now + s.EventLag, worker: w, event: event})
}

// catchUp shows the index what is due.
func (s *simulator) catchUp() {
	n := 0
	for ; n < len(s.lagging) && s.lagging[n].due <= s.now; n++ {
		s.apply(s.lagging[n].worker, s.lagging[n].event)
		s.lagging[n] = lateEvent{}
	}
	s.lagging = s.lagging[n:]
}

func (s *simulator) apply(w int, event SimEvent) {
	key := WorkerKey{Worker: uint64(w)}
	if !event.Stored {
		if unknown := s.index.Remove(key, event.Removed); unknown > 0 {
			s.err = fmt.Errorf("simulated worker %d removed %d blocks that the index does not know", w, unknown)
		}
	} else if err := s.index.Store(key, event.Parent, event.HasParent, event.Blocks); err != nil {
		s.err = err
	}
}

// pass is a running pass of a worker.
type pass struct {
	end    time.Duration
	worker int
}

func (p pass) before(q pass) bool {
	return p.end < q.end || p.end == q.end && p.worker < q.worker
}

// passHeap is a binary heap, the pass that ends next at its top.
type passHeap []pass

func (h *passHeap) push(p pass) {
	*h = append(*h, p)
	for i := len(*h) - 1; i > 0; {
		up := (i - 1) / 2
		if !(*h)[i].before((*h)[up]) {
			return
		}
		(*h)[i], (*h)[up] = (*h)[up], (*h)[i]
		i = up
	}
}

func (h *passHeap) pop() pass {
	top, last := (*h)[0], len(*h)-1
	(*h)[0] = (*h)[last]
	*h = (*h)[:last]
	for i := 0; ; {
		least := i
		for _, down := range []int{2*i + 1, 2*i + 2} {
			if down < last && (*h)[down].before((*h)[least]) {
				least = down
			}
		}
		if least == i {
			return top
		}
		(*h)[i], (*h)[least] = (*h)[least], (*h)[i]
		i = least
	}
}
