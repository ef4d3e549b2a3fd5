package main

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"kvrouter/internal/discovery"
	"kvrouter/internal/events"
	"kvrouter/internal/extproc"
	"kvrouter/internal/guard"
	"kvrouter/internal/hints"
	"kvrouter/internal/jsonlines"
	"kvrouter/internal/keys"
	"kvrouter/internal/kv"
	"kvrouter/internal/logs"
	"kvrouter/internal/mocker"
	"kvrouter/internal/models"
	"kvrouter/internal/outlier"
	"kvrouter/internal/page"
	"kvrouter/internal/policies"
	"kvrouter/internal/process"
	"kvrouter/internal/proxy"
	"kvrouter/internal/radix"
	"kvrouter/internal/replica"
	"kvrouter/internal/router"
	"kvrouter/internal/selection"
	"kvrouter/internal/settings"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/thompson"
	"kvrouter/internal/tokens"
	"kvrouter/internal/traces"
	"kvrouter/internal/web"
	"kvrouter/internal/workers"
)

// app is what a serving router is made of.
type app struct {
	config    Config
	log       *slog.Logger
	models    *models.Set
	index     radix.Index       // of the default model
	changed   radix.Index       // index, as KV events change it
	recording *events.Recording // of those changes; nil: none
	router    *router.Router    // of the default model
	fleet     *workers.Fleet
	source    discovery.Source  // of workers; nil: only those of the settings
	launcher  *process.Launcher // of processes; nil: none are started
	mocker    *mocker.Mocker    // of simulated workers; nil: none are started
	model     *tokens.Model     // the default one's; nil: prompt tokens come from the workers
	tokens    *tokens.Source    // of the default model
	proxy     *proxy.Proxy
	telemetry *telemetry.Metrics
	edges     *guard.Edges // counts the panics of parsers
	api       *API
	selection *selection.Service
	page      *page.Page
	replicas  *replica.Mesh       // nil: none
	gateway   *extproc.Server     // nil: none
	traces    *jsonlines.Writer   // of policy thompson; nil: none
	learned   *thompson.StateFile // by policy thompson; nil: it is not kept

	certificates *web.Certificates      // of both ports; nil: they speak plain HTTP
	reread       func() (Config, error) // the settings anew; nil: they stay
	level        *slog.LevelVar         // of log; nil: it stays
	thresholds   router.BusyThresholds  // as the settings had them last; reload uses it
}

