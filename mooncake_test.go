package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

func TestMooncakeWithoutBootstrapServerStaysWhole(t *testing.T) {
	h := newPairHouse(t, Config{}, KindMooncake, 1, 1, nil)
	target := h.router.Targets()[0]
	target.Bootstrap.Port = 1
	h.router.Up(target)
	policy := new(clerk)
	h.router.policy = policy
	response, answer := h.post(t, chatPath, sharedChat(false))
	if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
		t.Errorf("%s: %s", response.Status, answer)
	}
	h.settled(t)
	if page := h.metrics(t); !strings.Contains(page, `kvrouter_disagg_requests_total{kind="mooncake",result="prefill_failed"} 1`) {
		t.Error("not counted")
	}
	ends := policy.endings()
	for _, want := range []toldEnding{{Failed, 0}, {Abandoned, 0}, {Finished, 1}} { // prefill, decode and all of it
		if !slices.Contains(ends, want) || len(ends) != 3 {
			t.Errorf("told %v, want %v", ends, want)
		}
	}
}

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
	target := Target{Key: WorkerKey{Worker: 7, Rank: 1}, Generation: 1, Disagg: Disagg{Bootstrap: bootstrapAt(t, server)}}
	now := time.Unix(1e9, 0)
	pairs := newTestPairs(t)
	pairs.proxy.now = func() time.Time { return now }
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
	target := Target{Key: WorkerKey{Worker: 7}, Generation: 1, Disagg: Disagg{Bootstrap: bootstrapAt(t, server)}}
	s := newTestPairs(t)
	for i := range uint64(enginesKept) {
		s.engines[WorkerKey{Worker: 100 + i}] = mooncakeEngine{1, "x", time.Now()}
	}
	if id, err := s.engineID(t.Context(), target); id != "new" || err != nil {
		t.Errorf("%q, %v", id, err)
	}
	if n := len(s.engines); n > enginesKept {
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
	s, began := newTestPairs(t), time.Now()
	if id, err := s.engineID(t.Context(), Target{Disagg: Disagg{Bootstrap: bootstrapAt(t, server)}}); err == nil {
		t.Errorf("engine id %q", id)
	}
	if took := time.Since(began); took < bootstrapTimeout || took > 5*bootstrapTimeout {
		t.Errorf("it took %s", took)
	}
}

// TestPrefillWorkerThatGoesDuringTheTransfer: the decode worker would wait for it
// for minutes, and gets the request again without a transfer.
func TestPrefillWorkerThatGoesDuringTheTransfer(t *testing.T) {
	for _, again := range []bool{false, true} { // it has come back when its absence is looked for
		for _, stream := range []bool{false, true} {
			waits := make(chan struct{}, 1)
			h := newPairHouse(t, Config{}, KindMooncake, 1, 1, func(id uint64, serve engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					if id == 0 || !body.Get("kv_transfer_params").Exists() {
						serve(w, r, body)
						return
					}
					waits <- struct{}{}
					<-r.Context().Done()
				}
			})
			prefill := h.router.Targets()[0]
			go func() { // ends once the decode leg has come
				<-waits
				h.router.Down(prefill.Key)
				if again {
					prefill.Generation++
					h.router.Up(prefill)
				}
			}()
			response, answer := h.post(t, chatPath, sharedChat(stream))
			if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			if blamed := h.blamed(); !slices.Equal(blamed, []uint64{0}) {
				t.Errorf("blamed are %v", blamed)
			}
			if page := h.metrics(t); !strings.Contains(page, `kvrouter_disagg_requests_total{kind="mooncake",result="prefill_failed"} 1`) {
				t.Error("not counted")
			}
		}
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
