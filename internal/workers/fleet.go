// Package workers supervises the workers of the router. It starts some, attaches
// others that run already, and follows the health, models, KV events and load of
// them all.
package workers

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/events"
	"kvrouter/internal/guard"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/process"
	"kvrouter/internal/radix"
	"kvrouter/internal/web"
)

// Hooks tell the rest of the router what happens to workers. Those of one
// worker come one after another, but for Log and Load; those of different
// workers come at the same time. None may block for long. A nil one is left out.
type Hooks struct {
	Up   func(kv.Target)                          // may be routed to
	Down func(kv.Target, string)                  // may not, and why
	Load func(kv.WorkerKey, policy.Published)     // a load report
	Lag  func(kv.WorkerKey, time.Duration)        // age of a batch of KV events when it was applied
	Log  func(worker uint64, stream, line string) // a line that a started worker printed

	Hold    func(worker uint64, hold bool) // a discovered worker gets no new requests, or again
	Working func(worker uint64) bool       // whether requests are on their way on it

	// Join is asked, before Up, for the index of the blocks of a worker that was not
	// started, and for the tokens in one; an error says why it cannot be used. Leave
	// follows, after Down. Without, they are those of the fleet.
	Join  func(worker uint64, serves kv.Served) (index radix.Index, blockSize int, err error)
	Leave func(worker uint64)
}

// States of a worker.
const (
	StateConnecting = "connecting" // attached, no answer yet or any more
	StateStarting   = "starting"   // started, not ready yet
	StateReady      = "ready"
	StateDown       = "down"       // runs, but does not answer
	StateRestarting = "restarting" // has ended; the next start is near
	StateStopped    = "stopped"    // the router is ending
)

// Status is the state of one worker as people and other components see it.
type Status struct {
	ID         uint64    `json:"id"`
	Name       string    `json:"name,omitempty"` // of a discovered one
	Held       kv.Hold   `json:"held,omitempty"` // why a discovered one gets no new requests
	URL        string    `json:"url"`
	Engine     kv.Engine `json:"engine"`
	Attached   bool      `json:"attached"` // not started by this router
	State      string    `json:"state"`
	Stage      string    `json:"stage,omitempty"` // how far its start is
	Since      time.Time `json:"since"`           // of the state
	PID        int       `json:"pid,omitempty"`   // its process group, too
	Restarts   int       `json:"restarts"`        // times that it ended and was started again
	Generation int       `json:"generation"`      // incarnations so far
	Ranks      []uint32  `json:"ranks,omitempty"` // data-parallel ranks
	Models     []string  `json:"models,omitempty"`
	KVEvents   string    `json:"kv_events,omitempty"` // endpoint of rank 0's KV events
	Replay     string    `json:"replay,omitempty"`    // and of their replay
	LastError  string    `json:"last_error,omitempty"`
	HeldSince  time.Time `json:"-"`
	Disagg     kv.Disagg `json:"-"`
}

// Keys returns the worker's keys in the index and the loads: one for each rank.
func (s Status) Keys() []kv.WorkerKey {
	if len(s.Ranks) == 0 {
		return []kv.WorkerKey{{Worker: s.ID}}
	}
	keys := make([]kv.WorkerKey, len(s.Ranks))
	for i, rank := range s.Ranks {
		keys[i] = kv.WorkerKey{Worker: s.ID, Rank: rank}
	}
	return keys
}

// startAttempts is how often the first start of a worker is tried before the
// router gives up, while no other worker has ever been ready: then it is the
// settings that are wrong. A failure that will last is not tried again at all.
const startAttempts = 2

