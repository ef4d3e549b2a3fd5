package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/discovery"
	"kvrouter/internal/events"
	"kvrouter/internal/guard"
	"kvrouter/internal/hints"
	"kvrouter/internal/jsonlines"
	"kvrouter/internal/keys"
	"kvrouter/internal/kv"
	"kvrouter/internal/logs"
	"kvrouter/internal/mocker"
	"kvrouter/internal/outlier"
	"kvrouter/internal/page"
	"kvrouter/internal/policy"
	"kvrouter/internal/process"
	"kvrouter/internal/proxy"
	"kvrouter/internal/radix"
	"kvrouter/internal/replica"
	"kvrouter/internal/router"
	"kvrouter/internal/selection"
	"kvrouter/internal/settings"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/tokens"
	"kvrouter/internal/traces"
	"kvrouter/internal/web"
	"kvrouter/internal/workers"
)

// app is what a serving router is made of.
type app struct {
	config    Config
	log       *slog.Logger
	index     radix.Index
	changed   radix.Index       // index, as KV events change it
	recording *events.Recording // of those changes; nil: none
	router    *router.Router
	fleet     *workers.Fleet
	source    discovery.Source  // of workers; nil: only those of the settings
	launcher  *process.Launcher // of processes; nil: none are started
	mocker    *mocker.Mocker    // of simulated workers; nil: none are started
	model     *tokens.Model     // nil: prompt tokens come from the workers
	tokens    *tokens.Source
	proxy     *proxy.Proxy
	telemetry *telemetry.Metrics
	edges     *guard.Edges // counts the panics of parsers
	api       *API
	selection *selection.Service
	page      *page.Page
	replicas  *replica.Mesh             // nil: none
	traces    *jsonlines.Writer         // of policy thompson; nil: none
	learned   *policy.ThompsonStateFile // by policy thompson; nil: it is not kept

	certificates *web.Certificates      // of both ports; nil: they speak plain HTTP
	reread       func() (Config, error) // the settings anew; nil: they stay
	level        *slog.LevelVar         // of log; nil: it stays
	thresholds   router.BusyThresholds  // as the settings had them last; reload uses it
}

