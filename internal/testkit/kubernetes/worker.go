package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// BlockSize is the default block size of workers, tokens.
const BlockSize = 64

// Environment variables of a worker: those of the container, and for a process its
// address.
const (
	EnvModel   = "WORKER_MODEL" // name that it serves; empty: mocker.ModelName
	EnvPort    = "WORKER_PORT"  // the first of its four ports
	EnvFiles   = "WORKER_FILES" // folder of its tokenizer; empty: the one that is built in
	EnvBlock   = "WORKER_BLOCK" // its block size, tokens; empty: BlockSize
	envAddress = "WORKER_ADDRESS"
)

// Worker is the mock worker of a Pod.
type Worker struct {
	URL   string
	Stop  func()          // stops like vLLM on SIGTERM: in-flight requests may finish
	Ended <-chan struct{} // closed at its end

	kill   func()
	report func() Report // once it has gone
}

// over stops the worker if it still runs, and returns its report.
func (w *Worker) over() Report {
	w.kill()
	<-w.Ended
	return w.report()
}

// Report is the summary of a worker at its end.
type Report struct {
	Posts   int64     // requests by POST
	Last    time.Time // when the last of them came
	Stopped time.Time // time of the stop signal; zero: it was killed
	Running int       // in-flight requests at that time
	Aborted int64     // aborted requests

	uid types.UID // of the Pod
}

// reporter collects the report of a worker.
type reporter struct {
	worker *mocker.Worker

	mu     sync.Mutex // guards report
	report Report
}

// stop signals the worker to stop.
func (r *reporter) stop() {
	load := r.worker.Ranks[0].CurrentLoad()
	r.mu.Lock()
	r.report.Stopped, r.report.Running = time.Now(), load.Running+load.Waiting
	r.mu.Unlock()
	r.worker.Stop(errStopped)
}

// end returns the report after the end of the worker.
func (r *reporter) end() Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Posts, r.report.Last = r.worker.Posts.Load(), time.Unix(0, r.worker.LastPost.Load())
	r.report.Aborted = r.worker.Ranks[0].Counts.Aborted.Load()
	return r.report
}

type stopped struct{}

func (stopped) Error() string { return "the Pod ends" }

var errStopped error = stopped{}

// serve starts a mock worker at an address. A token takes 50 ms for any
// number of requests, so that a hundred streams need little CPU.
func serve(model *tokens.Model, address string, env map[string]string) (*mocker.Worker, error) {
	port, err := strconv.Atoi(env[EnvPort])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", EnvPort, err)
	}
	cfg := testkit.Defaults[mocker.Settings]()
	cfg.Host, cfg.BlockSize, cfg.KVEvents, cfg.ServedModelName, cfg.Parts = address, BlockSize, true, mocker.ModelName, make([]kv.Disagg, 1)
	cfg.Ports = process.Ports{HTTP: port, KVEvents: port + 1, KVReplay: port + 2, Load: port + 3, Ranks: 1}
	cfg.PrefillMS, cfg.DecodeMS, cfg.ShutdownTimeout = []float64{5, 0, 0}, []float64{50, 0, 0}, time.Minute
	if name := env[EnvModel]; name != "" {
		cfg.ServedModelName = name
	}
	if size := env[EnvBlock]; size != "" {
		if cfg.BlockSize, err = strconv.Atoi(size); err != nil {
			return nil, fmt.Errorf("%s: %w", EnvBlock, err)
		}
	}
	m, err := mocker.NewMocker(cfg, model, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	return m.Start(0)
}

// open opens the tokenizer of a folder, or the built-in one.
func open(ctx context.Context, folder string) (*tokens.Model, error) {
	if folder == "" {
		return mocker.OpenBuiltinModel()
	}
	return tokens.Open(ctx, tokens.Opening{Name: folder}, slog.New(slog.DiscardHandler))
}

// urlOf is the URL of a worker.
func urlOf(address string, env map[string]string) string {
	return "http://" + address + ":" + env[EnvPort]
}

// Inside starts workers in this process, where many workers are cheap.
func Inside(t testing.TB) Starter {
	model, err := mocker.OpenBuiltinModel()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(model.Close)
	return func(address string, env map[string]string) (*Worker, error) {
		worker, err := serve(model, address, env)
		if err != nil {
			return nil, err
		}
		ended := make(chan struct{})
		go func() { // ends with the worker
			<-worker.Ended()
			close(ended)
		}()
		r := &reporter{worker: worker}
		return &Worker{URL: urlOf(address, env), Stop: r.stop, Ended: ended, kill: func() { worker.End(errStopped) }, report: r.end}, nil
	}
}

// Apart starts each worker as a process: this test binary, with only the test of that
// name, which calls Run.
func Apart(test string) Starter {
	return func(address string, env map[string]string) (*Worker, error) {
		command := exec.Command(os.Args[0], "-test.run=^"+test+"$")
		command.Env = append(os.Environ(), envAddress+"="+address)
		for name, value := range env {
			command.Env = append(command.Env, name+"="+value)
		}
		var out bytes.Buffer
		command.Stdout, command.Stderr = &out, &out
		command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		if err := command.Start(); err != nil {
			return nil, err
		}
		ended := make(chan struct{})
		go func() { // ends with the process
			_ = command.Wait()
			close(ended)
		}()
		return &Worker{
			URL: urlOf(address, env), Ended: ended,
			Stop: func() { _ = command.Process.Signal(syscall.SIGTERM) },
			kill: func() { _ = command.Process.Kill() },
			report: func() (r Report) {
				line, _, _ := strings.Cut(out.String(), "\n")
				_ = json.Unmarshal([]byte(line), &r) // a worker that was killed says nothing
				return r
			},
		}, nil
	}
}

// Run is a worker process: it serves until SIGTERM, finishes in-flight requests, and
// prints its report. The test of Apart calls it; in other processes Run skips the test.
func Run(t *testing.T) {
	address := os.Getenv(envAddress)
	if address == "" {
		t.Skip("the kubelet of other tests starts it")
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, syscall.SIGTERM)
	defer signal.Stop(terminated)
	env := map[string]string{}
	for _, name := range []string{EnvModel, EnvPort, EnvFiles, EnvBlock} {
		env[name] = os.Getenv(name)
	}
	model, err := open(t.Context(), env[EnvFiles])
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	worker, err := serve(model, address, env)
	if err != nil {
		t.Fatal(err)
	}
	<-terminated // sent by the parent process, which may also kill this one
	r := &reporter{worker: worker}
	r.stop()
	<-worker.Ended()
	text, err := json.Marshal(r.end())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println(string(text))
}
