package main

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// fault is how one leg of a pair fails.
type fault struct {
	name  string
	stage string // of its answer: before, headers (they have been sent), body (a part of it has)
	hangs bool   // it says no more; else its connection breaks
	error bool   // it answers 500, instead
}

var faults = []fault{
	{name: "refused"}, // nothing listens; see faultyHouse
	{name: "killed before headers", stage: "before"},
	{name: "killed after headers", stage: "headers"},
	{name: "killed in the body", stage: "body"},
	{name: "hung before headers", stage: "before", hangs: true},
	{name: "hung after headers", stage: "headers", hangs: true},
	{name: "hung in the body", stage: "body", hangs: true},
	{name: "error", error: true},
}

// serve fails as f says.
func (f fault) serve(w http.ResponseWriter, r *http.Request, body gjson.Result) {
	if f.error {
		w.WriteHeader(http.StatusInternalServerError)
		w.Write(errorJSON(http.StatusInternalServerError, "server_error", "", "broken"))
		return
	}
	if f.stage != "before" {
		kind := "application/json"
		if body.Get("stream").Bool() {
			kind = "text/event-stream"
		}
		w.Header().Set("Content-Type", kind)
		w.WriteHeader(http.StatusOK)
	}
	if f.stage == "body" {
		if body.Get("stream").Bool() {
			fmt.Fprintf(w, "data: %s\n\n", tokenEvent)
		} else {
			io.WriteString(w, `{"choices":[{"mess`)
		}
	}
	http.NewResponseController(w).Flush()
	if f.hangs {
		<-r.Context().Done()
		return
	}
	panic(http.ErrAbortHandler) // breaks the connection
}

const (
	faultTimeout = 300 * time.Millisecond // of each leg
	faultLimit   = 20 * time.Second       // for any answer; the machine may be busy
)

// TestEitherLegFailsAtEveryStage: whatever a leg does, the client gets an answer
// or one error in time, nothing stays booked, the other leg ends too, and nobody
// but the failing worker is blamed.
func TestEitherLegFailsAtEveryStage(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, leg := range []Leg{LegPrefill, LegDecode} {
			for _, f := range faults {
				for _, stream := range []bool{false, true} {
					for _, enforce := range []bool{false, true} {
						if testing.Short() && enforce == stream {
							continue
						}
						name := fmt.Sprintf("%s/%s %s/stream=%v enforce=%v", kind, []string{"", "prefill", "decode"}[leg], f.name, stream, enforce)
						t.Run(name, func(t *testing.T) {
							t.Parallel() // most of it is waiting
							failsOneLeg(t, kind, leg, f, stream, enforce)
						})
					}
				}
			}
		}
	}
}

func failsOneLeg(t *testing.T, kind Kind, leg Leg, f fault, stream, enforce bool) {
	faulty := uint64(0)
	if leg == LegDecode {
		faulty = 10
	}
	config := Config{
		RequestTimeout: 3 * faultTimeout,
		DisaggKnobs:    DisaggKnobs{DisaggPrefillTimeout: faultTimeout, DisaggHandoverTimeout: faultTimeout, EnforceDisagg: enforce},
	}
	h := newPairHouse(t, config, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
		if id == faulty {
			return f.serve
		}
		return serve
	})
	if f.name == "refused" {
		for _, target := range h.router.Targets() {
			if target.Key.Worker == faulty {
				target.URL = deadURL(t)
				h.router.Up(target)
			}
		}
	}
	began := time.Now()
	response, answer := h.post(t, chatPath, sharedChat(stream))
	if took := time.Since(began); took > faultLimit {
		t.Errorf("it took %s", took)
	}
	h.settled(t)

	answered := response.StatusCode == http.StatusOK && (strings.Contains(answer, "decoded") || strings.Contains(answer, "whole")) && strings.Count(answer, `"error"`) == 0
	failed := strings.Count(answer, `"error"`) == 1 && (response.StatusCode >= 500 && gjson.Valid(answer) || stream && response.StatusCode == http.StatusOK)
	if !answered && !failed {
		t.Errorf("%s: %s", response.Status, answer)
	}
	// A vLLM decode worker serves the request whole where it may; and a stream
	// that SGLang's prefill worker began may break off once it was handed over.
	if canFallBack := leg == LegPrefill && kind != KindSGLang && !enforce; canFallBack && !answered {
		t.Errorf("not answered: %s: %s", response.Status, answer)
	}
	if leg == LegDecode && answered {
		t.Errorf("answered by a failed worker: %s", answer)
	}
	if failed && f.hangs && response.StatusCode != http.StatusOK && response.StatusCode != http.StatusGatewayTimeout {
		t.Errorf("a leg that hung gives %s: %s", response.Status, answer)
	}
	if failed && !f.hangs && response.StatusCode == http.StatusGatewayTimeout {
		t.Errorf("a leg that broke gives %s: %s", response.Status, answer)
	}
	if blamed := h.blamed(); slices.ContainsFunc(blamed, func(id uint64) bool { return id != faulty }) {
		t.Errorf("blamed are %v, faulty is %d", blamed, faulty)
	} else if len(blamed) == 0 && failed && !f.hangs && response.StatusCode != http.StatusOK && !f.error {
		t.Error("nobody is blamed")
	}
	if kind != KindSGLang || answered {
		return
	}
	other := h.prefill[0]
	if leg == LegPrefill {
		other = h.decode[0]
	}
	if received := other.received(); len(received) > 0 && !(leg == LegDecode && f.stage == "body") {
		rid := gjson.Get(received[0], "rid").Str
		eventually(t, faultLimit, "the other leg was told to abort", func() bool { return slices.Contains(other.aborted(), rid) })
	}
}

