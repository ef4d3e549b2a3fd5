package probe

import (
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// Metrics of the LoRA adapters. vLLM's has all in its labels, and its value is the time at
// which they were last so: a page also has the samples of earlier times. Of ranks of one server
// it shows those of the last one to write. SGLang shows how many adapters a batch can have, not
// which are loaded.
const (
	vllmAdapters = "vllm:lora_requests_info"
	sglangSlots  = "sglang:lora_pool_slots_total"
)

var adapterNames = []string{vllmAdapters, sglangSlots}

// Bounds of what an engine shows of its adapters.
const (
	maxAdapterSlots = 1 << 16
	maxAdapterNames = 1024
)

// Adapters returns what an engine shows of its LoRA adapters. shown is false if it serves none.
func (p Page) Adapters() (r policy.AdapterReport, shown bool) {
	var last *dto.Metric
	for _, metric := range p[vllmAdapters].GetMetric() {
		if at := counted(metric.GetGauge().GetValue()); last == nil || at > r.Stamp {
			last, r.Stamp = metric, at
		}
	}
	if last != nil {
		labels := labelsOf(last)
		r.Slots, shown = min(labelNumber(labels, "max_lora"), maxAdapterSlots), true
		// vLLM names adapters of which requests wait or run under both labels.
		for _, list := range []string{labels["running_lora_adapters"], labels["waiting_lora_adapters"]} {
			for _, name := range strings.SplitN(list, ",", maxAdapterNames) {
				if name != "" && !slices.Contains(r.Active, name) {
					r.Active = append(r.Active, name)
				}
			}
		}
	}
	if slots, has := sglangGauge(p[sglangSlots], "", kv.MaxTokens); has {
		for _, n := range slots {
			r.Slots = max(r.Slots, min(int(n), maxAdapterSlots))
		}
		shown = true
	}
	return r, shown
}
