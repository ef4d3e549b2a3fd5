package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/jsonlines"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/logs"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
	"kvrouter/internal/fleet/discovery"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/peers/cluster"
	"kvrouter/internal/peers/dynamo"
	"kvrouter/internal/peers/relay"
	"kvrouter/internal/peers/replica"
	"kvrouter/internal/prompt/native"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/extproc"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/openai"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/serve/tracing"
	"kvrouter/internal/tools/mocker"
)

// app is the parts of a serving router.
type app struct {
	config     Config
	log        *slog.Logger
	models     *models.Set
	index      radix.Index       // of the default model
	recording  *events.Recording // of its changes; nil: none
	router     *router.Router    // of the default model
	fleet      *workers.Fleet
	source     discovery.Source  // of workers; nil: only those of the settings
	launcher   *process.Launcher // of processes; nil: none are started
	mocker     *mocker.Mocker    // of simulated workers; nil: none are started
	model      *tokens.Model     // the default one's; nil: prompt tokens come from the workers
	proxy      *proxy.Proxy
	telemetry  *telemetry.Metrics
	tenants    *telemetry.Tenants
	recorder   *telemetry.Recorder // nil: nothing is recorded
	tracer     *tracing.Tracer     // nil: nothing is traced
	edges      *guard.Edges        // counts the panics of parsers
	keys       *keys.Ring          // of the OpenAI port
	bodies     *web.Bodies         // of that port's requests
	api        *openai.API
	partitions *selection.Partitions
	selection  *selection.Service
	journal    *page.Journal
	page       *page.Page
	ports      []*web.Port         // the OpenAI port, the router port and, if there are, the page's and that of metrics
	replicas   *replica.Mesh       // nil: none
	dynamo     *dynamo.Link        // its link; nil: it is another one
	stored     *openai.Stored      // responses
	reporter   *cells.Reporter     // to the routers above
	gateway    *extproc.Server     // nil: none
	below      *relay.Below        // cells with a relay; nil: none
	traces     *jsonlines.Writer   // of policy thompson; nil: none
	learned    *thompson.StateFile // by policy thompson; nil: it is not kept

	certificates *web.Certificates // of both ports; nil: they serve plain HTTP
	reloads      *telemetry.Reloads
}