// timing holds the times of supervision, so that tests need not wait.
type timing struct {
	readyPoll     time.Duration // between looks at a starting worker
	HealthEvery   time.Duration // between looks at a ready one
	FirstLook     time.Duration // between a registration and the first look
	missPause     time.Duration // between a look without an answer and the next
	healthLimit   time.Duration // longest wait for an answer to one look
	healthMisses  int           // looks in a row without answer that make a worker down
	selfLimit     time.Duration // longest wait to learn whether a worker is this router
	hangLimit     time.Duration // a started worker that is down for longer is killed
	modelsEvery   time.Duration // between looks at its models
	lookEvery     time.Duration // the least between those that requests make necessary
	lookLimit     time.Duration // longest wait of such a request, beside that
	probeLimit    time.Duration // longest wait for /v1/models and /kv_event_sources
	stopLimit     time.Duration // between SIGTERM and SIGKILL
	backoffFirst  time.Duration // first pause before a restart; doubles up to --restart-backoff-max
	backoffReset  time.Duration // a worker ready for so long starts with the first pause again
	progressEvery time.Duration // between "still ..." lines
	silentAfter   time.Duration // without event source, after which a warning says so
	engineEvery   time.Duration // between signs of life that an SGLang server's schedulers are to give; 0: none
	engineLimit   time.Duration // longest wait for one, beyond any pass of an engine
	leaveLook     time.Duration // between looks at discovered workers that are to leave
	leaveLimit    time.Duration // for the requests of one that no source knows any more
}

// defaultTiming knows a hung worker after 2 + 3·1.5 + 2·0.75 = 8 s at most.
func defaultTiming() timing {
	return timing{
		readyPoll: 250 * time.Millisecond, HealthEvery: 2 * time.Second, FirstLook: 250 * time.Millisecond, missPause: 750 * time.Millisecond,
		healthLimit: 1500 * time.Millisecond, healthMisses: 3, selfLimit: 250 * time.Millisecond,
		modelsEvery: 10 * time.Second, lookEvery: time.Second, lookLimit: 2 * time.Second,
		hangLimit: 60 * time.Second, probeLimit: 5 * time.Second, stopLimit: 10 * time.Second,
		backoffFirst: time.Second, backoffReset: 60 * time.Second,
		progressEvery: 10 * time.Second, silentAfter: 10 * time.Second,
		engineEvery: 15 * time.Second, engineLimit: 60 * time.Second,
		leaveLook: 100 * time.Millisecond, leaveLimit: 10 * time.Minute,
	}
}

// Settings say which workers a fleet has and how it supervises them.
type Settings struct {
	Started          []kv.Disagg   // the part of each worker that is started, by id from 0
	Engine           kv.Engine     // of started workers
	Signs            process.Signs // of what started workers print
	Ports            process.Ports // of started workers
	MaxBatchedTokens int           // that a started worker computes in a pass; 0: unknown
	TotalBlocks      int           // of a started worker's KV cache; 0: unknown
	ReadyPoll        time.Duration // between looks at a starting worker; 0: the usual
	Attached         []Attached    // that run already
	ServedModelName  string        // of a worker that names no model
	BlockSize        int           // tokens
	KVEvents         bool          // KV events are followed
	AssumesSizes     bool          // the index wants to know the sizes of the workers' caches
	TLS              *tls.Config   // for workers with https; nil: the system's roots
	Hop              web.Hop       // this router, in the Via of what it asks workers

	Snapshot events.Settings // of the index of KV events

	// WorkerKey is the bearer key that started and attached workers ask for, and
	// goes to them with every request. Where it is empty, or for a started worker
	// that was given a key of its own, Key is theirs: it is shown to them when the
	// router itself asks, and goes with clients' requests where PassKey says so.
	WorkerKey kv.Secret
	Key       kv.Secret
	PassKey   bool

	StartupTimeout    time.Duration // longest time for a started worker to become ready
	RestartBackoffMax time.Duration // longest pause before a dead worker is started again
}

// Start starts worker i. line is called with each line that the worker prints and
// the name of the stream.
type Start func(i int, line func(stream, text string)) (process.Started, error)

