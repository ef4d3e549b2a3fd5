package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Mocker starts simulated vLLM workers in this process. From outside they are
// like real ones: the same HTTP routes, KV events and load over the same kinds
// of sockets. Inside, a SimEngine says how long every step takes. It is safe for
// concurrent use.
type Mocker struct {
	cfg    Config
	model  *Model
	words  *mockWords
	log    *slog.Logger
	began  time.Time // crashes are counted from here
	starts atomic.Uint64

	mu      sync.Mutex // guards workers
	workers map[int]*MockWorker
}

// NewMocker returns a mocker whose workers serve model.
func NewMocker(cfg Config, model *Model, log *slog.Logger) (*Mocker, error) {
	words, err := newMockWords(model)
	if err != nil {
		return nil, fmt.Errorf("--engine mocker: %w", err)
	}
	return &Mocker{cfg: cfg, model: model, words: words, log: log, began: time.Now(), workers: map[int]*MockWorker{}}, nil
}

// Start starts worker i. It listens when Start returns, and must be ended.
func (m *Mocker) Start(i int) (*MockWorker, error) {
	w := &MockWorker{
		number: i, cfg: m.cfg, model: m.model, words: m.words, log: m.log,
		started: time.Now(), wake: make(chan struct{}, 1), loadChanged: make(chan struct{}, 1), ended: make(chan error, 1),
		random: rand.New(rand.NewPCG(m.cfg.Seed+uint64(i), m.starts.Add(1))),
	}
	sim := m.cfg.SimConfig(m.cfg.BlockSize)
	if slower := m.cfg.MockSlowWorker[uint64(i)]; slower > 0 {
		sim.Timing.Speedup /= slower
	}
	w.engine = NewSimEngine(sim, w.cacheChanged)
	w.maxModelLen = sim.Blocks * sim.BlockSize
	if n := m.model.MaxModelLen(); n > 0 {
		w.maxModelLen = min(n, w.maxModelLen)
	}
	if err := w.listen(); err != nil {
		return nil, fmt.Errorf("mock worker %d: %w", i, err)
	}
	w.ctx, w.cancel = context.WithCancelCause(context.Background())
	if after, hangs := m.cfg.MockHangWorker[uint64(i)]; hangs {
		w.faults.Go(func() { w.faultAfter(after, func() { w.hung.Store(true) }) })
	}
	if every := m.cfg.MockCrashEvery; every > 0 {
		w.faults.Go(func() { w.faultAfter(m.nextCrash(i, every), func() { w.End(errMockCrash) }) })
	}
	m.mu.Lock()
	m.workers[i] = w
	m.mu.Unlock()
	go w.run()
	return w, nil
}

// errMockCrash is why a worker ends that --mock-crash-every ended.
var errMockCrash = errors.New("crash asked for by --mock-crash-every")

// nextCrash is how long from now worker i's next crash is: each worker in turn
// has one, every apart.
func (m *Mocker) nextCrash(i int, every time.Duration) time.Duration {
	round := every * time.Duration(m.cfg.NumWorkers)
	since := time.Since(m.began) - every*time.Duration(i+1)
	if since < 0 {
		return -since
	}
	return round - since%round
}

// Worker returns the latest incarnation of worker i; nil: it was never started.
func (m *Mocker) Worker(i int) *MockWorker {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.workers[i]
}

// MockWorker is one incarnation of a simulated worker. Its engine belongs to one
// goroutine; do reaches it.
type MockWorker struct {
	number      int
	cfg         Config
	model       *Model
	words       *mockWords
	log         *slog.Logger
	maxModelLen int // longest prompt with its answer, tokens
	started     time.Time

	server   *http.Server
	listener net.Listener
	events   *mockEvents
	loads    *ZMQPublisher

	ctx      context.Context // ends with the worker; its cause says why
	cancel   context.CancelCauseFunc
	ended    chan error     // gets that cause when all has ended
	faults   sync.WaitGroup // end with ctx
	handlers gate           // of HTTP requests
	hung     atomic.Bool    // nothing is answered any more
	counts   mockCounts

	wake chan struct{} // holds a token when commands has some

	mu       sync.Mutex // guards commands and random
	commands []func(*SimEngine)
	random   *rand.Rand

	// What follows belongs to the engine's goroutine.
	engine  *SimEngine
	changes []mockEvent // of the step under way

	loadChanged chan struct{} // holds a token when load is new
	load        atomic.Pointer[mockLoad]
}

