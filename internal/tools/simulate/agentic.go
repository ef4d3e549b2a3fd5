package simulate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"kvrouter/internal/prompt/hints"
)

// syntheticAgentic is the value of --synthetic that selects syntheticAgents.
const syntheticAgentic = "agentic"

// AgenticSettings are the flags of a synthetic workload of agents: workflows of
// several runs, one after the other. A run is a loop of calls and tools: the first
// prompt is the prefix of its kind (system prompt and tool definitions) and a task,
// each later one the previous prompt, its answer (a tool call) and the tool's
// result. Means are those of an exponential distribution, that of the runs a
// geometric one.
type AgenticSettings struct {
	Workflows        int           `group:"Synthetic agents" default:"300" least:"1" help:"Number of workflows."`
	Rate             float64       `group:"Synthetic agents" default:"0" placeholder:"N" least:"0" help:"Workflow arrivals per second (Poisson), instead of --concurrency."`
	Runs             float64       `group:"Synthetic agents" default:"2" least:"1" help:"Mean number of agent runs per workflow, at least 1."`
	MinCalls         int           `group:"Synthetic agents" default:"5" least:"1" help:"Minimum number of calls per run; uniform up to --agentic-max-calls."`
	MaxCalls         int           `group:"Synthetic agents" default:"20" help:"Maximum number of calls per run."`
	Kinds            int           `group:"Synthetic agents" default:"6" least:"1" help:"Number of agent kinds; each has its own prefix (system prompt and tool definitions)."`
	Skew             float64       `group:"Synthetic agents" default:"1" least:"0" help:"Zipf exponent of the popularity of kinds: the n-th has a share of 1/n^skew. 0: uniform."`
	PrefixTokens     int           `group:"Synthetic agents" default:"4000" least:"0" help:"Tokens of the prefix of a kind."`
	TaskTokens       float64       `group:"Synthetic agents" default:"300" least:"1" help:"Mean tokens of the task of a run."`
	OutputTokens     float64       `group:"Synthetic agents" default:"80" least:"1" help:"Mean tokens of a tool-call answer."`
	LongOutputTokens float64       `group:"Synthetic agents" default:"600" least:"1" help:"Mean tokens of a long answer."`
	LongShare        float64       `group:"Synthetic agents" default:"0.1" least:"0" help:"Share of long answers, 0 to 1."`
	ResultTokens     float64       `group:"Synthetic agents" default:"500" least:"1" help:"Mean tokens of a tool result."`
	MinLatency       time.Duration `group:"Synthetic agents" default:"50ms" help:"Minimum tool latency, from the end of an answer to the next call; log-uniform up to --agentic-max-latency."`
	MaxLatency       time.Duration `group:"Synthetic agents" default:"2s" help:"Maximum tool latency."`
}

func (s AgenticSettings) validate() error {
	if err := checkLeast("--agentic-", &s); err != nil {
		return err
	}
	switch {
	case s.LongShare > 1:
		return fmt.Errorf("--agentic-long-share %v: give a share from 0 to 1", s.LongShare)
	case s.MaxCalls < s.MinCalls:
		return fmt.Errorf("--agentic-max-calls %d: give at least --agentic-min-calls, which is %d", s.MaxCalls, s.MinCalls)
	}
	return checkLatencies("--agentic-", s.MinLatency, s.MaxLatency)
}

// syntheticAgents makes up the workflows of the settings: the first calls, in the
// order in which the workflows begin, with the others behind them. One seed always
// gives the same. Each call has the hints of a client that knows its run: an id of
// the run, the number of its calls, and how long its answers and its tools take. A
// run ends before a call whose prompt and answer are more than longest tokens; it
// fails if that is the first one.
func syntheticAgents(settings AgenticSettings, seed uint64, longest int) ([]TraceRequest, error) {
	random := rand.New(rand.NewPCG(seed, 2))
	popularity := zipfShares(settings.Kinds, settings.Skew)
	requests := make([]TraceRequest, 0, settings.Workflows)
	var arrival time.Duration
	runs := 0
	for i := range settings.Workflows {
		gap := random.ExpFloat64() // also where it is not needed, so that the workflows do not depend on the rate
		if settings.Rate > 0 && i > 0 {
			arrival += time.Duration(gap / settings.Rate * float64(time.Second))
		}
		var calls []TraceRequest
		for more := true; more; more = random.Float64()*settings.Runs >= 1 {
			kind, _ := slices.BinarySearch(popularity, random.Float64())
			run := settings.run(random, longest)
			if len(run) == 0 {
				return nil, fmt.Errorf("a run of workflow %d: prefix, task and answer do not fit the KV cache of %d tokens; give less "+
					"--agentic-prefix-tokens, -task-tokens or -output-tokens, or more --mock num-gpu-blocks", i, longest)
			}
			hashes := syntheticHashes(kind, settings.Kinds+runs, settings.PrefixTokens, run[len(run)-1].known)
			hints := agentHints(runs, run)
			for k := range run {
				run[k].Hashes, run[k].Part, run[k].Hints = hashes, syntheticPart, hints
			}
			calls = append(calls, run...)
			runs++
		}
		for k := range calls[1:] {
			calls[k].Next = &calls[k+1]
		}
		calls[0].Arrival = arrival
		requests = append(requests, calls[0])
	}
	return requests, nil
}

// run draws the sizes of one run's calls and how long its tools take.
func (s AgenticSettings) run(random *rand.Rand, longest int) (calls []TraceRequest) {
	prompt := s.PrefixTokens + tokensAround(random, s.TaskTokens)
	for range s.MinCalls + random.IntN(s.MaxCalls-s.MinCalls+1) {
		mean := s.OutputTokens
		if random.Float64() < s.LongShare {
			mean = s.LongOutputTokens
		}
		output := tokensAround(random, mean)
		if prompt+output > longest {
			break
		}
		latency := logUniform(random, float64(s.MinLatency), float64(s.MaxLatency))
		calls = append(calls, TraceRequest{Prompt: prompt, Output: output, Think: time.Duration(latency), known: prompt + output})
		prompt += output + tokensAround(random, s.ResultTokens)
	}
	return calls
}

// agentHints says of a run what its client knows.
func agentHints(number int, run []TraceRequest) hints.Prefix {
	output, latency := 0, time.Duration(0)
	for i := range run {
		output += run[i].Output
		latency += run[i].Think
	}
	calls := float64(len(run))
	return hints.Prefix{
		ID: fmt.Sprintf("run-%d", number), Total: len(run),
		OSL: hints.OSLBounds.Level(float64(output) / calls), IAT: hints.IATBounds.Level(milliseconds(latency) / calls),
	}
}
