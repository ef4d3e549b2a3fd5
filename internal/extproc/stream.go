package extproc

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	procmode "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvrouter/internal/guard"
	"kvrouter/internal/proxy"
)

const (
	// pieceSize is the most bytes of a body in one message: protocol 004 allows 64 KiB,
	// and gRPC has buffers of 32 KiB, and then of 1 MiB.
	pieceSize = 32000
	// piecesAhead is how many pieces of a body wait here to be read.
	piecesAhead = 4
)

// errGone means that the gateway has ended the stream: its client disconnected.
var errGone = errors.New("the gateway has ended the stream")

// pieces is a body that comes in messages. One goroutine puts, another reads.
type pieces struct {
	next     chan []byte
	over     chan struct{} // closed with err set
	once     sync.Once
	err      error
	rest     []byte
	trailers bool // it ended with trailers; set before over is closed
	timer    *time.Timer
}

func newPieces() *pieces {
	return &pieces{next: make(chan []byte, piecesAhead), over: make(chan struct{})}
}

// put hands a piece to the reader; with last it is the end. What comes after the end is
// dropped: Envoy may send the last piece again (its issue 46237).
func (b *pieces) put(ctx context.Context, piece []byte, last bool) {
	select {
	case <-b.over:
		return
	default:
	}
	if len(piece) > 0 {
		select {
		case b.next <- piece:
		case <-b.over:
		case <-ctx.Done():
		}
	}
	if last {
		b.end(io.EOF)
	}
}

// end ends the body: the pieces that were put are read still.
func (b *pieces) end(err error) {
	b.once.Do(func() {
		b.err = err
		close(b.over)
	})
}

