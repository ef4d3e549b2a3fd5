package extproc

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	procmode "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
)

func newReader(b []byte) io.Reader { return bytes.NewReader(b) }

func TestARequestGoesBackWithItsWorkerAndItsBytes(t *testing.T) {
	for _, size := range []int{0, 1, pieceSize - 1, pieceSize, pieceSize + 1, 2 * pieceSize, 300_000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			h := newRelay()
			h.others = []kv.Target{{URL: "http://10.0.0.2:8000"}, {URL: "http://10.0.0.3:8000"}}
			h.change = func(r *http.Request) {
				r.Header.Set("X-Added", "yes")
				r.Header.Del("Accept-Encoding")
			}
			g := ask(t, listenTest(t, Settings{}, h.handle))
			body := randomText(size)
			g.tell(post("/v1/chat/completions", "accept-encoding", "gzip", "content-length", fmt.Sprint(size), "x-stays", "a"))
			for rest := body; ; {
				n := min(len(rest), 20_000)
				g.tell(requestBody(rest[:n], n == len(rest)))
				if rest = rest[n:]; len(rest) == 0 {
					break
				}
			}
			first := g.hear()
			answer := first.GetRequestHeaders().GetResponse()
			if answer == nil || !answer.GetClearRouteCache() {
				t.Fatalf("the first message is %v", first)
			}
			const want = "10.0.0.1:8000,10.0.0.2:8000,10.0.0.3:8000"
			headers := set(answer.GetHeaderMutation())
			if got := headers.Get(headerDestination); got != want {
				t.Errorf("destination %q, want %q", got, want)
			}
			if got := first.GetDynamicMetadata().GetFields()[metadataEnvoy].GetStructValue().GetFields()[headerDestination].GetStringValue(); got != want {
				t.Errorf("metadata %q, want %q", got, want)
			}
			if headers.Get("X-Added") != "yes" || headers.Get("X-Stays") != "" || !slices.Contains(answer.GetHeaderMutation().GetRemoveHeaders(), "accept-encoding") {
				t.Errorf("headers %v, removed %v", headers, answer.GetHeaderMutation().GetRemoveHeaders())
			}
			if got := g.pieces(func(m *extprocv3.ProcessingResponse) *extprocv3.BodyResponse { return m.GetRequestBody() }); got != body {
				t.Errorf("%d bytes came back, %d went; or they differ", len(got), len(body))
			}
		})
	}
}

// pieces receives a body to its end.
func (g *fakeGateway) pieces(of func(*extprocv3.ProcessingResponse) *extprocv3.BodyResponse) string {
	g.t.Helper()
	var all strings.Builder
	for {
		m := g.hear()
		b := of(m)
		if b == nil {
			g.t.Fatalf("no piece of the body: %v", m)
		}
		piece := b.GetResponse().GetBodyMutation().GetStreamedResponse()
		if len(piece.GetBody()) > pieceSize {
			g.t.Errorf("a piece has %d bytes", len(piece.GetBody()))
		}
		all.Write(piece.GetBody())
		if piece.GetEndOfStream() {
			return all.String()
		}
	}
}

func randomText(n int) string {
	random := rand.New(rand.NewPCG(1, uint64(n)))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte('a' + random.IntN(26))
	}
	return string(b)
}

// TestAnAnswerGoesOnAsItCame verifies that each piece is passed on before the next arrives,
// and that only changed headers are sent.
func TestAnAnswerGoesOnAsItCame(t *testing.T) {
	h := newRelay()
	g := ask(t, listenTest(t, Settings{}, h.handle))
	g.tell(post("/v1/chat/completions"))
	g.tell(requestBody("{}", true))
	g.hear()
	g.hear()
	g.tell(responseHeaders(false, ":status", "200", "content-type", "text/event-stream", "x-worker", "a"))
	if m := g.hear().GetResponseHeaders().GetResponse().GetHeaderMutation(); len(m.GetSetHeaders()) != 0 || len(m.GetRemoveHeaders()) != 0 {
		t.Errorf("headers were changed: %v", m)
	}
	for i := range 5 {
		piece := fmt.Sprintf("data: %d\n\n", i)
		g.tell(responseBody(piece, false))
		if got := g.hear().GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse(); string(got.GetBody()) != piece || got.GetEndOfStream() {
			t.Errorf("piece %q became %v", piece, got)
		}
	}
	g.tell(responseBody("", true))
	if got := g.hear().GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse(); len(got.GetBody()) != 0 || !got.GetEndOfStream() {
		t.Errorf("the end became %v", got)
	}
	if _, err := g.Recv(); err != io.EOF {
		t.Errorf("the stream ended with %v", err)
	}
}

