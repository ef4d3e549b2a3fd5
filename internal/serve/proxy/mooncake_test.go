package proxy

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// TestEngineIDsAreAskedForAgain: after a while, after a failure, and where a known
// one cannot be asked for it stays.
func TestEngineIDsAreAskedForAgain(t *testing.T) {
	var id, asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		if n := id.Load(); n > 0 {
			fmt.Fprintf(w, `{"0":{"engine_id":"other"},"1":{"engine_id":"engine-%d"}}`, n)
		} else {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	defer server.Close()
	target := kv.Target{Key: kv.WorkerKey{Worker: 7, Rank: 1}, Generation: 1, Disagg: kv.Disagg{Bootstrap: testkit.BootstrapAt(t, server)}}
	now := time.Unix(1e9, 0)
	pairs := newTestProxy(t, 0)
	pairs.now = func() time.Time { return now }
	for _, step := range []struct {
		name   string
		later  time.Duration
		told   int64 // 0: the server fails
		forget bool
		anew   bool   // the worker was started anew, and that is known
		want   string // empty: an error
		asked  int64  // in all
	}{
		{"unknown", 0, 0, false, false, "", 1},
		{"first", 0, 1, false, false, "engine-1", 2},
		{"known", engineKept - 1, 2, false, false, "engine-1", 2},
		{"old", 1, 2, false, false, "engine-2", 3},
		{"cannot be asked", engineKept, 0, false, false, "engine-2", 4},
		{"asked again", 0, 3, false, false, "engine-3", 5},
		{"after a failure", 0, 4, true, false, "engine-4", 6},
		{"after a failure, cannot be asked", 0, 0, true, false, "", 7},
		{"back", 0, 4, false, false, "engine-4", 8},
		{"anew, cannot be asked", 0, 0, false, true, "", 9},
		{"anew", 0, 5, false, false, "engine-5", 10},
	} {
		now = now.Add(step.later)
		id.Store(step.told)
		if step.forget {
			pairs.forgetEngine(target.Key)
		}
		if step.anew {
			target.Generation++
		}
		got, err := pairs.engineID(t.Context(), target)
		if got != step.want || (err != nil) != (step.want == "") || asked.Load() != step.asked {
			t.Errorf("%s: %q, %v, asked %d times", step.name, got, err, asked.Load())
		}
	}
}

func TestFewMooncakeEngineIDsAreKept(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"0":{"engine_id":"new"}}`) }))
	defer server.Close()
	target := kv.Target{Key: kv.WorkerKey{Worker: 7}, Generation: 1, Disagg: kv.Disagg{Bootstrap: testkit.BootstrapAt(t, server)}}
	s := newTestProxy(t, 0)
	for i := range uint64(enginesKept) {
		s.engines.ids[kv.WorkerKey{Worker: 100 + i}] = mooncakeEngine{1, "x", time.Now()}
	}
	if id, err := s.engineID(t.Context(), target); id != "new" || err != nil {
		t.Errorf("%q, %v", id, err)
	}
	if n := len(s.engines.ids); n > enginesKept {
		t.Errorf("%d are kept", n)
	}
}

func TestBootstrapServerThatHangsIsNotWaitedForLong(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the limit")
	}
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer server.Close()
	s, began := newTestProxy(t, 0), time.Now()
	if id, err := s.engineID(t.Context(), kv.Target{Disagg: kv.Disagg{Bootstrap: testkit.BootstrapAt(t, server)}}); err == nil {
		t.Errorf("engine id %q", id)
	}
	if took := time.Since(began); took < bootstrapTimeout || took > 5*bootstrapTimeout {
		t.Errorf("it took %s", took)
	}
}

func TestAnswersThatTheirLengthEnded(t *testing.T) {
	for _, test := range []struct {
		answer string
		want   bool
	}{
		{`{"choices":[{"finish_reason":"length"}]}`, true},
		{`{"choices":[{"finish_reason":"stop","stop_reason":2}]}`, false},
		{`{"choices":[{"finish_reason":null}]}`, false},
		{`{"choices":[]}`, false},
		{`{"stop_reason":"max_tokens"}`, true},
		{`{"stop_reason":"end_turn"}`, false},
		{`{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}`, true},
		{`{"status":"completed","incomplete_details":null}`, false},
		{``, false},
	} {
		if got := cutShort([]byte(test.answer)); got != test.want {
			t.Errorf("%s: %v", test.answer, got)
		}
	}
}
