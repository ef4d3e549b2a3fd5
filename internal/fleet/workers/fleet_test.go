package workers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/fleet/vllm"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// observed records what a fleet reports.
type observed struct {
	mu     sync.Mutex        // guards events
	events []string          // "up W.R gG", "unanswered W.R gG", "down W.R gG"
	out    testkit.LogBuffer // has a lock of its own
}

func (o *observed) note(what string, target kv.Target) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, fmt.Sprintf("%s %d.%d g%d", what, target.Key.Worker, target.Key.Rank, target.Generation))
}

func (o *observed) up(target kv.Target) {
	if target.Unanswered {
		o.note("unanswered", target)
	} else {
		o.note("up", target)
	}
}

func (o *observed) seen() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.events)
}

// children are the pids that workers have printed.
func (o *observed) children() (pids []int) {
	for _, found := range regexp.MustCompile(`worker \d+: child (\d+)`).FindAllStringSubmatch(o.out.String(), -1) {
		pid, _ := strconv.Atoi(found[1])
		pids = append(pids, pid)
	}
	return pids
}

// hooks are the calls of a fleet that a test looks at; nil ones are ignored.
type hooks struct {
	Up          func(kv.Target)
	Heard       func(kv.Target, string) // Down of the listener
	Load        func(kv.WorkerKey, policy.Published)
	Transferred func(kv.WorkerKey, policy.Transfers)
	Hold        func(worker uint64, hold bool)
	Busy        func(worker uint64) bool
	Join        func(worker uint64, serves kv.Served) (radix.Index, error)
	Leave       func(worker uint64)
	Cell        func(kv.WorkerKey, policy.CellReport, *summary.View)
	Lives       func(worker uint64, generation int)
	Missed      func(worker uint64) (lived time.Time)
	Answers     func(worker uint64)
}

// fakeMembers calls the hooks of a fleet.
type fakeMembers struct{ *fakeFleet }

func (m fakeMembers) Up(t kv.Target)             { m.hooks.Up(t) }
func (m fakeMembers) Down(t kv.Target, _ string) { m.note("down", t) }
func (m fakeMembers) CordonDiscovered(worker uint64, on bool) {
	if m.hooks.Hold != nil {
		m.hooks.Hold(worker, on)
	}
}
func (m fakeMembers) Busy(worker uint64) bool { return m.hooks.Busy != nil && m.hooks.Busy(worker) }

func (m fakeMembers) Load(key kv.WorkerKey, p policy.Published) {
	if m.hooks.Load != nil {
		m.hooks.Load(key, p)
	}
}

func (m fakeMembers) ShowAdapters(kv.WorkerKey, policy.AdapterReport) {}

func (m fakeMembers) Missed(worker uint64, _ int, _ time.Time) (lived, busy time.Time) {
	if m.hooks.Missed != nil {
		lived = m.hooks.Missed(worker)
	}
	return lived, busy
}

func (fakeMembers) EngineReports(uint64, int, time.Time, kv.EngineReport) {}

func (fakeMembers) Cleared(kv.WorkerKey) {}

func (fakeMembers) Engine(kv.WorkerKey) (kv.EngineState, string) { return 0, "" }

func (m fakeMembers) Answers(worker uint64, _ int) {
	if m.hooks.Answers != nil {
		m.hooks.Answers(worker)
	}
}

func (m fakeMembers) Lives(worker uint64, generation int) {
	if m.hooks.Lives != nil {
		m.hooks.Lives(worker, generation)
	}
}

func (m fakeMembers) ShowCell(key kv.WorkerKey, r policy.CellReport, holds *summary.View) {
	if m.hooks.Cell != nil {
		m.hooks.Cell(key, r, holds)
	}
}

func (m fakeMembers) Transferred(key kv.WorkerKey, t policy.Transfers) {
	if m.hooks.Transferred != nil {
		m.hooks.Transferred(key, t)
	}
}

func (m fakeMembers) Join(worker uint64, serves kv.Served) (radix.Index, error) {
	if m.hooks.Join == nil {
		return m.index, nil
	}
	return m.hooks.Join(worker, serves)
}

