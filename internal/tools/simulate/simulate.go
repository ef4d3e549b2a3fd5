// Package simulate replays a trace of requests against simulated workers in
// virtual time. It runs the router's own code, so that policies can be compared
// without GPUs. Two runs with the same settings give the same results.
package simulate

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/tools/engine"
)

// Settings are the flags of the simulate command. The settings of the policies, the
// index and the engine are in the Simulation that Run gets.
type Settings struct {
	Trace          string   `group:"Simulation" placeholder:"FILE" help:"Requests to replay: JSON lines in Mooncake's format or of --record, optionally gzip-compressed."`
	Synthetic      string   `group:"Simulation" placeholder:"SHAPE" help:"Synthetic conversations instead of --trace. chat: groups share a system prompt, and the prompt of each turn is the previous one, its answer and a new message. agentic: agent runs that call tools, see --agentic-workflows and the flags after it. rollouts: a step of RL training, see --rollouts-prompts."`
	SyntheticHints bool     `group:"Simulation" default:"true" negatable:"" help:"Pass the hints of --synthetic agentic or of a recording to the router: the series of each request and its expected length."`
	Workers        int      `group:"Simulation" placeholder:"N" help:"Number of simulated workers. Default: 8, unless --prefill-workers and --decode-workers are set. --mock and --speedup-ratio set their properties."`
	Concurrency    int      `group:"Simulation" placeholder:"N" help:"Number of in-flight requests; a new one is sent when one ends. With --synthetic: conversations or workflows, including the time between their requests."`
	Speedup        float64  `group:"Simulation" placeholder:"FACTOR" help:"Send requests at the times of the trace, divided by this factor."`
	EventLag       float64  `group:"Simulation" default:"0" placeholder:"MS" help:"Delay of KV events to the router, ms."`
	RoundTrip      float64  `group:"Simulation" default:"0" placeholder:"MS" help:"Network round-trip time between router and worker, ms."`
	Routers        int      `group:"Simulation" default:"1" placeholder:"N" help:"Number of routers in front of the same workers; each request goes to a random one. Each follows KV events of all workers, but knows only its own in-flight requests."`
	TierEvents     bool     `group:"Simulation" default:"true" negatable:"" help:"Pass KV events of the tiers below the cache (--mock host-blocks, disk-blocks) to the router."`
	Pulls          bool     `group:"Simulation" default:"true" negatable:"" help:"Let workers pull blocks from each other (--mock peer-bandwidth)."`
	UntoldCache    bool     `group:"Simulation" help:"Workers do not report the size of their KV cache to the router."`
	UntoldAdapters bool     `group:"Simulation" help:"The router does not know the LoRA adapters of requests (--synthetic-adapters)."`
	Faults         []string `group:"Simulation" placeholder:"FAULT" help:"Comma-separated faults to inject, such as 'worker=2 at=60s for=30s kind=error rate=0.3'. kind: error (status 500), refuse (connection refused), hang (no answer), slow, pause or update (a trainer pauses the engine, and empties its cache). rate: share of failing requests, or remaining speed. Default: 1."`
	Tenants        []string `group:"Simulation" placeholder:"TENANT" help:"Comma-separated tenants of the conversations, by chance: NAME[*COUNT]:SHARE[:weight=W][:class=CLASS][:ttft=TIME[:sheddable]][:limit=N][:absent], such as flood:0.84,light*8:0.16. COUNT tenants have SHARE of the conversations together, relative to the other shares. ttft: their objective of the time to first token; sheddable: requests that are predicted to miss it may be refused. limit: most requests in flight of one tenant; others are refused. absent: their conversations are left out. The report has the times of each."`
	TenantCost     string   `group:"Simulation" default:"work" enum:"work,prompt,request" help:"What a fair queue charges tenants for, for comparison: ${enum} (the workers' time; prompt tokens, cached or not; each request the same, so that tenants take turns)."`
	PrioritySettings
	JSON         bool              `group:"Simulation" name:"json" help:"Print the results as JSON, one object per policy."`
	Shape        SyntheticSettings `embed:"" prefix:"synthetic-"`
	Agents       AgenticSettings   `embed:"" prefix:"agentic-"`
	Rollouts     RolloutSettings   `embed:"" prefix:"rollouts-"`
	CellSettings `embed:""`
}

// longestDelay is the longest that --event-lag and --round-trip may be, ms: an hour.
const longestDelay = 3_600_000.

