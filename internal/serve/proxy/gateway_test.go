package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// gatewayRouter returns a router over workers at 10.0.0.0:8000 and so on.
func gatewayRouter(t *testing.T, workers int) *router.Router {
	t.Helper()
	rt, _ := routertest.NewClocked(t, 0)
	for i := range workers {
		rt.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: "http://10.0.0." + string(rune('0'+i)) + ":8000"})
	}
	return rt
}

func TestARequestFollowsItsGateway(t *testing.T) {
	rt := gatewayRouter(t, 4)
	home := uint64(3)
	tokens := newSessionTokens(t, "")
	client := Client{Key: "team-a", Model: "m", Trusted: true}
	token := func(address string) *Gateway {
		return &Gateway{Tokens: tokens, Token: tokens.sign(address, "m", "team-a")}
	}
	for name, test := range map[string]struct {
		gateway *Gateway
		want    router.Request
	}{
		"no gateway":                         {nil, router.Request{}},
		"nothing said":                       {&Gateway{}, router.Request{}},
		"others":                             {&Gateway{Others: 3}, router.Request{Alternatives: 3}},
		"a subset by address and by host":    {&Gateway{Subset: []string{"10.0.0.1:8000", "10.0.0.2", "10.0.0.3:9000"}}, router.Request{Allowed: []uint64{1, 2}}},
		"a subset of others' workers":        {&Gateway{Subset: []string{"10.1.0.1:8000"}}, router.Request{Allowed: []uint64{}}},
		"a session's worker":                 {token("10.0.0.3:8000"), router.Request{Home: &home}},
		"a session whose worker is gone":     {token("10.0.0.9:8000"), router.Request{}},
		"a session of another key":           {&Gateway{Tokens: tokens, Token: tokens.sign("10.0.0.3:8000", "m", "team-b")}, router.Request{}},
		"a session without a signature":      {&Gateway{Tokens: tokens, Token: "MTAuMC4wLjM6ODAwMA=="}, router.Request{}},
		"an objective of high priority":      {&Gateway{Priority: 7}, router.Request{StrictPriority: 7}},
		"an objective that may be refused":   {&Gateway{Priority: -1}, router.Request{}},
		"an objective of a priority too far": {&Gateway{Priority: 1 << 40}, router.Request{StrictPriority: 1<<31 - 1}},
	} {
		t.Run(name, func(t *testing.T) {
			var got router.Request
			if err := test.gateway.Follow(&got, rt, client); err != nil {
				t.Fatal(err)
			}
			if got.Alternatives != test.want.Alternatives || got.StrictPriority != test.want.StrictPriority || !slices.Equal(got.Allowed, test.want.Allowed) || (got.Allowed == nil) != (test.want.Allowed == nil) {
				t.Errorf("%+v, want %+v", got, test.want)
			}
			if (got.Home == nil) != (test.want.Home == nil) || got.Home != nil && *got.Home != *test.want.Home {
				t.Errorf("home %v, want %v", got.Home, test.want.Home)
			}
		})
	}
	if got := results(tokens); got != [tokenResults]uint64{tokenValid: 1, tokenGone: 1, tokenInvalid: 2} {
		t.Errorf("counted %v", got)
	}
}

// TestAnUntrustedClientGetsNoPriority: its objective may lower it, not raise it.
func TestAnUntrustedClientGetsNoPriority(t *testing.T) {
	rt := gatewayRouter(t, 1)
	var request router.Request
	if err := (&Gateway{Priority: 7}).Follow(&request, rt, Client{}); err != nil || request.StrictPriority != 0 {
		t.Errorf("priority %d, %v", request.StrictPriority, err)
	}
	saturate(t, rt)
	if err := (&Gateway{Priority: -1}).Follow(&request, rt, Client{}); !errors.Is(err, router.ErrBusy) {
		t.Errorf("below 0: %v", err)
	}
}