// build makes every part and hands it those it needs. Nothing runs yet.
func build(ctx context.Context, config Config, log *slog.Logger) (*app, error) {
	config.Hop = web.NewHop()
	r := &app{config: config, log: log, thresholds: config.Routing.BusyThresholds, edges: guard.New(), index: router.NewIndex(config.Index, config.Policy, config.Scoring, config.BlockSize, time.Now)}
	var err error
	if r.model, err = openModel(ctx, config, log); err != nil {
		return nil, err
	}
	policy, err := policy.New(config.Policy, config.Scoring)
	if err != nil {
		return nil, err
	}
	r.router = router.New(r.index, policy, config.BlockSize, cmp.Or(config.Seed, uint64(time.Now().UnixNano())), config.Routing)
	r.router.Log = log
	r.telemetry = telemetry.New(r.samples, r.prompts)
	r.telemetry.Watch(r.router)
	r.telemetry.WatchEdges(r.edges.Panics)
	if r.changed, r.recording, err = events.OpenRecording(config.Snapshot, r.index, log); err != nil {
		return nil, err
	}
	start, err := r.starter()
	if err != nil {
		return nil, err
	}
	r.fleet = workers.NewFleet(config.fleetSettings(), start, r.changed, workers.Hooks{
		Up:   func(t kv.Target) { r.tokens.Met(t.Engine == kv.EngineSGLang); r.router.Up(t) },
		Down: func(t kv.Target, why string) { r.router.Down(t.Key); r.proxy.LetGo(t.Key.Worker, t.Generation, why) },
		Load: r.router.Publish,
		Lag:  r.telemetry.EventLag,
		Hold: r.router.Hold, Working: r.router.Working,
	}, log)
	if r.source, err = discovery.Open(config.Discovery, log); err != nil {
		return nil, err
	}
	fleet := func() (ids []uint64) {
		for _, w := range r.fleet.Workers() {
			ids = append(ids, w.ID)
		}
		return ids
	}
	r.telemetry.WatchThompson(r.router, fleet)
	r.telemetry.WatchFleet(fleet)
	r.fleet.Peers, r.fleet.Edges, r.fleet.Names = events.NewPeers(config.IndexerPeers, peerKey(config)), r.edges, r.router.Names
	r.proxy = proxy.NewProxy(r.telemetry, config.RequestTimeout, r.fleet.ReportFailure)
	r.proxy.OutputBlocks, r.proxy.Hop, r.proxy.Names, r.proxy.Budget = config.Routing.RouterTrackOutputBlocks, config.Hop, r.router.Names, outlier.NewBudget(config.Disagg.RetryBudget)
	r.proxy.Client.Transport = web.NewTransport(config.WorkerTLS)
	r.tokens = tokens.NewSource(r.model, r.askWorker, config.TokenTimeout, log)
	r.api = NewAPI(config, r.router, r.tokens, r.proxy, r.telemetry, log)
	r.api.lookForModels = r.fleet.LookForModels
	if r.api.tracer, err = traces.Open(settings.Version(), log); err != nil {
		return nil, err
	}
	r.telemetry.WatchTraces(r.api.tracer)
	r.telemetry.Show(keys.NewCollector(r.api.keys))
	r.certificates = web.NewCertificates(config.Web.TLS)
	if _, err := r.readSecrets(); err != nil {
		return nil, err
	}
	r.selection = selection.New(config.selectionSettings(), r.router, r.index, r.fleet, log)
	r.page = page.New(config.pageSettings(), page.Sources{Router: r.router, Fleet: r.fleet, Proxy: r.proxy, Totals: r.telemetry.Totals, Model: r.model, Ready: r.api.Ready, OpenAI: r.api.Handler()}, log)
	r.api.page = r.page
	if config.Record != "" {
		if r.api.recorder, err = telemetry.NewRecorder(config.Record, config.Policy, config.BlockSize, log); err != nil {
			return nil, err
		}
		r.api.recorder.Decisions = config.Routing.RecordDecisions
	}
	r.telemetry.WatchGuards(telemetry.Guards{
		BodyBytes: r.api.bodies.Held, BodiesRefused: r.api.bodies.Refused, LinesLost: func() uint64 { return r.api.recorder.Lost() + r.recording.Lost() },
		LinesSuppressed: func() uint64 { return logs.Suppressed(log) },
	})
	if err := r.openThompson(); err != nil {
		return nil, err
	}
	if config.Replica.ReplicaSync {
		address := net.JoinHostPort(config.replicaHost(), strconv.Itoa(config.Replica.ReplicaSyncPort))
		if r.replicas, err = replica.New(r.router, address, config.Replica.ReplicaPeers, r.edges, log); err != nil {
			return nil, fmt.Errorf("--replica-sync-port %d: %w: free the port or choose another", config.Replica.ReplicaSyncPort, err)
		}
		if err := r.replicas.UseKey(config.Replica.ReplicaKey); err != nil {
			return nil, err
		}
		r.telemetry.WatchReplicas(r.replicaCounts)
	}
	return r, nil
}

// openThompson opens the files of policy thompson, if it is in use.
func (r *app) openThompson() (err error) {
	if is := r.router.WithThompson(func(p *policy.Thompson) {
		p.WarnOfIdle(r.log)
		r.traces, err = p.OpenTraces(r.config.Scoring.ThompsonTraces, r.log)
	}); is && err == nil && r.config.Scoring.ThompsonState != "" {
		r.learned, err = policy.OpenThompsonState(r.config.Scoring.ThompsonState, r.router.WithThompson)
	}
	return err
}

// openModel opens the tokenizer and the chat template. A router that starts its
// workers needs them; one that attaches to workers can do without and asks them
// for tokens.
func openModel(ctx context.Context, config Config, log *slog.Logger) (*tokens.Model, error) {
	if config.Model == "" && config.Engine == EngineMocker {
		return mocker.OpenBuiltinModel()
	}
	if config.Model == "" {
		log.Info("no --model: prompt tokens come from the workers")
		return nil, nil
	}
	model, err := tokens.Open(ctx, tokens.Opening{Name: config.Model, Python: config.Python, EngineArgs: config.EngineArgs, SGLang: config.Engine == EngineSGLang, CacheTokens: config.TokenCacheTokens}, log)
	if err != nil && config.Engine == "none" {
		log.Warn("no tokenizer: prompt tokens come from the workers", "model", config.Model, "error", err)
		return nil, nil
	}
	return model, err
}

// askWorker sends a question about a prompt to the least loaded worker.
func (r *app) askWorker(ctx context.Context, path string, body []byte) ([]byte, error) {
	engine := kv.EngineVLLM
	if r.tokens.SGLang() {
		engine = kv.EngineSGLang
	}
	target, ok := r.router.Idlest(engine)
	if !ok {
		return nil, router.ErrNoWorker
	}
	return r.asker(target)(ctx, path, body)
}

