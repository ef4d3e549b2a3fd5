package main

import (
	"context"
	"fmt"
	"io"
	"kvrouter/internal/policy"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestEveryEndOfARequestIsToldOnce pins what a policy hears for each way in
// which a request can end on the OpenAI side.
func TestEveryEndOfARequestIsToldOnce(t *testing.T) {
	status := func(status int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			io.WriteString(w, body)
		}
	}
	then := func(first http.HandlerFunc, next func(http.ResponseWriter, *http.Request)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			first(w, r)
			http.NewResponseController(w).Flush()
			next(w, r)
		}
	}
	abort := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	silence := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	raw := func(stream string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, stream)
		}
	}
	const (
		stopped = `{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":3}}`
		lastOne = `{"choices":[{"delta":{},"finish_reason":"length"}]}`
		notLast = `{"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}`
	)
	for _, c := range []struct {
		name    string
		path    string // empty: chat
		timeout time.Duration
		workers []http.HandlerFunc // nil: nothing listens
		want    []routertest.ToldEnding
	}{
		{"whole answer", "", 0, []http.HandlerFunc{status(200, stopped)}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 3}}},
		{"whole answer without usage", "", 0, []http.HandlerFunc{status(200, `{}`)}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"whole stream", "", 0, []http.HandlerFunc{testkit.StreamOf(testkit.TokenEvent, usageEvent, "[DONE]")}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 1}}},
		{"whole stream without usage", "", 0, []http.HandlerFunc{testkit.StreamOf(testkit.TokenEvent, "[DONE]")}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"stream with a reason and no last event", "", 0, []http.HandlerFunc{testkit.StreamOf(notLast, lastOne)}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"stream that breaks off after its last event", "", 0, []http.HandlerFunc{then(testkit.StreamOf(testkit.TokenEvent, "[DONE]"), abort)}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"stream of the messages API", "/v1/messages", 0, []http.HandlerFunc{raw(testkit.MessagesStream)}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 3}}},
		{"stream of the responses API", "/v1/responses", 0, []http.HandlerFunc{raw(testkit.ResponsesStream)}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 2}}},
		{"stream of which no end is known", "/v1/audio/transcriptions", 0, []http.HandlerFunc{testkit.StreamOf(testkit.TokenEvent)}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},

		{"client's mistake", "", 0, []http.HandlerFunc{status(400, `{"error":{"code":400}}`)}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"client's mistake in a stream", "", 0, []http.HandlerFunc{testkit.StreamOf(`{"error":{"message":"too long","code":400}}`, "[DONE]")}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"what no worker can", "", 0, []http.HandlerFunc{status(501, `{}`)}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"aborted at the engine", "", 0, []http.HandlerFunc{status(200, `{"choices":[{"finish_reason":"abort"}]}`)}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"stream aborted at the engine", "", 0, []http.HandlerFunc{testkit.StreamOf(testkit.TokenEvent, `{"choices":[{"finish_reason":"abort"}]}`, "[DONE]")}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},

		{"engine error", "", 0, []http.HandlerFunc{status(500, `{}`)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"bad gateway and the like", "", 0, []http.HandlerFunc{status(504, `{}`)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"engine error as the reason", "", 0, []http.HandlerFunc{status(200, `{"choices":[{"finish_reason":"error"}]}`)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"nothing listens", "", 0, []http.HandlerFunc{nil}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"connection closed without an answer", "", 0, []http.HandlerFunc{hangUp}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"stream that breaks off", "", 0, []http.HandlerFunc{then(testkit.StreamOf(testkit.TokenEvent), abort)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"stream that ends without saying so", "", 0, []http.HandlerFunc{testkit.StreamOf(notLast, notLast)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"stream of the messages API that ends without saying so", "/v1/messages", 0, []http.HandlerFunc{raw("event: message_start\ndata: {}\n\n")}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"stream with an engine error", "", 0, []http.HandlerFunc{testkit.StreamOf(`{"error":{"code":500}}`, "[DONE]")}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"stream with an engine error in its middle", "", 0, []http.HandlerFunc{testkit.StreamOf(notLast, `{"error":{"code":500}}`, "[DONE]")}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"half an answer", "", 0, []http.HandlerFunc{then(status(200, `{"choices"`), abort)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"long answer that breaks off", "", 0, []http.HandlerFunc{then(status(200, strings.Repeat(" ", proxy.BufferedAnswer+1)), abort)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"silence", "", 50 * time.Millisecond, []http.HandlerFunc{silence}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},
		{"silence in mid-stream", "", 50 * time.Millisecond, []http.HandlerFunc{then(testkit.StreamOf(testkit.TokenEvent), silence)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}}},

		{"answered by the second", "", 0, []http.HandlerFunc{nil, status(200, stopped)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}, {Ending: policy.Finished, TokensOut: 3}}},
		{"answered by the second after an engine error", "", 0, []http.HandlerFunc{status(503, ``), status(200, stopped)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}, {Ending: policy.Finished, TokensOut: 3}}},
		{"answered by none", "", 0, []http.HandlerFunc{hangUp, status(500, ``)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}, {Ending: policy.Failed, TokensOut: 0}}},
		{"client's mistake at the second", "", 0, []http.HandlerFunc{hangUp, status(400, `{}`)}, []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}, {Ending: policy.Abandoned, TokensOut: 0}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var urls []string
			for _, serve := range c.workers {
				if serve == nil {
					urls = append(urls, deadURL(t))
				} else {
					urls = append(urls, newFakeWorker(t, serve).URL)
				}
			}
			h := newTestAPI(t, Config{RequestTimeout: c.timeout}, urls...)
			policy := new(routertest.Clerk)
			h.router.Policy = policy
			if c.path == "" {
				c.path = testkit.ChatPath
			}
			// An answer that was announced longer than it is ends with an error here, too.
			request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+c.path, strings.NewReader(`{"messages":[]}`))
			request.Header.Set("Content-Type", "application/json")
			if response, err := h.Client().Do(request); err == nil {
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			testkit.Eventually(t, 5*time.Second, "the request is off the books", func() bool { return len(policy.Told()) >= len(c.want) && routertest.InFlight(h.router) == 0 })
			if got := policy.Endings(); !slices.Equal(got, c.want) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			policy.OncePerDecision(t)
		})
	}
}

