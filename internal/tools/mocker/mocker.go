// Package mocker simulates vLLM and SGLang workers in this process, with the HTTP routes,
// KV events and load of real workers over real sockets.
package mocker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/tools/engine"
)

// Mocker starts simulated workers in this process. An engine.Engine determines how long
// each step takes. It is safe for concurrent use.
type Mocker struct {
	cfg    Settings
	model  *tokens.Model
	words  *vocabulary
	log    *slog.Logger
	began  time.Time // crashes are counted from here
	Starts atomic.Uint64

	mu      sync.Mutex // guards the rest
	workers map[int]*Worker
	shared  map[kv.Tier]*engine.Store // tiers that all workers share
}

// NewMocker returns a mocker whose workers serve model.
func NewMocker(cfg Settings, model *tokens.Model, log *slog.Logger) (*Mocker, error) {
	words, err := newVocabulary(model)
	if err != nil {
		return nil, fmt.Errorf("--engine mocker: %w", err)
	}
	return &Mocker{cfg: cfg, model: model, words: words, log: log, began: time.Now(), workers: map[int]*Worker{},
		shared: map[kv.Tier]*engine.Store{}}, nil
}

// Start starts worker i. It listens when Start returns, and must be ended.
func (m *Mocker) Start(i int) (*Worker, error) {
	w := &Worker{
		number: i, cfg: m.cfg, model: m.model, words: m.words, log: m.log,
		started: time.Now(), ended: make(chan error, 1),
		part: m.cfg.Parts[i], client: &http.Client{Transport: &http.Transport{DialContext: (&net.Dialer{Timeout: joinLimit}).DialContext}},
		random: rand.New(rand.NewPCG(m.cfg.Seed+uint64(i), m.Starts.Add(1))),
	}
	for _, adapter := range m.cfg.Lora {
		w.load(adapter)
	}
	settings := m.cfg.SimConfig(m.cfg.BlockSize)
	if settings.Caching = engine.CacheFilled; w.sglang() {
		settings.Caching = engine.CacheComputed
		if w.part.Role == kv.RoleDecode {
			settings.Caching = engine.CacheNothing
		}
	}
	if slower := m.cfg.SlowWorker[uint64(i)]; slower > 0 {
		settings.Timing.Speedup /= slower
	}
	w.maxModelLen = settings.Blocks * settings.BlockSize
	if n := m.model.MaxModelLen(); n > 0 {
		w.maxModelLen = min(n, w.maxModelLen)
	}
	w.tiers = func() []*engine.Store {
		m.mu.Lock()
		defer m.mu.Unlock()
		return engine.Stores(m.cfg.Tiers(), m.shared)
	}
	if err := w.listen(settings); err != nil {
		return nil, fmt.Errorf("mock worker %d: %w", i, err)
	}
	w.ctx, w.cancel = context.WithCancelCause(context.Background())
	if after, hangs := m.cfg.HangWorker[uint64(i)]; hangs {
		w.beside.Go(func() { w.faultAfter(after, func() { w.Hung.Store(true) }) })
	}
	if every := m.cfg.CrashEvery; every > 0 {
		w.beside.Go(func() { w.faultAfter(m.nextCrash(i, every), func() { w.End(ErrMockCrash) }) })
	}
	m.mu.Lock()
	m.workers[i] = w
	m.mu.Unlock()
	go w.run()
	return w, nil
}

// ErrMockCrash is the cause of a crash by --mock crash-every.
var ErrMockCrash = errors.New("simulated crash (--mock crash-every)")

// nextCrash is how long from now worker i's next crash is: each worker in turn
// has one, every apart.
func (m *Mocker) nextCrash(i int, every time.Duration) time.Duration {
	round := every * time.Duration(len(m.cfg.Parts))
	since := time.Since(m.began) - every*time.Duration(i+1)
	if since < 0 {
		return -since
	}
	return round - since%round
}

// Worker returns the latest incarnation of worker i; nil: it was never started.
func (m *Mocker) Worker(i int) *Worker {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.workers[i]
}

