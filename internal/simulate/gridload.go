package simulate

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/alecthomas/kong"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
)

// gridAgents is the first word of a load of made-up agents.
const gridAgents = "agents"

// gridLoad is one load of a grid: the requests and the workers.
type gridLoad struct {
	text  string // as the file has it
	trace string // name of one; empty: the requests are made up
	shape SyntheticSettings
	wants AgenticSettings // with agents
	n     int             // conversations or workflows; 0: the default

	agents      bool
	concurrency int
	speedup     float64
	rate        float64
	seeds       []uint64 // each figure is the mean over them; none: --seed

	workers, prefills int // 0: as the flags say
	cacheBlocks       int // of a worker; 0: as the flags say
	lag               time.Duration
	routers           int
	untold            bool
	tenants           []*tenantGroup // none: there are none

	// Of the tiers below the cache; 0: as the flags say.
	hostBlocks, diskBlocks       int
	hostBandwidth, diskBandwidth float64 // GB/s
	peerBandwidth                float64 // of pulls from other workers
}

// most is the largest number that a load may give, of anything that it counts.
const most = 1 << 20

// parseGridLoad reads a load, which is one line of words: first the name of a trace,
// agents, or gN for chats; then, in any order, a letter or a word with its value.
// traces are the names that are known, and so are those of tenants.
func parseGridLoad(text string, traces []string, tenants map[string][]*tenantGroup) (gridLoad, error) {
	l := gridLoad{text: text, routers: 1}
	if err := cmp.Or(kong.ApplyDefaults(&l.shape), kong.ApplyDefaults(&l.wants)); err != nil {
		return l, err
	}
	words := strings.Fields(text)
	if len(words) == 0 {
		return l, fmt.Errorf("load %q is empty", text)
	}
	keys := l.commonWords()
	for name, groups := range tenants {
		keys["@"+name] = func(value string) error { l.tenants = groups; return nothing(value) }
	}
	switch {
	case words[0] == gridAgents:
		l.agents = true
		maps.Copy(keys, l.agentWords())
		words = words[1:]
	case slices.Contains(traces, words[0]):
		l.trace = words[0]
		keys["x"] = decimal(&l.speedup, 1e-3, 1e3)
		words = words[1:]
	case strings.HasPrefix(words[0], "g") && len(words[0]) > 1 && strings.Trim(words[0][1:], "0123456789") == "":
		maps.Copy(keys, l.chatWords())
	default:
		return l, fmt.Errorf("load %q: its first word is %s, gN (chats of N groups) or the name of a trace: %s", text, gridAgents, strings.Join(traces, ", "))
	}
	seen := map[string]bool{}
	for _, word := range words {
		at := strings.IndexAny(word, "0123456789.")
		if at < 0 {
			at = len(word)
		}
		key, value := word[:at], word[at:]
		set, known := keys[key]
		if !known || seen[key] {
			return l, fmt.Errorf("load %q: %q is unknown or given twice; known are %s", text, word, strings.Join(slices.Sorted(maps.Keys(keys)), ", "))
		}
		seen[key] = true
		if err := set(value); err != nil {
			return l, fmt.Errorf("load %q: %q: %w", text, word, err)
		}
	}
	if seen["w"] && seen["pd"] {
		return l, fmt.Errorf("load %q: the number of workers is missing: add w or pd", text)
	}
	return l, l.validate()
}

