package proxy

import (
	"context"
	"errors"
	"math"
	"net"
	"net/http"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
)

// ErrGateway means that a gateway's answer is none: without a valid status, or begun twice.
// That is no worker's fault.
var ErrGateway = errors.New("the gateway's answer is malformed")

// Headers by which llm-d's sidecars and data-parallel servers learn the decision.
const (
	HeaderPrefiller    = "X-Prefiller-Host-Port"
	HeaderDataParallel = "X-Data-Parallel-Host-Port"
)

// Headers of requests and answers that a gateway's clients know from llm-d.
const (
	// HeaderSession has a token of SessionTokens. A request with it goes to the same worker
	// again.
	HeaderSession = "X-Session-Token"
	// HeaderDropped has the reason why a request was refused.
	HeaderDropped = "X-Llm-D-Request-Dropped-Reason"
)

// Routed is a request with the workers to which a gateway sends it.
type Routed struct {
	Request *http.Request // as Target receives it
	Target  kv.Target
	Others  []kv.Target // fallbacks if Target is unreachable, best first
}

// Gateway is a gateway in front of the router. It requests a destination, sends the
// request there, and passes the answer through the router.
type Gateway struct {
	// Send passes a request to the gateway and returns the answer and the address
	// of the worker that served it; empty: unknown. It ends with the request's
	// context.
	Send func(Routed) (answer *http.Response, served string, err error)
	// Subset are the addresses, with or without a port, that the request may go to; nil:
	// all.
	Subset []string
	// Others is the number of fallbacks that the gateway accepts.
	Others int
	// Any means that requests of all routes are sent to a worker.
	Any bool
	// Model replaces the model in the body; empty: unchanged.
	Model string
	// Priority is that of the request's objective: the higher go first in the queue, if the
	// client is trusted, and one below 0 is refused while the workers are saturated.
	Priority int
	// Token is the session token that came with the request; empty: none did.
	Token string
	// Tokens signs and checks session tokens; nil: there are none.
	Tokens *SessionTokens

	client Client // set by Follow
}

// Client is the sender of a gateway's request.
type Client struct {
	Key     string // name of its API key
	Model   string // that it named
	Trusted bool   // its priority above 0 is honored
}

// Follow puts the gateway's data into a client's request, for a router of its model. It
// fails with router.ErrBusy where the request must be shed.
func (g *Gateway) Follow(request *router.Request, r *router.Router, client Client) error {
	if g == nil {
		return nil
	}
	g.client = client
	request.Alternatives = g.Others
	if g.Priority > 0 && client.Trusted {
		request.StrictPriority = uint32(min(g.Priority, math.MaxInt32))
	}
	home := ""
	if g.Token != "" && g.Tokens != nil {
		home = g.Tokens.open(g.Token, client.Model, client.Key)
	}
	if g.Subset != nil || home != "" {
		g.find(request, r.Targets(), home)
	}
	if g.Priority < 0 && !request.QueryOnly {
		if saturation, up := r.Admission.Saturation(); up && saturation >= 1 {
			return router.ErrBusy
		}
	}
	return nil
}

// ObjectivePriority returns the priority of the request's objective; 0: none.
func (g *Gateway) ObjectivePriority() int {
	if g == nil {
		return 0
	}
	return g.Priority
}

// Rename returns the body with the gateway's model, if it replaces the model.
func (g *Gateway) Rename(body *jsonbody.Body) *jsonbody.Body {
	if g == nil || g.Model == "" || body.Top == nil {
		return body
	}
	return body.With("model", Quoted(g.Model))
}

// sign sets the session token of an answer that the worker at address gives.
func (g *Gateway) sign(header http.Header, address string) {
	if g != nil && g.Tokens != nil {
		header.Set(HeaderSession, g.Tokens.sign(address, g.client.Model, g.client.Key))
	}
}

