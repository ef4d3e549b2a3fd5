package proxy

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// front serves requests of one route with a body by workers, as the port does.
func front(t *testing.T, route, body string, serve ...http.HandlerFunc) *httptest.Server {
	t.Helper()
	rt := routertest.New(t, "round-robin", 0)
	for i, handler := range serve {
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		rt.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: server.URL, Generation: 1})
	}
	settings := testkit.Defaults[Settings]()
	settings.RequestTimeout = time.Minute
	p := New(settings, Deps{Observer: testkit.SilentObserver{}, Failed: func(uint64) {}})
	t.Cleanup(p.Close)
	parsed, ok := jsonbody.Parse([]byte(body))
	if !ok {
		t.Fatal("no JSON")
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u := Upstream{Method: http.MethodPost, Path: route, Route: route, Header: http.Header{web.HeaderRequest: {"r"}}, Body: parsed, EndMarked: route != "/v1/audio/speech", MaxRetries: 2}
		if route == chatRoute {
			u.AskUsage = true
			u.Migration = NewMigration(route, parsed, []uint32{1, 2, 3}, true, false, nil)
		}
		err := p.Forward(r.Context(), w, u, &Exchange{Route: route}, chooseOne(func(exclude []uint64) (router.Decision, error) {
			return rt.Route(r.Context(), router.Request{Exclude: exclude, AnsweredWhole: true})
		}))
		if err != nil && !errors.Is(err, ErrAnswered) {
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	t.Cleanup(server.Close)
	return server
}

// TestAnAnswerThatComesInPiecesIsPassedOnAsItComes for every content type: a worker sends its
// second piece only when the client has the first.
func TestAnAnswerThatComesInPiecesIsPassedOnAsItComes(t *testing.T) {
	for _, c := range []struct{ kind, route, body string }{
		{"audio/pcm", "/v1/audio/speech", `{}`}, {"audio/mpeg", "/v1/audio/speech", `{"stream":true}`}, {"application/octet-stream", "/v1/audio/speech", `{}`},
		{"application/x-ndjson", "/v1/audio/transcriptions", `{"stream":true}`}, {"text/plain; charset=utf-8", "/v1/audio/transcriptions", `{"stream":true}`},
		{"multipart/x-mixed-replace; boundary=x", "/v1/images/generations", `{}`}, {"application/json", generateRoute, `{"stream":true}`}, {"", "/pooling", `{}`},
		{"text/event-stream", "/v1/audio/speech", `{"stream_format":"sse"}`},
	} {
		t.Run(c.kind, func(t *testing.T) {
			goesOn := make(chan struct{})
			server := front(t, c.route, c.body, func(w http.ResponseWriter, r *http.Request) {
				w.Header()["Content-Type"] = []string{c.kind}
				if c.kind == "" {
					w.Header()["Content-Type"] = nil
				}
				io.WriteString(w, "data: one\n\n")
				w.(http.Flusher).Flush()
				select {
				case <-goesOn:
				case <-time.After(10 * time.Second):
				}
				io.WriteString(w, "data: two\n\n")
			})
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			request, _ := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, nil)
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			first := make([]byte, len("data: one\n\n"))
			_, err = io.ReadFull(response.Body, first)
			close(goesOn)
			rest, end := io.ReadAll(response.Body)
			if err != nil || end != nil || string(first)+string(rest) != "data: one\n\ndata: two\n\n" || c.kind != "" && response.Header.Get("Content-Type") != c.kind {
				t.Errorf("%q, %v, %q, %v, %v", first, err, rest, end, response.Header)
			}
		})
	}
}

// TestAnAnswerThatBreaksOffIsNotTakenForWhole for every content type, also where the framing alone
// can say it. One that breaks off before its first byte is another worker's.
func TestAnAnswerThatBreaksOffIsNotTakenForWhole(t *testing.T) {
	for _, c := range []struct{ kind, route, last string }{
		{"audio/pcm", "/v1/audio/speech", ""}, {"application/octet-stream", "/v1/audio/speech", ""}, {"text/plain", "/v1/audio/transcriptions", ""},
		{"application/x-ndjson", "/v1/audio/transcriptions", `{"error":{"code":502,`},
		{"text/event-stream", "/v1/messages", "event: error\ndata: {\"error\":{\"message\""},
		{"text/event-stream", ResponsesRoute, "event: error\ndata: {\"code\":\"server_error\""},
		{"text/event-stream", completionRoute, `data: {"error":{"code":502`},
	} {
		for _, ends := range []string{"\n\n", ""} {
			t.Run(fmt.Sprintf("%s %s %q", c.kind, c.route, ends), func(t *testing.T) {
				var dies atomic.Bool
				serve := func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("Content-Type", c.kind)
					if !dies.Swap(true) {
						w.(http.Flusher).Flush()
						panic(http.ErrAbortHandler)
					}
					io.WriteString(w, `data: {"type":"x","sequence_number":4}`+ends)
					w.(http.Flusher).Flush()
					panic(http.ErrAbortHandler)
				}
				server := front(t, c.route, `{"stream":true}`, serve, serve, serve)
				response, err := http.Post(server.URL, "application/json", nil)
				if err != nil {
					if ends == "" && c.kind == "text/event-stream" {
						return // nothing of the answer came
					}
					t.Fatal(err)
				}
				defer response.Body.Close()
				body, err := io.ReadAll(response.Body)
				if stream := c.kind == "text/event-stream"; stream == (err != nil) && response.StatusCode == http.StatusOK {
					t.Errorf("the client reads to the end: %v: %q", err, body)
				}
				if response.StatusCode != http.StatusOK {
					if ends == "" && c.kind == "text/event-stream" {
						return // half a line is not passed on, so that nothing was answered
					}
					t.Fatalf("status %d", response.StatusCode)
				}
				if !strings.Contains(string(body), c.last) || !strings.HasPrefix(string(body), `data: {"type":"x"`) {
					t.Errorf("%q", body)
				}
				for _, event := range testkit.Events(string(body)) {
					if _, data, named := strings.Cut(event, "error "); c.kind == "text/event-stream" && named && (!gjson.Valid(data) || c.route == ResponsesRoute && gjson.Get(data, "sequence_number").Int() != 5) {
						t.Errorf("event %q", event)
					}
				}
			})
		}
	}
}

