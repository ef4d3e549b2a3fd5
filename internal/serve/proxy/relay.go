package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
)

// Routes whose prompts may be sent as tokens.
const (
	chatRoute       = "/v1/chat/completions"
	completionRoute = "/v1/completions"
)

// ResponsesRoute is the route whose answers may be stored by their worker.
const ResponsesRoute = "/v1/responses"

// streamBuffer is the memory for relaying one stream; later streams reuse it.
type streamBuffer struct {
	buffer       [16 << 10]byte
	pending, out []byte
}

// pooledBuffer bounds the memory that a pooled streamBuffer keeps beside its buffer,
// bytes.
const pooledBuffer = 64 << 10

// upstreamAnswer is a worker's answer with its body still to be read.
type upstreamAnswer struct {
	*http.Response
	ctx    context.Context
	heard  func() // bytes have come: the wait for the next ones begins
	sent   *inflight
	broken error // why the body ended too early
}

// Read reads the body.
func (a *upstreamAnswer) Read(b []byte) (int, error) {
	a.sent.reads.Store(true)
	n, err := a.Body.Read(b)
	a.sent.reads.Store(false)
	if n > 0 {
		a.heard()
	}
	if err != nil && err != io.EOF {
		err = cause(a.ctx, err)
		a.broken = err
	}
	return n, err
}

// unread has the bytes read again, which were read from the beginning of the body.
func (a *upstreamAnswer) unread(body []byte) {
	a.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(body), a.Body), a.Body}
}

// cause returns why ctx was cancelled where that explains err.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	return err
}

// HeaderVersion has the version of the weights of the worker when it was chosen, as far as it is known.
const HeaderVersion = "X-Kvrouter-Weight-Version"

// writeHead writes the worker's status and headers and the router's own.
func writeHead(w http.ResponseWriter, response *http.Response, u *sending, x *Exchange) {
	web.DropHopByHop(response.Header)
	dropOwn(response.Header)
	header := w.Header()
	maps.Copy(header, response.Header)
	decided := header // of the decision
	if u.Silent {
		decided = http.Header{}
	}
	decided.Set(web.HeaderWorker, x.Worker)
	decided.Set(web.HeaderOverlap, strconv.Itoa(x.Decision.OverlapTokens))
	if version := x.Decision.Version; version != "" {
		decided.Set(HeaderVersion, kv.MetricLabel(version))
	}
	x.Below.show(decided)
	header.Set(web.HeaderRequest, u.RequestID)
	u.Gateway.sign(decided, x.Decision.Target.Address())
	if x.Shared != nil {
		x.Shared.begin(decided)
	}
	x.Status = response.StatusCode
	x.accepted(x.Status)
	w.WriteHeader(response.StatusCode)
}

// relayWhole relays an answer that is no stream. It is read before anything is
// written, as far as hold goes, so that a worker that dies over it
// has not answered. With retry the same holds for one that stops the answer, as a
// vLLM that shuts down does, unless the client has aborted it; SGLang stops only that.
func (p *Proxy) relayWhole(w http.ResponseWriter, answer *upstreamAnswer, u *sending, x *Exchange, retry bool) error {
	worker := x.Decision.Target.Key.Worker
	body, whole, err := p.hold(answer, u.Client)
	defer func() { p.answers.Give(u.Client, int64(cap(body))) }()
	if err != nil {
		return p.unanswered(worker, err, health.Broken)
	}
	usage, finish := outcome(u.Route, body)
	aborted := u.Aborted != nil && u.Aborted() || p.settings.PassAborts || x.Decision.Booking.WorkerRests() // by the client or a trainer
	if retry && policy.Aborted(finish) && !x.Decision.Target.RunsSGLang() && !aborted {
		return &workerError{worker: worker, called: x.Worker, err: errors.New("stopped its answer: " + finish), abort: &abortError{why: finish}}
	}
	x.Usage, x.Ending, x.finish = usage, endingOf(answer.StatusCode, finish), finish
	if !u.claims() {
		return errOutrun
	}
	if u.Route == ResponsesRoute && answer.StatusCode == http.StatusOK {
		u.stores(x, gjson.GetBytes(body, "id").Str)
	}
	writeHead(w, answer.Response, u, x)
	if _, err := w.Write(body); err != nil {
		return errors.Join(ErrAnswered, err)
	}
	if whole {
		return nil
	}
	if _, err := io.Copy(w, answer); err != nil {
		if answer.broken != nil {
			cutOff(w)
			err = p.unanswered(worker, answer.broken, health.Broken)
		}
		return errors.Join(ErrAnswered, err)
	}
	return nil
}

