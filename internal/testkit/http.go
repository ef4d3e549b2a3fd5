package testkit

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
)

// ChatPath is the route of chat completions.
const ChatPath = "/v1/chat/completions"

// TokenEvent is the data of a stream event with one token.
const TokenEvent = `{"choices":[{"delta":{"content":"hi"}}]}`

// MessagesStream and ResponsesStream are streams as vLLM 0.32 sends them for the
// messages and the responses API.
const (
	MessagesStream = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":0,\"output_tokens\":0}}}\n\n" +
		"event: content_block_delta\ndata: {\"delta\":{\"text\":\"hi\"}}\n\nevent: content_block_stop\ndata: {}\n\n" +
		"event: message_delta\ndata: {\"delta\":{},\"usage\":{\"input_tokens\":5,\"cache_read_input_tokens\":4,\"output_tokens\":3}}\n\n" +
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	ResponsesStream = "event: response.created\ndata: {\"response\":{\"usage\":null}}\n\n" +
		"event: response.output_text.delta\ndata: {\"delta\":\"hi\"}\n\n" +
		"event: response.completed\ndata: " +
		"{\"response\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":2,\"input_tokens_details\":{\"cached_tokens\":4}}}}\n\n"
)

// StreamOf returns a handler that streams events with the data given.
func StreamOf(events ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, e := range events {
			fmt.Fprintf(w, "data: %s\n\n", e)
		}
	}
}

// FakeWorker is the HTTP server of an engine, with answers defined by a test.
type FakeWorker struct {
	*httptest.Server
	Hung   atomic.Bool // nothing is answered any more
	Mu     sync.Mutex  // guards all below
	Bodies []string
	Header http.Header
}

// NewFakeWorker starts a worker of model m that answers inference requests with
// serve. It closes at the end of the test.
func NewFakeWorker(t testing.TB, serve http.HandlerFunc) *FakeWorker {
	t.Helper()
	f := &FakeWorker{}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case f.Hung.Load():
			f.Hang(r)
			return
		case r.URL.Path == "/health":
			return
		case r.URL.Path == "/v1/models":
			io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":8192}]}`)
			return
		case r.Header.Get(web.HeaderRequest) == "": // the router's own question for tokens
			http.NotFound(w, r)
			return
		}
		body, _ := io.ReadAll(r.Body)
		f.Mu.Lock()
		f.Bodies = append(f.Bodies, string(body))
		f.Header = r.Header.Clone()
		f.Mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(body))
		serve(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

// Hang waits until the client has disconnected.
func (*FakeWorker) Hang(r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // only then is it noticed
	<-r.Context().Done()
}

// Received returns the bodies of the requests so far.
func (f *FakeWorker) Received() []string {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	return append([]string(nil), f.Bodies...)
}

// HTTPGet gets url and returns the status and the body.
func HTTPGet(t testing.TB, url string) (status int, answer []byte) {
	t.Helper()
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if answer, err = io.ReadAll(response.Body); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, answer
}

// BootstrapAt returns the address of a server as a bootstrap address.
func BootstrapAt(t testing.TB, server *httptest.Server) (at kv.Bootstrap) {
	t.Helper()
	if err := at.UnmarshalText([]byte(server.Listener.Addr().String())); err != nil {
		t.Fatal(err)
	}
	return at
}

// MetricsLines is a metrics page: the value of each series.
type MetricsLines map[string]float64

// ReadMetricsPage reads the text of a metrics page.
func ReadMetricsPage(page string) MetricsLines {
	lines := MetricsLines{}
	for line := range strings.SplitSeq(page, "\n") {
		name, value, _ := strings.Cut(line, " ")
		if n, err := strconv.ParseFloat(value, 64); err == nil && !strings.HasPrefix(line, "#") {
			lines[name] = n
		}
	}
	return lines
}
