package openai

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

const usageEvent = `{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`

func TestBodyReachesTheWorkerUnchanged(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	h := newTestAPI(t, setup{CollectUsage: true}, worker.URL)
	bodies := []string{
		`{"zeta": 1, "model":"m", "messages":[{"role":"user","content":"a","name":"x"}], "unknown":{"b":1,"a":2}}`,
		"{\n \"stream\": true, \"stream_options\": {\"include_usage\": true}, \"model\": \"m\", \"messages\": []}",
		`{"stream":true,"stream_options":{"continuous_usage_stats":true},"messages":[]}`,
		`{"stream":true,"stream_options":"wrong","messages":[]}`,
	}
	for i, body := range bodies {
		h.post(t, testkit.ChatPath, body)
		if got := worker.Received()[i]; got != body {
			t.Errorf("sent\n%s\nreceived\n%s", body, got)
		}
	}
}

func TestUsageIsAskedForAndHidden(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, usageEvent, "[DONE]"))
	h := newTestAPI(t, setup{CollectUsage: true}, worker.URL)
	tests := []struct{ sent, want string }{
		{`{"model":"m","stream":true}`, `{"stream_options":{"include_usage":true},"model":"m","stream":true}`},
		{`{"stream":true,"stream_options":{"x":1},"n":1}`, `{"stream":true,"stream_options":{"x":1,"include_usage":true},"n":1}`},
		{`{"stream":true,"stream_options":null,"n":1}`, `{"stream":true,"stream_options":{"include_usage":true},"n":1}`},
		{`{"stream":true,"stream_options":{"include_usage":false}}`, `{"stream":true,"stream_options":{"include_usage":true}}`},
	}
	for i, test := range tests {
		_, answer := h.post(t, testkit.ChatPath, test.sent)
		if got := worker.Received()[i]; got != test.want {
			t.Errorf("sent\n%s\nreceived\n%s\nwant\n%s", test.sent, got, test.want)
		}
		if want := "data: " + testkit.TokenEvent + "\n\ndata: [DONE]\n\n"; answer != want {
			t.Errorf("client got\n%s\nwant\n%s", answer, want)
		}
	}
	_, answer := h.post(t, testkit.ChatPath, `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`)
	if !strings.Contains(answer, usageEvent) {
		t.Errorf("a client that asked for usage got\n%s", answer)
	}
	metrics, err := h.Client().Get(h.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer metrics.Body.Close()
	page, _ := io.ReadAll(metrics.Body)
	if want := `kvrouter_prompt_tokens_total{worker_id="0"} 45`; !strings.Contains(string(page), want) {
		t.Errorf("metrics lack %s", want)
	}
}

func TestNoCollectUsageLeavesStreamsAlone(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, usageEvent, "[DONE]"))
	h := newTestAPI(t, setup{CollectUsage: false}, worker.URL)
	_, answer := h.post(t, testkit.ChatPath, `{"stream":true}`)
	if got := worker.Received()[0]; got != `{"stream":true}` || !strings.Contains(answer, usageEvent) {
		t.Errorf("received %s, answered %s", got, answer)
	}
}

func TestStreamIsRelayedAsItComes(t *testing.T) {
	next := make(chan struct{})
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 3 {
			fmt.Fprintf(w, "data: %s\n\n", testkit.TokenEvent)
			http.NewResponseController(w).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	})
	h := newTestAPI(t, setup{}, worker.URL)
	response, err := h.Client().Post(h.URL+testkit.ChatPath, "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	lines := bufio.NewReader(response.Body)
	for range 3 { // each event arrives before the next is sent
		line, err := lines.ReadString('\n')
		if err != nil || line != "data: "+testkit.TokenEvent+"\n" {
			t.Fatalf("%q, %v", line, err)
		}
		lines.ReadString('\n')
		next <- struct{}{}
	}
}

