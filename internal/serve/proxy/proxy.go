// Package proxy sends requests to workers and relays their answers. It forwards the
// client's bytes unchanged, relays streams chunk by chunk, and ends the booking of
// every request. A request is aggregated (one worker) or disaggregated (a prefill
// and a decode worker). A stream whose worker fails is continued on another one
// (Migration).
package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/quota"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/control"
	"kvrouter/internal/serve/tracing"
)

const (
	// bufferedAnswer bounds the part of an answer that is held back to make a
	// second attempt possible, and the part of a stream's event that is.
	bufferedAnswer = 8 << 20
	// ClientGone is nginx's status for a client that closed the connection.
	ClientGone = 499
)

// Upstream is a client's request for workers. They get its body unchanged, except for the edits
// that this package adds.
type Upstream struct {
	Method    string
	Path      string // with query
	Header    http.Header
	Body      *jsonbody.Body // nil: none
	AskUsage  bool           // request the usage of a stream, and remove it from the answer
	Silent    bool           // the client gets no headers about the decision
	EndMarked bool           // a complete stream ends with a final event
	// CachedTokensMislead means that the answer's cached tokens do not describe the cache:
	// the request has several prompts, or requests the logprobs of its own tokens,
	// for which an engine computes it again.
	CachedTokensMislead bool
	SeveralAnswers      bool // to one prompt; SGLang counts its cached tokens for each
	Route               string
	RequestID           string
	Client              string // whose share of the retry budget it uses; empty: of those that are not known
	MaxRetries          int    // further workers to try while nothing was answered
	// Paired means that the request may be disaggregated, unless Aggregated has a reason
	// against it.
	Paired     bool
	Aggregated string
	Gateway    *Gateway   // sends the request to its worker; nil: the proxy does
	Migration  *Migration // of a stream that may be continued on another worker; nil: it ends with its worker
	// Below sets the headers of a request to a router below this one; nil: they are those to
	// workers.
	Below func(http.Header)
	// Stored is called with the id of an answer that that worker may keep, before the client gets
	// it; nil: nothing is done.
	Stored func(worker uint64, id string)
	// Aborted reports whether the client has had the engines abort the request.
	Aborted func() bool
	// PromptTokens go to the workers that take them; nil: every worker gets the text.
	PromptTokens *PromptTokens
}

// sending is a request on its way to a worker.
type sending struct {
	*Upstream
	edits    edits
	chooser  Chooser
	tries    *tries           // those of a request that may begin elsewhere, too; nil: it may not
	lane     int32            // of them
	prefill  *router.Decision // of a gateway's request that two workers serve; nil: one serves it
	decodes  bool             // it is a decode leg: a part of its prompt comes from the prefill worker
	transfer string           // its transfer parameters, JSON; empty: none
	asTokens bool             // its prompt is in the body as tokens
	attempt  *tracing.Attempt // whose trace the worker continues; nil: the client's, if any
}

// request is u as a request to a worker.
func (p *Proxy) request(ctx context.Context, u *sending, t kv.Target) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, u.Method, t.URL+u.Path, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", web.ErrUnsendable, err)
	}
	request.Header = p.header(u.Header, t)
	if t.Kind == kv.KindRouter && u.Below != nil {
		u.Below(request.Header)
	}
	u.attempt.Inject(request.Header)
	if t.Ranks > 1 {
		rank := strconv.FormatUint(uint64(t.ServerRank()), 10)
		request.Header.Set(web.HeaderRank, rank)
		if u.Route == generateRoute { // SGLang reads no header there
			u.edits.add(jsonbody.Field{Key: rankKey, Raw: rank})
		}
	}
	if head, rest := u.edits.write(); len(head)+len(rest) > 0 {
		request.ContentLength = int64(len(head) + len(rest))
		request.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(joined(head, rest)), nil }
		request.Body, err = request.GetBody()
	}
	return request, err
}

// stores reports an answer that its worker may keep.
func (u *sending) stores(x *Exchange, id string) {
	if u.Stored != nil && id != "" {
		u.Stored(x.Decision.Target.Key.Worker, id)
	}
}

// header returns a client's headers as they go to a worker, signed by this router.
// With a key for the worker they carry that and not the client's.
func (p *Proxy) header(given http.Header, t kv.Target) http.Header {
	header := given.Clone()
	if header == nil {
		header = http.Header{}
	}
	if t.Bearer != "" {
		web.DropKeys(header)
		header.Set("Authorization", "Bearer "+string(t.Bearer))
	}
	header.Set("Accept-Encoding", "identity") // the answer must be readable here
	p.hop.Sign(header)
	return header
}