// build makes every part and hands it those it needs. Nothing runs yet.
func build(ctx context.Context, config Config, log *slog.Logger) (*app, error) {
	config.Hop, config.RouterKeys = web.NewHop(), web.NewKeys(config.RouterAPIKey)
	book := config.book()
	r := &app{config: config, stored: &openai.Stored{}, log: log, edges: guard.New()}
	exact := radix.NewTreeWithBook(book)
	index, assumer := router.NewIndexOf(exact, config.Index, config.Policy, config.Scoring.Settings, config.BlockSize, time.Now)
	var err error
	if r.index, r.recording, err = events.OpenRecording(config.Snapshot, index, log); err != nil {
		return nil, err
	}
	var matched router.Index = r.index // what choices see: also the cells by their relays
	if len(config.Relay.RelayCells) > 0 {
		deps := relay.BelowDeps{Model: config.ServedModelName, BlockSize: config.BlockSize, TLS: config.WorkerTLS, Log: log}
		if r.below, err = relay.NewBelow(config.Relay.RelayCells, deps); err != nil {
			return nil, err
		}
		matched = r.below.Over(r.index)
	}
	if r.model, err = openModel(ctx, config, log); err != nil {
		return nil, err
	}
	rule, err := policies.New(config.Policy, config.Scoring)
	if err != nil {
		return nil, err
	}
	r.router = router.New(config.Routing, router.Deps{Index: matched, Assumer: assumer, Policy: rule, BlockSize: config.BlockSize,
		Seed: cmp.Or(config.Seed, uint64(time.Now().UnixNano())), Log: log})
	r.certificates = web.NewCertificates(config.Web.TLS)
	start, err := r.starter()
	if err != nil {
		return nil, err
	}
	r.fleet = workers.New(config.fleetSettings(), workers.Deps{
		Start: start, Index: r.index, Peers: events.NewPeers(config.IndexerPeers, peerKey(config), nil), Names: r.router.Names(), Edges: r.edges,
		Log: log,
	})
	r.reloads = telemetry.NewReloads(config.reloadedFiles()...)
	fileRead := func(failed bool) { r.reloads.Note(telemetry.FileWorkers, failed) }
	if r.source, err = discovery.Open(config.Discovery, fileRead, log); err != nil {
		return nil, err
	}
	if r.tracer, err = tracing.Open(settings.Version(), log); err != nil {
		return nil, err
	}
	r.telemetry = telemetry.New(telemetry.Deps{Names: r.router.Names(), Fleet: r.fleet.IDs, Thompson: r.router, Exemplars: r.tracer != nil,
		Compared: r.fleet.Compared, Workers: config.MetricsLimit})
	r.proxy = proxy.New(config.proxySettings(), proxy.Deps{
		Observer: r.telemetry, Failed: r.fleet.ReportFailure, Names: r.router.Names(), Hop: config.Hop,
		Control:   func(worker uint64, change kv.EngineChange) func(bool) { return r.models.Control(worker, change) },
		Transport: web.NewTransport(config.WorkerTLS), Answers: config.Bodies.Answers(), Log: log,
	})
	r.models = models.New(config.modelSettings(), models.Deps{Router: r.router, Index: r.index, Tokenizer: r.model,
		TokenizerRefused: r.model == nil && config.Model != "", Ask: r.proxy.Ask, Look: r.fleet.LookForModels, Log: log})
	r.reporter = r.reportToRoutersAbove(book, exact)
	r.telemetry.Register(r.reporter.Collector())
	r.tenants = telemetry.NewTenants(r.models.Tenants)
	r.partitions = selection.NewPartitions(config.ServedModelName, r.models)
	r.keys, r.bodies = keys.New(config.Keys, config.APIKey), web.NewBodies(config.MaxBodyBytes, config.Bodies.Memory(config.MaxBodyBytes))
	useKeys, err := r.keys.Read()
	if err != nil {
		return nil, err
	}
	useCertificates, err := r.certificates.Read()
	if err != nil {
		return nil, err
	}
	useKeys()
	useCertificates()
	r.journal = page.NewJournal(config.pageSettings(), r.models, r.model)
	if config.Record != "" {
		record := telemetry.RecordSettings{File: config.Record, Policy: config.Policy, BlockSize: config.BlockSize,
			Decisions: config.Routing.RecordDecisions}
		if r.recorder, err = telemetry.NewRecorder(record, log); err != nil {
			return nil, err
		}
	}
	shown := func() map[uint64]bool { return r.models.Busiest(r.fleet.IDs(), config.MetricsLimit) }
	r.telemetry.Register(workers.NewCollector(r.router.Names(), r.fleet.Samples(r.models), shown), models.NewCollector(r.models, shown),
		guard.NewCollector(r.edges), keys.NewCollector(r.keys), r.tenants.Collector(), logs.NewCollector(log),
		telemetry.NewLostLines(r.recorder, r.recording))
	r.telemetry.Register(r.bodies.Collectors()...)
	r.telemetry.Register(r.proxy.Collectors()...)
	r.telemetry.Register(r.reloads.Collectors()...)
	r.telemetry.Register(r.tracer.Collectors()...)
	if r.below != nil {
		r.telemetry.Register(r.below.Collector())
	}
	if err := r.openThompson(); err != nil {
		return nil, err
	}
	r.telemetry.Register(telemetry.NewWriteFailures(r.fleet.SnapshotFailures, r.learned.Failures))
	if err := r.openMesh(); err != nil {
		return nil, err
	}
	r.selection = selection.New(config.selectionSettings(),
		selection.Deps{Models: r.models, Fleet: r.fleet, Partitions: r.partitions, Mesh: r.replicas, Dynamo: r.dynamo, Tenants: r.tenants,
			Metrics: r.telemetry.Handler(), Log: log})
	if err := r.listen(); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// openMesh makes the part that shares state with the other routers of the same workers, if there are any.
func (r *app) openMesh() (err error) {
	link, err := r.openLink()
	if err != nil || link == nil {
		return err
	}
	r.replicas = replica.New(replica.Deps{Router: r.router, Log: r.log, Link: link, Partition: r.partitions.Of,
		Stored: func(id string, worker, owner uint64) { r.stored.Note(id, worker, keys.Owner(owner)) },
		EachStored: func(take func(worker, owner uint64, responses []string)) {
			r.stored.Each(func(worker uint64, owner keys.Owner, ids []string) { take(worker, uint64(owner), ids) })
		}})
	r.telemetry.Register(r.replicas.Collectors()...)
	return nil
}

// openLink opens what carries messages to the other routers: NATS, or ZeroMQ for Dynamo. nil: there are none.
func (r *app) openLink() (replica.Link, error) {
	config := &r.config
	switch {
	case config.Cluster.Cluster != "":
		own, deps := config.Cluster, cluster.Deps{Edges: r.edges, Log: r.log}
		if own.ClusterDiscovery != "" {
			found, err := discovery.OpenPeers(own.ClusterDiscovery, r.log)
			if err != nil {
				return nil, err
			}
			deps.Find = found.Run
		}
		own.ClusterHost = config.clusterHost()
		link, err := cluster.Open(own, deps)
		if err != nil {
			return nil, err
		}
		r.telemetry.Register(link.Collectors()...)
		return link, nil
	case config.Dynamo.ReplicaSync:
		own := config.Dynamo
		own.ReplicaSyncHost = config.replicaHost()
		link, err := dynamo.Open(own, dynamo.Deps{Edges: r.edges, Log: r.log})
		if err != nil {
			return nil, err
		}
		r.dynamo = link
		return link, nil
	}
	return nil, nil
}

// listen opens the ports, all or none, and makes the parts that know their addresses.
// The ports serve once run does.
func (r *app) listen() (err error) {
	if err := r.openPorts(); err != nil {
		return err
	}
	r.api = r.openAI(r.ports[1].URL())
	deps := page.Deps{Journal: r.journal, Models: r.models, Fleet: r.fleet, Proxy: r.proxy,
		Totals: r.telemetry.Totals, Tenants: r.pageTenants, Ready: r.api.Ready, OpenAI: r.api, Log: r.log}
	if r.replicas != nil {
		deps.Cluster = r.replicas.Status
	}
	r.page = page.New(r.config.pageSettings(), deps)
	if r.config.Gateway.ExtProcPort == 0 {
		return nil
	}
	if r.gateway, err = r.listenForGateways(); err != nil {
		return err
	}
	r.telemetry.Register(r.gateway.Collectors()...)
	return nil
}

// pageTenants returns the tenants as the page shows them.
func (r *app) pageTenants() (all []page.Tenant) {
	for _, t := range r.tenants.List() {
		one := page.Tenant{
			Tenant: t.Tenant, Weight: t.Weight, Running: t.Running, OldestWait: t.OldestWaitSeconds, Behind: t.BehindMS / 1000, Requests: t.Requests,
			PromptTokens: t.PromptTokens,
			CachedTokens: t.CachedTokens, AnsweredTokens: t.AnsweredTokens, Wait: t.WaitSeconds, Shed: t.Shed, Kept: t.ObjectivesKept,
			Missed: t.ObjectivesMissed, TokensKept: t.TokensKept, TokensMissed: t.TokensMissed,
		}
		for _, class := range fair.Classes {
			one.Waiting.Add(class, t.Waiting[class.String()])
		}
		all = append(all, one)
	}
	return all
}

// close closes what build opened, where run is not reached.
func (r *app) close() {
	for _, port := range r.ports {
		port.Close()
	}
	if r.replicas != nil {
		r.replicas.Close()
	}
}

// openPorts opens the OpenAI port, the router port and, if there are, the page's and that of metrics.
func (r *app) openPorts() error {
	config := &r.config
	openAIShare, routerShare := config.Shares(config.Page.PagePort != 0)
	doors := []door{
		{config.Host, config.HTTPPort, "--http-port", openAIShare},
		{config.Web.RouterHost, config.RouterPort, "--router-port", routerShare},
	}
	if config.Page.PagePort != 0 {
		doors = append(doors, door{config.Web.RouterHost, config.Page.PagePort, "--page-port", routerShare})
	}
	if config.Metrics.MetricsPort != 0 {
		doors = append(doors, door{config.Metrics.MetricsHost, config.Metrics.MetricsPort, "--metrics-port", telemetry.MaxPortClients})
	}
	for _, d := range doors {
		port, err := web.Listen(d.host, d.port, d.flag, d.clients, r.certificates.Config())
		if err != nil {
			return err
		}
		r.ports = append(r.ports, port)
	}
	return nil
}

// door is a port to be opened.
type door struct {
	host    string
	port    int
	flag    string
	clients int // at most
}

// listenForGateways opens the ports of the endpoint picker, which is healthy once a
// worker has been up: from then on gateways get its refusals while none is.
func (r *app) listenForGateways() (*extproc.Server, error) {
	var served atomic.Bool
	ready := func() bool {
		now, draining := r.api.Ready()
		if now {
			served.Store(true)
		}
		return served.Load() && !draining
	}
	connections, _ := r.config.Shares(false)
	return extproc.New(r.config.Gateway, extproc.Deps{
		Host: r.config.gatewayHost(), Secure: r.certificates.Config(), Serve: r.api.ServeGateway, Ready: ready,
		Secret: r.config.Cluster.ClusterKey, SessionTTL: r.config.Routing.SessionTTL, Connections: connections, Edges: r.edges, Log: r.log,
	})
}

// openThompson opens the files of policy thompson, if it is in use.
func (r *app) openThompson() (err error) {
	state := r.config.ThompsonState
	if ok := thompson.With(r.router.WithPolicy, func(p *thompson.Policy) {
		p.WarnOfIdle(r.log)
		r.traces, err = p.OpenTraces(r.log)
	}); ok && err == nil && state != "" {
		r.learned, err = thompson.OpenState(state, r.router.WithPolicy, r.log)
	}
	return err
}

// openModel opens the tokenizer and the chat template. A program without the native library asks
// the workers for tokens, as does a router that starts none and cannot open its model.
func openModel(ctx context.Context, config Config, log *slog.Logger) (*tokens.Model, error) {
	if config.Model == "" && config.Engine == EngineMocker {
		if !native.Linked() {
			native.Link(mocker.Plain{})
		}
		return mocker.OpenBuiltinModel()
	}
	if config.Model == "" {
		log.Info("no --model: workers tokenize the prompts")
		return nil, nil
	}
	model, err := tokens.Open(ctx, tokens.Opening{Name: config.Model, Python: config.Python, EngineArgs: config.EngineArgs,
		SGLang: config.Engine == EngineSGLang, CacheTokens: config.TokenCacheTokens, Limits: config.Models.Limits}, log)
	if errors.Is(err, native.ErrMissing) || err != nil && config.Engine == "none" {
		log.Warn("no tokenizer: workers tokenize the prompts", "model", config.Model, "error", err)
		return nil, nil
	}
	return model, err
}
