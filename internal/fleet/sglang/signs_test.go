package sglang

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/fleet/process"
)

func TestStagesOfARealStart(t *testing.T) {
	// From SGLang 0.5.23 on a CPU.
	const output = `/venv/lib/python3.11/site-packages/sglang/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still supported
  warnings.warn(
[2026-11-22 10:20:33] Cuda graph is disabled because of using torch native attention backend
[2026-11-22 10:20:36] server_args={'model_path': '/models/smollm2-135m-instruct', 'tokenizer_path': '/models/smollm2-135m-instruct'}
[2026-11-22 10:20:57] Init parallel begin.
[2026-11-22 10:21:00] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'
[2026-11-22 10:21:01] Load weight begin. avail mem=17.49 GB
Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00,  7.00it/s]
[2026-11-22 10:21:01] Load weight end. elapsed=0.18 s, type=LlamaForCausalLM, avail mem=17.07 GB, mem usage=0.42 GB.
[2026-11-22 10:21:03] KV Cache is allocated. dtype: torch.float32, #tokens: 19968, K size: 0.43 GB, V size: 0.43 GB
[2026-11-22 10:21:03] Starting ZMQ publisher thread
[2026-11-22 10:21:03] INFO:     Started server process [23259]
[2026-11-22 10:21:03] INFO:     Application startup complete.
[2026-11-22 10:21:04] Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0
[2026-11-22 10:21:05] The server is fired up and ready to roll!`
	var got []string
	log := process.NewStartLog(signs())
	for line := range strings.SplitSeq(output, "\n") {
		if stage, _ := log.Line(line); stage != "" {
			got = append(got, stage)
		}
	}
	want := []string{"starting engine", "loading weights", "allocating KV cache", "starting API server"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestErrorsOfAReadyWorkerAreToldOnce(t *testing.T) {
	const problem = "[2026-11-22 10:21:05] Scheduler hit an exception: Traceback (most recent call last):"
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
		reason  string
		line    string
		want    string
		lasting bool
	}{
		{"exit status 1", "ModuleNotFoundError: No module named 'sglang'", "make setup-sglang", true},
		{"exit status 2", "sglang serve: error: unrecognized arguments: --bad-flag", "does not know an argument", true},
		{"exit status 2", "sglang serve: error: argument --attention-backend: invalid choice: 'blah' (choose from 'triton')", "rejects an argument", true},
		{"signal: killed", "RuntimeError: 0 active drivers ([]). There should only be one.", "--block-size above 1", true},
		{"exit status 1", "[Errno 98] error while attempting to bind on address ('127.0.0.1', 8100): address already in use", "--base-bootstrap-port", false},
		{"exit status 1", "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.", "set --model to a folder", false},
		{"signal: killed", "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1. Raise --mem-fraction-static above 0.127", "set a higher", false},
		{"signal: killed", "[2026-11-22 10:37:29] Received sigquit from a child process. It usually means the child failed.", "lines are above", false},
		{"signal: killed", "", "dmesg", false},
	} {
		got := known.Explain(test.reason, []string{"[2026-11-22 10:21:05] strange", test.line})
		if !strings.Contains(got.Error(), test.want) || !strings.HasPrefix(got.Error(), "SGLang ended") || got.Lasting != test.lasting {
			t.Errorf("%q: %q, want %q in it", test.line, got.Error(), test.want)
		}
	}
}