// ClientHeader returns a client's headers as they go to a worker, under that
// request id. Only a pinned request, which names its worker, may also name its
// data-parallel rank. keyed means that the client's key was for the router.
func ClientHeader(given http.Header, id string, pinned, keyed bool) http.Header {
	header := given.Clone()
	web.DropHopByHop(header)
	for name := range header {
		if strings.HasPrefix(name, web.HeaderOwn) { // for this router, which sets those for one below it
			delete(header, name)
		}
	}
	if !pinned {
		header.Del(web.HeaderRank)
	}
	header.Del("Expect")
	header.Del("Content-Length")
	header.Del("Content-Encoding") // the body was decoded
	if keyed {
		web.DropKeys(header)
	}
	header.Set(web.HeaderRequest, id)
	return header
}

// Reasons for which a retry is denied.
const (
	DeniedTotal  = string(health.DeniedTotal)
	DeniedClient = string(health.DeniedClient)
)

// Observer counts events of in-flight requests. Its methods are safe for concurrent
// use.
type Observer interface {
	// Retried counts a retry of a request that failed on worker before its first
	// byte.
	Retried(worker uint64)
	// RetryDenied counts a request that is not sent again because of the retry
	// budget: DeniedTotal or DeniedClient.
	RetryDenied(why string)
	// Hedged counts an attempt beside one that waits for its worker, by result.
	Hedged(result string)
	// Migrated counts a stream whose worker failed during the answer, by result.
	Migrated(result string)
	// InterToken records the gap between two chunks of tokens.
	InterToken(worker string, gap time.Duration, tokens int)
	// StayedWhole counts an aggregated request by reason.
	StayedWhole(why string)
	// Prefilled records the duration of a prefill leg.
	Prefilled(kind kv.Kind, took time.Duration)
	// HandedOver records the time from a prefill leg's end to the decode request
	// having been sent.
	HandedOver(kind kv.Kind, took time.Duration)
	// SharedEnded counts an attempt of a disaggregated request by its result.
	// firstByte is the time from its prefill leg's end to the first byte of the
	// answer; 0: there is none.
	SharedEnded(kind kv.Kind, result string, firstByte time.Duration)
}

// Chooser chooses the workers of one request.
type Chooser interface {
	// Route books the request on a worker that is not among exclude.
	Route(exclude []uint64) (router.Decision, error)
	// Continue is Route for the rest of an answer, of which the client has those tokens.
	Continue(exclude []uint64, answered []uint32) (router.Decision, error)
	// RoutePair is Route for a request that may be disaggregated; why is the reason
	// if it must be aggregated.
	RoutePair(exclude []uint64, why string) (router.Pair, error)
	// Beside is Route, or RoutePair, for an attempt beside those that run: it does not wait, and
	// fails where only workers in doubt are left. It may run beside other methods.
	Beside(ctx context.Context, exclude []uint64) (router.Pair, error)
	// Answers notes that the answer comes from the workers that Beside has chosen.
	Answers(router.Pair)
	// Rebook moves a decision's booking to the worker that the gateway has chosen.
	Rebook(decision router.Decision, to kv.WorkerKey) (router.Decision, error)
	// IsUp reports whether that incarnation of a worker is up.
	IsUp(worker kv.Target) bool
}

// Deps are the parts that a Proxy uses.
type Deps struct {
	Observer  Observer
	Failed    func(worker uint64) // called with each worker that does not answer a request
	Names     *kv.Names           // of workers; nil: their ids
	Hop       web.Hop             // added to the Via header of requests to workers
	Transport http.RoundTripper   // to workers; nil: without TLS settings
	// Control is called before a call that changes a worker's engine, and what it returns after it; nil: not called.
	Control func(worker uint64, change kv.EngineChange) (ended func(ok bool))
	Answers *quota.Pool // memory of answers that are held back, bytes; nil: the default of web.BodySettings
	Log     *slog.Logger
}

