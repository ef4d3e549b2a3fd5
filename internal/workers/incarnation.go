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

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/process"
	"kvrouter/internal/radix"
	"kvrouter/internal/web"
)

// incarnation is the time between a worker's start (or first answer) and its
// end, with the goroutines that follow it. One goroutine uses it.
type incarnation struct {
	f          *Fleet
	w          *worker
	ctx        context.Context
	cancel     context.CancelFunc
	followers  sync.WaitGroup // end with ctx
	began      time.Time
	generation int

	engine kv.Engine   // that it runs, as far as known
	info   *serverInfo // what it tells as an SGLang server; nil: nothing
	ranks  int         // data-parallel ranks of an SGLang server; 0: not told
	heard  hearing     // of an SGLang server's load sockets
	stuck  atomic.Bool // an SGLang server's schedulers do not answer

	index     radix.Index // of its blocks
	blockSize int         // tokens

	disagg     kv.Disagg // its part where prefill and decode are apart, as far as known
	served     modelList // by the worker, as last told
	modelsAt   time.Time // when that was
	targets    []kv.Target
	announced  map[kv.WorkerKey]kv.Target // those that Up was called for
	loaded     map[kv.WorkerKey]bool      // those whose load is followed
	loadsCtx   context.Context            // of what follows loads
	stopLoads  context.CancelFunc         // ends what follows loads; nil: nothing does
	watched    bool                       // watchEngine runs
	up         bool
	answered   bool // it has said that it is well, in this incarnation or before
	gone       bool // nothing listens at its address any more
	closed     bool // nothing did while it drained: what answers next is another process
	misses     int  // looks in a row without an answer
	toldSilent bool
}

// begin opens the next incarnation of a worker; its end must be called.
func (f *Fleet) begin(ctx context.Context, w *worker) *incarnation {
	in := &incarnation{f: f, w: w, index: f.index, blockSize: f.cfg.BlockSize, began: time.Now(), announced: map[kv.WorkerKey]kv.Target{}, loaded: map[kv.WorkerKey]bool{}}
	in.ctx, in.cancel = context.WithCancel(ctx)
	if !w.attached {
		in.engine = f.cfg.Engine
	}
	f.update(w, func(s *Status) {
		s.Generation++
		in.generation, s.Engine = s.Generation, in.engine
	})
	in.takePart(w.Spec.Disagg)
	return in
}

// takePart sets the worker's part where prefill and decode are apart, for the
// targets that are set from now on.
func (in *incarnation) takePart(d kv.Disagg) {
	in.disagg = d
	in.f.update(in.w, func(s *Status) { s.Disagg = d })
}

// end takes the worker out of routing, ends what follows it, and only then
// empties its index, so that no late event fills it again.
func (in *incarnation) end(reason string) {
	in.markDown(reason)
	in.forget()
	in.f.hooks.Leave(in.w.id)
}

// join has the worker's blocks kept where its model's are.
func (in *incarnation) join(serves kv.Served) (err error) {
	index, size, err := in.f.hooks.Join(in.w.id, serves)
	if err == nil {
		in.index, in.blockSize = index, size
		if index != in.f.index {
			in.f.index.Forget(in.w.id) // a peer may have taken it for one of the default model
		}
	}
	return err
}

// forget ends what follows the worker, and then empties its index.
func (in *incarnation) forget() {
	in.cancel()
	in.followers.Wait()
	in.w.mu.Lock()
	for _, stream := range in.w.streams {
		stream.Close()
	}
	clear(in.w.streams)
	in.w.mu.Unlock()
	in.index.Forget(in.w.id)
}

// followEvents reads one event stream until the incarnation ends, if any are to
// be followed.
func (in *incarnation) followEvents(source events.Source) {
	if !in.f.cfg.KVEvents || !in.w.mayFollow(source) {
		return
	}
	source.BlockSize = in.blockSize
	source.Seeded = in.index.Blocks(source.Worker) > 0 // only a peer's dump can be there already
	stream := events.NewStream(source, in.index, in.w.logger(in.f.log))
	stream.Peers, stream.Edges = in.f.Peers, in.f.Edges
	if in.blockSize == in.f.cfg.BlockSize { // a snapshot has blocks of one size
		in.f.snapshot.Resume(stream)
	}
	if lag := in.f.hooks.Lag; lag != nil {
		stream.OnLag = func(d time.Duration) { lag(source.Worker, d) }
	}
	if source.Worker.Rank == 0 {
		in.f.update(in.w, func(s *Status) { s.KVEvents, s.Replay = source.Endpoint, source.Replay })
	}
	in.w.mu.Lock()
	in.w.streams[source.Worker] = stream
	in.w.mu.Unlock()
	in.followers.Go(func() { stream.Run(in.ctx) })
}

