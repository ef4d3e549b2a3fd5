package proxy

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/tracing"
)

const (
	// abortTimeout bounds the abort of a request on a worker, and abortsAtOnce the
	// concurrent aborts; beyond those a worker sees the closed connection only.
	abortTimeout = 5 * time.Second
	abortsAtOnce = 64
	// tokenPace is the time that one token of an answer that is not streamed may take.
	tokenPace = time.Second
)

// PrefillFailure means that a request failed because its prefill leg did.
type PrefillFailure struct {
	Worker uint64
	Called string // name of the worker
	err    error
}

func (e *PrefillFailure) Error() string {
	err := e.err
	if failed := (*workerError)(nil); errors.As(err, &failed) {
		err = failed.err // without naming the worker twice
	}
	return fmt.Sprintf("prefill worker %s: %v", e.Called, err)
}

func (e *PrefillFailure) Unwrap() error { return e.err }

// prefillRefusal is a prefill worker's answer that names the fault of the
// request: the client gets it.
type prefillRefusal struct{ keptAnswer }

func (e *prefillRefusal) Error() string { return fmt.Sprintf("refused with status %d", e.status) }

// LegTimeout means that a leg of a disaggregated request timed out.
type LegTimeout struct {
	what, flag string
	over       time.Duration
	result     string // as metrics call it
}

func (e *LegTimeout) Error() string {
	return fmt.Sprintf("%s took longer than %s (%s)", e.what, e.over, e.flag)
}

// errDecodeEnded ends a prefill leg after the end of its decode leg.
var errDecodeEnded = errors.New("the decode leg has ended")

// share serves one request by two workers. Both bookings end here.
func (p *Proxy) share(ctx context.Context, w http.ResponseWriter, u *sending, x *Exchange, pair router.Pair, retry bool) error {
	defer pair.End()
	x.Worker = p.names.Label(pair.Prefill.Target.Key.Worker)
	l, err := p.legs(ctx, u, pair)
	x.Shared, l.trace = l.shared, x.Trace
	if err != nil {
		if ctx.Err() == nil {
			pair.Prefill.Booking.FailAs(health.Refused, err.Error())
		}
	} else if l.kind == kv.KindSGLang {
		err = p.concurrent(ctx, w, l, x, retry)
	} else {
		err = p.sequential(ctx, w, l, x, retry)
	}
	x.Reached = x.Reached || !unsent(err)
	var prefill *PrefillFailure
	if errors.As(err, &prefill) {
		x.Worker = l.shared.Worker
	}
	x.Usage.CachedKnown, x.Usage.CachedTokens = l.shared.reported()
	p.observer.SharedEnded(l.kind, l.shared.result(ctx, x.Status, err), l.shared.firstByte())
	return err
}

// legs are the two requests that a shared one becomes.
type legs struct {
	kind            kv.Kind
	pair            router.Pair
	prefill, decode sending
	late            *LegTimeout // of the decode leg, from the prefill leg's end; nil: it has no limit of its own
	rid             string      // by which SGLang servers abort them; empty: closing the connection does
	fetch           string      // with it a Mooncake decode worker gets the blocks that the prefill worker keeps
	shared          *SharedRequest
	trace           *tracing.Request // nil: it is not traced
}

// legs makes the requests of a pair, each attempt's with names of their own. The
// error is a *PrefillFailure.
func (p *Proxy) legs(ctx context.Context, u *sending, pair router.Pair) (legs, error) {
	target := pair.Prefill.Target
	l := legs{
		kind: target.Kind, pair: pair, prefill: *u, decode: *u, late: p.decodeLimit(target.Kind, u.Route, u.Body),
		shared: &SharedRequest{Worker: p.names.Label(target.Key.Worker), now: p.now},
	}
	name := u.RequestID + "-" + nonce()
	switch l.kind {
	case kv.KindNIXL:
		p.forPrefill(&l.prefill, &target, PrefillParams)
	case kv.KindMooncake:
		engine, err := p.engineID(ctx, target)
		if err != nil {
			return l, &PrefillFailure{target.Key.Worker, l.shared.Worker, p.unanswered(target.Key.Worker, err, health.Refused)}
		}
		keep, fetch := mooncakeParams(target.Bootstrap, engine, name)
		p.forPrefill(&l.prefill, &target, keep)
		l.fetch = fetch
	case kv.KindSGLang:
		fields := sglangFields(target.Bootstrap, newRoom(target))
		if own := u.Body.Get("rid"); own.Type == gjson.Null {
			l.rid = name
			fields = append(fields, jsonbody.Field{Key: "rid", Raw: Quoted(name)})
		} else { // several are none to abort by
			l.rid = own.Str
		}
		l.prefill.edits.add(fields...)
		if target.Ranks > 1 {
			fields = append(fields, jsonbody.Field{Key: "disagg_prefill_dp_rank", Raw: strconv.FormatUint(uint64(target.Key.Rank), 10)})
		}
		l.decode.edits.add(fields...)
		own := *u.Upstream
		own.Migration = nil // a part of a pair answers no request alone
		l.decode.Upstream = &own
	}
	l.decode.decodes = true
	return l, nil
}

