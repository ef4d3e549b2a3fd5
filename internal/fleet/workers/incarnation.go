package workers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/process"
)

// incarnation is the time between a worker's start (or first answer) and its
// end, with the goroutines that follow it. One goroutine uses it.
type incarnation struct {
	f          *Fleet
	w          *worker
	ctx        context.Context
	cancel     context.CancelFunc
	followers  sync.WaitGroup // end with ctx
	began      time.Time      // of a started worker that is ready: when it became that
	generation int

	engine kv.Engine         // that it runs, as far as known
	info   *probe.ServerInfo // of an SGLang server; nil: unknown
	ranks  int               // data-parallel ranks of an SGLang server; 0: unknown
	heard  probe.Hearing     // of an SGLang server's load sockets
	stuck  atomic.Bool       // an SGLang server's schedulers do not answer
	shown  atomic.Int64      // when its engine last showed progress beside its answers, Unix ns

	reported probe.Caches // of a vLLM server, as far as its metrics page has been read

	index      radix.Index  // of its blocks
	blockSize  int          // tokens
	eventBlock atomic.Int64 // the same by its events; 0: they have not shown that it is another

	resizeAfter time.Time     // when its events may be followed anew for their block size
	resizePause time.Duration // after that

	disagg     kv.Disagg    // its role in disaggregated serving, as far as known
	served     probe.Models // as last reported
	modelsAt   time.Time    // when that was
	targets    []kv.Target
	announced  map[kv.WorkerKey]kv.Target // those that Up was called for
	loaded     map[kv.WorkerKey]bool      // ranks with followed load
	loadsCtx   context.Context            // of the goroutines that follow loads
	stopLoads  context.CancelFunc         // ends loadsCtx; nil: there are none
	watched    bool                       // watchEngine runs
	up         bool
	answered   bool // it has been healthy, in this incarnation or before
	met        bool // its URL has answered anything, in this incarnation, or it has been healthy before
	unanswered bool // registered, up, and silent for so long that the router itself sends it nothing
	gone       bool // nothing listens at its address any more
	closed     bool // nothing did while it drained: the next answer is another process's
	misses     health.Misses

	warnedOfEvents bool // warnOfEvents has nothing more to say
	mute           bool // its engine does not report its state
}

// begin opens the next incarnation of a worker; its end must be called.
func (f *Fleet) begin(ctx context.Context, w *worker) *incarnation {
	in := &incarnation{f: f, w: w, index: f.index, blockSize: f.cfg.BlockSize, began: time.Now(), announced: map[kv.WorkerKey]kv.Target{},
		loaded: map[kv.WorkerKey]bool{}}
	in.ctx, in.cancel = context.WithCancel(ctx)
	if !w.attached {
		in.engine = f.cfg.Engine
	}
	f.update(w, func(s *Status) {
		s.Generation++
		in.generation, s.Engine, s.Predictions, s.Speculation = s.Generation, in.engine, "", ""
	})
	in.setDisagg(w.spec.Disagg)
	return in
}

// setDisagg sets the worker's role in disaggregated serving, for the targets that are set
// from now on.
func (in *incarnation) setDisagg(d kv.Disagg) {
	in.disagg = d
	in.f.update(in.w, func(s *Status) { s.Disagg = d })
}

// end takes the worker out of routing, ends the goroutines that follow it, and only then
// empties its index, so that no late event fills it again.
func (in *incarnation) end(reason string) {
	in.markDown(reason)
	in.forget()
	in.f.members.Leave(in.w.id)
}

// join selects the index of the worker's model for its blocks.
func (in *incarnation) join(serves kv.Served) (err error) {
	index, err := in.f.members.Join(in.w.id, serves)
	if err == nil {
		in.index = index
		if index != in.f.index {
			// a peer may have taken it for one of the default model
			_, _ = in.f.index.Apply(kv.WorkerKey{Worker: in.w.id}, &radix.Change{Kind: radix.Forgotten})
		}
	}
	return err
}

