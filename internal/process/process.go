// Package process starts workers of any engine as processes of this machine. It assigns
// their ports, reads their start-up logs, and leaves no process behind.
package process

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"kvrouter/internal/kv"
)

// Engine describes how to start workers of an engine.
type Engine struct {
	Kind   kv.Engine
	Plugin fs.FS // its folder plugin has the Python modules that each worker loads
	Signs  Signs // of its output

	// GPUVenv and CPUVenv are the names of the folder in the cache where its Python is,
	// on a machine with GPUs and without.
	GPUVenv, CPUVenv string
	// Setup is the command that prepares that folder.
	Setup string

	// CheckArgs refuses arguments after -- that the router sets itself or could not
	// follow; apart: prefill and decode workers are started. Its errors name the
	// argument and what to use instead.
	CheckArgs func(args []string, apart bool) error
	// Ranks is how many data-parallel ranks the arguments ask of a worker, at least
	// 1, and RanksFlag the one that says so.
	Ranks     func(args []string) int
	RanksFlag string
	// Limits returns, from the arguments, how many tokens a worker computes in a pass at
	// most and how many blocks its KV cache has; 0: they do not say. BatchFlag says
	// the first.
	Limits    func(args []string, blockSize int) (maxBatchedTokens, totalBlocks int)
	BatchFlag string
	// Key finds the key that workers will ask for; empty: none.
	Key func(args []string) string

	// CheckMachine refuses settings that the engine cannot serve on the machine, and
	// CheckPython a Python that lacks its modules.
	CheckMachine func(s Settings) error
	CheckPython  func(s Settings) error
	// Command returns the command line and the environment of worker i. What the
	// user put after -- or into the environment goes before its defaults. pluginDir
	// is where Plugin has been written to; environ is the router's own environment.
	Command func(s Settings, i int, pluginDir string, environ []string) (Spec, error)
}

// Venv is the name of the folder in the cache where the engine's Python is.
func (e Engine) Venv(gpus bool) string {
	if gpus {
		return e.GPUVenv
	}
	return e.CPUVenv
}

// Settings say how workers are started.
type Settings struct {
	Python          string // that has the engine
	Model           string // Hugging Face name or folder
	ModelFolder     bool   // Model is a folder here
	ServedModelName string
	NumWorkers      int
	PrefillWorkers  int      // that many of the first compute only prompts, the others answers, by NIXL; 0: each does both
	BlockSize       int      // tokens
	GPUsPerWorker   int      // of each rank
	GPUs            []string // that workers may use, as CUDA_VISIBLE_DEVICES names them; none: the CPU
	Cores           int      // of the CPU, to be shared out
	KVEvents        bool     // workers publish KV events
	Args            []string // the arguments after --
	Ports           Ports
}

// Asked returns the flags that request NumWorkers workers, with their values.
func (s Settings) Asked() string {
	if s.PrefillWorkers > 0 {
		return fmt.Sprintf("--prefill-workers %d and --decode-workers %d", s.PrefillWorkers, s.NumWorkers-s.PrefillWorkers)
	}
	return fmt.Sprintf("--num-workers %d", s.NumWorkers)
}

// Check refuses settings that the machine cannot serve with the engine.
func (e Engine) Check(s Settings) error {
	if err := e.CheckMachine(s); err != nil {
		return err
	}
	if len(s.GPUs) == 0 {
		if s.GPUsPerWorker > 1 {
			return fmt.Errorf("--gpus-per-worker %d: nvidia-smi finds no GPU; leave the flag out to run on the CPU", s.GPUsPerWorker)
		}
		return nil
	}
	if need := s.NumWorkers * s.Ports.Ranks * s.GPUsPerWorker; need > len(s.GPUs) {
		ranks := ""
		if s.Ports.Ranks > 1 {
			ranks = fmt.Sprintf(" and %s %d", e.RanksFlag, s.Ports.Ranks)
		}
		return fmt.Errorf("%s with --gpus-per-worker %d%s needs %d GPUs, but %d are visible; reduce them", s.Asked(), s.GPUsPerWorker, ranks, need, len(s.GPUs))
	}
	return nil
}

// DevicesOf returns those of the GPUs that worker i gets, as CUDA_VISIBLE_DEVICES
// names them, or an error if there are too few.
func (s Settings) DevicesOf(i int) (string, error) {
	k := s.GPUsPerWorker * s.Ports.Ranks
	if (i+1)*k > len(s.GPUs) {
		return "", fmt.Errorf("worker %d needs GPUs %d to %d of the visible ones, but there are %d", i, i*k+1, (i+1)*k, len(s.GPUs))
	}
	return strings.Join(s.GPUs[i*k:(i+1)*k], ","), nil
}

// Threads is how many of the CPU's cores a rank gets.
func (s Settings) Threads() int {
	return max(1, s.Cores/max(1, s.NumWorkers*s.Ports.Ranks))
}

// Spec is the command line and the environment of one worker process.
type Spec struct {
	Argv []string
	Env  []string
}

// Environment holds the variables of a process.
type Environment map[string]string

// EnvServiceName names the variable by which a process that is traced calls itself.
const EnvServiceName = "OTEL_SERVICE_NAME"

// NewEnvironment reads entries KEY=VALUE for a worker. Of a key that comes twice
// the last entry counts, as in os/exec. The router's own settings, its keys among
// them, are no business of the workers and left out; so are the name under which it
// sends traces and where to: by them a worker would do the same, unasked.
func NewEnvironment(environ []string) Environment {
	tracing := []string{EnvServiceName, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}
	env := Environment{}
	for _, entry := range environ {
		if key, value, ok := strings.Cut(entry, "="); ok && key != "" && !strings.HasPrefix(key, "KVROUTER_") && !slices.Contains(tracing, key) {
			env[key] = value
		}
	}
	return env
}

// SetDefault sets a variable that is not set.
func (e Environment) SetDefault(key, value string) {
	if _, set := e[key]; !set {
		e[key] = value
	}
}

// AddPath puts folders before those that PYTHONPATH has.
func (e Environment) AddPath(folders ...string) {
	if old := e["PYTHONPATH"]; old != "" {
		folders = append(folders, old)
	}
	e["PYTHONPATH"] = strings.Join(folders, string(os.PathListSeparator))
}

// AllowPlugins adds names, separated by commas, to a variable that limits the
// plugins an engine loads, where it does.
func (e Environment) AllowPlugins(variable, names string) {
	if allowed, limited := e[variable]; limited {
		e[variable] = strings.TrimPrefix(allowed+","+names, ",")
	}
}

// List returns the entries KEY=VALUE by key.
func (e Environment) List() []string {
	entries := make([]string, 0, len(e))
	for _, key := range slices.Sorted(maps.Keys(e)) {
		entries = append(entries, key+"="+e[key])
	}
	return entries
}
