package thompson

import (
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"kvrouter/internal/base/settings"
)

// override takes over the parameters of --thompson.override.
func (k Settings) override(c *parameters) error {
	keys := c.keys()
	var pairs []string
	for _, text := range k.ThompsonOverride {
		pairs = append(pairs, settings.Pairs(text)...)
	}
	for _, text := range pairs {
		name, value, is := strings.Cut(text, "=")
		if !is {
			return fmt.Errorf("--thompson.override %s: give KEY=VALUE, such as affinity.reuse_weight=0.2", text)
		}
		key, err := c.find(keys, strings.TrimSpace(name))
		if err == nil {
			err = key.parse(strings.TrimSpace(value))
		}
		if err != nil {
			return fmt.Errorf("--thompson.override %s: %w", text, err)
		}
	}
	if err := c.check(); err != nil {
		return fmt.Errorf("the parameters of policy thompson: %w", err)
	}
	return nil
}

// parse sets the value of a key. Unlike in the original, 1 and 0 are numbers where
// a number is expected.
func (k parameter) parse(text string) error {
	switch k.into.(type) {
	case *string:
		return k.set(text)
	case *bool:
		switch strings.ToLower(text) {
		case "true", "yes", "1":
			return k.set(true)
		case "false", "no", "0":
			return k.set(false)
		}
		return k.set(text)
	}
	number, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return k.set(text)
	}
	return k.set(number)
}

// WarnOfIdle logs the parameters that differ from the preset and have no effect
// with the current router type and fixes.
func (p *Policy) WarnOfIdle(log *slog.Logger) {
	for _, idle := range p.idle() {
		log.Warn("a parameter of policy thompson has no effect", "parameter", idle.name, "why", idle.why)
	}
}

// idleParameter is a parameter without effect.
type idleParameter struct{ name, why string }

// idle returns the parameters for WarnOfIdle.
func (c *parameters) idle() (idle []idleParameter) {
	if c.kvLoadGiven && c.routerType == typeKVLoad {
		idle = append(idle, idleParameter{"kv_load", "router_type kv_load chooses the lowest KV usage; use --policy kv for these parameters"})
	}
	preset, _ := presetParameters(c.preset)
	defaults := preset.keys()
	for i, key := range c.keys() {
		if c.routerType == typeKVLoad && strings.HasPrefix(key.name, "kv_load.") {
			continue // reported above, for all of them
		}
		if why := c.whyIdle(key.name); why != "" && value(key) != value(defaults[i]) {
			idle = append(idle, idleParameter{key.name, why})
		}
	}
	return idle
}

// value is the value of a key.
func value(k parameter) any { return reflect.ValueOf(k.into).Elem().Interface() }

// whyIdle says why a parameter has no effect; empty: it has one.
func (c *parameters) whyIdle(name string) string {
	section, key, _ := strings.Cut(name, ".")
	byType := "infrastructure.router_type is " + c.routerType
	switch {
	case key == "min_workers":
		return "routing starts when the first worker is up"
	case key == "metrics_scrape_interval":
		return "workers push their load"
	case section == "kv_load":
		return "use --policy kv for these parameters"
	case strings.HasPrefix(section, "kv_"):
		if section != c.routerType {
			return byType
		}
		return c.modular.whyIdle(name)
	case name == "debug.trace_dir" && !c.traces:
		return "debug.traces_enabled is false"
	case c.routerType == typeKVLoad && slices.Contains([]string{"prefill", "feedback"}, section):
		return byType
	case c.routerType != typeKV && c.idleByType(section, key):
		return byType
	case c.fixes.coldStart && c.routerType == typeKV && (key == "temperature.base" || key == "temperature.max"):
		return "the fix cold-start uses a third of exploration.temperature.min"
	case c.fixes.feedback && (key == "timeout_reward" || key == "sweep_interval_seconds"):
		return "with the fix feedback, decisions without feedback are not learned from"
	}
	return ""
}

// idleByType reports whether a router type other than kv ignores a parameter.
func (c *parameters) idleByType(section, key string) bool {
	lints := c.routerType == typeModular && c.modular.lints
	load := c.routerType == typeModular && c.modular.fullLoad
	softmax := c.routerType == typeModular || c.routerType == typeBalanced
	switch section {
	case "affinity", "switching_cost":
		return true
	case "exploration":
		return !softmax || key == "base_ts_weight" || key == "temperature.base"
	case "lints":
		return !lints
	case "load_balancing":
		return !lints && !load
	}
	return false
}

// whyIdle names the switch of section kv_thompson that leaves a parameter of it without
// effect; empty: it has one, or is of another section.
func (m *modularParameters) whyIdle(name string) string {
	for _, s := range []struct {
		name   string
		on     bool
		idleIf bool
		keys   []string
	}{
		{"enable_lints", m.lints, false, []string{"lints_weight"}},
		{"enable_affinity", m.affinity, false, []string{"affinity_base", "affinity_reuse_weight"}},
		{"enable_switching_cost", m.switching, false, []string{"switch_base", "switch_reuse"}},
		{"enable_sticky_floor", m.stickyFloor, false, []string{"sticky_load_floor"}},
		{"enable_adaptive_temp", m.adaptiveTemp, false, []string{"adaptive_temp_base"}},
		{"enable_adaptive_temp", m.adaptiveTemp, true, []string{"temperature"}},
		{"enable_full_load", m.fullLoad, true, []string{"queue_penalty_weight"}},
	} {
		key, is := strings.CutPrefix(name, typeModular+".")
		if is && s.on == s.idleIf && slices.Contains(s.keys, key) {
			return fmt.Sprintf("kv_thompson.%s is %t", s.name, s.on)
		}
	}
	return ""
}
