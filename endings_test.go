package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
)

// toldEnding is what of a Feedback does not depend on the clock.
type toldEnding struct {
	Ending    Ending
	TokensOut int
}

func (p *clerk) endings() (list []toldEnding) {
	for _, f := range p.told() {
		list = append(list, toldEnding{f.Ending, f.TokensOut})
	}
	return list
}

// Streams as vLLM 0.32 sends them for the messages and the responses API.
const (
	messagesStream = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":0,\"output_tokens\":0}}}\n\n" +
		"event: content_block_delta\ndata: {\"delta\":{\"text\":\"hi\"}}\n\nevent: content_block_stop\ndata: {}\n\n" +
		"event: message_delta\ndata: {\"delta\":{},\"usage\":{\"input_tokens\":5,\"cache_read_input_tokens\":4,\"output_tokens\":3}}\n\n" +
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	responsesStream = "event: response.created\ndata: {\"response\":{\"usage\":null}}\n\n" +
		"event: response.output_text.delta\ndata: {\"delta\":\"hi\"}\n\n" +
		"event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":2,\"input_tokens_details\":{\"cached_tokens\":4}}}}\n\n"
)

func TestNamedEventsAreReadLikeOthers(t *testing.T) {
	for stream, want := range map[string]Usage{
		messagesStream:  {Known: true, PromptTokens: 9, OutputTokens: 3, CachedKnown: true, CachedTokens: 4},
		responsesStream: {Known: true, PromptTokens: 9, OutputTokens: 2, CachedKnown: true, CachedTokens: 4},
	} {
		for _, text := range []string{stream, strings.ReplaceAll(stream, "\n", "\r\n")} {
			var events eventScanner
			if out := events.scan([]byte(text)); string(out) != text {
				t.Errorf("passed on as %q", out)
			}
			if events.usage != want || events.count != 1 || !events.done {
				t.Errorf("%q: usage %+v, %d parts of the answer, done %t", text, events.usage, events.count, events.done)
			}
		}
	}
}

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
		want    []toldEnding
	}{
		{"whole answer", "", 0, []http.HandlerFunc{status(200, stopped)}, []toldEnding{{Finished, 3}}},
		{"whole answer without usage", "", 0, []http.HandlerFunc{status(200, `{}`)}, []toldEnding{{Finished, 0}}},
		{"whole stream", "", 0, []http.HandlerFunc{streamOf(tokenEvent, usageEvent, "[DONE]")}, []toldEnding{{Finished, 1}}},
		{"whole stream without usage", "", 0, []http.HandlerFunc{streamOf(tokenEvent, "[DONE]")}, []toldEnding{{Finished, 0}}},
		{"stream with a reason and no last event", "", 0, []http.HandlerFunc{streamOf(notLast, lastOne)}, []toldEnding{{Finished, 0}}},
		{"stream that breaks off after its last event", "", 0, []http.HandlerFunc{then(streamOf(tokenEvent, "[DONE]"), abort)}, []toldEnding{{Finished, 0}}},
		{"stream of the messages API", "/v1/messages", 0, []http.HandlerFunc{raw(messagesStream)}, []toldEnding{{Finished, 3}}},
		{"stream of the responses API", "/v1/responses", 0, []http.HandlerFunc{raw(responsesStream)}, []toldEnding{{Finished, 2}}},
		{"stream of which no end is known", "/v1/audio/transcriptions", 0, []http.HandlerFunc{streamOf(tokenEvent)}, []toldEnding{{Finished, 0}}},

		{"client's mistake", "", 0, []http.HandlerFunc{status(400, `{"error":{"code":400}}`)}, []toldEnding{{Abandoned, 0}}},
		{"client's mistake in a stream", "", 0, []http.HandlerFunc{streamOf(`{"error":{"message":"too long","code":400}}`, "[DONE]")}, []toldEnding{{Abandoned, 0}}},
		{"what no worker can", "", 0, []http.HandlerFunc{status(501, `{}`)}, []toldEnding{{Abandoned, 0}}},
		{"aborted at the engine", "", 0, []http.HandlerFunc{status(200, `{"choices":[{"finish_reason":"abort"}]}`)}, []toldEnding{{Abandoned, 0}}},
		{"stream aborted at the engine", "", 0, []http.HandlerFunc{streamOf(tokenEvent, `{"choices":[{"finish_reason":"abort"}]}`, "[DONE]")}, []toldEnding{{Abandoned, 0}}},

		{"engine error", "", 0, []http.HandlerFunc{status(500, `{}`)}, []toldEnding{{Failed, 0}}},
		{"bad gateway and the like", "", 0, []http.HandlerFunc{status(504, `{}`)}, []toldEnding{{Failed, 0}}},
		{"engine error as the reason", "", 0, []http.HandlerFunc{status(200, `{"choices":[{"finish_reason":"error"}]}`)}, []toldEnding{{Failed, 0}}},
		{"nothing listens", "", 0, []http.HandlerFunc{nil}, []toldEnding{{Failed, 0}}},
		{"connection closed without an answer", "", 0, []http.HandlerFunc{hangUp}, []toldEnding{{Failed, 0}}},
		{"stream that breaks off", "", 0, []http.HandlerFunc{then(streamOf(tokenEvent), abort)}, []toldEnding{{Failed, 0}}},
		{"stream that ends without saying so", "", 0, []http.HandlerFunc{streamOf(notLast, notLast)}, []toldEnding{{Failed, 0}}},
		{"stream of the messages API that ends without saying so", "/v1/messages", 0, []http.HandlerFunc{raw("event: message_start\ndata: {}\n\n")}, []toldEnding{{Failed, 0}}},
		{"stream with an engine error", "", 0, []http.HandlerFunc{streamOf(`{"error":{"code":500}}`, "[DONE]")}, []toldEnding{{Failed, 0}}},
		{"stream with an engine error in its middle", "", 0, []http.HandlerFunc{streamOf(notLast, `{"error":{"code":500}}`, "[DONE]")}, []toldEnding{{Failed, 0}}},
		{"half an answer", "", 0, []http.HandlerFunc{then(status(200, `{"choices"`), abort)}, []toldEnding{{Failed, 0}}},
		{"long answer that breaks off", "", 0, []http.HandlerFunc{then(status(200, strings.Repeat(" ", bufferedAnswer+1)), abort)}, []toldEnding{{Failed, 0}}},
		{"silence", "", 50 * time.Millisecond, []http.HandlerFunc{silence}, []toldEnding{{Failed, 0}}},
		{"silence in mid-stream", "", 50 * time.Millisecond, []http.HandlerFunc{then(streamOf(tokenEvent), silence)}, []toldEnding{{Failed, 0}}},

		{"answered by the second", "", 0, []http.HandlerFunc{nil, status(200, stopped)}, []toldEnding{{Failed, 0}, {Finished, 3}}},
		{"answered by the second after an engine error", "", 0, []http.HandlerFunc{status(503, ``), status(200, stopped)}, []toldEnding{{Failed, 0}, {Finished, 3}}},
		{"answered by none", "", 0, []http.HandlerFunc{hangUp, status(500, ``)}, []toldEnding{{Failed, 0}, {Failed, 0}}},
		{"client's mistake at the second", "", 0, []http.HandlerFunc{hangUp, status(400, `{}`)}, []toldEnding{{Failed, 0}, {Abandoned, 0}}},
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
			h := newHouse(t, Config{RequestTimeout: c.timeout}, urls...)
			policy := new(clerk)
			h.router.policy = policy
			if c.path == "" {
				c.path = chatPath
			}
			// An answer that was announced longer than it is ends with an error here, too.
			request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+c.path, strings.NewReader(`{"messages":[]}`))
			request.Header.Set("Content-Type", "application/json")
			if response, err := h.Client().Do(request); err == nil {
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			eventually(t, 5*time.Second, "the request is off the books", func() bool { return len(policy.told()) >= len(c.want) && inFlight(h.router) == 0 })
			if got := policy.endings(); !slices.Equal(got, c.want) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			policy.oncePerDecision(t)
		})
	}
}

