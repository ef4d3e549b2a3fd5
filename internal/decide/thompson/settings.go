package thompson

import (
	"embed"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/textfile"
)

// Settings are the flags of policy thompson.
type Settings struct {
	ThompsonConfig   string   `group:"Policy thompson" placeholder:"FILE" help:"YAML file of parameters, with the keys of the NeMo Agent Toolkit's config.yaml. See docs/thompson.md."`
	ThompsonOverride []string `name:"thompson.override" group:"Policy thompson" sep:"none" placeholder:"KEY=VALUE,..." help:"Parameters that override the file's, such as load_balancing.gpu_penalty_weight=2. Repeatable."`
}

// fixSet are the fixes of the original's defects.
type fixSet struct {
	baseline    bool // compares latencies with those of all workers, not of the same one
	forgetting  bool // fades the evidence of all workers alike
	loadSign    bool // counts load against a worker even where its score is negative
	outstanding bool // counts a series as one request to come, and not against itself
	pinTTL      bool // drops pins of ended series and removed workers
	feedback    bool // counts only failures of the worker, and compares like with like
	coldStart   bool // starts from a prior and a low temperature
}

// fix is a fix by its name in key fixes.
type fix struct {
	name string
	on   *bool
}

// byName lists the fixes.
func (f *fixSet) byName() []fix {
	return []fix{
		{"worker-baseline", &f.baseline}, {"forgetting", &f.forgetting}, {"load-sign", &f.loadSign}, {"outstanding", &f.outstanding},
		{"pin-ttl", &f.pinTTL}, {"feedback", &f.feedback}, {"cold-start", &f.coldStart},
	}
}

// parseFixes reads key fixes: all, none, or names with commas.
func parseFixes(text string) (fixSet, error) {
	var f fixSet
	for name := range strings.SplitSeq(text, ",") {
		name = strings.TrimSpace(name)
		known := text == "none"
		for _, fix := range f.byName() {
			if text == "all" || name == fix.name {
				*fix.on, known = true, true
			}
		}
		if !known {
			return f, fmt.Errorf("fixes %s: %q is none of worker-baseline, forgetting, load-sign, outstanding, pin-ttl, feedback, cold-start; or give all or none by itself", text, name)
		}
	}
	return f, nil
}

// String returns the fixes in the format of key fixes.
func (f fixSet) String() string {
	var names []string
	for _, fix := range f.byName() {
		if *fix.on {
			names = append(names, fix.name)
		}
	}
	switch len(names) {
	case 0:
		return "none"
	case len(f.byName()):
		return "all"
	}
	return strings.Join(names, ",")
}

// Values of infrastructure.router_type. The last three are those of the Toolkit's
// development branch.
const (
	typeKV       = "kv"
	typeKVLoad   = "kv_load" // the lowest KV usage, and nothing is learned
	typeKVOnly   = "kv_only"
	typeBalanced = "kv_load_balanced"
	typeModular  = "kv_thompson"
)

// routerTypes are all values of infrastructure.router_type.
var routerTypes = []string{typeKV, typeKVLoad, typeKVOnly, typeBalanced, typeModular}

// parameters are the parameters of policy thompson, in the order and with
// the meaning of the original's config.yaml.
type parameters struct {
	preset     string
	fixNames   string
	blockSize  int // tokens; 0: not given
	routerType string
	minWorkers int

	affinityBase, affinityReuse, affinityIAT float64
	stickyLoadFloor                          float64
	tsWeight                                 float64
	tempBase, tempMin, tempMax               float64
	switchBase, switchReuse, switchIAT       float64
	queueWeight, gpuWeight                   float64
	outstandingWeight                        float64
	jobGPU, jobQueue                         float64
	tokenScale, prefillWeight                float64
	lambda, v, forgetRate                    float64
	timeout, sweep                           time.Duration
	timeoutReward, emaAlpha                  float64

	traces      bool
	traceDir    string
	traceBuffer int // lines

	balanced    balancedParameters
	modular     modularParameters
	kvLoad      kvLoadParameters
	kvLoadGiven bool // by the file or a flag

	fixes fixSet
}

