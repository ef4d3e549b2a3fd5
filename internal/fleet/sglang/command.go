// Package sglang starts SGLang workers: their command line, environment and plugins, and
// the meaning of their start-up logs.
package sglang

import (
	"embed"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/process"
)

// pluginFiles are the Python modules that started workers load: the one that keeps
// their sockets on loopback, those that let them wait, use NIXL, and keep KV blocks in
// host memory, on a CPU, and in the folder cpu what stands in for SGLang's compiled
// kernels there.
//
//go:embed plugin
var pluginFiles embed.FS

const (
	// setup is the command that prepares SGLang's Python.
	setup = "make setup-sglang"
	// cpuTokens is the size of the KV cache on a CPU, tokens: about 1 GiB with the
	// small model that is served there.
	cpuTokens = 20_000
	// cpuRequests bounds the requests that a CPU computes at once.
	cpuRequests = 8

	// The processes of ranks that share a model use ports of their own: attentionPorts
	// above the HTTP port of worker 0, attentionPortsEach for each worker. By default
	// SGLang counts them from each worker's HTTP port, so those of two would overlap.
	attentionPorts     = 233
	attentionPortsEach = 8
)

// Engine describes SGLang.
func Engine() process.Engine {
	return process.Engine{
		Kind: kv.EngineSGLang, Plugin: pluginFiles, Signs: signs(), Setup: setup,
		GPUVenv: "sglang-0.5.23", CPUVenv: "sglang-cpu-0.5.23",
		Newer: map[string]string{
			"kv-events-config":      "exact predictions: prompts count as cached where they were sent",
			"load-publish-endpoint": "the current load: that of its metrics lags",
			// Older versions compute without graphs on a CPU, and report the load by their own rules.
			"cuda-graph-backend-decode": "", "cuda-graph-backend-prefill": "", "load-snapshot-publish-interval": "",
			// Their decode workers keep no prompts.
			"disaggregation-decode-enable-radix-cache": "", "disaggregation-decode-retraction-backup": "",
		},
		Examine:   examine,
		CheckArgs: checkArgs,
		Ranks:     ranks, RanksFlag: "--" + ranksFlag,
		Limits: limits, BatchFlag: "--" + batchFlag,
		Key:          key,
		CheckMachine: checkOffload,
		CheckPython:  checkPython,
		Command:      command,
	}
}

// checkPython refuses a Python without SGLang, and one without NIXL where workers
// are to hand prompts over: SGLang would end after a minute of loading.
func checkPython(cfg process.Settings) error {
	lacks, err := process.Lacks(cfg.Python, "sglang")
	if lacks {
		return fmt.Errorf("--engine sglang: %s has no SGLang; run `%s`, or set --python to one that has", cfg.Python, setup)
	}
	if err != nil {
		return err
	}
	return cfg.CheckNIXL(setup)
}

// examine leaves KV events out where SGLang has no plugins, as up to 0.5.10: nothing would keep them on
// loopback. Up to 0.5.5 they are of no use either: the hash of a block says nothing of the blocks before it.
func examine(s *process.Settings) {
	has := func(file string) bool { return len(process.Source(s.Python, "sglang", file)) > 0 }
	if has("srt/server_args.py") && !has("srt/plugins/__init__.py") {
		s.Untaken = append(s.Untaken, "kv-events-config")
	}
}

// command returns the command line and the environment of started worker i.
func command(cfg process.Settings, i int, pluginDir string, environ []string) (process.Spec, error) {
	argv := []string{
		cfg.Python, "-m", "sglang.launch_server",
		"--model-path", cfg.Model,
		"--served-model-name", cfg.ServedModelName,
		"--host", "127.0.0.1",
		"--port", strconv.Itoa(cfg.Ports.HTTP + i),
		"--page-size", strconv.Itoa(cfg.BlockSize),
	}
	if cfg.KVEvents {
		// Without KV events SGLang publishes no load either: its metrics have it.
		argv = append(argv, "--kv-events-config", cfg.Ports.EventsConfig(i).String(), "--load-publish-endpoint",
			fmt.Sprintf("tcp://*:%d", cfg.Ports.Load+i*cfg.Ports.Ranks))
	}
	argv = append(argv, "--enable-metrics", "--enable-cache-report")
	env := process.NewEnvironment(environ)
	env.AllowPlugins("SGLANG_PLUGINS", "kvrouter_loopback,kvrouter_idle,kvrouter_nixl,kvrouter_tiers")
	env["KVROUTER_LOOPBACK"] = "1"
	// Else /health computes a token and takes a second at least, and a long prompt
	// before it makes a busy worker look dead.
	env.SetDefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
	if cfg.ModelFolder {
		env.SetDefault("HF_HUB_OFFLINE", "1")
	}
	if cfg.NumWorkers > 1 && sharesModel(cfg.Args) {
		argv = append(argv, "--dist-init-addr", fmt.Sprintf("127.0.0.1:%d", cfg.Ports.HTTP+attentionPorts+i*attentionPortsEach))
	}
	if cfg.PrefillWorkers > 0 {
		argv = append(argv, partArgs(cfg, i)...)
		// The ranks' messages to each other use this address, too.
		env["SGLANG_HOST_IP"] = "127.0.0.1"
	}
	argv = append(argv, offloadArgs(cfg)...)

	if len(cfg.GPUs) > 0 {
		devices, err := cfg.DevicesOf(i)
		if err != nil {
			return process.Spec{}, err
		}
		env["CUDA_VISIBLE_DEVICES"] = devices
		if size, given := tensorSize(cfg); !given && size != "1" {
			argv = append(argv, "--"+tensorFlag, size)
		}
		env.AddPath(pluginDir)
	} else {
		argv = append(argv, cpuArgs(cfg)...)
		setCPUEnvironment(cfg, i, env)
		env.AddPath(pluginDir, filepath.Join(pluginDir, "cpu"))
	}
	return process.Spec{Argv: append(cfg.Taken(argv), cfg.Args...), Env: env.List()}, nil
}