// restart ends all that follows the worker, so that it can be followed anew until ctx is done.
func (in *incarnation) restart(ctx context.Context) {
	in.forget()
	in.ctx, in.cancel = context.WithCancel(ctx)
	in.stopLoads, in.watched = nil, false
	clear(in.loaded)
}

// forget ends the goroutines that follow the worker, and then empties its index.
func (in *incarnation) forget() {
	in.cancel()
	in.followers.Wait()
	in.w.mu.Lock()
	for _, stream := range in.w.streams {
		stream.Close()
	}
	clear(in.w.streams)
	clear(in.w.accuracy)
	in.w.mu.Unlock()
	in.w.claims.renew()
	_, _ = in.index.Apply(kv.WorkerKey{Worker: in.w.id}, &radix.Change{Kind: radix.Forgotten}) // cannot fail
}

// followEvents reads one event stream until the incarnation ends, unless KV events are
// off.
func (in *incarnation) followEvents(source events.Source) {
	if !in.f.cfg.KVEvents || !in.w.mayFollow(source) || !in.claim(&source) {
		return
	}
	source.BlockSize = in.blockSize
	source.Seeded = in.index.AllBlocks(source.Worker) > 0 // only a peer's dump can be there already
	stream := events.NewStream(source, in.index, events.Options{
		OnLag: func(d time.Duration) {
			in.lives()
			in.f.listener.EventLag(source.Worker, d)
		},
		OnCleared:   func() { in.f.members.Cleared(source.Worker) },
		OnBlockSize: in.noteBlockSize,
		Peers:       in.f.deps.Peers, Rarer: in.f.times, Edges: in.f.deps.Edges,
	}, in.w.logger(in.f.log))
	if in.blockSize == in.f.cfg.BlockSize { // a snapshot has blocks of one size
		in.f.snapshot.Resume(stream)
	}
	in.w.mu.Lock()
	if len(in.w.streams) == 0 {
		in.w.status.KVEvents, in.w.status.Replay = source.Endpoint, source.Replay
	}
	in.w.traits = in.traits()
	stream.SetTraits(in.w.traits)
	in.w.streams[source.Worker] = stream
	in.w.mu.Unlock()
	in.followers.Go(func() { stream.Run(in.ctx) })
}

// setTargets sets the routing targets of the worker: every rank that it reports or that
// has an event stream, or the worker as a whole.
func (in *incarnation) setTargets(served probe.Models, sources []events.Source) {
	in.served, in.modelsAt = served, time.Now()
	var ranks []uint32
	for rank := range uint32(in.ranks) {
		ranks = append(ranks, rank)
	}
	if len(ranks) == 0 {
		for _, source := range sources {
			ranks = append(ranks, source.Worker.Rank)
		}
	}
	if len(ranks) == 0 {
		ranks = []uint32{0}
	}
	var batched, blocks int
	if !in.w.attached {
		batched, blocks = in.f.cfg.MaxBatchedTokens, in.f.cfg.TotalBlocks
	}
	if in.info != nil {
		batched = cmp.Or(batched, in.info.MaxBatchedTokens())
	}
	in.aim(ranks, in.caches(ranks), kv.Target{Ranks: len(ranks), Models: served.Names, Adapters: served.Adapters,
		MaxBatchedTokens: tokensOf(batched), TotalBlocks: blocks})
	in.f.update(in.w, func(s *Status) { s.Models, s.Ranks = served.Names, ranks })
}

