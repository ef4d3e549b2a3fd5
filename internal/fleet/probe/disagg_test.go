package probe

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"kvrouter/internal/base/kv"
)

func TestTheRoleOfAServer(t *testing.T) {
	const sglang = `{"model_path":"m","disaggregation_mode":%q,"disaggregation_bootstrap_port":%s,"dist_init_addr":%s,"internal_states":[{}]}`
	prefill := fmt.Sprintf(sglang, "prefill", "9001", "null")
	there := kv.Bootstrap{Host: "h", Port: 8998}
	tests := []struct {
		name   string
		given  kv.Disagg
		path   string // that reports it; empty: none does
		answer string
		want   kv.Disagg // a bootstrap host "self" is the worker's own
	}{
		{"plain vLLM", kv.Disagg{}, "", "", kv.Disagg{}},
		{"vLLM in development mode", kv.Disagg{}, "/server_info", `{"vllm_config":"..."}`, kv.Disagg{}},
		{"SGLang for whole requests", kv.Disagg{}, "/server_info", fmt.Sprintf(sglang, "null", "8998", "null"), kv.Disagg{}},
		{"SGLang prefill", kv.Disagg{}, "/server_info", prefill, kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "self", Port: 9001}}},
		{"SGLang prefill of an older version", kv.Disagg{}, "/get_server_info", prefill, kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "self", Port: 9001}}},
		{"SGLang prefill without a port", kv.Disagg{}, "/server_info", fmt.Sprintf(sglang, "prefill", "null", "null"), kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "self", Port: 8998}}},
		{"SGLang prefill over several nodes", kv.Disagg{}, "/server_info", fmt.Sprintf(sglang, "prefill", "9001", `"node-0:5000"`), kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "node-0", Port: 9001}}},
		{"SGLang decode", kv.Disagg{}, "/server_info", fmt.Sprintf(sglang, "decode", "8998", "null"), kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindSGLang}},
		{"role given, kind learned", kv.Disagg{Role: kv.RolePrefill}, "/server_info", prefill, kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "self", Port: 9001}}},
		{"role given wins", kv.Disagg{Role: kv.RoleDecode}, "/server_info", prefill, kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindSGLang}},
		{"kind given, bootstrap learned", kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang}, "/server_info", prefill, kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "self", Port: 9001}}},
		{"all given", kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: there}, "/server_info", prefill, kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: there}},
		{"bootstrap given wins", kv.Disagg{Role: kv.RolePrefill, Bootstrap: there}, "/server_info", prefill, kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: there}},
		{"SGLang that does not tell", kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang}, "", "", kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang}},
		{"NIXL", kv.Disagg{Role: kv.RolePrefill}, "", "", kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}},
		{"NIXL decode", kv.Disagg{Role: kv.RoleDecode}, "", "", kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}},
		{"Mooncake", kv.Disagg{Role: kv.RolePrefill, Bootstrap: there}, "", "", kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindMooncake, Bootstrap: there}},
		{"not JSON", kv.Disagg{Role: kv.RoleDecode}, "/server_info", "<html>", kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}},
	}
	c := newClient(t)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != test.path {
					w.WriteHeader(http.StatusNotFound)
					return
				}
				fmt.Fprint(w, test.answer)
			}))
			defer server.Close()
			want := test.want
			if u, _ := url.Parse(server.URL); want.Bootstrap.Host == "self" {
				want.Bootstrap.Host = u.Hostname()
			}
			at := Server{URL: server.URL, Disagg: test.given}
			info, err := c.ServerInfo(t.Context(), at)
			if got := Disagg(at, info); err != nil || got != want {
				t.Errorf("%+v, %v, want %+v", got, err, want)
			}
		})
	}
}