// saturate fills a router's worker.
func saturate(t *testing.T, rt *router.Router) {
	t.Helper()
	for i := range 200 {
		b, err := rt.Book(router.Request{Tokens: testkit.Tokens(uint32(i)*100_000, 10_000)}, kv.WorkerKey{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.End)
	}
	if saturation, _ := rt.Admission.Saturation(); saturation < 1 {
		t.Fatalf("the worker is not saturated: %v", saturation)
	}
}

// TestWhatMayBeRefusedIsWhileWorkersAreSaturated pins the priorities below 0.
func TestWhatMayBeRefusedIsWhileWorkersAreSaturated(t *testing.T) {
	rt := gatewayRouter(t, 1)
	saturate(t, rt)
	var request router.Request
	if err := (&Gateway{Priority: -1}).Follow(&request, rt, Client{}); !errors.Is(err, router.ErrBusy) {
		t.Errorf("below 0: %v", err)
	}
	if err := (&Gateway{}).Follow(&request, rt, Client{}); err != nil {
		t.Errorf("0: %v", err)
	}
}

func TestRefusalsInAGatewaysWords(t *testing.T) {
	for _, test := range []struct {
		err    error
		status int
		reason string
	}{
		{router.ErrBusy, 429, "saturated"}, {router.ErrQueueFull, 429, "queue_full"}, {router.ErrQueueTimeout, 429, "queue_timeout"},
		{router.ErrNoWorker, 503, "no_endpoints"}, {router.ErrNoPair, 503, "no_endpoints"},
	} {
		if status, reason := (&Gateway{}).Refusal(test.err); status != test.status || reason != test.reason {
			t.Errorf("%v: %d %s", test.err, status, reason)
		}
	}
}

func TestAGatewayRenamesTheModel(t *testing.T) {
	body, ok := jsonbody.Parse([]byte(`{"a":1,"model":"m","b":2}`))
	if !ok {
		t.Fatal("not parsed")
	}
	for _, test := range []struct {
		gateway *Gateway
		want    string
	}{{nil, "m"}, {&Gateway{}, "m"}, {&Gateway{Model: `m"2`}, `m"2`}} {
		renamed := test.gateway.Rename(body)
		if got := renamed.Get("model").String(); got != test.want || renamed.Get("a").Int() != 1 || renamed.Get("b").Int() != 2 {
			t.Errorf("%q in %s, want %q", got, renamed.Raw, test.want)
		}
	}
}

// sendByGateway sends a request through a gateway that answers as send does.
func sendByGateway(t *testing.T, rt *router.Router, send func(Routed) (*http.Response, string, error)) (*httptest.ResponseRecorder, *Exchange, error) {
	t.Helper()
	return sendByGatewayAs(t, rt, func(*Upstream) {}, send)
}

// sendByGatewayAs is sendByGateway with a change to what is sent.
func sendByGatewayAs(t *testing.T, rt *router.Router, change func(*Upstream), send func(Routed) (*http.Response, string, error)) (*httptest.ResponseRecorder, *Exchange, error) {
	t.Helper()
	p := newTestProxy(t, 0)
	request := router.Request{Tokens: testkit.Tokens(1, 256), Alternatives: 3}
	u := Upstream{
		Method: http.MethodPost, Path: testkit.ChatPath, Body: parsed(t, `{}`), Route: testkit.ChatPath, EndMarked: true,
		Header:  http.Header{HeaderPrefiller: {"169.254.169.254:80"}, HeaderDataParallel: {"169.254.169.254:80"}, HeaderSource: {"169.254.169.254:80"}},
		Gateway: &Gateway{Send: send},
	}
	change(&u)
	w, x := httptest.NewRecorder(), &Exchange{}
	err := p.Forward(t.Context(), w, u, x, rebooks{
		chooseOne: func(exclude []uint64) (router.Decision, error) {
			request.Exclude = exclude
			return rt.Route(t.Context(), request)
		},
		rebook: func(d router.Decision, to kv.WorkerKey) (router.Decision, error) { return rt.Rebook(request, d, to) },
	})
	return w, x, err
}

// answered is a worker's answer.
func answered(status int, kind, body string) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {kind}}, Body: io.NopCloser(strings.NewReader(body))}
}

