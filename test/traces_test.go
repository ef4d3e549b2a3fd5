package test

import (
	"context"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/collector"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"
)

// clientTrace is the trace that clients of these tests are in, and clientParent what
// their header says of it.
const (
	clientTrace  = "0af7651916cd43dd8448eb211c80319c"
	clientSpan   = "b7ad6b7169203331"
	clientParent = "00-" + clientTrace + "-" + clientSpan + "-01"
)

// traceTo is the environment of a router that sends traces to a collector over HTTP, ten
// times a second.
func traceTo(url string, more ...string) []string {
	return append([]string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + url, "OTEL_BSP_SCHEDULE_DELAY=100"}, more...)
}

// startTraced is StartMocks with an environment.
func startTraced(t *testing.T, env []string, workers int, args ...string) *Mocks {
	t.Helper()
	return startOverIn(t, env, Program, testkit.FreePorts(t, 2), StartWorkers(t, workers, args...), args...)
}

// tracedChat sends a chat with headers of a client's and returns the status.
func tracedChat(r *Router, content string, stream bool, headers ...string) int {
	r.T.Helper()
	return r.ask(map[string]any{"messages": Say(content), "max_tokens": 8, "stream": stream}, headers...).StatusCode
}

// treeOf waits for so many spans and draws them.
func treeOf(t *testing.T, c *collector.Collector, trace string, spans int) string {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d spans", spans), func() bool { return len(c.Spans(trace)) >= spans })
	return collector.Tree(c.Spans(trace), false)
}

// attachFake starts a router over one attached worker and waits until it is up.
func attachFake(t *testing.T, env []string, worker string, args ...string) *Router {
	t.Helper()
	r := StartAt(t, Program, testkit.FreePorts(t, 2), env, append([]string{"--engine=none", "--served-model-name=m", "--drain-timeout=1s", "--token-timeout=100ms", "--worker=" + worker}, args...)...)
	r.WaitReady(1, 10*time.Second)
	return r
}

func TestTraceOfARequest(t *testing.T) {
	t.Parallel()
	c := collector.Start(t)
	for _, test := range []struct {
		name   string
		env    []string
		stream bool
		want   string
	}{
		{"streamed, over HTTP", traceTo(c.HTTP), true, `
POST /v1/chat/completions SERVER [first_token]
  tokens INTERNAL
  decision INTERNAL
  attempt CLIENT [first_token]
`},
		{"whole, over gRPC", traceTo(c.GRPC, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "OTEL_SERVICE_NAME=mine"), false, `
POST /v1/chat/completions SERVER
  tokens INTERNAL
  decision INTERNAL
  attempt CLIENT
`},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := len(c.Spans(clientTrace))
			s := startTraced(t, test.env, 2)
			if status := tracedChat(s.Router, strings.Repeat("Hi ", 100), test.stream, "traceparent", clientParent, "tracestate", "vendor=1"); status != http.StatusOK {
				t.Fatal(status)
			}
			testkit.Eventually(t, 20*time.Second, "the trace", func() bool { return len(c.Spans(clientTrace)) == before+4 })
			var spans []collector.Span
			for _, span := range c.Spans(clientTrace) {
				if (span.Service == "mine") == (len(test.env) > 2) {
					spans = append(spans, span)
				}
			}
			if got := "\n" + collector.Tree(spans, false); got != test.want {
				t.Errorf("the tree is%swant%s", got, test.want)
			}
			server, decision, attempt := spans[0], spans[2], spans[3]
			if server.Parent != clientSpan || server.State != "vendor=1" {
				t.Errorf("the server's span hangs below %q, state %q", server.Parent, server.State)
			}
			for _, want := range []struct {
				span  collector.Span
				name  string
				value string // regular expression
			}{
				{server, "gen_ai.operation.name", "chat"}, {server, "gen_ai.usage.input_tokens", "[0-9]+"}, {server, "gen_ai.usage.output_tokens", "8"},
				{server, "http.response.status_code", "200"}, {server, "http.route", testkit.ChatPath}, {server, "gen_ai.response.finish_reasons", "length"},
				{spans[1], "kvrouter.tokens.source", "local"}, {spans[1], "kvrouter.tokens.count", "[0-9]+"},
				{decision, "kvrouter.decision.worker", "[01]"}, {decision, "kvrouter.decision.policy", "work"}, {decision, "kvrouter.decision.predicted_tokens", "0"},
				{decision, "kvrouter.decision.candidates", "worker [01]: .*; worker [01]: .*"}, {decision, "kvrouter.decision.score", ".+"},
				{attempt, "http.response.status_code", "200"}, {attempt, "server.address", "127.0.0.1"}, {attempt, "server.port", "[0-9]+"}, {attempt, "kvrouter.worker.id", server.Attributes["kvrouter.worker"]},
			} {
				if got := want.span.Attributes[want.name]; !regexp.MustCompile("^" + want.value + "$").MatchString(got) {
					t.Errorf("%s of %s is %q, want %s", want.name, want.span.Name, got, want.value)
				}
			}
			terms := 0
			for name := range decision.Attributes {
				if strings.HasPrefix(name, "kvrouter.decision.term.") {
					terms++
				}
			}
			if terms == 0 {
				t.Errorf("no terms in %v", decision.Attributes)
			}
			if text := fmt.Sprint(spans); strings.Contains(text, "Hi Hi") {
				t.Error("the trace tells the prompt")
			}
		})
	}
}

