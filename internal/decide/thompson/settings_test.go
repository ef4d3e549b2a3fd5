package thompson

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

func TestFixesByName(t *testing.T) {
	for text, want := range map[string]fixSet{
		"none":                    {},
		"load-sign":               {loadSign: true},
		" pin-ttl , feedback":     {pinTTL: true, feedback: true},
		"worker-baseline":         {baseline: true},
		"forgetting,cold-start":   {forgetting: true, coldStart: true},
		"outstanding,outstanding": {outstanding: true},
		"all":                     {true, true, true, true, true, true, true},
		"cold-start,pin-ttl":      {coldStart: true, pinTTL: true},
	} {
		got, err := parseFixes(text)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
		if again, err := parseFixes(got.String()); err != nil || again != got {
			t.Errorf("%q is written %q, which is read as %+v, %v", text, got, again, err)
		}
	}
	for _, text := range []string{"", "All", "none,feedback", "a", "load-sign,"} {
		if got, err := parseFixes(text); err == nil {
			t.Errorf("%q is read as %v", text, got)
		}
	}
}

func TestConfigTakesTheOriginalsKeys(t *testing.T) {
	c := defaultParameters()
	if err := c.read(nil); err != nil || c != defaultParameters() {
		t.Errorf("an empty file: %+v, %v", c, err)
	}
	err := c.read([]byte(`
infrastructure: {block_size: 32, router_type: kv_load, min_workers: 4}
affinity:
  base: 0.5
  reuse_weight: 1
exploration:
  temperature: {min: 0.2}
feedback: {timeout_seconds: 1.5}
lints: {forget_rate: 1}
debug: {traces_enabled: true, trace_dir: /x, buffer_size: 7}
`))
	want := defaultParameters()
	want.blockSize, want.routerType, want.affinityBase, want.affinityReuse, want.tempMin = 32, typeKVLoad, 0.5, 1, 0.2
	want.minWorkers = 4
	want.timeout, want.forgetRate, want.traces, want.traceDir, want.traceBuffer = 1500*time.Millisecond, 0.999999, true, "/x", 7
	if err != nil || c != want {
		t.Errorf("%v\n%+v, want\n%+v", err, c, want)
	}
}

func TestTheDefaultPresetHasEveryKey(t *testing.T) {
	data, err := presets.ReadFile("presets/components.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var tree yaml.MapSlice
	if err := yaml.UnmarshalWithOptions(data, &tree, yaml.UseOrderedMap()); err != nil {
		t.Fatal(err)
	}
	given := []string{"infrastructure.block_size", "preset", "fixes"} // none by default, or not the Toolkit's
	_ = eachLeaf("", tree, func(name string, _ any) error {
		given = append(given, name)
		return nil
	})
	for _, key := range new(parameters).keys() {
		if !slices.Contains(given, key.name) {
			t.Errorf("%s has no value", key.name)
		}
	}
}

func TestConfigErrorsNameTheKey(t *testing.T) {
	for file, want := range map[string][]string{
		"affinity: {base: -1}":                 {"affinity.base -1", "give 0 to"},
		"affinity: {base: .nan}":               {"affinity.base NaN"},
		"affinity: {base: .inf}":               {"affinity.base +Inf"},
		"affinity: {base: much}":               {"affinity.base", "much is not a number"},
		"affinity: 3":                          {`"affinity"`},
		"prefill: {token_scale: 0}":            {"prefill.token_scale 0"},
		"exploration: {temperature: {min: 3}}": {"exploration.temperature.min 3", "above max 2"},
		"exploration: {base_ts_weigth: 3}":     {`"exploration.base_ts_weigth"`, `"exploration.base_ts_weight"`},
		"infrastructure: {router_type: rr}":    {"infrastructure.router_type rr", "kv_load"},
		"infrastructure: {router_type: 1}":     {"infrastructure.router_type", "not a text"},
		"infrastructure: {block_size: 1.5}":    {"infrastructure.block_size 1.5", "whole"},
		"infrastructure: {min_workers: -1}":    {"infrastructure.min_workers -1"},
		"debug: {traces_enabled: 1}":           {"debug.traces_enabled", "true or false"},
		"feedback: {timeout_reward: 1.1}":      {"feedback.timeout_reward 1.1", "0 to 1"},
		"lints: {v: }":                         {"lints.v", "not a number"},
		"- 1":                                  {"not a YAML map"},
		"{":                                    {"not a YAML map"},
		"affinity: {base: 1, base: 2}":         {"base"},
	} {
		c := defaultParameters()
		err := c.read([]byte(file))
		if err == nil {
			t.Errorf("%q is taken", file)
			continue
		}
		for _, part := range want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q: %v, want %s in it", file, err, part)
			}
		}
	}
}

// defaultParameters returns the parameters of the Toolkit's current file, of which the recorded decisions are.
func defaultParameters() parameters {
	c, err := presetParameters(basePreset)
	if err != nil {
		panic(err)
	}
	return c
}