// newRoom returns the number under which both SGLang servers find each other's
// part of a request: 63 bits, as their own. Of a prefill worker with several
// data-parallel ranks, t's is the one that SGLang itself gives the room to: the
// room modulo their number.
func newRoom(t kv.Target) uint64 {
	var b [8]byte
	rand.Read(b[:])
	room := binary.LittleEndian.Uint64(b[:]) >> 1
	if ranks := uint64(t.Ranks); ranks > 1 {
		room = min(room, math.MaxInt64-ranks)
		room += uint64(t.Key.Rank) - room%ranks
	}
	return room
}

// nonce returns 16 hexadecimal digits that no other request has.
func nonce() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// decision is the one in the answer's headers and metrics: the decode worker, and
// the prompt's cached part where it was computed.
func (l *legs) decision() router.Decision {
	d := l.pair.Decode
	d.OverlapTokens = l.pair.Prefill.OverlapTokens
	return d
}

// sequential sends the prompt to the prefill worker, and where its blocks are to
// the decode worker. With Mooncake both could go at once, but a transfer whose
// prefill leg ends early cannot be called off: for minutes (480 s) the decode
// worker keeps its blocks for it and the prefill worker one of its 20 senders.
func (p *Proxy) sequential(ctx context.Context, w http.ResponseWriter, l legs, x *Exchange, retry bool) (err error) {
	if l.kind == kv.KindMooncake {
		defer func() {
			if err != nil || x.Status >= http.StatusInternalServerError {
				p.forgetEngine(l.pair.Prefill.Target.Key)
			}
		}()
	}
	answer, err := p.prefill(ctx, l)
	if err != nil {
		return err
	}
	params := l.transfer(answer)
	if hasExperts(l.prefill.Route, answer) {
		p.experts.Store(true)
		params = ""
	}
	if l.decode.transfer = params; params == "" {
		l.shared.note(func(r *SharedRequest) { r.lost = true }) // the decode worker computes the prompt again
	}
	var watch sync.WaitGroup
	defer watch.Wait()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	p.await(l, end)
	defer l.shared.stop()
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { p.handedOver(l) }})
	if l.kind == kv.KindMooncake && params != "" {
		watch.Go(func() { p.watchPrefill(ctx, l, end) })
	}
	return p.send(ctx, w, &l.decode, x, l.decision(), retry)
}

// hasExperts reports whether an answer in tokens has the experts that computed them. A decode worker has only those of the
// answer, and a trainer needs those of the prompt too: so it must compute that itself.
func hasExperts(route string, answer []byte) bool {
	return route == tokensRoute && gjson.GetBytes(answer, "choices.0.routed_experts").Type == gjson.String
}

// WhyWhole is WhyWhole with what is known of the workers.
func (p *Proxy) WhyWhole(path string, body *jsonbody.Body, whole, multiple bool) (why string, kinds kv.Kinds) {
	if why, kinds = WhyWhole(path, body, whole, multiple); why == "" && path == tokensRoute && p.experts.Load() {
		why, kinds = wholeExperts, kv.KindsOf(kv.KindNone)
	}
	return why, kinds
}

// transfer returns the transfer parameters of the decode leg after the prefill
// worker's answer; empty: that keeps nothing for it.
func (l *legs) transfer(answer []byte) string {
	if l.kind != kv.KindMooncake {
		if params := gjson.GetBytes(answer, "kv_transfer_params"); params.IsObject() {
			return params.Raw
		}
	} else if cutShort(answer) {
		return l.fetch
	}
	return ""
}

// concurrent sends both legs at once: the workers wait for each other.
func (p *Proxy) concurrent(ctx context.Context, w http.ResponseWriter, l legs, x *Exchange, retry bool) error {
	prefillCtx, endPrefill := context.WithCancelCause(ctx)
	decodeCtx, endDecode := context.WithCancelCause(ctx)
	defer endDecode(nil)
	defer endPrefill(nil) // if relaying panics
	prefilled := make(chan error, 1)
	go func() { // ends with prefillCtx at the latest
		_, err := p.prefill(prefillCtx, l)
		if err == nil {
			p.await(l, endDecode)
		} else if !l.shared.hasStarted() {
			endDecode(err)
		}
		prefilled <- err
	}()
	err := p.send(decodeCtx, w, &l.decode, x, l.decision(), retry)
	cut := decodeCtx.Err() != nil
	if err != nil && !cut && !errors.Is(err, ErrAnswered) {
		hearPrefill(prefilled)
	}
	endPrefill(errDecodeEnded)
	prefillErr := <-prefilled
	l.shared.stop()
	if err == nil && x.Status < http.StatusBadRequest {
		return nil
	}
	if err != nil && prefillErr != nil && !errors.Is(prefillErr, errDecodeEnded) && !errors.Is(err, ErrAnswered) && ctx.Err() == nil {
		err = prefillErr // the decode leg failed for it
	}
	var failed *PrefillFailure
	if prefillErr != nil && !errors.As(prefillErr, &failed) {
		p.abort(l, l.pair.Prefill.Target)
	}
	var decodeFailed *workerError
	if cut || err != nil && (errors.As(err, &failed) || !errors.As(err, &decodeFailed)) {
		p.abort(l, l.pair.Decode.Target)
	}
	return err
}

