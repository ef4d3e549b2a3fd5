package probe

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// offloadPage is from vLLM 0.32.0 with TieringOffloadingSpec and a tier fs.
const offloadPage = `# HELP vllm:kv_offload_load_bytes_total Total bytes loaded from offload storage to GPU.
# TYPE vllm:kv_offload_load_bytes_total counter
vllm:kv_offload_load_bytes_total{engine="0",model_name="m"} 5.0
# TYPE vllm:kv_offload_tiering_chunk_hits_total counter
vllm:kv_offload_tiering_chunk_hits_total{engine="0",model_name="m",tier="0:CPU"} 5.0
vllm:kv_offload_tiering_chunk_hits_total{engine="0",model_name="m",tier="1:fs"} 5.0
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 300.0
vllm:external_prefix_cache_queries_total{engine="1",model_name="m"} 40.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0
`

func TestTiersAreReadFromVLLMsMetrics(t *testing.T) {
	for name, test := range map[string]struct {
		page string
		want Tiers
	}{
		"host and files": {offloadPage, Tiers{Host: true, Storage: []string{"1:fs"}, LookedUp: 340, Found: 7}},
		"files and peers": {"# x\nvllm:kv_offload_tiering_read_bytes_total{engine=\"0\",tier=\"1:fs\"} 3\nvllm:kv_offload_tiering_read_bytes_total{engine=\"0\",tier=\"2:p2p\"} 5\n",
			Tiers{Host: true, Storage: []string{"1:fs"}, Pulls: true}},
		"none":    {"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n", Tiers{}},
		"LMCache": {"x 1\nlmcache:num_hit_tokens_total 5\n", Tiers{LMCache: true}},
		"no page": {"{}", Tiers{}},
	} {
		if diff := cmp.Diff(test.want, ParseVLLMTiers([]byte(test.page))); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	many := ParseVLLMTiers([]byte(strings.Repeat(offloadPage, 3) + strings.Join(strings.Split("\nx{tier=\"1\"}\nx{tier=\"2\"}\nx{tier=\"3\"}\nx{tier=\"4\"}\nx{tier=\"5\"}\nx{tier=\"6\"}\nx{tier=\"7\"}\nx{tier=\"8\"}\nx{tier=\"9\"}", " "), "")))
	if len(many.Storage) != maxTierNames {
		t.Errorf("%d names: %q", len(many.Storage), many.Storage)
	}
}

func TestTiersAreReadFromVLLMsConfig(t *testing.T) {
	for name, test := range map[string]struct {
		answer string
		want   Tiers
	}{
		"not in development mode": {`{"detail":"Not Found"}`, Tiers{}},
		"text":                    {`{"vllm_config":"model='m'"}`, Tiers{}},
		"no connector":            {`{"vllm_config":{"kv_transfer_config":null}}`, Tiers{}},
		"described, a silent file tier": {`{"vllm_config":{"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"self_describing_kv_events":true,"secondary_tiers":[{"type":"fs","enable_kv_events":true},{"type":"obj"}]}}}}`,
			Tiers{Connector: "OffloadingConnector", Described: true}},
		"files that publish events, and peers": {`{"vllm_config":{"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"secondary_tiers":[{"type":"p2p","host":"10.0.0.1","port":5710},{"type":"fs","enable_kv_events":true}]}}}}`,
			Tiers{Connector: "OffloadingConnector", Told: true, Pulls: true, PullPort: 5710}},
		"a port that is none": {`{"vllm_config":{"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"secondary_tiers":[{"type":"p2p","port":"x"},{"type":"p2p","port":70000},{"type":"p2p","port":-1}]}}}}`,
			Tiers{Connector: "OffloadingConnector", Told: true, Pulls: true}},
		"one of several": {`{"vllm_config":{"kv_transfer_config":{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":[{"kv_connector":"OffloadingConnector"},{"kv_connector":"NixlConnector"}]}}}}`,
			Tiers{Connector: "OffloadingConnector", Told: true}},
	} {
		var got Tiers
		got.AddVLLMConfig([]byte(test.answer))
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestTiersOfAnSGLangServer(t *testing.T) {
	for name, test := range map[string]struct {
		answer      string
		want        Tiers
		predictions string
	}{
		"host":  {`{"disaggregation_mode":"null","enable_hierarchical_cache":true,"hicache_storage_backend":null}`, Tiers{Host: true}, ""},
		"files": {`{"disaggregation_mode":"null","enable_hierarchical_cache":true,"hicache_storage_backend":"file"}`, Tiers{Host: true, Storage: []string{"file"}}, unknownStorage},
		"none":  {`{"disaggregation_mode":"null","enable_hierarchical_cache":false,"hicache_storage_backend":"file"}`, Tiers{}, ""},
	} {
		info := ParseServerInfo([]byte(test.answer))
		if diff := cmp.Diff(test.want, info.Tiers()); diff != "" || info.Predictions() != test.predictions {
			t.Errorf("%s: %s, predictions %q", name, diff, info.Predictions())
		}
	}
}

func FuzzTiers(f *testing.F) {
	f.Add([]byte(offloadPage))
	f.Add([]byte(`{"vllm_config":{"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"connectors":[{}],"secondary_tiers":[{"type":"fs"}]}}}}`))
	f.Add([]byte(`{"disaggregation_mode":"null","enable_hierarchical_cache":true,"hicache_storage_backend":"file"}`))
	f.Fuzz(func(t *testing.T, foreign []byte) {
		tiers := ParseVLLMTiers(foreign)
		tiers.AddVLLMConfig(foreign)
		if info := ParseServerInfo(foreign); info != nil {
			_ = info.Tiers()
		}
		if len(tiers.Storage) > maxTierNames || len(tiers.Connector) > 64 {
			t.Errorf("%+v", tiers)
		}
	})
}