// find names in request the workers of Subset and at home, of those that are up.
func (g *Gateway) find(request *router.Request, targets []kv.Target, home string) {
	named := make(map[string]bool, len(g.Subset))
	for _, address := range g.Subset {
		named[address] = true
	}
	allowed := []uint64{}
	for i := range targets {
		address, id := targets[i].Address(), targets[i].Key.Worker
		host, _, _ := net.SplitHostPort(address)
		if named[address] || named[host] {
			allowed = append(allowed, id)
		}
		if address == home && request.Home == nil {
			request.Home = &id
		}
	}
	switch {
	case home == "":
	case request.Home != nil:
		g.Tokens.count(tokenValid)
	default:
		g.Tokens.count(tokenGone)
	}
	if g.Subset != nil {
		request.Allowed = allowed
	}
}

// Refusal returns the HTTP status of a request that no worker can serve now, and
// llm-d's name of the reason. Gateways expect 429 for load, and 503 without
// workers.
func (g *Gateway) Refusal(err error) (status int, reason string) {
	switch {
	case errors.Is(err, router.ErrQueueFull):
		return http.StatusTooManyRequests, "queue_full"
	case errors.Is(err, router.ErrQueueTimeout):
		return http.StatusTooManyRequests, "queue_timeout"
	case errors.Is(err, router.ErrBusy), errors.Is(err, router.ErrShed):
		return http.StatusTooManyRequests, "saturated"
	}
	return http.StatusServiceUnavailable, "no_endpoints"
}

// sendByGateway has the gateway send the request to its worker. If another worker than
// the decided one serves it, the booking moves there.
func (p *Proxy) sendByGateway(request *http.Request, u *sending, x *Exchange) (*http.Response, error) {
	target := x.Decision.Target
	request.Header.Del(HeaderPrefiller) // a client's would choose the address that the sidecar asks
	request.Header.Del(HeaderDataParallel)
	request.Header.Del(HeaderSource)
	if source := x.Decision.Source; source != nil {
		request.Header.Set(HeaderSource, source.Address())
	}
	if target.Ranks > 1 {
		request.Header.Set(HeaderDataParallel, target.Address())
	}
	if u.prefill != nil {
		request.Header.Set(HeaderPrefiller, u.prefill.Target.Address())
	}
	answer, served, err := u.Gateway.Send(Routed{Request: request, Target: target, Others: x.Decision.Alternatives})
	if err != nil {
		return nil, err
	}
	unpack(answer)
	if served != "" && served != target.Address() {
		p.served(u, x, served)
	}
	if u.prefill != nil && answer.StatusCode < http.StatusBadRequest {
		u.prefill.Booking.FirstToken()
		u.prefill.Booking.Finish(1)
	}
	return answer, nil
}

// served moves the booking to the worker of that address, which has taken the request
// in place of the decided one.
func (p *Proxy) served(u *sending, x *Exchange, address string) {
	for _, other := range x.Decision.Alternatives {
		if other.Address() != address || u.chooser == nil {
			continue
		}
		refused := x.Decision.Booking
		if decision, err := u.chooser.Rebook(x.Decision, other.Key); err == nil {
			refused.FailAs(health.Refused, "the gateway could not reach it")
			p.failed(refused.Worker().Worker)
			x.Decision, x.Worker = decision, p.names.Label(other.Key.Worker)
		}
		return
	}
}

// disaggregateByGateway leaves a disaggregated request to a gateway: it goes to the
// decode worker, whose sidecar has the prefill worker compute the prompt. Both bookings
// end here.
func (p *Proxy) disaggregateByGateway(ctx context.Context, w http.ResponseWriter, u *sending, x *Exchange, pair router.Pair) error {
	defer pair.End()
	x.Shared = &SharedRequest{Worker: p.names.Label(pair.Prefill.Target.Key.Worker), now: p.now}
	decode := *u
	decode.prefill, decode.decodes = &pair.Prefill, true
	l := legs{pair: pair}
	err := p.send(ctx, w, &decode, x, l.decision(), false)
	x.Usage.CachedKnown = false // the decode worker's part of the prompt came from the other
	p.observer.SharedEnded(pair.Prefill.Target.Kind, x.Shared.result(ctx, x.Status, err), 0)
	return err
}