// aim makes the ranks the routing targets of the worker, each like t, and bounds their event
// streams. sizes has the blocks of those ranks that do not have t's.
func (in *incarnation) aim(ranks []uint32, sizes map[uint32]int, t kv.Target) {
	if in.engine != kv.EngineSGLang { // SGLang has no servers of some ranks
		t.FirstRank = slices.Min(ranks)
	}
	t.URL, t.Engine, t.Generation, t.Bearer, t.Disagg = in.w.spec.URL, in.engine, in.generation, in.w.bearer(), in.disagg
	t.BlockSize = int32(in.blockSize)
	in.targets = in.targets[:0]
	in.w.mu.Lock()
	for _, rank := range ranks {
		target := t
		target.Key = kv.WorkerKey{Worker: in.w.id, Rank: rank}
		target.TotalBlocks = cmp.Or(sizes[rank], t.TotalBlocks)
		in.targets = append(in.targets, target)
		if stream := in.w.streams[target.Key]; stream != nil {
			stream.SetCapacity(target.TotalBlocks)
		}
	}
	in.w.mu.Unlock()
	in.f.settle(in.w)
	if in.w.spec.Kind != kv.KindRouter {
		in.reviseTargets()
	}
}

// tokensOf bounds a number of tokens from outside.
func tokensOf(n int) int32 { return int32(min(max(n, 0), kv.MaxTokens-1)) }

// loadOf returns where a rank publishes its load; empty: only on its pages.
func (in *incarnation) loadOf(rank uint32) string {
	if in.w.attached {
		return in.info.Load(in.w.spec, rank)
	}
	if in.engine == kv.EngineSGLang && !in.f.cfg.KVEvents {
		return "" // it publishes load only beside events
	}
	return in.f.cfg.Ports.LoadEndpoint(int(in.w.id), int(rank))
}

// followLoads reads every target's load until the incarnation ends: from its
// rank's ZMQ endpoint, if there is one, else from the worker's /metrics, which is
// polled for all of them together.
func (in *incarnation) followLoads() {
	if in.stopLoads == nil {
		in.loadsCtx, in.stopLoads = context.WithCancel(in.ctx)
	}
	ctx := in.loadsCtx
	follow := func(s probe.LoadSource) {
		in.followers.Go(func() { in.f.probe.FollowLoad(ctx, s, in.w.logger(in.f.log), in.f.members.Load) })
	}
	counters := &probe.Counters{Transfers: in.f.members.Transferred, Adapters: in.f.members.ShowAdapters}
	pages := probe.LoadSource{URL: in.w.spec.URL, Engine: in.engine, Key: in.w.currentKey, Lives: in.lives, Rest: in.rest,
		Restarted: in.emptyAssumed}
	all := pages
	for _, target := range in.targets {
		if in.loaded[target.Key] {
			continue
		}
		in.loaded[target.Key] = true
		all.Ranks, all.Apart = append(all.Ranks, target.Key), target.Ranks > 1
		socket := in.loadOf(target.Key.Rank)
		if socket == "" {
			pages.Ranks, pages.Apart = append(pages.Ranks, target.Key), target.Ranks > 1
			continue
		}
		s := probe.LoadSource{URL: pages.URL, Engine: pages.Engine, Key: pages.Key, Ranks: []kv.WorkerKey{target.Key}, Socket: socket,
			Lives: in.lives, Apart: target.Ranks > 1}
		if in.engine == kv.EngineSGLang {
			s.Heard = &in.heard
			in.heard.Note(target.Key, time.Time{})
		}
		follow(s)
	}
	if len(pages.Ranks) == len(all.Ranks) { // one poll reads both
		pages.Counters = counters
	} else {
		all.Counters = counters
		in.followers.Go(func() { in.f.probe.FollowCounters(ctx, all, in.w.logger(in.f.log)) })
	}
	if len(pages.Ranks) > 0 {
		follow(pages)
	}
}

// livesEvery is the minimum time between two signs of life of a worker that are passed on: each
// takes the router's lock.
const livesEvery = 250 * time.Millisecond

// lives passes on that the worker's engine makes progress.
func (in *incarnation) lives() {
	now, last := time.Now().UnixNano(), in.shown.Load()
	if now-last >= int64(livesEvery) && in.shown.CompareAndSwap(last, now) {
		in.f.members.Lives(in.w.id, in.generation)
	}
}

