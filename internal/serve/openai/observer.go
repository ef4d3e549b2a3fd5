package openai

import (
	"net/http"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/tracing"
)

// Observer is notified of inference requests. Calls for one request are sequential,
// calls for several are concurrent.
type Observer interface {
	// Began is called when a request has arrived.
	Began(r *http.Request, x *proxy.Exchange)
	// Accepted is called before the request of x.Request is routed, except for dry
	// runs. body must not be retained.
	Accepted(x *proxy.Exchange, body *jsonbody.Body)
	// Decided is called with each decision. With pair.Whole it has no prefill
	// worker.
	Decided(x *proxy.Exchange, pair *router.Pair)
	// Finished is called when the request has ended.
	Finished(x *proxy.Exchange, now time.Time)
}

// observers are called one after the other.
type observers []Observer

func (all observers) began(r *http.Request, x *proxy.Exchange) {
	for _, o := range all {
		o.Began(r, x)
	}
}

func (all observers) accepted(x *proxy.Exchange, body *jsonbody.Body) {
	for _, o := range all {
		o.Accepted(x, body)
	}
}

func (all observers) decided(x *proxy.Exchange, pair *router.Pair) {
	for _, o := range all {
		o.Decided(x, pair)
	}
}

func (all observers) finished(x *proxy.Exchange) {
	now := time.Now()
	for _, o := range all {
		o.Finished(x, now)
	}
}

// Traced returns an Observer that begins and ends the trace of each request; a nil
// tracer traces nothing. Other spans are added through proxy.Exchange.
func Traced(tracer *tracing.Tracer) Observer { return traced{tracer} }

type traced struct{ tracer *tracing.Tracer }

func (t traced) Began(r *http.Request, x *proxy.Exchange) {
	x.Trace = t.tracer.Begin(r, x.Route, x.Arrived, x.Trusted)
}

func (traced) Accepted(*proxy.Exchange, *jsonbody.Body) {}

func (traced) Decided(*proxy.Exchange, *router.Pair) {}

func (traced) Finished(x *proxy.Exchange, now time.Time) { x.EndTrace(now) }
