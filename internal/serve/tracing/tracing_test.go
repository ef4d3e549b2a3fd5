package tracing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/collector"
)

const (
	someTrace  = "0af7651916cd43dd8448eb211c80319c"
	someParent = "00-" + someTrace + "-b7ad6b7169203331-01"
)

// open opens a tracer with variables in pairs, and none else.
func open(t testing.TB, env ...string) (*Tracer, error) {
	t.Helper()
	for _, name := range []string{envEndpoint, envTracesEndpoint, envProtocol, envTracesProtocol, envExporter, envSampler, envSamplerArg, envDisabled, "OTEL_SERVICE_NAME"} {
		t.Setenv(name, "")
	}
	for i := 0; i+1 < len(env); i += 2 {
		t.Setenv(env[i], env[i+1])
	}
	tracer, err := Open("1.2.3", slog.New(slog.DiscardHandler))
	t.Cleanup(tracer.Close)
	return tracer, err
}

// served is a request as an HTTP server gets it.
func served(headers ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "http://host:8000/v1/chat/completions?key=secret", strings.NewReader("{}"))
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	return r
}

func TestVariablesTurnTracesOn(t *testing.T) {
	const url = "http://127.0.0.1:9"
	for _, test := range []struct {
		name string
		env  []string
		on   bool
		err  string // that it reports; empty: there is none
	}{
		{name: "none"},
		{name: "an endpoint", env: []string{envEndpoint, url}, on: true},
		{name: "an endpoint of traces", env: []string{envTracesEndpoint, url + "/v1/traces"}, on: true},
		{name: "an endpoint, by gRPC", env: []string{envEndpoint, url, envProtocol, "grpc"}, on: true},
		{name: "the exporter alone", env: []string{envExporter, "otlp"}, on: true},
		{name: "the exporter none", env: []string{envEndpoint, url, envExporter, "none"}},
		{name: "disabled", env: []string{envEndpoint, url, envDisabled, "TRUE"}},
		{name: "disabled, whatever else is wrong", env: []string{envEndpoint, "x", envDisabled, "true"}},
		{name: "not disabled", env: []string{envEndpoint, url, envDisabled, "false"}, on: true},
		{name: "a protocol without an endpoint", env: []string{envProtocol, "http/json"}},
		{name: "another exporter", env: []string{envExporter, "jaeger"}, err: envExporter},
		{name: "another protocol", env: []string{envEndpoint, url, envTracesProtocol, "http/json"}, err: envTracesProtocol + "=http/json"},
		{name: "no URL", env: []string{envEndpoint, "localhost:4317"}, err: envEndpoint},
		{name: "no URL of traces", env: []string{envEndpoint, url, envTracesEndpoint, "ftp://h"}, err: envTracesEndpoint},
		{name: "a sampler", env: []string{envEndpoint, url, envSampler, "parentbased_traceidratio", envSamplerArg, "0.25"}, on: true},
		{name: "a sampler without a share", env: []string{envEndpoint, url, envSampler, "traceidratio"}, on: true},
		{name: "no sampler", env: []string{envEndpoint, url, envSampler, "sometimes"}, err: envSampler + "=sometimes"},
		{name: "no share", env: []string{envEndpoint, url, envSampler, "traceidratio", envSamplerArg, "25%"}, err: envSamplerArg},
		{name: "a share above 1", env: []string{envEndpoint, url, envSampler, "traceidratio", envSamplerArg, "2"}, err: envSamplerArg},
		{name: "a share that is no number", env: []string{envEndpoint, url, envSampler, "traceidratio", envSamplerArg, "NaN"}, err: envSamplerArg},
	} {
		t.Run(test.name, func(t *testing.T) {
			tracer, err := open(t, test.env...)
			if (tracer != nil) != test.on || (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("on: %v, %v", tracer != nil, err)
			}
		})
	}
}

// follow takes a request the whole way, as the router does, and returns the trace that
// is kept.
func follow(tracer *Tracer, r *http.Request, target *kv.Target, header http.Header, decision *router.Decision) string {
	q := tracer.Begin(r, "/v1/chat/completions", time.Time{}, true)
	began := q.Now()
	q.Tokens(began, "local", 7)
	q.Decided(q.Now(), nil, decision)
	a := q.Attempt(kv.LegWhole, target, "", http.MethodPost, "/v1/chat/completions")
	a.Inject(header)
	a.Answered(http.StatusOK)
	a.End(time.Time{}, nil)
	q.End(time.Time{}, Outcome{Status: http.StatusOK, Worker: "0"})
	return q.SampledID()
}