// presets are the parameters of the Toolkit's files. All are those of components.yaml
// but for what another has.
//
//go:embed presets
var presets embed.FS

// Presets, by the folder of the Toolkit that their file stands in.
const (
	defaultPreset = "optimized"
	basePreset    = "components" // the current file: it has all parameters
)

// presetParameters returns the parameters of one of the Toolkit's files, by the
// folder that it stands in: components/config.yaml or, older,
// optimized/config.yaml.
func presetParameters(name string) (parameters, error) {
	c := parameters{preset: name, fixNames: "all"}
	for _, name := range []string{basePreset, name} {
		data, err := presets.ReadFile("presets/" + name + ".yaml")
		if err == nil {
			err = c.read(data)
		}
		if err != nil {
			return c, fmt.Errorf("preset %s: %w", name, err)
		}
	}
	c.kvLoadGiven = false
	return c, nil
}

// Limits of a file of parameters: its size, bytes, and the entries of its lists and mappings.
const configLimit, configEntries = 1 << 20, 10_000

// parameters returns the parameters of the preset, the file and the flags, where the
// later overrule the earlier.
func (k Settings) parameters() (parameters, error) {
	c, err := k.over(defaultPreset)
	if err == nil && c.preset != defaultPreset {
		return k.over(c.preset)
	}
	return c, err
}

// over returns the parameters of the file and the flags over those of a preset.
func (k Settings) over(preset string) (parameters, error) {
	c, err := presetParameters(preset)
	if err != nil {
		return c, err
	}
	if k.ThompsonConfig != "" {
		data, err := textfile.Read(k.ThompsonConfig, configLimit)
		if err == nil {
			err = textfile.BoundYAML(data, configEntries)
		}
		if err == nil {
			err = c.read(data)
		}
		if err != nil {
			return c, fmt.Errorf("--thompson-config %s: %w", k.ThompsonConfig, err)
		}
	}
	return c, k.override(&c)
}

// Validate checks the settings if thompson is one of policies, a list with commas.
func (k Settings) Validate(policies string, blockSize int) error {
	if !slices.Contains(strings.Split(policies, ","), "thompson") {
		return nil
	}
	c, err := k.parameters()
	if err == nil && c.blockSize != 0 && c.blockSize != blockSize {
		from := "--thompson.override"
		if k.ThompsonConfig != "" {
			from = "--thompson-config " + k.ThompsonConfig
		}
		return fmt.Errorf("%s: infrastructure.block_size is %d, but --block-size is %d: give both the engines' own", from, c.blockSize, blockSize)
	}
	return err
}

// parameter is a key of the file: its destination and its range.
type parameter struct {
	name      string
	into      any     // *float64, *int, *time.Duration (the key is in seconds), *string or *bool
	low, high float64 // of numbers
}

