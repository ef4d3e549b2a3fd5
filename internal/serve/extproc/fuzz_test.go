package extproc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/proxy"
)

// scripted is a stream whose messages are given.
type scripted struct {
	grpc.ServerStream
	ctx      context.Context
	codec    codec
	messages [][]byte
	sent     []*extprocv3.ProcessingResponse
}

func (s *scripted) Context() context.Context { return s.ctx }

// RecvMsg receives the next message that can be decoded.
func (s *scripted) RecvMsg(into any) error {
	for {
		if len(s.messages) == 0 {
			return io.EOF
		}
		m := s.messages[0]
		s.messages = s.messages[1:]
		if s.codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(m)}, into) == nil {
			return nil
		}
	}
}

func (s *scripted) Recv() (*extprocv3.ProcessingRequest, error) {
	m := new(extprocv3.ProcessingRequest)
	return m, s.RecvMsg(m)
}

func (s *scripted) Send(m *extprocv3.ProcessingResponse) error {
	if len(s.sent) > 1<<16 {
		return errors.New("too many messages")
	}
	s.sent = append(s.sent, m)
	return nil
}

// split cuts messages out of bytes: each has its length before it, in two bytes.
func split(data []byte) (messages [][]byte) {
	for len(data) >= 2 {
		n := min(int(data[0])<<8|int(data[1]), len(data)-2)
		messages = append(messages, data[2:2+n])
		data = data[2+n:]
	}
	return messages
}

func join(messages ...*extprocv3.ProcessingRequest) (data []byte) {
	for _, m := range messages {
		b, _ := proto.Marshal(m)
		data = append(append(data, byte(len(b)>>8), byte(len(b))), b...)
	}
	return data
}

// FuzzMessages sends arbitrary messages: no panic escapes, and each stream ends after the
// gateway has ended it.
func FuzzMessages(f *testing.F) {
	f.Add(join(post("/v1/chat/completions"), requestBody("{}", true), responseHeaders(false, ":status", "200"), responseBody("a", false), responseBody("", true)))
	f.Add(join(post("/v1/chat/completions"), requestBody("{}", false), requestTrailers, responseHeaders(false, ":status", "200"), responseBody("a", false), responseTrailers))
	f.Add(join(requestHeaders(true, ":method", "GET", ":path", "/"), responseHeaders(true, ":status", "204")))
	f.Add(join(responseHeaders(true, ":status", "x"), requestBody("{}", true), requestBody("{}", true)))
	edges, decoder := guard.New(), newCodec()
	p := &Server{
		edges: edges, log: slog.New(slog.DiscardHandler), base: context.Background(), limits: usual, memory: memory{most: leastInflight},
		serve: func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
			body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			onward := r.Clone(r.Context())
			onward.ContentLength, onward.Body = int64(len(body)), io.NopCloser(newReader(body))
			answer, _, err := via.Send(proxy.Routed{Request: onward, Target: kv.Target{URL: "http://10.0.0.1:8000"}})
			if err != nil {
				return
			}
			w.WriteHeader(answer.StatusCode)
			io.Copy(w, answer.Body)
		},
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p.Process(&scripted{ctx: t.Context(), codec: decoder, messages: split(data)})
		p.handlers.Wait()
		if n := edges.Panics()[guard.ExtProc]; n > 0 {
			t.Errorf("%d panics", n)
		}
		if n := p.memory.held.Load(); n != 0 {
			t.Errorf("%d bytes are held by no stream", n)
		}
	})
}
