package probe

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// loraPage is of vLLM 0.32 with --max-loras 2: each set of adapters that it has had is a sample.
const loraPage = `# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7954000001e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,legal",waiting_lora_adapters="sql,legal"} 1.7954000009e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="poems",waiting_lora_adapters="poems"} 1.7954000003e+09
vllm:num_requests_running{engine="0",model_name="m"} 2.0
`

// loraPoolPage is of SGLang 0.5.23 with two tensor-parallel ranks.
const loraPoolPage = `# TYPE sglang:lora_pool_slots_used gauge
sglang:lora_pool_slots_used{model_name="m",tp_rank="0"} 3.0
# TYPE sglang:lora_pool_slots_total gauge
sglang:lora_pool_slots_total{model_name="m",tp_rank="0"} 8.0
sglang:lora_pool_slots_total{model_name="m",tp_rank="1"} 8.0
`

func TestAdaptersOfAPage(t *testing.T) {
	many := make([]string, 5000)
	for i := range many {
		many[i] = fmt.Sprint(i)
	}
	sample := func(labels, value string) string {
		return "# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{" + labels + "} " + value + "\n"
	}
	for name, test := range map[string]struct {
		page   string
		shown  bool
		slots  int
		active string // none: not compared
		stamp  float64
	}{
		"vLLM: the newest sample":   {loraPage, true, 2, "sql legal", 1.7954000009e+09},
		"SGLang: the slots":         {loraPoolPage, true, 8, "", 0},
		"no adapters":               {"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n", false, 0, "", 0},
		"an older vLLM's two lists": {sample(`max_lora="4",running_lora_adapters="a",waiting_lora_adapters="b,a"`, "5"), true, 4, "a b", 5},
		"no labels":                 {sample("", "5"), true, 0, "", 5},
		"slots that are no number":  {sample(`max_lora="many"`, "5"), true, 0, "", 5},
		"too many slots":            {sample(`max_lora="2000000000"`, "5"), true, maxAdapterSlots, "", 5},
		"empty names":               {sample(`max_lora="1",running_lora_adapters=",,a,"`, "5"), true, 1, "a", 5},
		"a time that is none":       {sample(`max_lora="1",running_lora_adapters="a"`, "NaN"), true, 1, "a", 0},
		"a time before all":         {sample(`max_lora="1",running_lora_adapters="a"`, "-Inf"), true, 1, "a", 0},
		"thousands of names":        {sample(`max_lora="1",running_lora_adapters="`+strings.Join(many, ",")+`"`, "5"), true, 1, "?", 5},
	} {
		page, err := parsePage(strings.NewReader(test.page), adapterNames, nil, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got, shown := page.Adapters()
		if shown != test.shown || got.Slots != test.slots || got.Stamp != test.stamp || test.active != "?" && strings.Join(got.Active, " ") != test.active {
			t.Errorf("%s: %+v, shown %t", name, got, shown)
		}
		if len(got.Active) > 2*maxAdapterNames || slices.Contains(got.Active, "") {
			t.Errorf("%s: %d names", name, len(got.Active))
		}
	}
}