// keys lists all keys.
func (c *parameters) keys() []parameter {
	const most, tiny = 1e6, 1e-6 // far beyond what makes sense, and safe to calculate with
	return []parameter{
		{"preset", &c.preset, 0, 0},
		{"fixes", &c.fixNames, 0, 0},
		{"infrastructure.block_size", &c.blockSize, 1, 1 << 20},
		{"infrastructure.router_type", &c.routerType, 0, 0},
		{"infrastructure.min_workers", &c.minWorkers, 0, most},
		{"affinity.base", &c.affinityBase, 0, most},
		{"affinity.reuse_weight", &c.affinityReuse, 0, most},
		{"affinity.iat_weight", &c.affinityIAT, 0, most},
		{"affinity.sticky_load_floor", &c.stickyLoadFloor, 0, 1},
		{"exploration.base_ts_weight", &c.tsWeight, 0, most},
		{"exploration.temperature.base", &c.tempBase, 0, most},
		{"exploration.temperature.min", &c.tempMin, tiny, most},
		{"exploration.temperature.max", &c.tempMax, tiny, most},
		{"switching_cost.base", &c.switchBase, 0, most},
		{"switching_cost.reuse_penalty", &c.switchReuse, 0, most},
		{"switching_cost.iat_penalty", &c.switchIAT, 0, most},
		{"load_balancing.queue_penalty_weight", &c.queueWeight, 0, most},
		{"load_balancing.gpu_penalty_weight", &c.gpuWeight, 0, most},
		{"load_balancing.outstanding_work_weight", &c.outstandingWeight, 0, most},
		{"load_balancing.job_gpu_coupling_weight", &c.jobGPU, 0, most},
		{"load_balancing.job_queue_coupling_weight", &c.jobQueue, 0, most},
		{"prefill.token_scale", &c.tokenScale, tiny, most},
		{"prefill.weight", &c.prefillWeight, 0, most},
		{"lints.lambda", &c.lambda, tiny, most},
		{"lints.v", &c.v, 0, most},
		{"lints.forget_rate", &c.forgetRate, 0, 1},
		{"feedback.timeout_seconds", &c.timeout, tiny, most},
		{"feedback.sweep_interval_seconds", &c.sweep, 0, most},
		{"feedback.timeout_reward", &c.timeoutReward, 0, 1},
		{"feedback.latency_ema_alpha", &c.emaAlpha, tiny, 1},
		{"debug.traces_enabled", &c.traces, 0, 0},
		{"debug.trace_dir", &c.traceDir, 0, 0},
		{"debug.buffer_size", &c.traceBuffer, 1, most},
		{"kv_load.overlap_score_weight", &c.kvLoad.overlapWeight, 0, most},
		{"kv_load.temperature", &c.kvLoad.temp, 0, most},
		{"kv_load.metrics_scrape_interval", &c.kvLoad.scrape, 0, most},
		{"kv_load_balanced.overlap_score_weight", &c.balanced.overlapWeight, 0, most},
		{"kv_load_balanced.idle_boost", &c.balanced.idleBoost, 0, 1},
		{"kv_load_balanced.temperature", &c.balanced.temp, 0, most},
		{"kv_load_balanced.metrics_scrape_interval", &c.balanced.scrape, 0, most},
		{"kv_thompson.ts_weight", &c.modular.tsWeight, 0, most},
		{"kv_thompson.idle_boost", &c.modular.idleBoost, 0, 1},
		{"kv_thompson.temperature", &c.modular.temp, 0, most},
		{"kv_thompson.queue_penalty_weight", &c.modular.queueWeight, 0, most},
		{"kv_thompson.cold_start_threshold", &c.modular.coldStart, 0, 1},
		{"kv_thompson.metrics_scrape_interval", &c.modular.scrape, 0, most},
		{"kv_thompson.enable_lints", &c.modular.lints, 0, 0},
		{"kv_thompson.enable_affinity", &c.modular.affinity, 0, 0},
		{"kv_thompson.enable_switching_cost", &c.modular.switching, 0, 0},
		{"kv_thompson.enable_full_load", &c.modular.fullLoad, 0, 0},
		{"kv_thompson.enable_adaptive_temp", &c.modular.adaptiveTemp, 0, 0},
		{"kv_thompson.enable_adaptive_explore", &c.modular.adaptiveExplore, 0, 0},
		{"kv_thompson.enable_sticky_floor", &c.modular.stickyFloor, 0, 0},
		{"kv_thompson.lints_weight", &c.modular.lintsWeight, -most, most},
		{"kv_thompson.affinity_base", &c.modular.affinityBase, 0, most},
		{"kv_thompson.affinity_reuse_weight", &c.modular.affinityReuse, 0, most},
		{"kv_thompson.switch_base", &c.modular.switchBase, 0, most},
		{"kv_thompson.switch_reuse", &c.modular.switchReuse, 0, most},
		{"kv_thompson.sticky_load_floor", &c.modular.stickyLoadFloor, 0, 1},
		{"kv_thompson.load_mod_floor", &c.modular.loadFloor, 0, 1},
		{"kv_thompson.adaptive_temp_base", &c.modular.tempBase, 0, most},
	}
}

