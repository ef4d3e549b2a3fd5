package main

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"kvrouter/internal/batch"
	"kvrouter/internal/cells"
	"kvrouter/internal/discovery"
	"kvrouter/internal/doctor"
	"kvrouter/internal/events"
	"kvrouter/internal/extproc"
	"kvrouter/internal/keys"
	"kvrouter/internal/kv"
	"kvrouter/internal/manual"
	"kvrouter/internal/mocker"
	"kvrouter/internal/models"
	"kvrouter/internal/page"
	"kvrouter/internal/policies"
	"kvrouter/internal/proxy"
	"kvrouter/internal/relay"
	"kvrouter/internal/replica"
	"kvrouter/internal/router"
	"kvrouter/internal/settings"
	"kvrouter/internal/simulate"
	"kvrouter/internal/top"
	"kvrouter/internal/web"
	"kvrouter/internal/workers"
)

// Names of the values that --engine takes.
const (
	EngineVLLM   = "vllm"   // start vLLM workers
	EngineSGLang = "sglang" // start SGLang workers
	EngineMocker = "mocker" // start simulated workers in this process
	EngineNone   = "none"   // start none: route to attached and registered workers
)

// Commands that ParseConfig returns.
const (
	CommandServe    = "serve"
	CommandSimulate = "simulate"
	CommandReplay   = "replay-events"
	CommandTop      = "top"
	CommandBatch    = "batch"
	CommandDoctor   = "doctor"
	CommandVersion  = "version"
	CommandHelp     = "help" // the help or the version has been printed; nothing is left to do
)

// DefaultGPUModel is the default model on a machine with a GPU. Without one, it is
// the small model of `make setup`.
const DefaultGPUModel = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"

// maxOffloadGiB bounds --kv-offload-gib: more than a machine has.
const maxOffloadGiB = 1 << 20

