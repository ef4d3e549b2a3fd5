package openai

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/testkit"
)

const abortsPath = "/inference/v1/abort_requests"

// vllmWorker answers vLLM's short routes, and keeps what it is asked.
type vllmWorker struct {
	*httptest.Server
	mu    sync.Mutex // guards asked
	asked []string
}

// newVLLMWorker starts one that answers each path with a body; those without one are its 404.
func newVLLMWorker(t *testing.T, answers map[string]string) *vllmWorker {
	t.Helper()
	w := &vllmWorker{}
	w.Server = httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.mu.Lock()
		w.asked = append(w.asked, r.URL.Path+" "+string(body))
		w.mu.Unlock()
		answer, ok := answers[r.URL.Path]
		if !ok {
			out.WriteHeader(http.StatusNotFound)
			answer = `{"detail":"Not Found"}`
		}
		io.WriteString(out, answer)
	}))
	t.Cleanup(w.Close)
	return w
}

func (w *vllmWorker) questions() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.asked)
}

// get returns the status and the body of an answer.
func (h *testAPI) get(t *testing.T, path string) (int, string) {
	t.Helper()
	response, err := h.Client().Get(h.URL + path)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	return response.StatusCode, string(body)
}

func TestPingTellsWhetherAWorkerIsReady(t *testing.T) {
	for want, workers := range map[int][]string{http.StatusOK: {deadURL(t)}, http.StatusServiceUnavailable: nil} {
		h := newTestAPI(t, setup{APIKey: []string{"key"}}, workers...) // SageMaker has none
		if status, answer := h.get(t, "/ping"); status != want || answer != "" {
			t.Errorf("GET: %d %s", status, answer)
		}
		if response, answer := h.post(t, "/ping", ""); response.StatusCode != want || answer != "" {
			t.Errorf("POST: %d %s", response.StatusCode, answer)
		}
	}
}

func TestTokenizerInfoIsTheFirstWorkers(t *testing.T) {
	large := `{"chat_template":"` + strings.Repeat("x", 2*answerLimit) + `"}`
	with := newVLLMWorker(t, map[string]string{"/tokenizer_info": large})
	without := newVLLMWorker(t, nil)
	for _, c := range []struct {
		workers []string
		status  int
		answer  string
	}{
		{[]string{deadURL(t), with.URL}, 200, large},
		{[]string{without.URL}, 404, `{"detail":"Not Found"}`},
		{[]string{deadURL(t)}, 502, ""},
		{nil, 503, ""},
	} {
		h := newTestAPI(t, setup{}, c.workers...)
		if status, answer := h.get(t, "/tokenizer_info"); status != c.status || c.answer != "" && answer != c.answer {
			t.Errorf("%v: %d %.200s", c.workers, status, answer)
		}
	}
	h := newTestAPIOf(t, setup{}, nil, sglangTargets(with.URL)...)
	if status, answer := h.get(t, "/tokenizer_info"); status != 404 || !strings.Contains(answer, errNoVLLM.Error()) {
		t.Errorf("SGLang: %d %s", status, answer)
	}
}

func TestLoadIsTheSumOfAllWorkers(t *testing.T) {
	load := func(body string) string { return newVLLMWorker(t, map[string]string{"/load": body}).URL }
	for _, c := range []struct {
		workers []string
		status  int
		sum     string
	}{
		{[]string{load(`{"server_load":3}`), load(`{"server_load":4}`), deadURL(t)}, 200, "7"},
		{[]string{load(`{"server_load":0}`), load(`{"server_load":"x"}`), load(``)}, 200, "0"},
		{[]string{load(`{"server_load":1e300}`), load(`{"server_load":-5}`)}, 200, "9007199254740992"},
		{[]string{load(`{}`)}, 502, ""},
	} {
		h := newTestAPI(t, setup{}, c.workers...)
		if status, answer := h.get(t, "/load"); status != c.status || gjson.Get(answer, "server_load").Raw != c.sum {
			t.Errorf("%s: %d %s", c.sum, status, answer)
		}
	}
}