func TestClientThatLeavesCancelsTheWorker(t *testing.T) {
	cancelled := make(chan struct{})
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: %s\n\n", testkit.TokenEvent)
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(cancelled)
	})
	h := newTestAPI(t, setup{}, worker.URL)
	ctx, leave := context.WithCancel(t.Context())
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, h.URL+testkit.ChatPath, strings.NewReader(`{"stream":true}`))
	response, err := h.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if n := h.router.Load(kv.WorkerKey{}).InFlight; n != 1 {
		t.Errorf("%d in flight during the stream, want 1", n)
	}
	leave()
	select {
	case <-cancelled:
	case <-time.After(5 * time.Second):
		t.Fatal("the worker was not told")
	}
	testkit.Eventually(t, 5*time.Second, "the booking freed", func() bool { return h.router.Load(kv.WorkerKey{}).InFlight == 0 })
	testkit.Eventually(t, 5*time.Second, "status 499 counted", func() bool {
		return strings.Contains(h.metrics(t), `kvrouter_requests_total{route="/v1/chat/completions",status="499",worker_id="0"} 1`)
	})
}

func TestClientThatLeavesAfterTheEndWasServed(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		testkit.StreamOf(testkit.TokenEvent, "[DONE]")(w, r)
		http.NewResponseController(w).Flush()
		<-r.Context().Done() // the client is faster than the end of the body
	})
	h := newTestAPI(t, setup{}, worker.URL)
	ctx, leave := context.WithCancel(t.Context())
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, h.URL+testkit.ChatPath, strings.NewReader(`{"stream":true}`))
	response, err := h.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	for lines := bufio.NewScanner(response.Body); lines.Scan() && lines.Text() != "data: [DONE]"; {
	}
	leave()
	testkit.Eventually(t, 5*time.Second, "status 200 counted", func() bool {
		return strings.Contains(h.metrics(t), `kvrouter_requests_total{route="/v1/chat/completions",status="200",worker_id="0"} 1`)
	})
}

func TestWorkersThatAllFailGiveOneError(t *testing.T) {
	h := newTestAPI(t, setup{}, deadURL(t), deadURL(t), deadURL(t))
	response, answer := h.post(t, testkit.ChatPath, `{"messages":[]}`)
	if response.StatusCode != http.StatusBadGateway || gjson.Get(answer, "error.code").Int() != 502 {
		t.Errorf("%d: %s", response.StatusCode, answer)
	}
	if n := len(h.failed); n != 2 {
		t.Errorf("%d workers were tried, want 2: one and one other", n)
	}
}

func TestFailureInMidStreamEndsWithAnErrorEvent(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		testkit.StreamOf(testkit.TokenEvent)(w, r)
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	other := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{}, worker.URL, other.URL)
	response, answer := h.post(t, testkit.ChatPath, `{"stream":true}`)
	events := strings.Split(strings.TrimSpace(answer), "\n\n")
	if response.StatusCode != 200 || len(events) != 2 || events[0] != "data: "+testkit.TokenEvent {
		t.Fatalf("%d: %s", response.StatusCode, answer)
	}
	if code := gjson.Get(strings.TrimPrefix(events[1], "data: "), "error.code").Int(); code != 502 {
		t.Errorf("last event %s", events[1])
	}
	if len(other.Received()) != 0 {
		t.Error("a request was repeated after its first byte")
	}
}

func TestLimitsAndBadRequests(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{MaxBodyBytes: 64}, worker.URL)
	long := `{"messages":"` + strings.Repeat("x", 100) + `"}`
	tests := []struct {
		name, body string
		status     int
	}{
		{"too large", long, 413},
		{"not JSON", `{"a":`, 400},
		{"not an object", `[1]`, 400},
		{"empty", ``, 400},
		{"unknown model", `{"model":"gpt-x"}`, 404},
		{"breaks the index", `{"vllm_xargs":{"kv_cache_report_mode":"full"}}`, 400},
	}
	for _, test := range tests {
		response, answer := h.post(t, testkit.ChatPath, test.body)
		e := gjson.Get(answer, "error")
		if response.StatusCode != test.status || e.Get("message").String() == "" || int(e.Get("code").Int()) != test.status || !e.Get("type").Exists() || !e.Get("param").Exists() {
			t.Errorf("%s: %d %s", test.name, response.StatusCode, answer)
		}
	}
	// The same limit without a Content-Length.
	request, _ := http.NewRequest(http.MethodPost, h.URL+testkit.ChatPath, io.MultiReader(strings.NewReader(long)))
	response, err := h.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != 413 {
		t.Errorf("chunked and too large: %d", response.StatusCode)
	}
	if len(worker.Received()) != 0 {
		t.Error("a refused request reached the worker")
	}
}

