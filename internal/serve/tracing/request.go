package tracing

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"kvrouter/internal/base/kv"
)

// Headers of the W3C's trace context.
const (
	headerParent = "Traceparent"
	headerState  = "Tracestate"
)

// maxState bounds a client's trace state that is passed on, bytes; a longer one is left
// out. The W3C requires 512 at least.
const maxState = 512

// firstToken names the event of an answer's first token.
const firstToken = "first_token"

// Request is the trace of one request, from its arrival to the end of its answer. Its
// methods are safe for concurrent use.
type Request struct {
	tracer   trace.Tracer
	ctx      context.Context // carries span
	span     trace.Span
	sampled  bool
	attempts atomic.Int32 // without those of prefill legs
}

// Begin begins the trace of a request with its arrival and its route. It continues
// the trace of the request's header if that is unambiguous and valid by the W3C's
// rules. The trace of an untrusted client is only linked and does not control
// sampling. The caller calls End.
func (t *Tracer) Begin(r *http.Request, route string, arrived time.Time, trusted bool) *Request {
	if t == nil {
		return nil
	}
	ctx := context.Background()
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(arrived),
		trace.WithAttributes(attribute.String("http.request.method", r.Method), attribute.String("http.route", route))}
	if remote := parentOf(r.Header); remote.IsValid() && trusted {
		ctx = trace.ContextWithRemoteSpanContext(ctx, remote)
	} else if remote.IsValid() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: remote}))
	}
	q := &Request{tracer: t.tracer}
	q.ctx, q.span = t.tracer.Start(ctx, r.Method+" "+route, options...)
	if q.sampled = q.span.SpanContext().IsSampled(); q.sampled {
		q.span.SetAttributes(attribute.String("gen_ai.operation.name", operation(route)))
		q.span.SetAttributes(requestAttributes(r)...)
	}
	return q
}

// parentOf is the span that a client's header names; it is not valid if there is none.
func parentOf(header http.Header) trace.SpanContext {
	parents := header[headerParent]
	if len(parents) != 1 {
		return trace.SpanContext{}
	}
	carrier := propagation.MapCarrier{"traceparent": parents[0]}
	if state := strings.Join(header[headerState], ","); len(state) <= maxState {
		carrier["tracestate"] = state
	}
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
}

// requestAttributes are those of the conventions for HTTP servers. The
// query is left out: it may hold secrets.
func requestAttributes(r *http.Request) []attribute.KeyValue {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	list := []attribute.KeyValue{
		attribute.String("url.path", clip(r.URL.Path)), attribute.String("url.scheme", scheme),
		attribute.String("network.protocol.version", strconv.Itoa(r.ProtoMajor)+"."+strconv.Itoa(r.ProtoMinor)),
	}
	list = appendAddress(list, "server", r.Host)
	if host, port, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		n, _ := strconv.Atoi(port)
		list = append(list, attribute.String("client.address", host), attribute.String("network.peer.address", host),
			attribute.Int("network.peer.port", n))
	}
	if agent := r.UserAgent(); agent != "" {
		list = append(list, attribute.String("user_agent.original", clip(agent)))
	}
	if r.ContentLength > 0 {
		list = append(list, attribute.Int64("http.request.body.size", r.ContentLength))
	}
	return list
}

// appendAddress appends a host and its port, if it has one.
func appendAddress(list []attribute.KeyValue, of, address string) []attribute.KeyValue {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	if list = append(list, attribute.String(of+".address", clip(host))); port != "" {
		if n, err := strconv.Atoi(port); err == nil {
			list = append(list, attribute.Int(of+".port", n))
		}
	}
	return list
}

// operation is the GenAI conventions' word for a route; where they have none,
// the route's own.
func operation(route string) string {
	switch name := route[strings.LastIndexByte(route, '/')+1:]; {
	case route == "/v1/chat/completions", route == "/v1/messages", route == "/v1/responses":
		return "chat"
	case route == "/v1/completions", name == "generate":
		return "text_completion"
	case name == "embeddings", name == "embed":
		return "embeddings"
	default:
		return name
	}
}

// Sampled reports whether the request is sampled.
func (q *Request) Sampled() bool { return q != nil && q.sampled }

// Now returns the start time of a span that is reported later; the zero time if the
// request is not sampled, which saves reading the clock.
func (q *Request) Now() time.Time {
	if !q.Sampled() {
		return time.Time{}
	}
	return time.Now()
}

// SampledID returns the trace id in hexadecimal; empty: the request is not sampled.
func (q *Request) SampledID() string {
	if !q.Sampled() {
		return ""
	}
	return q.span.SpanContext().TraceID().String()
}

// Tokens adds a span for the tokenization of a prompt, which has ended now. source
// is the source of the tokens; empty: the request has no prompt and gets no span.
func (q *Request) Tokens(began time.Time, source string, tokens int) {
	if !q.Sampled() || source == "" {
		return
	}
	_, span := q.tracer.Start(q.ctx, "tokens", trace.WithTimestamp(began))
	span.SetAttributes(attribute.String("kvrouter.tokens.source", source), attribute.Int("kvrouter.tokens.count", tokens))
	span.End()
}

// Attempt is one sending of a request, or of a leg of it, to a worker.
type Attempt struct {
	ctx    context.Context // carries span
	span   trace.Span      // nil: the request is not sampled
	status int
	began  time.Time
}