// Config contains all settings. Each flag can also be given as an environment
// variable (KVROUTER_ and the flag's name in capitals, _ for -) or as a key of the
// YAML file of --config (the flag's name). Precedence: command line, environment,
// file, default. All commands parse all flags; takesFlag reports which of them a
// command reads.
type Config struct {
	// The model, the engine, and the workers started.
	Model           string  `group:"Model and engine" placeholder:"NAME|DIR" help:"Model to serve: a Hugging Face name or a folder. Default: deepseek-ai/DeepSeek-R1-Distill-Llama-8B with a GPU, otherwise the SmolLM2 135M of 'make setup'."`
	ServedModelName string  `group:"Model and engine" placeholder:"NAME" help:"Model name in the API. Default: the name of --model; for a folder, its last path element."`
	Engine          string  `group:"Model and engine" default:"vllm" enum:"vllm,sglang,mocker,none" help:"Engine to start: vllm; sglang; mocker (simulated workers, which need no GPU, Python or model); none (route to attached and registered workers only)."`
	Demo            bool    `group:"Model and engine" help:"With --engine mocker: generate traffic to watch: conversations, agents with shared prefixes, clients that disconnect, and a worker that fails now and then."`
	WorkersGiven    *int    `group:"Model and engine" name:"num-workers" placeholder:"N" help:"Number of workers to start. Default: 2."`
	PrefillWorkers  int     `group:"Model and engine" placeholder:"N" help:"Number of prefill workers to start, instead of --num-workers. They compute prompts and transfer them by NIXL (mock workers: --mock-disagg-kind)."`
	DecodeWorkers   int     `group:"Model and engine" placeholder:"N" help:"Number of decode workers to start, with --prefill-workers."`
	BlockSize       int     `group:"Model and engine" default:"64" help:"Tokens per KV-cache block. Must equal the engine's block size (SGLang: page size). For vLLM on a CPU, a multiple of 32."`
	GPUsPerWorker   int     `group:"Model and engine" name:"gpus-per-worker" default:"1" help:"GPUs per worker, or per data-parallel rank (tensor parallelism)."`
	KVP2P           bool    `group:"Model and engine" name:"kv-p2p" default:"false" help:"Let started vLLM workers pull KV blocks from each other's host memory, with --kv-offload-gib: vLLM's secondary tier p2p."`
	KVOffloadGiB    float64 `group:"Model and engine" name:"kv-offload-gib" default:"0" help:"Host memory for offloaded KV blocks of each worker, or data-parallel rank, GiB: vLLM's OffloadingConnector or SGLang's hierarchical cache. SGLang takes whole GB for each GPU. 0 offloads nothing."`
	Python          string  `group:"Model and engine" placeholder:"PATH" help:"Python interpreter with vLLM or SGLang installed. Default: the environment prepared by 'make setup' or 'make setup-sglang', otherwise python3."`

	// Workers that run already, and how started ones are looked after.
	workers.Flags
	Discovery discovery.Settings `embed:""`
	Models    models.Flags       `embed:""`

	// Addresses of the router, and the first port of each kind of started workers.
	Host              string       `group:"Addresses" default:"127.0.0.1" help:"Listen address of the OpenAI port."`
	HTTPPort          int          `group:"Addresses" name:"http-port" default:"8000" help:"OpenAI port. 0 selects a free port."`
	RouterPort        int          `group:"Addresses" default:"7000" help:"Router port (/find_best_worker, /workers); 0 selects a free port."`
	BaseWorkerPort    int          `group:"Addresses" default:"8100" help:"First HTTP port of started workers; worker i listens on this port plus i."`
	BaseKVEventsPort  int          `group:"Addresses" name:"base-kv-events-port" default:"5557" help:"First KV-event port of started workers; worker i publishes on this port plus i."`
	BaseKVReplayPort  int          `group:"Addresses" name:"base-kv-replay-port" default:"5757" help:"First KV-event replay port of started workers; worker i listens on this port plus i."`
	BaseMetricsPort   int          `group:"Addresses" default:"5657" help:"First load-metrics port of started workers; worker i publishes on this port plus i."`
	Web               web.Settings `embed:""`
	Page              page.Flags   `embed:""`
	BaseNIXLPort      int          `group:"Addresses" name:"base-nixl-port" default:"5600" help:"First NIXL side-channel port of started vLLM workers, with --prefill-workers; worker i listens on this port plus i."`
	BaseP2PPort       int          `group:"Addresses" name:"base-p2p-port" default:"5710" help:"First port of started vLLM workers for pulls, with --kv-p2p; worker i listens on this port plus i."`
	BaseBootstrapPort int          `group:"Addresses" default:"8998" help:"First bootstrap port of started SGLang prefill workers; worker i listens on this port plus i."`

	// Choice of a worker, index of caches, and disaggregation.
	Policy           string               `group:"Routing" default:"work" placeholder:"NAME" help:"Scheduling policy: ${policies}. simulate accepts a comma-separated list. See docs/routing.md."`
	Seed             uint64               `group:"Routing" default:"0" help:"Random seed. 0 seeds from the clock."`
	TokenTimeout     time.Duration        `group:"Routing" default:"2s" help:"Maximum time to wait for a worker to tokenize a prompt that the router cannot render itself."`
	TokenCacheTokens int                  `group:"Routing" default:"2097152" help:"Size of the tokenization cache, in tokens of 4 bytes. It holds the tokens of system prompts and turns, so that the same text is encoded once. 0 disables the cache."`
	CORSOrigins      []string             `name:"cors-origins" group:"Requests" placeholder:"ORIGIN,..." help:"Origins whose pages may use the OpenAI port, such as https://chat.example.com; * allows all. Default: none."`
	CollectUsage     bool                 `group:"Routing" default:"true" negatable:"" help:"Request usage from workers for streams whose client did not ask for it, and remove it from the answer."`
	Routing          router.Settings      `embed:""`
	IndexerPeers     []string             `group:"Routing" placeholder:"URL" help:"Routers (or Dynamo services) to copy the index from at startup: the first that answers GET /dump. They also supply KV events that a worker cannot replay. Comma-separated."`
	Snapshot         events.Settings      `embed:""`
	Scoring          policies.Settings    `embed:""`
	Index            router.IndexSettings `embed:""`
	Proxy            proxy.Settings       `embed:""`

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
	AllowEngineAdmin bool             `group:"Requests" help:"Forward the engines' administration and development paths (/reset_prefix_cache, /sleep, ...) instead of refusing them."`

	// How many clients there may be at once.
	web.ConnectionSettings

	// Cells tells the routers above this one.
	Cells cells.Flags `embed:""`

	// Gateway is the endpoint picker of gateways.
	Gateway extproc.Settings `embed:""`

	// Replica has the other routers of the same workers.
	Replica replica.Settings `embed:""`

	// Relay follows the relays of Dynamo's cells.
	Relay relay.Settings `embed:""`

	// Logs and the configuration file.
	LogLevel   string `group:"Logs and settings" default:"info" enum:"debug,info,warn,error" help:"Minimum log level: ${enum}. debug includes every line that workers print."`
	LogFormat  string `group:"Logs and settings" default:"text" enum:"text,json" help:"Log format: ${enum}."`
	ConfigFile string `group:"Logs and settings" name:"config" placeholder:"FILE" help:"YAML configuration file: flag names as keys; vllm-args or sglang-args (lists) for the arguments after --."`

	MetricsLimit int `group:"Logs and settings" name:"metrics-cardinality-limit" default:"256" placeholder:"N" help:"Maximum number of workers with their own series on /metrics. The sums of the others have worker_id (others). 0 disables the limit."`

	// Mock has the workers of --engine mocker, and the size and timing of the
	// simulator's engines. Its group is the last one in the help.
	Mock mocker.Settings `embed:""`

	// EngineArgs are the arguments after --, which every started worker gets
	// unchanged.
	EngineArgs []string `kong:"-"`

	// NumWorkers is the number of started workers of all roles. Set by ParseConfig.
	NumWorkers int `kong:"-"`
	// GPUs are the devices for workers, in the form of CUDA_VISIBLE_DEVICES; empty:
	// the CPU. Set by ResolveDefaults.
	GPUs []string `kong:"-"`
	// Cores is the number of CPU cores to divide among the workers. Set by
	// ResolveDefaults.
	Cores int `kong:"-"`
	// RouterKeys are those of RouterAPIKey; nil: none is required. Set by build.
	RouterKeys *web.Keys `kong:"-"`
	// Hop is this process in the Via headers of its requests. Set by build.
	Hop web.Hop `kong:"-"`
	// Simulate has the settings of CommandSimulate.
	Simulate simulate.Settings `kong:"-"`
	// Replay has the settings of CommandReplay.
	Replay events.ReplayCommand `kong:"-"`
	// Top has the settings of CommandTop.
	Top top.Command `kong:"-"`
	// Batch has the settings of CommandBatch.
	Batch batch.Command `kong:"-"`
	// Doctor has the settings of CommandDoctor.
	Doctor doctor.Command `kong:"-"`
	// ModelFolder means that Model is a local folder. Set by ResolveDefaults.
	ModelFolder bool `kong:"-"`
}

