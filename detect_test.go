package main

import (
	"fmt"
	"io"
	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// TestAttachedSGLangServersArePaired: nothing but their addresses is given.
func TestAttachedSGLangServersArePaired(t *testing.T) {
	protocol := newFakeProtocol(t, kv.KindSGLang)
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
	s := startRooms(t, testkit.FreePorts(t, 2), "--engine=none", "--served-model-name=m", "--worker="+attached[1:], "--drain-timeout=5s", "--token-timeout=100ms")
	testkit.Eventually(t, 20*time.Second, "both workers up", func() bool { return len(s.rooms.router.Targets()) == 2 })
	response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", strings.NewReader(sharedChat(false)))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, _ := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK || response.Header.Get(proxy.HeaderPrefillWorker) != "0" || response.Header.Get(web.HeaderWorker) != "1" {
		t.Errorf("%s %v: %s", response.Status, response.Header, answer)
	}
	list := ask(t, s.selection, "GET", "/workers", nil)
	if w := list.Get("0"); w.Get("role").Str != "prefill" || w.Get("kind").Str != "sglang" || w.Get("bootstrap_host").Str != "127.0.0.1" || w.Get("bootstrap_port").Int() != 9000 {
		t.Errorf("shown as %s", w)
	}
}

func TestRegisteredWorkersHaveAPart(t *testing.T) {
	s, worker, spec := registeredSite(t)
	part := func() kv.Disagg { return s.rooms.router.Targets()[0].Disagg }
	s.want("GET", "/workers", nil, 200, "0.role -", "0.bootstrap_host -")
	s.want("PATCH", "/workers/1", object{"role": "prefill", "kind": "sglang", "bootstrap_host": "h", "bootstrap_port": 9000}, 200,
		`role "prefill"`, `kind "sglang"`, `bootstrap_host "h"`, "bootstrap_port 9000", "generation 1", `lifecycle "schedulable"`)
	if want := (kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "h", Port: 9000}}); part() != want {
		t.Errorf("%+v, want %+v", part(), want)
	}
	for _, bad := range []object{{"role": "prefil"}, {"kind": "nccl"}, {"bootstrap_port": 70000}, {"role": 1}} {
		if got := ask(t, s.selection, "PATCH", "/workers/1", bad); got.status/100 != 4 {
			t.Errorf("%v: %d %s", bad, got.status, got.Raw)
		}
	}
	spec["role"] = "decode" // its kind is learned once it answers
	s.want("POST", "/workers", spec, 201, `role "decode"`, "kind -")
	if want := (kv.Disagg{Role: kv.RoleDecode}); part() != want {
		t.Errorf("%+v, want %+v", part(), want)
	}
	worker.well.Store(true)
	testkit.Eventually(t, 10*time.Second, "the kind is learned", func() bool { return part() == testkit.NixlDecode })
}