func TestNoWorkerIs503WithRetryAfter(t *testing.T) {
	h := newTestAPI(t, setup{})
	response, answer := h.post(t, testkit.ChatPath, `{"messages":[]}`)
	if response.StatusCode != 503 || response.Header.Get("Retry-After") == "" || !gjson.Get(answer, "error.message").Exists() {
		t.Errorf("%d %v %s", response.StatusCode, response.Header, answer)
	}
	ready, err := h.Client().Get(h.URL + "/ready")
	if err != nil {
		t.Fatal(err)
	}
	ready.Body.Close()
	if ready.StatusCode != 503 {
		t.Errorf("/ready is %d without workers", ready.StatusCode)
	}
}

func TestTimeOutIs504(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	h := newTestAPI(t, setup{RequestTimeout: 50 * time.Millisecond}, worker.URL)
	response, answer := h.post(t, testkit.ChatPath, `{"messages":[]}`)
	if response.StatusCode != http.StatusGatewayTimeout {
		t.Errorf("%d %s", response.StatusCode, answer)
	}
}

func TestRequestIDIsKeptAndPassedOn(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{}, worker.URL)
	response, _ := h.post(t, testkit.ChatPath, `{}`, "X-Request-Id", "mine-1")
	if got := response.Header.Get(web.HeaderRequest); got != "mine-1" || worker.Header.Get(web.HeaderRequest) != "mine-1" {
		t.Errorf("client got %q, worker %q", got, worker.Header.Get(web.HeaderRequest))
	}
	response, _ = h.post(t, testkit.ChatPath, `{}`)
	if got := response.Header.Get(web.HeaderRequest); got == "" || worker.Header.Get(web.HeaderRequest) != got {
		t.Errorf("client got %q, worker %q", got, worker.Header.Get(web.HeaderRequest))
	}
}

func TestKeysGuardBothPorts(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{APIKey: []string{"k1", "k2"}, RouterAPIKey: []string{"r"}}, worker.URL)
	for key, status := range map[string]int{"": 401, "Bearer k": 401, "Bearer k2": 200} {
		response, _ := h.post(t, testkit.ChatPath, `{}`, "Authorization", key)
		if response.StatusCode != status {
			t.Errorf("key %q: %d, want %d", key, response.StatusCode, status)
		}
	}
	if got := worker.Header.Get("Authorization"); got != "" {
		t.Errorf("the router's key reached the worker: %q", got)
	}
}

func TestTheChosenRankIsNamed(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{})
	h.router.Up(kv.Target{Key: kv.WorkerKey{Worker: 0, Rank: 1}, Ranks: 2, URL: worker.URL})
	h.post(t, testkit.ChatPath, `{}`)
	if got := worker.Header.Get(web.HeaderRank); got != "1" {
		t.Errorf("rank %q reached the worker, want 1", got)
	}
	h.router.Up(kv.Target{Key: kv.WorkerKey{Worker: 0, Rank: 1}, Ranks: 2, FirstRank: 1, URL: worker.URL})
	h.post(t, testkit.ChatPath, `{}`)
	if got := worker.Header.Get(web.HeaderRank); got != "0" {
		t.Errorf("rank %q reached a worker that has ranks 1 and 2 of its deployment, want 0: vLLM counts from its own first", got)
	}
	h.router.Up(kv.Target{Key: kv.WorkerKey{Worker: 0, Rank: 1}, Ranks: 1, URL: worker.URL})
	h.post(t, testkit.ChatPath, `{}`)
	if got := worker.Header.Get(web.HeaderRank); got != "" {
		t.Errorf("rank %q reached a worker of one rank", got)
	}
}

