package main

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/discovery"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/peers/cluster"
	"kvrouter/internal/peers/dynamo"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/encode"
	"kvrouter/internal/serve/extproc"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// testMachine is a machine whose home is a fresh folder with the prepared
// model, and that has the GPUs.
func testMachine(t *testing.T, gpus ...string) settings.Machine {
	t.Helper()
	home := t.TempDir()
	model := filepath.Join(home, ".cache", "kvrouter", "smollm2-135m-instruct")
	testkit.WriteFile(t, filepath.Join(model, "config.json"), `{"max_position_embeddings": 8192}`)
	machine := settings.ThisMachine()
	machine.Cores, machine.Memory = 8, 0
	machine.GPUs = func() []string { return gpus }
	machine.Getenv = func(key string) string {
		if key == "HOME" {
			return home
		}
		return ""
	}
	return machine
}

func mustParse(t *testing.T, machine settings.Machine, args ...string) Config {
	t.Helper()
	chosen, err := parse(args, machine)
	cfg, is := chosen.(*Config)
	if err != nil || !is {
		t.Fatalf("parse(%q) = %T, %v", args, chosen, err)
	}
	return *cfg
}

func TestDefaultsOnACPUMachine(t *testing.T) {
	machine := testMachine(t)
	cfg := mustParse(t, machine)
	home := machine.Getenv("HOME")
	want := Config{
		Model: filepath.Join(home, ".cache/kvrouter/smollm2-135m-instruct"), ServedModelName: "smollm2-135m-instruct", ModelFolder: true,
		Engine: "vllm", NumWorkers: 2, GPUsPerWorker: 1, Python: "python3",
		Flags: workers.Flags{StartupTimeout: 10 * time.Minute, RestartBackoffMax: 30 * time.Second}, Models: models.Flags{Limits: chat.DefaultLimits, SendTokens: models.SendAuto},
		Host: "127.0.0.1", HTTPPort: 8000, RouterPort: 7000, BaseWorkerPort: 8100, BaseKVEventsPort: 5557, BaseKVReplayPort: 5757, BaseMetricsPort: 5657, BaseNIXLPort: 5600, BaseP2PPort: 5710, BaseBootstrapPort: 8998,
		Scheduling: Scheduling{BlockSize: 64, Policy: "work", Scoring: testkit.Defaults[policies.Settings](), Index: testkit.Defaults[router.IndexSettings](), Mock: testkit.Defaults[mocker.Settings]()}, TokenTimeout: 2 * time.Second, TokenCacheTokens: encode.DefaultCache, CollectUsage: true, Routing: testkit.Defaults[router.Settings](), Snapshot: events.Settings{IndexSnapshotInterval: 30 * time.Second, RecordEventsMaxBytes: 1 << 30}, Proxy: testkit.Defaults[proxy.Settings](),
		MaxBodyBytes: 64 << 20, RequestTimeout: 30 * time.Minute, Web: web.Settings{RouterHost: "127.0.0.1"}, Metrics: telemetry.Flags{MetricsHost: "127.0.0.1"}, DrainDelay: 5 * time.Second, DrainTimeout: 30 * time.Second,
		LogLevel: "info", LogFormat: "text", MetricsLimit: 256, Cores: 8, LastStart: filepath.Join(home, ".cache/kvrouter/last-start-vllm"), Dynamo: dynamo.Settings{ReplicaSyncPort: 7100}, Cluster: testkit.Defaults[cluster.Settings](),
		Cells: testkit.Defaults[cells.Flags](), Gateway: extproc.Settings{ExtProcFallbacks: 3}, Discovery: discovery.Settings{WorkerPort: 8000},
	}
	if diff := cmp.Diff(want, cfg); diff != "" {
		t.Error(diff)
	}
}

func TestDefaultsOnAGPUMachine(t *testing.T) {
	machine := testMachine(t, "0", "1", "2", "3")
	testkit.WriteFile(t, filepath.Join(machine.Getenv("HOME"), ".cache/kvrouter/vllm/bin/python"), "")
	cfg := mustParse(t, machine, "--num-workers", "2", "--gpus-per-worker=2")
	if cfg.Model != DefaultGPUModel || cfg.ServedModelName != DefaultGPUModel || cfg.ModelFolder {
		t.Errorf("model %q served as %q, folder %v", cfg.Model, cfg.ServedModelName, cfg.ModelFolder)
	}
	if !strings.HasSuffix(cfg.Python, "/kvrouter/vllm/bin/python") {
		t.Errorf("python %q", cfg.Python)
	}
	if !slices.Equal(cfg.GPUs, []string{"0", "1", "2", "3"}) {
		t.Errorf("GPUs %q", cfg.GPUs)
	}
}