// prefillGrace is the time for which a failed decode leg waits for the prefill leg's
// failure. A decode worker often reports first that its prefill worker is gone; without
// the reason, the next attempt may choose that prefill worker again.
const prefillGrace = 100 * time.Millisecond

// hearPrefill waits until the prefill leg has ended, prefillGrace at most. It leaves its
// error in ended, which has room for one.
func hearPrefill(ended chan error) {
	grace := time.NewTimer(prefillGrace)
	defer grace.Stop()
	select {
	case err := <-ended:
		ended <- err
	case <-grace.C:
	}
}

// prefill sends the prefill leg and returns its answer, which is kept from the
// client. Its booking ends here. An error is a *PrefillFailure, a
// *prefillRefusal, a *LegTimeout where the decode worker may have caused it, or
// why ctx ended.
func (p *Proxy) prefill(ctx context.Context, l legs) ([]byte, error) {
	booking := l.pair.Prefill.Booking
	defer booking.End()
	late := &LegTimeout{"the prefill leg", "--disagg-prefill-timeout", p.settings.DisaggPrefillTimeout, SharedPrefillTimeout}
	limited, cancel := context.WithTimeoutCause(ctx, late.over, late)
	defer cancel()
	limited, abort := context.WithCancelCause(limited)
	defer abort(nil)
	target := l.pair.Prefill.Target
	f := p.sent(booking, target, abort, &l.prefill, false)
	defer p.ended(f)
	began := p.now()
	l.prefill.attempt = l.trace.Attempt(kv.LegPrefill, &target, p.names.Name(target.Key.Worker), l.prefill.Method, l.prefill.Route)
	answer, usage, err := p.fetch(limited, &l.prefill, target)
	traced := err
	outrun := errors.Is(err, errOutrun)
	if outrun || errors.Is(err, errDecodeEnded) {
		traced = context.Canceled // which is no failure
	}
	l.prefill.attempt.End(time.Time{}, traced)
	var refusal *prefillRefusal
	switch {
	case err == nil:
		ended := p.now()
		booking.FirstToken()
		switch {
		case l.prefill.CachedTokensMislead:
		case usage.CachedKnown:
			booking.Cached(usage.CachedTokens, usage.CachedByTier)
		case usage.CachedUntold:
			usage.CachedKnown = booking.CachedUnreported()
		}
		booking.Finish(1)
		l.shared.note(func(r *SharedRequest) { r.took, r.computed, r.usage = ended.Sub(began), ended, usage })
		p.observer.Prefilled(l.kind, ended.Sub(began))
		return answer, nil
	case outrun, ctx.Err() != nil:
		return nil, cause(ctx, err)
	case errors.As(err, &refusal):
		if p.refusesTokens(&l.prefill, &target, refusal.status, bytes.NewReader(refusal.body)) != nil {
			return nil, errTokensRefused
		}
		return nil, refusal
	case l.kind == kv.KindSGLang && errors.Is(err, late): // it waits for the decode worker, too
		return nil, late
	}
	failed := p.prefillError(target.Key.Worker, err)
	p.blame(booking, nil, failed) // 401 and the like are refusals: nothing is suspected
	return nil, &PrefillFailure{target.Key.Worker, l.shared.Worker, failed}
}

// prefillError returns the error of a prefill worker that failed with err.
func (p *Proxy) prefillError(worker uint64, err error) *workerError {
	e := p.unanswered(worker, err, health.Refused)
	var status *statusError
	var late *LegTimeout
	switch {
	case errors.As(err, &status):
		e.kind, e.refusal = health.Status, status.refusal
	case errors.As(err, &late):
		e.kind = health.Timeout
	}
	return e
}

// statusError is the status of an answer that is no good.
type statusError struct {
	status  string
	refusal refusal
}

func (e *statusError) Error() string { return "answered " + e.status }