// Validate checks the settings; its errors name the flag.
func (s Settings) Validate() error {
	switch {
	case s.Cells != 0:
		return s.validateCells()
	case s.RTTMatrix != "":
		return errors.New("--rtt-matrix is that of --cells N: give both or neither")
	case (s.Trace == "") == (s.Synthetic == ""):
		return errors.New("give either --trace FILE, such as testdata/traces/conversation_trace.jsonl.gz, --synthetic chat, agentic or rollouts, " +
			"or --cells N")
	case s.Concurrency < 0 || !(s.Speedup >= 0):
		return errors.New("--concurrency and --speedup cannot be negative")
	case !(s.EventLag >= 0 && s.EventLag <= longestDelay && s.RoundTrip >= 0 && s.RoundTrip <= longestDelay):
		return fmt.Errorf("--event-lag %v and --round-trip %v: give 0 to %v ms", s.EventLag, s.RoundTrip, longestDelay)
	}
	if _, err := parseTenants(s.Tenants); err != nil {
		return err
	}
	switch {
	case s.Synthetic != "":
		return s.validateSynthetic()
	case (s.Concurrency > 0) == (s.Speedup > 0):
		return errors.New("give either --concurrency N (in-flight requests) or --speedup FACTOR (the arrival times of the trace, divided)")
	}
	return nil
}

func (s Settings) validateSynthetic() error {
	var rate float64
	var flag string
	var shape interface{ validate() error }
	switch s.Synthetic {
	case syntheticChat:
		rate, flag, shape = s.Shape.Rate, "--synthetic-rate N (arrivals per second)", s.Shape
	case syntheticAgentic:
		rate, flag, shape = s.Agents.Rate, "--agentic-rate N (arrivals per second)", s.Agents
	case syntheticRollouts:
		flag, shape = "no other rate: all trajectories begin as early as that allows", s.Rollouts
	default:
		return fmt.Errorf("--synthetic %s: give %s, %s or %s", s.Synthetic, syntheticChat, syntheticAgentic, syntheticRollouts)
	}
	if s.Speedup > 0 || (s.Concurrency > 0) == (rate > 0) {
		return fmt.Errorf("with --synthetic %s give either --concurrency N (in flight) or %s", s.Synthetic, flag)
	}
	return shape.validate()
}

// Simulation is one run: a trace, the workers, and the arrival of its requests.
// Each request of the trace begins a conversation; others may follow it.
type Simulation struct {
	Source           string // names the trace in reports
	Requests         []TraceRequest
	Policy           string
	Scoring          policies.Settings
	Index            router.IndexSettings
	Workers          int
	Prefills         int     // number of prefill workers, which come first; the others are decode workers; 0: all are aggregated
	Kind             kv.Kind // KV connector: SGLang's legs are concurrent, NIXL's sequential
	Handover         engine.Handover
	Way              time.Duration // one-way latency between router and worker
	LeastUncached    int           // requests with fewer uncached prompt tokens are aggregated
	Engine           engine.Settings
	Concurrency      int                   // conversations in flight; a new one begins when one ends; 0: by arrival times
	Speedup          float64               // arrival times are divided by it
	EventLag         time.Duration         // delay of events to the index
	Routers          int                   // number of routers in front of the workers; 0 counts as 1
	UntoldCache      bool                  // the router does not know the size of a worker's cache
	UntoldAdapters   bool                  // the router does not know the adapters of requests
	Tiers            []engine.TierSettings // below the cache of each worker
	Peers            engine.PeerSettings   // pulls from other workers
	WithoutPulls     bool                  // workers do not pull
	UnpublishedTiers bool                  // the router does not know what they hold
	Routing          router.Settings
	Retry            health.RetrySettings
	Priority         PrioritySettings
	Faults           []string       // in the format of --faults
	Tenants          []*tenantGroup // of the requests, for the report; none: there are none
	WithoutHints     bool           // the router gets no hints
	Seed             uint64
	Progress         func(done int) // called periodically; may be nil
}

// simulator replays a trace in virtual time. It is one goroutine, and two runs of
// one Simulation are equal.
type simulator struct {
	Simulation
	now     time.Duration // since the run began
	routers []*router.Router
	indexes []radix.Index // of the routers
	random  *rand.Rand    // draws a request's router
	follows bool          // the indexes are fed by the workers' events
	workers []worker
	coming  timeline
	idle    []int       // workers that must look for work once all that happens now has
	lagging []lateEvent // cache events the index has not seen, oldest first
	total   int         // requests, those that follow others too
	next    int         // first conversation not yet begun
	open    int         // conversations that have begun and not ended
	done    int         // requests that have ended
	fetches int         // of prompts, that have begun
	ledger  []*flight   // that were answered
	err     error

	budgets    []*health.Budget     // of the routers
	later      int                  // calls of after
	decided    []decidedRequest     // that have left the queue
	waits      []float64            // in the queue, ms
	lost       map[string]int       // requests, by why
	lostBy     map[*tenantGroup]int // the same, of tenants
	objectives map[*tenantGroup]*ObjectiveReport
	inFlight   map[*tenant]int // requests, of tenants with a limit
	drawSpare  *rand.Rand
	retried    int
	denied     int // retries, for want of budget
	faults     []*fault
	drawFault  *rand.Rand
	priors     map[*TraceRequest]bool // turns to come of conversations that have begun
	drawPrior  *rand.Rand
	drawPull   *rand.Rand
	pulls      int // requests that were to pull
}