func TestDefaultsWithSGLang(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	testkit.WriteFile(t, file, "sglang-args: [--dtype, bfloat16]\nvllm-args: [--max-model-len, 4096]\n")
	for _, test := range []struct {
		gpus   []string
		python string
	}{{nil, "sglang-cpu-0.5.23"}, {[]string{"0", "1"}, "sglang-0.5.23"}} {
		machine := testMachine(t, test.gpus...)
		python := filepath.Join(machine.Getenv("HOME"), ".cache/kvrouter", test.python, "bin/python")
		testkit.WriteFile(t, python, "")
		cfg := mustParse(t, machine, "--engine", "sglang", "--block-size", "16", "--config", file)
		fleet := cfg.fleetSettings()
		if cfg.Python != python || len(cfg.GPUs) != len(test.gpus) || fleet.Engine != kv.EngineSGLang || len(fleet.Started) != 2 {
			t.Errorf("python %q, GPUs %q, engine %s, %d workers", cfg.Python, cfg.GPUs, fleet.Engine, len(fleet.Started))
		}
		if !slices.Equal(cfg.EngineArgs, []string{"--dtype", "bfloat16"}) {
			t.Errorf("arguments %q", cfg.EngineArgs)
		}
	}
}

// TestCommandsShareAFile: the file of a router is usable by the other commands, which read
// their own keys of it; serve refuses theirs.
// TestEnvironmentIsWhatAPersonWouldType holds that each variable is the flag in capitals.
// helpFlag is the first line of a flag in a help text.
// helpOf returns what arguments print and the flags that this shows.
// TestHelpShowsWhatTheCommandReads holds --help=all against the flags of each command, and
// the lists of usual ones.
func TestArgumentsAfterTheDashesGoToVLLMUnchanged(t *testing.T) {
	cfg := mustParse(t, testMachine(t), "--seed", "3", "--", "--max-model-len", "4096", "--", "--seed=9")
	if want := []string{"--max-model-len", "4096", "--", "--seed=9"}; !slices.Equal(cfg.EngineArgs, want) || cfg.Seed != 3 {
		t.Errorf("EngineArgs %q, seed %d", cfg.EngineArgs, cfg.Seed)
	}
}

func TestAttachedWorkersGetTheNextFreeNumbers(t *testing.T) {
	cfg := mustParse(t, testMachine(t), "--engine", "none",
		"--worker", "id=1,url=http://h:1/,kv-events=tcp://h:5557,replay=tcp://h:5757,load=ipc:///run/load",
		"--worker", "url=http://h:2;url=https://h:3", "--worker=http://h:4",
		"--worker", "url=http://h:5,role=prefill,kind=mooncake,bootstrap=[::1]:8998")
	want := []workers.Attached{
		{Server: probe.Server{ID: 1, URL: "http://h:1", KVEvents: "tcp://h:5557", Replay: "tcp://h:5757", Load: "ipc:///run/load"}, HasID: true},
		{Server: probe.Server{ID: 0, URL: "http://h:2"}}, {Server: probe.Server{ID: 2, URL: "https://h:3"}}, {Server: probe.Server{ID: 3, URL: "http://h:4"}},
		{Server: probe.Server{ID: 4, URL: "http://h:5", Disagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindMooncake, Bootstrap: kv.Bootstrap{Host: "::1", Port: 8998}}}},
	}
	if diff := cmp.Diff(want, cfg.Worker); diff != "" {
		t.Error(diff)
	}
}

