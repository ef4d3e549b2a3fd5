package simulate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/alecthomas/kong"
)

// syntheticChat is the value of --synthetic that selects SyntheticChat.
const syntheticChat = "chat"

// SyntheticSettings are the flags of a synthetic workload: conversations whose
// first prompt is the prefix of their group and a user message, each later one the
// previous prompt, its answer and a new message. Means are those of an exponential
// distribution, that of the turns a geometric one.
type SyntheticSettings struct {
	Conversations int           `group:"Synthetic conversations" default:"1000" least:"1" help:"Number of conversations."`
	Rate          float64       `group:"Synthetic conversations" default:"0" placeholder:"N" least:"0" help:"Conversation arrivals per second (Poisson), instead of --concurrency."`
	Turns         float64       `group:"Synthetic conversations" default:"5" least:"1" help:"Mean number of turns per conversation, at least 1."`
	ThinkTime     time.Duration `group:"Synthetic conversations" default:"10s" least:"0" help:"Mean time from the end of an answer to the next turn."`
	Groups        int           `group:"Synthetic conversations" default:"50" least:"1" help:"Number of conversation groups; each has its own prefix (system prompt)."`
	Skew          float64       `group:"Synthetic conversations" default:"1" least:"0" help:"Zipf exponent of the popularity of groups: the n-th has a share of 1/n^skew. 0: uniform."`
	PrefixTokens  int           `group:"Synthetic conversations" default:"2000" least:"0" help:"Tokens of the prefix of a group."`
	UserTokens    float64       `group:"Synthetic conversations" default:"200" least:"1" help:"Mean tokens of a user message."`
	OutputTokens  float64       `group:"Synthetic conversations" default:"200" least:"1" help:"Mean tokens of an answer."`
	Adapters      int           `group:"Synthetic conversations" default:"0" placeholder:"N" least:"0" help:"Number of LoRA adapters; group i uses adapter i modulo N, and --mock max-loras of them are loaded on a worker at a time. 0: none."`
	Shifts        int           `group:"Synthetic conversations" default:"0" least:"0" help:"Number of times, evenly spread over the run, that all groups are replaced by new ones."`
	Burst         int           `group:"Synthetic conversations" default:"0" placeholder:"N" least:"0" help:"Number of conversations of one new group that begin at once in the middle of the run, regardless of --concurrency; included in --synthetic-conversations."`
}

func (s SyntheticSettings) validate() error {
	if s.Burst > s.Conversations/2 {
		return fmt.Errorf("--synthetic-burst %d: give at most half of the %d conversations", s.Burst, s.Conversations)
	}
	return checkLeast("--synthetic-", &s)
}

// checkLeast refuses a setting that is below the least of its tag, or no finite number.
func checkLeast(prefix string, settings any) error {
	parser, err := kong.New(settings, kong.NoDefaultHelp())
	if err != nil {
		return err
	}
	for _, flag := range parser.Model.Flags {
		value := flag.Target.Convert(reflect.TypeFor[float64]()).Float()
		if least, err := strconv.ParseFloat(flag.Tag.Get("least"), 64); err == nil && (!(value >= least) || math.IsInf(value, 1)) {
			return fmt.Errorf("%s%s %v: give at least %v", prefix, flag.Name, flag.Target, least)
		}
	}
	return nil
}

// checkLatencies refuses times that are no span.
func checkLatencies(prefix string, least, most time.Duration) error {
	if least <= 0 || most < least {
		return fmt.Errorf("%[1]smin-latency %[2]v, %[1]smax-latency %[3]v: give more than 0, the shorter one first", prefix, least, most)
	}
	return nil
}

// tokensAround draws a number of tokens with that mean, at least 1.
func tokensAround(random *rand.Rand, mean float64) int {
	return max(1, int(math.Round(random.ExpFloat64()*mean)))
}

// logUniform draws a number from least to most whose logarithm is uniform.
func logUniform(random *rand.Rand, least, most float64) float64 {
	return least * math.Pow(most/least, random.Float64())
}