// TestTraceOfSharedRequests: both legs are attempts of one trace, whatever the protocol.
func TestTraceOfSharedRequests(t *testing.T) {
	t.Parallel()
	for _, kind := range []kv.Kind{kv.KindNIXL, kv.KindSGLang} {
		t.Run(kind.String(), func(t *testing.T) {
			c := collector.Start(t)
			s := startTraced(t, traceTo(c.HTTP), 2, "--prefill-workers=1", "--decode-workers=1", "--mock=disagg-kind="+kind.String())
			if status := tracedChat(s.Router, strings.Repeat("a long prompt ", 100), true, "traceparent", clientParent); status != http.StatusOK {
				t.Fatal(status)
			}
			tree := treeOf(t, c, clientTrace, 5)
			for _, line := range []string{"\n  decision INTERNAL\n", "\n  attempt prefill CLIENT\n", "\n  attempt decode CLIENT [first_token]\n", "SERVER [first_token]\n"} {
				if strings.Count(tree, line) != 1 {
					t.Errorf("no %q in\n%s", line, tree)
				}
			}
			for _, span := range c.Spans(clientTrace) {
				switch span.Name {
				case "decision":
					if span.Attributes["kvrouter.decision.prefill.worker"] != "0" || span.Attributes["kvrouter.decision.worker"] != "1" {
						t.Errorf("%v", span.Attributes)
					}
				case "attempt prefill":
					if span.Attributes["kvrouter.worker.id"] != "0" {
						t.Errorf("%v", span.Attributes)
					}
				}
			}
		})
	}
}

// TestTraceOfRetries: each attempt has its span, and the worker's trace hangs below it.
func TestTraceOfRetries(t *testing.T) {
	t.Parallel()
	c := collector.Start(t)
	s := startTraced(t, traceTo(c.HTTP), 2, "--mock=error-rate=1", "--retries=1")
	if status := tracedChat(s.Router, "Hi", false, "traceparent", clientParent); status < http.StatusInternalServerError {
		t.Fatal(status)
	}
	want := `
POST /v1/chat/completions SERVER failed
  tokens INTERNAL
  decision INTERNAL
  attempt CLIENT failed
  decision INTERNAL
  attempt CLIENT failed
`
	if got := "\n" + treeOf(t, c, clientTrace, 6); got != want {
		t.Errorf("the tree is%swant%s", got, want)
	}
	spans := c.Spans(clientTrace)
	first, again := spans[3].Attributes, spans[5].Attributes
	if first["http.request.resend_count"] != "" || again["http.request.resend_count"] != "1" || first["kvrouter.worker.id"] == again["kvrouter.worker.id"] || again["error.type"] == "" {
		t.Errorf("attempts %v and %v", first, again)
	}
}

