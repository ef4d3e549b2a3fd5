package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tidwall/gjson"
	"golang.org/x/sync/errgroup"
)

func main() {
	config, command, err := ParseConfig(os.Args[1:])
	if err == nil {
		switch command {
		case CommandVersion:
			fmt.Println("kvrouter", version())
		case CommandServe:
			err = serve(config)
		case CommandSimulate:
			err = config.Simulate.Run(config.simulation(), strings.Split(config.Policy, ","), os.Stdout, os.Stderr)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvrouter:", err)
		os.Exit(1)
	}
}

// version is what the build knows of itself.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}

// serve runs the router until it is told to stop, and returns when all it
// started has ended.
func serve(config Config) error {
	log := newLog(config, os.Stderr)
	slog.SetDefault(log)
	if os.Getenv("GOGC") == "" {
		// Most of the heap are tokens and index nodes without pointers, which cost
		// the collector little: collecting twice as often saves memory cheaply.
		debug.SetGCPercent(50)
	}
	if err := CheckPorts(config); err != nil {
		return err
	}
	signals, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	rooms, err := build(signals, config, log)
	if err != nil {
		return err
	}
	return rooms.run(signals)
}

// rooms is the built house.
type rooms struct {
	config    Config
	log       *slog.Logger
	index     Index
	router    *Router
	fleet     *Fleet
	launcher  *Launcher // of vLLM workers; nil: none are started
	mocker    *Mocker   // of simulated workers; nil: none are started
	model     *Model    // nil: prompt tokens come from the workers
	tokens    *Tokens
	proxy     *Proxy
	telemetry *Telemetry
	api       *API
	selection *Selection
	replicas  *Replicas          // nil: none
	traces    *JSONLines         // of policy thompson; nil: none
	learned   *thompsonStateFile // by policy thompson; nil: it is not kept
}

// build makes every room and wires it to those it needs; nothing runs yet.
func build(ctx context.Context, config Config, log *slog.Logger) (*rooms, error) {
	r := &rooms{config: config, log: log, index: NewIndex(config.IndexConfig, config.Policy, config.PolicyKnobs, config.BlockSize, time.Now)}
	var err error
	if r.model, err = openModel(ctx, config, log); err != nil {
		return nil, err
	}
	policy, err := NewPolicyWith(config.Policy, config.PolicyKnobs)
	if err != nil {
		return nil, err
	}
	seed := config.Seed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	r.router = NewRouterWith(r.index, policy, config.BlockSize, seed, config.RouterKnobs)
	r.telemetry = NewTelemetry(r.samples, r.prompts)
	r.telemetry.Watch(r.router)
	start, err := r.starter()
	if err != nil {
		return nil, err
	}
	r.fleet = NewFleet(config.fleetSettings(), start, r.index, FleetHooks{
		Up:   r.router.Up,
		Down: func(t Target, _ string) { r.router.Down(t.Key) },
		Load: r.router.Publish,
		Lag:  r.telemetry.EventLag,
	}, log)
	r.telemetry.WatchThompson(r.router, func() (ids []uint64) {
		for _, w := range r.fleet.Workers() {
			ids = append(ids, w.ID)
		}
		return ids
	})
	r.fleet.peers = NewEventPeers(config.IndexerPeers, peerKey(config))
	r.proxy = NewProxy(r.telemetry, config.RequestTimeout, r.fleet.ReportFailure)
	r.proxy.outputBlocks = config.RouterTrackOutputBlocks
	r.tokens = NewTokens(r.model, r.askWorker, config.TokenTimeout, log)
	r.api = NewAPI(config, r.router, r.tokens, r.proxy, r.telemetry, log)
	r.api.lookForModels = r.fleet.LookForModels
	r.selection = NewSelection(config.selectionSettings(), r.router, r.index, r.fleet, log)
	if config.Record != "" {
		if r.api.recorder, err = NewRecorder(config.Record, config.Policy, config.BlockSize, log); err != nil {
			return nil, err
		}
	}
	if err := r.openThompson(); err != nil {
		return nil, err
	}
	if config.ReplicaSync {
		address := net.JoinHostPort(config.Host, strconv.Itoa(config.ReplicaSyncPort))
		if r.replicas, err = NewReplicas(r.router, address, config.ReplicaPeers, log); err != nil {
			return nil, fmt.Errorf("--replica-sync-port %d: %w: free the port or choose another", config.ReplicaSyncPort, err)
		}
		r.telemetry.WatchReplicas(r.replicaCounts)
	}
	return r, nil
}

// openThompson opens the files of policy thompson, if it is in use.
func (r *rooms) openThompson() (err error) {
	if is := r.router.WithThompson(func(p *thompson) {
		r.traces, err = p.openTraces(r.config.ThompsonTraces, r.log)
	}); is && err == nil && r.config.ThompsonState != "" {
		r.learned, err = openThompsonState(r.config.ThompsonState, r.router.WithThompson)
	}
	return err
}

// openModel opens the tokenizer and the chat template. A router that starts its
// workers needs them; one that attaches to workers can do without and asks them
// for tokens.
func openModel(ctx context.Context, config Config, log *slog.Logger) (*Model, error) {
	if config.Model == "" && config.Engine == EngineMocker {
		return OpenBuiltinModel()
	}
	if config.Model == "" {
		log.Info("no --model: prompt tokens come from the workers")
		return nil, nil
	}
	dir, err := ResolveModel(ctx, config.Model, config.Python)
	var model *Model
	if err == nil {
		var options ChatOptions
		if options, err = EngineChatOptions(config.VLLMArgs); err == nil {
			if model, err = OpenModelWith(dir, options); err == nil {
				model.CacheTokens(config.TokenCacheTokens)
			}
		}
	}
	if err != nil && config.Engine == "none" {
		log.Warn("no tokenizer: prompt tokens come from the workers", "model", config.Model, "error", err)
		return nil, nil
	}
	return model, err
}

// askWorker sends a question about a prompt to the least loaded worker.
func (r *rooms) askWorker(ctx context.Context, path string, body []byte) ([]byte, error) {
	target, ok := r.router.Idlest()
	if !ok {
		return nil, ErrNoWorker
	}
	status, answer, err := r.proxy.Ask(ctx, target, http.MethodPost, path, http.Header{"Content-Type": {"application/json"}}, body)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, &AskError{Status: status, Answer: answer}
	}
	return answer, nil
}

