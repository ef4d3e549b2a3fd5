package proxy

import (
	"errors"
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// pairRouter returns a router over workers 0, 1, ... with those parts.
func pairRouter(t testing.TB, policy string, parts ...kv.Disagg) *router.Router {
	t.Helper()
	r := routertest.New(t, policy, 0)
	for i, d := range parts {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Models: []string{"m"}, Disagg: d})
	}
	return r
}

func TestWhoSharesARequest(t *testing.T) {
	tests := []struct {
		name            string
		parts           []kv.Disagg
		rule            router.PairRule
		kinds           kv.Kinds
		prefill, decode []uint64 // who may be chosen; no prefill: it stays whole
		why             string
		err             error
	}{
		{name: "one of each", parts: []kv.Disagg{testkit.NixlPrefill, testkit.NixlDecode}, prefill: []uint64{0}, decode: []uint64{1}},
		{name: "nobody has a role", parts: []kv.Disagg{testkit.Plain, testkit.Plain}, decode: []uint64{0, 1}, why: router.WholeNoPair},
		{name: "workers for both parts alone", parts: []kv.Disagg{testkit.NixlBoth, testkit.NixlBoth}, decode: []uint64{0, 1}, why: router.WholeNoPair},
		{name: "no prefill worker", parts: []kv.Disagg{testkit.NixlDecode, testkit.Plain}, decode: []uint64{0, 1}, why: router.WholeNoPair},
		{name: "no decode worker", parts: []kv.Disagg{testkit.NixlPrefill}, err: router.ErrNoWorker},
		{name: "a worker for both parts decodes", parts: []kv.Disagg{testkit.NixlPrefill, testkit.NixlBoth}, prefill: []uint64{0}, decode: []uint64{1}},
		{name: "a worker for both parts does not prefill alone", parts: []kv.Disagg{testkit.NixlBoth, testkit.NixlDecode}, decode: []uint64{0, 1}, why: router.WholeNoPair},
		{name: "a plain worker takes no leg", parts: []kv.Disagg{testkit.NixlPrefill, testkit.Plain}, decode: []uint64{1}, why: router.WholeNoPair},
		{name: "kinds do not mix", parts: []kv.Disagg{testkit.NixlPrefill, testkit.SglangDecode, testkit.MooncakeDecode}, decode: []uint64{2}, why: router.WholeNoPair},
		{name: "only a kind that has both parts", parts: []kv.Disagg{testkit.NixlPrefill, testkit.SglangPrefill, testkit.SglangDecode}, prefill: []uint64{1}, decode: []uint64{2}},
		{name: "no bootstrap server known", parts: []kv.Disagg{testkit.SglangUnknown, testkit.SglangDecode}, err: router.ErrNoWorker},
		{name: "enforced", parts: []kv.Disagg{testkit.NixlDecode, testkit.NixlDecode}, rule: router.PairRule{Enforce: true}, err: router.ErrNoPair},
		{name: "whole by rule", parts: []kv.Disagg{testkit.NixlPrefill, testkit.NixlDecode}, rule: router.PairRule{Whole: wholeAnswers, Enforce: true}, decode: []uint64{1}, why: wholeAnswers},
		{name: "whole by rule where nobody takes it whole", parts: []kv.Disagg{testkit.SglangPrefill, testkit.SglangDecode}, rule: router.PairRule{Whole: wholeAnswers}, kinds: kv.KindsOf(kv.KindSGLang), prefill: []uint64{0}, decode: []uint64{1}},
		{name: "whole by rule where nobody does that either", parts: []kv.Disagg{testkit.SglangPrefill}, rule: router.PairRule{Whole: wholeAnswers, Enforce: true}, err: router.ErrNoWorker},
		{name: "whole by rule where only other kinds share it", parts: []kv.Disagg{testkit.SglangPrefill, testkit.SglangDecode}, rule: router.PairRule{Whole: wholeOwn}, kinds: kv.KindsOf(kv.KindNone), err: router.ErrNoWorker},
		{name: "short", parts: []kv.Disagg{testkit.NixlPrefill, testkit.NixlDecode}, rule: router.PairRule{LeastUncached: 13}, decode: []uint64{1}, why: router.WholeShort},
		{name: "just not short", parts: []kv.Disagg{testkit.NixlPrefill, testkit.NixlDecode}, rule: router.PairRule{LeastUncached: 12}, prefill: []uint64{0}, decode: []uint64{1}},
		{name: "short where nobody takes it whole", parts: []kv.Disagg{testkit.SglangPrefill, testkit.SglangDecode}, rule: router.PairRule{LeastUncached: 13}, prefill: []uint64{0}, decode: []uint64{1}},
	}
	for _, test := range tests {
		for _, policy := range []string{"work", "kv", "round-robin", "random"} {
			r := pairRouter(t, policy, test.parts...)
			for range 5 {
				pair, err := r.RoutePair(t.Context(), router.Request{Tokens: testkit.Tokens(1, 12), Kinds: test.kinds}, test.rule)
				if !errors.Is(err, test.err) || pair.Whole != test.why {
					t.Fatalf("%s: whole %q, %v", test.name, pair.Whole, err)
				}
				if err != nil {
					continue
				}
				if !slices.Contains(test.decode, pair.Decode.Target.Key.Worker) || pair.Decode.Booking == nil {
					t.Errorf("%s: decode %+v", test.name, pair.Decode)
				}
				if shared := pair.Prefill.Booking != nil; shared != (test.why == "") || shared && !slices.Contains(test.prefill, pair.Prefill.Target.Key.Worker) {
					t.Errorf("%s: prefill %+v", test.name, pair.Prefill)
				}
				pair.End()
			}
			for _, l := range r.Loads() {
				if l.ActiveRequests != 0 {
					t.Errorf("%s: %+v is left", test.name, l)
				}
			}
		}
	}
}

// TestPromptThatADecodeWorkerHasStaysWhole: whichever is chosen.
func TestPromptThatADecodeWorkerHasStaysWhole(t *testing.T) {
	for has := range uint64(2) {
		r := pairRouter(t, "round-robin", testkit.NixlDecode, testkit.NixlDecode, testkit.NixlPrefill)
		routertest.Hold(r, has, testkit.Tokens(1, 512))
		pair, err := r.RoutePair(t.Context(), router.Request{Tokens: testkit.Tokens(1, 512)}, router.PairRule{LeastUncached: 256})
		if err != nil || pair.Whole != router.WholeShort {
			t.Errorf("worker %d has it: whole %q, %v", has, pair.Whole, err)
		}
		pair.End()
	}
}
