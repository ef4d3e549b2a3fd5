package main

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/discovery"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/peers/cluster"
	"kvrouter/internal/peers/dynamo"
	"kvrouter/internal/peers/relay"
	"kvrouter/internal/serve/extproc"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/tools/mocker"
)

// Names of the values that --engine takes.
const (
	EngineVLLM   = "vllm"   // start vLLM workers
	EngineSGLang = "sglang" // start SGLang workers
	EngineMocker = "mocker" // start simulated workers in this process
	EngineNone   = "none"   // start none: route to attached and registered workers
)

// DefaultGPUModel is the default model on a machine with a GPU. Without one, it is
// the small model of `make setup`.
const DefaultGPUModel = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"

// maxOffloadGiB bounds --kv-offload-gib: more than a machine has.
const maxOffloadGiB = 1 << 20

// Config contains the settings of command serve. Each flag can also be given as an
// environment variable (KVROUTER_ and the flag's name in capitals, _ for -) or as a key
// of the YAML file of --config (the flag's name). Precedence: command line, environment,
// file, default.
type Config struct {
	// The model, the engine, and the workers started.
	Model           string  `group:"Model and engine" placeholder:"NAME|DIR" help:"Model to serve: a Hugging Face name or a folder. Default: deepseek-ai/DeepSeek-R1-Distill-Llama-8B with a GPU, otherwise the SmolLM2 135M of 'make setup'."`
	ServedModelName string  `group:"Model and engine" placeholder:"NAME" help:"Model name in the API. Default: the name of --model; for a folder, its last path element."`
	EngineGiven     *string `group:"Model and engine" name:"engine" enum:"vllm,sglang,mocker,none" help:"Engine to start: vllm; sglang; mocker (simulated workers, which need no GPU, Python or model); none (route to attached and registered workers only). Default: none if workers are attached (URL, --worker, --discovery) and --num-workers is not given, otherwise vllm."`
	Demo            bool    `group:"Model and engine" help:"With --engine mocker: generate traffic to watch: conversations, agents with shared prefixes, clients that disconnect, and a worker that fails now and then."`
	WorkersGiven    *int    `group:"Model and engine" name:"num-workers" placeholder:"N" help:"Number of workers to start, beside those attached. Default: 2; with workers attached, 0 unless --engine is given."`
	GPUsPerWorker   int     `group:"Model and engine" name:"gpus-per-worker" default:"1" help:"GPUs per worker, or per data-parallel rank (tensor parallelism)."`
	KVP2P           bool    `group:"Model and engine" name:"kv-p2p" default:"false" help:"Let started vLLM workers pull KV blocks from each other's host memory, with --kv-offload-gib: vLLM's secondary tier p2p."`
	KVOffloadGiB    float64 `group:"Model and engine" name:"kv-offload-gib" default:"0" help:"Host memory for offloaded KV blocks of each worker, or data-parallel rank, GiB: vLLM's OffloadingConnector or SGLang's hierarchical cache. SGLang takes whole GB for each GPU. 0 offloads nothing."`
	Python          string  `group:"Model and engine" placeholder:"PATH" help:"Python interpreter with vLLM or SGLang installed. Default: the environment prepared by 'make setup' or 'make setup-sglang', otherwise python3."`

	// Workers that run already, and how started ones are looked after.
	workers.Flags
	Discovery discovery.Settings `embed:""`
	Models    models.Flags       `embed:""`

	// Addresses of the router, and the first port of each kind of started workers.
	Host              string          `group:"Addresses" default:"127.0.0.1" help:"Listen address of the OpenAI port."`
	HTTPPort          int             `group:"Addresses" name:"http-port" default:"8000" help:"OpenAI port. 0 selects a free port."`
	RouterPort        int             `group:"Addresses" default:"7000" help:"Router port (/find_best_worker, /workers); 0 selects a free port."`
	BaseWorkerPort    int             `group:"Addresses" default:"8100" help:"First HTTP port of started workers; worker i listens on this port plus i."`
	BaseKVEventsPort  int             `group:"Addresses" name:"base-kv-events-port" default:"5557" help:"First KV-event port of started workers; worker i publishes on this port plus i times its ranks."`
	BaseKVReplayPort  int             `group:"Addresses" name:"base-kv-replay-port" default:"5757" help:"First KV-event replay port of started workers; worker i listens on this port plus i times its ranks."`
	BaseMetricsPort   int             `group:"Addresses" default:"5657" help:"First load-metrics port of started workers; worker i publishes on this port plus i times its ranks."`
	Web               web.Settings    `embed:""`
	Page              page.Flags      `embed:""`
	Metrics           telemetry.Flags `embed:""`
	BaseNIXLPort      int             `group:"Addresses" name:"base-nixl-port" default:"5600" help:"First NIXL side-channel port of started vLLM workers, with --prefill-workers; worker i listens on this port plus i times its ranks."`
	BaseP2PPort       int             `group:"Addresses" name:"base-p2p-port" default:"5710" help:"First port of started vLLM workers for pulls, with --kv-p2p; worker i listens on this port plus i times its ranks."`
	BaseBootstrapPort int             `group:"Addresses" default:"8998" help:"First bootstrap port of started SGLang prefill workers; worker i listens on this port plus i."`

	// Choice of a worker, index of caches, and disaggregation.
	Scheduling
	TokenTimeout     time.Duration   `group:"Routing" default:"2s" help:"Maximum time to wait for a worker to tokenize a prompt that the router cannot render itself."`
	TokenCacheTokens int             `group:"Routing" default:"2097152" help:"Size of the tokenization cache, in tokens of 4 bytes. It holds the tokens of system prompts and turns, so that the same text is encoded once. 0 disables the cache."`
	CORSOrigins      []string        `name:"cors-origins" group:"Requests" placeholder:"ORIGIN,..." help:"Origins whose pages may use the OpenAI port, such as https://chat.example.com; * allows all. Default: none."`
	CollectUsage     bool            `group:"Routing" default:"true" negatable:"" help:"Request usage from workers for streams whose client did not ask for it, and remove it from the answer."`
	Routing          router.Settings `embed:""`
	IndexerPeers     []string        `group:"Routing" placeholder:"URL" help:"Routers (or Dynamo services) to copy the index from at startup: the first that answers GET /dump. They also supply KV events that a worker cannot replay. Comma-separated."`
	Snapshot         events.Settings `embed:""`
	Proxy            proxy.Settings  `embed:""`

	// Authentication, and limits on the size and duration of requests.
	APIKey           []string         `group:"Requests" name:"api-key" placeholder:"KEY" help:"Bearer keys accepted on the OpenAI port, comma-separated. Default: no key is required."`
	Keys             keys.Settings    `embed:""`
	RouterAPIKey     []string         `group:"Requests" name:"router-api-key" placeholder:"KEY" help:"Bearer keys accepted on the router port and on /busy_threshold of the OpenAI port, comma-separated."`
	MaxBodyBytes     int64            `group:"Requests" default:"67108864" help:"Maximum size of a request body, bytes. Raise it for large images and audio, which are sent inside the body as base64."`
	Bodies           web.BodySettings `embed:""`
	RequestTimeout   time.Duration    `group:"Requests" default:"30m" help:"Idle timeout: maximum time to wait for the next byte of a worker's answer. An answer that is not streamed arrives at once, when it is complete. 0 disables the timeout."`
	DrainDelay       time.Duration    `group:"Requests" default:"5s" help:"After SIGTERM, time to keep serving while /ready returns 503, so that load balancers stop sending requests. 0 skips this phase."`
	DrainTimeout     time.Duration    `group:"Requests" default:"30s" help:"Maximum time for in-flight requests to finish during shutdown, after --drain-delay."`
	Record           string           `group:"Requests" placeholder:"FILE" help:"Append one JSON line per finished request to FILE, without prompt text, for replay by 'kvrouter simulate --trace'."`
	Rollouts         bool             `group:"Requests" help:"Serve RL trainers: the routes by which they manage workers (sglang-router's, SMG's and vllm-router's) and the engines' administration paths at the OpenAI port, and ask engines whether they are paused. With --router-api-key, workers can be managed there without this flag, by those keys."`
	AllowEngineAdmin bool             `group:"Requests" help:"Forward the engines' administration and development paths (/reset_prefix_cache, /sleep, ...) instead of refusing them."`

	// How many clients there may be at once.
	web.ConnectionSettings

	// Cells tells the routers above this one.
	Cells cells.Flags `embed:""`

	// Gateway is the endpoint picker of gateways.
	Gateway extproc.Settings `embed:""`

	// Dynamo and Cluster have the other routers of the same workers.
	Dynamo  dynamo.Settings  `embed:""`
	Cluster cluster.Settings `embed:""`

	// Relay follows the relays of Dynamo's cells.
	Relay relay.Settings `embed:""`

	// Logs and the configuration file.
	LogLevel   string `group:"Logs and settings" default:"info" enum:"debug,info,warn,error" help:"Minimum log level: ${enum}. debug includes every line that workers print."`
	LogFormat  string `group:"Logs and settings" default:"text" enum:"text,json" help:"Log format: ${enum}."`
	ConfigFile string `group:"Logs and settings" name:"config" placeholder:"FILE" help:"YAML configuration file: flag names as keys; vllm-args or sglang-args (lists) for the arguments after --."`

	MetricsLimit int `group:"Logs and settings" name:"metrics-cardinality-limit" default:"256" placeholder:"N" help:"Maximum number of workers with their own series on /metrics. The sums of the others have worker_id (others). 0 disables the limit."`

	ThompsonState string `group:"Policy thompson" placeholder:"FILE" help:"File that stores the learned state across restarts."`

	// EngineArgs are the arguments after --, which every started worker gets
	// unchanged.
	EngineArgs []string `kong:"-"`

	// Engine is the engine of started workers, EngineNone if none are. Set by chooseEngine.
	Engine string `kong:"-"`
	// NumWorkers is the number of started workers of all roles. Set by validate.
	NumWorkers int `kong:"-"`
	// GPUs are the devices for workers, in the form of CUDA_VISIBLE_DEVICES; empty:
	// the CPU. Set by ResolveDefaults.
	GPUs []string `kong:"-"`
	// LastStart is the file with the time that the last start of a worker took. Set by ResolveDefaults.
	LastStart string `kong:"-"`
	// Cores is the number of CPU cores to divide among the workers. Set by
	// ResolveDefaults.
	Cores int `kong:"-"`
	// RouterKeys are those of RouterAPIKey; nil: none is required. Set by build.
	RouterKeys *web.Keys `kong:"-"`
	// Hop is this process in the Via headers of its requests. Set by build.
	Hop web.Hop `kong:"-"`
	// ModelFolder means that Model is a local folder. Set by ResolveDefaults.
	ModelFolder bool `kong:"-"`
}