// Attempt begins an attempt on the worker of that name; empty: without a name. The
// caller calls End.
func (q *Request) Attempt(leg kv.Leg, target *kv.Target, worker, method, route string) *Attempt {
	if q == nil {
		return nil
	}
	if !q.sampled {
		return &Attempt{ctx: q.ctx}
	}
	name, part := "attempt", ""
	if leg != kv.LegWhole {
		text, _ := leg.MarshalText()
		part = string(text)
		name += " " + part
	}
	a := &Attempt{began: time.Now()}
	a.ctx, a.span = q.tracer.Start(q.ctx, name, trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(a.began))
	list := []attribute.KeyValue{
		attribute.String("http.request.method", method), attribute.Int64("kvrouter.worker.id", int64(target.Key.Worker)),
		attribute.Int64("kvrouter.worker.rank", int64(target.Key.Rank)),
	}
	if worker != "" {
		list = append(list, attribute.String("kvrouter.worker.name", clip(worker)))
	}
	if u, err := url.Parse(target.URL); err == nil {
		list = appendAddress(append(list, attribute.String("url.full", u.Redacted()+route)), "server", u.Host)
	}
	if part != "" {
		list = append(list, attribute.String("kvrouter.leg", part))
	}
	if leg != kv.LegPrefill {
		if again := q.attempts.Add(1) - 1; again > 0 {
			list = append(list, attribute.Int("http.request.resend_count", int(again)))
		}
	}
	a.span.SetAttributes(list...)
	return a
}

// Inject replaces the client's trace context in the header of a request to a worker
// by that of the attempt. The caller must own the header.
func (a *Attempt) Inject(header http.Header) {
	if a == nil {
		return
	}
	header.Del(headerState)
	propagation.TraceContext{}.Inject(a.ctx, propagation.HeaderCarrier(header))
}

// Answered records the status of the worker's answer.
func (a *Attempt) Answered(status int) {
	if a != nil {
		a.status = status
	}
}

// End ends the attempt. first is the arrival of the answer's first token, if it was
// during the attempt; err is the reason of a failure; nil: the answer was relayed.
func (a *Attempt) End(first time.Time, err error) {
	if a == nil || a.span == nil {
		return
	}
	if a.status > 0 {
		a.span.SetAttributes(attribute.Int("http.response.status_code", a.status))
	}
	if first.After(a.began) {
		a.span.AddEvent(firstToken, trace.WithTimestamp(first))
	}
	switch {
	case errors.Is(err, context.Canceled): // by the client, or because the other leg has ended
		a.span.SetAttributes(attribute.String("error.type", "canceled"))
	case a.status >= http.StatusBadRequest:
		fail(a.span, strconv.Itoa(a.status), err)
	case err != nil:
		fail(a.span, "_OTHER", err)
	}
	a.span.End()
}

// fail marks a span as failed.
func fail(span trace.Span, kind string, err error) {
	span.SetAttributes(attribute.String("error.type", kind))
	text := ""
	if err != nil {
		text = clip(err.Error())
	}
	span.SetStatus(codes.Error, text)
}

// clip returns at most maxText bytes of a text, as a copy: a span that waits to be sent
// must not hold the body of a request. One byte that is not UTF-8 would have all spans
// refused that are sent with it.
func clip(text string) string {
	return strings.Clone(strings.ToValidUTF8(text[:min(len(text), maxText)], ""))
}

// Outcome is the result of a request.
type Outcome struct {
	At         time.Time
	Status     int    // HTTP status; 499: the client disconnected
	Model      string // as the request names it
	Worker     string // name of the worker that answered; kv.NoWorker: none
	Prefill    string // worker that computed the prompt, if another one
	Finish     string // finish reason of the answer; empty: unknown
	FirstToken time.Time

	UsageKnown                bool // by the worker; else the tokens are not
	InputTokens, OutputTokens int
	CachedKnown               bool
	CachedTokens              int
	PredictedTokens           int // predicted cached tokens
}

// End ends the request's trace.
func (q *Request) End(arrived time.Time, o Outcome) {
	if q == nil {
		return
	}
	if q.sampled {
		q.span.SetAttributes(o.attributes()...)
		if !o.FirstToken.IsZero() {
			q.span.AddEvent(firstToken, trace.WithTimestamp(o.FirstToken),
				trace.WithAttributes(attribute.Float64("gen_ai.server.time_to_first_token", o.FirstToken.Sub(arrived).Seconds())))
		}
		if o.Status >= http.StatusInternalServerError {
			fail(q.span, strconv.Itoa(o.Status), nil)
		}
	}
	q.span.End(trace.WithTimestamp(o.At))
}

// attributes are those of the server span for an outcome.
func (o *Outcome) attributes() []attribute.KeyValue {
	list := []attribute.KeyValue{attribute.Int("http.response.status_code", o.Status)}
	for _, text := range [...]struct{ name, value string }{
		{"gen_ai.request.model", o.Model}, {"kvrouter.worker", o.Worker}, {"kvrouter.worker.prefill", o.Prefill},
	} {
		if text.value != "" {
			list = append(list, attribute.String(text.name, clip(text.value)))
		}
	}
	if o.Finish != "" {
		list = append(list, attribute.StringSlice("gen_ai.response.finish_reasons", []string{clip(o.Finish)}))
	}
	if o.UsageKnown {
		list = append(list, attribute.Int("gen_ai.usage.input_tokens", o.InputTokens),
			attribute.Int("gen_ai.usage.output_tokens", o.OutputTokens),
			attribute.Int("kvrouter.predicted_tokens", o.PredictedTokens))
	}
	if o.CachedKnown {
		list = append(list, attribute.Int("gen_ai.usage.cache_read.input_tokens", o.CachedTokens))
	}
	return list
}