// Proxy sends requests to workers and relays their answers. Its methods are safe for
// concurrent use.
type Proxy struct {
	settings  Settings
	observer  Observer
	failed    func(worker uint64)
	control   func(worker uint64, change kv.EngineChange) (ended func(ok bool))
	names     *kv.Names
	hop       web.Hop
	budget    *health.Budget // of retries
	client    *http.Client
	answers   *quota.Pool // memory of answers, bytes
	log       *slog.Logger
	now       func() time.Time
	streams   sync.Pool // of *streamBuffer
	inflights inflights
	engines   mooncakeEngines
	refusers  refusers // of requests for the tokens of answers

	tokenRefusers refusers // of the tokens of prompts
	packers       refusers // whose answers cannot be read

	experts      atomic.Bool   // workers return experts with answers in tokens
	rewritten    atomic.Uint64 // events that had to be parsed
	controlCalls *prometheus.CounterVec

	aborts     sync.WaitGroup
	abortSlots chan struct{} // has a token for each abort that runs
}

// New returns a proxy. Close must follow.
func New(settings Settings, deps Deps) *Proxy {
	if deps.Transport == nil {
		deps.Transport = web.NewTransport(nil)
	}
	if deps.Answers == nil {
		deps.Answers = web.BodySettings{}.Answers()
	}
	client := web.NewClient(deps.Transport)
	client.Transport = unpacking{client.Transport}
	return &Proxy{
		answers: deps.Answers, settings: settings, observer: deps.Observer, failed: deps.Failed, control: deps.Control, names: deps.Names, hop: deps.Hop, log: deps.Log,
		budget: health.NewBudget(settings.RetryBudget), client: client, now: time.Now,
		streams:    sync.Pool{New: func() any { return new(streamBuffer) }},
		inflights:  inflights{workers: map[uint64]*workerInflight{}},
		engines:    mooncakeEngines{ids: map[kv.WorkerKey]mooncakeEngine{}},
		abortSlots: make(chan struct{}, abortsAtOnce), controlCalls: newControlCalls(),
	}
}

// Close waits for running aborts, at most 5 s after the last request, and closes
// idle connections.
func (p *Proxy) Close() {
	p.aborts.Wait()
	p.client.CloseIdleConnections()
}

// ErrAnswered marks a failure after the first byte: the client has been notified as
// far as the protocol allows, and nothing more can be written.
var ErrAnswered = errors.New("answer was cut short")

// ErrSilent means that a worker sent no byte within the timeout.
var ErrSilent = errors.New("no data received within --request-timeout")

// Forward sends u to the workers that chooser returns and relays the answer to w.
// If a worker fails before the first byte of its answer, or refuses a request that
// another may accept, another one is chosen. If none succeeds, the client gets the
// best answer received. Every booking ends here with the result of the request: a
// complete answer, a failure of the worker, or neither. An error other than
// ErrAnswered means that nothing was written to w.
func (p *Proxy) Forward(ctx context.Context, w http.ResponseWriter, request Upstream, x *Exchange, chooser Chooser) error {
	if p.settings.MigrationLimit == 0 {
		request.Migration = nil
	}
	u := &sending{Upstream: &request, chooser: chooser, edits: editsOf(&request)}
	t := p.begin(ctx, w, u, x)
	defer t.over()
	why := u.Aggregated
	for {
		began := x.Trace.Now()
		pair, err := u.route(t.exclude, why)
		x.Trace.Decided(began, err, &pair.Prefill, &pair.Decode)
		if err != nil {
			return t.giveUp(ctx, w, err)
		}
		if why == WholePrefilled && pair.Whole == "" {
			t.Retries++ // no worker serves it alone: it is another pair's
		}
		x.Receipts = slices.Concat(x.Receipts, pair.Prefill.Receipts, pair.Decode.Receipts)
		if pair.Whole != "" && u.Paired {
			p.observer.StayedWhole(pair.Whole)
		}
		err = t.join(ctx, u, p.serve(ctx, w, u, x, pair, t.retry()))
		if err == nil {
			return nil
		}
		if u.Migration.open() {
			return p.migrate(ctx, w, u, x, t, err)
		}
		if resent(err) {
			continue
		}
		var refusal *prefillRefusal
		if errors.As(err, &refusal) && ctx.Err() == nil {
			return refusal.relay(w, u, x)
		}
		// Falling back to one worker is beside the retries: it costs no decode worker anything.
		var prefill *PrefillFailure
		beside := errors.As(err, &prefill) && !p.settings.EnforceDisagg && why == ""
		if !t.again(ctx, err, beside) {
			return t.end(ctx, w, err)
		}
		if beside {
			why = WholePrefilled
		}
	}
}