func TestAClientThatLeavesIsNobodysFault(t *testing.T) {
	for _, c := range []struct {
		name    string
		serve   http.HandlerFunc
		started bool // leave after the first event
	}{
		{"before the first byte", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, false},
		{"in mid-stream", func(w http.ResponseWriter, r *http.Request) {
			testkit.StreamOf(testkit.TokenEvent)(w, r)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			worker := newFakeWorker(t, c.serve)
			h := newTestAPI(t, Config{RequestTimeout: time.Minute}, worker.URL)
			rule := new(routertest.Clerk)
			h.router.Policy = rule
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			request, _ := http.NewRequestWithContext(ctx, http.MethodPost, h.URL+testkit.ChatPath, strings.NewReader(`{"stream":true}`))
			if c.started {
				response, err := h.Client().Do(request)
				if err != nil {
					t.Fatal(err)
				}
				defer response.Body.Close()
			} else {
				done := make(chan struct{})
				go func() {
					defer close(done)
					if response, err := h.Client().Do(request); err == nil {
						response.Body.Close()
					}
				}()
				defer func() { <-done }()
				testkit.Eventually(t, 5*time.Second, "the request reached the worker", func() bool { return len(worker.Received()) == 1 })
			}
			leave()
			testkit.Eventually(t, 5*time.Second, "told", func() bool { return len(rule.Told()) > 0 })
			if got := rule.Endings(); !slices.Equal(got, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) {
				t.Errorf("told %v", got)
			}
		})
	}
}

// TestEveryEndOfAReservationIsToldOnce is the same for clients of the router
// port, who do not say how a request ended.
func TestEveryEndOfAReservationIsToldOnce(t *testing.T) {
	for _, c := range []struct {
		name  string
		calls []string // METHOD path body
		want  []routertest.ToldEnding
	}{
		{"freed without a first token", []string{"DELETE /reservations/a"}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"freed after the first token", []string{"POST /reservations/a/prefill_complete", "DELETE /reservations/a"}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"freed twice", []string{"DELETE /reservations/a", "DELETE /reservations/a"}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"mark_free", []string{`POST /route {"method":"mark_prefill","request_id":"a"}`, `POST /route {"method":"mark_free","request_id":"a"}`}, []routertest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"another request has ended", []string{`POST /select_and_reserve {"selection_id":"b","token_ids":[1]}`, "DELETE /reservations/b"}, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"chosen, but not booked", []string{`POST /select {"selection_id":"b","token_ids":[1]}`, `POST /find_best_worker {"token_ids":[1]}`}, nil},
		{"booked, but not chosen", []string{`POST /reservations {"selection_id":"b","token_ids":[1],"worker_id":0}`, "DELETE /reservations/b"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newTestAPI(t, Config{}, deadURL(t))
			policy := new(routertest.Clerk)
			h.router.Policy = policy
			for _, call := range append([]string{`POST /select_and_reserve {"selection_id":"a","token_ids":[1]}`}, c.calls...) {
				parts := append(strings.SplitN(call, " ", 3), "")
				request, _ := http.NewRequestWithContext(t.Context(), parts[0], h.selection.URL+parts[1], strings.NewReader(parts[2]))
				response, err := h.selection.Client().Do(request)
				if err != nil {
					t.Fatal(err)
				}
				response.Body.Close()
				if response.StatusCode >= 300 && call != "DELETE /reservations/a" {
					t.Fatalf("%s: %s", call, response.Status)
				}
			}
			if got := policy.Endings(); !slices.Equal(got, c.want) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			if booking := h.router.Booking("a"); booking != nil { // what newHouse looks for
				booking.End()
			}
		})
	}
	t.Run("nobody speaks of it", func(t *testing.T) {
		rt, clock := routertest.NewClockedRouter(t, 1, router.DefaultSettings())
		rule := new(routertest.Clerk)
		rt.Policy = rule
		routertest.MustRoute(t, rt, router.Request{ID: "forgotten", Tokens: testkit.Count(1, 8)})
		clock.Advance(router.BookingExpiry)
		rt.Loads()
		if got := fmt.Sprint(rule.Endings()); got != fmt.Sprint([]routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) {
			t.Errorf("told %s", got)
		}
	})
	t.Run("its worker is taken out", func(t *testing.T) {
		rt := routertest.NewTestRouter(t, "round-robin", 1)
		rule := new(routertest.Clerk)
		rt.Policy = rule
		held := selection.NewReservations()
		held.Install("a", routertest.MustRoute(t, rt, router.Request{ID: "a"}).Booking)
		held.ReleaseWorker(0)
		if got := rule.Endings(); !slices.Equal(got, []routertest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) {
			t.Errorf("told %v", got)
		}
	})
}
