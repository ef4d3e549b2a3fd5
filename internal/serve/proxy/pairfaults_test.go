package proxy

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
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
		w.Write(web.DialectOpenAI.JSON(web.Fault{Status: http.StatusInternalServerError, Message: "broken"}))
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
			fmt.Fprintf(w, "data: %s\n\n", testkit.TokenEvent)
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
	faultTimeout = 500 * time.Millisecond // of each leg
	faultLimit   = 20 * time.Second       // for any answer; the machine may be busy
)

// TestEitherLegFailsAtEveryStage: whatever a leg does, the client gets an answer
// or one error in time, nothing stays booked, the other leg ends too, and nobody
// but the failing worker is blamed.
func TestEitherLegFailsAtEveryStage(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, leg := range []kv.Leg{kv.LegPrefill, kv.LegDecode} {
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

func failsOneLeg(t *testing.T, kind kv.Kind, leg kv.Leg, f fault, stream, enforce bool) {
	faulty := uint64(0)
	if leg == kv.LegDecode {
		faulty = 10
	}
	config := Settings{RequestTimeout: 3 * faultTimeout, DisaggPrefillTimeout: faultTimeout, DisaggHandoverTimeout: faultTimeout, EnforceDisagg: enforce}
	h := newPairFleet(t, config, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
		if id == faulty {
			return f.serve
		}
		return serve
	})
	if f.name == "refused" {
		for _, target := range h.router.Targets() {
			if target.Key.Worker == faulty {
				target.URL = "http://" + testkit.DeadAddress(t)
				h.router.Up(target)
			}
		}
	}
	began := time.Now()
	response, answer := h.post(t, testkit.ChatPath, sharedChat(stream))
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
	if canFallBack := leg == kv.LegPrefill && kind != kv.KindSGLang && !enforce; canFallBack && !answered {
		t.Errorf("not answered: %s: %s", response.Status, answer)
	}
	if leg == kv.LegDecode && answered {
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
	if kind != kv.KindSGLang || answered {
		return
	}
	other := h.prefill[0]
	if leg == kv.LegPrefill {
		other = h.decode[0]
	}
	if received := other.received(); len(received) > 0 && !(leg == kv.LegDecode && f.stage == "body") {
		rid := gjson.Get(received[0], "rid").Str
		testkit.Eventually(t, faultLimit, "the other leg was told to abort", func() bool { return slices.Contains(other.aborted(), rid) })
	}
}

// TestAttemptsAreLimited: the workers that fail are tried once each, and no more
// of them than for other requests; going whole to a decode worker is beside that.
func TestAttemptsAreLimited(t *testing.T) {
	for _, test := range []struct {
		name             string
		kind             kv.Kind
		enforce          bool
		broken           []uint64
		prefills, others int // that got it
		status           int
	}{
		{"SGLang's prefill workers", kv.KindSGLang, false, []uint64{0, 1, 2, 3}, 2, 0, 502},
		{"enforced, vLLM's", kv.KindNIXL, true, []uint64{0, 1, 2, 3}, 2, 0, 502},
		{"vLLM's prefill workers", kv.KindNIXL, false, []uint64{0, 1, 2, 3}, 1, 1, 200},
		{"all workers", kv.KindNIXL, false, []uint64{0, 1, 2, 3, 10, 11, 12}, 1, 2, 502},
		{"decode workers", kv.KindNIXL, false, []uint64{10, 11, 12}, 2, 2, 502},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := Settings{EnforceDisagg: test.enforce}
			h := newPairFleet(t, config, test.kind, 4, 3, func(id uint64, serve engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					switch {
					case slices.Contains(test.broken, id):
						hangUp(w, r)
					default:
						serve(w, r, body)
					}
				}
			})
			response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
			if response.StatusCode != test.status {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			count := func(engines []*fakeEngine) (n int) {
				for _, engine := range engines {
					if test.kind != kv.KindSGLang || engine.id < 10 { // how far the other leg comes is a race
						n += len(engine.received())
					}
				}
				return n
			}
			if p, d := count(h.prefill), count(h.decode); p != test.prefills || d != test.others {
				t.Errorf("%d prefill legs and %d others, want %d and %d", p, d, test.prefills, test.others)
			}
		})
	}
}

