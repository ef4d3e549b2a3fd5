package router

import (
	"math"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// loadFreshFor is the time that a published load is believed. The plugin repeats its
// last value every second, and polls of /metrics come as often.
const loadFreshFor = 10 * time.Second

// loads holds every worker's load. It has no lock of its own: its owner, the
// Router, guards it.
type loads struct {
	byWorker map[kv.WorkerKey]*workerLoad
	own      map[uint64]int // in-flight requests of this router on all ranks of a worker, without zeros
	active   activeBlocks
	shared   []int32  // by worker number, of the prompt that snapshot was asked about last, in units
	more     []int32  // reused by snapshot
	unused   []uint32 // numbers of workers that are gone

	pulling int // requests without a first token that pull from another worker

	stale time.Time // before which no worker's load that is fresh becomes too old

	byID           map[string]*Booking
	oldest, newest *Booking // by time of the last message about them

	expired time.Time // when forgotten bookings were last looked for
}

// targetLoad is the load of a worker that is up. What is beside workerLoad spares decisions a look at
// that, which is a line of the processor's cache for each worker.
type targetLoad struct {
	*workerLoad
	load      *policy.Load
	number    uint32
	blockSize uint32 // tokens
}

func (t *targetLoad) asOf(now time.Time) *policy.Load { return asOf(t.load, now) }

// workerLoad is a worker's load, its number in loads.active and its totals. Decisions read its Load
// only, so these lie together.
type workerLoad struct {
	*policy.Load
	number uint32
	gone   bool // to be dropped with its last booking
	role   kv.Role
	done   tally
	tally  time.Time // when done was brought up to date

	peaks [2]int    // most requests in flight in this span of peakSpan, and in the one before
	since time.Time // this one began

	passBefore time.Time // when the pass before that of Load.FirstToken gave first tokens; zero: there was none
	ranBefore  int       // Running of the report before Published
	ranMost    int       // the most Running of reports since requests wait in the engine, with the last one before

	probe     time.Duration // after which Load.Fill grows where no request waits in the engine
	growsFrom time.Time     // the earliest time for that

	served int // tokens that others pull from it now

	reportsCached bool // an answer of it has said how many of its prompt's tokens were cached
	engine        engine

	times   int                // units in a block
	blocks  int                // distinct prompt blocks of requests in flight
	weights map[uint64]float64 // of those that do not count 1, by sequence hash
	excess  float64            // sum of those weights, less 1 each
	output  float64            // sum of the weights of output blocks
}

// tiers returns what is known of the worker's lower tiers, to be added to.
func (l *workerLoad) tiers() *policy.Tiers {
	if l.Tiers == nil {
		l.Tiers = new(policy.Tiers)
	}
	return l.Tiers
}

// adapters returns what is known of the worker's LoRA adapters, to be added to.
func (l *workerLoad) adapters() *policy.Adapters {
	if l.Adapters == nil {
		l.Adapters = new(policy.Adapters)
	}
	return l.Adapters
}

// sumBlocks sets ActiveBlocks to the sum of all weights, rounded, in units.
func (l *workerLoad) sumBlocks() {
	l.ActiveBlocks = l.times * int(math.Round(float64(l.blocks)+l.excess+l.output))
}

// weigh sets the weight of a block.
func (l *workerLoad) weigh(h uint64, weight float64) {
	if old, has := l.weights[h]; has {
		l.excess -= old - 1
	}
	if weight != 1 {
		if l.weights == nil {
			l.weights = map[uint64]float64{}
		}
		l.weights[h] = weight
		l.excess += weight - 1
	} else if delete(l.weights, h); len(l.weights) == 0 {
		l.excess = 0 // what rounding left
	}
}

// samePass is the most time between two first tokens of one pass: an engine sends them
// together, and no pass over prompts is that short.
const samePass = 2 * time.Millisecond

// tally counts a worker's work since its first request.
type tally struct {
	prompts int     // that got their first token
	passes  int     // that gave those
	tokens  int     // uncached ones of the prompts
	context float64 // sum over time of ContextTokens, token·s
}

// tallyAt brings the tally up to now and returns it.
func (l *workerLoad) tallyAt(now time.Time) tally {
	if !l.tally.IsZero() {
		l.done.context += float64(l.ContextTokens) * now.Sub(l.tally).Seconds()
	}
	l.tally = now
	return l.done
}

// since returns the work between two tallies that are d apart.
func (t tally) since(before tally, d time.Duration) policy.Meanwhile {
	m := policy.Meanwhile{Prompts: t.prompts - before.prompts, Passes: t.passes - before.passes, Tokens: t.tokens - before.tokens}
	if d > 0 {
		m.Context = (t.context - before.context) / d.Seconds()
	}
	return m
}

// newLoads returns an empty table.
func newLoads() *loads {
	return &loads{byWorker: map[kv.WorkerKey]*workerLoad{}, own: map[uint64]int{}, byID: map[string]*Booking{}, active: newActiveBlocks()}
}

// publish takes over what worker w reports of itself. Requests in its engine are foreign
// only beyond the most that were in flight of late: it may count some that have ended.
func (l *loads) publish(w kv.WorkerKey, p policy.Published, now time.Time) {
	load := l.of(w)
	if load.Waiting == 0 {
		load.ranMost = load.Running
	}
	load.ranMost = max(load.ranMost, p.Running)
	load.ranBefore, load.Published = load.Running, p
	load.Bumped = 0
	load.Foreign = max(0, p.Running+p.Waiting-load.peak(p.At))
	l.staleAt(asOf(load.Load, now))
}

// staleAt notes when a load that is fresh will be too old.
func (l *loads) staleAt(load *policy.Load) {
	if at := load.At.Add(loadFreshFor); load.Fresh && at.Before(l.stale) {
		l.stale = at
	}
}

// peakSpan is longer than the age of a worker's published load.
const peakSpan = 3 * time.Second

// peak notes how many requests are in flight, and returns the most of the last one to
// two spans.
func (l *workerLoad) peak(now time.Time) int {
	if now.Sub(l.since) >= peakSpan {
		l.peaks, l.since = [2]int{l.InFlight, l.peaks[0]}, now
	}
	l.peaks[0] = max(l.peaks[0], l.InFlight)
	return max(l.peaks[0], l.peaks[1])
}

// bump counts one request sent to w until w publishes again.
func (l *loads) bump(w kv.WorkerKey) { l.of(w).Bumped++ }

// begin books a request that is sent now.
func (l *loads) begin(b *Booking, now time.Time) {
	load := l.of(b.worker)
	b.sent, b.alone, b.atSent = now, len(load.Prefills) == 0, load.tallyAt(now)
	load.InFlight++
	if b.lora != "" {
		b.adapters = load.adapters()
		b.adapter = b.adapters.Begin(b.lora, now)
	}
	if b.remote {
		load.Remote++
	} else {
		l.own[b.worker.Worker]++
	}
	load.peak(now)
	if b.leg == kv.LegDecode {
		load.AwaitedTokens += b.prompt
		b.queued = load.PrefillTokens
	} else {
		load.PrefillTokens += b.uncached
		b.queued = load.PrefillTokens
		prefill := b.prefill()
		if load.Prefills = append(load.Prefills, prefill); prefill.Fetches() {
			load.Fetching++
		}
	}
	l.serves(b, 1)
	l.activate(b.worker, b.sequence)
	if b.id != "" {
		l.byID[b.id] = b
	}
	l.link(b, now)
}

// heard notes that a message about a booking came now.
func (l *loads) heard(b *Booking, now time.Time) {
	if !b.ended.Load() && b != l.newest {
		l.unlink(b)
		l.link(b, now)
	}
	b.heard = now
}

// link puts b behind all others.
func (l *loads) link(b *Booking, now time.Time) {
	b.heard, b.older, b.newer = now, l.newest, nil
	if l.newest != nil {
		l.newest.newer = b
	} else {
		l.oldest = b
	}
	l.newest = b
}

// unlink takes b out of the list.
func (l *loads) unlink(b *Booking) {
	if b.older != nil {
		b.older.newer = b.newer
	} else {
		l.oldest = b.newer
	}
	if b.newer != nil {
		b.newer.older = b.older
	} else {
		l.newest = b.older
	}
	b.older, b.newer = nil, nil
}

// firstToken notes that the prompt of a booked request has been computed: it
// decodes from now on.
func (l *loads) firstToken(b *Booking, now time.Time) {
	load := l.of(b.worker)
	load.tallyAt(now)
	load.ContextTokens += b.prompt
	l.serves(b, -1)
	if b.leg == kv.LegDecode {
		load.AwaitedTokens -= b.prompt
		b.first, b.atFirst = now, load.done
		return
	}
	load.done.prompts++
	load.done.tokens += b.uncached
	if b.answeredWhole || now.Sub(load.Load.FirstToken) > samePass {
		load.done.passes++
	}
	b.first, b.atFirst = now, load.done
	load.PrefillTokens -= b.uncached
	if i := b.among(load.Prefills); i >= 0 {
		if load.Prefills[i].Fetches() {
			load.Fetching--
		}
		load.Prefills = slices.Delete(load.Prefills, i, i+1)
	}
	if !b.answeredWhole {
		load.Cell.Late(now, now.Sub(b.sent)-b.promised)
		if now.Sub(load.Load.FirstToken) > samePass {
			load.passBefore = load.Load.FirstToken
		}
		load.Load.FirstToken = now
	}
}

// end takes a finished request off, after firstToken.
func (l *loads) end(b *Booking, now time.Time) {
	load := l.of(b.worker)
	load.tallyAt(now)
	load.InFlight--
	if b.adapters != nil {
		b.adapters.End(b.lora, now)
	}
	if b.remote {
		load.Remote--
	} else if l.own[b.worker.Worker]--; l.own[b.worker.Worker] == 0 {
		delete(l.own, b.worker.Worker)
	}
	load.ContextTokens -= b.prompt
	if load.output -= b.outputWeight; load.InFlight == 0 {
		load.output = 0 // what rounding left
	}
	l.deactivate(b.worker, b.sequence)
	l.unlink(b)
	if b.id != "" {
		delete(l.byID, b.id)
	}
	if load.InFlight == 0 {
		l.drop(b.worker)
	}
}

// outputBlock adds a block to a request's answer. A share is what each block
// counts from now on that no other request has.
func (l *loads) outputBlock(b *Booking, share *float64) {
	load := l.of(b.worker)
	b.outputs++
	weight := b.outputWeight + 1
	if share != nil {
		each := min(max(*share, 0), 1)
		weight = float64(b.outputs) * each
		for i := len(b.sequence) - 1; i >= 0 && l.active.requests(b.sequence[i], load.number) == 1; i-- {
			load.weigh(b.sequence[i], each) // all before one that is shared are shared
		}
	}
	load.output += weight - b.outputWeight
	b.outputWeight = weight
	load.sumBlocks()
}

// outcome sums up a request that is ending now with that many tokens, before end.
func (l *loads) outcome(b *Booking, output int, now time.Time) policy.Outcome {
	o := policy.Outcome{
		Worker: b.worker, Leg: b.leg, Prompt: b.prompt, Uncached: b.uncached, Output: output, Alone: b.alone,
		FirstToken: b.first.Sub(b.sent), Decode: now.Sub(b.first), Adapter: b.adapter,
	}
	if b.lower != (kv.LowerBlocks{}) || b.pull.Tokens > 0 {
		o.Loads, o.Loaded, o.Tiers = b.loads, b.cached == b.device+b.lower.Total(), l.of(b.worker).tiers()
	}
	if b.pull.Tokens > 0 {
		o.Pulled, o.Loaded = b.pull.Blocks*b.unit, b.pulled == policy.PullCame
	}
	o.Before = b.atFirst.since(b.atSent, o.FirstToken)
	o.During = l.of(b.worker).tallyAt(now).since(b.atFirst, o.Decode)
	return o.Narrowed(l.of(b.worker).Cell)
}

// activate books the blocks of a prompt, by sequence hash, on w.
func (l *loads) activate(w kv.WorkerKey, sequence []uint64) {
	load := l.of(w)
	for _, h := range sequence {
		if l.active.add(h, load.number) {
			load.blocks++
		}
	}
	load.sumBlocks()
}

// deactivate undoes activate on w.
func (l *loads) deactivate(w kv.WorkerKey, sequence []uint64) {
	load := l.of(w)
	for _, h := range sequence {
		if !l.active.remove(h, load.number) {
			continue
		}
		load.blocks--
		if len(load.weights) > 0 {
			load.weigh(h, 1)
		}
	}
	load.sumBlocks()
}

// snapshot looks up what requests in flight have of a prompt, for activeOn.
func (l *loads) snapshot(views []view) {
	l.shared = l.active.prefixes(views[0].sequence, l.shared)
	for i := range views[1:] {
		v := &views[1+i]
		l.more = l.active.prefixes(v.sequence, l.more)
		for number, blocks := range l.more { // a worker has blocks of one size
			l.shared[number] = max(l.shared[number], int32(v.times)*blocks)
		}
	}
}

// activeOn returns how many leading units of the prompt of snapshot the requests in
// flight on the worker of that number have in theirs.
func (l *loads) activeOn(number uint32) int {
	if int(number) >= len(l.shared) {
		return 0
	}
	return int(l.shared[number])
}

// get returns w's load as of now; an unknown worker is idle.
func (l *loads) get(w kv.WorkerKey, now time.Time) policy.Load {
	if load := l.byWorker[w]; load != nil {
		return *asOf(load.Load, now)
	}
	return policy.Load{}
}

// isFresh reports whether what the worker published is recent enough to be used.
func isFresh(l *policy.Load, now time.Time) bool {
	return !l.At.IsZero() && now.Sub(l.At) < loadFreshFor
}

// asOf brings the load up to now and returns it, not a copy: the decision among
// thousands of workers reads little of each. Only the router's lock keeps it as it is.
func asOf(l *policy.Load, now time.Time) *policy.Load {
	fresh := isFresh(l, now)
	if fresh != l.Fresh { // what is only read stays shared between processors
		l.Fresh = fresh
	}
	if !fresh && l.Foreign != 0 {
		l.Foreign = 0
	}
	return l
}

// silence forgets what w published: it is down, and its next incarnation starts
// idle. Bookings stay until their requests end.
func (l *loads) silence(w kv.WorkerKey) {
	if load := l.byWorker[w]; load != nil {
		load.Published, load.Fresh = policy.Published{}, false
		load.Bumped, load.Foreign, load.Fill, load.Adapters, load.Cell = 0, 0, 0, nil, nil
		load.probe, load.growsFrom, load.engine, load.State = 0, time.Time{}, engine{}, 0
		load.gone = true
		l.drop(w)
	}
}

// expect keeps t, which is up, even while it has no bookings, and returns its entry.
func (l *loads) expect(t kv.Target) *workerLoad {
	load := l.of(t.Key)
	load.gone, load.role = false, t.Role
	return load
}

// drop forgets w if it is gone and has no bookings.
func (l *loads) drop(w kv.WorkerKey) {
	if load := l.byWorker[w]; load.gone && load.InFlight == 0 {
		delete(l.byWorker, w)
		l.unused = append(l.unused, load.number)
	}
}

// of returns w's entry, a new one if there is none.
func (l *loads) of(w kv.WorkerKey) *workerLoad {
	load := l.byWorker[w]
	if load == nil {
		load = &workerLoad{Load: new(policy.Load), times: 1, number: uint32(len(l.byWorker) + len(l.unused))}
		if last := len(l.unused) - 1; last >= 0 {
			load.number, l.unused = l.unused[last], l.unused[:last]
		}
		l.byWorker[w] = load
	}
	return load
}

// among returns the place of b in prefills, which are in the order in which they were sent;
// -1: it is not among them.
func (b *Booking) among(prefills []policy.Prefill) int {
	want := b.prefill()
	from, _ := slices.BinarySearchFunc(prefills, want.Sent, func(p policy.Prefill, sent time.Time) int { return p.Sent.Compare(sent) })
	if i := slices.Index(prefills[from:], want); i >= 0 {
		return from + i
	}
	return slices.Index(prefills, want)
}
