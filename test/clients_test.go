package test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// poisons are what requests with that text do at every worker.
var poisons = map[string]http.HandlerFunc{
	"poison 500":   answersAt(500),
	"poison 503":   answersAt(503), // with Retry-After
	"poison reset": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	"poison cut":   breaksOff,
}

// chatAs sends a chat with a key, and reports whether it got a whole answer.
func (r *Router) chatAs(ctx context.Context, key, text string) bool {
	body := fmt.Sprintf(`{"model":"m","stream":true,"messages":[{"role":"user","content":%q}]}`, text)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.OpenAI+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		return false
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	a, err := ReadAnswer(response.Header, response.Body, true)
	return err == nil && response.StatusCode == http.StatusOK && a.Finished && !a.Broken
}

// TestOneKeysFailuresStayWithThatKey: one of four workers is ill, and the requests of one of two
// keys fail at every worker.
func TestOneKeysFailuresStayWithThatKey(t *testing.T) {
	t.Parallel()
	const lasts = 2500 * time.Millisecond
	var kinds []string
	for kind := range poisons {
		kinds = append(kinds, kind)
	}
	beside(t, "kind\tlost by the other key\tattempts a request\twell workers ejected", len(kinds), func(at int) (string, func(t *testing.T, port int) string) {
		kind := kinds[at]
		return kind, func(t *testing.T, port int) string {
			var attempts atomic.Int64 // of the key that fails
			args := []string{"--engine=none", "--log-level=info", keysFile(t, "- {name: good, key: key-good}\n- {name: bad, key: key-bad}\n")}
			for i := range 4 {
				worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
					body, _ := io.ReadAll(r.Body)
					bad := strings.Contains(string(body), kind)
					if bad {
						attempts.Add(1)
					}
					switch {
					case i == 0:
						answersAt(500)(w, r)
					case bad:
						poisons[kind](w, r)
					default:
						select {
						case <-time.After(30 * time.Millisecond):
						case <-r.Context().Done():
							return
						}
						testkit.StreamOf(testkit.TokenEvent, "[DONE]")(w, r)
					}
				})
				args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", worker.URL, i))
			}
			r := StartAt(t, Program, port, nil, args...)
			r.WaitReady(4, readyLimit)
			ctx, stop := context.WithTimeout(t.Context(), lasts)
			defer stop()
			var all sync.WaitGroup
			var good, gone, bad atomic.Int64
			for range 4 {
				all.Go(func() {
					for ctx.Err() == nil {
						if good.Add(1); !r.chatAs(t.Context(), "key-good", "hello") {
							gone.Add(1)
						}
					}
				})
			}
			for range 2 {
				all.Go(func() {
					for ctx.Err() == nil {
						bad.Add(1)
						r.chatAs(t.Context(), "key-bad", kind)
					}
				})
			}
			all.Wait()
			_, page := testkit.HTTPGet(t, r.OpenAI+"/metrics")
			metrics := testkit.ReadMetricsPage(string(page))
			out := 0.0
			for i := 1; i < 4; i++ {
				out += metrics[fmt.Sprintf(`kvrouter_worker_ejected{dp_rank="0",worker_id="%d"}`, i)] + metrics[fmt.Sprintf(`kvrouter_worker_held{dp_rank="0",worker_id="%d"}`, i)]
			}
			each := float64(attempts.Load()) / float64(bad.Load())
			if most := 1.4 + 10/float64(bad.Load()); gone.Load()*100 > good.Load() || good.Load() < 20 || each > most || out > 0 || metrics["kvrouter_discredited_clients"] != 1 {
				t.Errorf("%d of %d requests of the other key are lost; %.2f attempts at each of %d that fail, want at most %.2f; %v well workers are out in the end; discredited: %v", gone.Load(), good.Load(), each, bad.Load(), most, out, metrics["kvrouter_discredited_clients"])
			}
			return fmt.Sprintf("%s\t%d of %d\t%.2f of %d\t%v", kind, gone.Load(), good.Load(), each, bad.Load(), out)
		}
	})
}