// setTargets sets what of the worker can be routed to: every rank that it tells of or
// that has an event stream, or the worker as a whole.
func (in *incarnation) setTargets(served modelList, sources []events.Source) {
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
	in.targets = in.targets[:0]
	var batched, blocks int
	if !in.w.attached {
		batched, blocks = in.f.cfg.MaxBatchedTokens, in.f.cfg.TotalBlocks
	}
	if in.info != nil {
		batched = cmp.Or(batched, in.info.passTokens())
	}
	sizes := in.cacheSizes(ranks)
	for _, rank := range ranks {
		in.targets = append(in.targets, kv.Target{
			Key: kv.WorkerKey{Worker: in.w.id, Rank: rank}, URL: in.w.Spec.URL, Engine: in.engine, Ranks: len(ranks), Generation: in.generation, Models: served.names, Adapters: served.adapters,
			MaxBatchedTokens: batched, TotalBlocks: cmp.Or(sizes[rank], blocks), Bearer: in.w.bearer(), Disagg: in.disagg,
		})
	}
	in.boundStreams()
	in.f.update(in.w, func(s *Status) { s.Models, s.Ranks = served.names, ranks })
}

// boundStreams tells the event streams how many blocks their ranks can hold.
func (in *incarnation) boundStreams() {
	in.w.mu.Lock()
	defer in.w.mu.Unlock()
	for _, target := range in.targets {
		if stream := in.w.streams[target.Key]; stream != nil {
			stream.SetCapacity(target.TotalBlocks)
		}
	}
}

// followLoads reads every target's load until the incarnation ends: from its
// rank's ZMQ endpoint, if there is one, else from the worker's /metrics, which is
// asked for all of them together. An SGLang server's pages stand in for a socket that
// is not there.
func (in *incarnation) followLoads(endpoint func(rank uint32) string) {
	if in.stopLoads == nil {
		in.loadsCtx, in.stopLoads = context.WithCancel(in.ctx)
	}
	ctx := in.loadsCtx
	follow := func(s loadSource) {
		in.followers.Go(func() { in.f.loads(in.f.reader(in.w), ctx, s, in.f.hooks.Load) })
	}
	pages := loadSource{page: in.w.Spec.URL + "/metrics"}
	if in.engine == kv.EngineSGLang {
		pages.loads = in.w.Spec.URL + loadsPath
	}
	all := pages
	for _, target := range in.targets {
		if in.loaded[target.Key] {
			continue
		}
		in.loaded[target.Key] = true
		socket := endpoint(target.Key.Rank)
		if socket == "" {
			all.ranks, all.apart = append(all.ranks, target.Key), target.Ranks > 1
			continue
		}
		s := loadSource{ranks: []kv.WorkerKey{target.Key}, socket: socket}
		if in.engine == kv.EngineSGLang {
			s.page, s.loads, s.apart, s.heard = pages.page, pages.loads, target.Ranks > 1, &in.heard
			in.heard.note(target.Key, time.Time{})
		}
		follow(s)
	}
	if len(all.ranks) > 0 {
		follow(all)
	}
}

// followLoadsAnew is followLoads for a worker of which more is known than when its load
// was first followed.
func (in *incarnation) followLoadsAnew(endpoint func(rank uint32) string) {
	in.stopLoads()
	in.stopLoads = nil
	clear(in.loaded)
	in.followLoads(endpoint)
}

// reader returns what reads the worker's load and the sizes of its caches.
func (f *Fleet) reader(w *worker) loadReader {
	return loadReader{client: f.pageClient(w), edges: f.Edges, log: w.logger(f.log)}
}

// markUp makes the worker ready and announces its targets.
func (in *incarnation) markUp() {
	in.f.everReady.Store(true)
	in.up, in.misses = true, 0
	if in.engine == kv.EngineSGLang && !in.watched && in.f.Timing.engineEvery > 0 {
		in.watched = true
		spec := in.w.Spec
		in.followers.Go(func() { in.watchEngine(spec) })
	}
	in.f.update(in.w, func(s *Status) { s.State, s.Stage, s.LastError = StateReady, process.StageReady, "" })
	for _, target := range in.targets {
		if _, known := in.announced[target.Key]; !known {
			in.announced[target.Key] = target
			in.f.hooks.Up(target)
		}
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
		in.f.hooks.Down(in.announced[key], reason)
	}
	clear(in.announced)
}

