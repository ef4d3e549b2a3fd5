package main

import (
	"errors"
	"io"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/tidwall/gjson"
)

// newTestPairs returns pairs that serve no requests.
func newTestPairs(t testing.TB) *proxy.Pairs {
	px := proxy.NewProxy(testkit.Unobserved{}, 0, func(uint64) {})
	t.Cleanup(px.Client.CloseIdleConnections)
	return proxy.NewPairs(nil, px, proxy.DefaultSettings(), slog.New(slog.DiscardHandler))
}

// TestAbortsFollowAClientThatTakesNothing: its connection broke, but the context
// of its request does not say so yet.
func TestAbortsFollowAClientThatTakesNothing(t *testing.T) {
	h := newTestPairAPI(t, Config{}, kv.KindSGLang, 1, 1, func(id uint64, _ engineServe) engineServe {
		return func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
			if id == 10 {
				streamHead(w)
			}
			<-r.Context().Done()
		}
	})
	s := newTestPairs(t)
	parsed, _ := jsonbody.Parse([]byte(sharedChat(true)))
	u := proxy.Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{}, Body: parsed.Raw, Route: testkit.ChatPath}
	err := s.Forward(t.Context(), brokenWriter{httptest.NewRecorder()}, u, &proxy.Exchange{}, parsed, "", func([]uint64, string) (router.Pair, error) {
		return h.router.RoutePair(t.Context(), router.Request{}, router.PairRule{})
	})
	if !errors.Is(err, proxy.ErrAnswered) {
		t.Errorf("%v", err)
	}
	s.Close()
	for _, engine := range []*fakeEngine{h.prefill[0], h.decode[0]} {
		if n := len(engine.aborted()); n != 1 && len(engine.received()) > 0 {
			t.Errorf("worker %d was told to abort %d times", engine.id, n)
		}
	}
	h.settled(t)
}

// brokenWriter is a connection that takes no more.
type brokenWriter struct{ http.ResponseWriter }

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