func TestEngineAdminIsRefusedUnlessAllowed(t *testing.T) {
	ok := func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"done":true}`) }
	a, b := testkit.NewFakeWorker(t, ok), testkit.NewFakeWorker(t, ok)
	h := newTestAPI(t, setup{}, a.URL, b.URL)
	if response, _ := h.post(t, "/reset_prefix_cache", ""); response.StatusCode != 403 || len(a.Received())+len(b.Received()) != 0 {
		t.Errorf("%d, %d requests reached workers", response.StatusCode, len(a.Received())+len(b.Received()))
	}
	h = newTestAPI(t, setup{AllowEngineAdmin: true}, a.URL, b.URL)
	response, answer := h.post(t, "/reset_prefix_cache", "")
	if response.StatusCode != 200 || len(a.Received()) != 1 || len(b.Received()) != 1 || gjson.Get(answer, "1.answer.done").String() != "true" {
		t.Errorf("%d %s", response.StatusCode, answer)
	}
}

// TestHeadersOfOneConnectionStayThere sends headers that belong to the client's
// connection, and a rank that nobody asked for.
func TestHeadersOfOneConnectionStayThere(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "x-mine")
		w.Header().Set("X-Mine", "1")
		io.WriteString(w, `{}`)
	})
	h := newTestAPI(t, setup{}, worker.URL)
	response, _ := h.post(t, testkit.ChatPath, `{}`, "Connection", "x-foo, x-bar", "X-Foo", "1", "X-Bar", "2", "X-Baz", "3", web.HeaderRank, "7")
	for _, name := range []string{"X-Foo", "X-Bar", web.HeaderRank} {
		if got := worker.Header.Get(name); got != "" {
			t.Errorf("%s: %s reached the worker", name, got)
		}
	}
	if worker.Header.Get("X-Baz") != "3" || response.Header.Get("X-Mine") != "" {
		t.Errorf("to the worker %v, to the client %v", worker.Header, response.Header)
	}
	h.post(t, testkit.ChatPath, `{}`, hints.HeaderPinnedWorker, "0", web.HeaderRank, "7")
	if got := worker.Header.Get(web.HeaderRank); got != "7" {
		t.Errorf("rank %q reached the worker that was named", got)
	}
}

// noDescriptors is a transport that cannot open a connection.
type noDescriptors struct{}

func (noDescriptors) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("socket", syscall.EMFILE)}
}

func TestWithoutDescriptorsClientsAreToldToTryAgain(t *testing.T) {
	h := newTestAPI(t, setup{transport: noDescriptors{}}, "http://127.0.0.1:1", "http://127.0.0.1:2")
	response, answer := h.post(t, testkit.ChatPath, `{}`)
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") != "1" || !strings.Contains(answer, "too many connections") {
		t.Errorf("%s %s", response.Status, answer)
	}
}

func TestStatusesThatAreNoneBecomeABadGateway(t *testing.T) {
	for _, status := range []string{"099 X", "000 X", "101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket"} {
		worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			connection, buffered, err := http.NewResponseController(w).Hijack()
			if err == nil {
				fmt.Fprintf(buffered, "HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\nhi", status)
				buffered.Flush()
				connection.Close()
			}
		}))
		h := newTestAPI(t, setup{}, worker.URL)
		for _, body := range []string{`{}`, `{"stream":true}`} {
			if response, answer := h.post(t, testkit.ChatPath, body); response.StatusCode != 502 || !gjson.Get(answer, "error.message").Exists() {
				t.Errorf("%.3s: %d %s", status, response.StatusCode, answer)
			}
		}
		worker.Close()
	}
}

func TestBodiesBeyondTheBudgetAreRefused(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	h := newTestAPI(t, setup{MaxBodyBytes: 1 << 20, Bodies: web.BodySettings{MaxInflightBodyBytes: 1 << 20}}, worker.URL)
	come, send := io.Pipe()
	left := make(chan struct{})
	go func() { // until the pipe is closed below
		request, _ := http.NewRequest(http.MethodPost, h.URL+testkit.ChatPath, come)
		request.ContentLength = 1 << 20
		if response, err := h.Client().Do(request); err == nil {
			response.Body.Close()
		}
		close(left)
	}()
	if _, err := send.Write(make([]byte, 900<<10)); err != nil {
		t.Fatal(err)
	}
	// Another one that comes earlier could take the room of the first.
	testkit.Eventually(t, 5*time.Second, "the budget is used up", func() bool { return h.bodies.Held() >= 900<<10 })
	response, answer := h.post(t, testkit.ChatPath, `{"a":"`+strings.Repeat("x", 200<<10)+`"}`)
	if response.StatusCode != 503 || response.Header.Get("Retry-After") != "1" || !strings.Contains(answer, "--max-inflight-body-bytes") {
		t.Errorf("%s: %s", response.Status, answer)
	}
	send.CloseWithError(io.ErrClosedPipe)
	<-left
	testkit.Eventually(t, 5*time.Second, "there is room again", func() bool {
		response, _ := h.post(t, testkit.ChatPath, `{"a":"`+strings.Repeat("x", 200<<10)+`"}`)
		return response.StatusCode == 200
	})
}

func TestModelsAreTheWorkers(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{}, worker.URL, worker.URL)
	response, err := h.Client().Get(h.URL + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	if n := gjson.GetBytes(body, "data.#").Int(); n != 1 || gjson.GetBytes(body, "data.0.max_model_len").Int() != 8192 {
		t.Errorf("%s", body)
	}
}

// TestOneModelIsFoundByItsName gives names with slashes, as clients write them.
func TestOneModelIsFoundByItsName(t *testing.T) {
	worker := testkit.NewFakeWorker(t, nil)
	worker.Close() // the names of its target are listed
	h := newTestAPIOf(t, setup{}, nil, kv.Target{URL: worker.URL, Models: []string{"m", "org/m"}})
	for path, want := range map[string]string{"m": "m", "org/m": "org/m", "org%2Fm": "org/m", "org": "", "org%2Fx": "", "m/": "", "/m": ""} {
		response, err := h.Client().Get(h.URL + "/v1/models/" + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if id := gjson.GetBytes(body, "id").Str; id != want || (response.StatusCode == http.StatusOK) != (want != "") {
			t.Errorf("%s: %d %s", path, response.StatusCode, body)
		}
	}
}

// TestTokensOfAnUnknownModel asks for tokens of models that are served, and of one that is not.
func TestTokensOfAnUnknownModel(t *testing.T) {
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"tokens":[1]}`) }))
	defer worker.Close()
	h := newTestAPI(t, setup{}, worker.URL)
	for _, path := range []string{"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"} {
		for body, want := range map[string]int{`{"prompt":"a"}`: 200, `{"model":"m","prompt":"a"}`: 200, `{"model":"x","prompt":"a"}`: 404} {
			if response, answer := h.post(t, path, body); response.StatusCode != want {
				t.Errorf("%s %s: %d %s", path, body, response.StatusCode, answer)
			}
		}
	}
}