// mockLoad is what a worker publishes of its load.
type mockLoad struct {
	Waiting int     `json:"num_waiting_reqs"`
	Running int     `json:"num_running_reqs"`
	Usage   float64 `json:"kv_cache_usage"`
}

// mockCounts are the counters of a worker's metrics page.
type mockCounts struct {
	promptTokens, generationTokens, prefixQueries, prefixHits, finishedLength, finishedStop, aborted atomic.Int64
}

// listen opens the worker's ports.
func (w *MockWorker) listen() (err error) {
	const loopback = "127.0.0.1"
	address := func(base int) string { return net.JoinHostPort(loopback, strconv.Itoa(base+w.number)) }
	defer func() {
		if err != nil {
			w.unlisten()
		}
	}()
	if w.events, err = newMockEvents(address(w.cfg.BaseKVEventsPort), address(w.cfg.BaseKVReplayPort), w.cfg.BlockSize); err != nil {
		return err
	}
	w.events.array = w.cfg.MockArrayEvents
	w.events.drop, w.events.duplicate, w.events.delay = w.cfg.MockDropEvents, w.cfg.MockDuplicateEvents, w.cfg.MockDelayEvents
	w.events.random = rand.New(rand.NewPCG(w.random.Uint64(), 1))
	if w.loads, err = NewZMQPublisher(address(w.cfg.BaseMetricsPort)); err != nil {
		return err
	}
	w.listener, err = net.Listen("tcp", address(w.cfg.BaseWorkerPort))
	if err != nil {
		return err
	}
	w.server = &http.Server{Handler: w.routes(), ReadHeaderTimeout: headerTimeout, ErrorLog: slog.NewLogLogger(w.log.Handler(), slog.LevelDebug)}
	return nil
}

// unlisten closes what is open of the ports, with every connection.
func (w *MockWorker) unlisten() {
	if w.events != nil {
		w.events.close()
	}
	if w.loads != nil {
		w.loads.Close()
	}
	if w.server != nil {
		_ = w.server.Close()
		_ = w.listener.Close() // if Serve had not begun
	}
}

// Ended gets why the worker ended, once all that belongs to it has.
func (w *MockWorker) Ended() <-chan error { return w.ended }

// End ends the worker at once, as if its process were killed: connections break
// off. It does not wait; Ended tells when it is done.
func (w *MockWorker) End(why error) { w.cancel(why) }

// run serves until the worker is ended.
func (w *MockWorker) run() {
	var rooms sync.WaitGroup
	w.events.start()
	rooms.Go(func() { _ = w.server.Serve(w.listener) }) // ends with unlisten
	rooms.Go(w.step)
	rooms.Go(w.publishLoad)
	<-w.ctx.Done()
	w.unlisten()
	w.handlers.close()
	rooms.Wait()
	w.faults.Wait()
	w.ended <- context.Cause(w.ctx)
}

// faultAfter calls fault after d, unless the worker ends before.
func (w *MockWorker) faultAfter(d time.Duration, fault func()) {
	select {
	case <-w.ctx.Done():
	case <-time.After(d):
		fault()
	}
}

// chance tells whether something with that probability happens.
func (w *MockWorker) chance(probability float64) bool {
	if probability <= 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.random.Float64() < probability
}

// do has f called with the engine between two of its steps. It does not wait.
func (w *MockWorker) do(f func(*SimEngine)) {
	w.mu.Lock()
	w.commands = append(w.commands, f)
	w.mu.Unlock()
	signalOnce(w.wake)
}

// ask is do, but waits until f has been called; it returns false if the worker
// has ended instead.
func (w *MockWorker) ask(ctx context.Context, f func(*SimEngine)) bool {
	done := make(chan struct{})
	w.do(func(e *SimEngine) {
		f(e)
		close(done)
	})
	select {
	case <-done:
		return true
	case <-ctx.Done():
	case <-w.ctx.Done():
	}
	return false
}

// maxLate is how far the engine's steps may be behind their times before it
// gives up catching up: sleeping is only exact to a millisecond or so.
const maxLate = 20 * time.Millisecond

