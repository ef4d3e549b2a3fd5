package probe

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
)

func TestSettingsReplaceWhatSGLangReports(t *testing.T) {
	const port = `"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv-events","block_size":64,"replay_endpoint_port_base":5757,"load_endpoint_port_base":5657`
	info := ParseServerInfo([]byte(`{"disaggregation_mode":"null","dp_size":2,"kv_events":{"dp_size":2,` + port + `}}`))
	for _, test := range []struct {
		given                Server
		events, replay, load string
	}{
		{Server{}, "tcp://gpu:5557", "tcp://gpu:5757", "tcp://gpu:5657"},
		{Server{KVEvents: "tcp://nat:1000"}, "tcp://nat:1000", "tcp://gpu:5757", "tcp://gpu:5657"},
		{Server{Replay: "tcp://nat:2000"}, "tcp://gpu:5557", "tcp://nat:2000", "tcp://gpu:5657"},
		{Server{Load: "tcp://nat:3000"}, "tcp://gpu:5557", "tcp://gpu:5757", "tcp://nat:3000"},
	} {
		spec := test.given
		spec.ID, spec.URL = 3, "http://gpu:30000"
		sources := info.Sources(spec)
		second := func(endpoint string) string { return endpoint[:len(endpoint)-1] + string(endpoint[len(endpoint)-1]+1) }
		want := []events.Source{
			{Worker: kv.WorkerKey{Worker: 3}, Endpoint: test.events, Replay: test.replay, Topic: "kv-events"},
			{Worker: kv.WorkerKey{Worker: 3, Rank: 1}, Endpoint: second(test.events), Replay: second(test.replay), Topic: "kv-events"},
		}
		if diff := cmp.Diff(want, sources); diff != "" {
			t.Errorf("%+v: %s", test.given, diff)
		}
		if got := info.Load(spec, 1); got != second(test.load) {
			t.Errorf("%+v: load of rank 1 at %s", test.given, got)
		}
	}
	off := &ServerInfo{}
	given := Server{URL: "http://gpu:30000", KVEvents: "tcp://nat:1000"}
	if diff := cmp.Diff([]events.Source{{Endpoint: "tcp://nat:1000"}}, off.Sources(given)); diff != "" {
		t.Errorf("a server that reports no events: %s", diff)
	}
}

func TestPredictionsOfAnSGLangServer(t *testing.T) {
	captured, err := os.ReadFile("testdata/sglang_server_info.json")
	if err != nil {
		t.Fatal(err)
	}
	const windows, states = `"token_capacity_swa": 3200`, `"uses_mamba_radix_cache": true`
	for _, test := range []struct {
		name, changed string
		want          []string // parts of it; none: exact
	}{
		{"as captured: full attention", string(captured), nil},
		{"sliding windows", `{"disaggregation_mode":"null","internal_states":[{"memory_usage":{` + windows + `}}]}`, []string{"upper bound: ", "sliding-window"}},
		{"windows of the second rank", `{"disaggregation_mode":"null","internal_states":[{},{"memory_usage":{` + windows + `}}]}`, []string{"upper bound: ", "sliding-window"}},
		{"states", `{"disaggregation_mode":"null",` + states + `}`, []string{"upper bound: ", "state is cached"}},
		{"both", `{"disaggregation_mode":"null",` + states + `,"internal_states":[{"memory_usage":{` + windows + `}}]}`, []string{"upper bound: ", "sliding-window", "state is cached"}},
		{"another report", `{"disaggregation_mode":"null","internal_states":{"memory_usage":1},"uses_mamba_radix_cache":"no"}`, nil},
	} {
		info := ParseServerInfo([]byte(test.changed))
		if info == nil {
			t.Fatal(test.name)
		}
		got := info.Predictions()
		if got != "" && len(test.want) == 0 {
			t.Errorf("%s: %q, want none", test.name, got)
		}
		for _, part := range test.want {
			if !strings.Contains(got, part) {
				t.Errorf("%s: %q, want %q in it", test.name, got, part)
			}
		}
	}
}

func FuzzServerInfo(f *testing.F) {
	captured, err := os.ReadFile("testdata/sglang_server_info.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(captured)
	for _, text := range []string{
		`{"disaggregation_mode":"null","dp_size":9223372036854775807,"attn_dp_size":9223372036854775807}`,
		`{"disaggregation_mode":"decode","kv_events":{"endpoint_host":"[::]","endpoint_port_base":65535,"dp_size":3,"replay_endpoint_port_base":1,"load_endpoint_port_base":65535}}`,
		`{"disaggregation_mode":"prefill","kv_events":{"endpoint_host":"\n","endpoint_port_base":70000}}`,
		`{"disaggregation_mode":null}`, `{"disaggregation_mode":"null","max_total_num_tokens":1e400}`, `[]`, ``,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		info := ParseServerInfo(text)
		if info == nil {
			return
		}
		spec := Server{ID: 3, URL: "http://gpu:8000"}
		if n := info.ranks(); n < 1 {
			t.Fatalf("%d ranks", n)
		}
		ranks := info.Ranks()
		sources := info.Sources(spec)
		if len(sources) > ranks {
			t.Fatalf("%d sources of %d ranks", len(sources), ranks)
		}
		for _, source := range sources {
			if !strings.HasPrefix(source.Endpoint, "tcp://") {
				t.Errorf("%+v", source)
			}
		}
		for _, n := range []int{tokens(info.CacheTokens), info.MaxBatchedTokens(), info.BlockSize()} {
			if n < 0 || n > kv.MaxTokens {
				t.Errorf("%d tokens", n)
			}
		}
		info.Load(spec, 1)
		info.EventsRemedy(0)
		Disagg(spec, info)
	})
}