// hold reads an answer, or its beginning: up to bufferedAnswer, or as long as there is memory for
// the client's answers. The rest then comes no faster than the client takes it. The memory is
// to be given back.
func (p *Proxy) hold(answer *upstreamAnswer, client string) (body []byte, whole bool, err error) {
	announced := answer.ContentLength
	if announced > bufferedAnswer {
		announced = -1
	}
	body, err = web.Fill(io.LimitReader(answer, bufferedAnswer), announced, bufferedAnswer, func(has, n int64) bool { return p.answers.Take(client, has, n) })
	if errors.Is(err, web.ErrNoMemory) {
		return body, false, nil
	}
	return body, len(body) < bufferedAnswer, err
}

// streamRelay is the relaying of one stream of server-sent events.
type streamRelay struct {
	proxy   *Proxy
	w       http.ResponseWriter
	answer  *upstreamAnswer
	u       *sending
	x       *Exchange
	retry   bool
	events  eventScanner
	started bool      // the headers have been written
	held    []byte    // the beginning of the stream, while another worker's may take its place
	since   time.Time // when the first of held came

	storedID string    // of the answer, as far as u has been told
	last     time.Time // when the last tokens came; zero: none have
	tokens   int
}

// relayStream relays server-sent events chunk by chunk, as they come. Nothing
// is written before the first chunk, so that a worker that dies in prefill has
// not answered; a gateway waits for the headers only and gets them at once.
func (p *Proxy) relayStream(w http.ResponseWriter, answer *upstreamAnswer, u *sending, x *Exchange, retry bool) error {
	answer.Header.Del("Content-Length") // an event may be taken out
	memory := p.streams.Get().(*streamBuffer)
	defer p.streams.Put(memory)
	r := streamRelay{proxy: p, w: w, answer: answer, u: u, x: x, retry: retry, started: u.Migration.open()}
	r.events = eventScanner{HideUsage: u.edits.usage, Generate: u.Route == generateRoute, Numbered: u.Route == ResponsesRoute, Migration: u.Migration, pending: memory.pending[:0], out: memory.out[:0]}
	defer func() {
		if cap(r.events.pending)+cap(r.events.out) <= pooledBuffer {
			memory.pending, memory.out = r.events.pending, r.events.out
		}
		if m := u.Migration; m != nil && m.unlike > 0 {
			p.rewritten.Add(m.unlike)
			m.unlike = 0
		}
	}()
	u.Migration.restart()
	if u.Gateway != nil {
		_ = r.start() // there is no other attempt
	}
	for {
		n, err := answer.Read(memory.buffer[:])
		if n > 0 {
			if err := r.take(memory.buffer[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return r.end()
		}
		if err != nil {
			return r.fail(err)
		}
	}
}

// start writes the headers if that has not been done, unless another attempt answers.
func (r *streamRelay) start() error {
	if !r.started {
		if !r.u.claims() {
			return errOutrun
		}
		writeHead(r.w, r.answer.Response, r.u, r.x)
		r.started = true
		r.u.Migration.begin(&r.x.Decision)
	}
	return nil
}

// take relays a chunk.
func (r *streamRelay) take(chunk []byte) error {
	p, x := r.proxy, r.x
	out := r.events.Scan(chunk)
	if r.failsAtOnce() {
		return r.engineError()
	}
	if r.events.Count > 0 {
		now := p.now()
		if r.last.IsZero() {
			if x.FirstChunk.IsZero() {
				x.FirstChunk = now
			}
			x.Decision.Booking.FirstToken()
		} else {
			p.observer.InterToken(x.Worker, now.Sub(r.last), r.events.Count)
		}
		r.last = now
		before := r.tokens
		if r.tokens += r.events.Count; p.settings.OutputBlocks {
			x.Decision.Booking.Generated(r.tokens)
		}
		if step := x.Decision.Booking.AnswerStep(); step > 0 && before/step < r.tokens/step {
			x.Decision.Booking.Answered(r.tokens)
		}
	}
	if err := r.write(out); err != nil {
		return err
	}
	if r.u.Migration != nil {
		r.answer.sent.goesOn.Store(r.u.Migration.mayMove())
	}
	return r.broken()
}

// failsAtOnce reports whether the stream begins with an error that another worker's may not have.
func (r *streamRelay) failsAtOnce() bool {
	return !r.started && r.retry && r.events.status >= http.StatusInternalServerError
}

const (
	// mostOpening bounds what is held of a stream's beginning, bytes, and openingTime the time
	// for which it is, if more comes then.
	mostOpening = 64 << 10
	openingTime = time.Second
)

// write writes a part of the stream to the client. Comments and the events that open a stream
// wait for what follows them, so that a stream that begins with an error can be another worker's.
func (r *streamRelay) write(out []byte) error {
	if len(out) == 0 {
		return nil
	}
	if now := r.proxy.now(); !r.started && r.retry && !r.events.begun && len(r.held)+len(out) <= mostOpening {
		if len(r.held) == 0 {
			r.since = now
		}
		if now.Sub(r.since) < openingTime {
			r.held = append(r.held, out...)
			return nil
		}
	}
	return r.send(out)
}

// send writes what is held and a part of the stream to the client.
func (r *streamRelay) send(out []byte) error {
	if err := r.start(); err != nil {
		return err
	}
	if r.events.storedID != r.storedID {
		r.storedID = r.events.storedID
		r.u.stores(r.x, r.storedID)
	}
	if len(r.held) > 0 {
		out, r.held = append(r.held, out...), nil
	}
	if _, err := r.w.Write(out); err != nil {
		return errors.Join(ErrAnswered, err)
	}
	if err := http.NewResponseController(r.w).Flush(); err != nil {
		return errors.Join(ErrAnswered, err)
	}
	return nil
}

// engineFailed reports whether an event says that the engine failed an answer that may be
// continued.
func (r *streamRelay) engineFailed() bool {
	return r.u.Migration.continues() && r.events.status >= http.StatusInternalServerError
}

// broken returns the error of a stream whose events say that it cannot go on.
func (r *streamRelay) broken() error {
	switch {
	case r.engineFailed():
		return r.fail(errors.New("its engine failed during the answer"))
	case r.u.Migration.open() && r.u.Migration.torn: // which is no failure of its own
		return fmt.Errorf("worker %s does not continue the answer that it was sent", r.x.Worker)
	}
	return nil
}

// note keeps the facts of the stream that has ended.
func (r *streamRelay) note() {
	r.x.Usage, r.x.Ending, r.x.finish = r.events.usage(), r.events.ending(r.answer.StatusCode, r.u.EndMarked), r.events.finish
}

// end relays the end of the stream.
func (r *streamRelay) end() error {
	rest := r.events.End()
	if r.failsAtOnce() {
		return r.engineError()
	}
	if err := r.broken(); err != nil {
		return err
	}
	r.note()
	if r.u.Migration.continues() && r.x.Ending == policy.Failed {
		return r.fail(io.ErrUnexpectedEOF)
	}
	early := r.x.Ending == policy.Failed && r.events.status == 0 && r.events.finish == "" && r.answer.StatusCode == http.StatusOK
	if early && len(r.events.pending) > 0 {
		rest = nil // half an event
	}
	if err := r.send(rest); err != nil || !early {
		return err
	}
	r.tell(io.ErrUnexpectedEOF)
	return nil
}

// engineError is the error of a stream that begins with one.
func (r *streamRelay) engineError() error {
	return &workerError{worker: r.x.Decision.Target.Key.Worker, called: r.x.Worker, err: errors.New("its engine failed before the first token"), kind: health.Engine}
}

// tell ends the stream with an error event.
func (r *streamRelay) tell(err error) {
	why := ""
	if r.u.Migration != nil {
		why = r.u.Migration.why
	}
	r.events.tell(r.w, r.u.Route, failure(r.x.Worker, err, why))
}

// tell ends a stream of that route with an error event: the status has been sent.
func (s *eventScanner) tell(w http.ResponseWriter, route string, f web.Fault) {
	if s.unended {
		fmt.Fprint(w, "\n\n")
	} else if s.open() {
		fmt.Fprint(w, "\n") // ends the event that broke off
	}
	w.Write(web.DialectOf(route).Event(f, s.sequence()+1))
	http.NewResponseController(w).Flush()
}

// fail ends a stream that broke off with err.
func (r *streamRelay) fail(err error) error {
	p, worker := r.proxy, r.x.Decision.Target.Key.Worker
	r.note()
	if !r.started {
		return p.unanswered(worker, err, health.Broken)
	}
	if r.events.done && !r.engineFailed() { // many clients leave as soon as they have read the end
		return nil
	}
	failed := p.unanswered(worker, err, health.Broken)
	if r.u.Migration != nil {
		return failed // migrate ends the stream, or continues it
	}
	r.tell(err)
	return errors.Join(ErrAnswered, failed)
}

// failure describes to the client an answer of a worker that broke off with err. why is the
// reason for which it is not continued; empty: it never is.
func failure(worker string, err error, why string) web.Fault {
	f := web.Fault{Status: http.StatusBadGateway, Message: fmt.Sprintf("worker %s failed during its answer", worker)}
	if why != "" {
		f.Message += ", which is not continued: " + why
	}
	if errors.Is(err, web.ErrStopped) {
		f.Status, f.Message = http.StatusServiceUnavailable, web.ErrStopped.Error()
	}
	return f
}
