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
	"sync/atomic"
	"time"

	procmode "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
)

const (
	// pieceSize is the maximum size of a body piece in one message, bytes: protocol 004
	// allows 64 KiB, and gRPC's buffers have 32 KiB, the next larger ones 1 MiB.
	pieceSize = 32000
	// piecesAhead is the maximum number of unread pieces of a body.
	piecesAhead = 4
)

// errGone means that the gateway has ended the stream: its client disconnected.
var errGone = errors.New("the gateway has ended the stream")

// errLonger refuses a body that is longer than its Content-Length.
var errLonger = &refusal{reasonBody, web.BodyError{Status: http.StatusBadRequest,
	Message: "the request body is longer than its Content-Length"}}

// pieces is a body that arrives in messages. One goroutine puts, another reads.
type pieces struct {
	share    *share // of which the pieces take their memory until they are read
	length   int64  // announced; negative: unknown. Set before the first piece
	next     chan []byte
	over     chan struct{} // closed with err set
	once     sync.Once
	err      error
	came     int64 // bytes put
	rest     []byte
	given    int64 // bytes read
	trailers bool  // it ended with trailers; set before over is closed
	timer    *time.Timer
}

func newPieces(s *share) *pieces {
	return &pieces{share: s, length: -1, next: make(chan []byte, piecesAhead), over: make(chan struct{})}
}

// put passes a piece to the reader; last marks the end. Pieces after the end are dropped:
// Envoy may send the last one twice (its issue 46237). An error is a refusal.
func (b *pieces) put(ctx context.Context, piece []byte, last bool) error {
	select {
	case <-b.over:
		return nil
	default:
	}
	n := int64(len(piece))
	if b.came += n; b.length >= 0 && b.came > b.length {
		return errLonger
	}
	if n > 0 {
		if !b.share.take(n) {
			return b.share.of.full()
		}
		select {
		case b.next <- piece:
		case <-b.over:
			b.share.give(n)
		case <-ctx.Done():
			b.share.give(n)
		}
	}
	if last {
		b.end(io.EOF)
	}
	return nil
}

// end ends the body. Pieces already put can still be read.
func (b *pieces) end(err error) {
	b.once.Do(func() {
		b.err = err
		close(b.over)
	})
}

// Read returns at most one piece. The last bytes of a body of known length are returned
// only after its end: a body that is read to its length is complete.
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
	n := min(len(into), len(b.rest))
	if b.length >= 0 && b.given+int64(n) >= b.length {
		if <-b.over; b.err != io.EOF {
			return 0, b.err
		}
	}
	copy(into, b.rest[:n])
	b.rest = b.rest[n:]
	b.given += int64(n)
	b.share.give(int64(n))
	return n, nil
}

// Close ends reading: later parts are dropped.
func (b *pieces) Close() error {
	b.end(os.ErrClosed)
	return nil
}

// stream is one request of a gateway.
type stream struct {
	server  *Server
	grpc    extprocv3.ExternalProcessor_ProcessServer
	ctx     context.Context // of the request
	cancel  context.CancelCauseFunc
	request *http.Request
	gateway *proxy.Gateway
	share   share // of the server's memory

	asked, answered *pieces // the request's body, and the answer's
	bodiless        bool    // the request has no body
	answers         chan *http.Response
	malformed       chan struct{} // closed by read when the answer is malformed
	stuck           chan struct{} // closed when the gateway takes no message
	once            sync.Once     // of stuck
	late            *time.Timer   // that closes it; nil: nothing was sent. One message is sent at a time
	served          string        // the worker that served, as the gateway reports; set before answers has one

	came  http.Header // the answer's headers; set before answers has one
	empty bool        // the answer has no body; set before answers has one

	phase atomic.Int32  // who answers
	over  chan struct{} // closed at the end of an answer that is the gateway's own

	target    string // first address that the gateway got
	answering bool   // the worker's answer has begun
	headed    bool   // its headers have been passed on
}

// Phases of a stream. The goroutine that leaves waits is the only one to send from then on.
const (
	waits   int32 = iota // for the handler
	handled              // the handler answers, itself or by a worker
	own                  // the gateway answers by itself
)

// Process serves one request of a gateway.
func (p *Server) Process(process extprocv3.ExternalProcessor_ProcessServer) error {
	s := &stream{server: p, grpc: process, share: share{of: &p.memory}, answers: make(chan *http.Response, 1), malformed: make(chan struct{}),
		stuck: make(chan struct{}), over: make(chan struct{})}
	s.asked, s.answered = newPieces(&s.share), newPieces(&s.share)
	defer s.share.end()
	s.ctx, s.cancel = context.WithCancelCause(process.Context())
	defer s.cancel(nil)
	defer context.AfterFunc(p.base, func() { s.cancel(context.Cause(p.base)) })()
	w := &writer{stream: s, header: http.Header{}}
	if fits, known := process.Context().Value(fitsKey{}).(bool); known && !fits {
		err := p.memory.full()
		p.count(err)
		return w.refuse(err)
	}
	ended := make(chan error, 2) // of the handler, and of the goroutine below
	silent := time.AfterFunc(p.limits.silence, func() {
		p.refused[reasonSilence].Add(1)
		ended <- status.Error(codes.DeadlineExceeded, "no request headers arrived on the stream in time")
	})
	p.handlers.Go(func() { // until the stream ends
		first, err := s.receive()
		switch {
		case !silent.Stop(): // it has ended
		case p.count(err):
			ended <- w.refuse(err)
		case err != nil:
			ended <- nil // there was no request
		case s.serve(w, first, ended):
			s.read(ended)
		}
	})
	select {
	case err := <-ended:
		return err
	case <-s.stuck:
		return status.Error(codes.DeadlineExceeded, "the gateway stopped reading")
	}
}