// TestRequestsOfVLLMAreAborted holds that a client without a name of its own aborts by any name,
// and a key what it has named and read, and nothing else.
func TestRequestsOfVLLMAreAborted(t *testing.T) {
	own, others := keys.Owner(0), keys.Owner(1)
	for name, want := range map[string][]string{
		"generate-tokens-a":                           {"generate-tokens-" + own.Scoped("a")},
		"generate-tokens-" + own.Scoped("a"):          {"generate-tokens-" + own.Scoped("a")},
		"chatcmpl-" + own.Scoped("a"):                 {"chatcmpl-" + own.Scoped("a")},
		"cmpl-a-1":                                    {"cmpl-" + own.Scoped("a") + "-1"},
		"cmpl-" + own.Scoped("a") + "-1":              {"cmpl-" + own.Scoped("a") + "-1"},
		own.Scoped("resp_1"):                          {own.Scoped("resp_1")},
		"resp_1":                                      {own.Scoped("resp_1")},
		"generate-tokens-" + others.Scoped("a"):       nil,
		"cmpl-" + others.Scoped("a") + "-1":           nil,
		"generate-tokens-generate-tokens-a":           nil,
		others.Scoped("a") + "-" + own.Scoped("")[1:]: nil,
		"": nil,
	} {
		names := scopedNames(own, name)
		for _, one := range want {
			if !slices.Contains(names, one) {
				t.Errorf("%q is not %q: %q", name, one, names)
			}
		}
		for _, running := range []string{others.Scoped("a"), others.Scoped("1"), others.Scoped(own.Scoped("a"))} {
			for _, prefix := range idPrefixes {
				for _, part := range []string{"", "-0", "-1", "_1"} {
					if slices.Contains(names, prefix+running+part) {
						t.Errorf("%q aborts %q", name, prefix+running+part)
					}
				}
			}
		}
	}

	a, b, sglang := newVLLMWorker(t, map[string]string{abortsPath: ""}), newVLLMWorker(t, map[string]string{abortsPath: ""}), newVLLMWorker(t, nil)
	targets := targetsAt(a.URL, b.URL, sglang.URL)
	targets[2].Engine = kv.EngineSGLang
	h := newTestAPIOf(t, setup{}, nil, targets...)
	for _, c := range []struct {
		body   string
		status int
		sent   string
	}{
		{`{"request_ids":["cmpl-1-0","\u0062"],"x":1}`, 200, `{"request_ids":["cmpl-1-0","b"]}`},
		{`{"request_ids":[]}`, 200, ""},
		{`{"request_ids":"cmpl-1"}`, 400, ""},
		{`{"request_ids":["a",1]}`, 400, ""},
		{`{"request_ids":null}`, 400, ""},
		{`{}`, 400, ""},
		{`[`, 400, ""},
		{`{"request_ids":["` + strings.Repeat("x", abortLimit) + `"]}`, 413, ""},
	} {
		before := len(a.questions())
		response, answer := h.post(t, abortsPath, c.body)
		if response.StatusCode != c.status || c.status == 200 && answer != "" {
			t.Errorf("%.80s: %d %s", c.body, response.StatusCode, answer)
		}
		for _, w := range []*vllmWorker{a, b} {
			if got := w.questions()[before:]; c.sent == "" && len(got) != 0 || c.sent != "" && !slices.Equal(got, []string{abortsPath + " " + c.sent}) {
				t.Errorf("%.80s became %q", c.body, got)
			}
		}
	}
	if got := sglang.questions(); len(got) != 0 {
		t.Errorf("SGLang was asked %q", got)
	}
	off := newVLLMWorker(t, nil) // without --enable-scale-out
	if response, answer := newTestAPI(t, setup{}, off.URL).post(t, abortsPath, `{"request_ids":["a"]}`); response.StatusCode != 502 {
		t.Errorf("a worker without the route: %d %s", response.StatusCode, answer)
	}
}

// TestAnAbortedAnswerIsNotTriedElsewhere has a client abort a request that two workers could
// answer. Others that end so are those of a worker that shuts down.
func TestAnAbortedAnswerIsNotTriedElsewhere(t *testing.T) {
	for _, config := range []setup{{}, {APIKey: []string{"key-a", "key-b"}}} {
		for _, c := range []struct {
			id, abort string
			tries     int
		}{{"mine", "cmpl-mine-0", 1}, {"mine", "cmpl-yours-0", 2}, {"m", "cmpl-mine-0", 2}} {
			var h *testAPI
			serve := func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == completionsPath {
					h.post(t, abortsPath, fmt.Sprintf(`{"request_ids":[%q]}`, c.abort), "Authorization", "Bearer key-a")
					io.WriteString(w, `{"choices":[{"finish_reason":"abort"}]}`)
				}
			}
			a, b := testkit.NewFakeWorker(t, serve), testkit.NewFakeWorker(t, serve)
			h = newTestAPI(t, config, a.URL, b.URL)
			h.post(t, completionsPath, `{"prompt":"a"}`, web.HeaderRequest, c.id, "Authorization", "Bearer key-a")
			tries := 0
			for _, body := range append(a.Received(), b.Received()...) {
				if strings.Contains(body, "prompt") {
					tries++
				}
			}
			if tries != c.tries {
				t.Errorf("%s of %s: sent %d times, want %d", c.abort, c.id, tries, c.tries)
			}
		}
	}
}

// TestInvocationsAreRoutedAsWhatTheyAre sends requests of other routes to SageMaker's: they arrive
// there, and are counted as those of their routes.
func TestInvocationsAreRoutedAsWhatTheyAre(t *testing.T) {
	worker := newVLLMWorker(t, map[string]string{"/invocations": "{}"})
	h := newTestAPI(t, setup{}, worker.URL)
	for route, body := range map[string]string{
		testkit.ChatPath: `{"prompt":"a","messages":[]}`, completionsPath: `{"prompt":"a","input":"a"}`, "/invocations": `{"input":"a"}`,
	} {
		if response, answer := h.post(t, "/invocations", body); response.StatusCode != 200 {
			t.Errorf("%s: %d %s", body, response.StatusCode, answer)
		}
		if got := worker.questions(); got[len(got)-1] != "/invocations "+body {
			t.Errorf("%s arrived as %s", body, got[len(got)-1])
		}
		if want := fmt.Sprintf(`kvrouter_request_duration_seconds_count{route=%q} 1`, route); !strings.Contains(h.metrics(t), want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
}