func (m fakeMembers) Leave(worker uint64) {
	if m.hooks.Leave != nil {
		m.hooks.Leave(worker)
	}
}

// fakeListener calls the hooks of a fleet.
type fakeListener struct{ hooks *hooks }

func (fakeListener) EventLag(kv.WorkerKey, time.Duration) {}
func (l fakeListener) Down(t kv.Target, why string) {
	if l.hooks.Heard != nil {
		l.hooks.Heard(t, why)
	}
}

// fakeFleet is a running fleet of fake workers.
type fakeFleet struct {
	*Fleet
	*observed
	hooks    hooks
	launcher *process.Launcher
	t        *testing.T
	cancel   context.CancelFunc
	done     chan error
}

// fakeSettings are those of a fake fleet.
type fakeSettings struct {
	process process.Settings
	fleet   Settings
}

// fakeConfig has n workers to start, on ports that are free.
func fakeConfig(t *testing.T, n int) fakeSettings {
	t.Helper()
	free := testkit.FreePorts(t, 4*n)
	ports := process.Ports{HTTP: free, KVEvents: free + n, KVReplay: free + 2*n, Load: free + 3*n, Ranks: 1}
	return fakeSettings{
		process.Settings{Python: "/bin/sh", NumWorkers: n, BlockSize: 64, ServedModelName: "fake", GPUsPerWorker: 1, KVEvents: true, Ports: ports},
		Settings{
			Started: make([]kv.Disagg, n), Signs: vllm.Engine().Signs, Ports: ports, BlockSize: 64, KVEvents: true, ServedModelName: "fake",
			SilenceTimeout: 300 * time.Millisecond, StartupTimeout: 30 * time.Second, RestartBackoffMax: 50 * time.Millisecond,
		},
	}
}

func fastTiming() timing {
	return timing{
		readyPoll: 10 * time.Millisecond, healthEvery: 20 * time.Millisecond, restEvery: 20 * time.Millisecond, firstLook: 10 * time.Millisecond, missPause: 5 * time.Millisecond,
		healthLimit: 5 * time.Second, selfLimit: 5 * time.Second,
		hangLimit: time.Minute, stopLimit: 5 * time.Second,
		backoffFirst: 20 * time.Millisecond, backoffReset: time.Minute, progressEvery: time.Minute, silentAfter: 50 * time.Millisecond, unheardAfter: time.Minute,
		leaveLook: 5 * time.Millisecond, leaveLimit: time.Minute,
	}
}