// TestAStreamThatBeginsWithAnErrorIsAnotherWorkers on every route, whatever comes before it that
// does not matter, and however it is written.
func TestAStreamThatBeginsWithAnErrorIsAnotherWorkers(t *testing.T) {
	const ping = ": ping\n\n"
	for name, c := range map[string]struct{ route, begin, good string }{
		"a chat":               {chatRoute, `data: {"error":{"code":500}}`, "data: " + testkit.TokenEvent + "\n\ndata: [DONE]\n\n"},
		"a chat after a ping":  {chatRoute, ping + `data: { "error" : {"message":"x", "c\u006fde": "503"}}`, "data: " + testkit.TokenEvent + "\n\ndata: [DONE]\n\n"},
		"a chat, turned":       {chatRoute, `data:{"object":"error", "error":{"code":500}}`, "data: " + testkit.TokenEvent + "\n\ndata: [DONE]\n\n"},
		"a completion":         {completionRoute, ping + ping + `data: {"\u0065rror":{"type":"InternalServerError"}}`, "data: " + testkit.TokenEvent + "\n\ndata: [DONE]\n\n"},
		"generate":             {generateRoute, ping + `data: {"error": {"code": 500}}`, "data: {\"text\":\"x\",\"meta_info\":{\"prompt_tokens\":1,\"finish_reason\":{\"type\":\"stop\"}}}\n\ndata: [DONE]\n\n"},
		"messages":             {"/v1/messages", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\"}}", testkit.MessagesStream},
		"messages, overloaded": {"/v1/messages", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}", testkit.MessagesStream},
		"messages, begun":      {"/v1/messages", "event: message_start\ndata: {\"type\":\"message_start\"}\n\nevent: ping\ndata: {}\n\nevent:error\r\ndata:{ \"type\" : \"error\"}", testkit.MessagesStream},
		"messages, no name":    {"/v1/messages", `data: {"type": "error", "error": {"type": "api_error"}}`, testkit.MessagesStream},
		"responses":            {ResponsesRoute, "event: error\ndata: {\"type\":\"error\",\"code\":\"server_error\",\"message\":\"x\",\"sequence_number\":0}", testkit.ResponsesStream},
		"responses, begun": {ResponsesRoute, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"a\"}}\n\nevent: response.in_progress\ndata: {}\n\n" +
			"event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}", testkit.ResponsesStream},
	} {
		t.Run(name, func(t *testing.T) {
			var bad atomic.Int32
			serve := func(stream string, count *atomic.Int32) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					count.Add(1)
					w.Header().Set("Content-Type", "text/event-stream")
					for event := range strings.SplitAfterSeq(stream, "\n\n") {
						io.WriteString(w, event)
						w.(http.Flusher).Flush()
					}
				}
			}
			server := front(t, c.route, `{"stream":true,"messages":[]}`, serve(c.begin+"\n\n", &bad), serve(c.good, new(atomic.Int32)))
			for range 12 {
				response, err := http.Post(server.URL, "application/json", nil)
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(response.Body)
				response.Body.Close()
				if err != nil || string(body) != c.good {
					t.Errorf("%v: %q", err, body)
				}
			}
			if n := bad.Load(); n < 1 || n > 5 {
				t.Errorf("the worker that fails got %d of 12 requests", n)
			}
		})
	}
}

// TestAStreamThatARequestIsToBlameForIsPassedOn with its error.
func TestAStreamThatARequestIsToBlameForIsPassedOn(t *testing.T) {
	for route, stream := range map[string]string{
		chatRoute:      "data: {\"error\":{\"code\":400,\"message\":\"too long\"}}\n\n",
		"/v1/messages": "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\"}}\n\n",
		ResponsesRoute: "event: error\ndata: {\"type\":\"error\",\"code\":\"invalid_prompt\"}\n\n",
	} {
		var asked atomic.Int32
		serve := func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, stream)
		}
		response, err := http.Post(front(t, route, `{"stream":true}`, serve, serve).URL, "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if string(body) != stream || asked.Load() != 1 {
			t.Errorf("%s: %d requests: %q", route, asked.Load(), body)
		}
	}
}