// Fleet starts workers, attaches others, and follows the health, KV events and
// load of them all. Its methods are safe for concurrent use.
type Fleet struct {
	cfg       Settings
	index     radix.Index
	hooks     Hooks
	log       *slog.Logger
	client    *http.Client    // for probes
	polls     *http.Transport // of metrics pages
	start     Start
	everReady atomic.Bool        // some worker has been ready
	opened    chan struct{}      // closed when workers can be registered
	lookers   chan chan struct{} // closed, each, when the models have been looked for

	looks, firstLooks chan struct{} // have a token for each health check that runs: of workers that have answered before, and of others

	membership sync.Mutex // guards workers, run and nextAdded
	workers    []*worker  // a slice that was read stays as it is
	run        *fleetRun  // nil: not running
	nextAdded  uint64     // the least id that a worker of Add may get

	snapshot *events.Snapshot // what event streams start from; nil: nothing; set by Run

	// Tests replace these.
	Timing timing

	Peers *events.Peers // asked for KV events that workers cannot replay; nil: nobody is
	Names *kv.Names     // told what discovered workers are called; nil: nobody is
	Edges *guard.Edges  // counts the panics of what parses the workers' words; nil: nothing does
	loads func(l loadReader, ctx context.Context, s loadSource, publish func(kv.WorkerKey, policy.Published))
}

// worker is one member of the fleet.
type worker struct {
	id         uint64
	Spec       Attached // of a started one: only ID, URL, its key and its part
	attached   bool
	passKey    bool               // its key goes with clients' requests
	registry   *registry          // nil: not a registered one
	added      *added             // nil: not one of Add or Follow
	sizeInVain int                // times that it could not be asked for its block size
	guess      guess              // where it publishes
	found      *found             // nil: not one of Follow
	wake       chan struct{}      // holds a token when its health is to be looked at now
	look       chan chan struct{} // to be closed when its models have been looked at

	mu      sync.Mutex // guards the rest
	status  Status
	key     kv.Secret // of Spec
	streams map[kv.WorkerKey]*events.Stream

	publishes publishing
}

// NewFleet prepares the workers that cfg asks for; Run starts them by start, which
// is not called where cfg asks for none. index gets what their event streams
// tell, where hooks name no other.
func NewFleet(cfg Settings, start Start, index radix.Index, hooks Hooks, log *slog.Logger) *Fleet {
	atOnce := max(4, min(looksAtOnce, web.Descriptors()/16))
	f := &Fleet{
		cfg: cfg, index: index, hooks: hooks, log: log,
		start:      start,
		opened:     make(chan struct{}),
		lookers:    make(chan chan struct{}),
		looks:      make(chan struct{}, atOnce),
		firstLooks: make(chan struct{}, atOnce),
		Timing:     defaultTiming(),
		loads:      loadReader.follow,
	}
	probes, polls := newTransports(cfg.TLS)
	f.client, f.polls = web.NewClient(probes), polls
	if f.hooks.Up == nil {
		f.hooks.Up = func(kv.Target) {}
	}
	if f.hooks.Down == nil {
		f.hooks.Down = func(kv.Target, string) {}
	}
	if f.hooks.Load == nil {
		f.hooks.Load = func(kv.WorkerKey, policy.Published) {}
	}
	if f.hooks.Join == nil {
		f.hooks.Join = func(uint64, kv.Served) (radix.Index, int, error) { return f.index, f.cfg.BlockSize, nil }
	}
	if f.hooks.Leave == nil {
		f.hooks.Leave = func(uint64) {}
	}
	if f.hooks.Hold == nil {
		f.hooks.Hold = func(uint64, bool) {}
	}
	if f.hooks.Working == nil {
		f.hooks.Working = func(uint64) bool { return false }
	}
	if f.hooks.Log == nil {
		f.hooks.Log = func(uint64, string, string) {}
	}
	if cfg.ReadyPoll > 0 {
		f.Timing.readyPoll = cfg.ReadyPoll
	}
	for i, part := range cfg.Started {
		spec := Attached{ID: uint64(i), URL: cfg.Ports.URL(i), Key: cmp.Or(cfg.Key, cfg.WorkerKey), Disagg: part}
		w := newWorker(spec, false, cfg.WorkerKey != "" || cfg.PassKey, StateStarting)
		w.hasTold(cfg.Ports.Sources(i, cfg.BlockSize))
		f.workers = append(f.workers, w)
	}
	for _, spec := range cfg.Attached {
		pass := spec.Key != "" || cfg.WorkerKey != "" || cfg.PassKey
		spec.Key = cmp.Or(spec.Key, cfg.WorkerKey, cfg.Key)
		f.workers = append(f.workers, newWorker(spec, true, pass, StateConnecting))
	}
	return f
}