// TestOnlyWhatIsWrongWithTheRequestIsARefusal: other statuses of the prefill
// worker are its own failure, as an answer that is too long or tells of an error.
func TestOnlyWhatIsWrongWithTheRequestIsARefusal(t *testing.T) {
	for _, test := range []struct {
		name    string
		prefill engineServe
		status  int // of the client's answer
	}{
		{"400", answersStatus(400), 400},
		{"404", answersStatus(404), 404},
		{"408", answersStatus(408), 200},
		{"422", answersStatus(422), 422},
		{"429", answersStatus(429), 200},
		{"301", answersStatus(301), 200},
		{"500", answersStatus(500), 200},
		{"503", answersStatus(503), 200},
		{"too long", func(w http.ResponseWriter, _ *http.Request, _ gjson.Result) {
			fmt.Fprintf(w, `{"kv_transfer_params":{"do_remote_prefill":true},"pad":"%s"}`, strings.Repeat("x", 16<<20))
		}, 200},
		{"a failed stream", func(w http.ResponseWriter, _ *http.Request, _ gjson.Result) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n")
		}, 200},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newPairFleet(t, Settings{}, kv.KindNIXL, 1, 1, func(id uint64, serve engineServe) engineServe {
				if id == 0 {
					return test.prefill
				}
				return serve
			})
			response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
			if response.StatusCode != test.status || test.status == 200 && !strings.Contains(answer, "whole") {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			if blamed := h.blamed(); slices.Equal(blamed, []uint64{0}) != (test.status == 200 && test.name != "429") { // which asks for a pause
				t.Errorf("blamed are %v", blamed)
			}
			result := SharedRefused
			if test.status == 200 {
				result = SharedPrefillFailed
			}
			h.counts(t, 1, kv.KindNIXL, result)
		})
	}
}

// TestLimitsOfLegs: each wait ends with its own limit, whatever --request-timeout
// is. Of a stream only the first event is waited for, of another answer the whole.
func TestLimitsOfLegs(t *testing.T) {
	const short, long = 200 * time.Millisecond, time.Minute
	later := func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
		if body.Get("stream").Bool() {
			streamHead(w)
		}
		<-time.After(3 * short)
		if body.Get("stream").Bool() {
			io.WriteString(w, "data: [DONE]\n\n")
			return
		}
		fakeAnswer(w, body, "decoded")
	}
	for _, kind := range fakeKinds {
		for _, test := range []struct {
			name              string
			prefill, handover time.Duration
			leg               kv.Leg
			serve             engineServe
			stream            bool
			flag              string // that the error names; empty: it is answered
			blamed            []uint64
		}{
			{"prefill", short, long, kv.LegPrefill, neverAnswers, true, "--disagg-prefill-timeout", []uint64{0}},
			{"prefill, not streamed", short, long, kv.LegPrefill, neverAnswers, false, "--disagg-prefill-timeout", []uint64{0}},
			{"handover", long, short, kv.LegDecode, neverAnswers, true, "--disagg-handover-timeout", nil},
			{"handover, not streamed", long, short, kv.LegDecode, neverAnswers, false, "--disagg-handover-timeout, and 1s for each token", nil},
			{"long stream", long, short, kv.LegDecode, later, true, "", nil},
			{"long answer", long, short, kv.LegDecode, later, false, "", nil}, // within the second that its token may take
		} {
			if kind != kv.KindSGLang && strings.Contains(test.flag, "token") {
				continue // vLLM's decode workers may let a request wait
			}
			t.Run(kind.String()+" "+test.name, func(t *testing.T) {
				t.Parallel() // most of it is waiting
				config := Settings{RequestTimeout: 20 * short, DisaggPrefillTimeout: test.prefill, DisaggHandoverTimeout: test.handover, EnforceDisagg: true}
				h := newPairFleet(t, config, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
					if (id == 0) == (test.leg == kv.LegPrefill) {
						return test.serve
					}
					if kind == kv.KindSGLang && id == 0 {
						return func(w http.ResponseWriter, _ *http.Request, body gjson.Result) { fakeAnswer(w, body, "prefill") }
					}
					return serve
				})
				response, answer := h.post(t, testkit.ChatPath, sharedChat(test.stream, jsonbody.Field{Key: "max_tokens", Raw: "1"}))
				if test.flag == "" && (response.StatusCode != http.StatusOK || strings.Contains(answer, "error") || test.stream && !strings.Contains(answer, "[DONE]")) ||
					test.flag != "" && (response.StatusCode != http.StatusGatewayTimeout || !strings.Contains(answer, test.flag)) {
					t.Errorf("%s: %s", response.Status, answer)
				}
				h.settled(t)
				if kind == kv.KindSGLang {
					test.blamed = nil // its legs wait for each other
				}
				if blamed := h.blamed(); !slices.Equal(blamed, test.blamed) {
					t.Errorf("blamed are %v", blamed)
				}
			})
		}
	}
}

