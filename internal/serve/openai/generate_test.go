package openai

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/nativetest"
	"kvrouter/internal/testkit/radixtest"
)

// generateRoute is SGLang's own inference route.
const generateRoute = "/generate"

// capturedGenerateStream is the body of a stream of /generate as SGLang sent it.
func capturedGenerateStream(t testing.TB) []byte {
	t.Helper()
	capture, err := os.ReadFile("../proxy/testdata/sglang-generate-stream.txt")
	if err != nil {
		t.Fatal(err)
	}
	return capture[bytes.Index(capture, []byte("data: ")):]
}

// sglangTargets are SGLang workers 0, 1, ... at those addresses.
func sglangTargets(urls ...string) (targets []kv.Target) {
	for i, url := range urls {
		targets = append(targets, kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: url, Models: []string{"m"}, Engine: kv.EngineSGLang, Generation: 1})
	}
	return targets
}

// counts waits until the metrics page has those values: a request is counted after
// its answer.
func (h *testAPI) counts(t *testing.T, want testkit.MetricsLines) {
	t.Helper()
	testkit.Settles(t, func() error {
		lines := testkit.ReadMetricsPage(h.metrics(t))
		for series, value := range want {
			if lines[series] != value {
				return fmt.Errorf("%s is %v, want %v", series, lines[series], value)
			}
		}
		return nil
	})
}

// TestGenerateStreamIsRelayedByteForByte: and its usage is counted.
func TestGenerateStreamIsRelayedByteForByte(t *testing.T) {
	stream := capturedGenerateStream(t)
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for rest := stream; len(rest) > 0; {
			n := min(700, len(rest))
			w.Write(rest[:n])
			http.NewResponseController(w).Flush()
			rest = rest[n:]
		}
	})
	h := newTestAPIOf(t, setup{CollectUsage: true}, nil, sglangTargets(worker.URL)...)
	const body = `{"text": "The history", "sampling_params": {"max_new_tokens": 8}, "stream": true}`
	response, answer := h.post(t, generateRoute, body)
	if response.StatusCode != http.StatusOK || answer != string(stream) {
		t.Errorf("%s:\n%s", response.Status, answer)
	}
	if got := worker.Received(); len(got) != 1 || got[0] != body {
		t.Errorf("the worker got %q", got)
	}
	h.counts(t, testkit.MetricsLines{
		`kvrouter_prompt_tokens_total{worker_id="0"}`: 43, `kvrouter_output_tokens_total{worker_id="0"}`: 8,
		`kvrouter_time_to_first_token_seconds_count{worker_id="0"}`: 1,
	})
}

