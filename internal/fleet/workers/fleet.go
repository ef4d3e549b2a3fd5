// Package workers supervises the workers of the router. It starts workers, attaches
// running ones, and monitors their health, models, KV events and load.
package workers

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/peers/cells"
)

// Members is notified of the workers of each model. Calls for one worker are
// sequential, except Load; calls for different workers are concurrent. No call may
// block for long.
type Members interface {
	// Join returns the index for the blocks of a worker that the router has not
	// started. It precedes Up; an error is the reason why the worker cannot be used.
	Join(worker uint64, serves kv.Served) (index radix.Index, err error)
	// Leave ends a Join, after Down.
	Leave(worker uint64)
	Up(kv.Target)                               // may be routed to, or has changed
	Down(t kv.Target, why string)               // may not be routed to
	Load(kv.WorkerKey, policy.Published)        // a load report
	Transferred(kv.WorkerKey, policy.Transfers) // its counters of loads from lower tiers
	ShowAdapters(kv.WorkerKey, policy.AdapterReport)
	ShowCell(w kv.WorkerKey, report policy.CellReport, holds *summary.View)
	CordonDiscovered(worker uint64, on bool) // keeps new requests from a discovered worker
	Busy(worker uint64) bool                 // reports whether it has in-flight requests
	Lives(worker uint64, generation int)     // its engine makes progress
	// Missed keeps new requests from a worker, if others are there, because it has not answered
	// health checks, the last of them sent at that time, unless it has answered a request since.
	// It returns when the worker last showed life; zero: never.
	Missed(worker uint64, generation int, sent time.Time) (lived, busy time.Time)
	Answers(worker uint64, generation int) // ends Missed
	// EngineReports takes what an engine has answered, to a question of that time, about what trainers do to it.
	EngineReports(worker uint64, generation int, asked time.Time, report kv.EngineReport)
	Cleared(kv.WorkerKey) // its KV events have reported its cache as empty
	Engine(kv.WorkerKey) (state kv.EngineState, version string)
}

// Listener gets further notifications, by the same rules.
type Listener interface {
	EventLag(kv.WorkerKey, time.Duration) // age of a batch of KV events when it was applied
	Down(t kv.Target, why string)         // may not be routed to; called after Members.Down
}

// prober asks workers about themselves; *probe.Client is one.
type prober interface {
	Health(ctx context.Context, s probe.Server, limit time.Duration, known bool) error
	Ping(ctx context.Context, s probe.Server, limit time.Duration) error
	LeadsBack(ctx context.Context, url string) bool
	AnswersChats(context.Context, probe.Server) error
	Models(context.Context, probe.Server) (probe.Models, error)
	ServerInfo(context.Context, probe.Server) (*probe.ServerInfo, error)
	CheckScheduler(ctx context.Context, s probe.Server, limit time.Duration) error
	EventSources(context.Context, probe.Server) ([]events.Source, error)
	InferEventSources(context.Context, probe.Server) ([]events.Source, error)
	Caches(ctx context.Context, s probe.Server, engine kv.Engine, info *probe.ServerInfo, ranks []uint32) (probe.Caches, error)
	EngineState(ctx context.Context, s probe.Server, engine kv.Engine) (kv.EngineReport, error)
	FollowLoad(ctx context.Context, s probe.LoadSource, log *slog.Logger, report func(kv.WorkerKey, policy.Published))
	FollowCounters(ctx context.Context, s probe.LoadSource, log *slog.Logger)
	Close()
}

// States of a worker.
const (
	StateConnecting = "connecting" // attached, no answer yet, or no longer
	StateStarting   = "starting"   // started, not ready yet
	StateReady      = "ready"
	StateDown       = "down"       // runs, but does not answer
	StateRestarting = "restarting" // has ended and will be restarted
	StateStopped    = "stopped"    // the router is ending
)

