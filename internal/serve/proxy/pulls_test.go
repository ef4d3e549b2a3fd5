package proxy

import (
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
)

// TestTheSourceOfAPullIsToldAsVLLMReadsIt: kv_transfer_params.remote_kv_source with an id
// of its own for each attempt, and the port of the source's rank.
func TestTheSourceOfAPullIsToldAsVLLMReadsIt(t *testing.T) {
	source := kv.Target{Key: kv.WorkerKey{Worker: 3, Rank: 2}, Disagg: kv.Disagg{P2P: kv.Bootstrap{Host: "10.0.0.7", Port: 5710}}}
	u := &sending{Upstream: &Upstream{RequestID: "r\"1"}}
	params := gjson.Parse(pullParams(u, &router.Decision{Source: &source})).Get("remote_kv_source")
	if params.Get("remote_host").Str != "10.0.0.7" || params.Get("remote_port").Int() != 5712 || !strings.HasPrefix(params.Get("kv_request_id").Str, "r\"1-") || len(params.Map()) != 3 {
		t.Errorf("%s", params.Raw)
	}
	if again := pullParams(u, &router.Decision{Source: &source}); gjson.Get(again, "remote_kv_source.kv_request_id").Str == params.Get("kv_request_id").Str {
		t.Error("two attempts have one id")
	}
	if none := pullParams(u, &router.Decision{}); none != "" {
		t.Errorf("without a source: %s", none)
	}
	u.Gateway = new(Gateway)
	if none := pullParams(u, &router.Decision{Source: &source}); none != "" {
		t.Errorf("a gateway's sidecar writes them, not we: %s", none)
	}
}

func TestRequestsThatCannotPull(t *testing.T) {
	for _, test := range []struct {
		route, body string
		want        bool
	}{
		{chatRoute, `{"messages":[]}`, true},
		{completionRoute, `{"prompt":"a"}`, true},
		{ResponsesRoute, `{"input":"a"}`, false},
		{chatRoute, `{"kv_transfer_params":{"do_remote_prefill":true}}`, false},
		{chatRoute, `{"kv_transfer_params":null}`, true},
		{completionRoute, `{"prompt":"a","prompt_logprobs":1}`, false},
		{completionRoute, `{"prompt":"a","n":2}`, false},
	} {
		body, ok := jsonbody.Parse([]byte(test.body))
		if !ok {
			t.Fatal("no JSON")
		}
		if got := Pulls(test.route, body); got != test.want {
			t.Errorf("%s %s: %v", test.route, test.body, got)
		}
	}
}
