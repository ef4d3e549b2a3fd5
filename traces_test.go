package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/collector"
)

// clientTrace is the trace that clients of these tests are in, and clientParent what
// their header says of it.
const (
	clientTrace  = "0af7651916cd43dd8448eb211c80319c"
	clientSpan   = "b7ad6b7169203331"
	clientParent = "00-" + clientTrace + "-" + clientSpan + "-01"
)

// tracedChat sends a chat with headers of a client's and returns the status.
func tracedChat(t *testing.T, s *site, content string, stream bool, headers ...string) int {
	t.Helper()
	text, _ := json.Marshal(map[string]any{"messages": []map[string]string{message("user", content)}, "max_tokens": 8, "stream": stream})
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.openAI+testkit.ChatPath, bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode
}

// attach starts a router over one attached worker and waits until it is up.
func attach(t *testing.T, worker string, args ...string) *mockSite {
	t.Helper()
	s := startApp(t, testkit.FreePorts(t, 2), append([]string{"--engine=none", "--served-model-name=m", "--drain-timeout=1s", "--token-timeout=100ms", "--worker=" + worker}, args...)...)
	testkit.Eventually(t, 10*time.Second, "the worker is up", func() bool { return len(s.app.router.Targets()) == 1 })
	return s
}

// TestTraceOnRealVLLM has a router and a vLLM worker tell the same collector of one
// chat, whose client is traced, too: it is one tree.
func TestTraceOnRealVLLM(t *testing.T) {
	if os.Getenv("KVROUTER_TRACES") == "" {
		t.Skip("make test-traces runs this")
	}
	c := collector.Start(t)
	env := []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.HTTP, "OTEL_SERVICE_NAME=my-router", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + c.HTTP + "/v1/traces", "OTEL_BSP_SCHEDULE_DELAY=200"}
	s := startSite(t, 1, env, "--", "--otlp-traces-endpoint", c.GRPC)
	if status := tracedChat(t, s, "What is the capital of France?", true, "traceparent", clientParent); status != http.StatusOK {
		t.Fatal(status)
	}
	engine := func() (of []collector.Span) {
		for _, span := range c.Spans(clientTrace) {
			if span.Service == "vllm" {
				of = append(of, span)
			}
		}
		return of
	}
	testkit.Eventually(t, time.Minute, "spans of the router and of vLLM", func() bool { return len(engine()) > 0 && len(c.Spans(clientTrace)) >= len(engine())+4 })
	spans := c.Spans(clientTrace)
	t.Logf("one trace through router and engine, below the client's span %s:\n%s", clientSpan, collector.Tree(spans, true))
	ids := map[string]collector.Span{}
	for _, span := range spans {
		ids[span.ID] = span
	}
	for _, span := range spans {
		if span.Service == "vllm" && ids[span.Parent].Service != "vllm" && ids[span.Parent].Name != "attempt" {
			t.Errorf("vLLM's %s hangs below %q", span.Name, ids[span.Parent].Name)
		}
		if _, known := ids[span.Parent]; !known && span.Parent != clientSpan {
			t.Errorf("%s hangs below no span of the trace", span.Name)
		}
		if span.Service == "my-router" && span.Kind == "SERVER" && span.Parent != clientSpan {
			t.Errorf("the router's span hangs below %q", span.Parent)
		}
	}
	if n := len(engine()); n == 0 || engine()[0].Attributes["gen_ai.usage.prompt_tokens"] == "" {
		t.Errorf("%d spans of vLLM, none with usage", n)
	}
}