// Status is the state of one worker as seen from outside.
type Status struct {
	ID          uint64     `json:"id"`
	Name        string     `json:"name,omitempty"` // of a discovered one
	Cordon      kv.Cordon  `json:"held,omitempty"` // why a discovered one gets no new requests
	URL         string     `json:"url"`
	Engine      kv.Engine  `json:"engine"`
	Attached    bool       `json:"attached"` // not started by this router
	State       string     `json:"state"`
	Stage       string     `json:"stage,omitempty"` // how far its start is
	Since       time.Time  `json:"since"`           // of the state
	PID         int        `json:"pid,omitempty"`   // its process group, too
	Restarts    int        `json:"restarts"`        // times that it ended and was started again
	Generation  int        `json:"generation"`      // incarnations so far
	Ranks       []uint32   `json:"ranks,omitempty"` // data-parallel ranks
	Models      []string   `json:"models,omitempty"`
	KVEvents    string     `json:"kv_events,omitempty"`   // endpoint of the first rank's KV events
	Replay      string     `json:"replay,omitempty"`      // and of their replay
	Cache       CacheState `json:"kv_cache,omitzero"`     // how it is known; zero: not attached yet
	Predictions string     `json:"predictions,omitempty"` // what is known about their exactness; empty: nothing special
	Speculation string     `json:"speculation,omitempty"` // its algorithm of speculative decoding, as far as known
	Exactness
	Cell          *Cell     `json:"cell,omitempty"` // of a router below this one
	LastError     string    `json:"last_error,omitempty"`
	CordonedSince time.Time `json:"-"`
	Disagg        kv.Disagg `json:"-"`
}

// Keys returns the worker's keys, one for each rank.
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
// router gives up, while no other worker has ever been ready: then the settings are
// wrong. A permanent failure is not tried again at all.
const startAttempts = 2

// timing holds the intervals and limits of supervision.
type timing struct {
	readyPoll     time.Duration // between checks of a starting worker
	healthEvery   time.Duration // between health checks of a ready one
	firstLook     time.Duration // between a registration and the first check
	missPause     time.Duration // between a check without an answer and the next
	healthLimit   time.Duration // for the answer to one check, at first
	healthMost    time.Duration // the same of a worker that is slow
	selfLimit     time.Duration // for the check whether an address is this router's
	hangLimit     time.Duration // a started worker that is down, and has not answered for longer, is killed
	modelsEvery   time.Duration // between looks at its models
	restEvery     time.Duration // between polls of an idle worker's load, for each unhurried workers
	lookEvery     time.Duration // minimum between looks that requests cause
	lookLimit     time.Duration // for such a look
	stopLimit     time.Duration // between SIGTERM and SIGKILL
	backoffFirst  time.Duration // first pause before a restart; doubles up to --restart-backoff-max
	backoffReset  time.Duration // a worker ready for that time starts with the first pause again
	progressEvery time.Duration // between "still ..." lines
	silentAfter   time.Duration // without event source, after which a warning says so
	unheardAfter  time.Duration // without a connection to its KV events, after which a worker is not known exactly
	engineEvery   time.Duration // between signs of life of an SGLang server's schedulers; 0: none are needed
	engineLimit   time.Duration // for one, beyond any pass of an engine
	leaveLook     time.Duration // between checks of discovered workers that leave
	leaveLimit    time.Duration // for the requests of one that is no longer discovered
}

// defaultTiming has a hung worker avoided within 2 + 1.5 + 0.75 + 3 = 7.25 s.
func defaultTiming() timing {
	return timing{
		readyPoll: 250 * time.Millisecond, healthEvery: 2 * time.Second, firstLook: 250 * time.Millisecond, missPause: 750 * time.Millisecond,
		healthLimit: 1500 * time.Millisecond, healthMost: 6 * time.Second, selfLimit: 250 * time.Millisecond,
		modelsEvery: 10 * time.Second, restEvery: 10 * time.Second, lookEvery: time.Second, lookLimit: 2 * time.Second,
		hangLimit: 60 * time.Second, stopLimit: 10 * time.Second,
		backoffFirst: time.Second, backoffReset: 60 * time.Second,
		progressEvery: 10 * time.Second, silentAfter: 10 * time.Second, unheardAfter: 10 * time.Second,
		engineEvery: 15 * time.Second, engineLimit: 60 * time.Second,
		leaveLook: 100 * time.Millisecond, leaveLimit: 10 * time.Minute,
	}
}