// inFlight is how many requests are booked.
func inFlight(r *Router) (n int) {
	for _, load := range r.Loads() {
		n += load.ActiveRequests
	}
	return n
}

// oncePerDecision checks that every decision with a number was judged, once.
func (p *clerk) oncePerDecision(t *testing.T) {
	t.Helper()
	judged := map[uint64]int{}
	for _, f := range p.told() {
		judged[f.Decision]++
		if f.Decision == 0 || f.Now.IsZero() || f.Latency < 0 {
			t.Errorf("feedback %+v", f)
		}
	}
	for _, q := range p.queries() {
		want := 1
		if q.Decision == 0 {
			want = 0
		}
		if judged[q.Decision] != want {
			t.Errorf("decision %d was judged %d times, want %d", q.Decision, judged[q.Decision], want)
		}
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
			streamOf(tokenEvent)(w, r)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			worker := newFakeWorker(t, c.serve)
			h := newHouse(t, Config{RequestTimeout: time.Minute}, worker.URL)
			policy := new(clerk)
			h.router.policy = policy
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			request, _ := http.NewRequestWithContext(ctx, http.MethodPost, h.URL+chatPath, strings.NewReader(`{"stream":true}`))
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
				eventually(t, 5*time.Second, "the request reached the worker", func() bool { return len(worker.received()) == 1 })
			}
			leave()
			eventually(t, 5*time.Second, "told", func() bool { return len(policy.told()) > 0 })
			if got := policy.endings(); !slices.Equal(got, []toldEnding{{Abandoned, 0}}) {
				t.Errorf("told %v", got)
			}
		})
	}
}

