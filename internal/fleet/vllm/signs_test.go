package vllm

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/fleet/process"
)

func TestStagesOfARealStart(t *testing.T) {
	// From vLLM 0.32 on a CPU.
	const output = `(APIServer pid=9290) INFO 11-21 07:30:20 [api_utils.py:286] non-default args: {'port': 18100}
(APIServer pid=9290) INFO 11-21 07:30:20 [model.py:733] Resolved architecture: LlamaForCausalLM
(APIServer pid=9290) WARNING 11-21 07:30:20 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.
(EngineCore pid=9494) INFO 11-21 07:30:38 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=9918) INFO 11-21 07:30:54 [cpu_model_runner.py:68] Starting to load model m...
(Worker pid=9918) INFO 11-21 07:30:54 [weight_utils.py:1108] Filesystem type for checkpoints: EXT4. Checkpoint size: 0.25 GiB. Available RAM: 18.03 GiB.
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:01<00:00,  1.29s/it]
(Worker pid=9918) INFO 11-21 07:30:56 [default_loader.py:501] Loading weights took 1.29 seconds
(EngineCore pid=9494) INFO 11-21 07:30:57 [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency for 8,192 tokens per request: 5.69x
(EngineCore pid=9494) INFO 11-21 07:31:01 [kv_events.py:379] Starting ZMQ publisher thread
(APIServer pid=9290) INFO 11-21 07:31:02 [entry.py:140] Starting vLLM server on http://127.0.0.1:18100
INFO:     Application startup complete.`
	var got []string
	log := process.NewStartLog(signs())
	for line := range strings.SplitSeq(output, "\n") {
		if stage, _ := log.Line(line); stage != "" {
			got = append(got, stage)
		}
	}
	want := []string{"starting engine", "loading weights", "allocating KV cache", "warming up", "starting API server"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if tail := log.Tail(); len(tail) != 0 {
		t.Errorf("tail has routine lines: %q", tail)
	}
}

func TestErrorsOfAReadyWorkerAreToldOnce(t *testing.T) {
	const problem = "(EngineCore pid=1) ERROR 11-21 07:31:02 [core.py:1] broken"
	log := process.NewStartLog(signs())
	if _, failure := log.Line(problem); failure || len(log.Tail()) != 1 {
		t.Error("while it starts, an error is kept for the end")
	}
	log.SetReady()
	if _, failure := log.Line(problem); !failure || len(log.Tail()) != 0 {
		t.Error("once it is ready, an error is told at once and not again")
	}
}

func TestAdviceFitsTheFailure(t *testing.T) {
	known := signs()
	for _, test := range []struct {
		reason string
		lines  []string
		want   string
	}{
		{"exit status 1", []string{"x", "ModuleNotFoundError: No module named 'vllm'"}, "make setup"},
		{"exit status 2", []string{"api_server.py: error: unrecognized arguments: --x"}, "after --"},
		{"signal: killed", nil, "dmesg"},
		{"exit status 0", nil, "--log-level debug"},
		{"exit status 1", []string{"strange"}, "above"},
	} {
		if got := known.Explain(test.reason, test.lines).Error(); !strings.Contains(got, test.want) {
			t.Errorf("explain(%q, %q) = %q, want %q in it", test.reason, test.lines, got, test.want)
		}
	}
}