// route chooses the workers of the request.
func (u *sending) route(exclude []uint64, why string) (router.Pair, error) {
	if u.Paired {
		return u.chooser.RoutePair(exclude, why)
	}
	decision, err := u.chooser.Route(exclude)
	return router.Pair{Decode: decision, Whole: router.WholeNoPair}, err
}

// serve sends u to the workers that were chosen. The bookings end here.
func (p *Proxy) serve(ctx context.Context, w http.ResponseWriter, u *sending, x *Exchange, pair router.Pair, retry bool) error {
	switch x.Shared = nil; {
	case pair.Whole != "":
		return p.send(ctx, w, u, x, pair.Decode, retry)
	case u.Gateway != nil:
		return p.disaggregateByGateway(ctx, w, u, x, pair)
	}
	return p.share(ctx, w, u, x, pair, retry)
}

// takeRetry reports whether the budget allows a client a retry, and counts it.
func (p *Proxy) takeRetry(client string) bool {
	denied := p.budget.Take(client, p.now())
	if denied != "" {
		p.observer.RetryDenied(string(denied))
	}
	return denied == ""
}

// send is attempt with the booking of the decision, which ends here.
func (p *Proxy) send(ctx context.Context, w http.ResponseWriter, u *sending, x *Exchange, decision router.Decision, retry bool) error {
	x.Decision, x.Worker, x.Ending, x.refusal, x.Below = decision, p.names.Label(decision.Target.Key.Worker), policy.Abandoned, refusal{}, Below{}
	defer func() { x.Decision.Booking.End() }() // if relaying panics
	attempt := *u
	u = &attempt
	p.edit(u, x)
	u.attempt = x.Trace.Attempt(x.leg(), &decision.Target, p.names.Name(decision.Target.Key.Worker), u.Method, u.Route)
	err := p.attempt(ctx, w, u, x, retry)
	outrun := errors.Is(err, errOutrun)
	if outrun {
		u.attempt.End(x.FirstChunk, context.Canceled) // which is no failure
	} else {
		u.attempt.End(x.FirstChunk, err)
	}
	var failed *workerError
	switch {
	case err == nil:
		p.finished(u, x)
	case !outrun && errors.As(err, &failed) && ctx.Err() == nil && !errors.Is(err, ErrGateway):
		p.blame(x.Decision.Booking, x, failed)
	default:
		x.Decision.Booking.End()
	}
	return err
}

