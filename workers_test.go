package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	"kvrouter/internal/events"
	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/process"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/vllm"
	"kvrouter/internal/web"
	"kvrouter/internal/workers"
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
			name: "CPU, the router is traced", args: "--model org/name --num-workers 16",
			environ: []string{"OTEL_SERVICE_NAME=router", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://c:4318/v1/traces", "OTEL_TRACES_SAMPLER=always_on"},
			argv:    []string{"--enforce-eager", "--max-model-len", "8192"},
			env: []string{common[0], common[1], "PYTHONPATH=/plugin", "VLLM_NO_USAGE_STATS=1", "OTEL_TRACES_SAMPLER=always_on",
				"OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
		},
		{
			name: "CPU, the worker is traced, too", args: "--model org/name --num-workers 16 -- --otlp-traces-endpoint http://c:4317",
			environ: []string{"OTEL_SERVICE_NAME=router"},
			argv:    []string{"--enforce-eager", "--max-model-len", "8192", "--otlp-traces-endpoint", "http://c:4317"},
			env: []string{common[0], common[1], "PYTHONPATH=/plugin", "VLLM_NO_USAGE_STATS=1", "OTEL_SERVICE_NAME=vllm",
				"OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1"},
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
	if _, err := process.NewLauncher(vllm.Engine(), apart.engineSettings(), log); err == nil || !strings.Contains(err.Error(), "no NIXL") || !strings.Contains(err.Error(), "make setup") {
		t.Errorf("without NIXL: %v", err)
	}
	if _, err := process.NewLauncher(vllm.Engine(), whole.engineSettings(), log); err != nil {
		t.Errorf("NIXL is asked for where nobody needs it: %v", err)
	}
	t.Setenv("NIXL_EXIT", "1")
	if _, err := process.NewLauncher(vllm.Engine(), apart.engineSettings(), log); err == nil || !strings.Contains(err.Error(), "cannot be asked") {
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

// TestAttachedSGLangServersArePaired: nothing but their addresses is given.
func TestAttachedSGLangServersArePaired(t *testing.T) {
	protocol := newFakeProtocol(t, kv.KindSGLang)
	attached := ""
	for i, role := range []string{"prefill", "decode"} {
		serve := protocol.prefill
		if role == "decode" {
			serve = protocol.decode
		}
		engine := newFakeEngine(t, uint64(i), serve)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/health":
			case "/v1/models":
				fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			case "/server_info":
				fmt.Fprintf(w, `{"disaggregation_mode":%q,"disaggregation_bootstrap_port":9000}`, role)
			case "/metrics", "/kv_event_sources":
				w.WriteHeader(http.StatusNotFound)
			default:
				engine.ServeHTTP(w, r)
			}
		}))
		t.Cleanup(server.Close)
		attached += fmt.Sprintf(";url=%s,id=%d", server.URL, i)
	}
	s := startApp(t, testkit.FreePorts(t, 2), "--engine=none", "--served-model-name=m", "--worker="+attached[1:], "--drain-timeout=5s", "--token-timeout=100ms")
	testkit.Eventually(t, 20*time.Second, "both workers up", func() bool { return len(s.app.router.Targets()) == 2 })
	response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", strings.NewReader(sharedChat(false)))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, _ := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK || response.Header.Get(proxy.HeaderPrefillWorker) != "0" || response.Header.Get(web.HeaderWorker) != "1" {
		t.Errorf("%s %v: %s", response.Status, response.Header, answer)
	}
	list := ask(t, s.selection, "GET", "/workers", nil)
	if w := list.Get("0"); w.Get("role").Str != "prefill" || w.Get("kind").Str != "sglang" || w.Get("bootstrap_host").Str != "127.0.0.1" || w.Get("bootstrap_port").Int() != 9000 {
		t.Errorf("shown as %s", w)
	}
}