// fetch sends u to a worker and reads the whole answer. That of a stream is not
// returned.
func (p *Proxy) fetch(ctx context.Context, u *sending, t kv.Target) (answer []byte, usage Usage, err error) {
	request, err := p.request(ctx, u, t)
	if err != nil {
		return nil, usage, err
	}
	response, err := p.client.Do(request)
	if err != nil {
		return nil, usage, cause(ctx, err)
	}
	defer response.Body.Close()
	u.attempt.Answered(response.StatusCode)
	if response.StatusCode == http.StatusOK && strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream") {
		usage, err = fetchStream(u.Route, response.Body)
	} else if answer, err = io.ReadAll(io.LimitReader(response.Body, askLimit+1)); err == nil && len(answer) > askLimit {
		err = fmt.Errorf("its answer is longer than %d bytes", askLimit)
	} else {
		usage, _ = outcome(u.Route, answer)
	}
	switch status := response.StatusCode; {
	case err != nil:
		return nil, usage, cause(ctx, err)
	case status/100 == 2:
		return answer, usage, nil
	case status/100 == 4 && status != http.StatusRequestTimeout && status != http.StatusTooManyRequests:
		return nil, usage, &prefillRefusal{keptAnswer{status: status, header: response.Header, body: answer}}
	}
	return nil, usage, &statusError{response.Status, refusalOf(response.StatusCode, response.Header, u.Route, p.now())}
}

// fetchStream reads a stream of events to its end. One that begins with an
// error is an error.
func fetchStream(route string, body io.Reader) (Usage, error) {
	events := eventScanner{Generate: route == generateRoute}
	buffer := make([]byte, 4<<10)
	for {
		n, err := body.Read(buffer)
		if events.Scan(buffer[:n]); err == io.EOF {
			events.End()
		}
		if events.status >= http.StatusInternalServerError {
			return events.usage(), errors.New("its engine failed")
		}
		if err == io.EOF {
			return events.usage(), nil
		}
		if err != nil {
			return events.usage(), err
		}
	}
}

// relay answers the client with the prefill worker's refusal.
func (e *prefillRefusal) relay(w http.ResponseWriter, u *sending, x *Exchange) error {
	e.decision, e.worker = x.Decision, x.Shared.Worker
	return e.keptAnswer.relay(w, u, x)
}

// decodeLimit returns the time that a decode leg may take from its prefill leg's end: to
// its stream's first event, or to the end of an answer that comes whole, of which
// only the request limits its length; nil: there is no limit. An SGLang
// decode worker begins at once then. One of vLLM may let the request wait.
func (p *Proxy) decodeLimit(kind kv.Kind, route string, parsed *jsonbody.Body) *LegTimeout {
	late := &LegTimeout{"the decode worker's first event", "--disagg-handover-timeout", p.settings.DisaggHandoverTimeout, SharedHandoverTimeout}
	if parsed.Get("stream").Bool() {
		return late
	}
	most := TokenLimit(route, parsed)
	if most == 0 || kind != kv.KindSGLang {
		return nil
	}
	late.what, late.flag = "the decode worker's answer", fmt.Sprintf("%s, and %s for each token", late.flag, tokenPace)
	late.over += time.Duration(most) * tokenPace
	return late
}

// await ends the decode leg if it does not answer in time.
func (p *Proxy) await(l legs, end context.CancelCauseFunc) {
	if l.late == nil {
		return
	}
	l.shared.note(func(r *SharedRequest) {
		if !r.started && !r.over {
			r.timer = time.AfterFunc(l.late.over, func() {
				if !r.hasStarted() {
					end(l.late)
				}
			})
		}
	})
}

// handedOver is called when the decode request of a sequential pair has been
// sent.
func (p *Proxy) handedOver(l legs) {
	l.shared.note(func(r *SharedRequest) {
		r.handover = r.now().Sub(r.computed)
		p.observer.HandedOver(l.kind, r.handover)
	})
}

// abort aborts a request on a worker that supports it, in the background.
func (p *Proxy) abort(l legs, t kv.Target) {
	if l.rid == "" {
		return
	}
	select {
	case p.abortSlots <- struct{}{}:
	default:
		return
	}
	// Of no length, the key is not sent and lets the client try again on another
	// connection where the worker has closed the one that was kept.
	header := http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {}}
	if key := l.decode.Header.Get("Authorization"); key != "" {
		header.Set("Authorization", key)
	}
	p.aborts.Go(func() {
		defer func() { <-p.abortSlots }()
		ctx, cancel := context.WithTimeout(context.Background(), abortTimeout)
		defer cancel()
		if _, _, err := p.Ask(ctx, t, http.MethodPost, "/abort_request", header, fmt.Appendf(nil, `{"rid":%s}`, Quoted(l.rid))); err != nil {
			p.log.Debug("cannot abort a request on a worker", "error", err)
		}
	})
}
