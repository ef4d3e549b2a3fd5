package main

import (
	"fmt"
	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/vllm"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
			env: []string{"HOME=/h", common[0], common[1], "PYTHONPATH=/plugin", "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1",
				"OMP_NUM_THREADS=4", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
		},
		{
			name: "CPU, model by name", args: "--model org/name --num-workers 16",
			argv: []string{"--enforce-eager", "--max-model-len", "8192"},
			env: []string{common[0], common[1], "PYTHONPATH=/plugin", "VLLM_NO_USAGE_STATS=1",
				"OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
		},
		{
			name: "CPU, the user's choice wins", args: "--model org/name -- --max_model_len=512 --no-enforce-eager --seed 3",
			environ: []string{"OMP_NUM_THREADS=7", "VLLM_CPU_KVCACHE_SPACE=9", "VLLM_CPU_OMP_THREADS_BIND=0-3", "VLLM_NO_USAGE_STATS=0", "PYTHONPATH=/mine", "VLLM_PLUGINS=a,b"},
			argv:    []string{"--max_model_len=512", "--no-enforce-eager", "--seed", "3"},
			env: []string{"OMP_NUM_THREADS=7", "VLLM_CPU_KVCACHE_SPACE=9", "VLLM_CPU_OMP_THREADS_BIND=0-3", "VLLM_NO_USAGE_STATS=0", "PYTHONPATH=/plugin:/mine",
				"VLLM_PLUGINS=a,b,kvrouter_load,kvrouter_loopback,kvrouter_nixl", common[0], common[1]},
		},
		{
			name: "one GPU each", gpus: []string{"0", "1"}, args: "--model org/name -- --max-model-len 4096", environ: []string{"CUDA_VISIBLE_DEVICES=0,1"},
			argv: []string{"--max-model-len", "4096"},
			env:  []string{"CUDA_VISIBLE_DEVICES=1", common[0], common[1], "PYTHONPATH=/plugin", "VLLM_NO_USAGE_STATS=1"},
		},
		{
			name: "two GPUs each, out of those that are visible", gpus: []string{"4", "GPU-5", "6", "7"}, args: "--model org/name --gpus-per-worker 2",
			argv: []string{"--tensor-parallel-size", "2"},
			env:  []string{common[0], common[1], "PYTHONPATH=/plugin", "VLLM_NO_USAGE_STATS=1", "CUDA_VISIBLE_DEVICES=6,7"},
		},
		{
			name: "two GPUs each, used otherwise", gpus: []string{"0", "1", "2", "3"}, args: "--model org/name --gpus-per-worker 2 -- -tp 1 --pipeline-parallel-size 2",
			argv: []string{"-tp", "1", "--pipeline-parallel-size", "2"},
			env:  []string{common[0], common[1], "PYTHONPATH=/plugin", "VLLM_NO_USAGE_STATS=1", "CUDA_VISIBLE_DEVICES=2,3"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := mustParse(t, testMachine(t, test.gpus...), append([]string{"--python", "py"}, strings.Fields(test.args)...)...)
			spec, err := vllm.Command(cfg.vllmSettings(), 1, "/plugin", test.environ)
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
		spec, err := vllm.Command(cfg.vllmSettings(), 0, "/plugin", nil)
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
			spec, err := vllm.Command(cfg.vllmSettings(), 1, "/plugin", nil)
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
				{Worker: kv.WorkerKey{Worker: 1, Rank: 0}, Endpoint: "tcp://127.0.0.1:5559", Replay: "tcp://127.0.0.1:5759", Topic: vllm.KVEventsTopic, BlockSize: 64},
				{Worker: kv.WorkerKey{Worker: 1, Rank: 1}, Endpoint: "tcp://127.0.0.1:5560", Replay: "tcp://127.0.0.1:5760", Topic: vllm.KVEventsTopic, BlockSize: 64},
			}
			if diff := cmp.Diff(want, cfg.workerPorts().Sources(1, cfg.BlockSize)); diff != "" {
				t.Error(diff)
			}
			var ports []int
			for _, use := range cfg.ports() {
				ports = append(ports, use.port)
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
	spec, err := vllm.Command(cfg.vllmSettings(), 0, "/plugin", nil)
	if err != nil || !slices.Contains(spec.Env, "CUDA_VISIBLE_DEVICES=2") || !slices.Contains(spec.Argv, "8100") {
		t.Errorf("%q %q %v", spec.Argv, spec.Env, err)
	}
}
