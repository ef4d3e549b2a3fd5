package simulate

import (
	"fmt"
)

// Settings are the flags of CommandSimulate. It also reads Policy (names
// separated by commas), PolicyKnobs, IndexConfig, BlockSize, Seed and those of MockConfig that
// are the engine's size and timing.
type Settings struct {
	Trace          string            `placeholder:"FILE" help:"Requests to replay: JSON lines in Mooncake's format or of --record, also compressed by gzip."`
	Synthetic      string            `placeholder:"SHAPE" help:"Made-up conversations in place of --trace. chat: groups of them share a system prompt, and each turn's prompt is the one before, its answer and a new message. agentic: runs of agents that call tools, see --agentic-workflows and those after it."`
	SyntheticHints bool              `default:"true" negatable:"" help:"Give the router the hints that requests of --synthetic agentic or of a recording carry: which series each belongs to, how long that will be."`
	Workers        int               `placeholder:"N" help:"Number of simulated workers, 8 unless --prefill-workers and --decode-workers are given; --mock-num-gpu-blocks, --mock-max-num-seqs, --mock-max-num-batched-tokens, --mock-prefill-ms, --mock-decode-ms and --speedup-ratio say what each is like."`
	Concurrency    int               `placeholder:"N" help:"Requests in flight; the next one is sent when one ends. With --synthetic: conversations or workflows, the times between their requests included."`
	Speedup        float64           `placeholder:"FACTOR" help:"Send requests at the trace's own times, divided by this."`
	EventLag       float64           `default:"0" placeholder:"MS" help:"Age of what the router knows of the workers' caches, ms."`
	JSON           bool              `name:"json" help:"Print the results as JSON, one object a policy."`
	Plot           string            `placeholder:"FILE" help:"Also write a page (HTML) with the distribution of the time to first token and the workers' load."`
	Shape          SyntheticSettings `embed:"" prefix:"synthetic-"`
	Agents         AgenticSettings   `embed:"" prefix:"agentic-"`
}

func (s Settings) ValidateSynthetic() error {
	var rate float64
	var flag string
	var shape interface{ validate() error }
	switch s.Synthetic {
	case syntheticChat:
		rate, flag, shape = s.Shape.Rate, "--synthetic-rate N (conversations that begin a second)", s.Shape
	case syntheticAgentic:
		rate, flag, shape = s.Agents.Rate, "--agentic-rate N (workflows that begin a second)", s.Agents
	default:
		return fmt.Errorf("--synthetic %s: it is %s or %s", s.Synthetic, syntheticChat, syntheticAgentic)
	}
	if s.Speedup > 0 || (s.Concurrency > 0) == (rate > 0) {
		return fmt.Errorf("with --synthetic %s give either --concurrency N (of those in flight) or %s", s.Synthetic, flag)
	}
	return shape.validate()
}
