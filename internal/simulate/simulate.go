// Package simulate replays a trace of requests against simulated workers in
// virtual time. It runs the router's own code, so that policies can be compared
// without GPUs. Two runs with the same settings give the same results.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"kvrouter/internal/engine"
	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
)

// Settings are the flags of the simulate command. The settings of the policies, the
// index and the engine come with the Simulation that Run is given.
type Settings struct {
	Trace          string            `placeholder:"FILE" help:"Requests to replay: JSON lines in Mooncake's format or of --record, also compressed by gzip."`
	Synthetic      string            `placeholder:"SHAPE" help:"Made-up conversations in place of --trace. chat: groups of them share a system prompt, and each turn's prompt is the one before, its answer and a new message. agentic: runs of agents that call tools, see --agentic-workflows and those after it."`
	SyntheticHints bool              `default:"true" negatable:"" help:"Give the router the hints that requests of --synthetic agentic or of a recording carry: which series each belongs to, how long that will be."`
	Workers        int               `placeholder:"N" help:"Number of simulated workers, 8 unless --prefill-workers and --decode-workers are given; --mock-num-gpu-blocks, --mock-max-num-seqs, --mock-max-num-batched-tokens, --mock-prefill-ms, --mock-decode-ms and --speedup-ratio say what each is like."`
	Concurrency    int               `placeholder:"N" help:"Requests in flight; the next one is sent when one ends. With --synthetic: conversations or workflows, the times between their requests included."`
	Speedup        float64           `placeholder:"FACTOR" help:"Send requests at the trace's own times, divided by this."`
	EventLag       float64           `default:"0" placeholder:"MS" help:"Age of what the router knows of the workers' caches, ms."`
	JSON           bool              `name:"json" help:"Print the results as JSON, one object a policy."`
	Plot           string            `placeholder:"FILE" help:"Also write a page (HTML) with the distribution of the time to first token and the workers' load."`
	Shape          SyntheticSettings `embed:"" prefix:"synthetic-"`
	Agents         AgenticSettings   `embed:"" prefix:"agentic-"`
}

// ValidateSynthetic checks the settings of --synthetic; its errors name the flag.
func (s Settings) ValidateSynthetic() error {
	var rate float64
	var flag string
	var shape interface{ validate() error }
	switch s.Synthetic {
	case syntheticChat:
		rate, flag, shape = s.Shape.Rate, "--synthetic-rate N (conversations that begin a second)", s.Shape
	case syntheticAgentic:
		rate, flag, shape = s.Agents.Rate, "--agentic-rate N (workflows that begin a second)", s.Agents
	default:
		return fmt.Errorf("--synthetic %s: it is %s or %s", s.Synthetic, syntheticChat, syntheticAgentic)
	}
	if s.Speedup > 0 || (s.Concurrency > 0) == (rate > 0) {
		return fmt.Errorf("with --synthetic %s give either --concurrency N (of those in flight) or %s", s.Synthetic, flag)
	}
	return shape.validate()
}

// Simulation is one run: a trace, the workers, and when its requests come. Each
// request of the trace begins a conversation; others may follow it.
type Simulation struct {
	Source        string // names the trace in reports
	Requests      []TraceRequest
	Policy        string
	Knobs         policy.Settings
	Index         router.IndexSettings
	Workers       int
	Prefills      int // the first so many workers compute only prompts, the others answers; 0: each does both
	Handover      engine.Handover
	LeastUncached int // with fewer tokens of a prompt to compute, one worker does it all
	Engine        engine.Settings
	Concurrency   int           // conversations in flight, the next one begun when one ends; 0: by their arrival times
	Speedup       float64       // arrival times are divided by it
	EventLag      time.Duration // what the index sees is so much older
	WithoutHints  bool          // the router gets no hints
	Seed          uint64
	Progress      func(done int) // called now and then; may be nil
}

// simulator replays a trace in virtual time. It is one goroutine, and two runs of
// one Simulation are equal.
type simulator struct {
	Simulation
	now     time.Duration // since the run began
	router  *router.Router
	index   radix.Index
	follows bool // the index is fed by the workers' events
	workers []worker
	coming  timeline
	idle    []int       // workers that must look for work once all that happens now has
	lagging []lateEvent // cache events the index has not seen, oldest first
	total   int         // requests, those that follow others too
	next    int         // first conversation not yet begun
	open    int         // conversations that have begun and not ended
	done    int         // requests that have ended
	fetches int         // of prompts, that have begun
	ledger  []*flight
	err     error
}

