package test

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// picker is a router whose endpoint picker is asked directly, without a gateway.
type picker struct {
	*Mocks
	client extprocv3.ExternalProcessorClient
}

// startPicker starts one over workers that run already.
func startPicker(t *testing.T, w *Workers, args ...string) *picker {
	t.Helper()
	port := testkit.FreePorts(t, 1)
	p := &picker{Mocks: StartOver(t, w, append([]string{fmt.Sprintf("--ext-proc-port=%d", port)}, args...)...)}
	connection, err := grpc.NewClient(fmt.Sprintf("127.0.0.1:%d", port), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	p.client = extprocv3.NewExternalProcessorClient(connection)
	return p
}

// headersOf makes headers of names and values in turn.
func headersOf(given ...string) *extprocv3.HttpHeaders {
	m := new(corev3.HeaderMap)
	for i := 0; i+1 < len(given); i += 2 {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: given[i], RawValue: []byte(given[i+1])})
	}
	return &extprocv3.HttpHeaders{Headers: m}
}

// setBy returns the headers that a mutation sets.
func setBy(m *extprocv3.HeaderMutation) http.Header {
	header := http.Header{}
	for _, option := range m.GetSetHeaders() {
		header.Set(option.GetHeader().GetKey(), string(option.GetHeader().GetRawValue()))
	}
	return header
}

// chat passes a chat through the picker as a gateway does: address is the first that the
// gateway gets, and token the session token of the answer.
func (p *picker) chat(headers ...string) (address, token string) {
	t := p.T
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	stream, err := p.client.Process(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(requests ...*extprocv3.ProcessingRequest) {
		for _, r := range requests {
			if err := stream.Send(r); err != nil {
				t.Fatal(err)
			}
		}
	}
	hear := func() *extprocv3.ProcessingResponse {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	head := append([]string{":method", "POST", ":path", testkit.ChatPath, ":authority", "pool", "content-type", "application/json"}, headers...)
	ask(
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: headersOf(head...)}},
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte(`{"messages":[{"role":"user","content":"Hi"}],"max_tokens":3}`), EndOfStream: true}}},
	)
	m := hear()
	address, _, _ = strings.Cut(setBy(m.GetRequestHeaders().GetResponse().GetHeaderMutation()).Get("x-gateway-destination-endpoint"), ",")
	if address == "" {
		t.Fatalf("no worker was chosen: %v", m)
	}
	answer := headersOf(":status", "200", "content-type", "application/json")
	ask(
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: answer}},
		&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte(`{"choices":[{"finish_reason":"stop"}]}`), EndOfStream: true}}},
	)
	for {
		if r := hear().GetResponseHeaders(); r != nil {
			return address, setBy(r.GetResponse().GetHeaderMutation()).Get(proxy.HeaderSession)
		}
	}
}

// always reports whether all of several chats with those headers go to address.
func (p *picker) always(address string, headers ...string) bool {
	p.T.Helper()
	for range 6 {
		if got, _ := p.chat(headers...); got != address {
			return false
		}
	}
	return true
}

// tokens is how many session tokens came to that.
func (p *picker) tokens(result string) int {
	return int(p.Metrics()[fmt.Sprintf("kvrouter_session_tokens_total{result=%q}", result)])
}

// TestSessionTokensHoldForTheRoutersOfOneKey has several routers over the same workers,
// with keys of clients that do not trust each other.
func TestSessionTokensHoldForTheRoutersOfOneKey(t *testing.T) {
	t.Parallel()
	const (
		alice = "Bearer key-of-alice"
		bob   = "Bearer key-of-bob"
	)
	w := StartWorkers(t, 3)
	args := []string{"--policy=round-robin", "--decision-headers", keysFile(t, "- {name: alice, key: key-of-alice}\n- {name: bob, key: key-of-bob}\n- {name: root, key: key-of-root, trust-hints: true}")}
	start := func(more ...string) *picker { return startPicker(t, w, append(args, more...)...) }
	cluster := []string{"--cluster=test", "--cluster-port=0", "--cluster-key=0123456789abcdef"}
	first, second := start(cluster...), start(cluster...)
	other := start("--session-token-key=fedcba9876543210")

	address, token := first.chat("authorization", alice)
	if token == "" {
		t.Fatal("the answer has no session token")
	}
	for name, test := range map[string]struct {
		router *picker
		given  []string
		stays  bool
		result string // of the metric
	}{
		"at the same router":            {first, []string{"authorization", alice, proxy.HeaderSession, token}, true, "valid"},
		"at another of the same key":    {second, []string{"authorization", alice, proxy.HeaderSession, token}, true, "valid"},
		"at one of another key":         {other, []string{"authorization", alice, proxy.HeaderSession, token}, false, "invalid"},
		"of another client":             {first, []string{"authorization", bob, proxy.HeaderSession, token}, false, "invalid"},
		"not signed":                    {first, []string{"authorization", bob, proxy.HeaderSession, base64.StdEncoding.EncodeToString([]byte(address))}, false, "invalid"},
		"no token, and a worker's name": {first, []string{"authorization", bob, "x-worker-instance-id", "1"}, false, ""},
	} {
		before := test.router.tokens(test.result)
		if stays := test.router.always(address, test.given...); stays != test.stays {
			t.Errorf("%s: always at %s: %v, want %v", name, address, stays, test.stays)
		}
		if after := test.router.tokens(test.result); test.result != "" && after <= before {
			t.Errorf("%s: %d tokens are counted as %s, %d before", name, after, test.result, before)
		}
	}
	if named, _ := first.chat("authorization", "Bearer key-of-root", "x-worker-instance-id", "1"); !first.always(named, "authorization", "Bearer key-of-root", "x-worker-instance-id", "1") {
		t.Error("a trusted client's named worker is not obeyed")
	}
}
