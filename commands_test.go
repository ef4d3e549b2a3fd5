package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/manual"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/batch"
	"kvrouter/internal/tools/engine"
)

func TestCommands(t *testing.T) {
	machine := testMachine(t)
	for _, test := range []struct {
		args []string
		want command
	}{
		{nil, &Config{}}, {[]string{"serve"}, &Config{}}, {[]string{"version"}, &VersionCommand{}},
		{[]string{"--seed", "3"}, &Config{}}, {[]string{"doctor", "--num-workers", "1"}, &DoctorCommand{}},
		{[]string{"simulate", "--synthetic=chat", "--concurrency=8", "--mock=num-gpu-blocks=100"}, &SimulateCommand{}},
		{[]string{"simulate", "--synthetic=chat", "--concurrency=8", "--policy=work,load-first"}, &SimulateCommand{}},
	} {
		if got, err := parse(test.args, machine); fmt.Sprintf("%T", got) != fmt.Sprintf("%T", test.want) || err != nil {
			t.Errorf("%q: command %T, %v; want %T", test.args, got, err, test.want)
		}
	}
}

func TestCommandsTakeTheirOwnFlagsOnly(t *testing.T) {
	for args, want := range map[string]string{
		"simulate --trace t --concurrency 1 --http-port 1": "unknown flag --http-port",
		"simulat --trace t":           `unknown command "simulat": did you mean "simulate"? the commands are serve,`,
		"top --num-workers 2":         "unknown flag --num-workers",
		"--num-workers 2 top":         `--num-workers applies to the default command "serve", not "top"`,
		"--once":                      "unknown flag --once",
		"replay-events f --api-key k": "unknown flag --api-key",
		"batch f --policy kv":         "unknown flag --policy",
		"doctor --once":               "unknown flag --once",
		"simulate --trace t --concurrency 1 --thompson-state f": "unknown flag --thompson-state",
	} {
		if _, err := parse(strings.Fields(args), testMachine(t)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

func TestCommandsShareAFile(t *testing.T) {
	shared, own := filepath.Join(t.TempDir(), "serve.yaml"), filepath.Join(t.TempDir(), "own.yaml")
	testkit.WriteFile(t, shared, "num-workers: 3\npolicy: kv\nseed: 7\nrouter-api-key: [a, b]\nmock: {num-gpu-blocks: 100, prefill-ms: [1, 2, 3]}\n")
	testkit.WriteFile(t, own, "concurrency: 8\nsynthetic: chat\nseed: 7\n")
	chosen, err := parse([]string{"simulate", "--synthetic=chat", "--concurrency=8", "--config", shared}, testMachine(t))
	if err != nil {
		t.Fatal(err)
	}
	if c := chosen.(*SimulateCommand); c.Seed != 7 || c.Policy != "kv" || c.Mock.NumGPUBlocks != 100 || !slices.Equal(c.Mock.PrefillMS, []float64{1, 2, 3}) {
		t.Errorf("%+v", c)
	}
	if chosen, err = parse([]string{"top", "--config=" + shared}, testMachine(t)); err != nil || !slices.Equal(chosen.(*TopCommand).RouterAPIKey, []string{"a", "b"}) {
		t.Errorf("%+v, %v", chosen, err)
	}
	if chosen, err = parse([]string{"simulate", "--config=" + own}, testMachine(t)); err != nil || chosen.(*SimulateCommand).Concurrency != 8 {
		t.Errorf("%+v, %v", chosen, err)
	}
	if _, err := parse([]string{"--config=" + own}, testMachine(t)); err == nil || !strings.Contains(err.Error(), `unknown key "concurrency"`) {
		t.Error(err)
	}
	t.Setenv("KVROUTER_CONFIG", shared)
	if chosen, err = parse([]string{"top"}, testMachine(t)); err != nil || !slices.Equal(chosen.(*TopCommand).RouterAPIKey, []string{"a", "b"}) {
		t.Errorf("%+v, %v", chosen, err)
	}
}

func TestEnvironmentIsWhatAPersonWouldType(t *testing.T) {
	t.Setenv("KVROUTER_KV_P2P", "true")
	t.Setenv("KVROUTER_KV_OFFLOAD_GIB", "2")
	t.Setenv("KVROUTER_MOCK", "num-gpu-blocks=100,slow-worker=0=2,1=3,max-num-seqs=5")
	t.Setenv("KVROUTER_THOMPSON_OVERRIDE", "lints.v=1,fixes=load-sign,pin-ttl")
	cfg := mustParse(t, testMachine(t))
	if !cfg.KVP2P || cfg.KVOffloadGiB != 2 || cfg.Mock.NumGPUBlocks != 100 || cfg.Mock.SlowWorker[1] != 3 || cfg.Mock.MaxNumSeqs != 5 || len(cfg.Scoring.Thompson.ThompsonOverride) != 1 {
		t.Errorf("%+v", cfg)
	}
}

var helpFlag = regexp.MustCompile(`(?m)^  --(?:\[no-\])?([a-z0-9.-]+)(?: |$)`)

func helpOf(t *testing.T, args ...string) (text string, flags map[string]bool) {
	t.Helper()
	text = captureStdout(t, func() {
		if command, err := parse(args, testMachine(t)); command != nil || err != nil {
			t.Errorf("%q: command %T, %v", args, command, err)
		}
	})
	flags = map[string]bool{}
	for _, match := range helpFlag.FindAllStringSubmatch(text, -1) {
		flags[match[1]] = true
	}
	return text, flags
}

func TestHelpFitsTwoScreens(t *testing.T) {
	const lines, columns, flags = 75, 100, 25
	text, shown := helpOf(t, "--help")
	if n := strings.Count(text, "\n"); n > lines || len(shown) != flags {
		t.Errorf("--help has %d lines and %d flags", n, len(shown))
	}
	for _, args := range [][]string{{"--help"}, {"simulate", "--help"}, {"doctor", "--help"}, {"batch", "--help"}, {"top", "--help"}, {"replay-events", "--help"}} {
		text, _ := helpOf(t, args...)
		for line := range strings.Lines(text) {
			if len(line) > columns+1 {
				t.Errorf("%q: %s", args, line)
			}
		}
	}
}

func TestHelpShowsWhatTheCommandReads(t *testing.T) {
	parser, err := newParser(new(cli), new(manual.Help))
	if err != nil {
		t.Fatal(err)
	}
	of := map[string]map[string]bool{}
	for _, command := range parser.Model.Children {
		want := map[string]bool{}
		for _, flag := range command.Flags {
			if !flag.Hidden {
				want[flag.Name] = true
			}
		}
		of[command.Name] = want
		if _, shown := helpOf(t, command.Name, "--help=all"); !maps.Equal(shown, want) {
			t.Errorf("%s --help=all: %s", command.Name, cmp.Diff(want, shown))
		}
		for _, task := range usual[command.Name] {
			for _, name := range task.Flags {
				if !want[name] {
					t.Errorf("%s has no flag --%s to show", command.Name, name)
				}
			}
		}
	}
	if _, shown := helpOf(t, "--help=all"); !maps.Equal(shown, of["serve"]) {
		t.Errorf("--help=all: %s", cmp.Diff(of["serve"], shown))
	}
	for _, name := range []string{
		"model", "engine", "num-workers", "worker", "http-port", "api-key", "drain-timeout", "record", "cluster", "log-level", "indexer-peers", "thompson-state",
		"router-track-output-blocks", "record-decisions", "enforce-disagg", "session-header",
	} {
		if of["simulate"][name] || !of["serve"][name] {
			t.Errorf("--%s is a flag of simulate: %t, of serve: %t", name, of["simulate"][name], of["serve"][name])
		}
	}
}

func TestHelpOfATopic(t *testing.T) {
	for topic, want := range map[string]string{
		"cells": "cell", "relay": "relay-cell", "eviction-interval": "eviction-interval", "num-worker": "num-workers", "--kv-p2p": "kv-p2p",
		"policies": "cache-threshold variance-k", "mock-workers": "mock speedup-ratio",
	} {
		_, shown := helpOf(t, "--help="+topic)
		if got := strings.Join(slices.Sorted(maps.Keys(shown)), " "); got != want {
			t.Errorf("--help=%s shows %q, want %q", topic, got, want)
		}
	}
	if _, err := parse([]string{"simulate", "--help=relay"}, testMachine(t)); err == nil || !strings.Contains(err.Error(), "--help=relay: simulate has no such group or flag; the groups are simulation") {
		t.Error(err)
	}
}

func TestVersionFlagPrintsTheVersion(t *testing.T) {
	if text, _ := helpOf(t, "--version"); text != "kvrouter "+settings.Build()+"\n" {
		t.Errorf("--version prints %q", text)
	}
	t.Setenv("KVROUTER_VERSION", "true")
	mustParse(t, testMachine(t))
}

func captureStdout(t *testing.T, f func()) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "out")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	stdout := os.Stdout
	os.Stdout = file
	defer func() { os.Stdout = stdout }()
	f()
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	out, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestCommandLineBeatsEnvironmentBeatsFile(t *testing.T) {
	machine := testMachine(t)
	file := filepath.Join(t.TempDir(), "kvrouter.yaml")
	testkit.WriteFile(t, file, `
num-workers: 3
seed: 7
drain_timeout: 5s
collect-usage: false
api-key: [a, b]
policy: random
worker:
  - url: http://10.0.0.1:8100
    id: 9
  - url=http://10.0.0.2:8100
vllm-args: [--max-model-len, 4096]
`)
	t.Setenv("KVROUTER_SEED", "8")
	t.Setenv("KVROUTER_POLICY", "round-robin")
	cfg := mustParse(t, machine, "--policy", "least-loaded", "--config", file)
	if cfg.NumWorkers != 3 || cfg.Seed != 8 || cfg.Policy != "least-loaded" || cfg.DrainTimeout != 5*time.Second || cfg.CollectUsage {
		t.Errorf("%+v", cfg)
	}
	if !slices.Equal(cfg.APIKey, []string{"a", "b"}) || !slices.Equal(cfg.EngineArgs, []string{"--max-model-len", "4096"}) {
		t.Errorf("keys %q, vLLM %q", cfg.APIKey, cfg.EngineArgs)
	}
	want := []workers.Attached{{Server: probe.Server{ID: 9, URL: "http://10.0.0.1:8100"}, HasID: true}, {Server: probe.Server{ID: 3, URL: "http://10.0.0.2:8100"}}}
	if diff := cmp.Diff(want, cfg.Worker); diff != "" {
		t.Error(diff)
	}
}

func TestDoctorLooksAtWhatServeWouldRefuse(t *testing.T) {
	args := []string{"doctor", "--model", "./nothing", "--wait", "2s", "--num-workers", "2", "--worker", "http://h:1"}
	chosen, err := parse(args, testMachine(t))
	cfg, is := chosen.(*DoctorCommand)
	if err != nil || !is || cfg.Checks.Unusable == nil || cfg.Checks.Wait != 2*time.Second {
		t.Fatal(chosen, err)
	}
	if s := cfg.setup(); len(s.Workers) != 1 || s.BlockSize != 64 || !s.KVEvents || !s.Starts || len(s.Ports) == 0 {
		t.Errorf("it looks at %+v", s)
	}
	if _, err := parse(args[1:3], testMachine(t)); err == nil || err.Error() != cfg.Checks.Unusable.Error() {
		t.Errorf("serve says %v, doctor %v", err, cfg.Checks.Unusable)
	}
}

func TestMisspeltVariables(t *testing.T) {
	got, err := misspelt([]string{"KVROUTER_HTPP_PORT=1", "KVROUTER_HTTP_PORT=1", "KVROUTER_WORKERS_URLS=x", "KVROUTER_URL=x", "KVROUTER_SYNTHETIC=chat", "KVROUTER_WORKER_KEY=x", "KVROUTER=1", "HTPP_PORT=1",
		"KVROUTER_PORT=tcp://10.0.0.1:8000", "KVROUTER_PORT_8000_TCP_ADDR=10.0.0.1", "KVROUTER_SERVICE_HOST=10.0.0.1", "KVROUTER_SERVICE_PORT_HTTP=8000", "KVROUTER_A_PORT_8000_TCP=x"})
	if diff := cmp.Diff(map[string]string{"KVROUTER_HTPP_PORT": "KVROUTER_HTTP_PORT", "KVROUTER_WORKERS_URLS": "KVROUTER_WORKER_URLS"}, got); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

func TestReplayEventsIsACommand(t *testing.T) {
	chosen, err := parse([]string{"replay-events", "FILE", "--max-count=3", "--prompt-tokens=1,2", "--block-size=16"}, testMachine(t))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(events.ReplayCommand{File: "FILE", MaxCount: 3, MaxErrors: 20, PromptTokens: []uint32{1, 2}, BlockSize: 16}, chosen.(*ReplayCommand).ReplayCommand); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := parse([]string{"replay-events", "FILE", "--max-count=-1"}, testMachine(t)); err == nil || !strings.Contains(err.Error(), "--max-count") {
		t.Errorf("error %v", err)
	}
}

func TestTheEngineToSimulateIsThatOfTheMocksFlags(t *testing.T) {
	parse := func(args ...string) engine.Settings {
		chosen, err := parse(append([]string{"simulate", "--trace=t", "--concurrency=1"}, args...), testMachine(t))
		if err != nil {
			t.Fatal(err)
		}
		config := chosen.(*SimulateCommand)
		return config.Mock.SimConfig(config.BlockSize)
	}
	if got := parse(); got != testkit.Engine() {
		t.Errorf("without flags %+v", got)
	}
	got := parse("--block-size=16", "--mock=num-gpu-blocks=100", "--mock=max-num-seqs=5", "--mock=max-num-batched-tokens=512",
		"--mock=prefill-ms=1,2,3", "--mock=decode-ms=4,5,6", "--speedup-ratio=7", "--mock=max-loras=3", "--mock=lora-load=50ms")
	want := engine.Settings{Blocks: 100, BlockSize: 16, MaxSeqs: 5, MaxBatchedTokens: 512, Adapters: engine.AdapterSettings{Slots: 3, LoadMS: 50},
		Timing: engine.Timing{Prefill: [3]float64{1, 2, 3}, Decode: [3]float64{4, 5, 6}, MinDecode: 1, Speedup: 7}}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestSimulatedPartsAreCheckedBeforeTheRun(t *testing.T) {
	for args, says := range map[string]string{
		"--workers=4 --prefill-workers=2 --decode-workers=2":                                 "give either --workers",
		"--prefill-workers=2":                                                                "at least 1 of each",
		"--prefill-workers=2 --decode-workers=-1":                                            "at least 1 of each",
		"--prefill-workers=600 --decode-workers=600":                                         "1200 workers",
		"--prefill-workers=1 --decode-workers=1 --mock=kv-transfer-bandwidth=0":              "more than 0",
		"--prefill-workers=1 --decode-workers=1 --mock=kv-lease=0s":                          "more than 0",
		"--prefill-workers=1 --decode-workers=1 --disagg-min-uncached-tokens=-1":             "negative",
		"--prefill-workers=2 --decode-workers=6 --mock=kv-transfer-bandwidth=25 --policy=kv": "",
		"--prefill-workers=1 --decode-workers=1 --mock=disagg-kind=sglang --round-trip=5":    "",
		"--round-trip=-1":    "0 to 3.6e+06 ms",
		"--event-lag=NaN":    "0 to 3.6e+06 ms",
		"--round-trip=1e300": "0 to 3.6e+06 ms",
		"--prefill-workers=1 --decode-workers=1 --mock=slow-worker=2=3 --speedup-ratio=2":       "0 to 1",
		"--prefill-workers=1 --decode-workers=1 --mock=slow-worker=1=3 --mock=disagg-kind=both": "--mock disagg-kind",
	} {
		_, err := parse(append([]string{"simulate", "--trace=t", "--concurrency=1"}, strings.Fields(args)...), testMachine(t))
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v, want %q", args, err, says)
		}
	}
}

func TestBatchIsACommand(t *testing.T) {
	chosen, err := parse([]string{"batch", "FILE", "--url=http://h:1/v1", "--concurrency=3", "--api-key=k", "--drain-timeout=2s"}, testMachine(t))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(batch.Command{File: "FILE", URL: "http://h:1/v1", Concurrency: 3, Attempts: 6, AnswerTimeout: time.Hour, GiveUpAfter: 10 * time.Minute, APIKey: []string{"k"}, DrainTimeout: 2 * time.Second}, chosen.(*BatchCommand).Command); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := parse([]string{"batch", "FILE", "--concurrency=0"}, testMachine(t)); err == nil || !strings.Contains(err.Error(), "--concurrency") {
		t.Errorf("error %v", err)
	}
}
