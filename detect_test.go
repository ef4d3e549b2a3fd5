package main

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"
)

func TestWhatIsLearnedOfAWorkersPart(t *testing.T) {
	const sglang = `{"model_path":"m","disaggregation_mode":%q,"disaggregation_bootstrap_port":%s,"dist_init_addr":%s,"internal_states":[{}]}`
	prefill := fmt.Sprintf(sglang, "prefill", "9001", "null")
	there := Bootstrap{"h", 8998}
	tests := []struct {
		name   string
		given  Disagg
		path   string // that tells; empty: none does
		answer string
		want   Disagg // a bootstrap host "self" is the worker's own
	}{
		{"plain vLLM", Disagg{}, "", "", Disagg{}},
		{"vLLM in development mode", Disagg{}, "/server_info", `{"vllm_config":"..."}`, Disagg{}},
		{"SGLang for whole requests", Disagg{}, "/server_info", fmt.Sprintf(sglang, "null", "8998", "null"), Disagg{}},
		{"SGLang prefill", Disagg{}, "/server_info", prefill, Disagg{RolePrefill, KindSGLang, Bootstrap{"self", 9001}}},
		{"SGLang prefill of an older version", Disagg{}, "/get_server_info", prefill, Disagg{RolePrefill, KindSGLang, Bootstrap{"self", 9001}}},
		{"SGLang prefill without a port", Disagg{}, "/server_info", fmt.Sprintf(sglang, "prefill", "null", "null"), Disagg{RolePrefill, KindSGLang, Bootstrap{"self", 8998}}},
		{"SGLang prefill over several nodes", Disagg{}, "/server_info", fmt.Sprintf(sglang, "prefill", "9001", `"node-0:5000"`), Disagg{RolePrefill, KindSGLang, Bootstrap{"node-0", 9001}}},
		{"SGLang decode", Disagg{}, "/server_info", fmt.Sprintf(sglang, "decode", "8998", "null"), Disagg{Role: RoleDecode, Kind: KindSGLang}},
		{"role given, kind learned", Disagg{Role: RolePrefill}, "/server_info", prefill, Disagg{RolePrefill, KindSGLang, Bootstrap{"self", 9001}}},
		{"role given wins", Disagg{Role: RoleDecode}, "/server_info", prefill, Disagg{Role: RoleDecode, Kind: KindSGLang}},
		{"kind given, bootstrap learned", Disagg{Role: RolePrefill, Kind: KindSGLang}, "/server_info", prefill, Disagg{RolePrefill, KindSGLang, Bootstrap{"self", 9001}}},
		{"all given", Disagg{RolePrefill, KindSGLang, there}, "/server_info", prefill, Disagg{RolePrefill, KindSGLang, there}},
		{"bootstrap given wins", Disagg{Role: RolePrefill, Bootstrap: there}, "/server_info", prefill, Disagg{RolePrefill, KindSGLang, there}},
		{"SGLang that does not tell", Disagg{Role: RolePrefill, Kind: KindSGLang}, "", "", Disagg{Role: RolePrefill, Kind: KindSGLang}},
		{"NIXL", Disagg{Role: RolePrefill}, "", "", Disagg{Role: RolePrefill, Kind: KindNIXL}},
		{"NIXL decode", Disagg{Role: RoleDecode}, "", "", Disagg{Role: RoleDecode, Kind: KindNIXL}},
		{"Mooncake", Disagg{Role: RolePrefill, Bootstrap: there}, "", "", Disagg{RolePrefill, KindMooncake, there}},
		{"not JSON", Disagg{Role: RoleDecode}, "/server_info", "<html>", Disagg{Role: RoleDecode, Kind: KindNIXL}},
	}
	f := NewFleet(FleetSettings{}, nil, NewRadix(), FleetHooks{}, slog.New(slog.DiscardHandler))
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
			if got := f.detect(t.Context(), server.URL, test.given); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		})
	}
}

// TestAttachedSGLangServersArePaired: nothing but their addresses is given.
func TestAttachedSGLangServersArePaired(t *testing.T) {
	protocol := newFakeProtocol(t, KindSGLang)
	attached := ""
	for i, role := range []string{"prefill", "decode"} {
		serve := protocol.prefill
		if role == "decode" {
			serve = protocol.decode
		}
		engine := newFakeEngine(t, uint64(i), serve)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/health":
			case "/v1/models":
				fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			case "/server_info":
				fmt.Fprintf(w, `{"disaggregation_mode":%q,"disaggregation_bootstrap_port":9000}`, role)
			case "/metrics", "/kv_event_sources":
				w.WriteHeader(http.StatusNotFound)
			default:
				engine.ServeHTTP(w, r)
			}
		}))
		t.Cleanup(server.Close)
		attached += fmt.Sprintf(";url=%s,id=%d", server.URL, i)
	}
	s := startRooms(t, freePorts(t, 2), "--engine=none", "--served-model-name=m", "--worker="+attached[1:], "--drain-timeout=5s", "--token-timeout=100ms")
	eventually(t, 20*time.Second, "both workers up", func() bool { return len(s.rooms.router.Targets()) == 2 })
	response, err := http.Post(s.openAI+chatPath, "application/json", strings.NewReader(sharedChat(false)))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, _ := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK || response.Header.Get(headerPrefillWorker) != "0" || response.Header.Get(headerWorker) != "1" {
		t.Errorf("%s %v: %s", response.Status, response.Header, answer)
	}
	list := ask(t, s.selection, "GET", "/workers", nil)
	if w := list.Get("0"); w.Get("role").Str != "prefill" || w.Get("kind").Str != "sglang" || w.Get("bootstrap_host").Str != "127.0.0.1" || w.Get("bootstrap_port").Int() != 9000 {
		t.Errorf("shown as %s", w)
	}
}

func TestRegisteredWorkersHaveAPart(t *testing.T) {
	s, worker, spec := registeredSite(t)
	part := func() Disagg { return s.rooms.router.Targets()[0].Disagg }
	s.want("GET", "/workers", nil, 200, "0.role -", "0.bootstrap_host -")
	s.want("PATCH", "/workers/1", object{"role": "prefill", "kind": "sglang", "bootstrap_host": "h", "bootstrap_port": 9000}, 200,
		`role "prefill"`, `kind "sglang"`, `bootstrap_host "h"`, "bootstrap_port 9000", "generation 1", `lifecycle "schedulable"`)
	if want := (Disagg{RolePrefill, KindSGLang, Bootstrap{"h", 9000}}); part() != want {
		t.Errorf("%+v, want %+v", part(), want)
	}
	for _, bad := range []object{{"role": "prefil"}, {"kind": "nccl"}, {"bootstrap_port": 70000}, {"role": 1}} {
		if got := ask(t, s.selection, "PATCH", "/workers/1", bad); got.status/100 != 4 {
			t.Errorf("%v: %d %s", bad, got.status, got.Raw)
		}
	}
	spec["role"] = "decode" // its kind is learned once it answers
	s.want("POST", "/workers", spec, 201, `role "decode"`, "kind -")
	if want := (Disagg{Role: RoleDecode}); part() != want {
		t.Errorf("%+v, want %+v", part(), want)
	}
	worker.well.Store(true)
	eventually(t, 10*time.Second, "the kind is learned", func() bool { return part() == nixlDecode })
}
