package kv

// Engine is the inference server that a worker runs. It determines the worker's
// routes, how chats are rendered and what usage counts.
type Engine uint8

// The engines.
const (
	EngineVLLM   Engine = iota // vLLM, or unknown
	EngineSGLang               // SGLang
)

var engineNames = []string{EngineVLLM: "vllm", EngineSGLang: "sglang"}

// String returns the engine's name.
func (e Engine) String() string { return engineNames[e] }

// Knowledge is what is known of the KV cache of a worker.
type Knowledge uint8

// The knowledge.
const (
	Exact       Knowledge = iota // its events report all of its blocks
	Approximate                  // blocks of the prompts that were routed to it count
	LoadOnly                     // nothing
)

var knowledgeNames = []string{Exact: "exact", Approximate: "approximate", LoadOnly: "load_only"}

// String returns the knowledge's name.
func (k Knowledge) String() string { return knowledgeNames[k] }

// MarshalText writes its name.
func (k Knowledge) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads its name.
func (k *Knowledge) UnmarshalText(text []byte) error { return parseName(knowledgeNames, text, k) }

// MarshalText writes an engine's name.
func (e Engine) MarshalText() ([]byte, error) { return []byte(e.String()), nil }

// UnmarshalText reads an engine's name.
func (e *Engine) UnmarshalText(text []byte) error { return parseName(engineNames, text, e) }