// followLoadsAnew is followLoads of a worker of which more is known than when its load
// was first followed.
func (in *incarnation) followLoadsAnew() {
	in.stopLoads()
	in.stopLoads = nil
	clear(in.loaded)
	in.followLoads()
}

// markUp makes the worker ready and announces its targets.
func (in *incarnation) markUp() {
	in.f.everReady.Store(true)
	in.up, in.misses = true, health.Misses{}
	if in.engine == kv.EngineSGLang && !in.watched && in.f.timing.engineEvery > 0 {
		in.watched = true
		spec := in.w.spec
		in.followers.Go(func() { in.watchEngine(spec) })
	}
	in.f.update(in.w, func(s *Status) { s.State, s.Stage, s.LastError = StateReady, process.StageReady, "" })
	in.announce()
}

// announce makes the targets known that are not yet, or whose cache is known otherwise.
func (in *incarnation) announce() {
	for _, target := range in.targets {
		before, known := in.announced[target.Key]
		if !known || before.Known != target.Known || before.BlockSize != target.BlockSize {
			in.announced[target.Key] = target
			in.f.members.Up(target)
		}
	}
}

// announceAnew announces the targets of a worker that is up again, as they have changed.
func (in *incarnation) announceAnew() {
	if in.up {
		clear(in.announced)
		if in.unanswered {
			in.announce()
			return
		}
		in.markUp()
	}
}

// markUnanswered keeps the router's own requests from a registered worker that is up
// and has never answered. It stays up for clients that forward their requests
// themselves: they may reach what the router does not.
func (in *incarnation) markUnanswered(reason string) {
	in.unanswered = true
	in.f.update(in.w, func(s *Status) { s.State, s.LastError = StateConnecting, reason })
	for i := range in.targets {
		in.targets[i].Unanswered = true
	}
	clear(in.announced)
	in.announce()
	for _, target := range in.targets {
		in.f.listener.Down(target, reason)
	}
}

// markDown takes a worker that is up out of routing.
func (in *incarnation) markDown(reason string) {
	if !in.up {
		return
	}
	in.up = false
	in.f.update(in.w, func(s *Status) { s.State, s.LastError = StateDown, reason })
	for _, key := range slices.SortedFunc(maps.Keys(in.announced), kv.WorkerKey.Compare) {
		in.f.down(in.announced[key], reason)
	}
	clear(in.announced)
}

// checkHealth checks a worker: it is down at once if nothing listens there, if its address is
// this router's, or if it has been healthy and reports that it is not; after some checks without
// an answer as overdue says. It is up with the next good answer. A registered worker
// whose URL has never answered is unanswered instead of down. With a good answer it is
// also asked for its models, now and then.
func (in *incarnation) checkHealth() {
	began := time.Now()
	err := in.checkAlive()
	if in.ctx.Err() != nil {
		return
	}
	in.met = in.met || err == nil || probe.Answered(err)
	switch {
	case in.closed && (err == nil || probe.Rejected(err)):
		in.gone = true
		in.markDown("it was restarted")
		return
	case err == nil:
		in.answered = true
		in.markHealthy()
		in.askState()
		if !in.w.registered() && time.Since(in.modelsAt) >= in.f.timing.modelsEvery*time.Duration(in.f.times()) {
			in.lookAtModels()
		}
		return
	case !in.answered && probe.Rejected(err): // a server without /health is known to run, and no more
		in.markHealthy()
		return
	case in.w.drains() && mayDrain(err):
		if probe.Refused(err) && !in.closed {
			in.closed = true
			in.f.log.Info(fmt.Sprintf("%s: refuses new connections; its in-flight requests may finish", in.w))
		}
		return
	case in.answered && web.OwnFault(err):
		in.f.log.Warn(fmt.Sprintf("%s: cannot check its health because the router lacks file descriptors or ports: raise the limit of open "+
			"files (ulimit -n), or lower --max-connections", in.w), "error", err)
		return
	}
	in.misses.Add(began)
	in.gone = probe.Refused(err)
	saysNo := in.answered && probe.Answered(err)
	back := errors.Is(err, probe.ErrLeadsBack)
	if !in.up || !in.gone && !saysNo && !back && !in.overdue(err, began) {
		return
	}
	if in.w.registered() && !in.met && !back {
		if in.gone = false; !in.unanswered {
			in.f.log.Warn(fmt.Sprintf("%s: does not answer: its requests of the OpenAI port go to other workers; the router port still selects it",
				in.w), "url", in.w.spec.URL, "error", err)
			in.markUnanswered(err.Error())
		}
		return
	}
	level := slog.LevelWarn
	if back {
		level = slog.LevelError // it will not recover by itself
	}
	in.f.log.Log(in.ctx, level, fmt.Sprintf("%s: down: %v", in.w, err), "url", in.w.spec.URL)
	in.markDown(err.Error())
}

