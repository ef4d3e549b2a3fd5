package testkit

import (
	"github.com/alecthomas/kong"

	"kvrouter/internal/tools/engine"
)

// Defaults returns the settings of type T with the defaults of its flags.
func Defaults[T any]() (settings T) {
	if err := kong.ApplyDefaults(&settings); err != nil {
		panic(err) // the tags are wrong
	}
	return settings
}

// Engine returns the engine that Dynamo's mocker simulates, which is the default of the
// flags too: one H100-like worker with 16,384 blocks of 64 tokens.
func Engine() engine.Settings {
	return engine.Settings{Blocks: 16384, BlockSize: 64, MaxSeqs: 256, MaxBatchedTokens: 8192, Timing: engine.DefaultTiming()}
}
