package zoo

import "kvrouter/internal/base/kv"

// form is a small model of some architecture, with made-up weights.
type form struct {
	name     string
	engine   kv.Engine // empty: vLLM
	config   string    // file of testdata, without .json; empty: name
	length   int       // of a context, tokens; 0: 2048
	cache    int       // blocks of the engine's cache, small enough for evictions
	args     []string  // for the engine
	env      []string
	drafter  string   // method of speculative decoding of draft, and its file of testdata; empty: none
	adapters []string // names of LoRA adapters
	prompt   prompts
	note     string // what GET /workers says of the predictions
	off      string // why this form cannot run on a CPU; empty: it can
}

// prompts are lengths in tokens.
type prompts struct {
	system int // at most
	turn   int // of a user's message, at most
	most   int // of a prompt
}

// groups has vLLM keep a KV-cache group for each kind of attention, which it does
// unasked on a GPU only.
const groups = "--no-disable-hybrid-kv-cache-manager"

var short, long = prompts{600, 200, 1700}, prompts{2000, 700, 3600}

// forms are the architectures of the models that most people serve.
var forms = []form{
	{name: "llama", cache: 160, prompt: short},
	{name: "qwen3", cache: 160, prompt: short},
	{name: "qwen3-moe", config: "qwen3moe", cache: 160, prompt: short},
	{name: "gemma3", cache: 420, args: []string{groups}, prompt: short},
	{name: "gemma3-one-group", config: "gemma3", cache: 420, prompt: short},
	{name: "gpt-oss", config: "gptoss", cache: 260, args: []string{groups}, prompt: short},
	{name: "mistral-all-sliding", config: "mistral", cache: 160, args: []string{groups}, prompt: short,
		note: "upper bound: all layers have sliding windows, and KV events do not say whether a prompt ended with a block"},
	{name: "llama4-chunked", config: "llama4", cache: 330, args: []string{groups}, env: []string{"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1"}, prompt: short},
	{name: "lfm2", cache: 160, args: []string{groups}, prompt: short},
	{name: "qwen3-next", config: "qwen3next", length: 4096, cache: 24, args: []string{groups}, prompt: long},
	{name: "llama-eagle", config: "llama", cache: 160, drafter: "eagle", prompt: short},
	{name: "gpt-oss-eagle3", config: "gptoss", cache: 260, args: []string{groups}, drafter: "eagle3", prompt: short},
	{name: "llama-ngram", config: "llama", cache: 160, args: []string{"--speculative-config", `{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":3}`}, prompt: short},
	{name: "llama-two-ranks", config: "llama", cache: 110, args: []string{"--data-parallel-size", "2"}, prompt: short},
	{name: "llama-lora", config: "llama", cache: 160, adapters: []string{"sql", "legal"}, prompt: short},
	{name: "qwen3-next-mtp", off: "vLLM computes states behind a drafter with Triton only: its first request fails on a CPU"},
	{name: "deepseek-mla", off: "vLLM has no prefix cache for MLA on a CPU (platforms/cpu.py)"},
	{name: "granite4-mamba2", off: "vLLM has no Mamba 2 kernel for CPUs: its first request fails in mamba_mixer2.py"},
	{name: "sglang-llama", engine: kv.EngineSGLang, config: "llama", cache: 160, prompt: short},
	{name: "sglang-eagle", engine: kv.EngineSGLang, off: "SGLang has no drafter for torch_native, the only attention that it computes on this CPU (speculative/draft_utils.py)"},
}
