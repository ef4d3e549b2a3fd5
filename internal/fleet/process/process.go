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

	"kvrouter/internal/base/kv"
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

	// Newer are flags, without dashes, with which the router starts it and that not every version takes: what
	// is lost without each; empty: nothing.
	Newer map[string]string

	// Examine notes what its installed version needs; nil: nothing.
	Examine func(*Settings)

	// CheckArgs refuses arguments after -- that the router sets itself, could not
	// follow, or that contradict other settings. Those of the machine are not known
	// yet. Its errors name the argument and what to use instead.
	CheckArgs func(s Settings) error
	// Ranks returns the number of data-parallel ranks of a worker by the arguments,
	// at least 1. RanksFlag is the argument that sets it.
	Ranks     func(args []string) int
	RanksFlag string
	// Limits returns the maximum tokens of a pass and the number of KV-cache blocks
	// by the arguments; 0: not set. BatchFlag is the argument that sets the first.
	Limits    func(args []string, blockSize int) (maxBatchedTokens, totalBlocks int)
	BatchFlag string
	// Traits returns what the settings say of the engine's KV cache; nil: nothing.
	Traits func(s Settings) kv.Traits
	// Key returns the key that workers will require; empty: none.
	Key func(args []string) string

	// CheckMachine refuses settings that the engine cannot serve on the machine, and
	// CheckPython a Python that lacks its modules.
	CheckMachine func(s Settings) error
	CheckPython  func(s Settings) error
	// Command returns the command line and the environment of worker i. The user's
	// arguments after -- and environment override its defaults. pluginDir is the
	// folder of the written Plugin; environ is the router's own environment.
	Command func(s Settings, i int, pluginDir string, environ []string) (Spec, error)
}

// Venv returns the name of the engine's Python environment in the cache folder.
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
	// number of prefill workers, which come first; the others are decode workers, over NIXL; 0: all workers are aggregated
	PrefillWorkers int
	BlockSize      int      // tokens
	GPUsPerWorker  int      // of each rank
	GPUs           []string // for workers, in the form of CUDA_VISIBLE_DEVICES; none: the CPU
	Cores          int      // of the CPU, divided among the workers
	OffloadGiB     float64  // memory of the machine for offloaded KV blocks, of each rank, GiB; 0: none
	Pulls          bool     // workers pull KV blocks from each other's part of that memory
	KVEvents       bool     // workers publish KV events
	Args           []string // the arguments after --
	Untaken        []string // flags that the engine does not take, without dashes
	Unbound        string   // the value by which the engine binds its threads to no core of a CPU; empty: that of its newest version
	Ports          Ports
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
		return fmt.Errorf("%s with --gpus-per-worker %d%s needs %d GPUs, but %d are visible; reduce them", s.Asked(), s.GPUsPerWorker, ranks,
			need, len(s.GPUs))
	}
	return nil
}

// DevicesOf returns the GPUs of worker i in the form of CUDA_VISIBLE_DEVICES, or an
// error if there are too few.
func (s Settings) DevicesOf(i int) (string, error) {
	k := s.GPUsPerWorker * s.Ports.Ranks
	if (i+1)*k > len(s.GPUs) {
		return "", fmt.Errorf("worker %d needs GPUs %d to %d of the visible ones, but there are %d", i, i*k+1, (i+1)*k, len(s.GPUs))
	}
	return strings.Join(s.GPUs[i*k:(i+1)*k], ","), nil
}

// Threads returns the number of CPU cores of a rank.
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

// EnvServiceName is the variable with the service name of a traced process.
const EnvServiceName = "OTEL_SERVICE_NAME"

// NewEnvironment reads entries KEY=VALUE for a worker. Of duplicate keys the last
// entry counts, as in os/exec. The router's own settings, including its keys, are
// removed, and so are its service name and endpoint for traces, which would make a
// worker send traces under the router's name. A Python from 3.11 on imports no module
// from the router's working folder unless PYTHONSAFEPATH is set to nothing.
func NewEnvironment(environ []string) Environment {
	tracing := []string{EnvServiceName, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}
	env := Environment{}
	for _, entry := range environ {
		if key, value, ok := strings.Cut(entry, "="); ok && key != "" && !strings.HasPrefix(key, "KVROUTER_") && !slices.Contains(tracing, key) {
			env[key] = value
		}
	}
	env.SetDefault("PYTHONSAFEPATH", "1")
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