// worker is one simulated worker.
type worker struct {
	engine *engine.Engine
	queued bool // is in simulator.idle
	inPass bool
	busy   time.Duration // sum of its passes
	sent   int
}

// flight is one request on its way.
type flight struct {
	engine.Request
	request *TraceRequest
	worker  int
	booking *router.Booking
	sent    time.Duration
	first   time.Duration // end of the pass that emitted the first token
	end     time.Duration
	overlap int // predicted cached tokens

	prefill *flight // the leg that computes the prompt elsewhere; nil: there is none
	decode  *flight // the leg that follows; nil: this one brings the answer
}

// lateEvent is a change of a worker's cache that the index sees later.
type lateEvent struct {
	due    time.Duration
	worker int
	event  engine.Event
}

// epoch is the router's clock at the start of a run.
var epoch = time.Unix(1_000_000_000, 0)

// Run runs the trace once for each of the policies, and writes the results to
// out; if progress is a terminal, a bar goes there meanwhile. base has what the
// runs have in common and these settings do not say.
func (s Settings) Run(base Simulation, policies []string, out, progress *os.File) error {
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // saves 5 to 8 % of the CPU for some 35 MB
	source, requests, torn, err := s.requests(base.Seed, base.Engine)
	if err != nil {
		return err
	}
	if torn > 0 {
		fmt.Fprintf(progress, "%s: %d torn lines are left out\n", source, torn)
	}
	total := countRequests(requests)
	base.Source, base.Requests = source, requests
	base.Concurrency, base.Speedup = s.Concurrency, cmp.Or(s.Speedup, 1)
	base.EventLag, base.WithoutHints = time.Duration(s.EventLag*float64(time.Millisecond)), !s.SyntheticHints
	var reports []*Report
	for _, name := range policies {
		run := base
		run.Policy, run.Progress = name, progressBar(progress, name, total)
		report, err := run.Run()
		if err != nil {
			return fmt.Errorf("simulation of policy %s: %w", name, err)
		}
		reports = append(reports, report)
	}
	if s.Plot != "" {
		if err := os.WriteFile(s.Plot, plotReports(reports), 0o644); err != nil {
			return fmt.Errorf("--plot: %w", err)
		}
	}
	if s.JSON {
		return writeReportsJSON(out, reports)
	}
	return writeReports(out, reports)
}

// requests returns what shall be simulated and its name, and how many torn lines
// of it are left out.
func (s Settings) requests(seed uint64, engine engine.Settings) (source string, requests []TraceRequest, torn int, err error) {
	if s.Synthetic == "" {
		requests, torn, err = readTrace(s.Trace)
		return s.Trace, requests, torn, err
	}
	longest := engine.Blocks * engine.BlockSize
	if s.Synthetic == syntheticAgentic {
		requests, err = syntheticAgents(s.Agents, seed, longest)
	} else {
		requests, err = SyntheticChat(s.Shape, seed, longest)
	}
	return "synthetic " + s.Synthetic, requests, 0, err
}

// countRequests counts requests and those that follow them.
func countRequests(requests []TraceRequest) int {
	n := 0
	for i := range requests {
		for r := &requests[i]; r != nil; r = r.Next {
			n++
		}
	}
	return n
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
func (s Simulation) Run() (*Report, error) {
	switch {
	case s.Workers < 1:
		return nil, errors.New("a simulation needs at least one worker")
	case s.Concurrency < 0 || s.Speedup < 0 || s.Concurrency == 0 && s.Speedup == 0:
		return nil, errors.New("a simulation needs a concurrency or a speedup of more than 0")
	}
	chooser, err := policy.New(s.Policy, s.Knobs)
	if err != nil {
		return nil, err
	}
	run := newSimulator(s, chooser)
	if err := run.loop(); err != nil {
		return nil, err
	}
	return run.report(), nil
}

// newSimulator returns a simulator with idle workers.
func newSimulator(s Simulation, chooser policy.Policy) *simulator {
	total := countRequests(s.Requests)
	run := &simulator{
		Simulation: s,
		follows:    s.Index.Follows(s.Policy, s.Knobs),
		workers:    make([]worker, s.Workers),
		total:      total,
		ledger:     make([]*flight, 0, total),
	}
	clock := func() time.Time { return epoch.Add(run.now) }
	run.index = router.NewIndex(s.Index, s.Policy, s.Knobs, s.Engine.BlockSize, clock)
	run.router = router.NewRouter(run.index, chooser, s.Engine.BlockSize, s.Seed)
	run.router.Now = clock
	for i := range run.workers {
		simulated := engine.New(s.Engine, func(event engine.Event) { run.cacheChanged(i, event) })
		simulated.Fetch = run.beginFetch
		run.workers[i].engine = simulated
		run.router.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, TotalBlocks: s.Engine.Blocks, Disagg: s.part(i)})
	}
	return run
}

