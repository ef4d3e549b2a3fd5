package gateway

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/envoy"
)

// TestGatewayLeavesAStuckWorker: /health answers, requests hang. Those end by the router,
// since Envoy would wait for them, and new ones go elsewhere.
func TestGatewayLeavesAStuckWorker(t *testing.T) {
	p := newPicker(t)
	var stuck atomic.Bool
	var left sync.WaitGroup // requests at the stuck worker
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		if !stuck.Load() {
			io.WriteString(w, `{"worker":"stuck"}`)
			return
		}
		switch r.Header.Get(headerTestChat) {
		case "stream":
			streamHead(w)
		case "half":
			io.WriteString(w, `{"choices":[`)
			http.NewResponseController(w).Flush()
		}
		<-r.Context().Done()
		left.Done()
	})
	others, at := fakeWorkers(t, 1)
	workers := []*testkit.FakeWorker{worker, others[0]}
	g := behind(routeFakes(t, workers, p.flags("--policy=round-robin", "--silence-timeout=4s")...), p, envoy.Options{Workers: []string{worker.Listener.Addr().String(), at[0]}})
	for range 12 { // which is what an answer takes
		g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json")
	}
	stuck.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	there := subsetOf(t, worker.Listener.Addr().String())
	ask := func(kind string) (status int, answer string, err error) {
		body := gatewayChat
		if kind == "stream" {
			body = strings.Replace(gatewayChat, `"max_tokens"`, `"stream":true,"max_tokens"`, 1)
		}
		request, _ := http.NewRequestWithContext(ctx, http.MethodPost, g.OpenAI+testkit.ChatPath, strings.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set(envoy.SubsetHeader, there)
		request.Header.Set(headerTestChat, kind)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0, "", err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		return response.StatusCode, string(text), err
	}
	var asking sync.WaitGroup
	for _, kind := range []string{"stream", "half", "none", "none", "none"} {
		left.Add(1)
		asking.Go(func() {
			status, answer, err := ask(kind)
			var fine bool
			switch kind {
			case "stream":
				fine = err == nil && status == http.StatusOK && strings.Count(answer, `"error"`) == 1
			case "half": // only its connection distinguishes it from a complete one
				fine = errors.Is(err, io.ErrUnexpectedEOF)
			default:
				fine = err == nil && status == http.StatusBadGateway && strings.Contains(answer, `"error"`)
			}
			if !fine {
				t.Errorf("%s: %d %s, %v", kind, status, answer, err)
			}
		})
	}
	// The other answers meanwhile, so that it is this worker that is at fault.
	testkit.Eventually(t, 20*time.Second, "the worker is ejected", func() bool {
		g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json", envoy.SubsetHeader, subsetOf(t, at[0]))
		record, _ := g.direct.Record(0)
		return record.Failures != nil && record.Failures.State == "ejected"
	})
	for range 4 {
		if response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json"); answer != `{"worker":0}` {
			t.Errorf("the stuck worker is not left: %s %s", response.Status, answer)
		}
	}
	asking.Wait()
	left.Wait()
	g.freed()
}