// syntheticPart is the number of tokens that one hash of a synthetic prompt stands for; a
// prefix is shared in whole parts.
const syntheticPart = 16

// SyntheticChat generates the conversations of the settings: their first turns in
// the order of their start, each linked to its later turns. A seed always gives the
// same result. A conversation ends before a turn whose prompt and answer exceed
// longest tokens; if that is the first turn, SyntheticChat fails.
func SyntheticChat(settings SyntheticSettings, seed uint64, longest int) ([]TraceRequest, error) {
	random := rand.New(rand.NewPCG(seed, 1))
	popularity := zipfShares(settings.Groups, settings.Skew)
	requests := make([]TraceRequest, 0, settings.Conversations)
	owners := settings.Groups * (settings.Shifts + 1) // of hashes: the groups, and then the conversations
	var arrival time.Duration
	for i := range settings.Conversations {
		middle := settings.Conversations / 2
		burst := i >= middle && i < middle+settings.Burst
		atOnce := burst && i > middle
		gap := random.ExpFloat64() // also where it is not needed, so that the conversations do not depend on the rate
		if settings.Rate > 0 && i > 0 && !atOnce {
			arrival += time.Duration(gap / settings.Rate * float64(time.Second))
		}
		group, _ := slices.BinarySearch(popularity, random.Float64())
		group += settings.Groups * (i * (settings.Shifts + 1) / settings.Conversations)
		if burst {
			group = owners + settings.Conversations
		}
		turns := settings.turns(random, longest)
		if len(turns) == 0 {
			return nil, fmt.Errorf("conversation %d of prefix, user message and answer does not fit the KV cache of %d tokens; give less "+
				"--synthetic-prefix-tokens, -user-tokens or -output-tokens, or more --mock num-gpu-blocks", i, longest)
		}
		last := turns[len(turns)-1]
		hashes := syntheticHashes(group, owners+i, settings.PrefixTokens, last.known)
		for k := range turns {
			turns[k].Hashes, turns[k].Part = hashes, syntheticPart
			if settings.Adapters > 0 {
				turns[k].Adapter = fmt.Sprintf("adapter-%d", group%settings.Adapters)
			}
			if k > 0 {
				turns[k-1].Next = &turns[k]
			}
		}
		turns[0].Arrival, turns[0].AtOnce = arrival, atOnce
		requests = append(requests, turns[0])
	}
	return requests, nil
}

// turns draws the sizes and think times of one conversation.
func (s SyntheticSettings) turns(random *rand.Rand, longest int) (turns []TraceRequest) {
	known := s.PrefixTokens
	for {
		turn := TraceRequest{
			Prompt: known + tokensAround(random, s.UserTokens), Output: tokensAround(random, s.OutputTokens),
			Think: time.Duration(random.ExpFloat64() * float64(s.ThinkTime)),
		}
		known = turn.Prompt + turn.Output
		turn.known = known
		if known > longest {
			return turns
		}
		turns = append(turns, turn)
		if random.Float64()*s.Turns < 1 {
			return turns
		}
	}
}

// zipfShares returns for each of n groups the share of those up to and including
// it, the most popular first, the last being 1.
func zipfShares(n int, skew float64) []float64 {
	shares := make([]float64, n)
	sum := 0.0
	for i := range shares {
		sum += math.Pow(float64(i+1), -skew)
		shares[i] = sum
	}
	for i := range shares {
		shares[i] /= sum
	}
	return shares
}

// syntheticHashes returns the hashes of a conversation's parts: those inside the
// prefix are its group's, the others its own. Groups and conversations must have
// different numbers.
func syntheticHashes(group, conversation, prefix, tokens int) []uint64 {
	hashes := make([]uint64, (tokens+syntheticPart-1)/syntheticPart)
	for i := range hashes {
		owner := conversation
		if (i+1)*syntheticPart <= prefix {
			owner = group
		}
		hashes[i] = uint64(owner)<<32 | uint64(i)
	}
	return hashes
}