// Worker is one incarnation of a simulated worker: an HTTP server before one
// engine for each data-parallel rank.
type Worker struct {
	number      int
	cfg         Settings
	model       *tokens.Model
	words       *vocabulary
	log         *slog.Logger
	maxModelLen int                    // longest prompt with its answer, tokens
	tiers       func() []*engine.Store // makes those of a rank
	started     time.Time

	Ranks    []*Rank
	server   *http.Server
	listener net.Listener

	ctx      context.Context // ends with the worker; its cause says why
	cancel   context.CancelCauseFunc
	ended    chan error     // gets that cause when all has ended
	beside   sync.WaitGroup // what runs beside its requests; ends with ctx
	handlers gate           // of HTTP requests
	Hung     atomic.Bool    // no request is answered
	Stuck    atomic.Bool    // the engine is stuck; routes that do not need it answer
	Failing  atomic.Int32   // status of every inference request; 0: requests are served
	held     atomic.Bool    // it is paused
	asleep   atomic.Bool    // its memory is released
	Posts    atomic.Int64   // POST requests so far
	LastPost atomic.Int64   // arrival of the last one, ns since 1970; 0: none

	part   kv.Disagg
	turn   atomic.Uint64 // counts requests that name no rank
	rooms  rooms
	client *http.Client // to other mock workers

	mu        sync.Mutex // guards the rest
	random    *rand.Rand
	adapters  []Adapter // that are loaded
	adapterID int       // of the one loaded last
	running   []*inference
	version   string // of the weights; empty: that of the start
}

// listen opens the worker's ports.
func (w *Worker) listen(settings engine.Settings) (err error) {
	defer func() {
		if err != nil {
			w.unlisten()
		}
	}()
	for number := range w.cfg.Ports.Ranks {
		rank, err := newRank(w, number, settings)
		if err != nil {
			return err
		}
		w.Ranks = append(w.Ranks, rank)
	}
	if w.listener, err = net.Listen("tcp", w.cfg.at(w.cfg.Ports.HTTP+w.number)); err != nil {
		return err
	}
	w.server = &http.Server{Handler: w.routes(), ReadHeaderTimeout: web.HeaderTimeout,
		ErrorLog: slog.NewLogLogger(w.log.Handler(), slog.LevelDebug)}
	return nil
}

// unlisten closes the open ports, with every connection.
func (w *Worker) unlisten() {
	for _, rank := range w.Ranks {
		rank.unlisten()
	}
	if w.server != nil {
		_ = w.server.Close()
		_ = w.listener.Close() // if Serve had not begun
	}
}

// Ended receives the cause once the worker and all its goroutines have ended.
func (w *Worker) Ended() <-chan error { return w.ended }

// End ends the worker immediately, as if its process were killed: connections are
// reset. It does not wait; see Ended.
func (w *Worker) End(why error) { w.cancel(why) }

// Stop ends the worker as SIGTERM ends vLLM and SGLang: it accepts no new connections and
// lets in-flight requests finish for --mock shutdown-timeout. It does not wait; see
// Ended.
func (w *Worker) Stop(why error) {
	if w.cfg.ShutdownTimeout == 0 || w.Hung.Load() {
		w.End(why)
		return
	}
	go func() { // ends with the worker at the latest
		limit, cancel := context.WithTimeout(w.ctx, w.cfg.ShutdownTimeout)
		defer cancel()
		_ = w.server.Shutdown(limit) // what still runs is cut
		w.End(why)
	}()
}

// run serves until the worker is ended.
func (w *Worker) run() {
	var serving sync.WaitGroup
	for _, rank := range w.Ranks {
		rank.Events.start()
		if w.sglang() { // it empties its cache once it has warmed up
			rank.Events.add([]Event{{Cleared: true}})
		}
		serving.Go(rank.step)
		serving.Go(rank.publishLoad)
	}
	serving.Go(func() { _ = w.server.Serve(w.listener) }) // ends with unlisten
	<-w.ctx.Done()
	w.unlisten()
	w.handlers.close()
	serving.Wait()
	w.beside.Wait()
	w.client.CloseIdleConnections()
	w.ended <- context.Cause(w.ctx)
}

// faultAfter calls fault after d, unless the worker ends before.
func (w *Worker) faultAfter(d time.Duration, fault func()) {
	if w.wait(d) {
		fault()
	}
}

// sglang reports whether the worker is SGLang's server, not vLLM's.
func (w *Worker) sglang() bool { return w.cfg.Engine() == kv.EngineSGLang }

// chance reports whether something with that probability happens.
func (w *Worker) chance(probability float64) bool {
	if probability <= 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.random.Float64() < probability
}

// wait waits for d and reports whether the worker still lives.
func (w *Worker) wait(d time.Duration) bool {
	if d <= 0 {
		return w.ctx.Err() == nil
	}
	select {
	case <-w.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// gate counts its users and can be closed.
type gate struct {
	mu     sync.Mutex // guards closed, and that nothing enters after it
	closed bool
	inside sync.WaitGroup
}

// enter reports whether the gate is open; then leave must follow.
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