// TestDecodeWorkerThatLosesItsPrefillWorker: SGLang's says so with 500 after 12 s. The
// request goes to another pair, whose prefill worker is another.
func TestDecodeWorkerThatLosesItsPrefillWorker(t *testing.T) {
	for _, stream := range []bool{false, true} {
		h := newPairFleet(t, Settings{}, kv.KindSGLang, 2, 2, func(id uint64, serve engineServe) engineServe {
			switch id {
			case 0: // gone without a word
				return neverAnswers
			case 10:
				return func(w http.ResponseWriter, _ *http.Request, _ gjson.Result) {
					w.Header().Set("Content-Type", "application/json")
					w.WriteHeader(http.StatusInternalServerError)
					io.WriteString(w, `{"object":"error","message":"Decode transfer failed: Lost connection with prefill instance","type":"InternalServerError","code":500}`)
				}
			}
			return serve
		})
		response, answer := h.post(t, testkit.ChatPath, sharedChat(stream))
		if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") || response.Header.Get(HeaderPrefillWorker) != "1" {
			t.Errorf("streamed %v: %s, prefill worker %s: %s", stream, response.Status, response.Header.Get(HeaderPrefillWorker), answer)
		}
		h.settled(t)
		testkit.Eventually(t, faultLimit, "the first prefill worker was told to abort", func() bool { return len(h.prefill[0].aborted()) == 1 })
	}
}

// TestPrefillLegThatLastsLongerThanTheStreamsBeginning: once the answer has begun
// nothing that the prefill leg comes to is the client's matter; and it ends with
// the answer.
func TestPrefillLegThatLastsLongerThanTheStreamsBeginning(t *testing.T) {
	for _, breaks := range []bool{false, true} {
		t.Run(fmt.Sprintf("breaks=%v", breaks), func(t *testing.T) {
			begun, broken := make(chan struct{}), make(chan struct{})
			config := Settings{DisaggPrefillTimeout: 20 * time.Second}
			h := newPairFleet(t, config, kv.KindSGLang, 1, 1, func(id uint64, serve engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					switch {
					case id == 0 && breaks:
						<-begun
						hangUp(w, r)
						close(broken)
					case id == 0:
						<-r.Context().Done()
					default:
						streamHead(w)
						if breaks {
							<-broken
							<-time.After(50 * time.Millisecond) // for the router to learn of it
						}
						io.WriteString(w, "data: [DONE]\n\n")
					}
				}
			})
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+testkit.ChatPath, strings.NewReader(sharedChat(true)))
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			response, err := h.Client().Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			close(begun)
			answer, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != http.StatusOK || strings.Contains(string(answer), "error") || !strings.Contains(string(answer), "[DONE]") {
				t.Errorf("%s: %s, %v", response.Status, answer, err)
			}
			h.settled(t)
			if took := time.Since(began); took > config.DisaggPrefillTimeout/2 {
				t.Errorf("the prefill leg was waited for, %s", took)
			}
			if blamed := h.blamed(); len(blamed) != 0 {
				t.Errorf("blamed are %v", blamed)
			}
			if h.counted(kv.KindSGLang, "transfer") > 0 {
				t.Error("a transfer was timed though the prefill leg never ended well")
			}
		})
	}
}