// Settings are the workers of a fleet and the settings of their supervision.
type Settings struct {
	Started          []kv.Disagg   // the role of each worker that is started, by id from 0
	Engine           kv.Engine     // of started workers
	Signs            process.Signs // in the output of started workers
	Ports            process.Ports // of started workers
	MaxBatchedTokens int           // of a pass of a started worker; 0: unknown
	TotalBlocks      int           // of a started worker's KV cache; 0: unknown
	Traits           kv.Traits     // of started workers
	ReadyPoll        time.Duration // between checks of a starting worker; 0: 250 ms
	Attached         []Attached    // that run already
	ServedModelName  string        // for workers that report no model
	BlockSize        int           // of started workers, and of those that do not report theirs, tokens
	KVEvents         bool          // KV events are followed
	Assumes          bool          // routed prompts count as cached on workers that are not known exactly
	TLS              *tls.Config   // for workers with https; nil: the system's roots
	Hop              web.Hop       // this router, in the Via header of its queries

	Snapshot events.Settings // of the index of KV events

	// WorkerKey is the bearer key of started and attached workers, sent with every
	// request. If it is empty, or for a started worker with its own key, Key is
	// used instead: it is sent with the router's own queries and, if PassKey is
	// set, with clients' requests.
	WorkerKey kv.Secret
	Key       kv.Secret
	PassKey   bool

	Trained           bool          // trainers pause engines, and update their weights: they are asked for their state
	SilenceTimeout    time.Duration // without a sign of life, after which a worker is down; 0: never
	StartupTimeout    time.Duration // maximum time for a started worker to become ready
	RestartBackoffMax time.Duration // maximum delay before a failed worker is restarted
	LastStart         string        // file with the time that the last start of a process took; empty: none
}

// Deps are the parts that a fleet uses.
type Deps struct {
	Start Start         // starts workers; unused if Settings start none
	Index radix.Index   // of the default model
	Peers *events.Peers // asked for KV events that workers cannot replay; nil: none
	Names *kv.Names     // gets the names of discovered workers; nil: nothing does
	Edges *guard.Edges  // counts the panics of parsers; nil: nothing does
	Log   *slog.Logger
}

// Start starts worker i. line is called with each line that the worker prints and
// the name of the stream.
type Start func(i int, line func(stream, text string)) (process.Started, error)

// Fleet starts and attaches workers, and monitors their health, KV events and load.
// Its methods are safe for concurrent use.
type Fleet struct {
	cfg       Settings
	deps      Deps
	index     radix.Index // of deps
	log       *slog.Logger
	probe     prober
	cells     *cells.Client
	timing    timing
	everReady atomic.Bool        // some worker has been ready
	silence   atomic.Int64       // without a sign of life, after which a worker is down, ns; 0: never
	opened    chan struct{}      // closed when workers can be registered
	lookers   chan chan struct{} // each is closed after a look at the models

	claims claims // on event endpoints

	membership sync.Mutex // guards workers, run and nextAdded; a worker's mu may be taken under it
	workers    []*worker  // the slice is replaced, never changed
	run        *fleetRun  // nil: not running
	nextAdded  uint64     // the least id that a worker of Add may get

	// Run sets these before workers are followed.
	members  Members
	listener Listener
	snapshot *events.Snapshot // that event streams start from; nil: none
}