// build makes every part and hands it those it needs. Nothing runs yet.
func build(ctx context.Context, config Config, log *slog.Logger) (*app, error) {
	config.Hop = web.NewHop()
	r := &app{config: config, log: log, thresholds: config.Routing.BusyThresholds, edges: guard.New(), index: router.NewIndex(config.Index, config.Policy, config.Scoring.Settings, config.BlockSize, time.Now)}
	var err error
	if r.model, err = openModel(ctx, config, log); err != nil {
		return nil, err
	}
	rule, err := policies.New(config.Policy, config.Scoring)
	if err != nil {
		return nil, err
	}
	r.router = router.New(config.Routing, router.Deps{Index: r.index, Policy: rule, BlockSize: config.BlockSize, Seed: cmp.Or(config.Seed, uint64(time.Now().UnixNano())), Log: log})
	if r.changed, r.recording, err = events.OpenRecording(config.Snapshot, r.index, log); err != nil {
		return nil, err
	}
	standard := &models.Model{Name: config.ServedModelName, Router: r.router, Index: r.changed}
	standard.Read(r.model, r.ask, config.TokenTimeout, log)
	r.tokens = standard.Tokens
	r.models = models.New(config.modelSettings(), standard, log)
	r.telemetry = telemetry.New(r.samples, r.prompts)
	r.telemetry.Watch(r.models)
	r.telemetry.WatchEdges(r.edges.Panics)
	start, err := r.starter()
	if err != nil {
		return nil, err
	}
	r.fleet = workers.NewFleet(config.fleetSettings(), start, r.changed, workers.Hooks{
		Up:   r.models.Up,
		Down: func(t kv.Target, why string) { r.models.Down(t.Key); r.proxy.LetGo(t.Key.Worker, t.Generation, why) },
		Load: r.models.Publish,
		Lag:  r.telemetry.EventLag,
		Hold: r.models.Hold, Working: r.models.Working,
		Join: r.models.Join, Leave: r.models.Leave,
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
	r.fleet.Peers, r.fleet.Edges, r.fleet.Names = events.NewPeers(config.IndexerPeers, peerKey(config)), r.edges, r.router.Names()
	r.proxy = proxy.NewProxy(r.telemetry, config.RequestTimeout, r.fleet.ReportFailure)
	r.proxy.OutputBlocks, r.proxy.Hop, r.proxy.Names, r.proxy.Budget = config.Routing.RouterTrackOutputBlocks, config.Hop, r.router.Names(), outlier.NewBudget(config.Disagg.RetryBudget)
	r.proxy.Client.Transport = web.NewTransport(config.WorkerTLS)
	r.api = NewAPI(config, r.models, r.proxy, r.telemetry, log)
	r.models.Look = r.fleet.LookForModels
	if r.api.tracer, err = traces.Open(settings.Version(), log); err != nil {
		return nil, err
	}
	r.telemetry.WatchTraces(r.api.tracer)
	r.telemetry.Show(keys.NewCollector(r.api.keys))
	r.certificates = web.NewCertificates(config.Web.TLS)
	if _, err := r.readSecrets(); err != nil {
		return nil, err
	}
	r.selection = selection.New(config.selectionSettings(), r.models, r.fleet, log)
	r.page = page.New(config.pageSettings(), page.Sources{Models: r.models, Fleet: r.fleet, Proxy: r.proxy, Totals: r.telemetry.Totals, Model: r.model, Ready: r.api.Ready, OpenAI: r.api.Handler()}, log)
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
		mesh := config.Replica
		mesh.ReplicaSyncHost = config.replicaHost()
		deps := replica.Deps{Router: r.router, Edges: r.edges, Log: log, Partition: r.selection.PartitionOf}
		if mesh.ReplicaDiscovery != "" {
			found, err := discovery.OpenPeers(mesh.ReplicaDiscovery, log)
			if err != nil {
				return nil, err
			}
			deps.Find = found.Run
		}
		if r.replicas, err = replica.New(mesh, deps); err != nil {
			return nil, err
		}
		r.telemetry.WatchReplicas(r.replicas.Counts)
		r.selection.Mesh = r.replicas
	}
	return r, nil
}

// listenForGateways opens the ports of the endpoint picker. It is well from when the
// first worker is: a gateway then hears from it that there is none, too.
func (r *app) listenForGateways() (*extproc.Server, error) {
	var served atomic.Bool
	ready := func() bool {
		now, draining := r.api.Ready()
		if now {
			served.Store(true)
		}
		return served.Load() && !draining
	}
	return extproc.Listen(r.config.Gateway, extproc.Ports{Host: r.config.gatewayHost(), Secure: r.certificates.Config(), Handler: r.api.Handler(), Ready: ready}, r.edges, r.log)
}

// openThompson opens the files of policy thompson, if it is in use.
func (r *app) openThompson() (err error) {
	settings := r.config.Scoring.Thompson
	if is := thompson.With(r.router.WithPolicy, func(p *thompson.Policy) {
		p.WarnOfIdle(r.log)
		r.traces, err = p.OpenTraces(settings.ThompsonTraces, r.log)
	}); is && err == nil && settings.ThompsonState != "" {
		r.learned, err = thompson.OpenState(settings.ThompsonState, r.router.WithPolicy, r.log)
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

// ask puts a question of the router's own to a worker.
func (r *app) ask(ctx context.Context, t kv.Target, method, path string, header http.Header, body []byte) (status int, answer []byte, err error) {
	return r.proxy.Ask(ctx, t, method, path, header, body)
}

// route chooses a worker that is not among exclude.
func (r *inference) route(exclude []uint64) (router.Decision, error) {
	r.request.Exclude = exclude
	d, err := r.decide(r.request)
	if err == nil {
		r.decided(&d, nil, d)
	}
	return d, err
}

// routePair is route for a request that two workers may share; why says why it is
// to stay whole, if it is.
func (r *inference) routePair(exclude []uint64, why string) (router.Pair, error) {
	r.request.Exclude = exclude
	pair, err := r.decidePair(r.request, why)
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
func (r *inference) decide(request router.Request) (router.Decision, error) {
	decision, err := r.model.Router.Route(r.ctx, request)
	if err != nil && request.Pinned != nil {
		err = &hints.PinnedError{Worker: request.Pinned, Names: r.api.models.Names(), Err: err}
	}
	return decision, err
}

// decidePair is decide for a request that two workers may share; why says why it
// is to stay whole, if it is.
func (r *inference) decidePair(request router.Request, why string) (router.Pair, error) {
	rule := router.PairRule{LeastUncached: r.api.config.Disagg.DisaggMinUncachedTokens, Whole: why, Enforce: r.api.config.Disagg.EnforceDisagg}
	if request.PinnedPrefill != nil && why == proxy.WholePrefilled {
		return router.Pair{}, router.ErrNoPair // its prefill worker has failed
	}
	pair, err := r.model.Router.RoutePair(r.ctx, request, rule)
	if err != nil && (request.Pinned != nil || request.PinnedPrefill != nil) {
		err = &hints.PinnedError{Worker: request.Pinned, Prefill: request.PinnedPrefill, Names: r.api.models.Names(), Err: err}
	}
	return pair, err
}

// samples shows every worker rank to the metrics page and to people.
func (r *app) samples() []workers.Sample { return r.fleet.Samples(r.models) }

// prompts shows where prompt tokens came from to the metrics page.
func (r *app) prompts() telemetry.PromptSample {
	s := r.models.Prompts()
	return telemetry.PromptSample{
		Sources: map[string]uint64{"local": s.Local, "worker_render": s.WorkerRender, "worker_tokenize": s.WorkerTokenize, "none": s.None},
		Reasons: s.Reasons,
	}
}