// read takes over the settings of a file.
func (c *parameters) read(data []byte) error {
	var tree yaml.MapSlice
	if err := yaml.UnmarshalWithOptions(data, &tree, yaml.UseOrderedMap()); err != nil {
		message, _, _ := strings.Cut(yaml.FormatError(err, false, false), "\n")
		return fmt.Errorf("not a YAML map of parameters: %s", message)
	}
	known := c.keys()
	if err := eachLeaf("", tree, func(name string, value any) error {
		key, err := c.find(known, name)
		if err != nil {
			return err
		}
		return key.set(value)
	}); err != nil {
		return err
	}
	return c.check()
}

// find returns the key of that name.
func (c *parameters) find(keys []parameter, name string) (parameter, error) {
	i := slices.IndexFunc(keys, func(k parameter) bool { return k.name == name })
	if i < 0 {
		var names []string
		for _, k := range keys {
			names = append(names, k.name)
		}
		return parameter{}, settings.UnknownKey(name, names)
	}
	c.kvLoadGiven = c.kvLoadGiven || strings.HasPrefix(name, "kv_load.")
	return keys[i], nil
}

// check checks what parameters must have in common.
func (c *parameters) check() (err error) {
	c.forgetRate = min(max(c.forgetRate, 1e-6), 0.999999)
	if c.fixes, err = parseFixes(c.fixNames); err != nil {
		return err
	}
	switch {
	case c.preset != defaultPreset && c.preset != basePreset:
		return fmt.Errorf("preset %s: give components or optimized", c.preset)
	case !slices.Contains(routerTypes, c.routerType):
		return fmt.Errorf("infrastructure.router_type %s: give one of %s", c.routerType, strings.Join(routerTypes, ", "))
	case c.tempMin > c.tempMax:
		return fmt.Errorf("exploration.temperature.min %v is above max %v", c.tempMin, c.tempMax)
	}
	return nil
}

// eachLeaf calls f with every value of a tree and its dotted name.
func eachLeaf(prefix string, tree yaml.MapSlice, f func(name string, value any) error) error {
	for _, entry := range tree {
		name := prefix + fmt.Sprint(entry.Key)
		var err error
		if branch, is := entry.Value.(yaml.MapSlice); is {
			err = eachLeaf(name+".", branch, f)
		} else {
			err = f(name, entry.Value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (k parameter) set(value any) error {
	switch into := k.into.(type) {
	case *string:
		text, is := value.(string)
		if !is {
			return fmt.Errorf("%s: %v is not a text", k.name, value)
		}
		*into = text
		return nil
	case *bool:
		on, is := value.(bool)
		if !is {
			return fmt.Errorf("%s: give true or false, not %v", k.name, value)
		}
		*into = on
		return nil
	}
	var number float64
	switch n := value.(type) {
	case float64:
		number = n
	case uint64:
		number = float64(n)
	case int64:
		number = float64(n)
	case int:
		number = float64(n)
	default:
		return fmt.Errorf("%s: %v is not a number", k.name, value)
	}
	if !(number >= k.low && number <= k.high) {
		return fmt.Errorf("%s %v: give %g to %g", k.name, number, k.low, k.high)
	}
	switch into := k.into.(type) {
	case *float64:
		*into = number
	case *time.Duration:
		*into = time.Duration(number * float64(time.Second))
	case *int:
		if number != math.Trunc(number) {
			return fmt.Errorf("%s %v: give a whole number", k.name, number)
		}
		*into = int(number)
	}
	return nil
}