// Read reads no more than one piece.
func (b *pieces) Read(into []byte) (int, error) {
	for len(b.rest) == 0 {
		select {
		case b.rest = <-b.next:
		default:
			select {
			case b.rest = <-b.next:
			case <-b.over:
				select {
				case b.rest = <-b.next:
				default:
					return 0, b.err
				}
			}
		}
	}
	n := copy(into, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// Close ends the reading: later parts are dropped.
func (b *pieces) Close() error {
	b.end(os.ErrClosed)
	return nil
}

// stream is one request on its way through a gateway.
type stream struct {
	server  *Server
	grpc    extprocv3.ExternalProcessor_ProcessServer
	ctx     context.Context // of the request
	cancel  context.CancelCauseFunc
	request *http.Request
	gateway *proxy.Gateway

	asked, answered *pieces // the request's body, and the answer's
	bodiless        bool    // the request has no body
	answers         chan *http.Response
	served          string // the worker that served, as the gateway reports; set before answers has one

	came  http.Header // the answer's headers; set before answers has one
	empty bool        // the answer has no body; likewise

	target    string // first address that the gateway got
	answering bool   // the worker's answer has begun
	headed    bool   // its headers have been let through
}

// Process serves one request of a gateway.
func (p *Server) Process(process extprocv3.ExternalProcessor_ProcessServer) error {
	s := &stream{server: p, grpc: process, asked: newPieces(), answered: newPieces(), answers: make(chan *http.Response, 1)}
	s.ctx, s.cancel = context.WithCancelCause(process.Context())
	defer s.cancel(nil)
	defer context.AfterFunc(p.base, func() { s.cancel(context.Cause(p.base)) })()
	w := &writer{stream: s, header: http.Header{}, stuck: make(chan struct{})}
	ended := make(chan error, 1)
	silent := time.AfterFunc(p.silence, func() {
		ended <- status.Error(codes.DeadlineExceeded, "no request headers came on the stream in time")
	})
	p.handlers.Go(func() { // until the stream ends
		first, err := process.Recv()
		switch {
		case !silent.Stop(): // it has ended
		case err != nil:
			ended <- nil // there was no request
		case s.serve(w, first, ended):
			s.read()
		}
	})
	select {
	case err := <-ended:
		return err
	case <-w.stuck:
		return status.Error(codes.DeadlineExceeded, "the gateway took nothing for too long")
	}
}

// serve serves the first message's request and sends the result to ended. Not ok: it
// has been sent, for the message is no request.
func (s *stream) serve(w *writer, first *extprocv3.ProcessingRequest, ended chan<- error) (ok bool) {
	p := s.server
	if err := p.edges.Do(guard.ExtProc, p.log, func() error { return s.begin(first) }); err != nil {
		if status.Code(err) == codes.Unknown {
			http.Error(w, err.Error(), http.StatusBadRequest)
			err = w.finish()
		}
		ended <- err
		return false
	}
	p.handlers.Go(func() { // until the handler ends: with ctx at the latest
		defer w.stop()
		p.serve(w, s.request, s.gateway)
		ended <- w.finish()
	})
	return true
}

// begin makes the request of the first message.
func (s *stream) begin(first *extprocv3.ProcessingRequest) error {
	headers := first.GetRequestHeaders()
	if headers == nil {
		return status.Error(codes.InvalidArgument, "the first message must be the request headers: set request_header_mode: SEND")
	}
	if c := first.GetProtocolConfig(); c != nil {
		const want = procmode.ProcessingMode_FULL_DUPLEX_STREAMED
		if c.GetRequestBodyMode() != want || c.GetResponseBodyMode() != want {
			s.server.warned.Do(func() {
				s.server.log.Error("unsupported gateway configuration: set request_body_mode and response_body_mode to FULL_DUPLEX_STREAMED", "request_body_mode", c.GetRequestBodyMode(), "response_body_mode", c.GetResponseBodyMode())
			})
			return status.Errorf(codes.InvalidArgument, "set request_body_mode and response_body_mode to FULL_DUPLEX_STREAMED: they are %s and %s", c.GetRequestBodyMode(), c.GetResponseBodyMode())
		}
	}
	request, err := newRequest(s.ctx, headers, s.asked)
	if err != nil {
		return err
	}
	request.RemoteAddr = clientAddress(first)
	s.bodiless = headers.GetEndOfStream()
	s.gateway = s.server.gateway(first, request.Header)
	s.gateway.Send = s.send
	s.request = request
	return nil
}

// read takes the gateway's messages until it ends the stream.
func (s *stream) read() {
	for {
		message, err := s.grpc.Recv()
		if err == nil {
			err = s.server.edges.Do(guard.ExtProc, s.server.log, func() error { return s.take(message) })
		}
		if err != nil {
			s.asked.end(errGone)
			s.answered.end(errGone)
			s.cancel(errGone)
			return
		}
	}
}

// take takes one message after the first.
func (s *stream) take(message *extprocv3.ProcessingRequest) error {
	switch m := message.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestBody:
		s.asked.put(s.ctx, m.RequestBody.GetBody(), m.RequestBody.GetEndOfStream())
	case *extprocv3.ProcessingRequest_RequestTrailers:
		s.asked.trail()
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		answer, err := newAnswer(m.ResponseHeaders, s.answered)
		if err != nil {
			return err
		}
		if s.came != nil {
			return errors.New("duplicate response headers")
		}
		s.came, s.empty = answer.Header.Clone(), m.ResponseHeaders.GetEndOfStream()
		s.served, _, _ = strings.Cut(served(message), ",")
		s.answers <- answer // has room for one
	case *extprocv3.ProcessingRequest_ResponseBody:
		s.answered.put(s.ctx, m.ResponseBody.GetBody(), m.ResponseBody.GetEndOfStream())
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		s.answered.trail()
	case *extprocv3.ProcessingRequest_RequestHeaders:
		return errors.New("duplicate request headers")
	}
	return nil
}

// trail ends a body with trailers.
func (b *pieces) trail() {
	b.once.Do(func() {
		b.err, b.trailers = io.EOF, true
		close(b.over)
	})
}

// trailed reports whether the body has ended with trailers.
func (b *pieces) trailed() bool {
	select {
	case <-b.over:
		return b.trailers
	default:
		return false
	}
}

// send gives the gateway the request's destinations, hands the request back and waits
// for the answer.
func (s *stream) send(routed proxy.Routed) (*http.Response, string, error) {
	addresses := []string{routed.Target.Address()}
	for i := range routed.Others {
		addresses = append(addresses, routed.Others[i].Address())
	}
	s.target = addresses[0]
	if err := s.askFor(routed.Request, strings.Join(addresses, ",")); err != nil {
		return nil, "", err
	}
	select {
	case answer := <-s.answers:
		s.answering = true
		return answer, s.served, nil
	case <-routed.Request.Context().Done():
		return nil, "", context.Cause(routed.Request.Context())
	}
}

// askFor hands the request back to the gateway.
func (s *stream) askFor(request *http.Request, addresses string) error {
	came := s.request.Header
	header := request.Header
	if came["Content-Length"] != nil {
		header["Content-Length"] = []string{strconv.FormatInt(request.ContentLength, 10)}
	}
	m := mutation(came, header)
	m.SetHeaders = appendHeader(m.SetHeaders, headerDestination, addresses)
	err := s.grpc.Send(&extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
			Response: &extprocv3.CommonResponse{HeaderMutation: m, ClearRouteCache: true},
		}},
		DynamicMetadata: metadata(addresses),
	})
	if err != nil || s.bodiless {
		return err
	}
	select { // a body of a known length has been read before its end came
	case <-s.asked.over:
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
	trailed := s.asked.trailed()
	w := &pieceWriter{left: request.ContentLength, ends: !trailed, send: s.sendAsked}
	if request.ContentLength > 0 {
		_, err = io.Copy(w, request.Body) // of a body in memory it copies nothing
	} else if !trailed {
		err = s.sendAsked(nil, true)
	}
	if err != nil {
		return err
	}
	if !trailed {
		return nil
	}
	return s.grpc.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{RequestTrailers: new(extprocv3.TrailersResponse)}})
}

// pieceWriter sends a body piece by piece.
type pieceWriter struct {
	left int64 // bytes still to come
	ends bool  // the last piece is marked as the end
	send func(piece []byte, last bool) error
}

// Write sends what may be several pieces.
func (w *pieceWriter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		piece := rest[:min(len(rest), pieceSize)]
		rest = rest[len(piece):]
		w.left -= int64(len(piece))
		if err := w.send(piece, w.ends && w.left == 0); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// bodyResponse is one piece of a body on its way back to the gateway.
func bodyResponse(piece []byte, last bool) *extprocv3.BodyResponse {
	return &extprocv3.BodyResponse{Response: &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
		Mutation: &extprocv3.BodyMutation_StreamedResponse{StreamedResponse: &extprocv3.StreamedBodyResponse{Body: piece, EndOfStream: last}},
	}}}
}

// sendAsked sends a piece of the request's body.
func (s *stream) sendAsked(piece []byte, last bool) error {
	return s.grpc.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: bodyResponse(piece, last)}})
}

// sendAnswered sends a piece of the answer's body.
func (s *stream) sendAnswered(piece []byte, last bool) error {
	return s.grpc.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: bodyResponse(piece, last)}})
}
