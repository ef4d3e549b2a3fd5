package simulate

import (
	"cmp"
	"container/heap"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/tools/engine"
)

// cellRun simulates a day with one placement, in virtual time. It is one goroutine, and two runs
// of one day are equal.
type cellRun struct {
	*cellDay
	placement string
	now       time.Duration
	coming    timeline
	later     int // calls of after
	routers   int // that were made
	random    *rand.Rand
	workers   []cellWorker // of all cells, those of one side by side
	idle      []int        // workers that must look for work once all that happens now has
	sites     []*site      // what decides for workers: a cell each, or one for all of them
	uppers    []*upper     // the routers above, by region; none: there are none
	near      *near        // the policy of the one site; nil: there are several
	turn      int          // of the next cell, with round-robin
	inFlight  []int        // requests sent to each cell whose answers have not come
	sent      int          // first turns
	done      int          // requests that were answered
	ledger    []*trip
	audit     audit
	err       error
}

// cellWorker is one simulated worker.
type cellWorker struct {
	engine *engine.Engine
	queued bool // is in cellRun.idle
	inPass bool
}

// site decides exactly which of its workers computes a request.
type site struct {
	router *router.Router
	index  radix.Index
	book   *summary.Book    // nil: no summary is sent
	at     summary.Position // sent

	operations    meter // blocks stored and removed
	sent          meter // bytes of changes and states
	changes       int   // bytes of changes of the summary
	snapshots     int
	snapshotBytes int
}

// upper is the router above the cells in one region, and the last report of each.
type upper struct {
	router *router.Router // nil: it knows the aggregates alone
	views  []*summary.View
	states []cells.State
}

// meter counts in seconds.
type meter struct {
	sum     int
	seconds []int
}

func (m *meter) add(now time.Duration, n int) {
	for len(m.seconds) <= int(now/time.Second) {
		m.seconds = append(m.seconds, 0)
	}
	m.sum += n
	m.seconds[now/time.Second] += n
}

// peak is the most of a second.
func (m *meter) peak() int {
	if len(m.seconds) == 0 {
		return 0
	}
	return slices.Max(m.seconds)
}

// trip is one request on its way.
type trip struct {
	engine.Request
	request *dayRequest
	origin  int
	cell    int
	worker  int
	local   []uint64
	above   *router.Booking // of the router above; nil: there is none
	booking *router.Booking
	overlap int // tokens that the cell expects its worker to find cached
	asked   time.Duration
	first   time.Duration // when the client had the first token
	end     time.Duration

	prompt, reused int // tokens
}

// Times and rates of cells, the defaults of their flags.
const (
	cellInterval = 200 * time.Millisecond
	cellRate     = 1_000_000 // bytes per second
	frameHead    = 5         // bytes of a frame beside its content
)

const (
	// hashedBlocks is how many leading blocks of a prompt consistent hashing looks at.
	hashedBlocks = 4
	// hashBound is how many times as many requests as the mean a cell has in flight at most.
	hashBound = 1.25
	// auditEach is how many requests there are for one whose summaries are compared with the
	// truth, and auditProbes how many hashes that no worker has are looked up in each then.
	auditEach, auditProbes = 16, 16
	// longestTail bounds the time from the end of the day to the last answer.
	longestTail = 24 * time.Hour
)

// audit compares the reports to the routers above with the truth.
type audit struct {
	requests, probes, positives int
	held, stale, unreported     int // blocks
}

// near is policy work over the workers of all cells, with the network time from the region whose
// request is decided.
type near struct {
	*policy.Work
	network func(worker uint64) time.Duration // of a round trip
	way     time.Duration                     // to the worker whose outcome is learned, there
}

// Choose sets the network times and chooses.
func (n *near) Choose(q policy.Query, candidates []policy.Candidate, random *rand.Rand) int {
	for i := range candidates {
		candidates[i].Network = n.network(candidates[i].Target.Key.Worker)
	}
	return n.Work.Choose(q, candidates, random)
}

// Learn learns what a worker did, without the way there.
func (n *near) Learn(o policy.Outcome) {
	o.FirstToken = max(0, o.FirstToken-n.way)
	n.Work.Learn(o)
}

// run simulates the day.
func (d *cellDay) run(placement string) (*CellReport, error) {
	s := &cellRun{
		cellDay: d, placement: placement, random: rand.New(rand.NewPCG(d.base.Seed, 9)),
		workers: make([]cellWorker, d.Cells*d.base.Workers), inFlight: make([]int, d.Cells), ledger: make([]*trip, 0, d.total),
	}
	s.build()
	if err := s.loop(); err != nil {
		return nil, err
	}
	return s.report(), nil
}