// serve serves the request of the first message and sends the result to ended. ok is false
// if the message is no request; the result has been sent then.
func (s *stream) serve(w *writer, first *extprocv3.ProcessingRequest, ended chan<- error) (ok bool) {
	p := s.server
	if err := p.edges.Do(guard.ExtProc, p.log, func() error { return s.begin(first) }); err != nil {
		if status.Code(err) == codes.Unknown {
			p.count(err)
			err = w.refuse(err)
		}
		ended <- err
		return false
	}
	done := func() {}
	if from, known := peer.FromContext(s.grpc.Context()); known {
		done = web.Busy(from.Addr)
	}
	p.handlers.Go(func() { // until the handler ends: with ctx at the latest
		defer done()
		defer w.stop()
		p.serve(w, web.Steady(w, s.request, p.limits.stall), s.gateway)
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
				s.server.log.Error("unsupported gateway configuration: set request_body_mode and response_body_mode to FULL_DUPLEX_STREAMED",
					"request_body_mode", c.GetRequestBodyMode(), "response_body_mode", c.GetResponseBodyMode())
			})
			return status.Errorf(codes.InvalidArgument, "set request_body_mode and response_body_mode to FULL_DUPLEX_STREAMED: they are %s and %s",
				c.GetRequestBodyMode(), c.GetResponseBodyMode())
		}
	}
	request, err := newRequest(s.ctx, headers, s.asked)
	if err != nil {
		return err
	}
	request.RemoteAddr = clientAddress(first)
	s.request = request
	s.bodiless = headers.GetEndOfStream()
	if s.asked.length = request.ContentLength; s.asked.length == 0 && !s.bodiless {
		request.ContentLength = -1 // its end must arrive, too
	}
	s.gateway = s.server.gateway(first, request.Header)
	if !s.share.take(memoryOf(request.Header) + memoryOf(http.Header{"": s.gateway.Subset})) {
		return s.server.memory.full()
	}
	s.gateway.Send = s.ask
	return nil
}

// receive receives the gateway's next message. It fails with a refusal if the message
// exceeds a limit.
func (s *stream) receive() (*extprocv3.ProcessingRequest, error) {
	var in incoming
	err := s.grpc.RecvMsg(&in)
	switch {
	case err == nil:
		return in.message, in.refused
	case status.Code(err) == codes.ResourceExhausted:
		s.server.refused[reasonMessage].Add(1) // gRPC has ended the stream
	}
	return nil, err
}

// read processes the gateway's messages until the stream ends. If one exceeds a limit,
// ended gets the stream's status.
func (s *stream) read(ended chan<- error) {
	for {
		message, err := s.receive()
		if err == nil {
			err = s.server.edges.Do(guard.ExtProc, s.server.log, func() error { return s.take(message) })
		}
		if s.server.count(err) {
			ended <- status.Error(codes.ResourceExhausted, err.Error())
		}
		if err != nil {
			s.cancel(errGone) // before the answer ends: its worker has not failed
			s.asked.end(errGone)
			s.answered.end(errGone)
			return
		}
	}
}

// take processes one message after the first.
func (s *stream) take(message *extprocv3.ProcessingRequest) error {
	switch m := message.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestBody:
		if err := s.asked.put(s.ctx, m.RequestBody.GetBody(), m.RequestBody.GetEndOfStream()); s.server.count(err) {
			s.asked.end(err) // the handler answers
		}
	case *extprocv3.ProcessingRequest_RequestTrailers:
		s.asked.trail()
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		if s.phase.CompareAndSwap(waits, own) {
			s.cancel(errGone)
			s.asked.end(errGone)
		}
		if s.phase.Load() == own {
			return s.passOwn(&extprocv3.ProcessingResponse{
				Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: new(extprocv3.HeadersResponse)},
			}, m.ResponseHeaders.GetEndOfStream())
		}
		answer, err := newAnswer(m.ResponseHeaders, s.answered)
		if err != nil || s.came != nil || s.refused() {
			s.refuse()
			return nil
		}
		if !s.share.take(memoryOf(answer.Header)) {
			return s.server.memory.full()
		}
		s.came, s.empty = answer.Header.Clone(), m.ResponseHeaders.GetEndOfStream()
		s.served, _, _ = strings.Cut(served(message), ",")
		s.answers <- answer // has room for one
	case *extprocv3.ProcessingRequest_ResponseBody:
		if s.phase.Load() == own {
			return s.passOwnBody(m.ResponseBody.GetBody(), m.ResponseBody.GetEndOfStream())
		}
		return s.answered.put(s.ctx, m.ResponseBody.GetBody(), m.ResponseBody.GetEndOfStream())
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		if s.phase.Load() == own {
			return s.passOwn(trailersResponse(), true)
		}
		s.answered.trail()
	case *extprocv3.ProcessingRequest_RequestHeaders:
		return errors.New("duplicate request headers")
	}
	return nil
}