// TestNothingIsSentAgainThatMayHaveBegun: neither once the client has a part of
// the answer nor where a worker may be at it still; and nobody is blamed.
func TestNothingIsSentAgainThatMayHaveBegun(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, test := range []struct {
			name    string
			stream  bool
			prefill bool // its leg breaks first
			status  int
			decode  func(w http.ResponseWriter, r *http.Request)
		}{
			{"broken in mid-stream", true, false, 200, func(w http.ResponseWriter, _ *http.Request) {
				streamHead(w)
				panic(http.ErrAbortHandler)
			}},
			{"both broken in mid-stream", true, true, 200, nil},
			{"silent", false, false, 504, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
		} {
			if kind != kv.KindSGLang && test.prefill {
				continue // its prefill leg has ended by then
			}
			t.Run(kind.String()+" "+test.name, func(t *testing.T) {
				begun, broken := make(chan struct{}), make(chan struct{})
				timeout := faultLimit
				if test.status == 504 {
					timeout = faultTimeout
				}
				h := newPairFleet(t, Settings{RequestTimeout: timeout}, kind, 2, 2, func(id uint64, serve engineServe) engineServe {
					return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
						switch {
						case id == 0 && test.prefill:
							select { // until the client has a part of the answer
							case <-begun:
							case <-r.Context().Done():
							}
							hangUp(w, r)
							close(broken)
						case id == 0 && kind == kv.KindSGLang:
							fakeAnswer(w, body, "prefill")
						case id == 10 && test.prefill:
							streamHead(w)
							<-broken
							<-time.After(50 * time.Millisecond) // for the router to learn of it
							panic(http.ErrAbortHandler)
						case id == 10:
							test.decode(w, r)
						default:
							serve(w, r, body)
						}
					}
				})
				response, err := h.Client().Post(h.URL+testkit.ChatPath, "application/json", strings.NewReader(sharedChat(test.stream)))
				if err != nil {
					t.Fatal(err)
				}
				defer response.Body.Close()
				first := make([]byte, 1)
				if _, err := io.ReadFull(response.Body, first); err != nil {
					t.Error(err)
				}
				close(begun)
				rest, _ := io.ReadAll(response.Body) // which may break off
				answer := string(first) + string(rest)
				if response.StatusCode != test.status || strings.Count(answer, `"error"`) != 1 {
					t.Errorf("%s: %s", response.Status, answer)
				}
				h.settled(t)
				if n := len(h.prefill[1].received()) + len(h.decode[1].received()); n != 0 {
					t.Errorf("%d legs were sent again", n)
				}
				if blamed := h.blamed(); len(blamed) != 0 {
					t.Errorf("blamed are %v", blamed)
				}
			})
		}
	}
}

// TestPrefillFailureEndsTheDecodeLegAtOnce: nobody waits for a limit.
func TestPrefillFailureEndsTheDecodeLegAtOnce(t *testing.T) {
	const limit = 30 * time.Second
	for _, stream := range []bool{false, true} {
		waits := make(chan struct{}, 1)
		h := newPairFleet(t, Settings{RequestTimeout: limit}, kv.KindSGLang, 1, 1, func(id uint64, _ engineServe) engineServe {
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
		response, answer := h.post(t, testkit.ChatPath, sharedChat(stream))
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