// TestWorkersAreAttachedByTheirURLs: every spelling gives one list, and only a flag that asks for
// started workers adds some.
func TestWorkersAreAttachedByTheirURLs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	testkit.WriteFile(t, file, "worker-urls: [http://a:1, http://b:2]\n")
	for _, test := range []struct {
		args    string
		engine  string
		started int
		urls    string
	}{
		{"http://a:1 http://b:2", EngineNone, 0, "http://a:1 http://b:2"},
		{"serve http://a:1 https://b:2/", EngineNone, 0, "http://a:1 https://b:2"},
		{"--policy cache_aware http://a:1 http://b:2", EngineNone, 0, "http://a:1 http://b:2"},
		{"--policy kv http://a:1 url=http://b:2,id=7 --seed 3", EngineNone, 0, "http://a:1 http://b:2"},
		{"--worker-urls http://a:1 http://b:2 --policy kv", EngineNone, 0, "http://a:1 http://b:2"},
		{"--worker-urls http://a:1 --worker-urls http://b:2", EngineNone, 0, "http://a:1 http://b:2"},
		{"--worker-urls=http://a:1,http://b:2 http://c", EngineNone, 0, "http://a:1 http://b:2 http://c"},
		{"--config " + file, EngineNone, 0, "http://a:1 http://b:2"},
		{"--worker url=http://a:1", EngineNone, 0, "http://a:1"},
		{"--discovery dns://vllm:8100", EngineNone, 0, ""},
		{"http://a:1 --num-workers 0", EngineNone, 0, "http://a:1"},
		{"http://a:1 --num-workers 3", EngineVLLM, 3, "http://a:1"},
		{"http://a:1 --prefill-workers 1 --decode-workers 1", EngineVLLM, 2, "http://a:1"},
		{"http://a:1 --engine sglang", EngineSGLang, 2, "http://a:1"},
		{"http://a:1 --engine none --num-workers 3", EngineNone, 0, "http://a:1"},
		{"", EngineVLLM, 2, ""},
	} {
		cfg := mustParse(t, testMachine(t), strings.Fields(test.args)...)
		var urls []string
		for _, w := range cfg.Worker {
			urls = append(urls, w.URL)
		}
		if got := strings.Join(urls, " "); cfg.Engine != test.engine || got != test.urls || len(cfg.fleetSettings().Started) != test.started {
			t.Errorf("%s: engine %s, %d started, attached %s", test.args, cfg.Engine, len(cfg.fleetSettings().Started), got)
		}
	}
	chosen, err := parse([]string{"doctor", "http://a:1", "http://b:2"}, testMachine(t))
	if err != nil {
		t.Fatal(err)
	}
	if setup := chosen.(*DoctorCommand).setup(); len(setup.Workers) != 2 || !setup.Attached {
		t.Errorf("doctor has %d workers, attached only: %v", len(setup.Workers), setup.Attached)
	}
}