// Scheduling are the flags of serve that simulate has, too.
type Scheduling struct {
	PrefillWorkers int                  `group:"Model and engine" placeholder:"N" help:"Number of prefill workers, instead of --num-workers (simulate: --workers). They compute prompts and transfer them by NIXL (mock workers: --mock disagg-kind)."`
	DecodeWorkers  int                  `group:"Model and engine" placeholder:"N" help:"Number of decode workers, with --prefill-workers."`
	BlockSize      int                  `group:"Model and engine" default:"64" help:"Tokens per KV-cache block of started workers (SGLang: page size), and of attached ones that do not report theirs. For vLLM on a CPU, a multiple of 32."`
	Policy         string               `group:"Routing" default:"work" placeholder:"NAME" help:"Scheduling policy: ${policies}. simulate accepts a comma-separated list. See docs/routing.md."`
	Seed           uint64               `group:"Routing" default:"0" help:"Random seed. 0 seeds from the clock."`
	Scoring        policies.Settings    `embed:""`
	Index          router.IndexSettings `embed:""`
	MockFlags      mocker.Flags         `embed:""`

	// Mock has the properties of simulated workers, and of the simulator's engines. Set
	// by validate.
	Mock mocker.Settings `kong:"-"`
}

// validate sets Mock, makes the names of the policies those of package policies, and checks the
// settings for them, with what makes a policy.
func (s *Scheduling) validate(newPolicy func(string, policies.Settings) (policy.Policy, error), names ...string) (err error) {
	for i := range names {
		names[i] = policies.Canonical(names[i])
	}
	s.Policy = strings.Join(names, ",")
	if s.Mock, err = s.MockFlags.Settings(); err != nil {
		return err
	}
	if s.BlockSize < 1 {
		return errors.New("--block-size must be more than 0")
	}
	if err := s.Scoring.Thompson.Validate(s.Policy, s.BlockSize); err != nil {
		return err
	}
	for _, name := range names {
		if _, err := newPolicy(name, s.Scoring); err != nil {
			return fmt.Errorf("--policy: %w", err)
		}
	}
	return s.Index.Validate(names...)
}