func newWorker(spec Attached, attached, passKey bool, state string) *worker {
	return &worker{
		id: spec.ID, Spec: spec, key: spec.Key, attached: attached, passKey: passKey, wake: make(chan struct{}, 1), look: make(chan chan struct{}), streams: map[kv.WorkerKey]*events.Stream{},
		status:    Status{ID: spec.ID, URL: spec.URL, Attached: attached, State: state, Since: time.Now()},
		publishes: publishing{host: plainHost(hostOf(spec.URL)), given: spec.KVEvents},
	}
}

// String names the worker in log lines.
func (w *worker) String() string {
	if w.found != nil {
		return fmt.Sprintf("worker %d (%s)", w.id, w.found.name)
	}
	return fmt.Sprintf("worker %d", w.id)
}

// logger is a log whose lines have the name of a discovered worker, for who knows it by
// its id.
func (w *worker) logger(log *slog.Logger) *slog.Logger {
	if w.found != nil {
		return log.With("name", w.found.name)
	}
	return log
}

// bearer returns the key that goes to the worker with clients' requests.
func (w *worker) bearer() kv.Secret {
	if !w.passKey {
		return ""
	}
	return w.Spec.Key
}

// Members returns the current workers. The slice never changes.
func (f *Fleet) Members() []*worker {
	f.membership.Lock()
	defer f.membership.Unlock()
	return f.workers
}

// Run supervises the workers until ctx is done, then ends those that it
// started; it returns when every process and goroutine of the fleet has ended.
// An error means that workers cannot be started at all.
func (f *Fleet) Run(ctx context.Context) (err error) {
	defer f.polls.CloseIdleConnections()
	if f.cfg.KVEvents {
		f.snapshot = events.OpenSnapshot(f.cfg.Snapshot, f.cfg.BlockSize, f.log)
	} else if f.cfg.Snapshot.IndexSnapshot != "" {
		f.log.Warn("--index-snapshot has no effect: no KV events are followed")
	}
	group, ctx := f.saveIndex(ctx)
	for _, w := range f.Members() {
		group.Go(func() error {
			if w.attached {
				f.superviseAttached(ctx, w)
				return nil
			}
			return f.superviseStarted(ctx, w)
		})
	}
	group.Go(func() error {
		f.lookForModels(ctx)
		return nil
	})
	f.open(ctx, group)
	return group.Wait()
}

// saveIndex returns the group of a run and its context. With a snapshot, that one ends
// only when the last has been written: the end of a worker empties its index.
func (f *Fleet) saveIndex(until context.Context) (*errgroup.Group, context.Context) {
	if f.snapshot == nil {
		return errgroup.WithContext(until)
	}
	running, stop := context.WithCancel(context.WithoutCancel(until))
	group, ctx := errgroup.WithContext(running)
	saving, end := context.WithCancel(until)
	context.AfterFunc(ctx, end) // a worker cannot be started at all
	group.Go(func() error {
		defer stop()
		f.snapshot.Run(saving, f.eventStreams)
		return nil
	})
	return group, ctx
}

// eventStreams returns every event stream that runs now and can be in a snapshot, all
// of whose blocks have one size.
func (f *Fleet) eventStreams() (all []*events.Stream) {
	for _, w := range f.Members() {
		w.mu.Lock()
		for _, stream := range w.streams {
			if stream.Src.BlockSize == f.cfg.BlockSize {
				all = append(all, stream)
			}
		}
		w.mu.Unlock()
	}
	return all
}

// Workers returns the state of every worker, started ones first.
func (f *Fleet) Workers() []Status {
	workers := f.Members()
	list := make([]Status, 0, len(workers))
	for _, w := range workers {
		w.mu.Lock()
		status := w.status
		w.mu.Unlock()
		status.Ranks, status.Models = slices.Clone(status.Ranks), slices.Clone(status.Models)
		list = append(list, status)
	}
	return list
}

// Streams returns the counters of every event stream that runs now.
func (f *Fleet) Streams() map[kv.WorkerKey]*events.Stats {
	all := map[kv.WorkerKey]*events.Stats{}
	for _, w := range f.Members() {
		w.mu.Lock()
		for key, stream := range w.streams {
			all[key] = stream.Stats()
		}
		w.mu.Unlock()
	}
	return all
}