// build makes the workers and the routers.
func (s *cellRun) build() {
	sites := s.Cells
	if s.placement == placeExact {
		sites = 1
	}
	for range sites {
		c := &site{}
		if s.placement == placeSummary {
			c.book = summary.NewBookFrom(s.random.Uint64)
		}
		var chooser policy.Policy = policy.NewWork()
		if s.placement == placeExact {
			s.near = &near{Work: policy.NewWork()}
			chooser = s.near
		}
		var assumer radix.Assumer
		c.index, assumer = router.NewIndexOf(radix.NewTreeWithBook(c.book), s.base.Index, cellPolicy, s.base.Scoring.Settings,
			s.base.Engine.BlockSize, s.clock)
		c.router = s.newRouter(router.Deps{Index: c.index, Assumer: assumer, Policy: chooser})
		s.sites = append(s.sites, c)
	}
	for w := range s.workers {
		c := s.siteOf(w)
		s.workers[w].engine = engine.New(s.base.Engine, func(event engine.Event) { s.cacheChanged(c, w, event) })
		c.router.Up(kv.Target{Key: key(w), TotalBlocks: s.base.Engine.Blocks, MaxBatchedTokens: int32(s.base.Engine.MaxBatchedTokens)})
	}
	if s.placement != placeSummary && s.placement != placeAggregates {
		return
	}
	for range s.regions {
		u := &upper{states: make([]cells.State, s.Cells)}
		if s.placement == placeSummary {
			index, assumer := router.NewIndex(s.base.Index, cellPolicy, s.base.Scoring.Settings, s.base.Engine.BlockSize, s.clock)
			u.router = s.newRouter(router.Deps{Index: index, Assumer: assumer, Policy: policy.NewWork()})
			for c := range s.Cells {
				u.views = append(u.views, new(summary.View))
				u.router.Up(kv.Target{Key: key(c), Ranks: 1, TotalBlocks: s.base.Workers * s.base.Engine.Blocks})
			}
		}
		s.uppers = append(s.uppers, u)
	}
	for c, below := range s.sites {
		state, messages := below.state(), below.news()
		for origin := range s.uppers {
			s.show(origin, c, state, messages)
		}
		s.after(cellInterval*time.Duration(c+1)/time.Duration(s.Cells), func() { s.publish(c) })
	}
}

// key is that of a worker or a cell.
func key(n int) kv.WorkerKey { return kv.WorkerKey{Worker: uint64(n)} }

// siteOf returns what decides for a worker.
func (s *cellRun) siteOf(w int) *site {
	if len(s.sites) == 1 {
		return s.sites[0]
	}
	return s.sites[w/s.base.Workers]
}

// clock is the routers' time.
func (s *cellRun) clock() time.Time { return epoch.Add(s.now) }

// after schedules a call of f. Of events due at one time it comes last, in the order of the calls
// of after.
func (s *cellRun) after(d time.Duration, f func()) {
	s.later++
	heap.Push(&s.coming, happening{at: s.now + d, order: len(s.workers) + s.later, call: f})
}