// overdue notes that a worker that is up has not answered a health check, sent at that time, which
// alone proves nothing, and reports whether it is down.
func (in *incarnation) overdue(err error, sent time.Time) bool {
	var lived, busy time.Time
	var stuck errStuck
	isStuck, now := errors.As(err, &stuck), time.Now()
	if isStuck || in.misses.Avoid(now) {
		lived, busy = in.f.members.Missed(in.w.id, in.generation, sent)
	}
	if isStuck {
		return now.Sub(lived) >= time.Duration(stuck)
	}
	return in.misses.Down(probe.TimedOut(err), in.met || in.answered, lived, busy, time.Duration(in.f.silence.Load()), now)
}

// mayDrain reports whether a draining worker may still finish its requests after this
// error of a health check: it accepts no connections, or answers that it ends.
func mayDrain(err error) bool { return probe.Refused(err) || probe.Answered(err) }

// markHealthy notes an answer; a worker that was down may be routed to again.
func (in *incarnation) markHealthy() {
	switch {
	case in.unanswered:
		in.f.log.Info(fmt.Sprintf("%s: answers now", in.w))
		in.unanswered = false
		for i := range in.targets {
			in.targets[i].Unanswered = false
		}
		clear(in.announced)
		in.markUp()
	case !in.up:
		in.f.log.Info(fmt.Sprintf("%s: up again", in.w))
		in.markUp()
	}
	if in.misses.Count > 0 {
		in.f.members.Answers(in.w.id, in.generation)
	}
	in.misses, in.gone = health.Misses{}, false
}

// pause is the time until the next health check.
func (in *incarnation) pause() time.Duration {
	if in.up && in.misses.Count > 0 && !in.unanswered {
		return in.f.timing.missPause
	}
	return in.f.pauseAfter(in.misses.Count)
}

// pauseAfter is the time between health checks after that many misses in a row. It is
// jittered, so that workers are not all checked together.
func (f *Fleet) pauseAfter(misses int) time.Duration {
	const many = 10 // it will not be back soon
	if misses > many {
		return spread(4 * f.timing.healthEvery)
	}
	if times := rarer(len(f.all())); times > 1 {
		return probe.Together(spread(f.timing.healthEvery * time.Duration(times)))
	}
	return spread(f.timing.healthEvery)
}

// rarer is how many times longer the pause between health checks is for that many workers:
// checking 200 costs as much as 50, and 2,048 as much as 512. Requests that fail cause
// checks of their own.
func rarer(workers int) int { return max(min(max(workers/50, 1), 4), min(workers/128, 16)) }

// unhurried is the number of workers up to which those at rest are asked as often as one.
const unhurried = 512

// times is how many times more rarely a worker at rest is asked because of all others.
func (f *Fleet) times() int { return max(1, len(f.all())/unhurried) }

