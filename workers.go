package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/fleet/sglang"
	"kvrouter/internal/fleet/vllm"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/tools/demo"
	"kvrouter/internal/tools/doctor"
	"kvrouter/internal/tools/mocker"
)

// defaultWorkers is the number of workers that are started where nothing is said.
const defaultWorkers = 2

// chooseEngine makes one list of the attached workers and sets Engine. Where workers are
// attached, others are started only if a flag asks for them.
func (c *Config) chooseEngine() {
	c.Flags.Join()
	attaches := len(c.Worker) > 0 || c.Discovery.Discovery != ""
	asked := c.PrefillWorkers != 0 || c.DecodeWorkers != 0 || c.WorkersGiven != nil && *c.WorkersGiven != 0
	switch {
	case c.EngineGiven != nil:
		c.Engine = *c.EngineGiven
	case attaches && !asked:
		c.Engine = EngineNone
	default:
		c.Engine = EngineVLLM
	}
}

// startsNone says in errors why no worker process is started.
func (c *Config) startsNone() string {
	if c.EngineGiven == nil {
		return "with workers attached, none is started unless --num-workers is given"
	}
	return fmt.Sprintf("--engine %s starts no worker process", c.Engine)
}

// countWorkers sets NumWorkers from the flags.
func (c *Config) countWorkers() error {
	apart := c.PrefillWorkers != 0 || c.DecodeWorkers != 0
	switch {
	case apart && c.WorkersGiven != nil:
		return fmt.Errorf("--num-workers %d with --prefill-workers and --decode-workers: started workers are either all aggregated or all "+
			"disaggregated; leave one of the two out", *c.WorkersGiven)
	case apart && c.Engine == EngineNone:
		return errors.New("--prefill-workers and --decode-workers start workers, but --engine is none; leave them out")
	case apart && (c.PrefillWorkers < 1 || c.DecodeWorkers < 1):
		return fmt.Errorf("--prefill-workers %d with --decode-workers %d: give at least 1 of each", c.PrefillWorkers, c.DecodeWorkers)
	case apart:
		c.NumWorkers = c.PrefillWorkers + c.DecodeWorkers
	case c.WorkersGiven != nil:
		c.NumWorkers = *c.WorkersGiven
	default:
		c.NumWorkers = defaultWorkers
	}
	if c.Engine != EngineNone && (c.NumWorkers < 1 || c.NumWorkers > 1000) {
		return fmt.Errorf("%s: give 1 to 1000; for none use --engine none", c.engineSettings().Asked())
	}
	return nil
}

// engine returns the engine of the workers started as processes; starts is whether
// there are any. Without, it is vLLM: its Python reads a model's name.
func (c *Config) engine() (e process.Engine, starts bool) {
	if c.Engine == EngineSGLang {
		return sglang.Engine(), true
	}
	return vllm.Engine(), c.Engine == EngineVLLM
}

// EngineLimits returns the maximum tokens of a started worker's pass and the blocks
// of its KV cache; 0: unknown.
func (c *Config) EngineLimits() (maxBatchedTokens, totalBlocks int) {
	if c.Engine == EngineMocker {
		return c.Mock.MaxNumBatchedTokens, c.Mock.NumGPUBlocks
	}
	engine, _ := c.engine()
	return engine.Limits(c.EngineArgs, c.BlockSize)
}

// Ranks returns the number of data-parallel ranks of a started worker. Each uses
// one port for KV events, one for replay and one for load.
func (c *Config) Ranks() int {
	if c.Engine == EngineMocker {
		return max(1, c.Mock.DataParallelSize)
	}
	engine, _ := c.engine()
	return engine.Ranks(c.EngineArgs)
}

// nixl reports whether the workers that are started have NIXL's side channel.
func (c *Config) nixl() bool { return c.Engine == EngineVLLM && c.PrefillWorkers > 0 }