// loop runs events in time order. All events of one time run before any pass starts at that time.
func (s *cellRun) loop() error {
	for s.done < s.total && s.err == nil {
		for s.sent < len(s.starts) && s.starts[s.sent].Arrival <= s.now {
			s.send(&s.starts[s.sent])
			s.sent++
		}
		for _, w := range s.idle {
			s.workers[w].queued = false
			s.beginPass(w)
		}
		s.idle = s.idle[:0]
		if s.sent < len(s.starts) && (len(s.coming) == 0 || s.starts[s.sent].Arrival < s.coming[0].at) {
			s.now = s.starts[s.sent].Arrival
			continue
		}
		if len(s.coming) == 0 || s.now > s.Day+longestTail {
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
	return s.err
}

// way is the one-way time between the client's region and the cell of a trip.
func (s *cellRun) way(t *trip) time.Duration { return s.rtt(t.origin, t.cell) / 2 }

// send begins a request: its cell is chosen in the client's region, and its worker where it
// arrives. The one index of all workers chooses both at once.
func (s *cellRun) send(request *dayRequest) {
	t := &trip{request: request, origin: request.origin, asked: s.now, prompt: request.Prompt}
	t.Tag, t.Prompt, t.Output = t, request.Prompt, request.Output
	t.local, t.Blocks = request.Blocks(s.base.Engine.BlockSize)
	if s.near != nil {
		s.near.network = func(worker uint64) time.Duration { return s.rtt(t.origin, int(worker)/s.base.Workers) }
		s.decide(s.sites[0], t)
		t.cell = t.worker / s.base.Workers
		s.inFlight[t.cell]++
		s.after(s.way(t), func() { s.submit(t) })
		return
	}
	t.cell = s.choose(t)
	s.inFlight[t.cell]++
	s.after(s.way(t), func() {
		s.decide(s.sites[t.cell], t)
		s.submit(t)
	})
}

// asked returns the request for a decision.
func (t *trip) question() router.Request {
	return router.Request{Local: t.local, NumTokens: t.prompt}
}

// decide chooses the worker of a trip.
func (s *cellRun) decide(at *site, t *trip) {
	decision, err := at.router.Route(context.Background(), t.question())
	if err != nil {
		s.err = cmp.Or(s.err, err)
		return
	}
	t.worker, t.booking, t.overlap = int(decision.Target.Key.Worker), decision.Booking, decision.OverlapTokens
}

// choose returns the cell of a trip.
func (s *cellRun) choose(t *trip) int {
	switch s.placement {
	case placeSummary:
		return s.bySummary(t)
	case placeNearest:
		return s.nearest(t.origin)
	case placeHash:
		return s.byHash(t)
	case placeAggregates:
		return s.byAggregates(t.origin)
	}
	s.turn++
	return (s.turn - 1) % s.Cells
}

// bySummary has the router above choose.
func (s *cellRun) bySummary(t *trip) int {
	u := s.uppers[t.origin]
	if s.audit.requests++; s.audit.requests%auditEach == 0 {
		s.compare(u, t)
	}
	decision, err := u.router.Route(context.Background(), t.question())
	if err != nil {
		s.err = cmp.Or(s.err, err)
		return 0
	}
	t.above = decision.Booking
	return int(decision.Target.Key.Worker)
}

// nearest returns the nearest cell: of several the one with the fewest requests in flight.
func (s *cellRun) nearest(origin int) (cell int) {
	for c := 1; c < s.Cells; c++ {
		if order := cmp.Compare(s.rtt(origin, c), s.rtt(origin, cell)); order < 0 || order == 0 && s.inFlight[c] < s.inFlight[cell] {
			cell = c
		}
	}
	return cell
}

// byHash is consistent hashing with bounded loads (Mirrokni et al., SODA 2018): the first cell in
// the order of the prefix's own, by rendezvous, that has not more than hashBound of the mean in
// flight. It knows the requests of all regions at once.
func (s *cellRun) byHash(t *trip) int {
	prefix := uint64(0)
	if n := min(hashedBlocks, len(t.local)); n > 0 {
		prefix = t.Blocks[n-1].Engine
	}
	all := 1
	for _, n := range s.inFlight {
		all += n
	}
	bound := int(math.Ceil(hashBound * float64(all) / float64(s.Cells)))
	best, highest := -1, uint64(0)
	for c := range s.Cells {
		weight := xxh3.HashSeed([]byte{byte(c)}, prefix)
		if s.inFlight[c] < bound && (best < 0 || weight > highest) {
			best, highest = c, weight
		}
	}
	return best
}

// byAggregates is the rule of llm-d's hub, as far as it is about load: the highest sum of two
// scores from 0 to 1, that of the queue, from the longest to the shortest, and that of the free
// KV cache. Of equal ones one by chance.
func (s *cellRun) byAggregates(origin int) int {
	states := s.uppers[origin].states
	byQueue := func(a, b cells.State) int { return cmp.Compare(a.Waiting, b.Waiting) }
	shortest, longest := slices.MinFunc(states, byQueue).Waiting, slices.MaxFunc(states, byQueue).Waiting
	best, highest, ties := 0, math.Inf(-1), 0
	for c := range states {
		score := 2 - states[c].Usage
		if longest > shortest {
			score -= float64(states[c].Waiting-shortest) / float64(longest-shortest)
		}
		switch {
		case score > highest:
			best, highest, ties = c, score, 1
		case score == highest:
			if ties++; s.random.IntN(ties) == 0 {
				best = c
			}
		}
	}
	return best
}

// compare compares the reported match of a prompt with the cells' caches.
func (s *cellRun) compare(u *upper, t *trip) {
	sequence := make([]uint64, len(t.local))
	for i := range sequence {
		sequence[i] = t.Blocks[i].Engine
	}
	probe := make([]uint64, 1)
	for c, view := range u.views {
		reported, held := view.Run(sequence), 0
		for held < len(sequence) && s.sites[c].book.Holders(sequence[held]) > 0 {
			held++
		}
		s.audit.held += held
		s.audit.stale += max(0, reported-held)
		s.audit.unreported += max(0, held-reported)
		for range auditProbes {
			probe[0] = s.random.Uint64()
			s.audit.probes++
			s.audit.positives += view.Run(probe)
		}
	}
}

// news returns the messages of a cell's summary since the last call.
func (c *site) news() [][]byte {
	if c.book == nil {
		return nil
	}
	c.book.Publish(int(cellRate * cellInterval.Seconds()))
	messages, ok := c.book.Since(c.at)
	if ok {
		c.at.Seq += uint64(len(messages))
		for _, m := range messages {
			c.changes += frameHead + len(m)
		}
		return messages
	}
	messages, c.at = c.book.Snapshot()
	c.snapshots++
	for _, m := range messages {
		c.snapshotBytes += frameHead + len(m)
	}
	return messages
}

// publish sends a cell's reports to the routers above, one each interval.
func (s *cellRun) publish(c int) {
	below := s.sites[c]
	before := below.changes
	state, messages := below.state(), below.news()
	text, err := json.Marshal(state)
	s.err = cmp.Or(s.err, err)
	below.sent.add(s.now, below.changes-before+frameHead+len(text))
	for origin := range s.uppers {
		s.after(s.rtt(origin, c)/2, func() { s.show(origin, c, state, messages) })
	}
	s.after(cellInterval, func() { s.publish(c) })
}

// show delivers a cell's report to a router above.
func (s *cellRun) show(origin, c int, state cells.State, messages [][]byte) {
	u := s.uppers[origin]
	u.states[c] = state
	if u.router == nil {
		return
	}
	for _, m := range messages {
		s.err = cmp.Or(s.err, u.views[c].Apply(m))
	}
	u.router.ShowCell(key(c), state.Report(s.clock(), s.rtt(origin, c)), u.views[c])
}

// submit queues a trip on its worker.
func (s *cellRun) submit(t *trip) {
	if s.err != nil {
		return
	}
	if err := s.workers[t.worker].engine.Submit(&t.Request); err != nil {
		s.err = err
		return
	}
	s.wake(t.worker)
}

// wake makes worker w look for work before time advances.
func (s *cellRun) wake(w int) {
	if worker := &s.workers[w]; !worker.queued && !worker.inPass {
		worker.queued = true
		s.idle = append(s.idle, w)
	}
}

// beginPass starts worker w's next pass, if it has work.
func (s *cellRun) beginPass(w int) {
	worker := &s.workers[w]
	if d, busy := worker.engine.Begin(); busy {
		worker.inPass = true
		heap.Push(&s.coming, happening{at: s.now + d, order: w})
	}
}

// endPass ends worker w's pass and counts its tokens.
func (s *cellRun) endPass(w int) {
	worker := &s.workers[w]
	worker.inPass = false
	for _, r := range worker.engine.End() {
		t := r.Tag.(*trip)
		if s.near != nil {
			s.near.way = s.way(t)
		}
		if r.Generated == 1 {
			t.booking.FirstToken()
			s.after(s.way(t), func() { s.begins(t) })
		}
		if r.Generated == r.Output {
			t.reused = r.Reused
			t.booking.Cached(r.Cached, kv.TierTokens{})
			t.booking.Finish(r.Output)
			s.after(s.way(t), func() { s.ends(t) })
		}
	}
	running, waiting, usage := worker.engine.Load()
	s.siteOf(w).router.Publish(key(w), policy.Published{Running: running, Waiting: waiting, KVUsage: usage, At: s.clock()})
	s.wake(w)
}

// begins takes the first token of a trip to the client.
func (s *cellRun) begins(t *trip) {
	t.first = s.now
	if t.above != nil {
		t.above.Found(t.overlap)
		t.above.FirstToken()
	}
}

// ends takes the end of a trip's answer to the client, whose conversation continues.
func (s *cellRun) ends(t *trip) {
	t.end = s.now
	if t.above != nil {
		t.above.Cached(t.Cached, kv.TierTokens{})
		t.above.Finish(t.Output)
	}
	s.inFlight[t.cell]--
	s.done++
	s.ledger = append(s.ledger, t)
	next, think := t.request.next, t.request.Think
	t.Request, t.request, t.local, t.above, t.booking = engine.Request{}, nil, nil, nil, nil
	if next != nil {
		s.after(think, func() { s.send(next) })
	}
	if s.progress != nil && (s.done%64 == 0 || s.done == s.total) {
		s.progress(s.done)
	}
}

// cacheChanged takes a change of worker w's cache to the index that knows it.
func (s *cellRun) cacheChanged(c *site, w int, event engine.Event) {
	c.operations.add(s.now, len(event.Blocks)+len(event.Removed))
	change := s.base.changeOf(event)
	_, err := c.index.Apply(key(w), &change)
	s.err = cmp.Or(s.err, err)
}
