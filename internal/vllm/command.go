// Package vllm starts vLLM workers as processes of this machine. It builds their
// command lines and environments, reads their start-up logs, and leaves no process
// behind.
package vllm

import (
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
)

// pluginFiles are the Python modules that every started vLLM loads: the load
// publisher, the one that keeps KV events on loopback, and the one that lets
// NIXL wait without computing.
//
//go:embed plugin
var pluginFiles embed.FS

const (
	// KVEventsTopic is the ZeroMQ topic of the KV events of started workers.
	KVEventsTopic = "kv-events"
	// ReplayBatches is how many event batches an engine keeps for a router that
	// missed some, about 100 bytes each in a quiet cache.
	ReplayBatches = 10_000
	// cpuMaxModelLen bounds the context on a CPU, tokens, because the cache must
	// hold one whole context.
	cpuMaxModelLen = 8192
)

// Ports are the ports of started workers, all on loopback. Worker i listens on
// HTTP+i. The others count ranks: rank r of worker i has the base plus i·Ranks+r.
type Ports struct {
	HTTP, KVEvents, KVReplay, Load, NIXL int
	Ranks                                int // data-parallel ranks of a worker, at least 1
}

// URL is where started worker i listens, without a slash at the end.
func (p Ports) URL(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", p.HTTP+i) }

// Sources returns where the KV events of started worker i are, rank by rank.
func (p Ports) Sources(i, blockSize int) []events.Source {
	sources := make([]events.Source, p.Ranks)
	for rank := range sources {
		at := i*p.Ranks + rank
		sources[rank] = events.Source{
			Worker: kv.WorkerKey{Worker: uint64(i), Rank: uint32(rank)}, BlockSize: blockSize, Topic: KVEventsTopic,
			Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", p.KVEvents+at), Replay: p.replayEndpoint(at),
		}
	}
	return sources
}

// LoadEndpoint is where rank r of started worker i publishes its load.
func (p Ports) LoadEndpoint(i, r int) string {
	return fmt.Sprintf("tcp://127.0.0.1:%d", p.Load+i*p.Ranks+r)
}

func (p Ports) replayEndpoint(at int) string {
	return fmt.Sprintf("tcp://127.0.0.1:%d", p.KVReplay+at)
}

// Settings say how vLLM workers are started.
type Settings struct {
	Python          string // that has vLLM
	Model           string // Hugging Face name or folder
	ModelFolder     bool   // Model is a folder here
	ServedModelName string
	NumWorkers      int
	PrefillWorkers  int      // the first so many compute only prompts, the others answers, by NIXL; 0: each does both
	BlockSize       int      // tokens
	GPUsPerWorker   int      // of each rank
	GPUs            []string // that workers may use, as CUDA_VISIBLE_DEVICES names them; none: the CPU
	Cores           int      // of the CPU, to be shared out
	KVEvents        bool     // workers publish KV events
	Args            []string // what the user gave after --
	Ports           Ports
}

// ProcessSpec is the command line and the environment of one worker process.
type ProcessSpec struct {
	Argv []string
	Env  []string
}

// Command returns the command line and the environment of started worker
// i. What the user put after -- or into the environment goes before the
// defaults here. pluginDir is where writePlugin has put the plugins; environ is
// the router's own environment.
func Command(cfg Settings, i int, pluginDir string, environ []string) (ProcessSpec, error) {
	first := i * cfg.Ports.Ranks // from here on vLLM and the plugin count its ranks
	eventConfig, err := json.Marshal(struct {
		Enable   bool   `json:"enable_kv_cache_events"`
		Kind     string `json:"publisher"`
		Endpoint string `json:"endpoint"`
		Replay   string `json:"replay_endpoint"`
		Topic    string `json:"topic"`
		Buffer   int    `json:"buffer_steps"`
	}{
		// vLLM binds an endpoint with a wildcard and connects to any other; the
		// plugin narrows the wildcard to loopback.
		true, "zmq", fmt.Sprintf("tcp://*:%d", cfg.Ports.KVEvents+first),
		cfg.Ports.replayEndpoint(first), KVEventsTopic, ReplayBatches,
	})
	if err != nil {
		return ProcessSpec{}, fmt.Errorf("worker %d: KV event settings: %w", i, err)
	}
	argv := []string{
		cfg.Python, "-m", "vllm.entrypoints.openai.api_server",
		"--model", cfg.Model,
		"--served-model-name", cfg.ServedModelName,
		"--host", "127.0.0.1",
		"--port", strconv.Itoa(cfg.Ports.HTTP + i),
		"--block-size", strconv.Itoa(cfg.BlockSize),
	}
	if cfg.KVEvents {
		argv = append(argv, "--kv-events-config", string(eventConfig))
	}
	argv = append(argv, "--enable-prompt-tokens-details", "--enable-scale-out")
	env := newEnvironment(environ)
	// The router's keys are no business of the workers.
	maps.DeleteFunc(env, func(key, _ string) bool { return strings.HasPrefix(key, "KVROUTER_") })
	if cfg.PrefillWorkers > 0 {
		argv = append(argv, "--kv-transfer-config", nixlConfig(cfg, i))
		setNIXLEnvironment(cfg, first, env)
	}
	env["KVROUTER_LOAD_ENDPOINT"] = cfg.Ports.LoadEndpoint(i, 0)
	env["KVROUTER_LOOPBACK_EVENTS"] = "1"
	pythonPath := pluginDir
	if old := env["PYTHONPATH"]; old != "" {
		pythonPath += string(os.PathListSeparator) + old
	}
	env["PYTHONPATH"] = pythonPath
	if allowed, limited := env["VLLM_PLUGINS"]; limited {
		env["VLLM_PLUGINS"] = strings.TrimPrefix(allowed+",kvrouter_load,kvrouter_loopback,kvrouter_nixl", ",")
	}
	env.setDefault("VLLM_NO_USAGE_STATS", "1")
	if cfg.ModelFolder {
		env.setDefault("HF_HUB_OFFLINE", "1")
	}

	if k := cfg.GPUsPerWorker * cfg.Ports.Ranks; len(cfg.GPUs) > 0 {
		if (i+1)*k > len(cfg.GPUs) {
			return ProcessSpec{}, fmt.Errorf("worker %d needs GPUs %d to %d of the visible ones, but there are %d", i, i*k+1, (i+1)*k, len(cfg.GPUs))
		}
		env["CUDA_VISIBLE_DEVICES"] = strings.Join(cfg.GPUs[i*k:(i+1)*k], ",")
		if cfg.GPUsPerWorker > 1 && !hasFlag(cfg.Args, "tensor-parallel-size") {
			argv = append(argv, "--tensor-parallel-size", strconv.Itoa(cfg.GPUsPerWorker))
		}
	} else {
		env.setDefault("OMP_NUM_THREADS", strconv.Itoa(max(1, cfg.Cores/max(1, cfg.NumWorkers*cfg.Ports.Ranks))))
		env.setDefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
		env.setDefault("VLLM_CPU_KVCACHE_SPACE", "1") // GiB
		if !hasFlag(cfg.Args, "enforce-eager", "no-enforce-eager") {
			argv = append(argv, "--enforce-eager")
		}
		if !hasFlag(cfg.Args, "max-model-len") {
			argv = append(argv, "--max-model-len", strconv.Itoa(min(cpuMaxModelLen, modelContext(cfg))))
		}
	}
	return ProcessSpec{Argv: append(argv, cfg.Args...), Env: env.list()}, nil
}

// modelContext returns the longest context that the model's config.json allows,
// tokens; where it is not known, more than any limit here.
func modelContext(cfg Settings) int {
	const unknown = 1 << 30
	if !cfg.ModelFolder {
		return unknown
	}
	data, err := os.ReadFile(filepath.Join(cfg.Model, "config.json"))
	if err != nil {
		return unknown
	}
	var model struct {
		Context int `json:"max_position_embeddings"`
		Text    struct {
			Context int `json:"max_position_embeddings"`
		} `json:"text_config"` // of models that also see or hear
	}
	if err := json.Unmarshal(data, &model); err != nil {
		return unknown
	}
	switch {
	case model.Context > 0:
		return model.Context
	case model.Text.Context > 0:
		return model.Text.Context
	}
	return unknown
}

// writePlugin puts the plugins into a new folder that only this user can read,
// and returns its name. The caller removes it.
func writePlugin() (string, error) {
	dir, err := os.MkdirTemp("", "kvrouter-plugin-")
	if err != nil {
		return "", fmt.Errorf("folder for the vLLM plugins: %w", err)
	}
	files, err := fs.Sub(pluginFiles, "plugin")
	if err == nil {
		err = os.CopyFS(dir, files)
	}
	if err != nil {
		_ = os.RemoveAll(dir)
		return "", fmt.Errorf("write the vLLM plugins to %s: %w", dir, err)
	}
	return dir, nil
}

// environment holds the variables of a process.
type environment map[string]string

// newEnvironment reads entries KEY=VALUE. Of a key that comes twice the last
// entry counts, as in os/exec.
func newEnvironment(environ []string) environment {
	env := environment{}
	for _, entry := range environ {
		if key, value, ok := strings.Cut(entry, "="); ok && key != "" {
			env[key] = value
		}
	}
	return env
}

// setDefault sets a variable that is not set.
func (e environment) setDefault(key, value string) {
	if _, set := e[key]; !set {
		e[key] = value
	}
}

// list returns the entries KEY=VALUE by key.
func (e environment) list() []string {
	entries := make([]string, 0, len(e))
	for _, key := range slices.Sorted(maps.Keys(e)) {
		entries = append(entries, key+"="+e[key])
	}
	return entries
}