// worker is one simulated worker.
type worker struct {
	engine *engine.Engine
	queued bool // is in simulator.idle
	inPass bool
	busy   time.Duration // sum of its passes
	sent   int

	loadsEnd time.Duration    // when its last load from lower tiers ends
	sendsEnd time.Duration    // when its last block is sent that another worker pulls
	moved    policy.Transfers // by these loads
	reported time.Duration    // when the routers last read that
	shown    time.Duration    // when the routers last read its adapters
	adapters map[string]bool  // that it was sent

	// Where there are faults:
	fault   *fault        // its current fault; nil: none
	reset   bool          // its cache was emptied, which it reports with its next pass
	heard   time.Duration // when it last emitted a token
	flights []*flight     // that are under way
	watched bool          // a look at them is due
}

// flight is one request on its way.
type flight struct {
	engine.Request
	simulated *simRequest
	worker    int
	source    int // the worker that it pulls from, if Served
	booking   *router.Booking
	sent      time.Duration
	first     time.Duration // end of the pass that emitted the first token
	heard     time.Duration // the same, of the last token so far
	end       time.Duration
	overlap   int // predicted cached tokens

	prefill *flight // the leg that computes the prompt elsewhere; nil: there is none
	decode  *flight // the leg that fetches the prompt; nil: this one brings the answer
	ready   bool    // a prefill leg's prompt is computed
	awaited bool    // a prefill leg's prompt is waited for
}

// epoch is the router's clock at the start of a run.
var epoch = time.Unix(1_000_000_000, 0)

// Run runs the trace once for each of the policies, and writes the results to out
// and, if progress is a terminal, a progress bar there. base has the common
// settings of the runs that are not in these settings.
func (s Settings) Run(base Simulation, policies []string, out, progress *os.File) error {
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // saves 5 to 8 % of the CPU for some 35 MB
	base.EventLag, base.WithoutHints = time.Duration(s.EventLag*float64(time.Millisecond)), !s.SyntheticHints
	base.Way = time.Duration(s.RoundTrip / 2 * float64(time.Millisecond))
	base.Routers, base.UntoldCache, base.Priority, base.Faults = s.Routers, s.UntoldCache, s.PrioritySettings, s.Faults
	base.UnpublishedTiers, base.WithoutPulls, base.UntoldAdapters = !s.TierEvents, !s.Pulls, s.UntoldAdapters
	if s.Cells > 0 {
		return s.runCells(base, policies, out, progress)
	}
	base.Routing.Charging = chargings[s.TenantCost]
	source, requests, torn, err := s.requests(base.Seed, base.Engine)
	if err != nil {
		return err
	}
	if torn > 0 {
		fmt.Fprintf(progress, "%s: skipped %d incomplete lines\n", source, torn)
	}
	if base.Tenants, err = parseTenants(s.Tenants); err != nil {
		return err
	}
	if len(base.Tenants) > 0 {
		if requests = assignTenants(requests, base.Tenants, base.Seed); len(requests) == 0 {
			return errors.New("--tenants: no conversation is of a tenant that is not absent")
		}
	}
	total := countRequests(requests)
	base.Source, base.Requests = source, requests
	base.Concurrency, base.Speedup = s.Concurrency, cmp.Or(s.Speedup, 1)
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
	switch s.Synthetic {
	case syntheticAgentic:
		requests, err = syntheticAgents(s.Agents, seed, longest)
	case syntheticRollouts:
		requests, err = rolloutStep(s.Rollouts, seed, longest)
	default:
		requests, err = SyntheticChat(s.Shape, seed, longest)
	}
	return "synthetic " + s.Synthetic, requests, 0, err
}

// Run replays the complete trace.
func (s Simulation) Run() (*Report, error) {
	run, err := s.start()
	if err == nil {
		err = run.loop()
	}
	if err == nil && len(run.ledger) == 0 {
		err = fmt.Errorf("all of %d requests failed: %v", run.total, run.lost)
	}
	if err != nil {
		return nil, err
	}
	return run.report(), nil
}