// attempt sends u to the decided worker and relays the answer. A *workerError
// without ErrAnswered means that nothing was written and another worker may be
// tried. With retry, an answer that another worker may better is one.
func (p *Proxy) attempt(ctx context.Context, w http.ResponseWriter, u *sending, x *Exchange, retry bool) error {
	target := x.Decision.Target
	worker := target.Key.Worker
	ctx, cancel := context.WithCancelCause(ctx) // ends the engine's work when we stop reading
	defer cancel(nil)
	f := p.sent(x.Decision.Booking, target, cancel, u, u.Gateway != nil && len(x.Decision.Alternatives) > 0)
	defer func() { p.ended(f) }()
	heard := func() { f.heard.Store(p.now().UnixNano()) }
	if p.settings.RequestTimeout > 0 {
		var timer atomic.Pointer[time.Timer]
		booking := x.Decision.Booking
		reset := func() { timer.Load().Reset(p.settings.RequestTimeout) }
		timer.Store(time.AfterFunc(p.settings.RequestTimeout, func() {
			if booking.WorkerRests() && timer.Load() != nil {
				reset()
				return
			}
			cancel(ErrSilent)
		}))
		defer func() { timer.Load().Stop() }()
		heard = func() {
			f.heard.Store(p.now().UnixNano())
			reset()
		}
	}
	// It may be the request that ends connections: sending it again is a retry for the budget.
	request, err := p.request(web.WithResends(ctx, func() bool { return p.takeRetry(u.Client) }), u, target)
	if err != nil {
		return err
	}
	do := p.client.Do
	if u.Gateway != nil {
		do = func(request *http.Request) (*http.Response, error) { return p.sendByGateway(request, u, x) }
	}
	response, err := do(request)
	x.Reached = x.Reached || !unsent(err)
	if err != nil {
		if OutOfDescriptors(err) {
			return err
		}
		return p.unanswered(worker, cause(ctx, err), health.Refused)
	}
	defer response.Body.Close()
	if u.Gateway != nil {
		if served := x.Decision.Target; served.Key != target.Key { // it has chosen another one
			worker = served.Key.Worker
			p.ended(f)
			f = p.sent(x.Decision.Booking, served, cancel, u, false)
		}
		defer context.AfterFunc(ctx, func() { _ = response.Body.Close() })() // which does not end with ctx by itself
	}
	if target.Kind == kv.KindRouter {
		x.readBelow(response.Header)
	}
	u.attempt.Answered(response.StatusCode)
	if err := checkStatus(response); err != nil {
		return p.unanswered(worker, err, health.Broken)
	}
	answer := &upstreamAnswer{Response: response, ctx: ctx, heard: heard, sent: f}
	stream := strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream")
	x.refusal = refusalOf(response.StatusCode, response.Header, u.Route, p.now())
	if (retry || x.tried) && x.refusal != (refusal{}) {
		kept, err := keep(answer, x)
		if err != nil {
			return p.unanswered(worker, err, health.Broken)
		}
		if kept != nil {
			return &workerError{worker: worker, called: x.Worker, err: fmt.Errorf("answered %s", response.Status), kind: health.Status, refusal: x.refusal, answer: kept}
		}
	}
	if err := p.refusesTokens(u, &x.Decision.Target, response.StatusCode, answer); err == errTokensRefused {
		return err
	} else if err != nil {
		return p.unanswered(worker, err, health.Broken)
	}
	if u.Migration.mayBeRefused(response.StatusCode) {
		if refused, err := refusesTokenIDs(answer); err != nil {
			return p.unanswered(worker, err, health.Broken)
		} else if refused {
			p.refusers.add(&x.Decision.Target)
			u.Migration.refused()
			return errTokenIDsRefused
		}
	}
	packed := encoding(response.Header) != ""
	if packed && u.asked() && u.maySendAgain(x) {
		p.packers.add(&x.Decision.Target)
		return errPacked
	}
	if u.Migration.open() && (packed || !(stream && response.StatusCode == http.StatusOK)) {
		return fmt.Errorf("worker %s answered %s to the rest of an answer", x.Worker, response.Status)
	}
	switch {
	case stream && !packed:
		return p.relayStream(w, answer, u, x, retry)
	case u.Gateway != nil || !answer.madeBefore(u):
		return p.relayPieces(w, answer, u, x)
	}
	return p.relayWhole(w, answer, u, x, retry)
}

// OutOfDescriptors reports whether a request was not sent because this process
// lacks file descriptors, which is not a failure of the worker.
func OutOfDescriptors(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// unsent reports whether a request failed with err before a worker could have got it.
func unsent(err error) bool { return web.Undialed(err) || errors.Is(err, web.ErrUnsendable) }

// askTimeout bounds a short question to a worker, and askLimit its answer (bytes).
const (
	askTimeout = 30 * time.Second
	askLimit   = 16 << 20
)

// Ask sends a short request to a worker and returns the status and the complete
// answer.
func (p *Proxy) Ask(ctx context.Context, t kv.Target, method, path string, header http.Header, body []byte) (status int, answer []byte, err error) {
	return p.ask(ctx, t, Question{Method: method, Path: path, Header: header, Body: body})
}

// ask puts a question to one worker.
func (p *Proxy) ask(ctx context.Context, t kv.Target, q Question) (status int, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(q.Patience, askTimeout))
	defer cancel()
	if change := q.changes(); change.Any() && p.control != nil {
		ended := p.control(t.Key.Worker, change)
		defer func() { ended(err == nil && control.Succeeded(status, answer)) }()
	}
	request, err := http.NewRequestWithContext(ctx, q.Method, t.URL+q.Path, bytes.NewReader(q.Body))
	if err != nil {
		return 0, nil, err
	}
	request.Header = p.header(q.Header, t)
	response, err := p.client.Do(request)
	if err != nil {
		return 0, nil, p.unanswered(t.Key.Worker, err, health.Refused)
	}
	defer response.Body.Close()
	if err = checkStatus(response); err == nil {
		answer, err = io.ReadAll(io.LimitReader(response.Body, cmp.Or(q.Limit, askLimit)))
	}
	if err != nil {
		return 0, nil, p.unanswered(t.Key.Worker, err, health.Refused)
	}
	return response.StatusCode, answer, nil
}