// checkHealth looks at a worker: down after some looks without an answer, at once
// if nothing listens there, if it leads back to this router, or if it has been well
// and says itself that it is not; up with the next good answer. With a good answer
// it is also asked for its models, now and then.
func (in *incarnation) checkHealth() {
	err := in.look()
	if in.ctx.Err() != nil {
		return
	}
	switch {
	case in.closed && (err == nil || isThere(err)):
		in.gone = true
		in.markDown("it was started anew")
		return
	case err == nil:
		in.answered = true
		in.well()
		if in.w.registry == nil && time.Since(in.modelsAt) >= in.f.Timing.modelsEvery {
			in.lookAtModels()
		}
		return
	case !in.answered && isThere(err): // of a server that has no /health only this can be told
		in.well()
		return
	case in.w.drains() && mayDrain(err):
		if isGone(err) && !in.closed {
			in.closed = true
			in.f.log.Info(fmt.Sprintf("%s: takes no connections any more, and may end what it has begun", in.w))
		}
		return
	case in.answered && web.OwnFault(err):
		in.f.log.Warn(fmt.Sprintf("%s: its health cannot be looked at, for a lack in the router: raise the limit of open files (ulimit -n), or lower --max-connections", in.w), "error", err)
		return
	}
	in.misses++
	in.gone = isGone(err)
	var stuck errStuck
	saysNo := in.answered && (isStatus(err) || errors.As(err, &stuck))
	back := errors.Is(err, errLeadsBack)
	if !in.up || !in.gone && !saysNo && !back && in.misses < in.f.Timing.healthMisses {
		return
	}
	level := slog.LevelWarn
	if back {
		level = slog.LevelError // it will not mend by itself
	}
	in.f.log.Log(in.ctx, level, fmt.Sprintf("%s: down: %v", in.w, err), "url", in.w.Spec.URL)
	in.markDown(err.Error())
}

// well notes an answer; a worker that was down may be routed to again.
func (in *incarnation) well() {
	if !in.up {
		in.f.log.Info(fmt.Sprintf("%s: answers again", in.w))
		in.markUp()
	}
	in.misses, in.gone = 0, false
}

// pause is the time until the next look at the worker.
func (in *incarnation) pause() time.Duration {
	if in.up && in.misses > 0 {
		return in.f.Timing.missPause
	}
	return in.f.pauseAfter(in.misses)
}

// pauseAfter is the time between looks after so many misses in a row. It differs
// from worker to worker, so that they are not all looked at together.
func (f *Fleet) pauseAfter(misses int) time.Duration {
	const many = 10 // it will not be back in a moment
	if misses > many {
		return spread(4 * f.Timing.HealthEvery)
	}
	return spread(f.Timing.HealthEvery * time.Duration(rarer(len(f.Members()))))
}

// rarer is how many times longer the pause between looks is among so many workers: the
// looks at 200 cost as much as those at 50.
func rarer(workers int) int { return min(max(workers/50, 1), 4) }

// spread shortens a pause by up to a fifth.
func spread(d time.Duration) time.Duration { return d - rand.N(d/5+1) }

// cacheSizes asks the worker how many blocks the KV cache of each rank has;
// those that it does not tell are left out.
func (in *incarnation) cacheSizes(ranks []uint32) map[uint32]int {
	var blocks map[uint32]int
	var err error
	if in.engine == kv.EngineSGLang {
		blocks, err = in.sglangSizes(ranks)
	} else {
		var sizes cacheSizes
		sizes, err = in.f.reader(in.w).cacheSizes(in.ctx, in.w.Spec.URL+"/metrics")
		blocks = map[uint32]int{}
		for rank, tokens := range sizes {
			blocks[rank] = tokens / in.blockSize
		}
	}
	if (err != nil || len(blocks) == 0) && in.f.cfg.AssumesSizes {
		in.f.log.Warn(fmt.Sprintf("%s: does not tell the size of its KV cache: its prompts count as cached for --router-ttl-secs", in.w), "error", err)
	}
	return blocks
}