// worker is one member of the fleet.
type worker struct {
	id         uint64
	spec       probe.Server // of a started one: only ID, URL, its key and its role
	attached   bool
	passKey    bool                // its key goes with clients' requests
	follower   *follower           // nil: it is a member from the start
	changes    chan registryChange // registrations to follow from now on; unbuffered. nil: not one of Register
	patience   time.Duration       // with its next health check, if that is more than healthLimit
	logged     string              // why its cache is not known exactly, as logged last; empty: it is
	inferred   inference
	claims     claiming
	discovered *discovered        // nil: not one of Follow
	wake       chan struct{}      // holds a token when a health check is due now
	look       chan chan struct{} // each is closed after a look at its models

	mu      sync.Mutex // guards the rest; those of events.Log and of the index may be taken under it
	status  Status
	key     kv.Secret // of spec
	streams map[kv.WorkerKey]*events.Stream
	// accuracy is of the ranks of this incarnation; traits are of its engine.
	accuracy map[kv.WorkerKey]*accuracy
	traits   kv.Traits

	publishes publishing
}

// New returns a fleet of the workers of the settings; Run starts them.
func New(cfg Settings, deps Deps) *Fleet {
	f := &Fleet{
		cfg: cfg, deps: deps, index: deps.Index, log: deps.Log, timing: defaultTiming(),
		probe:  probe.New(probe.Settings{TLS: cfg.TLS, Hop: cfg.Hop}, deps.Edges, deps.Log),
		cells:  cells.NewClient(cells.Settings{TLS: cfg.TLS, Hop: cfg.Hop}),
		opened: make(chan struct{}), lookers: make(chan chan struct{}),
	}
	f.silence.Store(int64(cfg.SilenceTimeout))
	if cfg.ReadyPoll > 0 {
		f.timing.readyPoll = cfg.ReadyPoll
	}
	for i, role := range cfg.Started {
		spec := probe.Server{ID: uint64(i), URL: cfg.Ports.URL(i), Key: cmp.Or(cfg.Key, cfg.WorkerKey), Disagg: role}
		w := newWorker(spec, false, cfg.WorkerKey != "" || cfg.PassKey, StateStarting)
		w.reports(cfg.Ports.Sources(i, cfg.BlockSize))
		f.workers = append(f.workers, w)
	}
	for _, at := range cfg.Attached {
		spec, pass := at.Server, at.Key != "" || cfg.WorkerKey != "" || cfg.PassKey
		spec.Key = cmp.Or(spec.Key, cfg.WorkerKey, cfg.Key)
		f.workers = append(f.workers, newWorker(spec, true, pass, StateConnecting))
	}
	return f
}

func newWorker(spec probe.Server, attached, passKey bool, state string) *worker {
	return &worker{
		id: spec.ID, spec: spec, key: spec.Key, attached: attached, passKey: passKey, wake: make(chan struct{}, 1),
		look:    make(chan chan struct{}),
		streams: map[kv.WorkerKey]*events.Stream{}, accuracy: map[kv.WorkerKey]*accuracy{},
		status:    Status{ID: spec.ID, URL: spec.URL, Attached: attached, State: state, Since: time.Now(), Disagg: spec.Disagg},
		publishes: publishing{host: plainHost(probe.HostOf(spec.URL)), given: spec.KVEvents},
	}
}

// String names the worker in log lines.
func (w *worker) String() string {
	if w.discovered != nil {
		return fmt.Sprintf("worker %d (%s)", w.id, w.discovered.name)
	}
	return fmt.Sprintf("worker %d", w.id)
}

// logger is a log with the name of a discovered worker in each line.
func (w *worker) logger(log *slog.Logger) *slog.Logger {
	if w.discovered != nil {
		return log.With("name", w.discovered.name)
	}
	return log
}

// current returns the worker's status as of now.
func (w *worker) current() Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status
}

// currentKey returns the worker's key, which a registration may change at any time.
func (w *worker) currentKey() kv.Secret {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.key
}

// bearer returns the key that goes to the worker with clients' requests.
func (w *worker) bearer() kv.Secret {
	if !w.passKey {
		return ""
	}
	return w.spec.Key
}

// all returns the current workers. The slice never changes.
func (f *Fleet) all() []*worker {
	f.membership.Lock()
	defer f.membership.Unlock()
	return f.workers
}