// start returns a simulator of the run that has done nothing yet.
func (s Simulation) start() (*simulator, error) {
	switch {
	case s.Workers < 1:
		return nil, errors.New("a simulation needs at least one worker")
	case s.Concurrency < 0 || s.Speedup < 0 || s.Concurrency == 0 && s.Speedup == 0:
		return nil, errors.New("a simulation needs a concurrency or a speedup of more than 0")
	case s.Prefills > 0 && (len(s.Faults) > 0 || s.Routing.Queues() || s.Routing.BusyThresholds.Set()):
		return nil, errors.New("faults, the queue and busy thresholds are not simulated with disaggregation: leave out --faults, " +
			"--router-queue-threshold and the --active thresholds")
	case s.Prefills > 0 && len(s.Tiers) > 0:
		return nil, errors.New("tiers below the cache are not simulated with disaggregation: leave out --mock host-blocks and disk-blocks")
	case s.Way > 0 && len(s.Faults) > 0:
		return nil, errors.New("--round-trip is not simulated with --faults: leave one of them out")
	case s.Routing.RouterTrackOutputBlocks || s.Routing.RecordDecisions:
		return nil, errors.New("simulate neither counts the blocks of answers nor records decisions: leave out --router-track-output-blocks " +
			"and --record-decisions")
	case !(s.Priority.PriorityShare >= 0 && s.Priority.PriorityShare <= 1) || !(s.Priority.PriorityJump >= 0):
		return nil, errors.New("--priority-share: give a share from 0 to 1; --priority-jump: give seconds, at least 0")
	case s.Routers < 0 || s.Routers > maxRouters:
		return nil, fmt.Errorf("%d routers: give 1 to %d", s.Routers, maxRouters)
	}
	choosers := make([]policy.Policy, max(1, s.Routers))
	for i := range choosers {
		var err error
		if choosers[i], err = NewPolicy(s.Policy, s.Scoring); err != nil {
			return nil, err
		}
	}
	run := newSimulator(s, choosers...)
	var err error
	if run.faults, err = parseFaults(s.Faults, s.Workers); err != nil {
		return nil, err
	}
	run.planFaults()
	return run, nil
}

// maxRouters is how many routers there may be before the same workers.
const maxRouters = 64

// newSimulator returns a simulator with idle workers and a router for each of the
// policies.
func newSimulator(s Simulation, choosers ...policy.Policy) *simulator {
	total := countRequests(s.Requests)
	run := &simulator{
		Simulation: s,
		random:     rand.New(rand.NewPCG(s.Seed, 3)),
		lost:       map[string]int{},
		lostBy:     map[*tenantGroup]int{},
		objectives: map[*tenantGroup]*ObjectiveReport{},
		inFlight:   map[*tenant]int{},
		drawSpare:  rand.New(rand.NewPCG(s.Seed, 7)),
		priors:     map[*TraceRequest]bool{},
		drawPrior:  rand.New(rand.NewPCG(s.Seed, 4)),
		drawPull:   rand.New(rand.NewPCG(s.Seed, 5)),
		follows:    s.Index.Follows(s.Policy, s.Scoring.Settings),
		workers:    make([]worker, s.Workers),
		total:      total,
		ledger:     make([]*flight, 0, total),
	}
	for _, g := range s.Tenants {
		if g.objective > 0 {
			run.objectives[g] = new(ObjectiveReport)
		}
	}
	for i, chooser := range choosers {
		index, assumer := router.NewIndex(s.Index, s.Policy, s.Scoring.Settings, s.Engine.BlockSize, run.clock)
		run.indexes = append(run.indexes, index)
		run.routers = append(run.routers, router.New(s.Routing,
			router.Deps{Index: index, Assumer: assumer, Policy: chooser, BlockSize: s.Engine.BlockSize, Seed: s.Seed + uint64(i), Now: run.clock}))
		run.budgets = append(run.budgets, health.NewBudget(s.Retry.RetryBudget))
	}
	blocks := s.Engine.Blocks
	if s.UntoldCache {
		blocks = 0
	}
	shared := map[kv.Tier]*engine.Store{}
	for i := range run.workers {
		simulated := engine.New(s.Engine, func(event engine.Event) { run.cacheChanged(i, event) }, engine.Stores(s.Tiers, shared)...)
		simulated.Fetch, simulated.LoadNow = run.beginFetch, run.beginLoad
		run.workers[i].engine = simulated
		for _, router := range run.routers {
			router.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, TotalBlocks: blocks, MaxBatchedTokens: int32(s.Engine.MaxBatchedTokens),
				Disagg: s.part(i)})
		}
	}
	return run
}