func TestRegisteredWorkersHaveAPart(t *testing.T) {
	s, worker, spec := registeredSite(t)
	part := func() kv.Disagg { return s.app.router.Targets()[0].Disagg }
	s.want("GET", "/workers", nil, 200, "0.role -", "0.bootstrap_host -")
	s.want("PATCH", "/workers/1", object{"role": "prefill", "kind": "sglang", "bootstrap_host": "h", "bootstrap_port": 9000}, 200,
		`role "prefill"`, `kind "sglang"`, `bootstrap_host "h"`, "bootstrap_port 9000", "generation 1", `lifecycle "schedulable"`)
	if want := (kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "h", Port: 9000}}); part() != want {
		t.Errorf("%+v, want %+v", part(), want)
	}
	for _, bad := range []object{{"role": "prefil"}, {"kind": "nccl"}, {"bootstrap_port": 70000}, {"role": 1}} {
		if got := ask(t, s.selection, "PATCH", "/workers/1", bad); got.status/100 != 4 {
			t.Errorf("%v: %d %s", bad, got.status, got.Raw)
		}
	}
	spec["role"] = "decode" // its kind is learned once it answers
	s.want("POST", "/workers", spec, 201, `role "decode"`, "kind -")
	if want := (kv.Disagg{Role: kv.RoleDecode}); part() != want {
		t.Errorf("%+v, want %+v", part(), want)
	}
	worker.well.Store(true)
	testkit.Eventually(t, 10*time.Second, "the kind is learned", func() bool { return part() == testkit.NixlDecode })
}

// attachTo starts a second router over a site's workers and waits until it
// follows all their ranks.
func attachTo(t *testing.T, s *mockSite, args ...string) *mockSite {
	t.Helper()
	second := startBeside(t, s, "", args...)
	testkit.Eventually(t, 20*time.Second, "all ranks followed", func() bool {
		followed := 0
		for _, stats := range second.app.fleet.Streams() {
			if stats.Connected.Load() && !stats.Cold.Load() {
				followed++
			}
		}
		want := s.app.config.NumWorkers * s.app.config.Ranks()
		return followed == want && len(second.app.router.Targets()) == want
	})
	return second
}

// startBeside starts a second router over a site's workers; worker is more to
// say of each of them.
func startBeside(t *testing.T, s *mockSite, worker string, args ...string) *mockSite {
	t.Helper()
	port := testkit.FreePorts(t, 2)
	all := []string{"--engine=none", "--seed=1", fmt.Sprintf("--http-port=%d", port), fmt.Sprintf("--router-port=%d", port+1)}
	for i := range s.app.config.NumWorkers {
		all = append(all, fmt.Sprintf("--worker=url=%s,id=%d%s", s.workerURL(i), i, worker))
	}
	second := &mockSite{t: t, site: &site{
		openAI: fmt.Sprintf("http://127.0.0.1:%d", port), selection: fmt.Sprintf("http://127.0.0.1:%d", port+1), log: &testkit.LogBuffer{},
	}}
	second.app, second.end = runApp(t, second.log, append(all, args...)...)
	t.Cleanup(func() {
		if err := second.end(); err != nil {
			t.Error(err)
		}
	})
	return second
}

// pinned sends a chat to one rank and returns its answer.
func (s *mockSite) pinned(t *testing.T, key kv.WorkerKey, body map[string]any) (answer gjson.Result, predicted int64) {
	t.Helper()
	body["nvext"] = map[string]any{"backend_instance_id": key.Worker, "dp_rank": key.Rank}
	return s.ask(t, mocker.MustJSON(body))
}

