package extproc

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/structpb"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// manyHeaders is a request with n more headers, each with a value of size bytes.
func manyHeaders(n, size int) *extprocv3.ProcessingRequest {
	m := requestHeaders(true, ":method", "GET", ":path", "/")
	value := &corev3.HeaderValue{Key: "x", RawValue: bytes.Repeat([]byte("x"), size)}
	for range n {
		m.GetRequestHeaders().Headers.Headers = append(m.GetRequestHeaders().Headers.Headers, value)
	}
	return m
}

// nested is a request with metadata nested that deep.
func nested(depth int) *extprocv3.ProcessingRequest {
	value := structpb.NewBoolValue(true)
	for range depth {
		value = structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{value}})
	}
	m := requestHeaders(true, ":method", "GET", ":path", "/")
	m.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"a": {Fields: map[string]*structpb.Value{"b": value}}}}
	return m
}

// wantImmediate checks the router's own answer to a stream.
func wantImmediate(t *testing.T, g *fakeGateway, status int, message string) {
	t.Helper()
	m := g.hear().GetImmediateResponse()
	if int(m.GetStatus().GetCode()) != status || !strings.Contains(string(m.GetBody()), message) {
		t.Errorf("answered %v, want %d %q", m, status, message)
	}
	if again := set(m.GetHeaders()).Get("retry-after"); (again != "") != (status == http.StatusServiceUnavailable) {
		t.Errorf("Retry-After %q with %d", again, status)
	}
}

func TestHeadersAreBounded(t *testing.T) {
	const base = 2 // headers of manyHeaders(0, 0)
	tests := map[string]struct {
		message *extprocv3.ProcessingRequest
		status  int
	}{
		"as many as may be":            {manyHeaders(maxHeaderCount-base, 1), http.StatusOK},
		"one too many":                 {manyHeaders(maxHeaderCount-base+1, 1), http.StatusRequestHeaderFieldsTooLarge},
		"too large with 32 bytes each": {manyHeaders(900, maxHeaders/900-headerCost), http.StatusRequestHeaderFieldsTooLarge},
		"large enough":                 {manyHeaders(900, maxHeaders/900-headerCost-2), http.StatusOK},
		"empty ones without end":       {manyHeaders(100_000, 0), http.StatusRequestHeaderFieldsTooLarge},
		"nested metadata":              {nested(maxDepth), http.StatusRequestHeaderFieldsTooLarge},
		"metadata":                     {nested(10), http.StatusOK},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := listenTest(t, Settings{}, func(w http.ResponseWriter, _ *http.Request, _ *proxy.Gateway) { w.WriteHeader(http.StatusOK) })
			g := ask(t, p)
			g.tell(test.message)
			if m := g.hear().GetImmediateResponse(); int(m.GetStatus().GetCode()) != test.status {
				t.Errorf("answered %.300v, want %d", m, test.status)
			}
			want := uint64(0)
			if test.status != http.StatusOK {
				want = 1
			}
			if n := p.refused[reasonHeaders].Load(); n != want {
				t.Errorf("%d were counted as refused, want %d", n, want)
			}
		})
	}
}

// TestAMessageThatIsRefusedIsNotDecoded verifies the memory for 4 MB of empty headers:
// decoded they would take some 200 MB.
func TestAMessageThatIsRefusedIsNotDecoded(t *testing.T) {
	text, err := proto.Marshal(manyHeaders(600_000, 0))
	if err != nil {
		t.Fatal(err)
	}
	c := newCodec()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var in incoming
	if err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(text)}, &in); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if in.refused != errParts || in.message != nil {
		t.Errorf("refused: %v", in.refused)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
		t.Errorf("%d bytes were allocated for a message of %d", n, len(text))
	}
}