// cli is what kong parses: the settings and the commands.
type cli struct {
	Config

	Serve    struct{}             `cmd:"" default:"1" help:"Start workers and serve (the default command)."`
	Simulate simulate.Settings    `cmd:"" help:"Replay a trace or generated conversations through the router and simulated workers, and compare policies."`
	Replay   events.ReplayCommand `cmd:"" name:"replay-events" help:"Apply a file written by --record-events or by Dynamo's recorder to an empty index, and print the result."`
	Top      top.Command          `cmd:"" help:"Show the workers and latest requests of a running router in the terminal."`
	Batch    batch.Command        `cmd:"" help:"Send a file of requests through an OpenAI endpoint, and go on where a killed run ended."`
	Doctor   doctor.Command       `cmd:"" help:"Check this machine, the ports and the workers named by the other flags before a start."`
	Version  struct{}             `cmd:"" help:"Print the version."`

	Completion manual.Completion `cmd:"" help:"Print a shell completion script: source <(kvrouter completion bash)."`
	Man        manual.Page       `cmd:"" help:"Print the man page: kvrouter man | man -l -."`

	ShowVersion kong.VersionFlag `name:"version" env:"-" help:"Print the version."`
}

// mockGroup is the group of mocker.Settings.
const mockGroup = "Mock workers, with --engine mocker"

