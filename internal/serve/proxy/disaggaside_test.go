package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
)

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
	s := newTestProxy(t, 0)
	const rounds = 3
	for round := range rounds {
		for i := range abortsAtOnce {
			l := legs{rid: fmt.Sprint(round, i), decode: sending{Upstream: &Upstream{Header: http.Header{"Authorization": {"Bearer k"}}}}}
			s.abort(l, kv.Target{URL: worker.URL})
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
	s, began := newTestProxy(t, 0), time.Now()
	s.abort(legs{rid: "r", decode: sending{Upstream: new(Upstream)}}, kv.Target{URL: worker.URL})
	s.Close()
	if took := time.Since(began); took < abortTimeout || took > 4*abortTimeout {
		t.Errorf("it took %s", took)
	}
}