func TestTrailersEndBodies(t *testing.T) {
	g := ask(t, listenTest(t, Settings{}, newRelay().handle))
	g.tell(post("/v1/chat/completions"))
	g.tell(requestBody("{}", false))
	g.tell(requestTrailers)
	g.hear()
	if piece := g.hear().GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse(); string(piece.GetBody()) != "{}" || piece.GetEndOfStream() {
		t.Errorf("the request's body became %v", piece)
	}
	if m := g.hear(); m.GetRequestTrailers() == nil {
		t.Errorf("the request's trailers became %v", m)
	}
	g.tell(responseHeaders(false, ":status", "200"))
	g.hear()
	g.tell(responseBody("a", false))
	g.hear()
	g.tell(responseTrailers)
	if m := g.hear(); m.GetResponseTrailers() == nil {
		t.Errorf("the answer's trailers became %v", m)
	}
}

func TestRequestsAndAnswersWithoutABody(t *testing.T) {
	g := ask(t, listenTest(t, Settings{}, newRelay().handle))
	g.tell(requestHeaders(true, ":method", "GET", ":path", "/x", ":authority", "pool"))
	if m := g.hear(); m.GetRequestHeaders() == nil {
		t.Fatalf("the request became %v", m)
	}
	g.tell(responseHeaders(true, ":status", "204"))
	if m := g.hear(); m.GetResponseHeaders() == nil {
		t.Errorf("the answer became %v", m)
	}
	if _, err := g.Recv(); err != io.EOF {
		t.Errorf("the stream ended with %v", err)
	}
}

// TestTheClientsAddressIsTheOneThatTheGatewayStates: a header may be the client's own.
func TestTheClientsAddressIsTheOneThatTheGatewayStates(t *testing.T) {
	for stated, want := range map[string]string{"": "", "192.0.2.7:4711": "192.0.2.7:4711", "unix://@/x": ""} {
		came := make(chan string, 1)
		g := ask(t, listenTest(t, Settings{}, func(w http.ResponseWriter, r *http.Request, _ *proxy.Gateway) {
			came <- r.RemoteAddr
			w.WriteHeader(http.StatusOK)
		}))
		first := requestHeaders(true, ":method", "GET", ":path", "/x", ":authority", "pool", "x-forwarded-for", "198.51.100.1", "source.address", "198.51.100.2:1")
		if stated != "" {
			first.Attributes = map[string]*structpb.Struct{"envoy.filters.http.ext_proc": {Fields: map[string]*structpb.Value{"source.address": structpb.NewStringValue(stated)}}}
		}
		g.tell(first)
		if g.hear(); len(came) == 0 || <-came != want {
			t.Errorf("%q: the address is not %q", stated, want)
		}
	}
}

func TestTheRoutersOwnAnswersAreImmediate(t *testing.T) {
	own := func(w http.ResponseWriter, r *http.Request, _ *proxy.Gateway) {
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		io.WriteString(w, "wa")
		io.WriteString(w, "it")
	}
	tests := map[string]struct {
		message *extprocv3.ProcessingRequest
		status  int
		body    string
	}{
		"refused":              {post("/v1/chat/completions"), 429, "wait"},
		"a path that is none":  {requestHeaders(true, ":method", "GET", ":path", "x y"), 400, "invalid request path"},
		"another host's path":  {requestHeaders(true, ":method", "GET", ":path", "http://a/b"), 400, "invalid request path"},
		"no method":            {requestHeaders(true, ":path", "/"), 400, "invalid request method"},
		"headers without end":  {post("/", "x", strings.Repeat("x", maxHeaders)), 431, errHeaders.Error()},
		"a method with spaces": {requestHeaders(true, ":path", "/", ":method", "GET /"), 400, "invalid request method"},
	}
	p := listenTest(t, Settings{}, own)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			g := ask(t, p)
			g.tell(test.message)
			m := g.hear().GetImmediateResponse()
			if int(m.GetStatus().GetCode()) != test.status || !strings.Contains(string(m.GetBody()), test.body) {
				t.Errorf("%v, want %d %q", m, test.status, test.body)
			}
			if test.status != 429 && set(m.GetHeaders()).Get("content-type") != "application/json" {
				t.Errorf("an error of %v", m.GetHeaders())
			}
			if test.status == 429 && set(m.GetHeaders()).Get("retry-after") != "1" {
				t.Errorf("headers %v", m.GetHeaders())
			}
		})
	}
}

