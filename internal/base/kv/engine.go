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

// MarshalText writes an engine's name.
func (e Engine) MarshalText() ([]byte, error) { return []byte(e.String()), nil }

// UnmarshalText reads an engine's name.
func (e *Engine) UnmarshalText(text []byte) error { return parseName(engineNames, text, e) }