func TestWhoseTraceGoesOn(t *testing.T) {
	t.Parallel()
	parent := func(flags string) string { return "00-" + clientTrace + "-" + clientSpan + "-" + flags }
	for _, test := range []struct {
		name    string
		args    []string
		env     []string
		headers []string
		follows bool // the client's trace
		links   bool // to it
		sampled bool
		state   string // that the worker gets
	}{
		{name: "a client's", headers: []string{"traceparent", parent("01"), "tracestate", "a=b"}, follows: true, sampled: true, state: "a=b"},
		{name: "a client's that is not sampled", headers: []string{"traceparent", parent("00")}, follows: true},
		{name: "none", sampled: true},
		{name: "none, none sampled", env: []string{"OTEL_TRACES_SAMPLER=parentbased_always_off"}},
		{name: "a client's, though none else is sampled", env: []string{"OTEL_TRACES_SAMPLER=parentbased_always_off"}, headers: []string{"traceparent", parent("01")}, follows: true, sampled: true},
		{name: "zeros", headers: []string{"traceparent", "00-" + strings.Repeat("0", 32) + "-" + clientSpan + "-01"}, sampled: true},
		{name: "too short", headers: []string{"traceparent", "00-abc-01", "tracestate", "a=b"}, sampled: true},
		{name: "too long", headers: []string{"traceparent", parent("01") + strings.Repeat("0", 5000)}, sampled: true},
		{name: "capitals", headers: []string{"traceparent", strings.ToUpper(parent("01"))}, sampled: true},
		{name: "two", headers: []string{"traceparent", parent("01"), "traceparent", parent("01")}, sampled: true},
		{name: "a state that is too long", headers: []string{"traceparent", parent("01"), "tracestate", "a=" + strings.Repeat("b", 200) + ",c=" + strings.Repeat("d", 200) + ",e=" + strings.Repeat("f", 200)}, follows: true, sampled: true},
		{name: "of a client that is not trusted", args: []string{"--trust-hints=false"}, headers: []string{"traceparent", parent("01")}, links: true, sampled: true},
		{name: "of a client that is not trusted, none sampled", args: []string{"--trust-hints=false"}, env: []string{"OTEL_TRACES_SAMPLER=parentbased_always_off"}, headers: []string{"traceparent", parent("01")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := collector.Start(t)
			received := make(chan http.Header, 10)
			worker := fakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
				received <- r.Header.Clone()
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, `{"choices":[{"finish_reason":"stop","message":{"content":"x"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
			})
			s := attachFake(t, traceTo(c.HTTP, test.env...), worker, test.args...)
			if status := tracedChat(s, "Hi", false, test.headers...); status != http.StatusOK {
				t.Fatal(status)
			}
			header := <-received
			match := regexp.MustCompile("^00-([0-9a-f]{32})-([0-9a-f]{16})-0([01])$").FindStringSubmatch(header.Get("traceparent"))
			if match == nil || len(header["Traceparent"]) != 1 {
				t.Fatalf("the worker gets %q", header["Traceparent"])
			}
			if follows := match[1] == clientTrace; follows != test.follows || match[2] == clientSpan && test.sampled || (match[3] == "1") != test.sampled {
				t.Errorf("the worker gets %q", match[0])
			}
			if got := header.Get("tracestate"); got != test.state {
				t.Errorf("the worker gets the state %q, want %q", got, test.state)
			}
			s.Stop() // which sends what is left
			spans := c.Spans("")
			if !test.sampled {
				if len(spans) > 0 {
					t.Errorf("it is not sampled, but %d spans came", len(spans))
				}
				return
			}
			var below, links bool
			for _, span := range spans {
				below = below || span.ID == match[2] && span.Name == "attempt"
				links = links || len(span.Links) == 1 && span.Links[0] == clientTrace
			}
			if !below || links != test.links {
				t.Errorf("the worker's trace is below the attempt: %v; linked to the client's: %v\n%s", below, links, collector.Tree(spans, true))
			}
		})
	}
}

// TestCollectorThatIsGoneBlocksNothing: requests are served as ever, and the end waits
// a few seconds at most.
func TestCollectorThatIsGoneBlocksNothing(t *testing.T) {
	t.Parallel()
	silent := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // else the client's end is not seen
		<-r.Context().Done()
	}))
	// The exporter keeps connections, also those that it dialed and then did not use.
	silent.Config.ReadHeaderTimeout, silent.Config.IdleTimeout = 100*time.Millisecond, 100*time.Millisecond
	silent.Start()
	defer silent.Close()
	for _, test := range []struct{ name, url, protocol string }{
		{"nobody listens, HTTP", deadURL(t), "http/protobuf"},
		{"nobody listens, gRPC", deadURL(t), "grpc"},
		{"it never answers, HTTP", silent.URL, "http/protobuf"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := startTraced(t, traceTo(test.url, "OTEL_EXPORTER_OTLP_PROTOCOL="+test.protocol, "OTEL_BSP_MAX_QUEUE_SIZE=64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=8"), 1)
			for i := range 100 {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				a, err := s.Chat(ctx, Say(fmt.Sprint(i)), i%2 == 0, 4)
				cancel()
				if err != nil || !a.Finished {
					t.Fatal(a, err)
				}
			}
			if page := s.Metrics(); sum(page, "kvrouter_trace_spans_ended_total") != 400 || sum(page, "kvrouter_trace_spans_sent_total") != 0 {
				t.Errorf("%v spans, %v of them sent; want 400, of which none is sent", sum(page, "kvrouter_trace_spans_ended_total"), sum(page, "kvrouter_trace_spans_sent_total"))
			}
			began := time.Now()
			s.Stop()
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("the end took %s", took)
			}
		})
	}
}

// TestExemplars: who asks for OpenMetrics gets the trace of a first token, if that was
// kept; who does not gets the page as ever.
func TestExemplars(t *testing.T) {
	t.Parallel()
	c := collector.Start(t)
	page := func(s *Mocks, accept string) string {
		request, _ := http.NewRequest(http.MethodGet, s.OpenAI+"/metrics", nil)
		request.Header.Set("Accept", accept)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		return string(text)
	}
	const open, plain = "application/openmetrics-text;version=1.0.0", "text/plain;version=0.0.4"
	example := regexp.MustCompile(`kvrouter_time_to_first_token_seconds_bucket\{.*\} \d+ # \{trace_id="` + clientTrace + `"\}`)
	for _, test := range []struct {
		name, url, parent string
		exemplar, open    bool
	}{
		{"sampled", c.HTTP, clientParent, true, true},
		{"not sampled", c.HTTP, strings.TrimSuffix(clientParent, "01") + "00", false, true},
		{"not traced", "", clientParent, false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := startTraced(t, traceTo(test.url), 1)
			tracedChat(s.Router, "Hi", true, "traceparent", test.parent)
			testkit.Eventually(t, 10*time.Second, "the first token is counted", func() bool {
				return strings.Contains(page(s, plain), "kvrouter_time_to_first_token_seconds_count")
			})
			text := page(s, open)
			if example.MatchString(text) != test.exemplar || strings.HasSuffix(text, "# EOF\n") != test.open {
				t.Errorf("exemplar wanted: %v, OpenMetrics: %v\n%s", test.exemplar, test.open, text)
			}
			if strings.Contains(page(s, plain), "trace_id") {
				t.Error("who asks for text gets exemplars")
			}
		})
	}
}
