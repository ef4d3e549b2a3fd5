package main

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
)

// SimulateSettings are the flags of CommandSimulate. It also reads Policy (names
// separated by commas), PolicyKnobs, IndexConfig, BlockSize, Seed and those of MockConfig that
// are the engine's size and timing.
type SimulateSettings struct {
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

// simulation has what all runs of CommandSimulate have in common.
func (c *Config) simulation() Simulation {
	return Simulation{
		Knobs: c.PolicyKnobs, Index: c.IndexConfig, Engine: c.SimConfig(c.BlockSize), Workers: c.simulatedWorkers(), Prefills: c.PrefillWorkers,
		Handover: c.Handover(), LeastUncached: c.DisaggMinUncachedTokens, Seed: c.Seed,
	}
}

// simulatedWorkers is how many workers there are of all roles.
func (c *Config) simulatedWorkers() int {
	const usual = 8
	return cmp.Or(c.PrefillWorkers+c.DecodeWorkers, c.Simulate.Workers, usual)
}

func (c *Config) validateSimulate() error {
	if err := c.ThompsonKnobs.validate(c.Policy, c.BlockSize); err != nil {
		return err
	}
	for name := range strings.SplitSeq(c.Policy, ",") {
		if _, err := NewPolicyWith(name, c.PolicyKnobs); err != nil {
			return fmt.Errorf("--policy: %w", err)
		}
	}
	if err := c.IndexConfig.validate(strings.Split(c.Policy, ",")...); err != nil {
		return err
	}
	if err := c.DisaggKnobs.validate(); err != nil {
		return err
	}
	if c.RouterKnobs != DefaultRouterKnobs() {
		return errors.New("simulate knows neither the --router-track and --router-queue flags nor the --active thresholds: leave them out")
	}
	s := c.Simulate
	workers := c.simulatedWorkers()
	switch {
	case s.Workers != 0 && c.PrefillWorkers+c.DecodeWorkers != 0:
		return errors.New("give either --workers or --prefill-workers and --decode-workers")
	case (c.PrefillWorkers == 0) != (c.DecodeWorkers == 0) || c.PrefillWorkers < 0 || c.DecodeWorkers < 0:
		return fmt.Errorf("--prefill-workers %d and --decode-workers %d: give at least 1 of each, or neither", c.PrefillWorkers, c.DecodeWorkers)
	case c.ThompsonState != "" || c.ThompsonTraces != "":
		return errors.New("simulate learns anew for each policy and writes no traces of it: leave out --thompson-state and --thompson-traces")
	case (s.Trace == "") == (s.Synthetic == ""):
		return errors.New("give either --trace FILE, such as testdata/traces/conversation_trace.jsonl.gz, or --synthetic chat or agentic")
	case c.EnforceDisagg:
		return errors.New("--enforce-disagg: simulated workers do not fail, leave it out")
	case workers < 1 || workers > 1000:
		return fmt.Errorf("%d workers: give 1 to 1000", workers)
	case c.BlockSize < 1:
		return errors.New("--block-size must be more than 0")
	case s.Concurrency < 0 || !(s.Speedup >= 0) || !(s.EventLag >= 0):
		return errors.New("--concurrency, --speedup and --event-lag cannot be negative")
	case c.SpeedupRatio == 0:
		return errors.New("--speedup-ratio 0: virtual time needs engines that take some; give more than 0")
	}
	if err := c.MockConfig.validate(workers); err != nil {
		return err
	}
	if s.Synthetic != "" {
		return s.validateSynthetic()
	}
	if (s.Concurrency > 0) == (s.Speedup > 0) {
		return errors.New("give either --concurrency N (requests in flight) or --speedup FACTOR (the trace's own times, divided)")
	}
	return nil
}

func (s SimulateSettings) validateSynthetic() error {
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