// History returns what is kept of a rank's KV events; nil: they are not followed.
func (f *Fleet) History(key kv.WorkerKey) *events.Log {
	for _, w := range f.Members() {
		w.mu.Lock()
		stream := w.streams[key]
		w.mu.Unlock()
		if stream != nil {
			return stream.History()
		}
	}
	return nil
}

// ReportFailure makes the fleet look at a worker's health at once, because a
// request could not reach it. It does not wait for the result.
func (f *Fleet) ReportFailure(id uint64) {
	for _, w := range f.Members() {
		if w.id == id {
			select {
			case w.wake <- struct{}{}:
			default: // one look is due already
			}
		}
	}
}

// update changes a worker's status; a changed state gets a new Since.
func (f *Fleet) update(w *worker, change func(*Status)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.status.State
	change(&w.status)
	if w.status.State != before {
		w.status.Since = time.Now()
	}
}

// sleep waits for d or a wake-up (nil: none) and tells whether ctx still lives.
func (f *Fleet) sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-wake:
	}
	return ctx.Err() == nil
}

// superviseStarted starts a worker, again and again, until ctx is done.
func (f *Fleet) superviseStarted(ctx context.Context, w *worker) error {
	pause, failures := f.Timing.backoffFirst, 0
	for {
		readyFor, err := f.runStarted(ctx, w)
		if ctx.Err() != nil {
			f.update(w, func(s *Status) { s.State, s.PID = StateStopped, 0 })
			return nil
		}
		if failures++; readyFor > 0 {
			failures = 0
		}
		var end *process.EndError
		if hopeless := failures >= startAttempts || (errors.As(err, &end) && end.Lasting); hopeless && !f.everReady.Load() {
			return fmt.Errorf("%s could not be started: %w", w, err)
		}
		if readyFor >= f.Timing.backoffReset {
			pause = f.Timing.backoffFirst
		}
		f.log.Error(fmt.Sprintf("%s: %v; starting it again in %s", w, err, pause), "ready_for", readyFor.Round(time.Second))
		f.update(w, func(s *Status) { s.State, s.PID, s.LastError = StateRestarting, 0, err.Error() })
		if f.sleep(ctx, pause, nil) {
			f.update(w, func(s *Status) { s.Restarts++ })
		}
		pause = min(2*pause, max(f.cfg.RestartBackoffMax, f.Timing.backoffFirst))
	}
}

// runStarted runs one started worker from its start to its end, and returns why
// it ended and for how long it had been ready.
func (f *Fleet) runStarted(ctx context.Context, w *worker) (readyFor time.Duration, err error) {
	output := process.NewStartLog(f.cfg.Signs)
	f.update(w, func(s *Status) { s.State, s.Stage = StateStarting, process.StageProcess })
	in := f.begin(ctx, w)
	downReason := "the router is ending"
	defer func() { in.end(downReason) }()
	engine, err := f.start(int(w.id), func(stream, text string) { f.workerLine(w, output, stream, text) })
	if err != nil {
		return 0, err
	}
	// A process listens seconds later: the stream has the engine's first event.
	for _, source := range f.cfg.Ports.Sources(int(w.id), f.cfg.BlockSize) {
		in.followEvents(source)
	}
	f.update(w, func(s *Status) { s.PID = engine.PID })
	if engine.PID != 0 {
		f.log.Info(fmt.Sprintf("%s: %s", w, process.StageProcess), "pid", engine.PID, "url", w.Spec.URL)
	}

	var readySince, downSince time.Time
	lastProgress := in.began
	for poll := f.Timing.readyPoll; ; {
		timer := time.NewTimer(poll)
		select {
		case <-ctx.Done():
			in.markDown(downReason)
			f.stopStarted(engine, output)
			return 0, ctx.Err()
		case err := <-engine.Ended:
			downReason = "its process ended: " + endReason(err)
			in.markDown(downReason)
			if engine.PID == 0 {
				return since(readySince), err
			}
			return since(readySince), f.explainEnd(w, output, err)
		case looked := <-w.look:
			in.lookAtModels()
			close(looked)
		case <-w.wake:
		case <-timer.C:
		}
		timer.Stop()

		if readySince.IsZero() {
			waited := time.Since(in.began)
			if f.becomeReady(in) {
				readySince = time.Now()
				output.SetReady()
				poll = in.pause()
				f.log.Info(fmt.Sprintf("%s: ready after %s", w, waited.Round(time.Second)), "url", w.Spec.URL)
			} else if waited > f.cfg.StartupTimeout {
				f.stopStarted(engine, output)
				downReason = fmt.Sprintf("not ready after %s (--startup-timeout)", f.cfg.StartupTimeout)
				return 0, f.explainEnd(w, output, errors.New(downReason))
			} else if time.Since(lastProgress) >= f.Timing.progressEvery {
				lastProgress = time.Now()
				f.logProgress(w, waited)
			}
			continue
		}

		in.checkHealth()
		poll = in.pause()
		switch {
		case in.up:
			downSince = time.Time{}
		case downSince.IsZero():
			downSince = time.Now()
		case time.Since(downSince) > f.Timing.hangLimit:
			engine.Kill() // what hangs does not heed SIGTERM
			<-engine.Ended
			downReason = fmt.Sprintf("it did not answer for %s and was killed", f.Timing.hangLimit)
			return since(readySince), errors.New(downReason)
		}
	}
}