// loop runs events in time order. All events of one time run before any pass
// starts at that time.
func (s *simulator) loop() error {
	for s.done < s.total {
		s.sendDue()
		for _, w := range s.idle {
			s.workers[w].queued = false
			s.beginPass(w)
		}
		s.idle = s.idle[:0]
		if s.err != nil {
			return s.err
		}
		if arrival, waits := s.nextArrival(); waits && (len(s.coming) == 0 || arrival < s.coming[0].at) {
			s.now = arrival
			continue
		}
		if len(s.coming) == 0 {
			return fmt.Errorf("simulation stands still after %d of %d requests", s.done, s.total)
		}
		s.now = s.coming[0].at
		for len(s.coming) > 0 && s.coming[0].at == s.now {
			switch h := s.coming.pop(); {
			case h.turn != nil:
				s.send(h.turn)
			case h.fetched != nil:
				s.endFetch(h.fetched)
			default:
				s.endPass(h.order)
			}
		}
	}
	return nil
}

// nextArrival is when the next conversation begins by its own time.
func (s *simulator) nextArrival() (at time.Duration, waits bool) {
	if s.Concurrency > 0 || s.next == len(s.Requests) {
		return 0, false
	}
	return time.Duration(float64(s.Requests[s.next].Arrival-s.Requests[0].Arrival) / s.Speedup), true
}

// sendDue begins every conversation whose time has come.
func (s *simulator) sendDue() {
	for s.next < len(s.Requests) && s.err == nil {
		if arrival, byTime := s.nextArrival(); byTime && arrival > s.now || !byTime && s.open >= s.Concurrency {
			return
		}
		s.open++
		s.send(&s.Requests[s.next])
		s.next++
	}
}

// send routes one request and queues it on its worker, or on the first of two.
func (s *simulator) send(request *TraceRequest) {
	s.catchUp()
	local, blocks := request.Blocks(s.Engine.BlockSize)
	prefix := request.Hints
	if s.WithoutHints {
		prefix = hints.Prefix{}
	}
	asked := router.Request{Local: local, NumTokens: request.Prompt, Prefix: prefix}
	var pair router.Pair
	var err error
	if s.Prefills > 0 {
		pair, err = s.router.RoutePair(context.Background(), asked, router.PairRule{LeastUncached: s.LeastUncached})
	} else {
		pair.Decode, err = s.router.Route(context.Background(), asked)
	}
	if err != nil {
		s.err = err
		return
	}
	flight := s.newFlight(request, pair.Decode, engine.Request{Blocks: blocks, Prompt: request.Prompt, Output: request.Output})
	s.ledger = append(s.ledger, flight)
	if pair.Prefill.Booking == nil {
		s.submit(flight)
		return
	}
	flight.Fetch = true
	flight.prefill = s.newFlight(request, pair.Prefill, engine.Request{Blocks: blocks[:len(local)], Prompt: request.Prompt, Output: 1, Keep: true})
	flight.prefill.decode = flight
	s.submit(flight.prefill)
}

// newFlight is a request, or a leg of it, on its way to where the decision says.
func (s *simulator) newFlight(request *TraceRequest, decision router.Decision, work engine.Request) *flight {
	flight := &flight{
		Request: work,
		request: request,
		worker:  int(decision.Target.Key.Worker),
		booking: decision.Booking,
		sent:    s.now,
		overlap: decision.OverlapTokens,
	}
	flight.Tag = flight
	return flight
}

// submit queues a flight on its worker.
func (s *simulator) submit(flight *flight) {
	s.workers[flight.worker].sent++
	if err := s.workers[flight.worker].engine.Submit(&flight.Request); err != nil {
		s.err = fmt.Errorf("request %d of %s: %w", len(s.ledger), s.Source, err)
		return
	}
	s.wake(flight.worker)
}