func TestOtherInferencePathsAreForwarded(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.RequestURI()) })
	h := newTestAPIOf(t, setup{}, nil, kv.Target{URL: worker.URL, Engine: kv.EngineSGLang})
	for path := range tokens.Routes {
		if _, answer := h.post(t, path+"?x=1", `{"model":"m"}`); answer != path+"?x=1" {
			t.Errorf("%s was answered %s", path, answer)
		}
	}
	if response, _ := h.post(t, "/v1/nothing", `{}`); response.StatusCode != 404 {
		t.Errorf("an unknown path: %d", response.StatusCode)
	}
}

// TestCachedTokensThatSayNothingOfTheCacheAreLeftOut is about requests for
// which an engine computes a prompt anew.
func TestCachedTokensThatSayNothingOfTheCacheAreLeftOut(t *testing.T) {
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}`)
	}))
	defer worker.Close()
	for _, test := range []struct {
		fields string
		heard  bool
	}{
		{`"prompt":[1,2,3]`, true},
		{`"prompt":[1,2,3],"prompt_logprobs":null,"logprobs":1`, true},
		{`"prompt":[1,2,3],"prompt_logprobs":0`, false},
		{`"prompt":[1,2,3],"echo":true,"logprobs":1`, false},
		{`"prompt":[1,2,3],"echo":true`, true},
	} {
		h := newTestAPI(t, setup{}, worker.URL)
		if response, answer := h.post(t, "/v1/completions", "{"+test.fields+"}"); response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", response.Status, answer)
		}
		testkit.Eventually(t, 10*time.Second, "the booking has ended", func() bool { return h.router.Load(testkit.W0).InFlight == 0 })
		if heard := h.router.ReportsCached(testkit.W0); heard != test.heard {
			t.Errorf("%s: heard of cached tokens %v, want %v", test.fields, heard, test.heard)
		}
	}
}

// occupy books a request of that many prompt tokens on a worker.
func occupy(t testing.TB, r *router.Router, w uint64, tokens int) *router.Booking {
	t.Helper()
	b, err := r.Book(router.Request{NumTokens: tokens}, kv.WorkerKey{Worker: w})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestQueueErrorsReachTheClient(t *testing.T) {
	threshold := 0.5
	for _, test := range []struct{ limit, status int }{{1, 503}, {0, 529}} {
		rt := routertest.New(t, "round-robin", 0, routertest.WithSettings(func(s *router.Settings) {
			s.QueueSettings = router.QueueSettings{RouterQueueThreshold: &threshold, RouterQueueTimeout: time.Millisecond, RouterQueueLimit: test.limit}
		}))
		h := newTestAPIWith(t, rt, setup{}, nil, kv.Target{URL: "http://127.0.0.1:1", Models: []string{"m"}, MaxBatchedTokens: 16})
		full := occupy(t, h.router, 0, 9)
		defer full.End()
		response, err := http.Post(h.URL+"/v1/embeddings", "application/json", strings.NewReader(`{"model":"m","input":"x"}`))
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != test.status || response.Header.Get("Retry-After") == "" || !strings.Contains(string(body), `"service_unavailable"`) {
			t.Errorf("a queue of at most %d: %d, Retry-After %q, %s; want %d and a time", test.limit, response.StatusCode, response.Header.Get("Retry-After"), body, test.status)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestBusyThresholdEndpoint(t *testing.T) {
	h := newTestAPI(t, setup{}, "http://127.0.0.1:1")
	for _, step := range []struct {
		method, body string
		status       int
		answer       string
	}{
		{"GET", "", 200, `{"thresholds":[]}`},
		{"POST", `{"model":"m"}`, 200, `{"model":"m","active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":null,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_prefill_tokens_threshold":0}`, 200, `{"model":"m","active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_decode_blocks_threshold":0.85}`, 200, `{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}`},
		{"GET", "", 200, `{"thresholds":[{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}]}`},
		{"POST", `{"model":"other","active_decode_blocks_threshold":0.5}`, 404, ""},
		{"POST", `{"active_decode_blocks_threshold":0.5}`, 404, ""},
		{"POST", `{"model":"m","active_decode_blocks_threshold":1.5}`, 400, ""},
		{"POST", `{`, 400, ""},
	} {
		request, _ := http.NewRequest(step.method, h.URL+"/busy_threshold", strings.NewReader(step.body))
		request.Header.Set("Content-Type", "application/json")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != step.status || step.answer != "" && string(body) != step.answer {
			t.Errorf("%s %s: %d %s, want %d %s", step.method, step.body, response.StatusCode, body, step.status, step.answer)
		}
	}
	booking := occupy(t, h.router, 0, 11)
	response, err := http.Post(h.URL+"/v1/embeddings", "application/json", strings.NewReader(`{"model":"m","input":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("all busy: %d, Retry-After %q; want 503 and a time", response.StatusCode, response.Header.Get("Retry-After"))
	}
	booking.End()
	http.DefaultClient.CloseIdleConnections()
}