func TestWrongSettingsSayWhatWouldBeRight(t *testing.T) {
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "c.yaml")
		testkit.WriteFile(t, path, content)
		return path
	}
	cpu, gpu := testMachine(t), testMachine(t, "0", "1", "2")
	bare := testMachine(t)
	bare.IsDir = func(string) bool { return false }
	for _, test := range []struct {
		name    string
		machine settings.Machine
		args    string
		want    []string
	}{
		{"unknown flag", cpu, "--num-worker 3", []string{"--num-worker", `did you mean "--num-workers"`}},
		{"not a number", cpu, "--num-workers x", []string{"--num-workers", `"x"`}},
		{"stray word", cpu, "serve now", []string{"now"}},
		{"no worker at all", cpu, "--num-workers 0", []string{"--num-workers 0", "--engine none"}},
		{"workers and their parts", cpu, "--num-workers 2 --prefill-workers 1 --decode-workers 1", []string{"--num-workers 2", "--prefill-workers", "leave one"}},
		{"prompts that nobody answers", cpu, "--prefill-workers 1", []string{"--prefill-workers 1", "--decode-workers 0", "at least 1"}},
		{"answers without prompts", cpu, "--decode-workers 3", []string{"--prefill-workers 0", "--decode-workers 3", "at least 1"}},
		{"fewer prefill workers than none", cpu, "--prefill-workers=-1 --decode-workers 3", []string{"--prefill-workers -1", "at least 1"}},
		{"too many workers", cpu, "--prefill-workers 600 --decode-workers 600", []string{"--prefill-workers 600 and --decode-workers 600", "1 to 1000"}},
		{"parts of no vLLM", cpu, "--engine none --prefill-workers 1 --decode-workers 1", []string{"--prefill-workers", "--engine is none"}},
		{"transfers of the user's own", cpu, "--prefill-workers 1 --decode-workers 1 -- --kv_transfer_config {}", []string{"--kv-transfer-config after --", "--worker url=...,role=prefill"}},
		{"memory for blocks and transfers of the user's own", cpu, "--kv-offload-gib 1 -- --kv-transfer-config.kv_role kv_both", []string{"--kv-transfer-config after --", "--kv-offload-gib"}},
		{"memory for blocks twice", cpu, "--kv-offload-gib 1 -- --kv_offloading_size=2", []string{"--kv-offloading-size after --", "--kv-offload-gib"}},
		{"less than no memory for blocks", cpu, "--kv-offload-gib=-1", []string{"--kv-offload-gib -1", "0 to"}},
		{"no number of memory for blocks", cpu, "--kv-offload-gib NaN", []string{"--kv-offload-gib NaN", "0 to"}},
		{"memory for blocks of no worker", cpu, "--engine none --worker http://h:1 --kv-offload-gib 1", []string{"--kv-offload-gib 1", "--engine none"}},
		{"memory for blocks of mock workers", cpu, "--engine mocker --kv-offload-gib 1", []string{"--kv-offload-gib 1", "--engine mocker"}},
		{"pulls without memory", cpu, "--kv-p2p", []string{"--kv-p2p", "--kv-offload-gib"}},
		{"pulls of SGLang", cpu, "--engine sglang --kv-offload-gib 1 --kv-p2p", []string{"--kv-p2p", "--engine vllm"}},
		{"pulls of parts", cpu, "--prefill-workers 1 --decode-workers 1 --kv-offload-gib 1 --kv-p2p", []string{"--kv-p2p", "--prefill-workers"}},
		{"pulls meet other ports", cpu, "--kv-offload-gib 1 --kv-p2p --base-p2p-port 8100", []string{"--base-p2p-port 8100", "--base-worker-port 8100"}},
		{"a part of a GB for SGLang", cpu, "--engine sglang --kv-offload-gib 0.5", []string{"--kv-offload-gib 0.5", "--hicache-ratio after --"}},
		{"memory for blocks of SGLang's parts", cpu, "--engine sglang --prefill-workers 1 --decode-workers 1 --kv-offload-gib 4", []string{"--kv-offload-gib with --prefill-workers", "SGLang"}},
		{"a setting of transfers of the user's own", cpu, "--prefill-workers 1 --decode-workers 1 -- --kv-transfer-config.kv_role kv_both", []string{"--kv-transfer-config after --"}},
		{"too few GPUs for parts", gpu, "--prefill-workers 2 --decode-workers 2", []string{"--prefill-workers 2 and --decode-workers 2", "needs 4 GPUs", "3 are visible"}},
		{"a record of no KV events", cpu, "--record-events f --no-kv-events", []string{"--record-events", "--no-kv-events"}},
		{"a record of no KV events by the policy", cpu, "--record-events f --policy kv --overlap-score-weight 0", []string{"--record-events", "policy"}},
		{"a record of KV events without room", cpu, "--record-events f --record-events-max-bytes 0", []string{"--record-events-max-bytes 0", "at least 1"}},
		{"two records in one file", cpu, "--record f --record-events ./f", []string{"--record and --record-events", "./f"}},
		{"receipts without a record", cpu, "--record-decisions", []string{"--record-decisions", "--record FILE"}},
		{"bootstrap ports meet other ports", cpu, "--engine sglang --prefill-workers 1 --decode-workers 1 --base-bootstrap-port 8100", []string{"--base-bootstrap-port 8100", "--base-worker-port 8100"}},
		{"side channels meet other ports", cpu, "--prefill-workers 1 --decode-workers 1 --base-nixl-port 8100", []string{"--base-nixl-port 8100", "--base-worker-port 8100"}},
		{"a part of the router's own flag for vLLM", cpu, "-- --kv-events-config.topic t", []string{"--kv-events-config.topic", "--base-kv-events-port"}},
		{"no block", cpu, "--block-size 0", []string{"--block-size must be more than 0"}},
		{"block size of a CPU", cpu, "--block-size 16", []string{"--block-size 16", "multiple of 32"}},
		{"a policy of another router", cpu, "--policy consistent_hash", []string{"--policy", "consistent_hash", "--session-header"}},
		{"unknown policy", cpu, "--policy best", []string{"--policy", "standalone", "best"}},
		{"an unknown fix of thompson", cpu, "--policy thompson --thompson.override fixes=load-sign,nothing", []string{"fixes load-sign,nothing", `"nothing"`, "worker-baseline"}},
		{"all fixes of thompson and one", cpu, "--policy thompson --thompson.override fixes=all,feedback", []string{"fixes all,feedback", "by itself"}},
		{"no parameters of thompson", cpu, "--policy thompson --thompson-config /nonexistent.yaml", []string{"--thompson-config /nonexistent.yaml", "no such file"}},
		{"an unknown parameter of thompson", cpu, "--policy thompson --thompson-config " + file("lints:\n  lamda: 1"), []string{"c.yaml", `"lints.lamda"`, `"lints.lambda"`}},
		{"thompson's block size", cpu, "--policy thompson --thompson-config " + file("infrastructure: {block_size: 16}"), []string{"c.yaml", "infrastructure.block_size is 16", "--block-size is 64"}},
		{"thompson's parameters to simulate", cpu, "simulate --trace t --concurrency 8 --policy kv,thompson --thompson-config " + file("a: 1"), []string{"c.yaml", `"a"`}},
		{"a policy knob below 0", cpu, "--policy kv --router-temperature=-1", []string{"--router-temperature", "-1", "at least 0"}},
		{"an infinite policy knob", cpu, "--policy kv --overlap-score-weight Inf", []string{"--overlap-score-weight", "+Inf"}},
		{"no time to live", cpu, "--no-kv-events --router-ttl-secs 0", []string{"--router-ttl-secs 0", "more than 0"}},
		{"an unknown rule of ties", cpu, "--policy kv --ties first", []string{"--ties", "random", "smallest-tree", "first"}},
		{"a tree of no blocks", cpu, "--no-kv-events --router-max-tree-size 0", []string{"--router-max-tree-size 0", "at least 1"}},
		{"more than all is left", cpu, "--router-prune-target-ratio 1.5", []string{"--router-prune-target-ratio 1.5", "0 to 1"}},
		{"predictions of predictions", cpu, "--no-kv-events --router-predicted-ttl-secs 5", []string{"--router-predicted-ttl-secs", "--no-kv-events"}},
		{"output blocks without active ones", cpu, "--router-track-output-blocks --no-router-track-active-blocks", []string{"--router-track-output-blocks", "--no-router-track-active-blocks"}},
		{"a busy threshold that is no share", cpu, "--active-decode-blocks-threshold 1.2", []string{"--active-decode-blocks-threshold 1.2", "0 to 1"}},
		{"passes of unknown size", cpu, "--active-prefill-tokens-threshold-frac 2 -- --max-num-seqs 3", []string{"--active-prefill-tokens-threshold-frac", "--max-num-batched-tokens NUMBER after --"}},
		{"a queue for workers of unknown size", cpu, "--router-queue-threshold 1", []string{"--router-queue-threshold", "--max-num-batched-tokens NUMBER after --"}},
		{"a queue of no length", cpu, "--engine mocker --router-queue-threshold 1 --router-queue-limit 0", []string{"--router-queue-limit 0", "at least 1"}},
		{"a threshold below none", cpu, "--engine mocker --router-queue-threshold=-1", []string{"--router-queue-threshold -1", "at least 0"}},
		{"a queue to simulate", cpu, "simulate --trace t --concurrency 8 --router-queue-threshold=-1", []string{"--router-queue-threshold -1", "at least 0"}},
		{"nothing to simulate", cpu, "simulate --concurrency 8", []string{"--trace", "--synthetic chat"}},
		{"a trace and conversations", cpu, "simulate --trace t --synthetic chat --concurrency 8", []string{"either", "--trace"}},
		{"conversations of an unknown shape", cpu, "simulate --synthetic cat --concurrency 8", []string{"--synthetic", "chat", "agentic", "rollouts"}},
		{"conversations at a trace's times", cpu, "simulate --synthetic chat --speedup 1", []string{"--concurrency", "--synthetic-rate"}},
		{"conversations at a number and a rate", cpu, "simulate --synthetic chat --concurrency 8 --synthetic-rate 1", []string{"either", "--synthetic-rate"}},
		{"conversations of no turn", cpu, "simulate --synthetic chat --concurrency 8 --synthetic-turns 0", []string{"--synthetic-turns 0", "at least 1"}},
		{"agents at a rate of conversations", cpu, "simulate --synthetic agentic --synthetic-rate 1", []string{"--concurrency", "--agentic-rate"}},
		{"agents that call nothing", cpu, "simulate --synthetic agentic --concurrency 8 --agentic-min-calls 0", []string{"--agentic-min-calls 0", "at least 1"}},
		{"agents that end before they may", cpu, "simulate --synthetic agentic --concurrency 8 --agentic-max-calls 3", []string{"--agentic-max-calls 3", "--agentic-min-calls"}},
		{"tools that take no time", cpu, "simulate --synthetic agentic --concurrency 8 --agentic-min-latency 0s", []string{"--agentic-min-latency 0s", "more than 0"}},
		{"trajectories that end before they may", cpu, "simulate --synthetic rollouts --concurrency 8 --rollouts-max-turns 3", []string{"--rollouts-max-turns 3", "--rollouts-min-turns"}},
		{"rollouts without a concurrency", cpu, "simulate --synthetic rollouts", []string{"--concurrency"}},
		{"an environment that takes no time", cpu, "simulate --synthetic rollouts --concurrency 8 --rollouts-min-latency 0s", []string{"--rollouts-min-latency 0s", "more than 0"}},
		{"more long answers than answers", cpu, "simulate --synthetic agentic --concurrency 8 --agentic-long-share 2", []string{"--agentic-long-share 2", "0 to 1"}},
		{"a simulation without a load", cpu, "simulate --trace t", []string{"--concurrency", "--speedup"}},
		{"a simulation with two loads", cpu, "simulate --trace t --concurrency 8 --speedup 1", []string{"--concurrency", "--speedup"}},
		{"an engine that takes no time in virtual time", cpu, "simulate --trace t --concurrency 8 --speedup-ratio 0", []string{"--speedup-ratio 0", "more than 0"}},
		{"a simulated engine without a batch", cpu, "simulate --trace t --concurrency 8 --mock max-num-seqs=0", []string{"--mock max-num-seqs=0", "at least 1"}},
		{"an unknown policy to simulate", cpu, "simulate --trace t --concurrency 8 --policy kv,best", []string{"--policy", "best"}},
		{"a peer that is no URL", cpu, "--engine none --indexer-peers h:7000", []string{"--indexer-peers", "http://"}},
		{"arguments for no vLLM", cpu, "--engine none --worker http://h:1 -- --x", []string{"--x", "--engine none"}},
		{"worker without URL", cpu, "--worker id=3", []string{"id=3", "url is missing"}},
		{"worker URL", cpu, "--worker url=localhost:8100", []string{"localhost:8100 is not a URL", "give http://localhost:8100"}},
		{"a worker without its scheme", cpu, "gpu-1:8000", []string{"gpu-1:8000 is not a URL", "give http://gpu-1:8000"}},
		{"an address without its scheme", cpu, "--worker-urls 10.0.0.1:8000", []string{"give http://10.0.0.1:8000"}},
		{"the URL of the API", cpu, "http://h:1/v1", []string{"http://h:1/v1", "give http://h:1"}},
		{"a URL with a password", cpu, "http://user:sesame@h:1", []string{"must not contain a user or password"}},
		{"a URL of another scheme", cpu, "http://h:1 ftp://h:2", []string{"ftp://h:2 is not a URL"}},
		{"URLs joined by a comma", cpu, "http://h:1,http://h:2", []string{"http://h:1,http://h:2", "separate workers by spaces"}},
		{"URLs apart", cpu, "http://h:1 --seed 1 http://h:2", []string{"unexpected argument http://h:2", "one after another"}},
		{"a URL and the same worker", cpu, "http://h:1/ --worker url=http://h:1", []string{"http://h:1", "twice"}},
		{"a URL and the same in a list", cpu, "http://h:1 --worker-urls http://h:2,http://h:1", []string{"http://h:1", "twice"}},
		{"a model for a worker", cpu, "serve Qwen/Qwen3-0.6B", []string{`"Qwen/Qwen3-0.6B"`, "a model by --model"}},
		{"a model for a command", cpu, "Qwen/Qwen3-0.6B", []string{"--model Qwen/Qwen3-0.6B"}},
		{"arguments for workers that are not started", cpu, "http://h:1 -- --x", []string{"--x", "--num-workers"}},
		{"memory of workers that are not started", cpu, "http://h:1 --kv-offload-gib 1", []string{"--kv-offload-gib 1", "--num-workers"}},
		{"worker id", cpu, "--worker id=x,url=http://h:1", []string{"id=x", "whole number"}},
		{"worker key", cpu, "--worker url=http://h:1,events=tcp://h:1", []string{"unknown key events", "kv-events"}},
		{"worker role", cpu, "--worker url=http://h:1,role=prefil", []string{"role", "prefil", "both, prefill, decode"}},
		{"worker kind", cpu, "--worker url=http://h:1,kind=nccl", []string{"kind", "nccl", "nixl, sglang, mooncake"}},
		{"worker bootstrap", cpu, "--worker url=http://h:1,bootstrap=h", []string{"bootstrap", "10.0.0.1:8998"}},
		{"uncached tokens", cpu, "--disagg-min-uncached-tokens=-1", []string{"--disagg-min-uncached-tokens", "0 sends"}},
		{"prefill timeout", cpu, "--disagg-prefill-timeout 0s", []string{"--disagg-prefill-timeout", "more than 0"}},
		{"handover timeout", cpu, "--disagg-handover-timeout 0s", []string{"--disagg-handover-timeout", "more than 0"}},
		{"worker endpoint", cpu, "--worker url=http://h:1,load=tcp://*:5657", []string{"load", "tcp://host:5557"}},
		{"worker key twice", cpu, "--worker url=http://h:1,url=http://h:2", []string{"url is given twice"}},
		{"one server twice", cpu, "--worker http://127.0.0.1:1 http://localhost:1", []string{"worker http://localhost:1 is given twice: http://127.0.0.1:1 is the same server"}},
		{"worker twice", cpu, "--worker http://h:1;http://h:1", []string{"http://h:1", "twice"}},
		{"worker id taken", cpu, "--num-workers 2 --worker id=1,url=http://h:1", []string{"id 1", "a started worker"}},
		{"ports meet", cpu, "--http-port 8101", []string{"--http-port 8101", "--base-worker-port 8100 (+1 for worker 1)", "8101"}},
		{"port ranges overlap", cpu, "--num-workers 101", []string{"--base-kv-events-port 5557 (+100 for worker 100)", "--base-metrics-port 5657"}},
		{"port too high", cpu, "--base-worker-port 65535", []string{"--base-worker-port 65535 (+1", "1 to 65535"}},
		{"too few GPUs", gpu, "--num-workers 2 --gpus-per-worker 2", []string{"needs 4 GPUs", "3 are visible"}},
		{"no GPU to split", cpu, "--gpus-per-worker 2", []string{"--gpus-per-worker 2", "no GPU"}},
		{"not set up", bare, "", []string{"make setup"}},
		{"no such folder", cpu, "--model ./nothing", []string{"./nothing", "no such folder"}},
		{"not a model", cpu, "--model " + t.TempDir(), []string{"config.json"}},
		{"the router's own flag for vLLM", cpu, "-- --kv_events_config={}", []string{"--kv_events_config={}", "--base-kv-events-port"}},
		{"the router's own flag for SGLang", cpu, "--engine sglang -- --page_size 1", []string{"--page_size after --", "--block-size"}},
		{"too few GPUs for ranks of SGLang", gpu, "--engine sglang -- --dp 2", []string{"--dp-size 2", "needs 4 GPUs", "3 are visible"}},
		{"passes of no known size with SGLang", cpu, "--engine sglang --router-queue-threshold 2", []string{"--router-queue-threshold", "--chunked-prefill-size"}},
		{"no rank", cpu, "-- -dp 0", []string{"--data-parallel-size 0 after --", "at least 1"}},
		{"ranks of no number", cpu, "-- --data_parallel_size=two", []string{"--data-parallel-size two after --", "at least 1"}},
		{"ranks elsewhere", cpu, "-- -dp 4 -dpl 2", []string{"-dpl after --", "--data-parallel-size"}},
		{"ports of ranks overlap", cpu, "--num-workers 26 -- --data-parallel-size 4", []string{"--base-kv-events-port 5557 (+100 for worker 25)", "--base-metrics-port 5657"}},
		{"too few GPUs for ranks", gpu, "-- --data-parallel-size 2", []string{"--data-parallel-size 2", "needs 4 GPUs", "3 are visible"}},
		{"no file", cpu, "--config /nonexistent.yaml", []string{"/nonexistent.yaml", "no such file"}},
		{"the version as a setting", cpu, "--config " + file("version: true"), []string{"c.yaml", `"version"`}},
		{"unknown key", cpu, "--config " + file("num-wokers: 3"), []string{"c.yaml", `"num-wokers"`, `"num-workers"`}},
		{"file is no map", cpu, "--config " + file("- a"), []string{"c.yaml", "not a YAML map"}},
		{"file has a wrong type", cpu, "--config " + file("num-workers: many"), []string{"--num-workers", "many", "c.yaml"}},
		{"file has an empty value", cpu, "--config " + file("model:"), []string{"c.yaml", "model", "no value"}},
		{"arguments of a file for no engine", cpu, "--engine none --worker http://h:1 --config " + file("sglang-args: [--x]"), []string{"--x", "--engine none"}},
		{"vLLM arguments as text", cpu, "--config " + file("vllm-args: --a b"), []string{"c.yaml", "vllm-args", "list"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := parse(strings.Fields(test.args), test.machine)
			if err == nil {
				t.Fatal("no error")
			}
			t.Log(err)
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one line: %q", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

func TestTakenPortIsToldWithItsFlag(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	port := listener.Addr().(*net.TCPAddr).Port
	cfg := Config{Engine: EngineNone, Host: "127.0.0.1", Web: web.Settings{RouterHost: "127.0.0.1"}, RouterPort: port}
	err = settings.CheckPortsFree(cfg.ports())
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("--router-port %d", port)) || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("a taken port: %v", err)
	}
	cfg.RouterPort = 0
	if err := settings.CheckPortsFree(cfg.ports()); err != nil {
		t.Errorf("any port: %v", err)
	}
}

func TestEngineLimitsAreThoseTheWorkersAreStartedWith(t *testing.T) {
	for _, test := range []struct {
		args            string
		batched, blocks int
	}{
		{"", 0, 0},
		{"-- --max-num-batched-tokens 2048 --num_gpu_blocks_override=77", 2048, 77},
		{"-- --max-num-batched-tokens=many", 0, 0},
		{"-- --max-num-batched-tokens 1 --max-num-batched-tokens=2", 2, 0},
		{"--active-prefill-tokens-threshold-frac 2 -- --max-num-batched-tokens 1", 1, 0},
		{"--engine mocker --mock max-num-batched-tokens=99 --mock num-gpu-blocks=12", 99, 12},
		{"--engine none --worker http://h:1", 0, 0},
		{"--engine sglang -- --chunked-prefill-size 2048 --max-total-tokens=640", 2048, 10},
	} {
		cfg := mustParse(t, testMachine(t), strings.Fields(test.args)...)
		if batched, blocks := cfg.EngineLimits(); batched != test.batched || blocks != test.blocks {
			t.Errorf("%s: %d tokens, %d blocks; want %d, %d", test.args, batched, blocks, test.batched, test.blocks)
		}
	}
}

func TestMockSettingsAreChecked(t *testing.T) {
	machine := testMachine(t)
	for _, args := range [][]string{
		{"--mock=error-rate=2"}, {"--mock=drop-events=-1"}, {"--mock=hang-worker=2=1s"}, {"--mock=slow-worker=0=0"},
		{"--mock=api=sglang", "--mock=disagg-kind=nixl"}, {"--mock=api=sglang", "--mock=array-events=true"}, {"--mock=api=trt"},
		{"--mock=prefill-ms=1,2"}, {"--mock=num-gpu-blocks=0"}, {"--speedup-ratio=-1"}, {"--mock=crash-every=-1s"},
	} {
		if _, err := parse(append([]string{"--engine=mocker"}, args...), machine); err == nil {
			t.Errorf("%v was taken", args)
		}
	}
	config := mustParse(t, machine, "--engine=mocker", "--mock=slow-worker=0=2,1=3.5", "--mock=hang-worker=1=10s", "--block-size=16")
	if config.Mock.SlowWorker[1] != 3.5 || config.Mock.HangWorker[1] != 10*time.Second || config.ServedModelName != "mock" || config.Model != "" {
		t.Errorf("%+v", config)
	}
}

// TestPortsThatOthersReachNeedAKey reads the flags as the program does.
func TestPortsThatOthersReachNeedAKey(t *testing.T) {
	for _, test := range []struct {
		args, want string // of the error; empty: none
	}{
		{"", ""},
		{"--host ::1", ""},
		{"--host 0.0.0.0", "--host 0.0.0.0"},
		{"--host 0.0.0.0 --insecure", ""},
		{"--host 0.0.0.0 --api-key k", ""},
		{"--host 0.0.0.0 --api-keys-file k.yaml", ""},
		{"--host 0.0.0.0 --router-api-key k", "--host 0.0.0.0"},
		{"--host 0.0.0.0 --tls-cert c --tls-key k", "--host 0.0.0.0"},
		{"--host 0.0.0.0 --tls-cert c --tls-key k --tls-client-ca a", ""},
		{"--router-host 10.0.0.1", "--router-host 10.0.0.1"},
		{"--router-host 10.0.0.1 --api-key k", "--router-host 10.0.0.1"},
		{"--router-host 10.0.0.1 --router-api-key k", ""},
		{"--host 0.0.0.0 --api-key k --replica-sync", "--replica-sync-host 0.0.0.0"},
		{"--host 0.0.0.0 --api-key k --replica-sync --replica-sync-host 127.0.0.1", ""},
		{"--host 0.0.0.0 --api-key k --replica-sync --insecure", ""},
		{"--host 0.0.0.0 --api-key k --cluster one", "--cluster-host 0.0.0.0"},
		{"--host 0.0.0.0 --api-key k --cluster one --cluster-host 127.0.0.1", ""},
		{"--host 0.0.0.0 --api-key k --cluster one --cluster-key 0123456789abcdef", ""},
		{"--host 0.0.0.0 --api-key k --cluster nats://nats:4222", ""},
		{"--cluster one --cluster-key short", "--cluster-key"},
		{"--cluster one --replica-sync", "--cluster and --replica-sync"},
		{"--cluster one --cluster-discovery routers:6222", "--cluster-discovery routers:6222"},
		{"--relay-cell 3=a:1", "--relay-cell 3=a:1: no --worker has id=3"},
		{"--worker http://a --relay-cell 0=a:1", ""},
		{"--worker http://a --relay-cell 0=a:1,0=b:1", "--relay-cell: worker 0 is given twice"},
		{"--worker url=http://a,kind=router --relay-cell 0=a:1", "--relay-cell 0=a:1: worker 0 has kind=router"},
		{"--worker url=http://a,kind=router --worker http://b --relay-cell 1=b:1", ""},
		{"--tls-cert c", "--tls-cert"},
		{"--drain-delay=-1s", "--drain-delay"},
	} {
		_, err := parse(append([]string{"--engine=none"}, strings.Fields(test.args)...), testMachine(t))
		if (err == nil) != (test.want == "") || err != nil && !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: %v", test.args, fmt.Sprint(err))
		}
	}
}