func TestAPanicOverARequestLeavesNothingBooked(t *testing.T) {
	worker := newFakeWorker(t, streamOf(tokenEvent, "[DONE]"))
	router := newTestRouter(t, "round-robin", 0)
	router.Up(Target{Key: WorkerKey{}, URL: worker.URL})
	policy := new(clerk)
	router.policy = policy
	proxy := NewProxy(unobserved{}, 0, func(uint64) {})
	defer proxy.client.CloseIdleConnections()
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		u := Upstream{Method: http.MethodPost, Path: chatPath, Header: http.Header{headerRequest: {"r"}}}
		proxy.Forward(t.Context(), panickingWriter{httptest.NewRecorder()}, u, &Exchange{}, func([]uint64) (Decision, error) {
			return router.Route(t.Context(), Request{})
		})
	}()
	if got := policy.endings(); !slices.Equal(got, []toldEnding{{Abandoned, 0}}) || inFlight(router) != 0 {
		t.Errorf("told %v, %d in flight", got, inFlight(router))
	}
}

type panickingWriter struct{ http.ResponseWriter }

func (panickingWriter) Write([]byte) (int, error) { panic("no paper") }

// TestEveryEndOfAReservationIsToldOnce is the same for clients of the router
// port, who do not say how a request ended.
func TestEveryEndOfAReservationIsToldOnce(t *testing.T) {
	for _, c := range []struct {
		name  string
		calls []string // METHOD path body
		want  []toldEnding
	}{
		{"freed without a first token", []string{"DELETE /reservations/a"}, []toldEnding{{Abandoned, 0}}},
		{"freed after the first token", []string{"POST /reservations/a/prefill_complete", "DELETE /reservations/a"}, []toldEnding{{Finished, 0}}},
		{"freed twice", []string{"DELETE /reservations/a", "DELETE /reservations/a"}, []toldEnding{{Abandoned, 0}}},
		{"mark_free", []string{`POST /route {"method":"mark_prefill","request_id":"a"}`, `POST /route {"method":"mark_free","request_id":"a"}`}, []toldEnding{{Finished, 0}}},
		{"another request has ended", []string{`POST /select_and_reserve {"selection_id":"b","token_ids":[1]}`, "DELETE /reservations/b"}, []toldEnding{{Abandoned, 0}}},
		{"chosen, but not booked", []string{`POST /select {"selection_id":"b","token_ids":[1]}`, `POST /find_best_worker {"token_ids":[1]}`}, nil},
		{"booked, but not chosen", []string{`POST /reservations {"selection_id":"b","token_ids":[1],"worker_id":0}`, "DELETE /reservations/b"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHouse(t, Config{}, deadURL(t))
			policy := new(clerk)
			h.router.policy = policy
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
			if got := policy.endings(); !slices.Equal(got, c.want) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			if booking := h.router.Booking("a"); booking != nil { // what newHouse looks for
				booking.End()
			}
		})
	}
	t.Run("nobody speaks of it", func(t *testing.T) {
		router, clock := newClockedRouter(t, 1, DefaultRouterKnobs())
		policy := new(clerk)
		router.policy = policy
		mustRoute(t, router, Request{ID: "forgotten", Tokens: count(1, 8)})
		clock.advance(bookingExpiry)
		router.Loads()
		if got := fmt.Sprint(policy.endings()); got != fmt.Sprint([]toldEnding{{Abandoned, 0}}) {
			t.Errorf("told %s", got)
		}
	})
	t.Run("its worker is taken out", func(t *testing.T) {
		router := newTestRouter(t, "round-robin", 1)
		policy := new(clerk)
		router.policy = policy
		held := newReservations()
		held.install("a", mustRoute(t, router, Request{ID: "a"}).Booking)
		held.releaseWorker(0)
		if got := policy.endings(); !slices.Equal(got, []toldEnding{{Abandoned, 0}}) {
			t.Errorf("told %v", got)
		}
	})
}