// passOwn sends a part of the gateway's own answer back; last marks its end. Only read calls it.
func (s *stream) passOwn(message *extprocv3.ProcessingResponse, last bool) error {
	select {
	case <-s.over:
		return nil // Envoy may send the end twice
	default:
	}
	err := s.send(message)
	if last {
		close(s.over)
	}
	return err
}

// passOwnBody is passOwn for a part of the body.
func (s *stream) passOwnBody(piece []byte, last bool) error {
	for rest := piece; ; {
		part := rest[:min(len(rest), pieceSize)]
		rest = rest[len(part):]
		ends := last && len(rest) == 0
		if err := s.passOwn(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: bodyResponse(part,
			ends)}}, ends); err != nil || len(rest) == 0 {
			return err
		}
	}
}

// trailersResponse lets the trailers of an answer pass.
func trailersResponse() *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: new(extprocv3.TrailersResponse)},
	}
}

// refuse ends the answer as malformed: the client gets a 502. Only read calls it.
func (s *stream) refuse() {
	if !s.refused() {
		close(s.malformed)
		s.answered.end(proxy.ErrGateway)
	}
}

// refused reports whether the answer is malformed.
func (s *stream) refused() bool {
	select {
	case <-s.malformed:
		return true
	default:
		return false
	}
}

// trail ends a body by trailers.
func (b *pieces) trail() {
	b.once.Do(func() {
		b.err, b.trailers = io.EOF, true
		close(b.over)
	})
}

// whole reports whether the body has come to its end.
func (b *pieces) whole() bool {
	select {
	case <-b.over:
		return b.err == io.EOF
	default:
		return false
	}
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

// send sends a message to the gateway, which has to take it within the time of stall: else
// the stream ends.
func (s *stream) send(message *extprocv3.ProcessingResponse) error {
	if s.late == nil {
		s.late = time.AfterFunc(s.server.limits.stall, func() {
			s.once.Do(func() { close(s.stuck) })
			s.cancel(errGone)
		})
	} else {
		s.late.Reset(s.server.limits.stall)
	}
	defer s.late.Stop()
	return s.grpc.Send(message)
}

// ask passes the destinations and the request to the gateway and waits for the answer.
func (s *stream) ask(routed proxy.Routed) (*http.Response, string, error) {
	if !s.phase.CompareAndSwap(waits, handled) && s.phase.Load() == own {
		return nil, "", errGone
	}
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
		if s.refused() {
			return nil, "", proxy.ErrGateway
		}
		s.answering = true
		return answer, s.served, nil
	case <-s.malformed:
		return nil, "", proxy.ErrGateway
	case <-routed.Request.Context().Done():
		return nil, "", context.Cause(routed.Request.Context())
	}
}

// askFor passes the request back to the gateway.
func (s *stream) askFor(request *http.Request, addresses string) error {
	came := s.request.Header
	header := request.Header
	if came["Content-Length"] != nil {
		header["Content-Length"] = []string{strconv.FormatInt(request.ContentLength, 10)}
	}
	m := mutation(came, header)
	m.SetHeaders = appendHeader(m.SetHeaders, headerDestination, addresses)
	err := s.send(&extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
			Response: &extprocv3.CommonResponse{HeaderMutation: m, ClearRouteCache: true},
		}},
		DynamicMetadata: metadata(addresses),
	})
	if err != nil || s.bodiless {
		return err
	}
	trailed := s.asked.trailed()
	w := &pieceWriter{left: request.ContentLength, ends: !trailed, send: s.sendAsked}
	if request.ContentLength > 0 {
		_, err = io.Copy(w, request.Body) // copies nothing of a body in memory
	} else if !trailed {
		err = s.sendAsked(nil, true)
	}
	if err != nil {
		return err
	}
	if !trailed {
		return nil
	}
	return s.send(&extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestTrailers{RequestTrailers: new(extprocv3.TrailersResponse)},
	})
}

// pieceWriter sends a body piece by piece.
type pieceWriter struct {
	left int64 // bytes still to come
	ends bool  // the last piece is marked as the end
	send func(piece []byte, last bool) error
}

// Write sends the data, in several pieces if needed.
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
	return s.send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: bodyResponse(piece, last)}})
}

// sendAnswered sends a piece of the answer's body.
func (s *stream) sendAnswered(piece []byte, last bool) error {
	return s.send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: bodyResponse(piece, last)}})
}
