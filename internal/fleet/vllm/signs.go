package vllm

import "kvrouter/internal/fleet/process"

// signs recognize a start of vLLM and its failures.
func signs() process.Signs {
	return process.Signs{
		Engine: "vLLM",
		Stages: []process.Stage{
			{Name: "starting engine", Signs: []string{"Initializing a V1 LLM engine", "Resolved architecture"}},
			{Name: "downloading weights", Signs: []string{"Time spent downloading weights", "Fetching ", "Downloading "}},
			{Name: "loading weights", Signs: []string{"Starting to load model", "Loading safetensors", "Checkpoint size"}},
			{Name: "allocating KV cache", Signs: []string{"Loading weights took", "Model loading took", "Available KV cache memory"}},
			{Name: "warming up", Signs: []string{"KV cache size:", "Capturing CUDA graph"}},
			{Name: "starting API server", Signs: []string{"Starting vLLM server on", "Starting vLLM API server"}},
		},
		Error:   " ERROR ",
		Routine: []string{" INFO ", " WARNING ", " DEBUG ", "INFO: ", "% Completed |"},
		Failures: []process.Failure{
			{Sign: "No module named 'vllm'", Advice: "this Python has no vLLM: run `make setup`, or set --python to one that has", Lasting: true},
			{Sign: "error: unrecognized arguments", Advice: "vLLM does not know an argument after --", Lasting: true},
			{Sign: "api_server.py: error: ", Advice: "vLLM rejects an argument after --", Lasting: true},
			{Sign: "ddress already in use",
				Advice: "a port is in use: stop the process that uses it, or change --base-worker-port, --base-kv-events-port, --base-kv-replay-port"},
			{Sign: "out of memory",
				Advice: "not enough GPU memory: use a smaller --model, more --gpus-per-worker, or after -- a smaller --max-model-len"},
			{Sign: "No available memory for the cache",
				Advice: "no memory is left for the KV cache: after -- set a higher --gpu-memory-utilization or a smaller --max-model-len"},
			{Sign: "larger than the available KV cache memory",
				Advice:  "the KV cache cannot hold one context: after -- set a smaller --max-model-len (on a CPU VLLM_CPU_KVCACHE_SPACE sets the GiB)",
				Lasting: true},
			{Sign: "desired GPU memory utilization",
				Advice: "another process uses the GPU: stop it, or after -- set a lower --gpu-memory-utilization"},
			{Sign: "gated repo", Advice: "the model requires permission: accept its terms on huggingface.co and set HF_TOKEN", Lasting: true},
			{Sign: "401 Client Error", Advice: "the model requires permission: accept its terms on huggingface.co and set HF_TOKEN", Lasting: true},
			{Sign: "couldn't connect to", Advice: "the model cannot be downloaded: set --model to a folder, or allow access to huggingface.co"},
			{Sign: "LocalEntryNotFoundError", Advice: "the model cannot be downloaded: set --model to a folder, or allow access to huggingface.co"},
		},
	}
}
