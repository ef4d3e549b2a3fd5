package main

import (
	"context"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// mockRank is one data-parallel rank of a simulated worker: an engine of its own
// with its own cache, KV events and load. The engine belongs to one goroutine;
// do reaches it.
type mockRank struct {
	w        *MockWorker
	number   int
	events   *mockEvents // nil: publishes none
	loads    *ZMQPublisher
	counts   mockCounts
	inFlight atomic.Int64 // choices being answered

	wake chan struct{} // holds a token when commands has some

	mu       sync.Mutex // guards commands
	commands []func(*SimEngine)

	// What follows belongs to the engine's goroutine.
	engine  *SimEngine
	changes []mockEvent // of the step under way

	loadChanged chan struct{} // holds a token when load is new
	load        atomic.Pointer[mockLoad]
}

// mockLoad is what a rank publishes of its load.
type mockLoad struct {
	Waiting int     `json:"num_waiting_reqs"`
	Running int     `json:"num_running_reqs"`
	Usage   float64 `json:"kv_cache_usage"`
}

// mockCounts are the counters of a rank on the metrics page.
type mockCounts struct {
	promptTokens, generationTokens, prefixQueries, prefixHits, externalHits, finishedLength, finishedStop, aborted atomic.Int64
}

// newMockRank opens the ports of a worker's rank, numbered after those of the
// workers and ranks before it.
func newMockRank(w *MockWorker, number int, sim SimConfig) (*mockRank, error) {
	r := &mockRank{w: w, number: number, wake: make(chan struct{}, 1), loadChanged: make(chan struct{}, 1)}
	r.engine = NewSimEngine(sim, r.cacheChanged)
	r.engine.fetch = func(request *SimRequest) { close(request.Tag.(*mockChoice).fetching) }
	cfg, at := &w.cfg, w.number*w.cfg.Ports.Ranks+number
	var err error
	if cfg.KVEvents {
		if r.events, err = newMockEvents(mockAddress(cfg.Ports.KVEvents+at), mockAddress(cfg.Ports.KVReplay+at), cfg.BlockSize); err != nil {
			return nil, err
		}
		r.events.rank, r.events.array = number, cfg.MockArrayEvents
		r.events.drop, r.events.duplicate, r.events.delay = cfg.MockDropEvents, cfg.MockDuplicateEvents, cfg.MockDelayEvents
		r.events.random = rand.New(rand.NewPCG(w.random.Uint64(), 1))
	}
	if r.loads, err = NewZMQPublisher(mockAddress(cfg.Ports.Load + at)); err != nil {
		r.events.close()
		return nil, err
	}
	return r, nil
}

func (r *mockRank) unlisten() {
	r.events.close()
	r.loads.Close()
}

// mockAddress is where mock workers listen.
func mockAddress(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// do has f called with the engine between two of its steps. It does not wait.
func (r *mockRank) do(f func(*SimEngine)) {
	r.mu.Lock()
	r.commands = append(r.commands, f)
	r.mu.Unlock()
	signalOnce(r.wake)
}

// ask is do, but waits until f has been called; it returns false if the worker
// has ended instead.
func (r *mockRank) ask(ctx context.Context, f func(*SimEngine)) bool {
	done := make(chan struct{})
	r.do(func(e *SimEngine) {
		f(e)
		close(done)
	})
	select {
	case <-done:
		return true
	case <-ctx.Done():
	case <-r.w.ctx.Done():
	}
	return false
}

// submit has the engine begin with an answer; leave must follow. It does not
// wait: refused gets an error if the engine cannot take a choice.
func (r *mockRank) submit(answer *mockAnswer) (refused <-chan error) {
	failed := make(chan error, 1)
	r.inFlight.Add(int64(len(answer.choices)))
	r.do(func(e *SimEngine) {
		for _, c := range answer.choices {
			if err := e.Submit(c.request); err != nil {
				failed <- err
				return
			}
			r.counts.promptTokens.Add(int64(c.prompt))
			r.counts.prefixQueries.Add(int64(c.prompt))
		}
	})
	return failed
}

// leave ends an answer: what its handler has not taken whole is aborted.
func (r *mockRank) leave(answer *mockAnswer) {
	r.inFlight.Add(-int64(len(answer.choices)))
	for _, c := range answer.choices {
		r.counts.prefixHits.Add(c.hits.Load())
		switch {
		case c.sent < c.output:
			r.counts.aborted.Add(1)
			r.do(func(e *SimEngine) { e.Abort(c.request) })
		case c.finish == "stop":
			r.counts.finishedStop.Add(1)
		default:
			r.counts.finishedLength.Add(1)
		}
	}
}

// maxLate is how far the engine's steps may be behind their times before it
// gives up catching up: sleeping is only exact to a millisecond or so.
const maxLate = 20 * time.Millisecond

// step runs the engine, one step after the other, until the worker ends.
func (r *mockRank) step() {
	var due time.Time // when the step under way ends
	for r.w.ctx.Err() == nil {
		r.runCommands()
		took, busy := r.engine.Begin()
		if !busy {
			r.reportLoad()
			select {
			case <-r.w.ctx.Done():
			case <-r.wake:
			}
			due = time.Time{}
			continue
		}
		r.publishChanges()
		now := time.Now()
		if due.Before(now.Add(-maxLate)) {
			due = now
		}
		due = due.Add(took)
		if r.w.cfg.SpeedupRatio > 0 && !r.w.wait(time.Until(due)) {
			return
		}
		if r.w.hung.Load() {
			<-r.w.ctx.Done()
			return
		}
		for _, done := range r.engine.End() {
			r.counts.generationTokens.Add(1)
			done.Tag.(*mockChoice).advance(done)
		}
		r.reportLoad()
	}
}

func (r *mockRank) runCommands() {
	r.mu.Lock()
	commands := r.commands
	r.commands = nil
	r.mu.Unlock()
	for _, f := range commands {
		f(r.engine)
	}
}

// cacheChanged takes in one change of the engine's cache.
func (r *mockRank) cacheChanged(e SimEvent) {
	if !e.Stored {
		// A step's removals are one event, as long as no store comes between.
		if n := len(r.changes); n > 0 && r.changes[n-1].removed != nil {
			r.changes[n-1].removed = append(r.changes[n-1].removed, e.Removed...)
			return
		}
		r.changes = append(r.changes, mockEvent{removed: append([]uint64{}, e.Removed...)})
		return
	}
	choice := e.Request.Tag.(*mockChoice)
	size := r.w.cfg.BlockSize
	change := mockEvent{
		stored: e.Blocks, parent: e.Parent, hasParent: e.HasParent, adapter: choice.answer.adapter,
		tokens: choice.tokens[e.First*size : (e.First+len(e.Blocks))*size],
	}
	if e.First == 0 {
		change.salt = choice.answer.salt
	}
	r.changes = append(r.changes, change)
}

func (r *mockRank) publishChanges() {
	if len(r.changes) > 0 {
		r.events.add(r.changes)
		r.changes = nil
	}
}

// resetPrefixCache empties the cache, which like vLLM it refuses while requests
// hold blocks. The next step publishes it.
func (r *mockRank) resetPrefixCache(e *SimEngine) bool {
	if _, _, usage := e.Load(); usage > 0 {
		return false
	}
	e.Reset()
	r.changes = append(r.changes, mockEvent{cleared: true})
	return true
}

// loadPause and loadRepeat are the shortest and the longest time between two
// messages about a worker's load.
const (
	loadPause  = 5 * time.Millisecond
	loadRepeat = time.Second
)

func (r *mockRank) reportLoad() {
	running, waiting, usage := r.engine.Load()
	r.load.Store(&mockLoad{Waiting: waiting, Running: running, Usage: usage})
	signalOnce(r.loadChanged)
}

// currentLoad is the load after the last step.
func (r *mockRank) currentLoad() mockLoad {
	if load := r.load.Load(); load != nil {
		return *load
	}
	return mockLoad{}
}

// publishLoad sends the newest load when it is new, and from time to time.
func (r *mockRank) publishLoad() {
	repeat := time.NewTicker(loadRepeat)
	defer repeat.Stop()
	for {
		select {
		case <-r.w.ctx.Done():
			return
		case <-r.loadChanged:
		case <-repeat.C:
		}
		if load := r.load.Load(); load != nil && !r.w.hung.Load() {
			r.loads.Publish(mustJSON(load))
		}
		if !r.w.wait(loadPause) {
			return
		}
	}
}
