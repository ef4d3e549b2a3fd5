package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// TestRoutersThatAreEachOthersWorkersEndARequest: without names in Via one request
// went round until all descriptors were gone.
func TestRoutersThatAreEachOthersWorkersEndARequest(t *testing.T) {
	ports := testkit.FreePorts(t, 4)
	urls := []string{fmt.Sprintf("http://127.0.0.1:%d", ports), fmt.Sprintf("http://127.0.0.1:%d", ports+2)}
	var ring []*mockSite
	for i := range urls {
		ring = append(ring, startApp(t, ports+2*i, "--engine=none", "--served-model-name=m", "--token-timeout=100ms", "--worker="+urls[1-i]))
	}
	for i, s := range ring {
		testkit.Eventually(t, 20*time.Second, "each is the other's worker", func() bool { return len(s.app.router.Targets()) == 1 })
		began := time.Now()
		got := ask(t, urls[i], http.MethodPost, testkit.ChatPath, object{"model": "m", "messages": say("hello")})
		if got.status < 500 || time.Since(began) > 10*time.Second {
			t.Errorf("router %d: %d %s after %s", i, got.status, got.Raw, time.Since(began))
		}
	}
	for _, s := range ring {
		if n := s.app.router.Load(s.app.router.Targets()[0].Key).InFlight; n != 0 {
			t.Errorf("%d requests are still booked", n)
		}
	}
	for _, s := range ring { // both, before either looks for what is left
		if err := s.end(); err != nil {
			t.Error(err)
		}
		s.app.proxy.Close()
	}
}

func TestRouterIsNotItsOwnWorker(t *testing.T) {
	ports := testkit.FreePorts(t, 2)
	s := startApp(t, ports, "--engine=none", "--policy=kv", fmt.Sprintf("--worker=http://127.0.0.1:%d", ports))
	testkit.Eventually(t, 20*time.Second, "the log says so", func() bool {
		return strings.Contains(s.log.String(), "level=ERROR") && strings.Contains(s.log.String(), "address is this router's own")
	})
	if n := len(s.app.router.Targets()); n != 0 {
		t.Errorf("%d workers are routed to", n)
	}
	worker := object{"worker_id": 9, "model_name": "m", "block_size": 64, "kv_events_endpoint": "tcp://127.0.0.1:1"}
	for _, own := range []string{s.openAI, s.selection} {
		worker["endpoint"] = own
		if got := ask(t, s.selection, http.MethodPost, "/workers", worker); got.status != http.StatusBadRequest || !strings.Contains(got.Raw, "this router itself") {
			t.Errorf("%s: %d %s", own, got.status, got.Raw)
		}
	}
}

func TestRouterBehindARouterServes(t *testing.T) {
	back := startMockSite(t, 1)
	front := startApp(t, testkit.FreePorts(t, 2), "--engine=none", "--policy=kv", "--worker="+back.openAI)
	testkit.Eventually(t, 20*time.Second, "the router is a worker", func() bool { return len(front.app.router.Targets()) == 1 })
	if a, err := front.chat(t.Context(), say("hello"), true, 3); err != nil || !a.finished {
		t.Errorf("%+v, %v", a, err)
	}
	for _, s := range []*mockSite{front, back} { // both, before either looks for what is left
		if err := s.end(); err != nil {
			t.Error(err)
		}
		s.app.proxy.Close()
	}
}