// startedPart returns the part of started worker i where prefill and decode are
// apart: prefill workers have the lowest numbers.
func (c *Config) startedPart(i int) kv.Disagg {
	if c.PrefillWorkers == 0 && c.Engine == EngineMocker && c.Mock.PeerBandwidth > 0 {
		return kv.Disagg{P2P: kv.Bootstrap{Host: "127.0.0.1", Port: uint16(c.BaseWorkerPort + i)}} // its side channel is at the HTTP port
	}
	if c.KVP2P {
		return kv.Disagg{P2P: kv.Bootstrap{Host: "127.0.0.1", Port: uint16(c.BaseP2PPort + i*c.Ranks())}}
	}
	if c.PrefillWorkers == 0 {
		return kv.Disagg{}
	}
	d := kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}
	if i < c.PrefillWorkers {
		d.Role = kv.RolePrefill
	}
	base := c.BaseBootstrapPort
	if c.Engine == EngineMocker { // its bootstrap server is at the HTTP port
		base = c.BaseWorkerPort
	}
	if c.Engine == EngineSGLang || c.Engine == EngineMocker && c.Mock.DisaggKind() == kv.KindSGLang {
		d.Kind = kv.KindSGLang
		if d.Role == kv.RolePrefill {
			d.Bootstrap = kv.Bootstrap{Host: "127.0.0.1", Port: uint16(base + i)}
		}
	}
	return d
}

// ports are those of started workers.
func (c *Config) workerPorts() process.Ports {
	return process.Ports{
		HTTP: c.BaseWorkerPort, KVEvents: c.BaseKVEventsPort, KVReplay: c.BaseKVReplayPort, Load: c.BaseMetricsPort, NIXL: c.BaseNIXLPort,
		Bootstrap: c.BaseBootstrapPort, P2P: c.BaseP2PPort, Ranks: c.Ranks(),
	}
}

// engineSettings say how workers are started as processes.
func (c *Config) engineSettings() process.Settings {
	return process.Settings{
		Python: c.Python, Model: c.Model, ModelFolder: c.ModelFolder, ServedModelName: c.ServedModelName,
		NumWorkers: c.NumWorkers, PrefillWorkers: c.PrefillWorkers, BlockSize: c.BlockSize,
		GPUsPerWorker: c.GPUsPerWorker, GPUs: c.GPUs, Cores: c.Cores, KVEvents: c.KVEvents(), Args: c.EngineArgs, OffloadGiB: c.KVOffloadGiB,
		Pulls: c.KVP2P,
		Ports: c.workerPorts(),
	}
}

// modelSettings returns the settings of a model that comes with workers.
func (c *Config) modelSettings() models.Settings {
	return models.Settings{
		Flags: c.Models, Model: c.Model, ServedModelName: c.ServedModelName, BlockSize: c.BlockSize, Policy: c.Policy, Scoring: c.Scoring,
		Index:   c.Index,
		Routing: c.Routing, Seed: c.Seed, TokenTimeout: c.TokenTimeout, CacheTokens: c.TokenCacheTokens,
	}
}

// setup is what command doctor looks at.
func (c *Config) setup() doctor.Setup {
	engine, starts := c.engine()
	attached := make([]probe.Server, len(c.Worker))
	for i, w := range c.Worker {
		attached[i] = w.Server
	}
	return doctor.Setup{
		Engine: engine, Starts: starts, Attached: c.Engine == EngineNone,
		Settings: c.engineSettings(), Ports: c.ports(), BlockSize: c.BlockSize, KVEvents: c.KVEvents(),
		Workers: attached, Key: cmp.Or(c.WorkerKey, kv.Secret(engine.Key(c.EngineArgs))), TLS: c.WorkerTLS,
		ModelsDir: c.Models.ModelsDir, Opening: tokens.Opening{Limits: c.Models.Limits}, SendTokens: c.Models.SendTokens == models.SendAuto,
	}
}

// fleetSettings say which workers there are.
func (c *Config) fleetSettings() workers.Settings {
	engine, starts := c.engine()
	s := workers.Settings{
		Attached: c.Worker, Ports: c.workerPorts(), BlockSize: c.BlockSize, KVEvents: c.KVEvents(), Snapshot: c.Snapshot,
		Assumes: c.Index.Assumes(c.Policy, c.Scoring.Settings), ServedModelName: c.ServedModelName,
		TLS: c.WorkerTLS, Hop: c.Hop, WorkerKey: c.WorkerKey, Key: kv.Secret(engine.Key(c.EngineArgs)),
		PassKey:        len(c.APIKey) > 0 || c.Keys.APIKeysFile != "",
		Trained:        c.Rollouts,
		SilenceTimeout: c.Routing.SilenceTimeout, StartupTimeout: c.StartupTimeout, RestartBackoffMax: c.RestartBackoffMax, LastStart: c.LastStart,
	}
	if c.Engine == EngineNone {
		return s
	}
	s.MaxBatchedTokens, s.TotalBlocks = c.EngineLimits()
	for i := range c.NumWorkers {
		s.Started = append(s.Started, c.startedPart(i))
	}
	if starts {
		s.Engine, s.Signs = engine.Kind, engine.Signs
		if engine.Traits != nil {
			s.Traits = engine.Traits(c.engineSettings())
		}
	} else {
		s.ReadyPoll, s.Engine = mockReadyPoll, c.Mock.Engine()
	}
	return s
}