// TestGenerateIsRoutedByPrefix: with the tokens of its text or its input_ids; what
// the worker reports is compared with what was expected.
func TestGenerateIsRoutedByPrefix(t *testing.T) {
	nativetest.Library(t)
	model, err := builtinModel()
	if err != nil {
		t.Fatal(err)
	}
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"text":"x","meta_info":{"finish_reason":{"type":"length","length":1},"prompt_tokens":14,"completion_tokens":1,"cached_tokens":12}}`)
	})
	h := newTestAPIOf(t, setup{}, model, sglangTargets(worker.URL)...)
	text := "abcdefghijklmn"
	var ids []uint32
	for _, c := range []byte(text) {
		ids = append(ids, uint32(c))
	}
	blocks := []kv.StoredBlock{}
	for i, hash := range kv.HashBlocks(nil, ids, testkit.BlockSize, "", "") {
		blocks = append(blocks, kv.StoredBlock{Engine: uint64(100 + i), Local: hash})
	}
	if err := radixtest.Store(h.router.Index(), kv.WorkerKey{}, 0, false, blocks); err != nil {
		t.Fatal(err)
	}
	list := strings.ReplaceAll(fmt.Sprint(ids), " ", ",")
	for _, test := range []struct{ name, body, overlap string }{
		{"a text", fmt.Sprintf(`{"text":%q}`, text), "12"},
		{"tokens", fmt.Sprintf(`{"input_ids":%s}`, list), "12"},
		{"texts", fmt.Sprintf(`{"text":["b",%q]}`, text), "12"},
		{"lists of tokens", fmt.Sprintf(`{"input_ids":[[1],%s]}`, list), "12"},
		{"another text", `{"text":"xbcdefghijklmn"}`, "0"},
		{"with a salt", fmt.Sprintf(`{"text":%q,"cache_salt":"s"}`, text), "0"},
		{"of an adapter", fmt.Sprintf(`{"text":%q,"lora_path":"a"}`, text), "0"},
		{"with an image", fmt.Sprintf(`{"text":%q,"image_data":"data:,x"}`, text), "0"},
	} {
		response, answer := h.post(t, generateRoute, test.body)
		if got := response.Header.Get(web.HeaderOverlap); response.StatusCode != http.StatusOK || got != test.overlap {
			t.Errorf("%s: %s, %s tokens expected, want %s: %s", test.name, response.Status, got, test.overlap, answer)
		}
	}
	// Only single prompts with known tokens are compared.
	h.counts(t, testkit.MetricsLines{`kvrouter_predictions_total{result="exact",worker_id="0"}`: 2, `kvrouter_predictions_total{result="under",worker_id="0"}`: 3})
}

// TestAnEmptyPromptReachesNoSGLangServer: it would end the server's scheduler. vLLM
// refuses one in its own words.
func TestAnEmptyPromptReachesNoSGLangServer(t *testing.T) {
	nativetest.Library(t)
	model, err := builtinModel()
	if err != nil {
		t.Fatal(err)
	}
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	sglang := newTestAPIOf(t, setup{}, model, sglangTargets(worker.URL)...)
	vllm := newTestAPIOf(t, setup{}, model, kv.Target{URL: worker.URL})
	for _, test := range []struct {
		api        *testAPI
		path, body string
		status     int
	}{
		{sglang, generateRoute, `{"text":""}`, http.StatusBadRequest},
		{sglang, generateRoute, `{"text":["a",""]}`, http.StatusBadRequest},
		{sglang, generateRoute, `{"input_ids":[]}`, http.StatusBadRequest},
		{sglang, generateRoute, `{"input_ids":[[1],[]]}`, http.StatusBadRequest},
		{sglang, "/v1/completions", `{"prompt":""}`, http.StatusBadRequest},
		{sglang, "/v1/completions", `{"prompt":["a",""]}`, http.StatusBadRequest},
		{sglang, "/v1/completions", `{"prompt":["a","b"]}`, http.StatusOK},
		{sglang, generateRoute, `{"text":"a"}`, http.StatusOK},
		{vllm, "/v1/completions", `{"prompt":""}`, http.StatusOK},
	} {
		if response, answer := test.api.post(t, test.path, test.body); response.StatusCode != test.status {
			t.Errorf("%s %s: %s, want %d: %s", test.path, test.body, response.Status, test.status, answer)
		}
	}
}

// TestGenerateGoesToSGLangOnly: and all else to every worker.
func TestGenerateGoesToSGLangOnly(t *testing.T) {
	answer := func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) }
	vllm, sglang := testkit.NewFakeWorker(t, answer), testkit.NewFakeWorker(t, answer)
	targets := sglangTargets(vllm.URL, sglang.URL)
	targets[0].Engine = kv.EngineVLLM
	h := newTestAPIOf(t, setup{}, nil, targets...)
	for range 4 {
		h.post(t, generateRoute, `{"text":"a"}`)
	}
	if a, b := len(vllm.Received()), len(sglang.Received()); a != 0 || b != 4 {
		t.Errorf("%d went to vLLM, %d to SGLang", a, b)
	}
	for range 4 {
		h.post(t, "/v1/completions", `{"prompt":"a"}`)
	}
	if a, b := len(vllm.Received()), len(sglang.Received())-4; a != 2 || b != 2 {
		t.Errorf("of completions %d went to vLLM, %d to SGLang", a, b)
	}
	h.router.Down(targets[1].Key)
	if response, text := h.post(t, generateRoute, `{"text":"a"}`); response.StatusCode != http.StatusNotFound || !strings.Contains(text, errNoSGLang.Error()) {
		t.Errorf("without SGLang: %s %s", response.Status, text)
	}
	h.router.Down(targets[0].Key)
	if response, text := h.post(t, generateRoute, `{"text":"a"}`); response.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("without workers: %s %s", response.Status, text)
	}
}

// TestWhatAClientAbortedIsNotTriedElsewhere: SGLang answers it with 200. vLLM answers
// so only what it lets go of when it ends.
func TestWhatAClientAbortedIsNotTriedElsewhere(t *testing.T) {
	for _, engine := range []kv.Engine{kv.EngineSGLang, kv.EngineVLLM} {
		serve := func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == generateRoute {
				io.WriteString(w, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Aborted"},"prompt_tokens":1,"completion_tokens":0,"cached_tokens":0}}`)
				return
			}
			io.WriteString(w, `{"choices":[{"finish_reason":"abort"}]}`)
		}
		a, b := testkit.NewFakeWorker(t, serve), testkit.NewFakeWorker(t, serve)
		targets := sglangTargets(a.URL, b.URL)
		targets[0].Engine, targets[1].Engine = engine, engine
		h := newTestAPIOf(t, setup{}, nil, targets...)
		want, path := 1, generateRoute
		if engine == kv.EngineVLLM {
			want, path = 2, "/v1/completions"
		}
		h.post(t, path, `{"text":"a","prompt":"a"}`)
		if n := len(a.Received()) + len(b.Received()); n != want {
			t.Errorf("%s: %d workers got it, want %d", engine, n, want)
		}
	}
}

// TestTokensOfAnAnswerThatIsTriedAgainAreNotCounted: the client does not get it.
func TestTokensOfAnAnswerThatIsTriedAgainAreNotCounted(t *testing.T) {
	stopped := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"choices":[{"finish_reason":"abort"}],"usage":{"prompt_tokens":7,"completion_tokens":1}}`)
	})
	h := newTestAPI(t, setup{}, stopped.URL, testkit.NewFakeWorker(t, hangUp).URL)
	if response, _ := h.post(t, "/v1/completions", `{"prompt":"a"}`); response.StatusCode == http.StatusOK {
		t.Fatal(response.Status)
	}
	h.counts(t, testkit.MetricsLines{`kvrouter_prompt_tokens_total{worker_id="0"}`: 0, `kvrouter_prompt_tokens_total{worker_id="1"}`: 0})
}

// TestCachedTokensOfSeveralAnswersAreNotCompared: SGLang counts them for each, vLLM those of the last, which finds what
// the first has computed.
func TestCachedTokensOfSeveralAnswersAreNotCompared(t *testing.T) {
	nativetest.Library(t)
	model, err := builtinModel()
	if err != nil {
		t.Fatal(err)
	}
	for _, engine := range []kv.Engine{kv.EngineSGLang, kv.EngineVLLM} {
		worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, `{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}}`)
		})
		targets := sglangTargets(worker.URL)
		targets[0].Engine = engine
		h := newTestAPIOf(t, setup{}, model, targets...)
		for n, compared := range []float64{1, 1} { // of one answer they are
			h.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"abcdefghi","n":%d}`, n+1))
			h.counts(t, testkit.MetricsLines{`kvrouter_prompt_tokens_total{worker_id="0"}`: float64(9 * (n + 1)), `kvrouter_predictions_total{result="under",worker_id="0"}`: compared})
		}
	}
}
