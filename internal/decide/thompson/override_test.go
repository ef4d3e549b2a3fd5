package thompson

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// presetFiles are the keys and values of the Toolkit's files by their folder;
// development is components/config.yaml of its development branch.
var presetFiles = map[string]string{
	"optimized": `
infrastructure: {block_size: 64, router_type: kv, min_workers: 1}
affinity: {base: 0.30, reuse_weight: 0.15, iat_weight: 0.20, sticky_load_floor: 0.70}
exploration: {base_ts_weight: 0.10, temperature: {base: 1.0, min: 0.15, max: 2.0}}
switching_cost: {base: 0.20, reuse_penalty: 0.08, iat_penalty: 0.05}
load_balancing: {queue_penalty_weight: 0.50, gpu_penalty_weight: 1.00, outstanding_work_weight: 0.45, job_gpu_coupling_weight: 0.40, job_queue_coupling_weight: 0.20}
prefill: {token_scale: 1024.0, weight: 1.0}
lints: {lambda: 1.0, v: 0.25, forget_rate: 0.995}
feedback: {timeout_seconds: 120.0, sweep_interval_seconds: 5.0, timeout_reward: 0.0, latency_ema_alpha: 0.2}
debug: {traces_enabled: false, trace_dir: /tmp/dynamo_router_traces, buffer_size: 2000}
`,
	"components": `
infrastructure: {block_size: 16, router_type: kv, min_workers: 1}
affinity: {base: 0.30, reuse_weight: 0.08, iat_weight: 0.20, sticky_load_floor: 0.01}
exploration: {base_ts_weight: 0.10, temperature: {base: 1.0, min: 0.15, max: 2.0}}
switching_cost: {base: 0.10, reuse_penalty: 0.04, iat_penalty: 0.03}
load_balancing: {queue_penalty_weight: 1.50, gpu_penalty_weight: 1.00, outstanding_work_weight: 0.45, job_gpu_coupling_weight: 0.40, job_queue_coupling_weight: 0.20}
prefill: {token_scale: 1024.0, weight: 1.0}
lints: {lambda: 1.0, v: 0.25, forget_rate: 0.995}
feedback: {timeout_seconds: 120.0, sweep_interval_seconds: 5.0, timeout_reward: 0.0, latency_ema_alpha: 0.2}
debug: {traces_enabled: false, trace_dir: /tmp/dynamo_router_traces, buffer_size: 2000}
`,
	"development": `
infrastructure: {block_size: 16, router_type: kv_thompson, min_workers: 1}
kv_load: {overlap_score_weight: 1.0, temperature: 0.0, metrics_scrape_interval: 0.1}
kv_load_balanced: {overlap_score_weight: 1.0, idle_boost: 0.02, temperature: 0.15, metrics_scrape_interval: 0.1}
kv_thompson:
  {ts_weight: 0.05, idle_boost: 0.02, temperature: 0.30, queue_penalty_weight: 2.5, cold_start_threshold: 0.05, metrics_scrape_interval: 0.01,
  enable_lints: true, enable_affinity: true, enable_switching_cost: true, enable_full_load: false, enable_adaptive_temp: true,
  enable_adaptive_explore: true, enable_sticky_floor: false, lints_weight: -1.0, affinity_base: 0.15, affinity_reuse_weight: 0.02,
  switch_base: 0.04, switch_reuse: 0.01, sticky_load_floor: 0.01, load_mod_floor: 0.1, adaptive_temp_base: 1.0}
`,
}

func presetFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestPresetsAreTheToolkitsFiles(t *testing.T) {
	for preset, kind := range map[string]string{"optimized": "optimized", "components": "components"} {
		want, err := Settings{ThompsonOverride: []string{"fixes=none,preset=" + preset}}.parameters()
		if err != nil {
			t.Fatal(err)
		}
		for _, other := range []string{"components", "optimized"} { // the file alone decides
			got, err := Settings{ThompsonOverride: []string{"fixes=none"}, ThompsonConfig: presetFile(t, "preset: "+other+presetFiles[kind])}.parameters()
			got.preset, got.blockSize = want.preset, want.blockSize
			if err != nil || got != want {
				t.Errorf("%s over %s: %v\n%+v, want\n%+v", kind, other, err, got, want)
			}
		}
	}
	c, err := Settings{ThompsonOverride: []string{"fixes=none"}, ThompsonConfig: presetFile(t, presetFiles["development"])}.parameters()
	if err != nil || c.routerType != typeModular || c.modular != defaultParameters().modular || c.balanced != defaultParameters().balanced {
		t.Errorf("development: %v %+v", err, c)
	}
	if _, err := (Settings{ThompsonOverride: []string{"preset=best"}}).parameters(); err == nil || !strings.Contains(err.Error(), "preset best: give components or optimized") {
		t.Error(err)
	}
}

func TestFlagsOverruleTheFile(t *testing.T) {
	c, err := Settings{
		ThompsonConfig:   presetFile(t, "fixes: all\naffinity: {base: 0.1, iat_weight: 0.7}\nlints: {v: 1}"),
		ThompsonOverride: []string{"affinity.base=0.5,lints.v=0,fixes=load-sign,pin-ttl", "load_balancing.gpu_penalty_weight=1", " exploration.temperature.base = 0 ", "debug.traces_enabled=1", "infrastructure.min_workers=0", "infrastructure.router_type=kv_only", "feedback.timeout_seconds=60"},
	}.parameters()
	if err != nil {
		t.Fatal(err)
	}
	if c.affinityBase != 0.5 || c.affinityIAT != 0.7 || c.v != 0 || c.fixes != (fixSet{loadSign: true, pinTTL: true}) || c.gpuWeight != 1 || c.tempBase != 0 || !c.traces || c.minWorkers != 0 || c.routerType != typeKVOnly || c.timeout.Seconds() != 60 {
		t.Errorf("%+v", c)
	}
}