// rest is the time between polls of the worker's load while it is idle. The first requests
// end it, at the next look.
func (in *incarnation) rest() time.Duration {
	times := in.f.times()
	if times == 1 || in.f.members.Busy(in.w.id) {
		return 0
	}
	return in.f.timing.restEvery * time.Duration(times)
}

// checkWithin runs a health check of the worker within its limit, which is at least healthLimit.
func (f *Fleet) checkWithin(ctx context.Context, w *worker, check func(limit time.Duration) error) error {
	limit, began := max(w.patience, f.timing.healthLimit), time.Now()
	err := check(limit)
	if late := probe.TimedOut(err); ctx.Err() == nil && (late || err == nil || probe.Answered(err)) {
		w.patience = health.NextLimit(limit, time.Since(began), late, f.timing.healthMost)
	}
	return err
}

// spread shortens a pause by up to a fifth.
func spread(d time.Duration) time.Duration { return d - rand.N(d/5+1) }

// traits returns what is known of the worker's engine: by the arguments of a started one,
// and by what it reports.
func (in *incarnation) traits() (t kv.Traits) {
	if !in.w.attached {
		t = in.f.cfg.Traits
	}
	t.Block, t.Retention = cmp.Or(in.reported.Block, t.Block), cmp.Or(in.reported.Retention, t.Retention)
	return t
}

// learn asks an attached vLLM server, before its events are followed, for what decides
// where their blocks belong. Without an answer, such blocks are not found.
func (in *incarnation) learn() {
	defer in.sizeBlocks(0)
	if in.engine == kv.EngineSGLang {
		return
	}
	var err error
	if in.reported, err = in.f.probe.Caches(in.ctx, in.w.spec, in.engine, nil, nil); err != nil {
		in.f.log.Debug("worker does not report its KV cache", "worker", in.w.id, "error", err)
	}
}

// caches asks the worker about the KV caches of its ranks. It returns how many blocks each
// has; ranks of unknown size are left out.
func (in *incarnation) caches(ranks []uint32) map[uint32]int {
	info := in.info
	if info == nil && in.engine == kv.EngineSGLang { // the router has started it
		info, _ = in.f.probe.ServerInfo(in.ctx, in.w.spec) // or Caches has the error
		in.describe(info)
	}
	reported, err := in.f.probe.Caches(in.ctx, in.w.spec, in.engine, info, ranks)
	blocks := reported.Tokens
	for rank := range blocks {
		blocks[rank] /= in.blockSize
	}
	if (err != nil || len(blocks) == 0) && in.f.cfg.Assumes && !in.f.cfg.KVEvents {
		in.f.log.Warn(fmt.Sprintf("%s: does not report the size of its KV cache: its prompts count as cached for --router-ttl-secs", in.w),
			"error", err)
	}
	if in.engine != kv.EngineSGLang {
		in.reported = reported
		in.doubtRanks(reported.Engines, len(ranks))
		in.w.mu.Lock()
		defer in.w.mu.Unlock()
		in.w.traits = in.traits()
		for key, stream := range in.w.streams {
			of := in.w.traits
			if a := in.w.accuracy[key]; a != nil {
				of.DropsLast = a.drops
			}
			stream.SetTraits(of)
		}
	}
	return blocks
}

// doubtRanks notes that a vLLM server has more data-parallel ranks than the router knows,
// so that it spreads requests over them by itself.
func (in *incarnation) doubtRanks(engines, known int) {
	doubt := ""
	if in.f.cfg.KVEvents && engines > known {
		doubt = fmt.Sprintf("unknown: the server has %d data-parallel ranks, and the router knows the KV events of %d", engines, known)
		in.f.log.Warn(fmt.Sprintf("%s: predictions are not exact: it does not report which rank publishes where, and chooses the rank of each "+
			"request itself", in.w),
			"url", in.w.spec.URL, "ranks", engines, "known", known, "remedy", "run a vLLM with /kv_event_sources, or a server for each rank")
	}
	in.f.update(in.w, func(s *Status) { s.Predictions = doubt })
}