// ResolveDefaults sets the values whose default depends on the machine: GPUs,
// cores, --python, --model and --served-model-name. If no engine is started,
// nothing is detected, and the model is the one that the workers report.
func (c *Config) ResolveDefaults(machine settings.Machine) error {
	if err := c.Flags.Resolve(machine.Getenv); err != nil {
		return err
	}
	c.Cores = max(1, machine.Cores)
	c.Bodies.SetDefault(c.MaxBodyBytes, machine.Memory)
	c.Gateway.SetDefault(machine.Memory)
	cache := settings.CacheDir(machine.Getenv)
	engine, starts := c.engine()
	if starts {
		c.GPUs, c.LastStart = machine.GPUs(), filepath.Join(cache, "last-start-"+c.Engine)
	}

	if c.Engine == EngineMocker && c.Model == "" && c.ServedModelName == "" {
		c.ServedModelName = mocker.ModelName
	}
	if c.Python == "" {
		c.Python = "python3"
		if python := filepath.Join(cache, engine.Venv(len(c.GPUs) > 0), "bin", "python"); machine.IsFile(python) {
			c.Python = python
		}
	}

	switch {
	case c.Model != "" || !starts:
	case len(c.GPUs) > 0:
		c.Model = DefaultGPUModel
	default:
		c.Model = filepath.Join(cache, "smollm2-135m-instruct")
		if !machine.IsDir(c.Model) {
			return fmt.Errorf("no model: %s does not exist; run `%s` to prepare it, or set --model", c.Model, engine.Setup)
		}
	}
	c.ModelFolder = c.Model != "" && machine.IsDir(c.Model)
	if starts && settings.LooksLikePath(c.Model) && !c.ModelFolder {
		return fmt.Errorf("--model %s: no such folder; give a folder with config.json or a Hugging Face name such as %s", c.Model, DefaultGPUModel)
	}
	if c.ModelFolder && starts && !machine.IsFile(filepath.Join(c.Model, "config.json")) {
		return fmt.Errorf("--model %s: the folder has no config.json, so it is not a model", c.Model)
	}
	if c.ServedModelName == "" {
		c.ServedModelName = c.Model
		if c.ModelFolder {
			absolute, err := filepath.Abs(c.Model)
			if err != nil {
				return fmt.Errorf("--model %s: %w", c.Model, err)
			}
			c.ServedModelName = filepath.Base(absolute)
		}
	}

	if !starts {
		return nil
	}
	return engine.Check(c.engineSettings())
}