// wake has worker w look for work before time goes on.
func (s *simulator) wake(w int) {
	if worker := &s.workers[w]; !worker.queued && !worker.inPass {
		worker.queued = true
		s.idle = append(s.idle, w)
	}
}

// beginPass starts worker w's next pass, if it has work.
func (s *simulator) beginPass(w int) {
	worker := &s.workers[w]
	d, busy := worker.engine.Begin()
	if !busy {
		return
	}
	worker.inPass = true
	worker.busy += d
	s.coming.push(happening{at: s.now + d, order: w})
}

// endPass ends worker w's pass and takes in the tokens that it made.
func (s *simulator) endPass(w int) {
	worker := &s.workers[w]
	worker.inPass = false
	for _, r := range worker.engine.End() {
		if r.Generated > 1 && r.Generated < r.Output {
			continue
		}
		flight := r.Tag.(*flight)
		if r.Generated == 1 {
			flight.first = s.now
			flight.booking.FirstToken()
		}
		if r.Generated == r.Output {
			flight.end = s.now
			if flight.prefill == nil { // else the cached tokens came from there
				flight.booking.Cached(r.Cached)
			}
			flight.booking.Finish(r.Output)
			flight.booking, flight.Blocks = nil, nil
			if flight.decode != nil {
				s.submit(flight.decode)
				continue
			}
			s.done++
			if next := flight.request.Next; next != nil {
				s.coming.push(happening{at: s.now + flight.request.Think, order: s.Workers + s.done, turn: next})
			} else {
				s.open--
			}
			if s.Progress != nil && (s.done%64 == 0 || s.done == s.total) {
				s.Progress(s.done)
			}
		}
	}
	running, waiting, usage := worker.engine.Load()
	s.router.Publish(kv.WorkerKey{Worker: uint64(w)}, policy.Published{Running: running, Waiting: waiting, KVUsage: usage, At: epoch.Add(s.now)})
	s.wake(w)
}

// cacheChanged takes a change of worker w's cache to the index, at once or late.
func (s *simulator) cacheChanged(w int, event engine.Event) {
	switch {
	case !s.follows:
	case s.EventLag == 0:
		s.apply(w, event)
	default:
		event.Removed = append([]uint64(nil), event.Removed...)
		s.lagging = append(s.lagging, lateEvent{due: s.now + s.EventLag, worker: w, event: event})
	}
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

// apply changes the index as worker w's cache has changed.
func (s *simulator) apply(w int, event engine.Event) {
	key := kv.WorkerKey{Worker: uint64(w)}
	if !event.Stored {
		if unknown := s.index.Remove(key, event.Removed); unknown > 0 {
			s.err = fmt.Errorf("simulated worker %d removed %d blocks that the index does not know", w, unknown)
		}
	} else if err := s.index.Store(key, event.Parent, event.HasParent, event.Blocks); err != nil {
		s.err = err
	}
}

// happening is the end of a worker's pass, a turn whose user has thought, or the
// end of a prompt's way from one worker to another.
type happening struct {
	at    time.Duration
	order int           // of those at one time: the pass's worker; turns and fetches come later
	turn  *TraceRequest // nil: a pass or a fetch

	fetched *flight // whose prompt has come
}

func (h happening) before(other happening) bool {
	return h.at < other.at || h.at == other.at && h.order < other.order
}

// timeline is a binary heap, what happens next at its top.
type timeline []happening

func (t *timeline) push(h happening) {
	*t = append(*t, h)
	for i := len(*t) - 1; i > 0; {
		up := (i - 1) / 2
		if !(*t)[i].before((*t)[up]) {
			return
		}
		(*t)[i], (*t)[up] = (*t)[up], (*t)[i]
		i = up
	}
}

func (t *timeline) pop() happening {
	top, last := (*t)[0], len(*t)-1
	(*t)[0] = (*t)[last]
	*t = (*t)[:last]
	for i := 0; ; {
		least := i
		for _, down := range []int{2*i + 1, 2*i + 2} {
			if down < last && (*t)[down].before((*t)[least]) {
				least = down
			}
		}
		if least == i {
			return top
		}
		(*t)[i], (*t)[least] = (*t)[least], (*t)[i]
		i = least
	}
}
