package extproc

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
)

// patience bounds every wait of these tests.
const patience = 20 * time.Second

// handler serves a request that came from a gateway.
type handler = func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway)

// usual are the limits of New.
var usual = limits{idle: idleLimit, silence: silenceLimit, stall: web.Stall}

// listenTest starts a picker whose requests go to handle, until the test ends.
func listenTest(t testing.TB, s Settings, handle handler) *Server {
	t.Helper()
	return listenWith(t, s, usual, maxConnections, handle)
}

// listenWith is listenTest with other limits.
func listenWith(t testing.TB, s Settings, l limits, connections int, handle handler) *Server {
	t.Helper()
	p, err := open(s, Deps{Host: "127.0.0.1", SessionTTL: time.Hour, Connections: connections, Serve: handle, Ready: func() bool { return true }, Edges: guard.New(), Log: slog.New(slog.DiscardHandler)}, l)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, p)
	return p
}

// serve runs a picker until the test ends.
func serve(t testing.TB, p *Server) {
	t.Helper()
	served := make(chan error, 1)
	go func() { served <- p.Serve() }()
	t.Cleanup(func() {
		p.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}

// fakeGateway is the gateway's side of one stream.
type fakeGateway struct {
	extprocv3.ExternalProcessor_ProcessClient
	t testing.TB
}

// connect opens a connection to a picker.
func connect(t testing.TB, p *Server, secure bool) *grpc.ClientConn {
	t.Helper()
	with := insecure.NewCredentials()
	if secure {
		with = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	}
	c, err := grpc.NewClient(p.Address(), grpc.WithTransportCredentials(with))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask opens a stream that ends with the test.
func ask(t testing.TB, p *Server) *fakeGateway {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return askOver(ctx, t, connect(t, p, p.settings.ExtProcTLS))
}

func askOver(ctx context.Context, t testing.TB, c *grpc.ClientConn) *fakeGateway {
	t.Helper()
	stream, err := extprocv3.NewExternalProcessorClient(c).Process(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &fakeGateway{stream, t}
}

// tell sends a message.
func (g *fakeGateway) tell(m *extprocv3.ProcessingRequest) {
	g.t.Helper()
	if err := g.Send(m); err != nil && err != io.EOF {
		g.t.Fatal(err)
	}
}

// hear receives a message.
func (g *fakeGateway) hear() *extprocv3.ProcessingResponse {
	g.t.Helper()
	m, err := g.Recv()
	if err != nil {
		g.t.Fatal(err)
	}
	return m
}

// headerMap makes headers of names and values in turn.
func headerMap(given ...string) *corev3.HeaderMap {
	m := new(corev3.HeaderMap)
	for i := 0; i+1 < len(given); i += 2 {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: given[i], RawValue: []byte(given[i+1])})
	}
	return m
}

// post is a request's headers, with more.
func post(path string, more ...string) *extprocv3.ProcessingRequest {
	return requestHeaders(false, append([]string{":method", "POST", ":path", path, ":authority", "pool", ":scheme", "http"}, more...)...)
}

func requestHeaders(whole bool, given ...string) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: headerMap(given...), EndOfStream: whole}}}
}

func requestBody(piece string, last bool) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte(piece), EndOfStream: last}}}
}

func responseHeaders(whole bool, given ...string) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{Headers: headerMap(given...), EndOfStream: whole}}}
}

func responseBody(piece string, last bool) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte(piece), EndOfStream: last}}}
}

var (
	requestTrailers  = &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: new(extprocv3.HttpTrailers)}}
	responseTrailers = &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: new(extprocv3.HttpTrailers)}}
)

// set returns the headers that a mutation sets.
func set(m *extprocv3.HeaderMutation) http.Header {
	header := http.Header{}
	for _, option := range m.GetSetHeaders() {
		header.Add(option.GetHeader().GetKey(), string(option.GetHeader().GetRawValue()))
	}
	return header
}

// relay is a handler that sends each request to a worker of its gateway, and relays the
// answer piece by piece.
type relay struct {
	others []kv.Target
	change func(*http.Request)
	began  chan struct{}
	ended  chan error
}

func newRelay() *relay { return &relay{began: make(chan struct{}, 16), ended: make(chan error, 16)} }

// handle is its handler.
func (h *relay) handle(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
	h.began <- struct{}{}
	h.ended <- h.serve(w, r, via)
}

func (h *relay) serve(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	onward := r.Clone(r.Context())
	onward.Header.Del("Content-Length")
	onward.ContentLength, onward.Body = int64(len(body)), io.NopCloser(newReader(body))
	if h.change != nil {
		h.change(onward)
	}
	answer, _, err := via.Send(proxy.Routed{Request: onward, Target: kv.Target{URL: "http://10.0.0.1:8000"}, Others: h.others})
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return err
	}
	for name, values := range answer.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(answer.StatusCode)
	buffer := make([]byte, 100<<10)
	for {
		n, err := answer.Body.Read(buffer)
		if n > 0 {
			if _, err := w.Write(buffer[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// bodyReader is a handler that reads bodies as the OpenAI port does, of at most that many
// bytes each, and answers with their errors.
func bodyReader(largest int64) handler {
	bodies := web.NewBodies(largest, web.BodySettings{}.Memory(largest))
	return func(w http.ResponseWriter, r *http.Request, _ *proxy.Gateway) {
		body, err := bodies.Read(w, r, "")
		defer bodies.Done("", body)
		var bad *web.BodyError
		if errors.As(err, &bad) {
			http.Error(w, bad.Message, bad.Status)
		}
	}
}