// run serves both ports and the fleet until ctx is done, then drains: no new
// request is taken, those that run may finish for --drain-timeout, then the
// workers end.
func (r *rooms) run(ctx context.Context) error {
	if r.replicas != nil {
		defer r.replicas.pub.Close() // where Run below is not reached
	}
	openAI := newServer(r.api.Handler())
	selection := newServer(r.selection.Handler())
	openAIPort, err := listen(r.config.Host, r.config.HTTPPort, "--http-port")
	if err != nil {
		return err
	}
	selectionPort, err := listen(r.config.Host, r.config.RouterPort, "--router-port")
	if err != nil {
		openAIPort.Close()
		return err
	}
	fleet, stopFleet := context.WithCancel(context.Background())
	defer stopFleet()
	group, failed := errgroup.WithContext(ctx)
	serveOn := func(server *http.Server, port net.Listener) {
		group.Go(func() error {
			if err := server.Serve(port); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		})
	}
	serveOn(openAI, openAIPort)
	serveOn(selection, selectionPort)
	if r.replicas != nil {
		group.Go(func() error {
			r.replicas.Run(fleet)
			return nil
		})
	}
	if r.learned != nil {
		group.Go(func() error {
			r.learned.Run(fleet, r.log)
			return nil
		})
	}
	group.Go(func() error {
		r.recoverIndex(fleet) // before anything else writes to the index
		return r.runFleet(fleet)
	})
	group.Go(func() error {
		r.probeWhenReady(failed)
		return nil
	})
	r.log.Info("listening", "openai", "http://"+openAIPort.Addr().String()+"/v1", "router", "http://"+selectionPort.Addr().String(), "policy", r.config.Policy)
	group.Go(func() error {
		<-failed.Done()
		signal.Reset(syscall.SIGINT, syscall.SIGTERM) // a second signal ends at once
		r.api.Drain()
		r.log.Info("draining: running requests may finish; a second signal ends at once", "limit", r.config.DrainTimeout)
		limit, cancel := context.WithTimeout(context.Background(), r.config.DrainTimeout)
		defer cancel()
		if err := openAI.Shutdown(limit); err != nil {
			r.log.Warn("requests were still running at the end of --drain-timeout", "error", err)
			openAI.Close()
		}
		selection.Close()
		stopFleet()
		return nil
	})
	err = group.Wait()
	r.api.pairs.Close()
	r.api.recorder.Close()
	r.traces.Close()
	r.log.Info("stopped")
	return err
}