// commonWords are those that every load may have.
func (l *gridLoad) commonWords() map[string]func(string) error {
	return map[string]func(string) error{
		"c": whole(&l.concurrency, 1, most),
		"w": whole(&l.workers, 1, 1000),
		"pd": func(value string) error {
			prefill, decode, _ := strings.Cut(value, "+")
			var d int
			if err := cmp.Or(whole(&l.prefills, 1, 500)(prefill), whole(&d, 1, 500)(decode)); err != nil {
				return fmt.Errorf("%w; give pdP+D, the numbers of prefill and decode workers", err)
			}
			l.workers = l.prefills + d
			return nil
		},
		"kv":      whole(&l.cacheBlocks, 1, 1<<24),
		"host":    whole(&l.hostBlocks, 1, 1<<24),
		"hostbw":  decimal(&l.hostBandwidth, 1e-3, 1e6),
		"disk":    whole(&l.diskBlocks, 1, 1<<24),
		"diskbw":  decimal(&l.diskBandwidth, 1e-3, 1e6),
		"peerbw":  decimal(&l.peerBandwidth, 1e-3, 1e6),
		"lag":     span(&l.lag),
		"routers": whole(&l.routers, 1, maxRouters),
		"untold":  func(value string) error { l.untold = true; return nothing(value) },
		"#":       l.readSeeds,
	}
}

// chatWords are those of chats.
func (l *gridLoad) chatWords() map[string]func(string) error {
	s := &l.shape
	return map[string]func(string) error{
		"g": whole(&s.Groups, 1, most), "s": decimal(&s.Skew, 0, 10),
		"p": whole(&s.PrefixTokens, 0, most), "u": decimal(&s.UserTokens, 1, most), "o": decimal(&s.OutputTokens, 1, most),
		"r": decimal(&l.rate, 1e-6, 1e6), "th": span(&s.ThinkTime), "t": decimal(&s.Turns, 1, 1000), "n": whole(&l.n, 1, most),
		"burst": whole(&s.Burst, 1, most), "shifts": whole(&s.Shifts, 1, 1000),
	}
}

// agentWords are those of agents.
func (l *gridLoad) agentWords() map[string]func(string) error {
	s := &l.wants
	return map[string]func(string) error{
		"g": whole(&s.Kinds, 1, most), "s": decimal(&s.Skew, 0, 10),
		"p": whole(&s.PrefixTokens, 0, most), "u": decimal(&s.TaskTokens, 1, most), "o": decimal(&s.OutputTokens, 1, most),
		"r": decimal(&l.rate, 1e-6, 1e6), "n": whole(&l.n, 1, most),
	}
}

// whole sets a number from least to greatest.
func whole(to *int, least, greatest int) func(string) error {
	return func(value string) error {
		n, err := strconv.Atoi(value)
		if err != nil || n < least || n > greatest {
			return fmt.Errorf("give a whole number from %d to %d", least, greatest)
		}
		*to = n
		return nil
	}
}

// decimal sets a number from least to greatest, which need not be whole.
func decimal(to *float64, least, greatest float64) func(string) error {
	return func(value string) error {
		x, err := strconv.ParseFloat(value, 64)
		if err != nil || !(x >= least && x <= greatest) {
			return fmt.Errorf("give a number from %v to %v", least, greatest)
		}
		*to = x
		return nil
	}
}

// span sets a time of at most a day.
func span(to *time.Duration) func(string) error {
	return func(value string) error {
		d, err := time.ParseDuration(value)
		if err != nil || d < 0 || d > 24*time.Hour {
			return fmt.Errorf("give a time such as 2s or 50ms")
		}
		*to = d
		return nil
	}
}

// nothing refuses the value of a word that takes none.
func nothing(value string) error {
	if value != "" {
		return fmt.Errorf("it takes no value")
	}
	return nil
}

// readSeeds reads #1 or #1,2,3.
func (l *gridLoad) readSeeds(value string) error {
	for text := range strings.SplitSeq(value, ",") {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil || len(l.seeds) == 100 {
			return fmt.Errorf("give a seed such as #1, or up to 100 for the mean over them, such as #1,2,3")
		}
		l.seeds = append(l.seeds, seed)
	}
	return nil
}