func TestStreamsThatAreNotOfTheProtocol(t *testing.T) {
	streamed := post("/")
	streamed.ProtocolConfig = &extprocv3.ProtocolConfiguration{RequestBodyMode: procmode.ProcessingMode_STREAMED, ResponseBodyMode: procmode.ProcessingMode_FULL_DUPLEX_STREAMED}
	tests := map[string]*extprocv3.ProcessingRequest{
		"nothing":               {},
		"a body before headers": requestBody("{}", true),
		"another body mode":     streamed,
	}
	p := listenTest(t, Settings{}, newRelay().handle)
	for name, message := range tests {
		t.Run(name, func(t *testing.T) {
			g := ask(t, p)
			g.tell(message)
			if _, err := g.Recv(); status.Code(err) != codes.InvalidArgument {
				t.Errorf("answered %v", err)
			}
		})
	}
}

// TestMalformedAnswerBecomesABadGateway: its client never gets an empty 200.
func TestMalformedAnswerBecomesABadGateway(t *testing.T) {
	for _, test := range []struct {
		name  string
		tell  []*extprocv3.ProcessingRequest
		begun bool // the first headers have been passed on
	}{
		{name: "status 0", tell: []*extprocv3.ProcessingRequest{responseHeaders(true, ":status", "0")}},
		{name: "status 099", tell: []*extprocv3.ProcessingRequest{responseHeaders(false, ":status", "099"), responseBody("x", true)}},
		{name: "no number", tell: []*extprocv3.ProcessingRequest{responseHeaders(false, ":status", "ok"), responseBody("x", true), responseTrailers}},
		{name: "no status", tell: []*extprocv3.ProcessingRequest{responseHeaders(false, "content-type", "text/plain")}},
		{name: "no status, then one", tell: []*extprocv3.ProcessingRequest{responseHeaders(false), responseHeaders(false, ":status", "200"), responseBody("x", true)}},
		{name: "headers too large", tell: []*extprocv3.ProcessingRequest{responseHeaders(false, ":status", "200", "x", strings.Repeat("a", maxHeaders))}},
		{name: "headers twice", begun: true, tell: []*extprocv3.ProcessingRequest{responseHeaders(false, ":status", "200"), responseHeaders(false, ":status", "200")}},
		{name: "headers within the body", begun: true, tell: []*extprocv3.ProcessingRequest{responseHeaders(false, ":status", "200"), responseBody("x", false), responseHeaders(false, ":status", "200")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newRelay()
			g := ask(t, listenTest(t, Settings{}, h.handle))
			g.tell(post("/v1/chat/completions"))
			g.tell(requestBody("{}", true))
			g.hear()
			g.hear()
			for _, m := range test.tell {
				g.tell(m)
			}
			var last *extprocv3.ImmediateResponse
			var err error
			for {
				var m *extprocv3.ProcessingResponse
				if m, err = g.Recv(); err != nil {
					break
				}
				last = m.GetImmediateResponse()
			}
			switch {
			case last != nil && err == io.EOF:
				if last.GetStatus().GetCode() != 502 || len(last.GetBody()) == 0 {
					t.Errorf("%v", last)
				}
			case !test.begun || status.Code(err) != codes.Internal:
				t.Errorf("%v, %v", last, err)
			}
			if err := <-h.ended; err == nil {
				t.Error("the handler got a whole answer")
			}
		})
	}
}

