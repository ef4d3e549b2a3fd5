package kv

// Engine is the kind of server that a worker is. It decides which routes the worker
// has, how it renders a chat and what its usage counts.
type Engine uint8

// The engines.
const (
	EngineVLLM   Engine = iota // vLLM, or a server that does not say what it is
	EngineSGLang               // SGLang
)

var engineNames = []string{EngineVLLM: "vllm", EngineSGLang: "sglang"}

// String returns the engine's name.
func (e Engine) String() string { return engineNames[e] }

// MarshalText writes an engine's name.
func (e Engine) MarshalText() ([]byte, error) { return []byte(e.String()), nil }

// UnmarshalText reads an engine's name.
func (e *Engine) UnmarshalText(text []byte) error {
	at, err := nameAt(engineNames, text)
	*e = Engine(at)
	return err
}
