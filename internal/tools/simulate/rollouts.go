package simulate

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// syntheticRollouts is the value of --synthetic that selects rolloutStep.
const syntheticRollouts = "rollouts"

// RolloutSettings are the flags of a synthetic step of RL training: of each prompt several trajectories are sampled. A
// trajectory is a loop of answers and observations of its environment: each prompt is the previous one, its answer and
// an observation. Means are those of an exponential distribution. The number of turns is log-uniform, so that a few
// trajectories are far longer than most.
type RolloutSettings struct {
	Prompts           int           `group:"Synthetic rollouts" default:"32" least:"1" help:"Number of prompts of the step."`
	Samples           int           `group:"Synthetic rollouts" default:"8" least:"1" help:"Number of trajectories of each prompt; they share the prompt."`
	MinTurns          int           `group:"Synthetic rollouts" default:"10" least:"1" help:"Minimum number of turns of a trajectory; log-uniform up to --rollouts-max-turns."`
	MaxTurns          int           `group:"Synthetic rollouts" default:"100" help:"Maximum number of turns of a trajectory."`
	PromptTokens      float64       `group:"Synthetic rollouts" default:"2000" least:"1" help:"Mean tokens of a prompt."`
	OutputTokens      float64       `group:"Synthetic rollouts" default:"150" least:"1" help:"Mean tokens of an answer."`
	ObservationTokens float64       `group:"Synthetic rollouts" default:"200" least:"1" help:"Mean tokens of an observation."`
	MinLatency        time.Duration `group:"Synthetic rollouts" default:"100ms" help:"Minimum time of the environment, from the end of an answer to the next turn; log-uniform up to --rollouts-max-latency."`
	MaxLatency        time.Duration `group:"Synthetic rollouts" default:"3s" help:"Maximum time of the environment."`
}

func (s RolloutSettings) validate() error {
	if err := checkLeast("--rollouts-", &s); err != nil {
		return err
	}
	if s.MaxTurns < s.MinTurns {
		return fmt.Errorf("--rollouts-max-turns %d: give at least --rollouts-min-turns, which is %d", s.MaxTurns, s.MinTurns)
	}
	return checkLatencies("--rollouts-", s.MinLatency, s.MaxLatency)
}

// rolloutStep makes up the trajectories of a step: the first turn of each, with the others behind it, those of one
// prompt after each other. One seed always gives the same. Each has an id. A trajectory ends before a turn whose prompt
// and answer are more than longest tokens; the step fails if that is the first one.
func rolloutStep(settings RolloutSettings, seed uint64, longest int) ([]TraceRequest, error) {
	random := rand.New(rand.NewPCG(seed, 8))
	requests := make([]TraceRequest, 0, settings.Prompts*settings.Samples)
	for prompt := range settings.Prompts {
		length := tokensAround(random, settings.PromptTokens)
		for range settings.Samples {
			number := len(requests)
			turns := settings.turns(random, length, longest)
			if len(turns) == 0 {
				return nil, fmt.Errorf("prompt %d of %d tokens and an answer do not fit the KV cache of %d tokens; give less "+
					"--rollouts-prompt-tokens or -output-tokens, or more --mock num-gpu-blocks", prompt, length, longest)
			}
			hashes := syntheticHashes(prompt, settings.Prompts+number, length, turns[len(turns)-1].known)
			for k := range turns {
				turns[k].Hashes, turns[k].Part, turns[k].Hints = hashes, syntheticPart, hints.Prefix{ID: fmt.Sprintf("trajectory-%d", number)}
				if k > 0 {
					turns[k-1].Next = &turns[k]
				}
			}
			requests = append(requests, turns[0])
		}
	}
	return requests, nil
}

// turns draws the sizes of a trajectory's turns and how long its environment takes.
func (s RolloutSettings) turns(random *rand.Rand, prompt, longest int) (turns []TraceRequest) {
	for range int(math.Round(logUniform(random, float64(s.MinTurns), float64(s.MaxTurns)))) {
		output := tokensAround(random, s.OutputTokens)
		if prompt+output > longest {
			break
		}
		latency := logUniform(random, float64(s.MinLatency), float64(s.MaxLatency))
		turns = append(turns, TraceRequest{Prompt: prompt, Output: output, Think: time.Duration(latency), known: prompt + output})
		prompt += output + tokensAround(random, s.ObservationTokens)
	}
	return turns
}

// Names of policies that only simulations have: what routers of trainers do. They know series of requests, as
// trajectories are, by their hints.
const (
	// StickyLeastLoaded sends a series to the worker with the fewest requests in flight when it began: prime-rl's default.
	StickyLeastLoaded = "sticky-least-loaded"
	// ConsistentHash sends it where the hash of its id says, as vllm-router's consistent_hash does, whatever the load.
	ConsistentHash = "consistent-hash"
)

type stickyLeastLoaded struct{ at map[string]kv.WorkerKey }

func (stickyLeastLoaded) Traits() policy.Traits { return policy.Traits{} }

func (s stickyLeastLoaded) Choose(q policy.Query, candidates []policy.Candidate, random *rand.Rand) int {
	if key, known := s.at[q.Prefix.ID]; known && q.Prefix.ID != "" {
		for i := range candidates {
			if candidates[i].Target.Key == key {
				return i
			}
		}
	}
	at := policy.Best(candidates, random, func(c *policy.Candidate) float64 { return -float64(c.Load.InFlight) })
	s.at[q.Prefix.ID] = candidates[at].Target.Key
	return at
}

type consistentHash struct{}

func (consistentHash) Traits() policy.Traits { return policy.Traits{} }

// Choose takes the worker with the highest hash of itself and the series.
func (consistentHash) Choose(q policy.Query, candidates []policy.Candidate, _ *rand.Rand) int {
	best, most := 0, uint64(0)
	for i := range candidates {
		h := fnv.New64a()
		fmt.Fprint(h, q.Prefix.ID, "/", candidates[i].Target.Key.Worker)
		if sum := h.Sum64() * 0x9e3779b97f4a7c15; i == 0 || sum > most { // FNV's high bits are poor
			best, most = i, sum
		}
	}
	return best
}