// TestMalformedAnswerBeforeItsHeadersWereSent is a handler that has set a status, but has
// sent nothing yet.
func TestMalformedAnswerBeforeItsHeadersWereSent(t *testing.T) {
	goOn := make(chan bool)
	g := ask(t, listenTest(t, Settings{}, func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
		answer, _, err := via.Send(proxy.Routed{Request: r, Target: kv.Target{URL: "http://10.0.0.1:8000"}})
		if err != nil {
			t.Error(err)
			return
		}
		goOn <- true
		_, err = io.ReadAll(answer.Body)
		if err == nil {
			t.Error("the answer is whole")
		}
		w.WriteHeader(answer.StatusCode)
	}))
	g.tell(requestHeaders(true, ":method", "GET", ":path", "/x", ":authority", "pool"))
	g.hear()
	g.tell(responseHeaders(false, ":status", "200"))
	<-goOn
	g.tell(responseHeaders(false, ":status", "200"))
	if m := g.hear().GetImmediateResponse(); m.GetStatus().GetCode() != 502 || len(m.GetBody()) == 0 {
		t.Errorf("%v", m)
	}
}

// TestAnAnswerThatTheRouterCutsShort: a client can tell that it is not whole, by its
// connection, or by the error event that a stream then ends with.
func TestAnAnswerThatTheRouterCutsShort(t *testing.T) {
	for kind, whole := range map[string]bool{"application/json": false, "text/event-stream": true} {
		t.Run(kind, func(t *testing.T) {
			h := func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
				answer, _, err := via.Send(proxy.Routed{Request: r, Target: kv.Target{URL: "http://10.0.0.1:8000"}})
				if err != nil {
					t.Error(err)
					return
				}
				w.WriteHeader(answer.StatusCode)
				answer.Body.Close()
				if n, err := answer.Body.Read(make([]byte, 1)); err == nil || err == io.EOF {
					t.Errorf("%d bytes, %v", n, err)
				}
				io.WriteString(w, "data: error")
			}
			g := ask(t, listenTest(t, Settings{}, h))
			g.tell(requestHeaders(true, ":method", "GET", ":path", "/x", ":authority", "pool"))
			g.hear()
			g.tell(responseHeaders(false, ":status", "200", "content-type", kind))
			ended := false
			for {
				m, err := g.Recv()
				if err == io.EOF || status.Code(err) == codes.Internal {
					if (err == io.EOF) != whole || ended != whole {
						t.Errorf("the stream ended with %v, the answer to its end: %v", err, ended)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				ended = m.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetEndOfStream()
			}
		})
	}
}

func TestAClientThatLeavesEndsItsRequest(t *testing.T) {
	for name, prepare := range map[string]func(g *fakeGateway){
		"before its body has come": func(g *fakeGateway) { g.tell(requestBody("{", false)) },
		"before the answer": func(g *fakeGateway) {
			g.tell(requestBody("{}", true))
			g.hear()
			g.hear()
		},
		"within the answer": func(g *fakeGateway) {
			g.tell(requestBody("{}", true))
			g.hear()
			g.hear()
			g.tell(responseHeaders(false, ":status", "200"))
			g.hear()
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newRelay()
			p := listenTest(t, Settings{}, h.handle)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			g := askOver(ctx, t, connect(t, p, false))
			g.tell(post("/v1/chat/completions"))
			<-h.began
			prepare(g)
			cancel()
			select {
			case err := <-h.ended:
				if err == nil {
					t.Error("the request ended well")
				}
			case <-time.After(patience):
				t.Fatal("the request goes on")
			}
		})
	}
}