// step runs the engine, one step after the other, until the worker ends.
func (w *MockWorker) step() {
	var due time.Time // when the step under way ends
	for w.ctx.Err() == nil {
		w.runCommands()
		took, busy := w.engine.Begin()
		if !busy {
			w.reportLoad()
			select {
			case <-w.ctx.Done():
			case <-w.wake:
			}
			due = time.Time{}
			continue
		}
		w.publishChanges()
		now := time.Now()
		if due.Before(now.Add(-maxLate)) {
			due = now
		}
		due = due.Add(took)
		if w.cfg.SpeedupRatio > 0 && !w.wait(time.Until(due)) {
			return
		}
		if w.hung.Load() {
			<-w.ctx.Done()
			return
		}
		for _, r := range w.engine.End() {
			w.counts.generationTokens.Add(1)
			r.Tag.(*mockAnswer).advance(r)
		}
		w.reportLoad()
	}
}

// wait waits for d and tells whether the worker still lives.
func (w *MockWorker) wait(d time.Duration) bool {
	if d <= 0 {
		return w.ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-w.ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

func (w *MockWorker) runCommands() {
	w.mu.Lock()
	commands := w.commands
	w.commands = nil
	w.mu.Unlock()
	for _, f := range commands {
		f(w.engine)
	}
}

// cacheChanged takes in one change of the engine's cache.
func (w *MockWorker) cacheChanged(e SimEvent) {
	if !e.Stored {
		// A step's removals are one event, as long as no store comes between.
		if n := len(w.changes); n > 0 && w.changes[n-1].removed != nil {
			w.changes[n-1].removed = append(w.changes[n-1].removed, e.Removed...)
			return
		}
		w.changes = append(w.changes, mockEvent{removed: append([]uint64{}, e.Removed...)})
		return
	}
	answer := e.Request.Tag.(*mockAnswer)
	size := w.cfg.BlockSize
	change := mockEvent{stored: e.Blocks, parent: e.Parent, hasParent: e.HasParent, tokens: answer.tokens[e.First*size : (e.First+len(e.Blocks))*size]}
	if e.First == 0 {
		change.salt = answer.salt
	}
	w.changes = append(w.changes, change)
}

func (w *MockWorker) publishChanges() {
	if len(w.changes) > 0 {
		w.events.add(w.changes)
		w.changes = nil
	}
}

// resetPrefixCache empties the cache, which like vLLM it refuses while requests
// hold blocks. The next step publishes it.
func (w *MockWorker) resetPrefixCache(e *SimEngine) bool {
	if _, _, usage := e.Load(); usage > 0 {
		return false
	}
	e.Reset()
	w.changes = append(w.changes, mockEvent{cleared: true})
	return true
}

// loadPause and loadRepeat are the shortest and the longest time between two
// messages about a worker's load.
const (
	loadPause  = 5 * time.Millisecond
	loadRepeat = time.Second
)

func (w *MockWorker) reportLoad() {
	running, waiting, usage := w.engine.Load()
	w.load.Store(&mockLoad{Waiting: waiting, Running: running, Usage: usage})
	signalOnce(w.loadChanged)
}

// publishLoad sends the newest load when it is new, and from time to time.
func (w *MockWorker) publishLoad() {
	repeat := time.NewTicker(loadRepeat)
	defer repeat.Stop()
	for {
		select {
		case <-w.ctx.Done():
			return
		case <-w.loadChanged:
		case <-repeat.C:
		}
		if load := w.load.Load(); load != nil && !w.hung.Load() {
			w.loads.Publish(mustJSON(load))
		}
		if !w.wait(loadPause) {
			return
		}
	}
}

// gate counts what is inside and can be closed.
type gate struct {
	mu     sync.Mutex // guards closed, and that nothing enters after it
	closed bool
	inside sync.WaitGroup
}

// enter tells whether the gate is open; then leave must follow.
func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.inside.Add(1)
	}
	return !g.closed
}

func (g *gate) leave() { g.inside.Done() }

// close lets nothing more in and waits until all have left.
func (g *gate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.inside.Wait()
}

// signalOnce puts a token into a channel that holds one, if it is empty.
func signalOnce(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