func TestMooncakeWithoutBootstrapServerStaysWhole(t *testing.T) {
	h := newPairHouse(t, Config{}, KindMooncake, 1, 1, nil)
	target := h.router.Targets()[0]
	target.Bootstrap.Port = 1
	h.router.Up(target)
	response, answer := h.post(t, chatPath, sharedChat(false))
	if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
		t.Errorf("%s: %s", response.Status, answer)
	}
	h.settled(t)
	if page := h.metrics(t); !strings.Contains(page, `kvrouter_disagg_requests_total{kind="mooncake",result="prefill_failed"} 1`) {
		t.Error("not counted")
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
	target := Target{Key: WorkerKey{Worker: 7, Rank: 1}}
	if err := target.Bootstrap.UnmarshalText([]byte(strings.TrimPrefix(server.URL, "http://"))); err != nil {
		t.Fatal(err)
	}
	telemetry := NewTelemetry(func() []WorkerSample { return nil }, func() PromptSample { return PromptSample{} })
	proxy := NewProxy(telemetry, time.Minute, func(uint64) {})
	defer proxy.client.CloseIdleConnections()
	now := time.Unix(1e9, 0)
	proxy.now = func() time.Time { return now }
	pairs := NewPairs(nil, proxy, DefaultDisaggKnobs(), slog.New(slog.DiscardHandler))
	for _, step := range []struct {
		name   string
		later  time.Duration
		told   int64 // 0: the server fails
		forget bool
		want   string // empty: an error
		asked  int64  // in all
	}{
		{"unknown", 0, 0, false, "", 1},
		{"first", 0, 1, false, "engine-1", 2},
		{"known", engineKept - 1, 2, false, "engine-1", 2},
		{"old", 1, 2, false, "engine-2", 3},
		{"cannot be asked", engineKept, 0, false, "engine-2", 4},
		{"asked again", 0, 3, false, "engine-3", 5},
		{"after a failure", 0, 4, true, "engine-4", 6},
		{"after a failure, cannot be asked", 0, 0, true, "", 7},
	} {
		now = now.Add(step.later)
		id.Store(step.told)
		if step.forget {
			pairs.forgetEngine(target.Key)
		}
		got, err := pairs.engineID(t.Context(), target)
		if got != step.want || (err != nil) != (step.want == "") || asked.Load() != step.asked {
			t.Errorf("%s: %q, %v, asked %d times", step.name, got, err, asked.Load())
		}
	}
}

// TestFallsBackAndComesBack: while the prefill worker is gone decode workers
// serve requests whole; with the next request after its return it is used again.
func TestFallsBackAndComesBack(t *testing.T) {
	h := newPairHouse(t, Config{}, KindNIXL, 1, 1, nil)
	prefill := h.router.Targets()[0]
	want := func(text string) {
		t.Helper()
		if response, answer := h.post(t, chatPath, sharedChat(true)); response.StatusCode != http.StatusOK || !strings.Contains(answer, text) {
			t.Errorf("%s: %s, want %s", response.Status, answer, text)
		}
	}
	want("decoded")
	gone := prefill
	gone.URL = deadURL(t)
	h.router.Up(gone) // killed, not yet noticed
	want("whole")
	h.router.Down(prefill.Key)
	want("whole")
	h.router.Up(prefill)
	want("decoded")
	h.settled(t)
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

// TestPrefillFailureEndsTheDecodeLegAtOnce: nobody waits for a limit.
func TestPrefillFailureEndsTheDecodeLegAtOnce(t *testing.T) {
	const limit = 30 * time.Second
	for _, stream := range []bool{false, true} {
		waits := make(chan struct{}, 1)
		h := newPairHouse(t, Config{RequestTimeout: limit}, KindSGLang, 1, 1, func(id uint64, _ engineServe) engineServe {
			return func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
				if id == 0 {
					<-waits
					hangUp(w, r)
				} else {
					waits <- struct{}{}
					<-r.Context().Done()
				}
			}
		})
		began := time.Now()
		response, answer := h.post(t, chatPath, sharedChat(stream))
		if took := time.Since(began); took > limit/2 {
			t.Errorf("the decode leg was waited for, %s", took)
		}
		if response.StatusCode != http.StatusBadGateway {
			t.Errorf("%s: %s", response.Status, answer)
		}
		h.settled(t)
		if blamed := h.blamed(); !slices.Equal(blamed, []uint64{0}) {
			t.Errorf("blamed are %v", blamed)
		}
	}
}