func TestWhatAGatewaySaysOfARequest(t *testing.T) {
	list := func(addresses ...any) *corev3.Metadata {
		l, err := structpb.NewList(addresses)
		if err != nil {
			t.Fatal(err)
		}
		return &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{metadataSubset: {Fields: map[string]*structpb.Value{keySubset: structpb.NewListValue(l)}}}}
	}
	text := &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{metadataSubset: {Fields: map[string]*structpb.Value{keySubset: structpb.NewStringValue("10.0.0.1:8000, 10.0.0.2")}}}}
	tests := map[string]struct {
		metadata *corev3.Metadata
		header   http.Header
		settings Settings
		want     proxy.Gateway
	}{
		"nothing":                       {want: proxy.Gateway{}},
		"a subset as a list":            {metadata: list("10.0.0.1:8000", 7.0), want: proxy.Gateway{Subset: []string{"10.0.0.1:8000"}}},
		"a subset as text":              {metadata: text, want: proxy.Gateway{Subset: []string{"10.0.0.1:8000", "10.0.0.2"}}},
		"an empty subset allows nobody": {metadata: list(), want: proxy.Gateway{Subset: []string{}}},
		"an objective":                  {header: http.Header{headerObjective: {"batch"}}, settings: Settings{ExtProcObjectives: []string{"batch=-2", "chat=3"}}, want: proxy.Gateway{Priority: -2}},
		"an unknown objective":          {header: http.Header{headerObjective: {"other"}}, settings: Settings{ExtProcObjectives: []string{"batch=-2"}}, want: proxy.Gateway{}},
		"another model":                 {header: http.Header{headerModelRewrite: {"m2"}}, want: proxy.Gateway{Model: "m2"}},
		"a session":                     {header: http.Header{proxy.HeaderSession: {"token"}}, want: proxy.Gateway{Token: "token"}},
		"a test's choice":               {header: http.Header{headerTestPick: {"10.0.0.1,10.0.0.2"}}, settings: Settings{ExtProcConformance: true}, want: proxy.Gateway{Any: true, Subset: []string{"10.0.0.1", "10.0.0.2"}}},
		"a test's choice, unasked":      {header: http.Header{headerTestPick: {"10.0.0.1"}}, want: proxy.Gateway{}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			objectives, err := test.settings.objectives()
			if err != nil {
				t.Fatal(err)
			}
			p := &Server{settings: test.settings, objectives: objectives}
			g := p.gateway(&extprocv3.ProcessingRequest{MetadataContext: test.metadata}, test.header)
			if !slices.Equal(g.Subset, test.want.Subset) || (g.Subset == nil) != (test.want.Subset == nil) || g.Priority != test.want.Priority || g.Model != test.want.Model || g.Token != test.want.Token || g.Any != test.want.Any {
				t.Errorf("%+v, want %+v", g, test.want)
			}
		})
	}
}

func TestWhoServed(t *testing.T) {
	address := &structpb.Struct{Fields: map[string]*structpb.Value{"upstream.address": structpb.NewStringValue("10.0.0.9:8000")}}
	told := &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{metadataEnvoy: {Fields: map[string]*structpb.Value{keyServed: structpb.NewStringValue("10.0.0.8:8000")}}}}
	for name, test := range map[string]struct {
		message *extprocv3.ProcessingRequest
		want    string
	}{
		"untold":       {&extprocv3.ProcessingRequest{}, ""},
		"by metadata":  {&extprocv3.ProcessingRequest{MetadataContext: told}, "10.0.0.8:8000"},
		"by attribute": {&extprocv3.ProcessingRequest{Attributes: map[string]*structpb.Struct{"envoy.filters.http.ext_proc": address}}, "10.0.0.9:8000"},
	} {
		if got := served(test.message); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestSettingsAreChecked(t *testing.T) {
	for name, test := range map[string]struct {
		settings Settings
		want     string // in the error; empty: there is none
	}{
		"none":                    {Settings{}, ""},
		"all":                     {Settings{ExtProcPort: 9002, ExtProcHealthPort: 9003, ExtProcTLS: true, ExtProcFallbacks: 3, ExtProcObjectives: []string{"a=1"}}, ""},
		"too many fallbacks":      {Settings{ExtProcPort: 9002, ExtProcFallbacks: 17}, "--ext-proc-fallbacks 17"},
		"negative fallbacks":      {Settings{ExtProcPort: 9002, ExtProcFallbacks: -1}, "--ext-proc-fallbacks -1"},
		"too little memory":       {Settings{ExtProcPort: 9002, ExtProcMaxInflightBytes: 1}, "--ext-proc-max-inflight-bytes 1"},
		"negative memory":         {Settings{ExtProcPort: 9002, ExtProcMaxInflightBytes: -1}, "--ext-proc-max-inflight-bytes -1"},
		"a short key":             {Settings{ExtProcPort: 9002, SessionTokenKey: "123456789012345"}, "--session-token-key: 15 characters"},
		"no number":               {Settings{ExtProcPort: 9002, ExtProcObjectives: []string{"a=x"}}, "--ext-proc-objectives a=x"},
		"no name":                 {Settings{ExtProcPort: 9002, ExtProcObjectives: []string{"=1"}}, "--ext-proc-objectives =1"},
		"health without a picker": {Settings{ExtProcHealthPort: 9003}, "--ext-proc-port"},
	} {
		err := test.settings.Validate()
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}

func TestTheMemoryFollowsTheMachines(t *testing.T) {
	for _, test := range []struct{ given, memory, want int64 }{
		{0, 16 << 30, 2 << 30}, {0, 128 << 20, leastDefault}, {0, 0, 0}, {32 << 20, 16 << 30, 32 << 20},
	} {
		s := Settings{ExtProcMaxInflightBytes: test.given}
		if s.SetDefault(test.memory); s.ExtProcMaxInflightBytes != test.want {
			t.Errorf("%d of %d bytes: %d, want %d", test.given, test.memory, s.ExtProcMaxInflightBytes, test.want)
		}
	}
}

func TestHealth(t *testing.T) {
	p := listenTest(t, Settings{ExtProcTLS: true}, newRelay().handle)
	client := grpc_health_v1.NewHealthClient(connect(t, p, true))
	for _, service := range []string{"", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
		answer, err := client.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: service})
		if err != nil || answer.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Errorf("%q: %v, %v", service, answer, err)
		}
	}
	if _, err := client.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "x"}); status.Code(err) != codes.NotFound {
		t.Errorf("an unknown service: %v", err)
	}
	h := &health{ready: func() bool { return false }}
	if state, _ := h.now("readiness"); state != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("not ready: %v", state)
	}
	if state, _ := h.now("liveness"); state != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("alive: %v", state)
	}
	watch, err := client.Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := watch.Recv(); err != nil || m.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("watched %v, %v", m, err)
	}
	if !p.Drain(patience) {
		t.Error("a watch kept the picker from ending")
	}
}