// TestAMessageThatIsTooLargeEndsItsStream verifies gRPC's own limit, and its count.
func TestAMessageThatIsTooLargeEndsItsStream(t *testing.T) {
	p := listenTest(t, Settings{}, bodyReader(64<<20))
	g := ask(t, p)
	g.tell(post("/v1/chat/completions"))
	g.tell(requestBody(strings.Repeat("a", maxMessage+1), true))
	if m, err := g.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("answered %v, %v", m, err)
	}
	testkit.Eventually(t, patience, "it is counted", func() bool { return p.refused[reasonMessage].Load() == 1 })
}

// small returns a picker with that much memory for all streams.
func small(t *testing.T, most int64, handle handler) *Server {
	t.Helper()
	return listenWith(t, Settings{ExtProcMaxInflightBytes: most}, usual, maxConnections, handle)
}

// TestStreamsShareOneMemory fills the memory with headers: the next request is refused,
// and served again once one has left.
func TestStreamsShareOneMemory(t *testing.T) {
	const size = 64 << 10
	h := newRelay()
	p := small(t, 4*(size+streamMemory+8<<10), h.handle)
	c := connect(t, p, false)
	open := func() (*fakeGateway, context.CancelFunc) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		t.Cleanup(cancel)
		g := askOver(ctx, t, c)
		g.tell(post("/v1/chat/completions", "x-large", strings.Repeat("x", size)))
		return g, cancel
	}
	var leave context.CancelFunc
	for range 4 {
		_, leave = open()
		<-h.began
	}
	g, _ := open()
	wantImmediate(t, g, http.StatusServiceUnavailable, "--ext-proc-max-inflight-bytes")
	if n := p.refused[reasonMemory].Load(); n != 1 {
		t.Errorf("%d were counted as refused", n)
	}
	leave()
	testkit.Eventually(t, patience, "its memory is free", func() bool { return p.memory.held.Load() < 4*size })
	open()
	<-h.began
}

// TestStreamsThatDoNotFitAreRefused fills the memory with streams without requests.
func TestStreamsThatDoNotFitAreRefused(t *testing.T) {
	p := small(t, 3*(streamMemory+4<<10), newRelay().handle)
	c := connect(t, p, false)
	for range 3 {
		askOver(t.Context(), t, c)
	}
	testkit.Eventually(t, patience, "they are there", func() bool { return p.memory.held.Load() >= 3*streamMemory })
	wantImmediate(t, askOver(t.Context(), t, c), http.StatusServiceUnavailable, "try again")
	if _, err := grpc_health_v1.NewHealthClient(c).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Errorf("health check: %v", err)
	}
}

// TestRefusalsNeedNoMemory: the memory is completely used up.
func TestRefusalsNeedNoMemory(t *testing.T) {
	begun := make(chan struct{})
	p := listenTest(t, Settings{}, func(w http.ResponseWriter, r *http.Request, _ *proxy.Gateway) {
		close(begun)
		io.Copy(io.Discard, r.Body)
		http.Error(w, "no", http.StatusForbidden)
	})
	g := ask(t, p)
	g.tell(post("/v1/chat/completions"))
	<-begun
	left := p.memory.most - p.memory.held.Load()
	if !p.memory.take(left) {
		t.Fatal("it is not left")
	}
	defer p.memory.give(left)
	wantImmediate(t, ask(t, p), http.StatusServiceUnavailable, "--ext-proc-max-inflight-bytes")
	g.tell(requestBody("", true))
	wantImmediate(t, g, http.StatusForbidden, "no")
}

// TestAShareOfAStreamThatHasEndedHoldsNothing covers reservations after the end.
func TestAShareOfAStreamThatHasEndedHoldsNothing(t *testing.T) {
	m := &memory{most: 10}
	s := &share{of: m}
	if !s.take(6) || s.take(5) || m.held.Load() != 6 {
		t.Errorf("%d bytes are held of 6", m.held.Load())
	}
	s.give(2)
	s.end()
	s.give(9)
	if !s.take(100) || m.held.Load() != 0 {
		t.Errorf("%d bytes are held after the end", m.held.Load())
	}
}

