package workers

import (
	"fmt"
	"strings"
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
)

func TestWorkerInfoIsBounded(t *testing.T) {
	long := strings.Repeat("é", 1000) // what a worker may call its model
	page := testkit.Scrape(t, NewCollector(nil, func() []Sample {
		return []Sample{
			{Worker: kv.WorkerKey{Worker: 1, Rank: 2}, URL: "http://w", Models: []string{"m", "adapter"}, Role: kv.RolePrefill, Engine: kv.EngineSGLang},
			{Worker: kv.WorkerKey{Worker: 2}, URL: "http://v", Models: []string{"x" + long}},
			{Worker: kv.WorkerKey{Worker: 3}, URL: "http://u", Models: []string{"\xff\xfe"}},
		}
	}))
	for _, want := range []string{
		`kvrouter_worker_info{dp_rank="2",engine="sglang",model="m",role="prefill",url="http://w",worker_id="1"}`,
		fmt.Sprintf(`kvrouter_worker_info{dp_rank="0",engine="vllm",model="x%s",role="both",url="http://v",worker_id="2"}`, strings.Repeat("é", 99)),
		`kvrouter_worker_info{dp_rank="0",engine="vllm",model="",role="both",url="http://u",worker_id="3"}`,
	} {
		if page[want] != 1 {
			t.Errorf("no %s in\n%v", want, page)
		}
	}
}