// stopStarted ends a started worker and returns once nothing of it is left.
func (f *Fleet) stopStarted(engine process.Started, output *process.StartLog) {
	output.SetEnding()
	engine.Stop()
	timer := time.AfterFunc(f.Timing.stopLimit, engine.Kill)
	defer timer.Stop()
	<-engine.Ended
}

// logProgress logs the stage of a worker that has been starting for so long.
func (f *Fleet) logProgress(w *worker, waited time.Duration) {
	w.mu.Lock()
	stage := w.status.Stage
	w.mu.Unlock()
	f.log.Info(fmt.Sprintf("%s: still %s (%s)", w, stage, waited.Round(time.Second)))
}

// becomeReady looks whether a starting worker answers, and if so makes it a
// target.
func (f *Fleet) becomeReady(in *incarnation) bool {
	w := in.w
	if err := f.look(in.ctx, w.Spec, in.answered); err != nil {
		return false
	}
	in.answered = true
	served, err := f.models(in.ctx, w.Spec)
	if err != nil {
		return false
	}
	if served.names == nil {
		served.names = []string{f.cfg.ServedModelName}
	}
	in.setTargets(served, f.cfg.Ports.Sources(int(w.id), f.cfg.BlockSize))
	in.followLoads(func(rank uint32) string {
		if f.cfg.Engine == kv.EngineSGLang && !f.cfg.KVEvents {
			return "" // it publishes load only beside events
		}
		return f.cfg.Ports.LoadEndpoint(int(w.id), int(rank))
	})
	in.markUp()
	return true
}

// workerLine takes in one line that a started worker printed. Errors of a
// starting one are kept for explainEnd; those of a ready one are shown at once.
func (f *Fleet) workerLine(w *worker, output *process.StartLog, stream, text string) {
	f.hooks.Log(w.id, stream, text)
	stage, failure := output.Line(text)
	level := slog.LevelDebug
	if failure {
		level = slog.LevelWarn
	}
	f.log.Log(context.Background(), level, fmt.Sprintf("%s: %s", w, text), "stream", stream)
	if stage == "" {
		return
	}
	var after time.Duration
	f.update(w, func(s *Status) {
		s.Stage = stage
		after = time.Since(s.Since)
	})
	f.log.Info(fmt.Sprintf("%s: %s", w, stage), "after", after.Round(time.Second))
}

// explainEnd shows the last lines of a worker that ended by itself and returns
// an error with what to do.
func (f *Fleet) explainEnd(w *worker, output *process.StartLog, err error) error {
	lines := output.Tail()
	for _, line := range lines {
		f.log.Error(fmt.Sprintf("%s | %s", w, line))
	}
	return f.cfg.Signs.Explain(endReason(err), lines)
}

func endReason(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

func since(t time.Time) time.Duration {
	if t.IsZero() {
		return 0
	}
	return time.Since(t)
}