// TestPiecesThatAreNotReadAreBounded has a handler that reads nothing: its gateway's pieces
// are kept up to the memory limit, then the request ends with an error.
func TestPiecesThatAreNotReadAreBounded(t *testing.T) {
	late := make(chan struct{})
	read := bodyReader(64 << 20)
	p := small(t, 1<<20, func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
		<-late
		read(w, r, via)
	})
	g := ask(t, p)
	g.tell(post("/v1/chat/completions"))
	piece := strings.Repeat("x", 400<<10)
	for range 3 {
		g.tell(requestBody(piece, false))
	}
	testkit.Eventually(t, patience, "the memory is used up", func() bool { return p.refused[reasonMemory].Load() == 1 })
	close(late)
	wantImmediate(t, g, http.StatusServiceUnavailable, "--ext-proc-max-inflight-bytes")
	testkit.Eventually(t, patience, "nothing is held", func() bool { return p.memory.held.Load() == 0 })
}

// TestPiecesOfAnAnswerAreBounded is the same for an answer, which has begun.
func TestPiecesOfAnAnswerAreBounded(t *testing.T) {
	ended := make(chan error, 1)
	p := small(t, 1<<20, func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
		onward := r.Clone(r.Context())
		onward.Body, onward.ContentLength = nil, 0
		if _, _, err := via.Send(proxy.Routed{Request: onward}); err != nil {
			t.Error(err)
		}
		<-r.Context().Done()
		ended <- context.Cause(r.Context())
	})
	g := ask(t, p)
	g.tell(requestHeaders(true, ":method", "GET", ":path", "/", ":authority", "pool"))
	g.hear()
	g.tell(responseHeaders(false, ":status", "200"))
	piece := strings.Repeat("x", 400<<10)
	for range 3 {
		g.tell(responseBody(piece, false))
	}
	if m, err := g.Recv(); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "--ext-proc-max-inflight-bytes") {
		t.Errorf("answered %v, %v", m, err)
	}
	<-ended
	testkit.Eventually(t, patience, "nothing is held", func() bool { return p.memory.held.Load() == 0 })
}

// TestOwnAnswersAreBounded has handlers that write more than the memory, and more than the
// maximum of an answer: no answer is truncated without an error.
func TestOwnAnswersAreBounded(t *testing.T) {
	for name, test := range map[string]struct {
		memory int64
		reason string
	}{"memory": {1 << 20, "--ext-proc-max-inflight-bytes"}, "length": {64 << 20, "the answer is longer"}} {
		t.Run(name, func(t *testing.T) {
			p := small(t, test.memory, func(w http.ResponseWriter, _ *http.Request, _ *proxy.Gateway) {
				for range maxOwnAnswer>>20 + 1 {
					w.Write(make([]byte, 1<<20))
				}
			})
			g := ask(t, p)
			g.tell(requestHeaders(true, ":method", "GET", ":path", "/"))
			if m, err := g.Recv(); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), test.reason) {
				t.Errorf("answered %.300v, %v", m, err)
			}
		})
	}
}

// TestABodyOfAnyLengthFits passes on a body larger than the memory, piece by piece.
func TestABodyOfAnyLengthFits(t *testing.T) {
	p := small(t, 1<<20, bodyReader(64<<20))
	g := ask(t, p)
	g.tell(post("/v1/chat/completions"))
	piece := strings.Repeat("x", 100<<10)
	for range 100 {
		g.tell(requestBody(piece, false))
	}
	g.tell(requestBody("", true))
	if _, err := g.Recv(); status.Code(err) != codes.Canceled { // the handler writes nothing
		t.Error(err)
	}
	if n := p.refused[reasonMemory].Load(); n != 0 {
		t.Errorf("%d were refused", n)
	}
}