// packed returns what writes a text with a content encoding, part by part.
func packed(w io.Writer, encoding string) interface {
	io.Writer
	Flush() error
	Close() error
} {
	switch encoding {
	case "gzip":
		return gzip.NewWriter(w)
	case "deflate":
		return zlib.NewWriter(w)
	}
	raw, _ := flate.NewWriter(w, 1)
	return raw
}

// TestACompressedAnswerIsReadAndChangedAsAnyOther though the router has asked for none: the usage
// and the token ids that only the router has asked for do not reach the client.
func TestACompressedAnswerIsReadAndChangedAsAnyOther(t *testing.T) {
	for name, encoding := range map[string]string{"gzip": "gzip", "zlib": "deflate", "raw": "deflate"} {
		t.Run(name, func(t *testing.T) {
			goesOn := make(chan struct{})
			serve := func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				if got := r.Header.Get("Accept-Encoding"); got != "identity" || !bytes.Contains(body, []byte("include_usage")) {
					t.Errorf("asked with %q for %s", got, body)
				}
				w.Header().Set("Content-Type", "text/event-stream")
				w.Header().Set("Content-Encoding", encoding)
				kind := encoding
				if name == "raw" {
					kind = ""
				}
				out := packed(w, kind)
				for i, event := range []string{`{"id":"a","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"x"},"token_ids":[7],"finish_reason":null}]}`, `{"id":"a","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"y"},"token_ids":[8],"finish_reason":"stop"}]}`, `{"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}`, "[DONE]"} {
					fmt.Fprintf(out, "data: %s\n\n", event)
					out.Flush()
					w.(http.Flusher).Flush()
					if i == 0 {
						<-goesOn
					}
				}
				out.Close()
			}
			response, err := http.Post(front(t, chatRoute, `{"stream":true,"messages":[]}`, serve, serve).URL, "application/json", nil)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			first := make([]byte, 40)
			if _, err := io.ReadFull(response.Body, first); err != nil {
				t.Error(err)
			}
			close(goesOn)
			rest, err := io.ReadAll(response.Body)
			body := string(first) + string(rest)
			if err != nil || response.Header.Get("Content-Encoding") != "" || textOf(body) != "xy" || strings.Contains(body, "usage") || strings.Contains(body, "[7]") || !strings.HasSuffix(body, "data: [DONE]\n\n") {
				t.Errorf("%v, %v: %s", err, response.Header, body)
			}
		})
	}
}

// TestAnAnswerThatCannotBeDecodedIsAskedForAgain as the client wrote the request, once for each
// worker: what cannot be read cannot be taken out.
func TestAnAnswerThatCannotBeDecodedIsAskedForAgain(t *testing.T) {
	const request = `{"stream":true,"messages":[]}`
	var bodies []string
	serve := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies = append(bodies, string(body))
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("Content-Encoding", "br")
		io.WriteString(w, "packed")
	}
	server := front(t, chatRoute, request, serve)
	for range 2 {
		response, err := http.Post(server.URL, "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if string(body) != "packed" || response.Header.Get("Content-Encoding") != "br" {
			t.Errorf("%q, %v", body, response.Header)
		}
	}
	if len(bodies) != 3 || bodies[0] == request || bodies[1] != request || bodies[2] != request {
		t.Errorf("the worker got %q", bodies)
	}
}

// TestAStreamWithoutItsEndSaysSo for a worker that gives an answer up and closes its stream as if
// it were whole.
func TestAStreamWithoutItsEndSaysSo(t *testing.T) {
	for route, stream := range map[string]string{
		chatRoute:      "data: " + testkit.TokenEvent + "\n\n",
		"/v1/messages": "event: content_block_delta\ndata: {\"delta\":{\"text\":\"hi\"}}\n\n",
		ResponsesRoute: "event: response.output_text.delta\ndata: {\"delta\":\"hi\",\"sequence_number\":8}\n\n",
	} {
		for _, half := range []string{"", "event: x\ndata: {\"a\"", "data: {\"a\":1}", "data: {\"a\":1}\n"} {
			serve := func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(w, stream+half)
			}
			response, err := http.Post(front(t, route, `{"stream":true,"messages":[]}`, serve).URL, "application/json", nil)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(response.Body)
			response.Body.Close()
			events := testkit.Events(string(body))
			last := events[len(events)-1]
			if !gjson.Valid(strings.TrimPrefix(last, "error ")) || !strings.HasPrefix(string(body), stream) || !gjson.Get(strings.TrimPrefix(last, "error "), "error.message").Exists() || route == ResponsesRoute && gjson.Get(strings.TrimPrefix(last, "error "), "sequence_number").Int() != 9 {
				t.Errorf("%s: %q", route, body)
			}
		}
	}
}
