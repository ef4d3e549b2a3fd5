package sglang

import (
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/fleet/process"
	"kvrouter/internal/testkit"
)

// settings are those of n workers with the arguments after --, on the GPUs given.
func settings(n int, gpus []string, args ...string) process.Settings {
	return process.Settings{
		Python: "py", Model: "org/name", ServedModelName: "served", NumWorkers: n, BlockSize: 16,
		GPUsPerWorker: 1, GPUs: gpus, Cores: 8, KVEvents: true, Args: args,
		Ports: process.Ports{HTTP: 8100, KVEvents: 5557, KVReplay: 5757, Load: 5657, NIXL: 5600, Bootstrap: 8998, Ranks: ranks(args)},
	}
}

func TestCommandOfEachWorker(t *testing.T) {
	const events = `{"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://127.0.0.1:5758","topic":"kv-events","buffer_steps":10000}`
	head := []string{
		"py", "-m", "sglang.launch_server", "--model-path", "org/name", "--served-model-name", "served", "--host", "127.0.0.1", "--port", "8101",
		"--page-size", "16", "--kv-events-config", events, "--load-publish-endpoint", "tcp://*:5658", "--enable-metrics", "--enable-cache-report",
	}
	cpu := []string{
		"--device", "cpu", "--attention-backend", "torch_native", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
		"--max-total-tokens", "20000", "--mem-fraction-static", "0.9", "--dtype", "float32", "--max-running-requests", "8", "--load-snapshot-publish-interval", "1",
		"--disable-overlap-schedule", "--sleep-on-idle",
	}
	common := []string{"KVROUTER_LOOPBACK=1", "PYTHONSAFEPATH=1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false"}
	onCPU := append([]string{"SGLANG_USE_CPU_ENGINE=1", "CUDA_VISIBLE_DEVICES=", "KVROUTER_IDLE_POLL_MS=100"}, common...)

	for _, test := range []struct {
		name    string
		cfg     process.Settings
		folder  bool
		environ []string
		argv    []string // after the head
		env     []string
	}{
		{
			name: "CPU, model in a folder", cfg: settings(2, nil), folder: true, environ: []string{"HOME=/h", "KVROUTER_API_KEY=secret", "CUDA_VISIBLE_DEVICES=0"},
			argv: cpu, env: append([]string{"HOME=/h", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=4", "OMP_WAIT_POLICY=passive", "SGLANG_CPU_OMP_THREADS_BIND=4-7", "PYTHONPATH=/plugin:/plugin/cpu"}, onCPU...),
		},
		{
			name:    "CPU, the user's choice wins",
			cfg:     settings(16, nil, "--dtype=bfloat16", "--max_total_tokens", "99", "--attention-backend", "intel_amx", "--seed", "3"),
			environ: []string{"OMP_NUM_THREADS=7", "OMP_WAIT_POLICY=active", "SGLANG_CPU_OMP_THREADS_BIND=0-3", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=true", "PYTHONPATH=/mine", "PYTHONSAFEPATH=", "SGLANG_PLUGINS=a,b"},
			argv: []string{
				"--device", "cpu", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.9",
				"--max-running-requests", "8", "--load-snapshot-publish-interval", "1", "--disable-overlap-schedule", "--sleep-on-idle",
				"--dtype=bfloat16", "--max_total_tokens", "99", "--attention-backend", "intel_amx", "--seed", "3",
			},
			env: []string{
				"OMP_NUM_THREADS=7", "OMP_WAIT_POLICY=active", "SGLANG_CPU_OMP_THREADS_BIND=0-3", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=true", "PYTHONPATH=/plugin:/plugin/cpu:/mine",
				"SGLANG_PLUGINS=a,b,kvrouter_loopback,kvrouter_idle,kvrouter_nixl,kvrouter_tiers", "KVROUTER_LOOPBACK=1", "PYTHONSAFEPATH=", onCPU[0], onCPU[1], onCPU[2],
			},
		},
		{
			name: "one GPU each", cfg: settings(2, []string{"0", "1"}), environ: []string{"CUDA_VISIBLE_DEVICES=0,1"},
			env: append([]string{"CUDA_VISIBLE_DEVICES=1", "PYTHONPATH=/plugin"}, common...),
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.cfg.ModelFolder = test.folder
			spec, err := command(test.cfg, 1, "/plugin", test.environ)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(slices.Concat(head, test.argv), spec.Argv); diff != "" {
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

func TestAnOlderSGLangIsStartedWithoutNewFlags(t *testing.T) {
	cfg := settings(2, nil)
	cfg.PrefillWorkers = 1
	cfg.Untaken = slices.Collect(maps.Keys(Engine().Newer))
	for part := range 2 {
		spec, err := command(cfg, part, "/plugin", nil)
		if err != nil {
			t.Fatal(err)
		}
		argv := strings.Join(spec.Argv, " ")
		for _, not := range []string{"tcp://*", "graph", "disabled", "snapshot", "radix", "backup", "none"} {
			if strings.Contains(argv, not) {
				t.Errorf("%s in %s", not, argv)
			}
		}
	}
}

func TestAnSGLangWithoutPluginsPublishesNoEvents(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PYTHONPATH", dir)
	for _, test := range []struct {
		file string // that is added
		want []string
	}{
		{"none.py", nil}, // what cannot be examined is as new as any
		{"srt/server_args.py", []string{"kv-events-config"}},
		{"srt/plugins/__init__.py", nil},
	} {
		testkit.WriteFile(t, filepath.Join(dir, "sglang", test.file), "# here\n")
		cfg := process.Settings{Python: "python3"}
		if examine(&cfg); !slices.Equal(cfg.Untaken, test.want) {
			t.Errorf("with %s: without %q, want %q", test.file, cfg.Untaken, test.want)
		}
	}
}

func TestGPUsOfAWorker(t *testing.T) {
	gpus := []string{"4", "GPU-5", "6", "7", "8", "9", "10", "11"}
	for _, test := range []struct {
		name    string
		perRank int
		args    string
		devices string // of worker 1
		tensor  string // --tp-size that the router adds; empty: none
	}{
		{"one", 1, "", "GPU-5", ""},
		{"two", 2, "", "6,7", "2"},
		{"two, used otherwise", 2, "--tp 1 --pp-size 2", "6,7", ""},
		{"two for each of two ranks", 2, "--dp-size 2", "8,9,10,11", "2"},
		{"one for each of two ranks", 1, "--dp=2", "6,7", ""},
		{"one for each of two ranks that share a model", 1, "--dp 2 --enable-dp-attention", "6,7", "2"},
		{"the same, said otherwise", 1, "--attn-dp-size 2", "6,7", "2"},
		{"ranks that share a model, split as the user says", 2, "--attention-data-parallel-size=2 --tensor-parallel-size 4", "8,9,10,11", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := settings(2, gpus, strings.Fields(test.args)...)
			cfg.GPUsPerWorker = test.perRank
			spec, err := command(cfg, 1, "/plugin", nil)
			if err != nil || !slices.Contains(spec.Env, "CUDA_VISIBLE_DEVICES="+test.devices) || slices.Contains(spec.Argv, "--device") {
				t.Errorf("%q %q %v", spec.Argv, spec.Env, err)
			}
			own := spec.Argv[:len(spec.Argv)-len(cfg.Args)]
			at := slices.Index(own, "--tp-size")
			if (at >= 0) != (test.tensor != "") || at >= 0 && own[at+1] != test.tensor {
				t.Errorf("%q: want --tp-size %q", own, test.tensor)
			}
		})
	}
	if _, err := command(settings(2, gpus[:1]), 1, "/plugin", nil); err == nil || !strings.Contains(err.Error(), "GPUs 2 to 2") {
		t.Errorf("too few: %v", err)
	}
}

func TestRanksOnACPU(t *testing.T) {
	for _, test := range []struct{ args, cores, threads, requests string }{
		{"", "4-7", "4", "8"},
		{"--dp-size 2", "4-5|6-7", "2", "16"},
		{"--dp-size 8", "0|1|2|3|4|5|6|7", "1", "64"}, // more ranks than cores
		{"--tp-size 2", "0-3|4-7", "4", "8"},
		{"--attn-dp-size 2 --tp-size 2", "4-5|6-7", "2", "16"},
	} {
		spec, err := command(settings(2, nil, strings.Fields(test.args)...), 1, "/plugin", nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"SGLANG_CPU_OMP_THREADS_BIND=" + test.cores, "OMP_NUM_THREADS=" + test.threads} {
			if !slices.Contains(spec.Env, want) {
				t.Errorf("%s: no %s in %q", test.args, want, spec.Env)
			}
		}
		if at := slices.Index(spec.Argv, "--max-running-requests"); at < 0 || spec.Argv[at+1] != test.requests {
			t.Errorf("%s: want %s requests in %q", test.args, test.requests, spec.Argv)
		}
	}
}

// Each rank has its own ports, one after the other; those of the next worker come
// after them.
func TestRanksOfAWorkerTakePortsInARow(t *testing.T) {
	cfg := settings(2, nil, "--data-parallel-size", "2")
	spec, err := command(cfg, 1, "/plugin", nil)
	line := strings.Join(spec.Argv, " ")
	if err != nil || !strings.Contains(line, `"tcp://*:5559"`) || !strings.Contains(line, `"tcp://127.0.0.1:5759"`) || !strings.Contains(line, "tcp://*:5659") {
		t.Errorf("%s %v", line, err)
	}
	for rank, want := range []string{"tcp://127.0.0.1:5559 tcp://127.0.0.1:5759 tcp://127.0.0.1:5659", "tcp://127.0.0.1:5560 tcp://127.0.0.1:5760 tcp://127.0.0.1:5660"} {
		source := cfg.Ports.Sources(1, cfg.BlockSize)[rank]
		if got := source.Endpoint + " " + source.Replay + " " + cfg.Ports.LoadEndpoint(1, rank); got != want {
			t.Errorf("rank %d is followed at %s, want %s", rank, got, want)
		}
	}
}

// TestWorkersWithSharedModelsHavePortsApart: SGLang takes seven in a row.
func TestWorkersWithSharedModelsHavePortsApart(t *testing.T) {
	for _, test := range []struct {
		workers int
		args    string
		want    []string // by worker; empty: SGLang's own
	}{
		{2, "--attn-dp-size 2 --tp-size 2", []string{"127.0.0.1:8333", "127.0.0.1:8341"}},
		{2, "--enable-dp-attention --dp-size 2 --tp-size 2", []string{"127.0.0.1:8333", "127.0.0.1:8341"}},
		{1, "--attn-dp-size 2 --tp-size 2", []string{""}},
		{2, "--dp-size 2", []string{"", ""}},
	} {
		for i, want := range test.want {
			spec, err := command(settings(test.workers, nil, strings.Fields(test.args)...), i, "/plugin", nil)
			if err != nil {
				t.Fatal(err)
			}
			if got, _ := flags.Value(spec.Argv, "dist-init-addr"); got != want {
				t.Errorf("%d workers, %s: worker %d at %q, want %q", test.workers, test.args, i, got, want)
			}
		}
	}
}

func TestWorkersPublishNoEventsThatNobodyFollows(t *testing.T) {
	cfg := settings(1, nil)
	cfg.KVEvents = false
	spec, err := command(cfg, 0, "/plugin", nil)
	if err != nil || slices.Contains(spec.Argv, "--kv-events-config") || slices.Contains(spec.Argv, "--load-publish-endpoint") {
		t.Errorf("%q %v", spec.Argv, err)
	}
}

func TestPrefillAndDecodeWorkersAreStartedForTheirParts(t *testing.T) {
	for _, test := range []struct {
		name    string
		gpus    []string
		args    string
		environ []string
		parts   []string // in the command line of each worker
		want    []string // in the environment of each
		not     []string
	}{
		{
			name: "on the CPU",
			parts: []string{
				"--disaggregation-transfer-backend nixl --disaggregation-mode prefill --disaggregation-bootstrap-port 8998 --device",
				"--disaggregation-transfer-backend nixl --disaggregation-mode prefill --disaggregation-bootstrap-port 8999 --device",
				"--disaggregation-transfer-backend nixl --disaggregation-mode decode --disaggregation-decode-enable-radix-cache --disaggregation-decode-retraction-backup none --device",
			},
			want: []string{"UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "KVROUTER_NIXL_POLL_US=1000", "SGLANG_HOST_IP=127.0.0.1"},
		},
		{
			name: "the user's transport wins", args: "--disaggregation-transfer-backend mooncake_tcp --disaggregation_decode_retraction_backup=cpu_tensor",
			environ: []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=eth0", "SGLANG_HOST_IP=0.0.0.0"},
			parts: []string{
				"--enable-cache-report --disaggregation-mode prefill --disaggregation-bootstrap-port 8998", "8999",
				"--enable-cache-report --disaggregation-mode decode --disaggregation-decode-enable-radix-cache --device",
			},
			want: []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=eth0", "SGLANG_HOST_IP=127.0.0.1"},
		},
		{
			name: "one GPU each", gpus: []string{"0", "1", "2"},
			parts: []string{"prefill --disaggregation-bootstrap-port 8998", "8999", "decode --disaggregation-decode-enable-radix-cache"},
			want:  []string{"SGLANG_HOST_IP=127.0.0.1"},
			not:   []string{"UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "KVROUTER_NIXL_POLL_US=1000"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := settings(3, test.gpus, strings.Fields(test.args)...)
			cfg.PrefillWorkers = 2
			for i, part := range test.parts {
				spec, err := command(cfg, i, "/plugin", test.environ)
				if line := strings.Join(spec.Argv, " "); err != nil || !strings.Contains(line, part) {
					t.Errorf("worker %d: no %q in %q, %v", i, part, line, err)
				}
				for _, want := range test.want {
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
		})
	}
}

func TestArgumentsThatTheRouterSetsAreRefused(t *testing.T) {
	for args, want := range map[string]string{
		"--model-path x":                      "--model before --",
		"--model x":                           "--model before --",
		"--page_size=1":                       "--block-size before --",
		"--page 1":                            "--page-size; use the full name",
		"--kv-events-config.topic t":          "--base-kv-events-port",
		"--load-publish-endpoint auto":        "--base-metrics-port",
		"--disaggregation-mode prefill":       "--prefill-workers",
		"--disaggregation-bootstrap-port=1":   "--base-bootstrap-port",
		"--nccl-init-addr h:1":                "--worker",
		"--grpc-mode":                         "plain HTTP",
		"--config f.yaml":                     "after --",
		"--dp-size 0":                         "at least 1",
		"--dp many":                           "at least 1",
		"--attn-dp 2":                         "--attn-dp-size; use the full name",
		"--attention-data 2":                  "--attn-dp-size; use the full name",
		"--tensor-parallel 2":                 "--tp-size; use the full name",
		"--max-total 9":                       "--max-total-tokens; use the full name",
		"--seed 3 --served-model-name before": "--served-model-name before --",
	} {
		if err := checkArgs(process.Settings{Args: strings.Fields(args)}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q in it", args, err, want)
		}
	}
	for _, args := range []string{"", "--tp 2 --dp 2", "--enable-metrics --log-level debug", "--chat-template x.jinja", "--max-total-tokens 9", "--disaggregation-transfer-backend mooncake"} {
		if err := checkArgs(process.Settings{Args: strings.Fields(args), PrefillWorkers: 1}); (err != nil) != strings.Contains(args, "--dp") {
			t.Errorf("%s, apart: %v", args, err)
		}
		if err := checkArgs(process.Settings{Args: strings.Fields(args)}); err != nil {
			t.Errorf("%s: %v", args, err)
		}
	}
}

func TestLimitsAreThoseOfTheArguments(t *testing.T) {
	for args, want := range map[string][2]int{
		"":                            {0, 0},
		"--chunked-prefill-size 2048": {2048, 0},
		"--chunked_prefill_size=-1 --max-total-tokens 1000": {0, 62},
	} {
		if tokens, blocks := limits(strings.Fields(args), 16); [2]int{tokens, blocks} != want {
			t.Errorf("%s: %d tokens, %d blocks; want %v", args, tokens, blocks, want)
		}
	}
}

func TestPythonIsAskedForWhatWorkersNeed(t *testing.T) {
	python := filepath.Join(t.TempDir(), "python")
	// Its arguments are -c, the question and the modules.
	testkit.WriteFile(t, python, "#!/bin/sh\nfor m; do :; done\ncase \" $LACKS \" in *\" $3 \"*) exit 3 ;; esac\n")
	if err := os.Chmod(python, 0o700); err != nil {
		t.Fatal(err)
	}
	whole := process.Settings{Python: python}
	apart := process.Settings{Python: python, PrefillWorkers: 1}
	for _, test := range []struct {
		lacks string
		cfg   process.Settings
		want  string
	}{
		{"", whole, ""},
		{"", apart, ""},
		{"sglang", whole, "has no SGLang; run `make setup-sglang`"},
		{"nixl", whole, ""},
		{"nixl", apart, "lacks NIXL"},
	} {
		t.Setenv("LACKS", test.lacks)
		err := checkPython(test.cfg)
		if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("without %q: %v, want %q", test.lacks, err, test.want)
		}
	}
}

func TestPluginFolderHoldsTheEntryPointsOfItsModules(t *testing.T) {
	var files []string
	err := fs.WalkDir(Engine().Plugin, "plugin", func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() && !strings.Contains(path, "__pycache__") {
			files = append(files, strings.TrimPrefix(path, "plugin/"))
		}
		return err
	})
	want := []string{"cpu/sgl_kernel.py", "kvrouter_idle.py", "kvrouter_loopback.py", "kvrouter_nixl.py", "kvrouter_sglang.dist-info/METADATA", "kvrouter_sglang.dist-info/entry_points.txt", "kvrouter_tiers.py"}
	if err != nil || !slices.Equal(files, want) {
		t.Errorf("files %q, %v; want %q", files, err, want)
	}
}

func TestStandInForKernelsHasEveryName(t *testing.T) {
	const script = `
import sgl_kernel, sgl_kernel.kvcacheio
from sgl_kernel import copy_all_layer_kv_cache_cpu
from sgl_kernel.kvcacheio import transfer_kv_direct
assert not hasattr(sgl_kernel, "__wrapped__")
assert sgl_kernel.assign_req_to_token_pool_cpu.__doc__
for kernel in (copy_all_layer_kv_cache_cpu, transfer_kv_direct):
    try:
        kernel(1, a=2)
    except NotImplementedError as error:
        print(error)
`
	cmd := exec.Command("python3", "-B", "-c", script)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join("plugin", "cpu"))
	out, err := cmd.CombinedOutput()
	want := "sgl_kernel.copy_all_layer_kv_cache_cpu has no stand-in on a CPU\nsgl_kernel.kvcacheio.transfer_kv_direct has no stand-in on a CPU\n"
	if string(out) != want || err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestHierarchicalCacheHasTheMemoryOfTheFlag(t *testing.T) {
	cpu := "--hicache-write-policy write_through --hicache-io-backend direct --hicache-mem-layout layer_first"
	for _, test := range []struct {
		name string
		gib  float64
		gpus []string
		each int // GPUs of a rank
		args string
		want string
	}{
		{"on the CPU", 2, nil, 1, "", "--enable-hierarchical-cache --hicache-size 2 " + cpu},
		{"one GPU", 32, []string{"0"}, 1, "", "--enable-hierarchical-cache --hicache-size 34 --hicache-write-policy write_through"},
		{"split over two GPUs", 32, []string{"0", "1"}, 2, "", "--enable-hierarchical-cache --hicache-size 17 --hicache-write-policy write_through"},
		{"each rank of a shared model", 32, []string{"0", "1"}, 1, "--attn-dp-size 2", "--enable-hierarchical-cache --hicache-size 34 --hicache-write-policy write_through"},
		{"the user's choice wins", 1, nil, 1, "--hicache-ratio=3 --hicache-write-policy write_back", "--enable-hierarchical-cache --hicache-io-backend direct --hicache-mem-layout layer_first"},
		{"the user's own cache", 0, nil, 1, "--enable-hierarchical-cache", ""},
		{"none", 0, nil, 1, "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := settings(1, test.gpus, strings.Fields(test.args)...)
			cfg.OffloadGiB, cfg.GPUsPerWorker = test.gib, test.each
			if err := checkOffload(cfg); err != nil {
				t.Fatal(err)
			}
			spec, err := command(cfg, 0, "/plugin", nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(offloadArgs(cfg), " "); got != test.want || !strings.Contains(strings.Join(spec.Argv, " "), test.want) {
				t.Errorf("got %q in %q, want %q", got, spec.Argv, test.want)
			}
			wants := len(test.gpus) == 0 && test.name != "none"
			if shim := slices.Contains(spec.Env, "KVROUTER_CPU_TIERS=1"); shim != wants {
				t.Errorf("plugin %v, want %v", shim, wants)
			}
		})
	}
}