// Run supervises the workers until ctx is done, then ends the started ones. It
// returns when all processes and goroutines of the fleet have ended. An error means
// that workers cannot be started at all. Call it once.
func (f *Fleet) Run(ctx context.Context, members Members, listener Listener) (err error) {
	defer f.probe.Close()
	defer f.cells.Close()
	f.members, f.listener = members, listener
	if f.cfg.KVEvents {
		snapshot := events.OpenSnapshot(f.cfg.Snapshot, f.cfg.BlockSize, f.log)
		f.membership.Lock()
		f.snapshot = snapshot
		f.membership.Unlock()
	} else if f.cfg.Snapshot.IndexSnapshot != "" {
		f.log.Warn("--index-snapshot has no effect: KV events are off")
	}
	group, ctx := f.saveIndex(ctx)
	for _, w := range f.all() {
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

// Drain lowers the silence after which a worker is down: requests in flight are not waited for at a
// worker that has shown no sign of life for as long as a drain may take.
func (f *Fleet) Drain(limit time.Duration) {
	if now := f.silence.Load(); limit > 0 && (now == 0 || int64(limit) < now) {
		f.silence.Store(int64(limit))
	}
}

// SnapshotFailures returns the number of failed writes of the index snapshot.
func (f *Fleet) SnapshotFailures() uint64 {
	f.membership.Lock()
	defer f.membership.Unlock()
	return f.snapshot.Failures()
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

// eventStreams returns every running event stream that can be in a snapshot: whose
// blocks have the size of the default model's.
func (f *Fleet) eventStreams() (all []*events.Stream) {
	for _, w := range f.all() {
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
	workers := f.all()
	list := make([]Status, 0, len(workers))
	for _, w := range workers {
		list = append(list, w.shown())
	}
	return list
}

// Worker returns the state of one worker; not ok: there is none with that id.
func (f *Fleet) Worker(id uint64) (status Status, ok bool) {
	members := f.all()
	if at := slices.IndexFunc(members, func(w *worker) bool { return w.id == id }); at >= 0 {
		return members[at].shown(), true
	}
	return status, false
}

// shown returns the worker's status with what its ranks say of their predictions.
func (w *worker) shown() Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	status := w.status
	var why string
	status.Exactness, why = w.exactness()
	status.Predictions = cmp.Or(status.Predictions, why)
	status.Ranks, status.Models = slices.Clone(status.Ranks), slices.Clone(status.Models)
	return status
}

// History returns the log of a rank's KV events; nil: there is no subscription.
func (f *Fleet) History(key kv.WorkerKey) *events.Log {
	for _, w := range f.all() {
		w.mu.Lock()
		stream := w.streams[key]
		w.mu.Unlock()
		if stream != nil {
			return stream.History()
		}
	}
	return nil
}

// ReportFailure checks a worker's health at once, because a request could not reach it.
// It does not wait for the result.
func (f *Fleet) ReportFailure(id uint64) {
	for _, w := range f.all() {
		if w.id == id {
			w.checkSoon()
		}
	}
}

// checkSoon makes the next health check of the worker due now.
func (w *worker) checkSoon() {
	select {
	case w.wake <- struct{}{}:
	default: // one check is due already
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

// LeadsBack reports whether a URL is this router's own, as far as that is known within a
// quarter of a second.
func (f *Fleet) LeadsBack(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, f.timing.selfLimit)
	defer cancel()
	return f.probe.LeadsBack(ctx, url)
}

// down announces that a target may not be routed to.
func (f *Fleet) down(t kv.Target, why string) {
	f.members.Down(t, why)
	f.listener.Down(t, why)
}

// sleep waits for d or a wake-up (nil: none) and reports whether ctx still lives.
func (f *Fleet) sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	case <-wake:
	}
	return ctx.Err() == nil
}

func since(t time.Time) time.Duration {
	if t.IsZero() {
		return 0
	}
	return time.Since(t)
}