func TestFlagErrorsNameTheFlag(t *testing.T) {
	for want, k := range map[string]Settings{
		"--thompson.override affinity.base=-1: affinity.base -1":                 {ThompsonOverride: []string{"affinity.base=-1"}},
		"fixes best: \"best\" is none of":                                        {ThompsonOverride: []string{"fixes=best"}},
		"--thompson.override lints.v: give KEY=VALUE":                            {ThompsonOverride: []string{"lints.v"}},
		`--thompson.override lint.v=1: unknown key "lint.v"; did you mean`:       {ThompsonOverride: []string{"lint.v=1"}},
		"--thompson.override lints.v=much: lints.v: much is not a number":        {ThompsonOverride: []string{"lints.v=much"}},
		"--thompson.override lints.v=NaN: lints.v NaN":                           {ThompsonOverride: []string{"lints.v=NaN"}},
		"--thompson.override debug.traces_enabled=2: debug.traces_enabled: give": {ThompsonOverride: []string{"debug.traces_enabled=2"}},
		"the parameters of policy thompson: infrastructure.router_type rr":       {ThompsonOverride: []string{"infrastructure.router_type=rr"}},
		"exploration.temperature.min 3 is above max 2":                           {ThompsonOverride: []string{"exploration.temperature.min=3"}},
	} {
		if _, err := k.parameters(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

func TestWarnsOfParametersWithoutEffect(t *testing.T) {
	for _, c := range []struct {
		fixes, overrides, want string
	}{
		{"all", "", ""},
		{"all", "exploration.temperature.base=1.5 exploration.temperature.max=3", "exploration.temperature.base exploration.temperature.max"},
		{"none", "exploration.temperature.base=1.5 exploration.temperature.max=3 feedback.timeout_reward=0.1", ""},
		{"all", "exploration.temperature.min=0.2 feedback.timeout_seconds=9 lints.v=1", ""},
		{"feedback", "feedback.timeout_reward=0.1 feedback.sweep_interval_seconds=1", "feedback.sweep_interval_seconds feedback.timeout_reward"},
		{"all", "infrastructure.min_workers=3", "infrastructure.min_workers"},
		{"all", "debug.trace_dir=/x", "debug.trace_dir"},
		{"all", "debug.trace_dir=/x debug.traces_enabled=true", ""},
		{"all", "kv_thompson.ts_weight=1 kv_load_balanced.temperature=1", "kv_load_balanced.temperature kv_thompson.ts_weight"},
		{"all", "infrastructure.router_type=kv_load kv_load.overlap_score_weight=1 affinity.base=1 feedback.latency_ema_alpha=1", "kv_load affinity.base feedback.latency_ema_alpha"},
		{"all", "infrastructure.router_type=kv_load kv_load.overlap_score_weight=3", "kv_load"},
		{"all", "kv_load.overlap_score_weight=3", "kv_load.overlap_score_weight"},
		{"all", "infrastructure.router_type=kv_only exploration.temperature.min=0.2 load_balancing.gpu_penalty_weight=2 lints.v=1", "exploration.temperature.min load_balancing.gpu_penalty_weight lints.v"},
		{"all", "infrastructure.router_type=kv_load_balanced exploration.temperature.min=0.2 kv_load_balanced.temperature=1 kv_load_balanced.metrics_scrape_interval=1", "kv_load_balanced.metrics_scrape_interval"},
		{"all", "infrastructure.router_type=kv_thompson lints.v=1 load_balancing.gpu_penalty_weight=2 kv_thompson.temperature=1 kv_thompson.sticky_load_floor=1", "kv_thompson.temperature kv_thompson.sticky_load_floor"},
		{"all", "infrastructure.router_type=kv_thompson kv_thompson.enable_lints=false lints.v=1 kv_thompson.lints_weight=1 kv_thompson.enable_full_load=true kv_thompson.queue_penalty_weight=1 load_balancing.gpu_penalty_weight=2", "lints.v kv_thompson.queue_penalty_weight kv_thompson.lints_weight"},
	} {
		config, err := Settings{ThompsonOverride: append(strings.Fields(c.overrides), "fixes="+c.fixes)}.parameters()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, idle := range config.idle() {
			names = append(names, idle.name)
			if idle.why == "" {
				t.Errorf("%s: no reason", idle.name)
			}
		}
		if got := strings.Join(names, " "); got != c.want {
			t.Errorf("fixes %s, %s: warns of %q, want %q", c.fixes, c.overrides, got, c.want)
		}
	}
}

func TestBlockSizeMustBeTheRouters(t *testing.T) {
	file := presetFile(t, presetFiles["components"])
	for want, k := range map[string]Settings{
		"--thompson-config " + file + ": infrastructure.block_size is 16, but --block-size is 64": {ThompsonConfig: file},
		"--thompson.override: infrastructure.block_size is 32, but --block-size is 64":            {ThompsonOverride: []string{"infrastructure.block_size=32"}},
	} {
		if err := k.Validate("kv,thompson", 64); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if err := k.Validate("kv", 64); err != nil {
			t.Error(err)
		}
	}
}