// partArgs are the arguments of worker i where prefill and decode are apart.
func partArgs(cfg process.Settings, i int) []string {
	argv := flags.Defaults(cfg.Args, "--disaggregation-transfer-backend", "nixl")
	if i < cfg.PrefillWorkers {
		return append(argv, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", strconv.Itoa(cfg.Ports.Bootstrap+i))
	}
	// Without a radix tree decode workers would report nothing of their caches.
	argv = append(argv, "--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache")
	if len(cfg.GPUs) == 0 { // what else keeps the blocks of a retracted request asks CUDA for memory
		argv = append(argv, flags.Defaults(cfg.Args, "--disaggregation-decode-retraction-backup", "none")...)
	}
	return argv
}

// cpuArgs are the arguments for a worker on a CPU that the user did not give.
func cpuArgs(cfg process.Settings) []string {
	argv := flags.Defaults(
		cfg.Args,
		"--device", "cpu",
		"--attention-backend", "torch_native",
		"--cuda-graph-backend-decode", "disabled",
		"--cuda-graph-backend-prefill", "disabled",
		"--"+tokensFlag, strconv.Itoa(cpuTokens),
		// Of the memory that is free when the worker starts. The tokens above say how
		// much it takes; this leaves room for others that take theirs meanwhile.
		"--mem-fraction-static", "0.9",
		"--dtype", "float32", // bfloat16 is slower but where the CPU computes it itself
		"--max-running-requests", strconv.Itoa(cpuRequests*cfg.Ports.Ranks),
		// Passes from one report of the load to the next: each takes a tenth of a second.
		"--load-snapshot-publish-interval", "1",
	)
	// Without the last, a worker without requests takes a whole core.
	return append(argv, "--disable-overlap-schedule", "--sleep-on-idle")
}

// setCPUEnvironment sets what SGLang, torch and NIXL's UCX read from the environment
// of a worker on a CPU.
func setCPUEnvironment(cfg process.Settings, i int, env process.Environment) {
	env["SGLANG_USE_CPU_ENGINE"] = "1"
	env["CUDA_VISIBLE_DEVICES"] = ""
	env.SetDefault("OMP_NUM_THREADS", strconv.Itoa(cfg.Threads()))
	// Threads that spin while they wait for each other take seconds for a token where
	// anything else wants the cores.
	env.SetDefault("OMP_WAIT_POLICY", "passive")
	env.SetDefault("SGLANG_CPU_OMP_THREADS_BIND", coresOf(cfg, i))
	env["KVROUTER_IDLE_POLL_MS"] = "100"
	if offloads(cfg) {
		env["KVROUTER_CPU_TIERS"] = "1"
	}
	if cfg.PrefillWorkers > 0 {
		env.SetNIXLOnCPU()
	}
}

// coresOf names the CPU cores of each of worker i's processes, one after the other,
// as SGLang reads them. SGLang counts the entries; only its compiled kernels bind
// threads to them.
func coresOf(cfg process.Settings, i int) string {
	size, _ := tensorSize(cfg)
	tensor, _ := strconv.Atoi(size)
	processes := max(1, tensor)
	if !sharesModel(cfg.Args) {
		processes *= cfg.Ports.Ranks
	}
	threads := cfg.Threads()
	entries := make([]string, 0, processes)
	for p := range processes {
		first := (i*processes + p) * threads % max(1, cfg.Cores)
		last := min(first+threads, max(1, cfg.Cores)) - 1
		entry := strconv.Itoa(first)
		if last > first {
			entry += "-" + strconv.Itoa(last)
		}
		entries = append(entries, entry)
	}
	return strings.Join(entries, "|")
}