func newFakeFleet(t *testing.T, cfg fakeSettings, env ...string) *fakeFleet {
	t.Helper()
	o := &observed{}
	log := slog.New(slog.NewTextHandler(&o.out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	launcher, err := process.NewLauncher(vllm.Engine(), cfg.process, log)
	if err != nil {
		t.Fatal(err)
	}
	fleet := New(cfg.fleet, Deps{Start: launcher.Start, Index: radix.NewTree(), Log: log})
	fleet.timing = fastTiming()
	launcher.Command = func(i int, _ string) (process.Spec, error) {
		return process.Spec{
			Argv: []string{os.Args[0], "-test.run=^TestFakeWorkerProcess$"},
			Env:  append(os.Environ(), append(env, fmt.Sprintf("FAKE_WORKER=%d", cfg.fleet.Ports.HTTP+i))...),
		}, nil
	}
	return &fakeFleet{Fleet: fleet, hooks: hooks{Up: o.up}, launcher: launcher, observed: o, t: t, done: make(chan error, 1)}
}

func (f *fakeFleet) start() {
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	if err := f.launcher.Open(); err != nil {
		f.t.Fatal(err)
	}
	go func() { f.done <- errors.Join(f.Run(ctx, fakeMembers{f}, fakeListener{&f.hooks}), f.launcher.Close()) }()
}

// stop ends the fleet and checks that its processes are gone.
func (f *fakeFleet) stop() {
	f.t.Helper()
	before := f.Workers()
	f.cancel()
	f.wantDone(func(err error) bool { return err == nil })
	for _, w := range before {
		if w.PID != 0 && testkit.ProcessLives(w.PID) {
			f.t.Errorf("worker %d: process %d lives on", w.ID, w.PID)
		}
	}
	for _, w := range f.Workers() {
		if w.State != StateStopped || w.PID != 0 {
			f.t.Errorf("worker %d: %s with pid %d at the end", w.ID, w.State, w.PID)
		}
	}
}

func (f *fakeFleet) wantDone(ok func(error) bool) {
	f.t.Helper()
	select {
	case err := <-f.done:
		if !ok(err) {
			f.t.Errorf("Run: %v", err)
		}
	case <-time.After(30 * time.Second):
		f.t.Fatal("Run does not end")
	}
}

func (f *fakeFleet) wantEvents(want ...string) {
	f.t.Helper()
	testkit.Settles(f.t, func() error {
		if got := f.seen(); !slices.Equal(got, want) {
			return fmt.Errorf("events %q, want %q; log:\n%s", got, want, f.out.String())
		}
		return nil
	})
}

func TestKilledWorkerComesBackWithAnEmptyIndex(t *testing.T) {
	defer goleak.VerifyNone(t)
	cfg := fakeConfig(t, 1)
	cfg.fleet.LastStart = filepath.Join(t.TempDir(), "last-start")
	f := newFakeFleet(t, cfg, "FAKE_CHILD=1")
	f.start()
	f.wantEvents("up 0.0 g1")
	if strings.Contains(f.out.String(), "ready_last_time_after") {
		t.Errorf("the first start knows of another: %s", f.out.String())
	}
	first := f.Workers()[0]
	if first.State != StateReady || !slices.Equal(first.Models, []string{"fake"}) || first.Generation != 1 || len(f.Streams()) != 1 {
		t.Errorf("%+v, %d streams", first, len(f.Streams()))
	}
	if err := radixtest.Store(f.index, kv.WorkerKey{}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		t.Fatal(err)
	}
	children := f.children()
	if len(children) != 1 || !testkit.ProcessLives(children[0]) {
		t.Fatalf("the worker's children %d do not run", children)
	}
	child := children[0]

	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	f.wantEvents("up 0.0 g1", "down 0.0 g1", "up 0.0 g2")
	if second := f.Workers()[0]; second.State != StateReady || second.Restarts != 1 || second.Generation != 2 || second.PID == first.PID {
		t.Errorf("%+v", second)
	}
	if !strings.Contains(f.out.String(), "ready_last_time_after=0s") {
		t.Errorf("the second start does not say how long the first one took: %s", f.out.String())
	}
	if testkit.ProcessLives(child) {
		t.Errorf("child %d of the killed worker lives on", child)
	}
	if n := f.index.Blocks(kv.WorkerKey{}); n != 0 {
		t.Errorf("%d blocks of the killed process are left in the index", n)
	}
	f.stop()
	f.wantEvents("up 0.0 g1", "down 0.0 g1", "up 0.0 g2", "down 0.0 g2")
	for _, want := range []string{"worker 0: starting process", "worker 0: starting engine", "worker 0: allocating KV cache", "worker 0: ready after", "worker 0: vLLM ended (signal: killed)"} {
		if !strings.Contains(f.out.String(), want) {
			t.Errorf("log lacks %q", want)
		}
	}
}

func TestWorkersStartSideBySideAndEndTogether(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := newFakeFleet(t, fakeConfig(t, 3))
	f.start()
	testkit.Settles(t, func() error {
		if n := len(f.seen()); n != 3 {
			return fmt.Errorf("%d workers up", n)
		}
		return nil
	})
	f.stop()
}

func TestSlowWorkerIsTakenOutUntilItAnswers(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := newFakeFleet(t, fakeConfig(t, 1))
	f.timing.healthLimit = 100 * time.Millisecond
	f.start()
	f.wantEvents("up 0.0 g1")
	f.hang("1s")
	f.wantEvents("up 0.0 g1", "down 0.0 g1", "up 0.0 g1")
	f.stop()
}

func TestHangingWorkerIsKilledAndStartedAgain(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := newFakeFleet(t, fakeConfig(t, 1))
	f.timing.healthLimit, f.timing.hangLimit = 100*time.Millisecond, 200*time.Millisecond
	f.start()
	f.wantEvents("up 0.0 g1")
	f.hang("1h")
	f.wantEvents("up 0.0 g1", "down 0.0 g1", "up 0.0 g2")
	f.stop()
}

// hang makes worker 0 answer its health only after a while.
func (f *fakeFleet) hang(d string) {
	f.t.Helper()
	defer http.DefaultClient.CloseIdleConnections()
	response, err := http.Get(f.Workers()[0].URL + "/hang?for=" + d)
	if err != nil {
		f.t.Fatal(err)
	}
	_ = response.Body.Close()
}

func TestWorkerThatIgnoresSIGTERMIsKilled(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := newFakeFleet(t, fakeConfig(t, 1), "FAKE_MODE=ignores SIGTERM")
	f.timing.stopLimit = 50 * time.Millisecond
	f.start()
	f.wantEvents("up 0.0 g1")
	f.stop()
}

func TestEndDuringTheStart(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := newFakeFleet(t, fakeConfig(t, 2), "FAKE_MODE=never ready")
	f.start()
	testkit.Settles(t, func() error {
		if w := f.Workers()[1]; w.Stage != "starting engine" {
			return fmt.Errorf("stage %q", w.Stage)
		}
		return nil
	})
	f.stop()
	f.wantEvents()
}

func TestWorkersThatCannotStartEndTheFleet(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, test := range []struct {
		name, mode string
		limit      time.Duration
		want       string
	}{
		{"process fails", "fails", time.Minute, "run `make setup`"},
		{"never ready", "never ready", 100 * time.Millisecond, "--startup-timeout"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := fakeConfig(t, 1)
			cfg.fleet.StartupTimeout = test.limit
			f := newFakeFleet(t, cfg, "FAKE_MODE="+test.mode)
			f.start()
			f.wantDone(func(err error) bool {
				return err != nil && strings.Contains(err.Error(), "worker 0") && strings.Contains(err.Error(), test.want)
			})
			f.cancel()
			f.wantEvents()
			if test.mode == "fails" && !strings.Contains(f.out.String(), "worker 0 | ModuleNotFoundError: No module named 'vllm'") {
				t.Errorf("the last lines are not shown:\n%s", f.out.String())
			}
		})
	}
}

func TestMissingPythonIsAnErrorBeforeTheStart(t *testing.T) {
	cfg := process.Settings{Python: "/nonexistent/python"}
	if _, err := process.NewLauncher(vllm.Engine(), cfg, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "--python /nonexistent/python") {
		t.Errorf("NewLauncher: %v", err)
	}
}

// TestRouterProcess is no test: it is the router that
// TestNoWorkerOutlivesAKilledRouter kills.
func TestRouterProcess(t *testing.T) {
	port, err := strconv.Atoi(os.Getenv("FAKE_ROUTER"))
	if err != nil {
		t.Skip("started by another test")
	}
	cfg := fakeConfig(t, 2)
	cfg.fleet.Ports.HTTP = port
	f := newFakeFleet(t, cfg, "FAKE_CHILD=1")
	up := make(chan struct{}, 2)
	f.hooks.Up = func(kv.Target) { up <- struct{}{} }
	folder := make(chan string, 2)
	command := f.launcher.Command
	f.launcher.Command = func(i int, pluginDir string) (process.Spec, error) {
		folder <- pluginDir
		return command(i, pluginDir)
	}
	f.start()
	<-up
	<-up
	report := testkit.KilledRouter{Folder: <-folder}
	for _, w := range f.Workers() {
		report.PIDs = append(report.PIDs, w.PID)
	}
	report.PIDs = append(report.PIDs, f.children()...)
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		t.Fatal(err)
	}
	<-f.done
}

// Streams returns the counters of all running event streams.
func (f *Fleet) Streams() map[kv.WorkerKey]*events.Stats {
	all := map[kv.WorkerKey]*events.Stats{}
	for _, w := range f.all() {
		w.mu.Lock()
		for key, stream := range w.streams {
			all[key] = stream.Stats()
		}
		w.mu.Unlock()
	}
	return all
}