// asker sends questions about prompts to a worker.
func (r *app) asker(target kv.Target) tokens.Asker {
	return func(ctx context.Context, path string, body []byte) ([]byte, error) {
		asked := time.Now()
		status, answer, err := r.proxy.Ask(ctx, target, http.MethodPost, path, http.Header{"Content-Type": {"application/json"}}, body)
		if err != nil {
			r.router.AskFailed(ctx, target, asked)
		}
		if err == nil && status != http.StatusOK {
			err = &tokens.AskError{Status: status, Answer: answer}
		}
		return answer, err
	}
}

// peers are the workers whose prompt tokens are compared with the router's own. The
// engine's flags may have set lower than the model's files say how long its prompts
// may be: its list of models tells.
func (r *app) peers() (peers []tokens.Peer) {
	for _, t := range r.api.workers() {
		peers = append(peers, tokens.Peer{ID: t.Key.Worker, Generation: t.Generation, SGLang: t.Engine == kv.EngineSGLang, Ask: r.asker(t), MaxModelLen: func(ctx context.Context) int {
			_, answer, _ := r.proxy.Ask(ctx, t, http.MethodGet, "/v1/models", nil, nil)
			return int(gjson.GetBytes(answer, "data.0.max_model_len").Int())
		}})
	}
	return peers
}

// route chooses a worker that is not among exclude.
func (r *inference) route(exclude []uint64) (router.Decision, error) {
	r.request.Exclude = exclude
	d, err := r.api.decide(r.ctx, r.request)
	if err == nil {
		r.decided(&d, nil, d)
	}
	return d, err
}

// routePair is route for a request that two workers may share; why says why it is
// to stay whole, if it is.
func (r *inference) routePair(exclude []uint64, why string) (router.Pair, error) {
	r.request.Exclude = exclude
	pair, err := r.api.decidePair(r.ctx, r.request, why)
	if err == nil {
		r.decided(&pair.Decode, &pair.Prefill, pair.Took())
	}
	return pair, err
}

// decided records the times of a decision. Where the usage will speak of more than
// the decision does, its tokens are not to be compared.
func (r *inference) decided(d, prefill *router.Decision, times router.Decision) {
	if r.countsMore() {
		d.Tokens = 0
	}
	r.api.page.Decided(r.seen, r.request.Model, d, prefill)
	if r.kind != tokens.NoPrompt {
		r.api.telemetry.Decided(r.took, times)
	}
}

// decide routes a request; the error of one that names its worker says so.
func (a *API) decide(ctx context.Context, request router.Request) (router.Decision, error) {
	decision, err := a.router.Route(ctx, request)
	if err != nil && request.Pinned != nil {
		err = &hints.PinnedError{Worker: request.Pinned, Names: a.router.Names, Err: err}
	}
	return decision, err
}

// decidePair is decide for a request that two workers may share; why says why it
// is to stay whole, if it is.
func (a *API) decidePair(ctx context.Context, request router.Request, why string) (router.Pair, error) {
	rule := router.PairRule{LeastUncached: a.config.Disagg.DisaggMinUncachedTokens, Whole: why, Enforce: a.config.Disagg.EnforceDisagg}
	if request.PinnedPrefill != nil && why == proxy.WholePrefilled {
		return router.Pair{}, router.ErrNoPair // its prefill worker has failed
	}
	pair, err := a.router.RoutePair(ctx, request, rule)
	if err != nil && (request.Pinned != nil || request.PinnedPrefill != nil) {
		err = &hints.PinnedError{Worker: request.Pinned, Prefill: request.PinnedPrefill, Names: a.router.Names, Err: err}
	}
	return pair, err
}

// samples shows every worker rank to the metrics page and to people.
func (r *app) samples() []workers.Sample { return r.fleet.Samples(r.router) }

// replicaCounts shows what routers have told each other to the metrics page.
func (r *app) replicaCounts() telemetry.ReplicaCounts {
	return telemetry.ReplicaCounts{
		Sent: r.replicas.Sent.Load(), Received: r.replicas.Received.Load(), Dropped: r.replicas.Dropped.Load(),
		Lost: r.replicas.Lost.Load(), Held: r.replicas.Held.Load(),
	}
}

// prompts shows where prompt tokens came from to the metrics page.
func (r *app) prompts() telemetry.PromptSample {
	if r.tokens == nil {
		return telemetry.PromptSample{}
	}
	s := r.tokens.Stats()
	return telemetry.PromptSample{
		Sources: map[string]uint64{"local": s.Local, "worker_render": s.WorkerRender, "worker_tokenize": s.WorkerTokenize, "none": s.None},
		Reasons: s.Reasons,
	}
}