func TestWithoutTracesNothingIsAllocated(t *testing.T) {
	r, target, header, decision := served("Traceparent", someParent), &kv.Target{URL: "http://w"}, http.Header{}, &router.Decision{}
	if n := testing.AllocsPerRun(100, func() { follow(nil, r, target, header, decision) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if kept := follow(nil, r, target, header, decision); kept != "" || len(header) > 0 {
		t.Errorf("trace %q is kept, the worker gets %v", kept, header)
	}
}

func BenchmarkRequest(b *testing.B) {
	target, header := &kv.Target{URL: "http://w"}, http.Header{}
	for _, bench := range []struct{ name, endpoint, parent string }{
		{"off", "", someParent},
		{"not kept", "http://127.0.0.1:9", strings.TrimSuffix(someParent, "1") + "0"},
		{"kept", "http://127.0.0.1:9", someParent},
	} {
		b.Run(bench.name, func(b *testing.B) {
			tracer, err := open(b, envEndpoint, bench.endpoint)
			if err != nil {
				b.Fatal(err)
			}
			r, decision := served("Traceparent", bench.parent), decisionOf(4, 8)
			b.ReportAllocs()
			for b.Loop() {
				follow(tracer, r, target, header, decision)
			}
		})
	}
}

// decisionOf is a decision among so many workers, each with so many terms.
func decisionOf(workers, terms int) *router.Decision {
	chosen := uint64(workers / 2)
	receipt := &router.Receipt{Worker: &chosen, Explanation: policy.Explanation{Policy: "work", How: policy.HowHighest}}
	for i := range workers {
		score := &policy.Score{Total: 0 - float64(i)}
		for n := range terms {
			score.Terms = append(score.Terms, policy.Term{Name: fmt.Sprint("t", n), Value: float64(n)})
		}
		receipt.Candidates = append(receipt.Candidates, router.ReceiptCandidate{Worker: uint64(i), Score: score, Excluded: strings.Repeat("x", 1000*(i%2))})
	}
	return &router.Decision{Booking: &router.Booking{}, Target: kv.Target{Key: kv.WorkerKey{Worker: chosen}}, Tokens: 100, OverlapTokens: 64, Receipts: []*router.Receipt{receipt}}
}

// TestSpansAreBounded: what clients and fleets make long is cut, and the query, which
// may hold a key, is not told.
func TestSpansAreBounded(t *testing.T) {
	c := collector.Start(t)
	tracer, err := open(t, envEndpoint, c.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 100_000)
	r := served("User-Agent", long)
	q := tracer.Begin(r, "/v1/chat/completions", time.Now(), true)
	q.Tokens(q.Now(), long, 1)
	q.Tokens(q.Now(), "", 1) // no prompt, no span
	q.Decided(q.Now(), errors.New(long), decisionOf(1000, 1000))
	q.Attempt(kv.LegWhole, &kv.Target{URL: "http://user:password@w:1"}, "", http.MethodPost, "/v1/chat/completions").End(time.Time{}, errors.New(long))
	q.End(time.Now(), Outcome{At: time.Now(), Status: 200, Model: long, Worker: long, Finish: long})
	tracer.Close()
	spans := c.Spans("")
	if want := "POST /v1/chat/completions SERVER\n  tokens INTERNAL\n  decision INTERNAL failed\n  attempt CLIENT failed\n"; collector.Tree(spans, false) != want {
		t.Fatalf("the tree is\n%s", collector.Tree(spans, false))
	}
	for _, span := range spans {
		all := span.Why
		for _, text := range span.Attributes {
			all += text
		}
		if len(all) > 8000 || len(span.Attributes) > 64 || strings.Contains(all, "secret") || strings.Contains(all, "password") {
			t.Errorf("%s has %d attributes of %d bytes: %.200s", span.Name, len(span.Attributes), len(all), all)
		}
	}
	decision := spans[2].Attributes
	for name, want := range map[string]string{"worker": "500", "score": "-500", "term.t15": "15", "term.t16": "", "candidates_left_out": "984", "predicted_tokens": "64"} {
		if got := decision["kvrouter.decision."+name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if !strings.HasPrefix(decision["kvrouter.decision.candidates"], "worker 500: -500, overlap 0 blocks") || !strings.Contains(decision["kvrouter.decision.candidates"], "; worker 0: 0") {
		t.Errorf("candidates %s", decision["kvrouter.decision.candidates"])
	}
}

// TestForeignBytesLoseNoSpan: a collector refuses all spans that are sent together with
// one whose text is not UTF-8.
func TestForeignBytesLoseNoSpan(t *testing.T) {
	c := collector.Start(t)
	tracer, err := open(t, envEndpoint, c.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	r := served("User-Agent", "caf\xe9")
	r.Host, r.URL.Path = "h\xff", "/v1/\xfe"
	q := tracer.Begin(r, "/v1/chat/completions", time.Now(), true)
	q.Attempt(kv.LegWhole, &kv.Target{URL: "http://w:1"}, "", http.MethodPost, "/v1/chat/completions").End(time.Time{}, errors.New("\xff"))
	q.End(time.Now(), Outcome{At: time.Now(), Status: 500, Model: "m\xff", Finish: "\xfe"})
	tracer.Close()
	if got := len(c.Spans("")); got != 2 {
		t.Errorf("%d spans came, want 2", got)
	}
}

func TestHowAttemptsEnd(t *testing.T) {
	c := collector.Start(t)
	tracer, err := open(t, envEndpoint, c.GRPC, envTracesProtocol, "grpc")
	if err != nil {
		t.Fatal(err)
	}
	q := tracer.Begin(served(), "/v1/completions", time.Now(), true)
	for _, test := range []struct {
		name   string
		status int
		err    error
		kind   string
		failed bool
	}{
		{"well", 200, nil, "", false},
		{"refused", 503, nil, "503", true},
		{"unreachable", 0, errors.New("connection refused"), "_OTHER", true},
		{"left", 200, fmt.Errorf("the client: %w", context.Canceled), "canceled", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := q.Attempt(kv.LegDecode, &kv.Target{URL: "http://w:1"}, "", http.MethodPost, "/v1/completions")
			a.Answered(test.status)
			a.End(time.Time{}, test.err)
			id := trace.SpanContextFromContext(a.ctx).SpanID().String()
			var found collector.Span
			if err := tracer.provider.ForceFlush(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, span := range c.Spans("") {
				if span.ID == id {
					found = span
				}
			}
			if found.Failed != test.failed || found.Attributes["error.type"] != test.kind || found.Attributes["kvrouter.leg"] != "decode" {
				t.Errorf("%+v", found)
			}
		})
	}
	q.End(time.Now(), Outcome{At: time.Now(), Status: 499})
}

// TestQueueIsBounded: a collector that takes nothing costs the queue, and no wait.
func TestQueueIsBounded(t *testing.T) {
	hangs := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // else the client's end is not seen
		<-r.Context().Done()
	}))
	defer hangs.Close()
	tracer, err := open(t, envEndpoint, hangs.URL, "OTEL_BSP_MAX_QUEUE_SIZE", "32", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
	if err != nil {
		t.Fatal(err)
	}
	const requests = 10_000
	began := time.Now()
	for range requests {
		tracer.Begin(served(), "/v1/completions", time.Now(), true).End(time.Now(), Outcome{At: time.Now(), Status: 200})
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("%d requests took %s", requests, took)
	}
	closing := time.Now()
	tracer.Close()
	if took := time.Since(closing); took > flushLimit+endLimit+5*time.Second {
		t.Errorf("the end took %s", took)
	}
	n := tracer.Counts()
	if n.Ended != requests || n.Sent != 0 || n.Failed == 0 || n.Failed > 100 {
		t.Errorf("%+v", n)
	}
	testkit.Eventually(t, 10*time.Second, "the exporter has ended", func() bool {
		select {
		case <-tracer.sender.closed:
			return true
		default:
			return false
		}
	})
}

func TestOperations(t *testing.T) {
	for route, want := range map[string]string{
		"/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion", "/generate": "text_completion",
		"/v1/embeddings": "embeddings", "/v2/embed": "embeddings", "/v1/rerank": "rerank",
	} {
		if got := operation(route); got != want {
			t.Errorf("%s is %q, want %q", route, got, want)
		}
	}
}

func FuzzParent(f *testing.F) {
	f.Add(someParent, "a=b")
	f.Add("00-"+someTrace+"-0000000000000000-01", "")
	f.Add("cc-"+someTrace+"-b7ad6b7169203331-01-what", strings.Repeat("a=b,", 200))
	f.Fuzz(func(t *testing.T, parent, state string) {
		sc := parentOf(http.Header{headerParent: {parent}, headerState: {state}})
		if !sc.IsValid() {
			return
		}
		if !sc.IsRemote() || len(sc.TraceState().String()) > maxState || !strings.Contains(parent, sc.TraceID().String()) {
			t.Errorf("%q and %q make %+v", parent, state, sc)
		}
	})
}

func TestSpansNameWorkersThatHaveNames(t *testing.T) {
	c := collector.Start(t)
	tracer, err := open(t, envEndpoint, c.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	q := tracer.Begin(served(), "/v1/chat/completions", time.Now(), true)
	d := decisionOf(2, 1)
	d.Receipts[0].WorkerName, d.Receipts[0].Candidates[1].WorkerName = "pod-a", "pod-a"
	q.Decided(q.Now(), nil, d)
	q.Attempt(kv.LegWhole, &kv.Target{URL: "http://w:1"}, "pod-a", http.MethodPost, "/v1/chat/completions").End(time.Time{}, nil)
	q.End(time.Now(), Outcome{At: time.Now(), Status: 200, Worker: "pod-a"})
	tracer.Close()
	spans := c.Spans("")
	if len(spans) != 3 {
		t.Fatalf("%d spans", len(spans))
	}
	for i, want := range []map[string]string{
		{"kvrouter.worker": "pod-a"}, {"kvrouter.decision.worker": "1", "kvrouter.decision.worker_name": "pod-a"}, {"kvrouter.worker.name": "pod-a"},
	} {
		for name, value := range want {
			if got := spans[i].Attributes[name]; got != value {
				t.Errorf("%s of %s is %q, want %s", name, spans[i].Name, got, value)
			}
		}
	}
	if got := spans[1].Attributes["kvrouter.decision.candidates"]; !strings.HasPrefix(got, "worker pod-a: ") || !strings.Contains(got, "; worker 0: ") {
		t.Errorf("candidates %s", got)
	}
}