// validate checks what the settings of several parts must have in common, and those of this package; kong
// has called Validate of each part. Its errors name the flag.
func (c *Config) validate() error {
	if err := c.Scheduling.validate(policies.New, c.Policy); err != nil {
		return err
	}
	if err := c.countWorkers(); err != nil {
		return err
	}
	if err := web.CheckOrigins("--cors-origins", c.CORSOrigins); err != nil {
		return err
	}
	if c.Routing.RecordDecisions && c.Record == "" {
		return errors.New("--record-decisions extends the lines of --record: set --record FILE too")
	}
	engine, starts := c.engine()
	if tokens, _ := c.EngineLimits(); starts && tokens == 0 && c.Routing.CountsPasses() {
		return fmt.Errorf("--router-queue-threshold and --active-prefill-tokens-threshold-frac count in engine steps: set %s NUMBER after --, the maximum tokens per step", engine.BatchFlag)
	}
	positive := []struct {
		flag  string
		value int64
	}{
		{"--gpus-per-worker", int64(c.GPUsPerWorker)},
		{"--max-body-bytes", c.MaxBodyBytes},
		{"--startup-timeout", int64(c.StartupTimeout)},
		{"--restart-backoff-max", int64(c.RestartBackoffMax)},
		{"--token-timeout", int64(c.TokenTimeout)},
	}
	for _, p := range positive {
		if p.value <= 0 {
			return fmt.Errorf("%s must be more than 0", p.flag)
		}
	}
	if c.TokenCacheTokens < 0 {
		return errors.New("--token-cache-tokens cannot be negative: 0 disables the cache")
	}
	if c.MetricsLimit < 0 {
		return errors.New("--metrics-cardinality-limit cannot be negative: 0 disables the limit")
	}
	if c.DrainDelay < 0 || c.DrainTimeout < 0 || c.RequestTimeout < 0 {
		return errors.New("--drain-delay, --drain-timeout and --request-timeout cannot be negative")
	}
	if c.KVOffloadGiB < 0 || c.KVOffloadGiB > maxOffloadGiB || c.KVOffloadGiB != c.KVOffloadGiB {
		return fmt.Errorf("--kv-offload-gib %v: give 0 to %d GiB", c.KVOffloadGiB, maxOffloadGiB)
	}
	if !starts && c.KVOffloadGiB > 0 {
		return fmt.Errorf("--kv-offload-gib %v, but %s; for attached workers, set their own flags", c.KVOffloadGiB, c.startsNone())
	}
	if c.KVP2P && (c.Engine != EngineVLLM || c.KVOffloadGiB == 0 || c.PrefillWorkers > 0) {
		return errors.New("--kv-p2p: only with --engine vllm, --kv-offload-gib and without --prefill-workers; it moves KV blocks between the host memory of whole vLLM workers")
	}
	if !starts && len(c.EngineArgs) > 0 {
		return fmt.Errorf("%q follows --, but %s", c.EngineArgs[0], c.startsNone())
	}
	files := map[string]string{"--record": c.Record, "--record-events": c.Snapshot.RecordEvents, "--index-snapshot": c.Snapshot.IndexSnapshot, "--thompson-state": c.ThompsonState}
	if err := cmp.Or(c.Models.CheckDir(), c.Snapshot.Validate(c.KVEvents()), settings.CheckFiles(files)); err != nil {
		return err
	}
	if err := c.Bodies.Validate(c.MaxBodyBytes); err != nil {
		return err
	}
	if err := c.Web.Validate(c.exposures()...); err != nil {
		return err
	}
	if c.Demo && c.Engine != EngineMocker {
		return fmt.Errorf("--demo generates traffic for simulated workers, and --engine is %s: set --engine mocker", c.Engine)
	}
	if c.Engine == EngineMocker {
		if err := c.Mock.Validate(c.NumWorkers); err != nil {
			return err
		}
	}
	if starts {
		if err := engine.CheckArgs(c.engineSettings()); err != nil {
			return err
		}
	}
	if c.Dynamo.ReplicaSync && c.Cluster.Cluster != "" {
		return errors.New("--cluster and --replica-sync exclude each other")
	}
	if where := c.Cluster.ClusterDiscovery; where != "" {
		if _, err := discovery.ParsePeers(where); err != nil {
			return err
		}
	}
	for i, peer := range c.IndexerPeers {
		var err error
		if c.IndexerPeers[i], err = kv.ParseURL(peer); err != nil {
			return fmt.Errorf("--indexer-peers: %w", err)
		}
	}
	started := c.NumWorkers
	if c.Engine == EngineNone {
		started = 0
	}
	if err := workers.AssignIDs(c.Worker, started); err != nil {
		return err
	}
	var ids, routers []uint64
	for _, w := range c.Worker {
		ids = append(ids, w.ID)
		if w.Disagg.Kind == kv.KindRouter {
			routers = append(routers, w.ID)
		}
	}
	if err := c.Relay.CheckCells(ids, routers); err != nil {
		return err
	}
	return settings.CheckPortNumbers(c.ports())
}