// validate checks the fields against each other, and fills in the numbers of
// conversations and workflows.
func (l *gridLoad) validate() error {
	timed := max(l.speedup, l.rate)
	if (l.concurrency > 0) == (timed > 0) {
		return fmt.Errorf("load %q: give either c (in flight) or %s", l.text, map[bool]string{true: "x (the arrival times of the trace, divided)", false: "r (arrivals per second)"}[l.trace != ""])
	}
	if l.n == 0 {
		l.n = l.usualNumber()
	}
	if requests := float64(l.n) * l.shape.Turns; l.trace == "" && !l.agents && requests > most {
		return fmt.Errorf("load %q: %d chats of %g turns are %.0f requests, %d at most", l.text, l.n, l.shape.Turns, requests, most)
	}
	l.shape.Conversations, l.shape.Rate = l.n, l.rate
	l.wants.Workflows, l.wants.Rate = l.n, l.rate
	switch {
	case l.trace != "":
		return nil
	case l.agents:
		return l.explain(l.wants.validate())
	}
	return l.explain(l.shape.validate())
}

func (l *gridLoad) explain(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("load %q: %w", l.text, err)
}

// usualNumber is how many conversations or workflows a load has that does not say:
// some 10,000 requests of chats or 300 workflows, and enough that most of them begin
// after others have ended.
func (l *gridLoad) usualNumber() int {
	const requests, workflows = 10_000, 300
	if l.agents {
		return max(workflows, 5*l.concurrency)
	}
	return max(int(math.Ceil(requests/l.shape.Turns)), 2*l.concurrency)
}

// requests makes up the requests of one seed.
func (l *gridLoad) requests(seed uint64, settings engine.Settings) ([]TraceRequest, error) {
	longest := settings.Blocks * settings.BlockSize
	if l.agents {
		return syntheticAgents(l.wants, seed, longest)
	}
	return SyntheticChat(l.shape, seed, longest)
}

// assigned are the requests with the load's tenants, if it has any.
func (l *gridLoad) assigned(requests func() ([]TraceRequest, error), seed uint64) func() ([]TraceRequest, error) {
	if len(l.tenants) == 0 {
		return requests
	}
	return sync.OnceValues(func() ([]TraceRequest, error) {
		all, err := requests()
		if err == nil {
			all = assignTenants(all, l.tenants, seed)
		}
		return all, err
	})
}

// on returns the run of the load with what base says and it does not.
func (l *gridLoad) on(base Simulation, seed uint64) Simulation {
	run := base
	run.Source, run.Seed = l.text, seed
	run.Concurrency, run.Speedup = l.concurrency, cmp.Or(l.speedup, 1)
	if l.workers > 0 {
		run.Workers, run.Prefills = l.workers, l.prefills
	}
	run.Engine.Blocks = cmp.Or(l.cacheBlocks, run.Engine.Blocks)
	run.EventLag = cmp.Or(l.lag, run.EventLag)
	run.Routers = max(run.Routers, l.routers)
	run.UntoldCache = run.UntoldCache || l.untold
	run.Tenants = l.tenants
	run.Tiers = l.tiers(base.Tiers)
	if l.peerBandwidth > 0 {
		run.Peers.Bandwidth, run.Peers.BytesPerToken = l.peerBandwidth, cmp.Or(base.Peers.BytesPerToken, tierBytes)
	}
	return run
}

// tiers returns the tiers below the cache with what base says and the load does not.
func (l *gridLoad) tiers(base []engine.TierSettings) (tiers []engine.TierSettings) {
	for i, given := range []struct {
		blocks    int
		bandwidth float64
	}{{l.hostBlocks, l.hostBandwidth}, {l.diskBlocks, l.diskBandwidth}} {
		t := engine.TierSettings{Tier: kv.LowerTiers[i], Loads: engine.Loads{Bandwidth: tierBandwidths[i], BytesPerToken: tierBytes}}
		for _, b := range base {
			if b.Tier == t.Tier {
				t = b
			}
		}
		t.Blocks = cmp.Or(given.blocks, t.Blocks)
		t.Loads.Bandwidth = cmp.Or(given.bandwidth, t.Loads.Bandwidth)
		if t.Blocks > 0 {
			tiers = append(tiers, t)
		}
	}
	return tiers
}

// Defaults of the tiers of a load for which no flag is set: those of the flags
// host-bandwidth, disk-bandwidth and kv-bytes-per-token of --mock.
var tierBandwidths = [...]float64{25, 2}

const tierBytes = 131072