// frame is an HTTP/2 frame.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	head := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))[1:]
	head = append(head, kind, flags)
	return append(binary.BigEndian.AppendUint32(head, stream), payload...)
}

// literal is a header in HPACK's simplest form.
func literal(name, value string) []byte {
	return append(append(append([]byte{0, byte(len(name))}, name...), byte(len(value))), value...)
}

// rawGateway is an HTTP/2 connection that discards all it reads.
func rawGateway(t *testing.T, p *Server) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Address())
	if err != nil {
		t.Fatal(err)
	}
	drained := make(chan struct{})
	go func() { // until the connection is closed
		defer close(drained)
		io.Copy(io.Discard, c)
	}()
	t.Cleanup(func() {
		c.Close()
		<-drained
	})
	if _, err := c.Write(append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), frame(4, 0, 0, nil)...)); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestCompressedHeadersTakeLittleMemory opens thousands of streams whose headers are
// 4 KB of indices into HPACK's table: decoded each has 16 MB, and all take 4 GB.
func TestCompressedHeadersTakeLittleMemory(t *testing.T) {
	p := listenTest(t, Settings{ExtProcMaxInflightBytes: leastInflight}, newRelay().handle)
	c := rawGateway(t, p)
	begin := append([]byte{0x83, 0x86}, literal(":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process")...)
	begin = append(append(append(begin, literal(":authority", "x")...), literal("content-type", "application/grpc")...), literal("te", "trailers")...)
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	before, peak := stats.HeapAlloc, uint64(0)
	c.SetWriteDeadline(time.Now().Add(patience))
	for _, indices := range []int{3900, 12} { // beyond the bound of a stream's headers, and within
		for i := range 2000 {
			block := bytes.Clone(begin)
			if i == 0 { // with x-b of 4,000 bytes into the table
				block = append(append(block, 0x40, 3, 'x', '-', 'b', 0x7f, 0xa1, 0x1e), strings.Repeat("c", 4000)...)
			}
			block = append(block, bytes.Repeat([]byte{0xbe}, indices)...)
			stream := uint32(1 + 2*i)
			if indices == 12 {
				stream += 1 << 20
			}
			if _, err := c.Write(frame(1, 4, stream, block)); err != nil {
				t.Fatal(err)
			}
			if i%100 == 0 {
				runtime.ReadMemStats(&stats)
				peak = max(peak, stats.HeapAlloc)
			}
		}
	}
	testkit.Eventually(t, patience, "streams beyond the memory are refused", func() bool { return p.refused[reasonMemory].Load() > 0 })
	if n := p.memory.held.Load(); n > p.memory.most {
		t.Errorf("%d bytes are held, at most %d may be", n, p.memory.most)
	}
	runtime.ReadMemStats(&stats)
	if peak = max(peak, stats.HeapAlloc); peak > before+128<<20 {
		t.Errorf("the heap grew by %d MB", (peak-before)>>20)
	}
}

// TestSilentConnectionsDoNotKeepAGatewayOut opens more connections than the port accepts.
// Half of them also open a stream without a request.
func TestSilentConnectionsDoNotKeepAGatewayOut(t *testing.T) {
	h := newRelay()
	p := listenTest(t, Settings{}, h.handle)
	begin := append([]byte{0x83, 0x86}, literal(":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process")...)
	begin = append(append(begin, literal(":authority", "x")...), literal("content-type", "application/grpc")...)
	for i := range maxConnections + 50 {
		c := rawGateway(t, p)
		if i%2 == 0 {
			if _, err := c.Write(frame(1, 4, 1, begin)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 3 {
		g := ask(t, p)
		g.tell(post("/v1/chat/completions"))
		g.tell(requestBody("{}", true))
		if m := g.hear(); m.GetRequestHeaders() == nil {
			t.Fatalf("answered %v", m)
		}
	}
}

// TestAConnectionWithARequestStays verifies that a new connection does not replace it, with
// and without TLS.
func TestAConnectionWithARequestStays(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprintf("TLS %v", secure), func(t *testing.T) {
			h := newRelay()
			p := listenWith(t, Settings{ExtProcTLS: secure}, usual, 1, h.handle)
			g := ask(t, p)
			g.tell(post("/v1/chat/completions"))
			g.tell(requestBody("{}", true))
			g.hear()
			g.hear()
			other, err := net.Dial("tcp", p.Address())
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			other.SetDeadline(time.Now().Add(2 * web.FreshFor)) // a connection may be replaced after half of it
			if secure {
				err = tls.Client(other, &tls.Config{InsecureSkipVerify: true}).Handshake()
			} else {
				_, err = other.Read(make([]byte, 1))
			}
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the new connection was accepted: %v", err)
			}
			g.tell(responseHeaders(true, ":status", "200"))
			if m := g.hear(); m.GetResponseHeaders() == nil {
				t.Errorf("answered %v", m)
			}
		})
	}
}