// mockSettings say how simulated workers are started.
func (c *Config) mockSettings() mocker.Settings {
	s := c.Mock
	s.ServedModelName, s.BlockSize, s.Seed, s.KVEvents, s.Ports = c.ServedModelName, c.BlockSize, c.Seed, c.KVEvents(), c.workerPorts()
	for i := range c.NumWorkers {
		s.Parts = append(s.Parts, c.startedPart(i))
	}
	return s
}

func (c *Config) selectionSettings() selection.Settings {
	_, places := c.Shares(c.Page.PagePort != 0)
	return selection.Settings{
		Host: c.Web.RouterHost, Keys: c.RouterKeys, BlockSize: c.BlockSize, KVEvents: c.KVEvents(),
		TrackPrefillTokens: c.Routing.RouterTrackPrefillTokens, CountsPasses: c.Routing.RouterQueueThreshold != nil,
		Hop: c.Hop, Places: places,
	}
}

func (c *Config) pageSettings() page.Settings {
	return page.Settings{Flags: c.Page, Host: c.Web.RouterHost, Keys: c.RouterKeys, APIKeyed: len(c.APIKey) > 0 || c.Keys.APIKeysFile != "",
		Secure: c.Web.TLS.TLSCert != "", Version: settings.Version(), Policy: c.Policy, Demo: c.Demo, Fair: c.Routing.Fair()}
}

// demo is what makes traffic.
func (r *app) demo() demo.Settings {
	with := func(i int, change func(*mocker.Worker)) {
		if w := r.mocker.Worker(i); w != nil {
			change(w)
		}
	}
	return demo.Settings{
		OpenAI: r.api, Model: r.config.ServedModelName, Workers: r.config.NumWorkers, Seed: r.config.Seed, Log: r.log,
		Break: func(i, status int) { with(i, func(w *mocker.Worker) { w.Failing.Store(int32(status)) }) },
		Crash: func(i int) { with(i, func(w *mocker.Worker) { w.End(demo.ErrCrash) }) },
	}
}

// starter returns the function that starts a worker, as a process or simulated; nil:
// no worker is started.
func (r *app) starter() (start workers.Start, err error) {
	if engine, starts := r.config.engine(); starts {
		if r.launcher, err = process.NewLauncher(engine, r.config.engineSettings(), r.log); err != nil {
			return nil, err
		}
		return r.launcher.Start, nil
	}
	if r.config.Engine == EngineMocker {
		if r.mocker, err = mocker.NewMocker(r.config.mockSettings(), r.model, r.log); err != nil {
			return nil, err
		}
		return r.startMock, nil
	}
	return nil, nil
}

// runFleet runs the workers until ctx is done and all that were started have
// ended.
func (r *app) runFleet(ctx context.Context) (err error) {
	if r.launcher != nil {
		if err := r.launcher.Open(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.launcher.Close()) }()
	}
	return r.fleet.Run(ctx, r.models, fleetListener{r.telemetry, r.proxy})
}

// fleetListener passes on a fleet's reports beside its members.
type fleetListener struct {
	*telemetry.Metrics
	proxy *proxy.Proxy
}

// Down aborts the in-flight requests of a worker that is down.
func (l fleetListener) Down(t kv.Target, why string) {
	l.proxy.Abort(t.Key.Worker, t.Generation, why)
}

// mockReadyPoll is the pause between looks at a starting simulated worker.
const mockReadyPoll = 5 * time.Millisecond

// errMockStopped is why a simulated worker ended that the fleet has ended.
var errMockStopped = errors.New("stopped by the router")

// startMock starts a simulated worker, which prints nothing.
func (r *app) startMock(i int, _ func(stream, text string)) (process.Started, error) {
	w, err := r.mocker.Start(i)
	if err != nil {
		return process.Started{}, err
	}
	return process.Started{Ended: w.Ended(), Stop: func() { w.Stop(errMockStopped) }, Kill: func() { w.End(errMockStopped) }}, nil
}