// TestDrainLetsRequestsFinishAndThenCutsThem covers both phases of a drain.
func TestDrainLetsRequestsFinishAndThenCutsThem(t *testing.T) {
	for name, finish := range map[string]bool{"one that ends": true, "one that does not": false} {
		t.Run(name, func(t *testing.T) {
			h := newRelay()
			p := listenTest(t, Settings{}, h.handle)
			g := ask(t, p)
			g.tell(post("/v1/chat/completions"))
			g.tell(requestBody("{}", true))
			g.hear()
			g.hear()
			whole := make(chan bool, 1)
			limit := patience
			if !finish {
				limit = 10 * time.Millisecond
			}
			go func() { whole <- p.Drain(limit) }()
			if finish {
				g.tell(responseHeaders(true, ":status", "200"))
				g.hear()
			} else if m := g.hear().GetImmediateResponse(); !strings.Contains(string(m.GetBody()), web.ErrStopped.Error()) {
				t.Errorf("told %v", m)
			}
			if got := <-whole; got != finish {
				t.Errorf("whole: %v", got)
			}
		})
	}
}

// TestAGatewayThatTakesNothingIsLeft verifies that such a gateway's stream ends.
func TestAGatewayThatTakesNothingIsLeft(t *testing.T) {
	ended := make(chan error, 1)
	p := listenWith(t, Settings{}, limits{idle: idleLimit, silence: silenceLimit, stall: 200 * time.Millisecond}, maxConnections, func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
		onward := r.Clone(r.Context())
		onward.Body, onward.ContentLength = nil, 0
		if _, _, err := via.Send(proxy.Routed{Request: onward, Target: kv.Target{URL: "http://10.0.0.1:8000"}}); err != nil {
			ended <- nil
			return
		}
		for {
			if _, err := w.Write(make([]byte, pieceSize)); err != nil {
				ended <- err
				return
			}
		}
	})
	g := ask(t, p)
	g.tell(requestHeaders(true, ":method", "GET", ":path", "/", ":authority", "pool"))
	g.hear()
	g.tell(responseHeaders(false, ":status", "200"))
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the answer could not be begun")
		}
	case <-time.After(patience):
		t.Fatal("it is written for ever")
	}
}

// TestAStreamThatAsksNothingIsEnded verifies the time limit of streams without a request.
func TestAStreamThatAsksNothingIsEnded(t *testing.T) {
	p := listenWith(t, Settings{}, limits{idle: idleLimit, silence: 20 * time.Millisecond, stall: web.Stall}, maxConnections, newRelay().handle)
	if _, err := ask(t, p).Recv(); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("it ended with %v", err)
	}
}
