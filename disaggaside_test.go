package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// unobserved is told of what happens and keeps nothing.
type unobserved struct{}

func (unobserved) Retried(uint64)                          {}
func (unobserved) EngineFailed()                           {}
func (unobserved) InterToken(string, time.Duration, int)   {}
func (unobserved) StayedWhole(string)                      {}
func (unobserved) Prefilled(Kind, time.Duration)           {}
func (unobserved) HandedOver(Kind, time.Duration)          {}
func (unobserved) SharedEnded(Kind, string, time.Duration) {}

// newTestPairs returns pairs that serve no requests.
func newTestPairs(t testing.TB) *Pairs {
	proxy := NewProxy(unobserved{}, 0, func(uint64) {})
	t.Cleanup(proxy.client.CloseIdleConnections)
	return NewPairs(nil, proxy, DefaultDisaggKnobs(), slog.New(slog.DiscardHandler))
}

// TestAbortsReachWorkers: any number of them, with the client's key, and Close
// waits for those on their way.
func TestAbortsReachWorkers(t *testing.T) {
	var keys, rids sync.Map
	worker := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var body struct{ RID string }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.Method != http.MethodPost || r.URL.Path != "/abort_request" {
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
		}
		<-time.After(20 * time.Millisecond) // so that Close has something to wait for
		keys.Store(r.Header.Get("Authorization"), true)
		rids.Store(body.RID, true)
	}))
	defer worker.Close()
	s := newTestPairs(t)
	const rounds = 3
	for round := range rounds {
		for i := range abortsAtOnce {
			l := legs{rid: fmt.Sprint(round, i), decode: Upstream{Header: http.Header{"Authorization": {"Bearer k"}}}}
			s.abort(l, Target{URL: worker.URL})
		}
		s.Close()
		n := 0
		rids.Range(func(any, any) bool { n++; return true })
		if n != (round+1)*abortsAtOnce {
			t.Fatalf("%d workers were told, want %d", n, (round+1)*abortsAtOnce)
		}
	}
	if _, ok := keys.Load("Bearer k"); !ok {
		t.Error("without the client's key")
	}
}

func TestWorkerThatIsToldToAbortAndHangsIsNotWaitedForLong(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the limit")
	}
	t.Parallel()
	worker := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // so that the server sees the connection close
		<-r.Context().Done()
	}))
	defer worker.Close()
	s, began := newTestPairs(t), time.Now()
	s.abort(legs{rid: "r"}, Target{URL: worker.URL})
	s.Close()
	if took := time.Since(began); took < abortTimeout || took > 4*abortTimeout {
		t.Errorf("it took %s", took)
	}
}

// TestAbortsFollowAClientThatTakesNothing: its connection broke, but the context
// of its request does not say so yet.
func TestAbortsFollowAClientThatTakesNothing(t *testing.T) {
	h := newPairHouse(t, Config{}, KindSGLang, 1, 1, func(id uint64, _ engineServe) engineServe {
		return func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
			if id == 10 {
				streamHead(w)
			}
			<-r.Context().Done()
		}
	})
	s := newTestPairs(t)
	parsed, _ := ParseBody([]byte(sharedChat(true)))
	u := Upstream{Method: http.MethodPost, Path: chatPath, Header: http.Header{}, Body: parsed.Raw, Route: chatPath}
	err := s.Forward(t.Context(), brokenWriter{httptest.NewRecorder()}, u, &Exchange{}, parsed, "", func([]uint64, string) (Pair, error) {
		return h.router.RoutePair(t.Context(), Request{}, PairRule{})
	})
	if !errors.Is(err, errAnswered) {
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