// simulateGroups are the groups of Config whose flags CommandSimulate reads, all
// but those of notSimulated.
var simulateGroups = []string{"Policy kv", "Policies cache-threshold and variance", "Policy thompson", "Index", "Failing workers"}

// notSimulated are the flags of simulateGroups that CommandSimulate refuses.
var notSimulated = []string{"thompson-state", "thompson-traces"}

// simulateFlags are the flags of Config's other groups that CommandSimulate reads.
var simulateFlags = []string{
	"config", "policy", "seed", "block-size", "prefill-workers", "decode-workers", "disagg-min-uncached-tokens",
	"speedup-ratio", "mock-num-gpu-blocks", "mock-max-num-seqs", "mock-max-num-batched-tokens", "mock-prefill-ms", "mock-decode-ms",
	"mock-kv-transfer-bandwidth", "mock-kv-bytes-per-token", "mock-host-blocks", "mock-host-bandwidth", "mock-host-latency", "mock-disk-blocks", "mock-disk-bandwidth", "mock-disk-latency", "mock-disk-shared", "mock-disagg-kind", "mock-api", "mock-max-loras", "mock-lora-load",
	"router-queue-threshold", "router-queue-policy", "router-queue-timeout", "router-queue-limit", "router-batch-share", "router-track-active-blocks", "router-track-prefill-tokens",
	"router-assume-kv-reuse", "active-decode-blocks-threshold", "active-prefill-tokens-threshold", "active-prefill-tokens-threshold-frac",
}

// takesFlag reports whether the command reads a flag that all commands parse.
func takesFlag(command string, flag *kong.Flag) bool {
	switch {
	case flag.Group == nil: // help and version
		return true
	case command == CommandServe || command == CommandDoctor:
		return true
	case command == CommandSimulate && slices.Contains(simulateGroups, flag.Group.Title):
		return !slices.Contains(notSimulated, flag.Name)
	}
	return slices.Contains(map[string][]string{
		CommandSimulate: simulateFlags, CommandReplay: {"block-size"}, CommandTop: {"router-api-key"}, CommandBatch: {"api-key", "drain-timeout"},
	}[command], flag.Name)
}

// printHelp prints the help of the command, or of CommandServe where none is
// named, with the flags that it reads only.
func printHelp(options kong.HelpOptions, ctx *kong.Context) error {
	command := CommandServe
	if selected := ctx.Selected(); selected != nil {
		command = selected.Name
	}
	for _, flag := range ctx.Model.Flags {
		flag.Hidden = !takesFlag(command, flag)
		if command == CommandSimulate && flag.Group != nil && flag.Group.Title == mockGroup {
			flag.Group.Title = "Simulated workers"
		}
	}
	return kong.DefaultHelpPrinter(options, ctx)
}