// peerKey is what to show to other routers' router ports: those that are each
// other's peers share a key.
func peerKey(config Config) string {
	if len(config.RouterAPIKey) == 0 {
		return ""
	}
	return config.RouterAPIKey[0]
}

// recoverIndex fills the index from the first peer that has one.
func (r *rooms) recoverIndex(ctx context.Context) {
	if len(r.config.IndexerPeers) == 0 {
		return
	}
	recovered, err := RecoverIndex(ctx, r.index, r.config.BlockSize, peerKey(r.config), r.config.IndexerPeers, r.log)
	if err != nil {
		r.log.Warn("no peer of --indexer-peers gave its index: starting with an empty one", "error", err)
		return
	}
	r.selection.SetRecovered(recovered)
	r.log.Info("took a peer's index", "peer", recovered.Peer, "workers", len(recovered.Partition), "blocks", recovered.Blocks, "left_out", recovered.LeftOut)
}

// probeEvery is the pause between attempts to compare tokens with a worker.
const probeEvery = time.Second

// probeWhenReady compares the router's own prompt tokens with a worker's as
// soon as one is up. It returns when that is done or ctx is.
func (r *rooms) probeWhenReady(ctx context.Context) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for told := false; ; {
		if len(r.router.Targets()) > 0 {
			err := r.tokens.Probe(ctx)
			if err == nil {
				r.learnMaxModelLen(ctx)
				return
			}
			if !told && ctx.Err() == nil {
				r.log.Warn("prompt tokens are not yet compared with a worker's", "error", err)
				told = true
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// learnMaxModelLen asks a worker how long its prompts may be, which its flags
// may have set lower than the model's files say: /tokenize tells it.
func (r *rooms) learnMaxModelLen(ctx context.Context) {
	target, ok := r.router.Idlest()
	if !ok || r.model == nil {
		return
	}
	_, answer, err := r.proxy.Ask(ctx, target, http.MethodGet, "/v1/models", nil, nil)
	if n := gjson.GetBytes(answer, "data.0.max_model_len").Int(); err == nil && n > 0 {
		r.model.SetMaxModelLen(int(n))
	}
}

// samples shows every worker rank to the metrics page.
func (r *rooms) samples() []WorkerSample {
	up := map[WorkerKey]bool{}
	for _, t := range r.router.Targets() {
		up[t.Key] = true
	}
	streams := r.fleet.Streams()
	var samples []WorkerSample
	for _, w := range r.fleet.Workers() {
		for _, key := range w.Keys() {
			s := WorkerSample{Worker: key, Up: up[key], Restarts: w.Restarts, Blocks: r.index.Blocks(key), Load: r.router.Load(key)}
			if stats := streams[key]; stats != nil {
				s.EventCount, s.Connected, s.Cold = stats.Counts(), stats.Connected.Load(), stats.Cold.Load()
			}
			samples = append(samples, s)
		}
	}
	return samples
}

// replicaCounts shows what routers have told each other to the metrics page.
func (r *rooms) replicaCounts() ReplicaCounts {
	return ReplicaCounts{
		Sent: r.replicas.Sent.Load(), Received: r.replicas.Received.Load(), Dropped: r.replicas.Dropped.Load(),
		Lost: r.replicas.Lost.Load(), Held: r.replicas.Held.Load(),
	}
}

// prompts shows where prompt tokens came from to the metrics page.
func (r *rooms) prompts() PromptSample {
	if r.tokens == nil {
		return PromptSample{}
	}
	s := r.tokens.Stats()
	return PromptSample{
		Sources: map[string]uint64{"local": s.Local, "worker_render": s.WorkerRender, "worker_tokenize": s.WorkerTokenize, "none": s.None},
		Reasons: s.Reasons,
	}
}

// listen opens a TCP port; flag names where its number came from.
func listen(host string, port int, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("%s %d: %w: free the port or choose another", flag, port, err)
	}
	return l, nil
}

// newLog returns the structured log that the flags ask for.
func newLog(config Config, out io.Writer) *slog.Logger {
	options := &slog.HandlerOptions{}
	var level slog.Level
	if level.UnmarshalText([]byte(config.LogLevel)) == nil {
		options.Level = level
	}
	if config.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(out, options))
	}
	return slog.New(slog.NewTextHandler(out, options))
}
