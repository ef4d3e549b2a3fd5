package gateway

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/envoy"
	"kvrouter/test"
)

// deployed is the configuration that users start from.
const deployed = "deploy/gateway/envoy.yaml"

// TestGatewayTakesManyRequests has more requests in flight than Envoy takes by default, with
// the configuration that users start from: none is answered before all have come.
func TestGatewayTakesManyRequests(t *testing.T) {
	const requests = 1200 // Envoy's default is 1,024
	p := newPicker(t)
	var there atomic.Int64
	all := make(chan struct{})
	handler := func(w http.ResponseWriter, r *http.Request) {
		if there.Add(1) == requests {
			close(all)
		}
		select {
		case <-all:
			fmt.Fprint(w, `{"choices":[]}`)
		case <-r.Context().Done():
		}
	}
	workers := []*testkit.FakeWorker{testkit.NewFakeWorker(t, handler), testkit.NewFakeWorker(t, handler)}
	at := []string{workers[0].Listener.Addr().String(), workers[1].Listener.Addr().String()}
	s := test.StartAt(t, test.PlainProgram, testkit.FreePorts(t, 2), nil, p.flags(fakeArgs(workers)...)...)
	s.WaitReady(2, 20*time.Second)
	e := envoy.StartDeployed(t, deployed, testkit.FreePorts(t, 2), []string{p.address()}, at)
	e.WaitForPicker(true)
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	var mu sync.Mutex // guards statuses
	statuses := map[string]int{}
	var asking sync.WaitGroup
	for range requests {
		asking.Go(func() {
			status := ""
			response, err := client.Post(e.URL+testkit.ChatPath, "application/json", strings.NewReader(gatewayChat))
			if err != nil {
				status = err.Error()
			} else {
				status = response.Status
				response.Body.Close()
			}
			mu.Lock()
			statuses[status]++
			mu.Unlock()
		})
	}
	asking.Wait()
	if statuses["200 OK"] != requests {
		t.Errorf("%v, want %d times 200", statuses, requests)
	}
}
