package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestFakeWorkerProcess is no test: it is the engine that the other tests
// start, in a process of its own. FAKE_WORKER is its port; FAKE_CHILD makes it
// start a child of its own, as vLLM does, and print its pid.
func TestFakeWorkerProcess(t *testing.T) {
	port := os.Getenv("FAKE_WORKER")
	if port == "" {
		t.Skip("started by other tests")
	}
	fmt.Println("(EngineCore pid=1) INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0)")
	switch os.Getenv("FAKE_MODE") {
	case "fails":
		fmt.Fprintln(os.Stderr, "ModuleNotFoundError: No module named 'vllm'")
		os.Exit(3)
	case "never ready":
		time.Sleep(time.Minute)
	case "ignores SIGTERM":
		signal.Ignore(syscall.SIGTERM)
	}
	if os.Getenv("FAKE_CHILD") != "" {
		child := exec.Command("sleep", "120")
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		fmt.Println("child", child.Process.Pid)
	}
	var mu sync.Mutex
	var hangUntil time.Time
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {
		mu.Lock()
		until := hangUntil
		mu.Unlock()
		time.Sleep(time.Until(until))
	})
	mux.HandleFunc("/hang", func(_ http.ResponseWriter, r *http.Request) {
		d, _ := time.ParseDuration(r.URL.Query().Get("for"))
		mu.Lock()
		hangUntil = time.Now().Add(d)
		mu.Unlock()
	})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"fake"}]}`)
	})
	fmt.Println("(Worker pid=2) INFO 01-01 00:00:00 [default_loader.py:1] Loading weights took 1.29 seconds")
	t.Log(http.ListenAndServe("127.0.0.1:"+port, mux))
}

// observed records what a fleet reports.
type observed struct {
	mu     sync.Mutex // guards events, lines
	events []string   // "up W.R gG", "down W.R gG"
	lines  []string
	out    logBuffer // has a lock of its own
}

func (o *observed) recorder() FleetHooks {
	note := func(what string, target Target) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.events = append(o.events, fmt.Sprintf("%s %d.%d g%d", what, target.Key.Worker, target.Key.Rank, target.Generation))
	}
	return FleetHooks{
		Up:   func(target Target) { note("up", target) },
		Down: func(target Target, _ string) { note("down", target) },
		Log: func(_ uint64, _ string, line string) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.lines = append(o.lines, line)
		},
	}
}

func (o *observed) seen() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.events)
}

func (o *observed) childPID() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, line := range o.lines {
		if text, ok := strings.CutPrefix(line, "child "); ok {
			pid, _ := strconv.Atoi(text)
			return pid
		}
	}
	return 0
}

// fakeFleet is a running fleet of fake workers.
type fakeFleet struct {
	*Fleet
	*observed
	launcher *Launcher
	t        *testing.T
	cancel   context.CancelFunc
	done     chan error
}

// fakeSettings are those of a fake fleet.
type fakeSettings struct {
	vllm  VLLMSettings
	fleet FleetSettings
}

// fakeConfig has n workers to start, on ports that are free.
func fakeConfig(t *testing.T, n int) fakeSettings {
	t.Helper()
	ports := Ports{HTTP: freePorts(t, n), KVEvents: 5557, KVReplay: 5757, Load: 5657, Ranks: 1}
	return fakeSettings{
		VLLMSettings{Python: "/bin/sh", NumWorkers: n, BlockSize: 64, ServedModelName: "fake", GPUsPerWorker: 1, KVEvents: true, Ports: ports},
		FleetSettings{
			Started: make([]Disagg, n), Ports: ports, BlockSize: 64, KVEvents: true, ServedModelName: "fake",
			StartupTimeout: 30 * time.Second, RestartBackoffMax: 50 * time.Millisecond,
		},
	}
}

// freePorts returns the first of n ports in a row that nothing listens on. They
// lie below the range that outgoing connections take theirs from, so that they
// stay free until the test listens there.
func freePorts(t testing.TB, n int) int {
	t.Helper()
	for range 100 {
		base := 20000 + rand.IntN(12000)
		free := true
		for i := range n {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base+i))
			if err != nil {
				free = false
				break
			}
			l.Close()
		}
		if free {
			return base
		}
	}
	t.Fatal("no free ports")
	return 0
}

func fastTiming() fleetTiming {
	return fleetTiming{
		readyPoll: 10 * time.Millisecond, healthEvery: 20 * time.Millisecond, healthLimit: 5 * time.Second, healthMisses: 3,
		hangLimit: time.Minute, probeLimit: 5 * time.Second, stopLimit: 5 * time.Second,
		backoffFirst: 20 * time.Millisecond, backoffReset: time.Minute, progressEvery: time.Minute, silentAfter: 50 * time.Millisecond,
	}
}

func newFakeFleet(t *testing.T, cfg fakeSettings, env ...string) *fakeFleet {
	t.Helper()
	o := &observed{}
	log := slog.New(slog.NewTextHandler(&o.out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	launcher, err := NewLauncher(cfg.vllm, log)
	if err != nil {
		t.Fatal(err)
	}
	fleet := NewFleet(cfg.fleet, launcher.Start, NewRadix(), o.recorder(), log)
	fleet.timing = fastTiming()
	launcher.command = func(i int, _ string) (processSpec, error) {
		return processSpec{
			argv: []string{os.Args[0], "-test.run=^TestFakeWorkerProcess$"},
			env:  append(os.Environ(), append(env, fmt.Sprintf("FAKE_WORKER=%d", cfg.fleet.Ports.HTTP+i))...),
		}, nil
	}
	return &fakeFleet{Fleet: fleet, launcher: launcher, observed: o, t: t, done: make(chan error, 1)}
}

func (f *fakeFleet) start() {
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	if err := f.launcher.Open(); err != nil {
		f.t.Fatal(err)
	}
	go func() { f.done <- errors.Join(f.Run(ctx), f.launcher.Close()) }()
}

// stop ends the fleet and checks that its processes are gone.
func (f *fakeFleet) stop() {
	f.t.Helper()
	before := f.Workers()
	f.cancel()
	f.wantDone(func(err error) bool { return err == nil })
	for _, w := range before {
		if w.PID != 0 && processLives(w.PID) {
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
	settles(f.t, func() error {
		if got := f.seen(); !slices.Equal(got, want) {
			return fmt.Errorf("events %q, want %q; log:\n%s", got, want, f.out.String())
		}
		return nil
	})
}

// settles polls a condition that says what is still wrong.
func settles(t *testing.T, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-tick.C
	}
}

// processLives tells whether a process runs; a zombie does not.
func processLives(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

func TestKilledWorkerComesBackWithAnEmptyIndex(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := newFakeFleet(t, fakeConfig(t, 1), "FAKE_CHILD=1")
	f.start()
	f.wantEvents("up 0.0 g1")
	first := f.Workers()[0]
	if first.State != StateReady || !slices.Equal(first.Models, []string{"fake"}) || first.Generation != 1 || len(f.Streams()) != 1 {
		t.Errorf("%+v, %d streams", first, len(f.Streams()))
	}
	if err := f.index.Store(WorkerKey{}, 0, false, []StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		t.Fatal(err)
	}
	child := f.childPID()
	if child == 0 || !processLives(child) {
		t.Fatalf("the worker's child %d does not run", child)
	}

	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	f.wantEvents("up 0.0 g1", "down 0.0 g1", "up 0.0 g2")
	if second := f.Workers()[0]; second.State != StateReady || second.Restarts != 1 || second.Generation != 2 || second.PID == first.PID {
		t.Errorf("%+v", second)
	}
	if processLives(child) {
		t.Errorf("child %d of the killed worker lives on", child)
	}
	if n := f.index.Blocks(WorkerKey{}); n != 0 {
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
	settles(t, func() error {
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
	response, err := f.client.Get(f.Workers()[0].URL + "/hang?for=" + d)
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
	settles(t, func() error {
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
	cfg := VLLMSettings{Python: "/nonexistent/python"}
	if _, err := NewLauncher(cfg, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "--python /nonexistent/python") {
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
	f.hooks.Up = func(Target) { up <- struct{}{} }
	folder := make(chan string, 2)
	command := f.launcher.command
	f.launcher.command = func(i int, pluginDir string) (processSpec, error) {
		folder <- pluginDir
		return command(i, pluginDir)
	}
	f.start()
	<-up
	<-up
	report := killedRouter{Folder: <-folder}
	for _, w := range f.Workers() {
		report.PIDs = append(report.PIDs, w.PID)
	}
	f.mu.Lock()
	for _, line := range f.lines {
		if text, ok := strings.CutPrefix(line, "child "); ok {
			pid, _ := strconv.Atoi(text)
			report.PIDs = append(report.PIDs, pid)
		}
	}
	f.mu.Unlock()
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		t.Fatal(err)
	}
	<-f.done
}

// killedRouter is what a router process tells before it is killed.
type killedRouter struct {
	PIDs   []int // of its workers and their children
	Folder string
}

func TestNoWorkerOutlivesAKilledRouter(t *testing.T) {
	defer goleak.VerifyNone(t)
	router := exec.Command(os.Args[0], "-test.run=^TestRouterProcess$")
	router.Env = append(os.Environ(), fmt.Sprintf("FAKE_ROUTER=%d", freePorts(t, 2)))
	router.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := router.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := router.Start(); err != nil {
		t.Fatal(err)
	}
	var report killedRouter
	err = json.NewDecoder(out).Decode(&report)
	// The whole group, as a terminal or a supervisor might.
	if killed := syscall.Kill(-router.Process.Pid, syscall.SIGKILL); killed != nil {
		t.Fatal(killed)
	}
	_ = router.Wait()
	if err != nil || len(report.PIDs) != 4 {
		t.Fatalf("report %+v: %v", report, err)
	}
	settles(t, func() error {
		for _, pid := range report.PIDs {
			if processLives(pid) {
				return fmt.Errorf("process %d outlives the router", pid)
			}
		}
		if _, err := os.Stat(report.Folder); !os.IsNotExist(err) {
			return fmt.Errorf("folder %s is left: %v", report.Folder, err)
		}
		return nil
	})
}
