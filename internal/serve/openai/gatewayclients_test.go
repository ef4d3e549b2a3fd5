package openai

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvrouter/internal/decide/health"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// TestBehindAGatewayOneClientsFailuresStayWithThatClient: its requests fail at every worker,
// and worker 0 is ill. The gateway sends the requests, so the router repeats none of them.
func TestBehindAGatewayOneClientsFailuresStayWithThatClient(t *testing.T) {
	flag := strings.TrimPrefix(keysFile(t, "- {name: good, key: key-good}\n- {name: bad, key: key-bad}"), "--api-keys-file=")
	for name, test := range map[string]struct {
		settings  keys.Settings
		good, bad func(r *http.Request)
		known     int // clients that fail everywhere
	}{
		"by key": {
			keys.Settings{APIKeysFile: flag}, func(r *http.Request) { r.Header.Set("Authorization", "Bearer key-good") },
			func(r *http.Request) { r.Header.Set("Authorization", "Bearer key-bad") }, 1,
		},
		"by the address that the gateway states": {
			keys.Settings{}, func(r *http.Request) { r.RemoteAddr = "192.0.2.1:1000" }, func(r *http.Request) { r.RemoteAddr = "192.0.2.2:1000" }, 1,
		},
		"not by an address in a header": {
			keys.Settings{}, func(r *http.Request) {
				r.RemoteAddr = "192.0.2.1:1000"
				r.Header.Set("X-Forwarded-For", "198.51.100.1")
			},
			func(r *http.Request) {
				r.RemoteAddr = "192.0.2.1:2000"
				r.Header.Set("X-Forwarded-For", "198.51.100.2")
			}, 0,
		},
	} {
		for kind, fails := range map[string]func() (*http.Response, error){
			"500":   func() (*http.Response, error) { return gatewayAnswer(http.StatusInternalServerError), nil },
			"429":   func() (*http.Response, error) { return gatewayAnswer(http.StatusTooManyRequests), nil },
			"reset": func() (*http.Response, error) { return nil, errors.New("the connection broke") },
		} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				h := newTestAPI(t, setup{Keys: test.settings}, "http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1", "http://10.0.0.4:1")
				ask := func(change func(*http.Request), bad bool) int {
					r := httptest.NewRequest(http.MethodPost, testkit.ChatPath, strings.NewReader(`{"model":"m","messages":[]}`))
					r.Header.Set("Content-Type", "application/json")
					change(r)
					w := httptest.NewRecorder()
					defer func() {
						for len(h.failed) > 0 {
							<-h.failed
						}
					}()
					h.api.ServeGateway(w, r, &proxy.Gateway{Send: func(to proxy.Routed) (*http.Response, string, error) {
						switch {
						case to.Target.Key.Worker == 0:
							return gatewayAnswer(http.StatusInternalServerError), to.Target.Address(), nil
						case bad:
							answer, err := fails()
							return answer, to.Target.Address(), err
						}
						return gatewayAnswer(http.StatusOK), to.Target.Address(), nil
					}})
					return w.Code
				}
				lost := 0
				for range 60 {
					for range 4 { // with the other one 5, so that each meets every worker
						ask(test.bad, true)
					}
					if ask(test.good, false) != http.StatusOK {
						lost++
					}
				}
				records, _ := h.router.Health.Records()
				well := 0
				for _, r := range records[1:] {
					if r.State == health.StateIn {
						well++
					}
				}
				if n := h.router.Health.Discredited(); n != test.known {
					t.Fatalf("%d clients are known to fail everywhere, want %d", n, test.known)
				}
				if test.known > 0 && (lost > 4 || well != 3 || records[0].State != health.StateOut) {
					t.Errorf("%d of 60 requests of the other are lost, %d of 3 well workers are in, the ill one is %s", lost, well, records[0].State)
				}
			})
		}
	}
}

// gatewayAnswer is a worker's answer that came through a gateway.
func gatewayAnswer(status int) *http.Response {
	return &http.Response{
		StatusCode: status, Status: http.StatusText(status), Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(`{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}`)),
	}
}
