package proxy

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
	"kvrouter/internal/web"
)

func TestNamedEventsAreReadLikeOthers(t *testing.T) {
	for stream, want := range map[string]Usage{
		testkit.MessagesStream:  {Known: true, PromptTokens: 9, OutputTokens: 3, CachedKnown: true, CachedTokens: 4},
		testkit.ResponsesStream: {Known: true, PromptTokens: 9, OutputTokens: 2, CachedKnown: true, CachedTokens: 4},
	} {
		for _, text := range []string{stream, strings.ReplaceAll(stream, "\n", "\r\n")} {
			var events EventScanner
			if out := events.Scan([]byte(text)); string(out) != text {
				t.Errorf("passed on as %q", out)
			}
			if events.Usage != want || events.Count != 1 || !events.done {
				t.Errorf("%q: usage %+v, %d parts of the answer, done %t", text, events.Usage, events.Count, events.done)
			}
		}
	}
}

func TestAPanicOverARequestLeavesNothingBooked(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	rt := routertest.NewTestRouter(t, "round-robin", 0)
	rt.Up(kv.Target{Key: kv.WorkerKey{}, URL: worker.URL})
	rule := new(policytest.Clerk)
	rt.Policy = rule
	proxy := newTestProxy(t, 0)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}}
		proxy.Forward(t.Context(), panickingWriter{httptest.NewRecorder()}, u, &Exchange{}, chooseOne(func([]uint64) (router.Decision, error) {
			return rt.Route(t.Context(), router.Request{})
		}))
	}()
	if got := rule.Endings(); !slices.Equal(got, []policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) || routertest.InFlight(rt) != 0 {
		t.Errorf("told %v, %d in flight", got, routertest.InFlight(rt))
	}
}

type panickingWriter struct{ http.ResponseWriter }

func (panickingWriter) Write([]byte) (int, error) { panic("no paper") }