func TestAttachedRanksAreWorkersOfTheirOwn(t *testing.T) {
	farm := startMockSite(t, 2, "--mock-data-parallel-size=2", "--mock-lora=sql")
	s := attachTo(t, farm, "--policy=kv")
	computed := func(key kv.WorkerKey) int64 { return farm.rank(key).Counts.PromptTokens.Load() }
	text := strings.Repeat("keep the ranks apart ", 20)
	settle := func(want kv.WorkerKey, blocks int) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d blocks on %v", blocks, want), func() bool { return s.app.index.Blocks(want) == blocks })
	}

	// The chosen rank reaches the worker, and its events are its own.
	key := kv.WorkerKey{Worker: 1, Rank: 1}
	first, predicted := s.pinned(t, key, map[string]any{"messages": say(text), "max_tokens": 1})
	if predicted != 0 || first.Get("usage.prompt_tokens_details.cached_tokens").Int() != 0 {
		t.Errorf("cached before anything was: %s", first.Raw)
	}
	prompt := int(first.Get("usage.prompt_tokens").Int())
	settle(key, prompt/64)
	for _, target := range s.app.router.Targets() {
		if own := target.Key == key; own != (computed(target.Key) > 0) || own != (s.app.index.Blocks(target.Key) > 0) {
			t.Errorf("%v computed %d tokens and holds %d blocks", target.Key, computed(target.Key), s.app.index.Blocks(target.Key))
		}
	}

	// A conversation that grows stays where its prefix is.
	messages := say(text)
	for turn := range 4 {
		messages = append(messages, map[string]string{"role": "assistant", "content": "And then?"}, map[string]string{"role": "user", "content": strings.Repeat(fmt.Sprint("turn ", turn, " "), 20)})
		answer, predicted := s.ask(t, mocker.MustJSON(map[string]any{"messages": messages, "max_tokens": 1}))
		cached, prompt := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(), int(answer.Get("usage.prompt_tokens").Int())
		if predicted != cached || cached == 0 {
			t.Errorf("turn %d: %d cached, %d predicted", turn, cached, predicted)
		}
		settle(key, prompt/64)
	}
	if n := computed(kv.WorkerKey{Worker: 1, Rank: 0}) + computed(kv.WorkerKey{Worker: 0, Rank: 0}) + computed(kv.WorkerKey{Worker: 0, Rank: 1}); n != 0 {
		t.Errorf("%d tokens were computed elsewhere", n)
	}

	// Neither an adapter nor a salt finds the base model's blocks, on the same rank.
	held := s.app.index.Blocks(key)
	for _, other := range []map[string]any{{"model": "sql"}, {"cache_salt": "a"}, {"model": "sql", "cache_salt": "a"}} {
		for again := range 2 {
			other["messages"], other["max_tokens"] = say(text), 1
			answer, predicted := s.pinned(t, key, other)
			if cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(); predicted != cached || (cached > 0) != (again > 0) {
				t.Errorf("%v: %d cached, %d predicted", other, cached, predicted)
			}
			if again == 0 {
				held += int(answer.Get("usage.prompt_tokens").Int()) / 64
			}
			settle(key, held)
		}
	}
	_, list := testkit.HTTPGet(t, s.openAI+"/v1/models")
	if got := gjson.GetBytes(list, "data.#.id").Raw; got != `["mock","sql"]` {
		t.Errorf("models %s", got)
	}

	// Every rank's load is its own: here from /metrics, which has them all.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body, err := json.Marshal(map[string]any{"messages": say("Go on for long."), "max_tokens": 15000, "ignore_eos": true, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+testkit.ChatPath, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(hints.HeaderPinnedWorker, "0")
	request.Header.Set(hints.HeaderPinnedRank, "1")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	testkit.Eventually(t, 20*time.Second, "a running request on the one rank", func() bool { return s.app.router.Load(kv.WorkerKey{Worker: 0, Rank: 1}).Running == 1 })
	if load := s.app.router.Load(kv.WorkerKey{Worker: 0, Rank: 0}); load.Running != 0 || load.InFlight != 0 || load.At.IsZero() {
		t.Errorf("the other rank shows %+v", load)
	}
	_, page := testkit.HTTPGet(t, s.openAI+"/metrics")
	for _, want := range []string{
		`kvrouter_worker_running_requests{dp_rank="1",worker_id="0"} 1`, `kvrouter_worker_in_flight{dp_rank="0",worker_id="0"} 0`,
		`dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="0",worker_type="decode"} 0`,
		`dynamo_component_kv_cache_events_applied{dp_rank="1",event_type="stored",status="ok",worker_id="1"}`,
	} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s", want)
		}
	}
	cancel()
	testkit.Eventually(t, 20*time.Second, "nothing in flight", func() bool { return s.app.router.Load(kv.WorkerKey{Worker: 0, Rank: 1}).InFlight == 0 })
}