// newParser returns what reads arguments into c.
func newParser(c *cli, options ...kong.Option) (*kong.Kong, error) {
	parser, err := kong.New(c, append([]kong.Option{
		kong.Name("kvrouter"),
		kong.Description("KV-cache-aware router for vLLM and SGLang. It starts or attaches workers and serves one OpenAI endpoint. Each request goes to the worker with the lowest cost: longest cached prefix weighed against load. Arguments after -- are passed to every started worker."),
		kong.DefaultEnvars("KVROUTER"),
		kong.Vars{"policies": strings.Join(policies.Names, ", "), "version": "kvrouter " + settings.Build()},
		kong.ConfigureHelp(kong.HelpOptions{NoExpandSubcommands: true, FlagsLast: false}),
		kong.Help(printHelp),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	return parser, nil
}

// ParseConfig reads the command line (without the program's name), the environment
// and the file of --config, sets the values that depend on the machine, and returns
// the settings and the command: one of the Command constants. An error is one line
// with the fault, its place, and the correct form.
func ParseConfig(args []string) (Config, string, error) {
	return parseConfig(args, settings.ThisMachine())
}

func parseConfig(args []string, machine settings.Machine) (Config, string, error) {
	var engineArgs []string
	passed := slices.Index(args, "--")
	if passed >= 0 {
		args, engineArgs = args[:passed], args[passed+1:]
	}

	var c cli
	printed := false
	parser, err := newParser(&c, kong.Exit(func(int) { printed = true }))
	if err != nil {
		return Config{}, "", err
	}

	keys := slices.DeleteFunc(slices.Clone(parser.Model.Flags), func(flag *kong.Flag) bool { return flag.Name == "version" })
	file, err := settings.ReadConfigFile(configFileName(args, machine.Getenv), keys)
	if err != nil {
		return Config{}, "", err
	}
	if err := kong.Resolvers(kong.ResolverFunc(file.Resolve)).Apply(parser); err != nil {
		return Config{}, "", fmt.Errorf("settings: %w", err)
	}

	ctx, err := parser.Parse(args)
	if printed {
		return Config{}, CommandHelp, nil
	}
	if err != nil {
		return Config{}, "", file.Explain(err)
	}

	cfg := c.Config
	cfg.EngineArgs = engineArgs
	if passed < 0 {
		cfg.EngineArgs = file.EngineArgs(cfg.Engine)
	}
	command, _, _ := strings.Cut(ctx.Command(), " ")
	switch command {
	case CommandServe, CommandDoctor:
	case CommandSimulate:
		cfg.Simulate = c.Simulate
		return cfg, command, cfg.validateSimulate()
	default:
		cfg.Replay, cfg.Top, cfg.Batch = c.Replay, c.Top, c.Batch
		return cfg, command, nil
	}
	if err := cfg.validate(); err != nil {
		return Config{}, "", err
	}
	cfg.Doctor = c.Doctor
	if cfg.Doctor.Unusable = cfg.ResolveDefaults(machine); cfg.Doctor.Unusable != nil && command == CommandServe {
		return Config{}, "", cfg.Doctor.Unusable
	}
	return cfg, command, nil
}

// configFileName finds the file of settings before kong parses, because it
// must be read first.
func configFileName(args []string, getenv func(string) string) string {
	name := getenv("KVROUTER_CONFIG")
	for i, arg := range args {
		if value, ok := strings.CutPrefix(arg, "--config="); ok {
			name = value
		} else if arg == "--config" && i+1 < len(args) {
			name = args[i+1]
		}
	}
	return name
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
		c.GPUs = machine.GPUs()
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

func (c *Config) validate() error {
	if err := c.Scoring.Thompson.Validate(c.Policy, c.BlockSize); err != nil {
		return err
	}
	if _, err := policies.New(c.Policy, c.Scoring); err != nil {
		return fmt.Errorf("--policy: %w", err)
	}
	if err := c.countWorkers(); err != nil {
		return err
	}
	if err := c.Routing.Validate(); err != nil {
		return err
	}
	if err := c.Cells.Validate(); err != nil {
		return err
	}
	if err := web.CheckOrigins("--cors-origins", c.CORSOrigins); err != nil {
		return err
	}
	if c.Routing.RecordDecisions && c.Record == "" {
		return errors.New("--record-decisions extends the lines of --record: set --record FILE too")
	}
	if err := c.Index.Validate(c.Policy); err != nil {
		return err
	}
	if err := c.Proxy.Validate(); err != nil {
		return err
	}
	engine, starts := c.engine()
	if tokens, _ := c.EngineLimits(); starts && tokens == 0 && c.Routing.CountsPasses() {
		return fmt.Errorf("--router-queue-threshold and --active-prefill-tokens-threshold-frac count in engine steps: set %s NUMBER after --, the maximum tokens per step", engine.BatchFlag)
	}
	positive := []struct {
		flag  string
		value int64
	}{
		{"--block-size", int64(c.BlockSize)},
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
		return fmt.Errorf("--kv-offload-gib %v, but --engine %s starts no worker process; for attached workers, set their own flags", c.KVOffloadGiB, c.Engine)
	}
	if c.KVP2P && (c.Engine != EngineVLLM || c.KVOffloadGiB == 0 || c.PrefillWorkers > 0) {
		return errors.New("--kv-p2p: only with --engine vllm, --kv-offload-gib and without --prefill-workers; it moves KV blocks between the host memory of whole vLLM workers")
	}
	if !starts && len(c.EngineArgs) > 0 {
		return fmt.Errorf("%q follows --, but --engine %s starts no worker process", c.EngineArgs[0], c.Engine)
	}
	files := map[string]string{"--record": c.Record, "--record-events": c.Snapshot.RecordEvents, "--index-snapshot": c.Snapshot.IndexSnapshot, "--thompson-state": c.Scoring.Thompson.ThompsonState, "--thompson-traces": c.Scoring.Thompson.ThompsonTraces}
	if err := cmp.Or(c.Models.CheckDir(), c.Models.Limits.Validate(), c.Replica.Validate(), c.Snapshot.Validate(c.KVEvents()), c.Discovery.Validate(), c.Gateway.Validate(), settings.CheckFiles(files)); err != nil {
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
	if where := c.Replica.ReplicaDiscovery; where != "" {
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

// simulation has what all runs of CommandSimulate have in common.
func (c *Config) simulation() simulate.Simulation {
	return simulate.Simulation{
		Scoring: c.Scoring, Index: c.Index, Engine: c.Mock.SimConfig(c.BlockSize), Workers: c.simulatedWorkers(), Prefills: c.PrefillWorkers,
		Kind: c.Mock.DisaggKind(), Handover: c.Mock.Handover(), Tiers: c.Mock.Tiers(), Peers: c.Mock.Peers(), LeastUncached: c.Proxy.DisaggMinUncachedTokens, Seed: c.Seed, Routing: c.Routing, Retry: c.Proxy.RetrySettings,
	}
}

// simulatedWorkers is the number of workers of all roles.
func (c *Config) simulatedWorkers() int {
	const usual = 8
	return cmp.Or(c.PrefillWorkers+c.DecodeWorkers, c.Simulate.Workers, usual)
}

func (c *Config) validateSimulate() error {
	if err := c.Scoring.Thompson.Validate(c.Policy, c.BlockSize); err != nil {
		return err
	}
	for name := range strings.SplitSeq(c.Policy, ",") {
		if _, err := policies.New(name, c.Scoring); err != nil {
			return fmt.Errorf("--policy: %w", err)
		}
	}
	if err := c.Index.Validate(strings.Split(c.Policy, ",")...); err != nil {
		return err
	}
	if err := c.Proxy.Validate(); err != nil {
		return err
	}
	if err := c.Routing.Validate(); err != nil {
		return err
	}
	s := c.Simulate
	workers := c.simulatedWorkers()
	switch {
	case s.Workers != 0 && c.PrefillWorkers+c.DecodeWorkers != 0:
		return errors.New("give either --workers or --prefill-workers and --decode-workers")
	case (c.PrefillWorkers == 0) != (c.DecodeWorkers == 0) || c.PrefillWorkers < 0 || c.DecodeWorkers < 0:
		return fmt.Errorf("--prefill-workers %d and --decode-workers %d: give at least 1 of each, or neither", c.PrefillWorkers, c.DecodeWorkers)
	case c.Scoring.Thompson.ThompsonState != "" || c.Scoring.Thompson.ThompsonTraces != "":
		return errors.New("simulate starts each policy without learned state and writes no traces: remove --thompson-state and --thompson-traces")
	case c.Proxy.EnforceDisagg:
		return errors.New("--enforce-disagg has no effect in simulate: simulated workers do not fail; remove it")
	case workers < 1 || workers > 1000:
		return fmt.Errorf("%d workers: give 1 to 1000", workers)
	case c.BlockSize < 1:
		return errors.New("--block-size must be more than 0")
	case c.Mock.SpeedupRatio == 0:
		return errors.New("--speedup-ratio 0: virtual time needs engine steps that take time; give more than 0")
	}
	if err := c.Mock.Validate(workers); err != nil {
		return err
	}
	return s.Validate()
}

// replicaHost is the listen host of --replica-sync.
func (c *Config) replicaHost() string { return cmp.Or(c.Replica.ReplicaSyncHost, c.Host) }

// gatewayHost is the listen host of the endpoint picker's ports.
func (c *Config) gatewayHost() string { return cmp.Or(c.Gateway.ExtProcHost, c.Host) }

// exposures lists the router's own ports with the credentials they require.
func (c *Config) exposures() []web.Exposure {
	certified := c.Web.TLS.TLSClientCA != ""
	keyed := len(c.APIKey) > 0 || c.Keys.APIKeysFile != ""
	all := []web.Exposure{
		{Flag: "--host", Host: c.Host, Name: "OpenAI port", Keyed: keyed || certified, Keys: "--api-key, --api-keys-file or --tls-client-ca"},
		{Flag: "--router-host", Host: c.Web.RouterHost, Name: "router port", Keyed: len(c.RouterAPIKey) > 0 || certified, Keys: "--router-api-key or --tls-client-ca"},
	}
	if c.Gateway.ExtProcPort != 0 {
		all = append(all, web.Exposure{Flag: "--ext-proc-host", Host: c.gatewayHost(), Name: "port of --ext-proc-port", Keyed: keyed || certified && c.Gateway.ExtProcTLS, Keys: "--api-key or --api-keys-file"})
	}
	if c.Replica.ReplicaSync {
		all = append(all, web.Exposure{Flag: "--replica-sync-host", Host: c.replicaHost(), Name: "port of --replica-sync", Keyed: c.Replica.ReplicaKey != "", Keys: "--replica-key"})
	}
	return all
}

// ports lists every port that will be listened on; 0 (any) is left out.
func (c *Config) ports() []settings.PortUse {
	const loopback = "127.0.0.1"
	var uses []settings.PortUse
	own := func(flag string, port int, host string) {
		if port != 0 {
			uses = append(uses, settings.PortUse{Flag: flag, Base: port, Port: port, Host: host})
		}
	}
	own("--http-port", c.HTTPPort, c.Host)
	own("--router-port", c.RouterPort, c.Web.RouterHost)
	own("--page-port", c.Page.PagePort, c.Web.RouterHost)
	own("--ext-proc-port", c.Gateway.ExtProcPort, c.gatewayHost())
	own("--ext-proc-health-port", c.Gateway.ExtProcHealthPort, c.gatewayHost())
	if c.Replica.ReplicaSync {
		own("--replica-sync-port", c.Replica.ReplicaSyncPort, c.replicaHost())
	}
	if c.Engine == EngineNone {
		return uses
	}
	for i := range c.NumWorkers {
		workers := func(flag string, base, at int) {
			uses = append(uses, settings.PortUse{Flag: flag, Base: base, Port: base + at, Host: loopback, Worker: i})
		}
		workers("--base-worker-port", c.BaseWorkerPort, i)
		if c.Engine == EngineSGLang && i < c.PrefillWorkers {
			workers("--base-bootstrap-port", c.BaseBootstrapPort, i)
		}
		for at := i * c.Ranks(); at < (i+1)*c.Ranks(); at++ {
			if c.KVEvents() {
				workers("--base-kv-events-port", c.BaseKVEventsPort, at)
				workers("--base-kv-replay-port", c.BaseKVReplayPort, at)
			}
			workers("--base-metrics-port", c.BaseMetricsPort, at)
			if c.nixl() {
				workers("--base-nixl-port", c.BaseNIXLPort, at)
			}
			if c.KVP2P {
				workers("--base-p2p-port", c.BaseP2PPort, at)
			}
		}
	}
	return uses
}
