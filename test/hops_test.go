package test

import (
	"fmt"
	"kvrouter/internal/testkit"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestRoutersThatAreEachOthersWorkersEndARequest: without names in Via one request
// went round until all descriptors were gone.
func TestRoutersThatAreEachOthersWorkersEndARequest(t *testing.T) {
	t.Parallel()
	ports := testkit.FreePorts(t, 4)
	urls := []string{fmt.Sprintf("http://127.0.0.1:%d", ports), fmt.Sprintf("http://127.0.0.1:%d", ports+2)}
	var ring []*Router
	for i := range urls {
		ring = append(ring, StartAt(t, Program, ports+2*i, nil, "--engine=none", "--served-model-name=m", "--token-timeout=100ms", "--worker="+urls[1-i]))
	}
	for i, s := range ring {
		s.WaitReady(1, 20*time.Second)
		began := time.Now()
		got := ask(t, urls[i], http.MethodPost, testkit.ChatPath, map[string]any{"model": "m", "messages": Say("hello")})
		if got.status < 500 || time.Since(began) > 10*time.Second {
			t.Errorf("router %d: %d %s after %s", i, got.status, got.Raw, time.Since(began))
		}
	}
	for _, s := range ring {
		testkit.Eventually(t, 5*time.Second, "nothing is booked", func() bool { return s.InFlight() == 0 })
	}
}

func TestRouterIsNotItsOwnWorker(t *testing.T) {
	t.Parallel()
	ports := testkit.FreePorts(t, 2)
	s := StartAt(t, Program, ports, nil, "--engine=none", "--policy=kv", fmt.Sprintf("--worker=http://127.0.0.1:%d", ports))
	testkit.Eventually(t, 20*time.Second, "the log says so", func() bool {
		return strings.Contains(s.Log.String(), "level=ERROR") && strings.Contains(s.Log.String(), "the address is this router's own")
	})
	if up := s.Ranks(); len(up) != 0 {
		t.Errorf("%v are routed to", up)
	}
	worker := map[string]any{"worker_id": 9, "model_name": "m", "block_size": 64, "kv_events_endpoint": "tcp://127.0.0.1:1"}
	for _, own := range []string{s.OpenAI, s.Port} {
		worker["endpoint"] = own
		if got := ask(t, s.Port, http.MethodPost, "/workers", worker); got.status != http.StatusBadRequest || !strings.Contains(got.Raw, "this router itself") {
			t.Errorf("%s: %d %s", own, got.status, got.Raw)
		}
	}
}

func TestRouterBehindARouterServes(t *testing.T) {
	t.Parallel()
	back := StartMocks(t, 1)
	front := Start(t, "--engine=none", "--policy=kv", "--worker="+back.OpenAI)
	front.WaitReady(1, 20*time.Second)
	if a, err := front.Chat(t.Context(), Say("hello"), true, 3); err != nil || !a.Finished {
		t.Errorf("%+v, %v", a, err)
	}
}
