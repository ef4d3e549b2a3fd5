package sglang

import "kvrouter/internal/fleet/process"

// signs recognize a start of SGLang and its failures.
func signs() process.Signs {
	const fetch = "the model cannot be downloaded: set --model to a folder, or allow access to huggingface.co"
	const permission = "the model requires permission: accept its terms on huggingface.co and set HF_TOKEN"
	const memory = "no memory is left for the KV cache: after -- set a higher --mem-fraction-static"
	return process.Signs{
		Engine: "SGLang",
		Stages: []process.Stage{
			{Name: "starting engine", Signs: []string{"server_args="}},
			{Name: "downloading weights", Signs: []string{"Time spent downloading weights", "Fetching ", "Downloading "}},
			{Name: "loading weights", Signs: []string{"Load weight begin"}},
			{Name: "allocating KV cache", Signs: []string{"Load weight end"}},
			{Name: "warming up", Signs: []string{"Capture cuda graph begin"}},
			{Name: "starting API server", Signs: []string{"Started server process"}},
		},
		Error: " hit an exception",
		Routine: []string{
			"INFO: ", "% Completed |", "server_args=", "Warning: ", "  warnings.warn(", "Ignore import error", "it/s]",
			"] Prefill batch", "] Decode batch", "crash diagnostics", "py-spy", "kill_process_tree called",
		},
		Failures: []process.Failure{
			{Sign: "No module named 'sglang'", Advice: "this Python has no SGLang: run `make setup-sglang`, or set --python to one that has",
				Lasting: true},
			{Sign: "error: unrecognized arguments", Advice: "SGLang does not know an argument after --", Lasting: true},
			{Sign: "sglang serve: error: ", Advice: "SGLang rejects an argument after --", Lasting: true},
			{Sign: "has no stand-in on a CPU",
				Advice:  "SGLang needs a compiled kernel for this on a CPU: remove the argument after -- that needs it, or use another --model",
				Lasting: true},
			{Sign: "0 active drivers",
				Advice:  "SGLang needs a GPU for this; up to 0.5.21 also for a --block-size above 1",
				Lasting: true},
			{Sign: "ddress already in use",
				Advice: "a port is in use: stop the process that uses it, or change --base-worker-port, --base-kv-events-port, " +
					"--base-kv-replay-port, --base-metrics-port, --base-bootstrap-port"},
			{Sign: "out of memory",
				Advice: "not enough GPU memory: use a smaller --model, more --gpus-per-worker, or after -- a smaller --max-total-tokens"},
			{Sign: "increase --mem-fraction-static", Advice: memory},
			{Sign: "Raise --mem-fraction-static", Advice: memory},
			{Sign: "can't allocate memory",
				Advice: "not enough memory: use fewer workers, a smaller --model, or after -- a smaller --max-total-tokens"},
			{Sign: "gated repo", Advice: permission, Lasting: true},
			{Sign: "401 Client Error", Advice: permission, Lasting: true},
			{Sign: "couldn't connect to", Advice: fetch},
			{Sign: "LocalEntryNotFoundError", Advice: fetch},
			{Sign: "Received sigquit from a child process", Advice: "one of its processes failed; its last lines are above"},
		},
	}
}