func TestAGatewaysAnswerEndsItsBooking(t *testing.T) {
	const whole = `{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":256,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":64}}}`
	for name, test := range map[string]struct {
		answer *http.Response
		err    error
		status int
		cached int
	}{
		"whole":               {answered(200, "application/json", whole), nil, 200, 64},
		"a stream":            {answered(200, "text/event-stream", "data: "+whole+"\n\ndata: [DONE]\n\n"), nil, 200, 64},
		"the worker's error":  {answered(400, "application/json", `{"error":{}}`), nil, 400, 0},
		"the gateway's error": {answered(503, "text/plain", "upstream connect error"), nil, 503, 0},
		"none":                {nil, context.DeadlineExceeded, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			rt := gatewayRouter(t, 3)
			var routed Routed
			w, x, err := sendByGateway(t, rt, func(c Routed) (*http.Response, string, error) {
				routed = c
				return test.answer, "", test.err
			})
			if (err == nil) != (test.err == nil) {
				t.Errorf("error %v", err)
			}
			if err == nil && (w.Code != test.status || x.Usage.CachedTokens != test.cached) {
				t.Errorf("status %d, %d cached; want %d, %d", w.Code, x.Usage.CachedTokens, test.status, test.cached)
			}
			for _, name := range []string{HeaderPrefiller, HeaderDataParallel, HeaderSource} {
				if given := routed.Request.Header[name]; given != nil {
					t.Errorf("%s: %s of the client goes on", name, given)
				}
			}
			if len(routed.Others) != 2 || routed.Others[0].Key == routed.Target.Key {
				t.Errorf("others: %+v", routed.Others)
			}
			if n := routertest.InFlight(rt); n != 0 {
				t.Errorf("%d bookings are left", n)
			}
		})
	}
}

// TestAMalformedAnswerIsNoWorkersFault: it is the gateway's. One that does not come is.
func TestAMalformedAnswerIsNoWorkersFault(t *testing.T) {
	for _, test := range []struct {
		name   string
		answer *http.Response
		err    error
		blamed bool
	}{
		{"no headers", nil, ErrGateway, false},
		{"headers twice", &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(iotest.ErrReader(ErrGateway))}, nil, false},
		{"headers twice, of a stream", &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: io.NopCloser(iotest.ErrReader(ErrGateway))}, nil, false},
		{"no answer", nil, context.DeadlineExceeded, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			rt := gatewayRouter(t, 2)
			if _, _, err := sendByGateway(t, rt, func(Routed) (*http.Response, string, error) { return test.answer, "", test.err }); err == nil {
				t.Error("no error")
			}
			list, _ := rt.Health.Records()
			blamed := slices.ContainsFunc(list, func(r health.Record) bool { return r.Row > 0 })
			if blamed != test.blamed {
				t.Errorf("a worker is blamed: %v; want %v", list, test.blamed)
			}
			if n := routertest.InFlight(rt); n != 0 {
				t.Errorf("%d bookings are left", n)
			}
		})
	}
}

// TestABookingMovesToWhoServed has a gateway serve from its list's second address.
func TestABookingMovesToWhoServed(t *testing.T) {
	rt := gatewayRouter(t, 3)
	var first, second kv.Target
	_, x, err := sendByGateway(t, rt, func(c Routed) (*http.Response, string, error) {
		first, second = c.Target, c.Others[0]
		return answered(200, "application/json", `{}`), second.Address(), nil
	})
	if err != nil || x.Decision.Target.Key != second.Key {
		t.Errorf("served by %v (%v), want %v", x.Decision.Target.Key, err, second.Key)
	}
	if n := routertest.InFlight(rt); n != 0 {
		t.Errorf("%d bookings are left", n)
	}
	_, x, err = sendByGateway(t, rt, func(c Routed) (*http.Response, string, error) {
		first = c.Target
		return answered(200, "application/json", `{}`), "10.9.9.9:1", nil
	})
	if err != nil || x.Decision.Target.Key != first.Key {
		t.Errorf("an unknown address moved the booking to %v (%v)", x.Decision.Target.Key, err)
	}
}