// TestAnIdleConnectionIsClosed: its gateway opens another one when it needs one.
func TestAnIdleConnectionIsClosed(t *testing.T) {
	p := listenWith(t, Settings{}, limits{idle: 50 * time.Millisecond, silence: silenceLimit, stall: web.Stall}, maxConnections, newRelay().handle)
	c := connect(t, p, false)
	c.Connect()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for open := false; ; {
		state := c.GetState()
		if open && state != connectivity.Ready {
			return
		}
		open = open || state == connectivity.Ready
		if !c.WaitForStateChange(ctx, state) {
			t.Fatalf("the connection is %v", state)
		}
	}
}

// TestAHealthCheckThatAsksNothingIsEnded covers both methods. A watch with a request
// continues.
func TestAHealthCheckThatAsksNothingIsEnded(t *testing.T) {
	p := listenWith(t, Settings{}, limits{idle: idleLimit, silence: 20 * time.Millisecond, stall: web.Stall}, maxConnections, newRelay().handle)
	c := connect(t, p, false)
	watch, err := grpc_health_v1.NewHealthClient(c).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	for _, method := range []string{"Check", "Watch"} { // they end after the watch would have
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		stream, err := c.NewStream(ctx, &grpc_health_v1.Health_ServiceDesc.Streams[0], fmt.Sprintf("/%s/%s", grpc_health_v1.Health_ServiceDesc.ServiceName, method))
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.RecvMsg(new(grpc_health_v1.HealthCheckResponse)); err == nil || ctx.Err() != nil {
			t.Errorf("%s goes on: %v", method, err)
		}
	}
	testkit.Eventually(t, patience, "only the watch's memory is held", func() bool { return p.memory.held.Load() < 2*streamMemory })
	p.Drain(patience)
	if _, err := watch.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the watch ended with %v before the router drained", err)
	}
}

// TestEveryKindOfMessageIsLookedInto compares codec's table with the descriptors.
func TestEveryKindOfMessageIsLookedInto(t *testing.T) {
	seen := map[protoreflect.FullName]bool{}
	var check func(message protoreflect.MessageDescriptor, k *kind)
	check = func(message protoreflect.MessageDescriptor, k *kind) {
		if seen[message.FullName()] {
			return
		}
		seen[message.FullName()] = true
		for i := range message.Fields().Len() {
			field := message.Fields().Get(i)
			if field.Message() == nil {
				continue
			}
			if n := int(field.Number()); n >= len(k.fields) || k.fields[n] == nil {
				t.Errorf("%s is not looked into", field.FullName())
			} else {
				check(field.Message(), k.fields[n])
			}
		}
	}
	check(new(extprocv3.ProcessingRequest).ProtoReflect().Descriptor(), newCodec().kind)
	if !seen["google.protobuf.Struct"] || !seen["envoy.config.core.v3.HeaderValue"] {
		t.Errorf("only %v were seen", seen)
	}
}
