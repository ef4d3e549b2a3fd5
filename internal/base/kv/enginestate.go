package kv

// EngineState is what a trainer has done to a worker's engine: a set of bits. Zero: it runs.
type EngineState uint8

// The bits.
const (
	Paused   EngineState = 1 << iota // its scheduler stands still; requests that it takes wait
	Asleep                           // its memory is released, or at least that of its KV cache
	Updating                         // its weights are being replaced
	Stripped                         // other memory than that of its KV cache is released
)

// Rests reports whether the engine computes nothing. An engine whose weights are replaced may go on.
func (s EngineState) Rests() bool { return s&(Paused|Asleep|Stripped) != 0 }

// engineStateNames are the names of the bits, that of the one that says most first.
var engineStateNames = []struct {
	bit  EngineState
	name string
}{{Asleep | Stripped, "asleep"}, {Updating, "updating"}, {Paused, "paused"}}

// String returns the name of the state: running, paused, updating or asleep.
func (s EngineState) String() string {
	for _, n := range engineStateNames {
		if s&n.bit != 0 {
			return n.name
		}
	}
	return "running"
}

// EngineReport is what an engine says about its state, to a question that was asked at some time.
type EngineReport struct {
	Knows   EngineState // the bits that it reports
	State   EngineState
	Version string // of its weights; empty: unknown
}

// EngineChange is what a call does to an engine.
type EngineChange struct {
	Meanwhile EngineState // bits that are set while the call is under way
	Set       EngineState // bits that are set from when it is sent; they are taken back if the call fails
	Clear     EngineState // bits that are cleared once it has succeeded
	Resets    bool        // the prefix cache of the device is empty afterwards
	Version   string      // of the weights afterwards; empty: as before
}

// Any reports whether the call changes anything.
func (c EngineChange) Any() bool { return c != EngineChange{} }

// MaxVersion bounds the version of weights that is kept, bytes.
const MaxVersion = 128
