package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/fleet/vllm"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/testkit"
)

const kvEventsConfig5558 = `{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://127.0.0.1:5758","topic":"kv-events","buffer_steps":10000}`

func TestCommandOfEachWorker(t *testing.T) {
	model := filepath.Join(t.TempDir(), "tiny")
	testkit.WriteFile(t, filepath.Join(model, "config.json"), `{"text_config":{"max_position_embeddings": 2048}}`)
	head := func(model, name string) []string {
		return []string{"py", "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", name,
			"--host", "127.0.0.1", "--port", "8101", "--block-size", "64", "--kv-events-config", kvEventsConfig5558,
			"--enable-prompt-tokens-details", "--enable-scale-out"}
	}
	common := []string{"KVROUTER_LOAD_ENDPOINT=tcp://127.0.0.1:5658", "KVROUTER_LOOPBACK_EVENTS=1"}

	for _, test := range []struct {
		name    string
		gpus    []string
		args    string
		environ []string
		argv    []string // after the head
		env     []string
	}{
		{
			name: "CPU, model in a folder", args: "--model " + model, environ: []string{"HOME=/h", "KVROUTER_API_KEY=secret"},
			argv: []string{"--enforce-eager", "--max-model-len", "2048"},
			env: []string{"HOME=/h", common[0], common[1], "PYTHONPATH=/plugin", "PYTHONSAFEPATH=1", "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1",
				"OMP_NUM_THREADS=4", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
		},
		{
			name: "CPU, model by name", args: "--model org/name --num-workers 16",
			argv: []string{"--enforce-eager", "--max-model-len", "8192"},
			env: []string{common[0], common[1], "PYTHONPATH=/plugin", "PYTHONSAFEPATH=1", "VLLM_NO_USAGE_STATS=1",
				"OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
		},
		{
			name: "CPU, the user's choice wins", args: "--model org/name -- --max_model_len=512 --no-enforce-eager --seed 3",
			environ: []string{"OMP_NUM_THREADS=7", "VLLM_CPU_KVCACHE_SPACE=9", "VLLM_CPU_OMP_THREADS_BIND=0-3", "VLLM_NO_USAGE_STATS=0", "PYTHONPATH=/mine", "VLLM_PLUGINS=a,b"},
			argv:    []string{"--max_model_len=512", "--no-enforce-eager", "--seed", "3"},
			env: []string{"OMP_NUM_THREADS=7", "VLLM_CPU_KVCACHE_SPACE=9", "VLLM_CPU_OMP_THREADS_BIND=0-3", "VLLM_NO_USAGE_STATS=0", "PYTHONPATH=/plugin:/mine", "PYTHONSAFEPATH=1",
				"VLLM_PLUGINS=a,b,kvrouter_load,kvrouter_loopback,kvrouter_nixl,kvrouter_tiers", common[0], common[1]},
		},
		{
			name: "CPU, the router is traced", args: "--model org/name --num-workers 16",
			environ: []string{"OTEL_SERVICE_NAME=router", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://c:4318/v1/traces", "OTEL_TRACES_SAMPLER=always_on"},
			argv:    []string{"--enforce-eager", "--max-model-len", "8192"},
			env: []string{common[0], common[1], "PYTHONPATH=/plugin", "PYTHONSAFEPATH=1", "VLLM_NO_USAGE_STATS=1", "OTEL_TRACES_SAMPLER=always_on",
				"OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
		},
		{
			name: "CPU, the worker is traced, too", args: "--model org/name --num-workers 16 -- --otlp-traces-endpoint http://c:4317",
			environ: []string{"OTEL_SERVICE_NAME=router"},
			argv:    []string{"--enforce-eager", "--max-model-len", "8192", "--otlp-traces-endpoint", "http://c:4317"},
			env: []string{common[0], common[1], "PYTHONPATH=/plugin", "PYTHONSAFEPATH=1", "VLLM_NO_USAGE_STATS=1", "OTEL_SERVICE_NAME=vllm",
				"OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
		},
		{
			name: "one GPU each", gpus: []string{"0", "1"}, args: "--model org/name -- --max-model-len 4096", environ: []string{"CUDA_VISIBLE_DEVICES=0,1"},
			argv: []string{"--max-model-len", "4096"},
			env:  []string{"CUDA_VISIBLE_DEVICES=1", common[0], common[1], "PYTHONPATH=/plugin", "PYTHONSAFEPATH=1", "VLLM_NO_USAGE_STATS=1"},
		},
		{
			name: "two GPUs each, out of those that are visible", gpus: []string{"4", "GPU-5", "6", "7"}, args: "--model org/name --gpus-per-worker 2",
			argv: []string{"--tensor-parallel-size", "2"},
			env:  []string{common[0], common[1], "PYTHONPATH=/plugin", "PYTHONSAFEPATH=1", "VLLM_NO_USAGE_STATS=1", "CUDA_VISIBLE_DEVICES=6,7"},
		},
		{
			name: "two GPUs each, used otherwise", gpus: []string{"0", "1", "2", "3"}, args: "--model org/name --gpus-per-worker 2 -- -tp 1 --pipeline-parallel-size 2",
			argv: []string{"-tp", "1", "--pipeline-parallel-size", "2"},
			env:  []string{common[0], common[1], "PYTHONPATH=/plugin", "PYTHONSAFEPATH=1", "VLLM_NO_USAGE_STATS=1", "CUDA_VISIBLE_DEVICES=2,3"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := mustParse(t, testMachine(t, test.gpus...), append([]string{"--python", "py"}, strings.Fields(test.args)...)...)
			spec, err := vllm.Engine().Command(cfg.engineSettings(), 1, "/plugin", test.environ)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(append(head(cfg.Model, cfg.ServedModelName), test.argv...), spec.Argv); diff != "" {
				t.Errorf("argv (-want +got):\n%s", diff)
			}
			slices.Sort(test.env)
			slices.Sort(spec.Env)
			if diff := cmp.Diff(test.env, spec.Env); diff != "" {
				t.Errorf("environment (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWorkersPublishNoEventsThatNobodyFollows(t *testing.T) {
	for _, args := range []string{"--no-kv-events", "--policy kv --overlap-score-weight 0"} {
		cfg := mustParse(t, testMachine(t), append([]string{"--python", "py", "--model", "org/name"}, strings.Fields(args)...)...)
		spec, err := vllm.Engine().Command(cfg.engineSettings(), 0, "/plugin", nil)
		if err != nil || slices.Contains(spec.Argv, "--kv-events-config") {
			t.Errorf("%s: %q %v", args, spec.Argv, err)
		}
		if ports := fmt.Sprint(cfg.ports()); strings.Contains(ports, "--base-kv") {
			t.Errorf("%s: listens on %s", args, ports)
		}
	}
}

func TestRanksOfAWorkerTakePortsInARow(t *testing.T) {
	for _, test := range []struct {
		name string
		gpus []string
		args string
		env  []string
		not  string
	}{
		{"on the CPU", nil, "-- --data-parallel-size 2", []string{"OMP_NUM_THREADS=2"}, "--tensor-parallel-size"},
		{"one GPU a rank", []string{"0", "1", "2", "3"}, "-- --data-parallel-size 1 -dp=2", []string{"CUDA_VISIBLE_DEVICES=2,3"}, "--tensor-parallel-size"},
		{"two GPUs a rank", []string{"0", "1", "2", "3", "4", "5", "6", "7"}, "--gpus-per-worker 2 -- --data_parallel_size=2 -tp 2", []string{"CUDA_VISIBLE_DEVICES=4,5,6,7"}, "--tensor-parallel-size"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := mustParse(t, testMachine(t, test.gpus...), append([]string{"--python", "py", "--model", "org/name"}, strings.Fields(test.args)...)...)
			spec, err := vllm.Engine().Command(cfg.engineSettings(), 1, "/plugin", nil)
			if err != nil {
				t.Fatal(err)
			}
			found := strings.NewReplacer("5558", "5559", "5758", "5759").Replace(kvEventsConfig5558)
			if !slices.Contains(spec.Argv, found) || !slices.Contains(spec.Argv, "8101") || slices.Contains(spec.Argv, test.not) {
				t.Errorf("%q", spec.Argv)
			}
			for _, want := range append(test.env, "KVROUTER_LOAD_ENDPOINT=tcp://127.0.0.1:5659") {
				if !slices.Contains(spec.Env, want) {
					t.Errorf("no %s in %q", want, spec.Env)
				}
			}
			// What is followed and checked to be free is what vLLM and the plugin make
			// of that: each rank one port further.
			want := []events.Source{
				{Worker: kv.WorkerKey{Worker: 1, Rank: 0}, Endpoint: "tcp://127.0.0.1:5559", Replay: "tcp://127.0.0.1:5759", Topic: process.KVEventsTopic, BlockSize: 64},
				{Worker: kv.WorkerKey{Worker: 1, Rank: 1}, Endpoint: "tcp://127.0.0.1:5560", Replay: "tcp://127.0.0.1:5760", Topic: process.KVEventsTopic, BlockSize: 64},
			}
			if diff := cmp.Diff(want, cfg.workerPorts().Sources(1, cfg.BlockSize)); diff != "" {
				t.Error(diff)
			}
			var ports []int
			for _, use := range cfg.ports() {
				ports = append(ports, use.Port)
			}
			slices.Sort(ports)
			if want := []int{5557, 5558, 5559, 5560, 5657, 5658, 5659, 5660, 5757, 5758, 5759, 5760, 7000, 8000, 8100, 8101}; !slices.Equal(ports, want) {
				t.Errorf("listens on %v, want %v", ports, want)
			}
		})
	}
}

func TestTheFirstWorkerGetsTheFirstGPU(t *testing.T) {
	cfg := mustParse(t, testMachine(t, "2", "3"), "--python", "py", "--model", "org/name")
	spec, err := vllm.Engine().Command(cfg.engineSettings(), 0, "/plugin", nil)
	if err != nil || !slices.Contains(spec.Env, "CUDA_VISIBLE_DEVICES=2") || !slices.Contains(spec.Argv, "8100") {
		t.Errorf("%q %q %v", spec.Argv, spec.Env, err)
	}
}

func TestPrefillAndDecodeWorkersAreStartedForTheirParts(t *testing.T) {
	const producer, consumer = `{"kv_connector":"NixlConnector","kv_role":"kv_producer"`, `{"kv_connector":"NixlConnector","kv_role":"kv_consumer"`
	for _, test := range []struct {
		name   string
		gpus   []string
		args   string
		env    []string
		device string
		ports  []string // of each worker's side channel
		want   []string // in every worker's environment
		not    []string
	}{
		{
			name: "on the CPU", device: `,"kv_buffer_device":"cpu"`, ports: []string{"5600", "5601", "5602"},
			want: []string{"UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "KVROUTER_NIXL_POLL_US=1000"},
		},
		{
			name: "the user's transport wins", device: `,"kv_buffer_device":"cpu"`, ports: []string{"5600", "5601", "5602"},
			env:  []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=eth0", "VLLM_NIXL_SIDE_CHANNEL_PORT=1", "VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0"},
			want: []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=eth0"}, not: []string{"VLLM_NIXL_SIDE_CHANNEL_PORT=1", "VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0"},
		},
		{
			name: "one GPU each", gpus: []string{"0", "1", "2"}, args: "--base-nixl-port 6000", ports: []string{"6000", "6001", "6002"},
			not: []string{"UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "KVROUTER_NIXL_POLL_US=1000"},
		},
		{
			name: "a rank adds its number to the port itself", device: `,"kv_buffer_device":"cpu"`, args: "-- --data-parallel-size 2", ports: []string{"5600", "5602", "5604"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			args := append([]string{"--python", "py", "--model", "org/name", "--prefill-workers", "1", "--decode-workers", "2"}, strings.Fields(test.args)...)
			cfg := mustParse(t, testMachine(t, test.gpus...), args...)
			for i, port := range test.ports {
				spec, err := vllm.Engine().Command(cfg.engineSettings(), i, "/plugin", test.env)
				if err != nil {
					t.Fatal(err)
				}
				role := consumer
				if i == 0 {
					role = producer
				}
				if want := role + test.device + `,"kv_load_failure_policy":"recompute"}`; !slices.Contains(spec.Argv, want) {
					t.Errorf("worker %d: no %s in %q", i, want, spec.Argv)
				}
				for _, want := range append(test.want, "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT="+port) {
					if !slices.Contains(spec.Env, want) {
						t.Errorf("worker %d: no %s in %q", i, want, spec.Env)
					}
				}
				for _, not := range test.not {
					if slices.Contains(spec.Env, not) {
						t.Errorf("worker %d: %s in %q", i, not, spec.Env)
					}
				}
			}
			var ports []int
			for _, use := range cfg.ports() {
				if use.Flag == "--base-nixl-port" {
					ports = append(ports, use.Port-cfg.BaseNIXLPort)
				}
			}
			if want := []int{0, 1, 2, 3, 4, 5}[:3*cfg.Ranks()]; !slices.Equal(ports, want) {
				t.Errorf("side channels at base + %v, want %v", ports, want)
			}
		})
	}
}

func TestWorkersWithoutPartsHaveNoSideChannel(t *testing.T) {
	cfg := mustParse(t, testMachine(t), "--python", "py", "--model", "org/name", "--", "--kv-transfer-config", "{}")
	spec, err := vllm.Engine().Command(cfg.engineSettings(), 0, "/plugin", nil)
	if err != nil || !slices.Contains(spec.Argv, "{}") || strings.Contains(strings.Join(spec.Env, " "), "NIXL") {
		t.Errorf("%q %q %v", spec.Argv, spec.Env, err)
	}
	for _, use := range cfg.ports() {
		if use.Flag == "--base-nixl-port" {
			t.Errorf("listens on %s", use)
		}
	}
}

func TestStartedWorkersHaveTheirParts(t *testing.T) {
	python := filepath.Join(t.TempDir(), "python")
	testkit.WriteFile(t, python, "#!/bin/sh\nexit $NIXL_EXIT\n")
	if err := os.Chmod(python, 0o700); err != nil {
		t.Fatal(err)
	}
	config := func(args ...string) Config {
		return mustParse(t, testMachine(t), append([]string{"--python", python, "--model", "org/name"}, args...)...)
	}
	apart := config("--prefill-workers", "2", "--decode-workers", "1")
	whole := config()
	log := slog.New(slog.DiscardHandler)

	t.Setenv("NIXL_EXIT", "3")
	if _, err := process.NewLauncher(vllm.Engine(), apart.engineSettings(), log); err == nil || !strings.Contains(err.Error(), "lacks NIXL") || !strings.Contains(err.Error(), "make setup") {
		t.Errorf("without NIXL: %v", err)
	}
	if _, err := process.NewLauncher(vllm.Engine(), whole.engineSettings(), log); err != nil {
		t.Errorf("NIXL is asked for where nobody needs it: %v", err)
	}
	t.Setenv("NIXL_EXIT", "1")
	if _, err := process.NewLauncher(vllm.Engine(), apart.engineSettings(), log); err == nil || !strings.Contains(err.Error(), "cannot be checked") {
		t.Errorf("with a Python that does not work: %v", err)
	}

	t.Setenv("NIXL_EXIT", "0")
	for _, test := range []struct {
		name string
		cfg  Config
		want []kv.Disagg
	}{
		{"apart", apart, []kv.Disagg{{Role: kv.RolePrefill, Kind: kv.KindNIXL}, {Role: kv.RolePrefill, Kind: kv.KindNIXL}, {Role: kv.RoleDecode, Kind: kv.KindNIXL}}},
		{"whole", whole, []kv.Disagg{{}, {}}},
		{"that pull", config("--kv-offload-gib", "1", "--kv-p2p", "--base-p2p-port", "6000"), []kv.Disagg{
			{P2P: kv.Bootstrap{Host: "127.0.0.1", Port: 6000}}, {P2P: kv.Bootstrap{Host: "127.0.0.1", Port: 6001}},
		}},
		{"apart, of SGLang", config("--engine", "sglang", "--prefill-workers", "2", "--decode-workers", "1", "--base-bootstrap-port", "9000"), []kv.Disagg{
			{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "127.0.0.1", Port: 9000}},
			{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "127.0.0.1", Port: 9001}},
			{Role: kv.RoleDecode, Kind: kv.KindSGLang},
		}},
	} {
		fleet := workers.New(test.cfg.fleetSettings(), workers.Deps{Log: log})
		var parts []kv.Disagg
		for _, w := range fleet.Workers() {
			parts = append(parts, w.Disagg)
		}
		if diff := cmp.Diff(test.want, parts); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}

func TestWorkersOffloadBlocks(t *testing.T) {
	const offloading = `{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":1610612736,"self_describing_kv_events":true}}`
	const pulling = `{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":1610612736,"self_describing_kv_events":true,"secondary_tiers":[{"type":"p2p","host":"127.0.0.1","port":`
	for _, test := range []struct {
		name string
		gpus []string
		args string
		want []string // --kv-transfer-config by worker; empty: none
		shim bool     // blocks are copied by the plugin
	}{
		{"on the CPU", nil, "--kv-offload-gib 1.5", []string{offloading, offloading}, true},
		{"on GPUs", []string{"0", "1"}, "--kv-offload-gib 1.5", []string{offloading, offloading}, false},
		{"beside NIXL", nil, "--kv-offload-gib 1.5 --prefill-workers 1 --decode-workers 1", []string{
			`{"kv_connector":"MultiConnector","kv_role":"kv_producer","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_buffer_device":"cpu","kv_load_failure_policy":"recompute"},` + offloading + `]}}`,
			`{"kv_connector":"MultiConnector","kv_role":"kv_consumer","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu","kv_load_failure_policy":"recompute"},` + offloading + `]}}`,
		}, true},
		{"that others pull", nil, "--kv-offload-gib 1.5 --kv-p2p -- --data-parallel-size 2", []string{pulling + `5710}]}}`, pulling + `5712}]}}`}, true},
		{"nothing", nil, "", []string{"", ""}, false},
		{"by the user's own connector", nil, "-- --kv-transfer-config {}", []string{"{}", "{}"}, true},
		{"by vLLM's own flag", nil, "-- --kv_offloading_size 2", []string{"", ""}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := mustParse(t, testMachine(t, test.gpus...), append([]string{"--python", "py", "--model", "org/name"}, strings.Fields(test.args)...)...)
			for i, want := range test.want {
				spec, err := vllm.Engine().Command(cfg.engineSettings(), i, "/plugin", nil)
				if err != nil {
					t.Fatal(err)
				}
				got := ""
				if at := slices.Index(spec.Argv, "--kv-transfer-config"); at >= 0 {
					got = spec.Argv[at+1]
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("worker %d: %s", i, diff)
				}
				if shim := slices.Contains(spec.Env, "KVROUTER_CPU_TIERS=1"); shim != test.shim {
					t.Errorf("worker %d: plugin %v, want %v", i, shim, test.shim)
				}
			}
		})
	}
}