// loop runs events in time order. All events of one time run before any pass
// starts at that time.
func (s *simulator) loop() error {
	for s.done < s.total {
		s.leaveQueue()
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
			return fmt.Errorf("simulation stalled after %d of %d requests", s.done, s.total)
		}
		s.now = s.coming[0].at
		for len(s.coming) > 0 && s.coming[0].at == s.now {
			if h := heap.Pop(&s.coming).(happening); h.call != nil {
				h.call()
			} else {
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

// sendDue begins every conversation that is due.
func (s *simulator) sendDue() {
	for s.next < len(s.Requests) && s.err == nil {
		if arrival, byTime := s.nextArrival(); byTime && arrival > s.now || !byTime && s.open >= s.Concurrency && !s.Requests[s.next].AtOnce {
			return
		}
		s.open++
		s.send(&s.Requests[s.next])
		s.next++
	}
}

// newFlight is a request, or a leg of it, on its way to where the decision says.
func (s *simulator) newFlight(e *simRequest, decision router.Decision, work engine.Request) *flight {
	flight := &flight{
		Request:   work,
		simulated: e,
		worker:    int(decision.Target.Key.Worker),
		booking:   decision.Booking,
		sent:      s.now,
		overlap:   decision.OverlapTokens,
	}
	flight.Tag = flight
	return flight
}

// submit sends a flight to its worker.
func (s *simulator) submit(flight *flight) { s.travel(func() { s.arrive(flight) }) }

// travel has f called after the way between router and worker.
func (s *simulator) travel(f func()) {
	if s.Way == 0 {
		f()
		return
	}
	s.after(s.Way, f)
}

// arrive queues a flight on its worker.
func (s *simulator) arrive(flight *flight) {
	worker := &s.workers[flight.worker]
	worker.sent++
	worker.notes(flight.Adapter)
	if err := worker.engine.Submit(&flight.Request); err != nil {
		s.err = fmt.Errorf("request of %s: %w", s.Source, err)
		return
	}
	s.wake(flight.worker)
}

// wake makes worker w look for work before time advances.
func (s *simulator) wake(w int) {
	if worker := &s.workers[w]; !worker.queued && !worker.inPass {
		worker.queued = true
		s.idle = append(s.idle, w)
	}
}

// beginPass starts worker w's next pass, if it has work.
func (s *simulator) beginPass(w int) {
	worker := &s.workers[w]
	if worker.stopped() {
		return
	}
	s.tellOfReset(w)
	d, busy := worker.engine.Begin()
	if !busy {
		return
	}
	d = worker.passTime(d)
	worker.inPass = true
	worker.busy += d
	heap.Push(&s.coming, happening{at: s.now + d, order: w})
}

// endPass ends worker w's pass and counts its tokens.
func (s *simulator) endPass(w int) {
	worker := &s.workers[w]
	worker.inPass = false
	for _, r := range worker.engine.End() {
		if len(s.faults) > 0 {
			worker.heard, r.Tag.(*flight).heard = s.now, s.now
		}
		if r.Generated > 1 && r.Generated < r.Output {
			continue
		}
		flight := r.Tag.(*flight)
		if flight.decode != nil {
			s.promptComputed(flight)
		}
		first, last := r.Generated == 1, r.Generated == r.Output
		s.travel(func() { s.hear(flight, first, last) })
	}
	running, waiting, usage := worker.engine.Load()
	s.showAdapters(w)
	for _, router := range s.routers {
		router.Publish(kv.WorkerKey{Worker: uint64(w)}, policy.Published{Running: running, Waiting: waiting, KVUsage: usage, At: s.clock()})
	}
	s.wake(w)
}

// hear handles the first or the last token of a flight; the only one is both.
func (s *simulator) hear(f *flight, first, last bool) {
	if first {
		f.first = s.now
		f.booking.FirstToken()
	}
	if last {
		s.answered(f)
	}
}

// answered ends a flight after its last token.
func (s *simulator) answered(f *flight) {
	f.end = s.now
	if f.prefill == nil { // else the cached tokens came from there
		f.booking.Cached(f.Request.Cached, kv.TierTokens{})
	}
	f.booking.Finish(f.Output)
	f.booking, f.Blocks = nil, nil
	s.land(f)
	if f.decode != nil {
		if s.Kind != kv.KindSGLang {
			s.submit(f.decode)
		}
		return
	}
	if len(s.faults) > 0 {
		s.noteHealth(f.worker)
	}
	f.simulated.local, f.simulated.blocks = nil, nil
	s.ledger = append(s.ledger, f)
	s.over(f.simulated)
}
