package openai

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/keys"
)

// secret stands where a server's keys and paths do.
const secret = "sesame"

// worker is one that answers SGLang's short routes with 200, or as status says.
type worker struct {
	*httptest.Server
	status int

	mu    sync.Mutex // guards asked
	asked []string
}

func newWorker(t *testing.T, id, status int) *worker {
	t.Helper()
	w := &worker{status: status}
	w.Server = httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.mu.Lock()
		w.asked = append(w.asked, r.Method+" "+r.URL.RequestURI()+" "+string(body))
		w.mu.Unlock()
		out.WriteHeader(w.status)
		switch r.URL.Path {
		case "/model_info", "/get_model_info":
			fmt.Fprintf(out, `{"model_path": "m-%d"}`, id)
		case "/server_info", "/get_server_info":
			fmt.Fprintf(out, `{"api_key":%[1]q,"admin_api_key":%[1]q,"launch_command":%[1]q,"model_path":%[1]q,"some_new_token":%[1]q,"page_size":16,"version":"0.5.%[2]d","kv_events":{"endpoint_host":%[1]q},
				"internal_states":[{"api_key":%[1]q,"last_gen_throughput":1.50},{"last_gen_throughput":2}]}`, secret, id)
		case "/v1/loads":
			fmt.Fprintf(out, `{"version":"0.5.23","loads":[{"dp_rank":0,"num_running_reqs":%d},{"dp_rank":1,"worker_id":77},7]}`, id)
		}
	}))
	t.Cleanup(w.Close)
	return w
}

func (w *worker) questions() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.asked)
}

// site is the routes over workers 0, 1, ..., the last of which runs vLLM if mixed.
func site(t *testing.T, admin, mixed bool, workers ...*worker) (ask func(method, path, body string) (int, string)) {
	t.Helper()
	var targets []kv.Target
	for i, w := range workers {
		target := kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: w.URL, Engine: kv.EngineSGLang, Generation: 1, Ranks: 2}
		if mixed && i == len(workers)-1 {
			target.Engine = kv.EngineVLLM
		}
		targets = append(targets, target)
		target.Key.Rank = 1
		targets = append(targets, target)
	}
	h := newTestAPIOf(t, setup{AllowEngineAdmin: admin}, nil, targets...)
	return func(method, path, body string) (int, string) {
		out := httptest.NewRecorder()
		request := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		request.Host = "127.0.0.1"
		h.api.ServeHTTP(out, request)
		return out.Code, out.Body.String()
	}
}

func TestOneWorkerTellsOfItsModel(t *testing.T) {
	broken, well, vllm := newWorker(t, 0, 500), newWorker(t, 1, 200), newWorker(t, 2, 200)
	ask := site(t, false, true, broken, well, vllm)
	for _, path := range []string{"/model_info", "/get_model_info"} {
		if status, answer := ask("GET", path, ""); status != 200 || answer != `{"model_path": "m-1"}` {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	if asked := vllm.questions(); len(asked) != 0 {
		t.Errorf("vLLM was asked %q", asked)
	}
	if status, answer := site(t, false, false, broken)("GET", "/model_info", ""); status != 502 {
		t.Errorf("%d %s", status, answer)
	}
}

// TestServerInfoHasNoSecrets: only what is known to be harmless is shown, with its
// bytes as they are.
func TestServerInfoHasNoSecrets(t *testing.T) {
	for _, admin := range []bool{false, true} {
		ask := site(t, admin, false, newWorker(t, 3, 200))
		for _, path := range []string{"/server_info", "/get_server_info"} {
			status, answer := ask("GET", path, "")
			const want = `{"page_size":16,"version":"0.5.3","internal_states":[{"last_gen_throughput":1.50},{"last_gen_throughput":2}]}`
			if status != 200 || strings.Contains(answer, secret) || answer != want {
				t.Errorf("%s: %d %s", path, status, answer)
			}
		}
	}
}

// TestServerInfoOfARealServer: what of the capture is shown names no path and no key.
func TestServerInfoOfARealServer(t *testing.T) {
	capture, err := os.ReadFile("../../fleet/probe/testdata/sglang_server_info.json")
	if err != nil {
		t.Fatal(err)
	}
	shown := shownInfo(capture)
	for _, want := range []string{"version", "page_size", "max_total_num_tokens", "served_model_name", "internal_states.0.last_gen_throughput"} {
		if !gjson.GetBytes(shown, want).Exists() {
			t.Errorf("%s is not shown", want)
		}
	}
	for _, hidden := range []string{"api_key", "launch_command", "model_path", "kv_events", "watermark_key", "31000"} {
		if strings.Contains(string(shown), hidden) {
			t.Errorf("%s is shown: %s", hidden, shown)
		}
	}
}

func TestServerInfoOfOtherWorkersIsAnAdminPath(t *testing.T) {
	ask := site(t, true, true, newWorker(t, 0, 200))
	if status, answer := ask("GET", "/server_info", ""); status != 200 || gjson.Get(answer, "0.answer.page_size").Int() != 16 {
		t.Errorf("%d %s", status, answer)
	}
	sglang, vllm := newWorker(t, 0, 200), newWorker(t, 1, 200)
	ask = site(t, true, true, sglang, vllm)
	for i, path := range []string{"/server_info", "/get_server_info"} { // whose answer would be shown whole
		status, answer := ask("POST", path, "")
		if status != 200 || gjson.Get(answer, "#.worker_id").Raw != "[1]" || len(sglang.questions()) != 0 || len(vllm.questions()) != i+1 {
			t.Errorf("POST %s: %d %s", path, status, answer)
		}
	}
}

func TestLoadsAreThoseOfAllRanks(t *testing.T) {
	ask := site(t, false, true, newWorker(t, 0, 200), newWorker(t, 1, 500), newWorker(t, 2, 200), newWorker(t, 3, 200))
	status, answer := ask("GET", "/v1/loads?include=core", "")
	var got []string
	gjson.Get(answer, "loads").ForEach(func(_, load gjson.Result) bool {
		got = append(got, load.Raw)
		return true
	})
	want := []string{`{"worker_id":0,"dp_rank":0,"num_running_reqs":0}`, `{"worker_id":0,"dp_rank":1}`, `{"worker_id":2,"dp_rank":0,"num_running_reqs":2}`, `{"worker_id":2,"dp_rank":1}`}
	if status != 200 || !slices.Equal(got, want) || gjson.Get(answer, "version").Str != "0.5.23" || gjson.Get(answer, "timestamp").Str == "" {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := ask("GET", "/v1/loads?format=prometheus", ""); status != 400 {
		t.Errorf("%d %s", status, answer)
	}
}

func TestHealthGenerateAsksWorkers(t *testing.T) {
	for _, test := range []struct {
		name    string
		workers []*worker
		status  int
	}{
		{"one of two generates", []*worker{newWorker(t, 0, 503), newWorker(t, 1, 200)}, 200},
		{"none generates", []*worker{newWorker(t, 0, 503), newWorker(t, 1, 503)}, 503},
		{"nobody is there", nil, 503},
	} {
		t.Run(test.name, func(t *testing.T) {
			if status, answer := site(t, false, false, test.workers...)("GET", "/health_generate", ""); status != test.status || status == 200 && answer != "" {
				t.Errorf("%d %s", status, answer)
			}
		})
	}
}

func TestAbort(t *testing.T) {
	mine := keys.Owner(0).Scoped("mine-0001")
	for _, test := range []struct {
		name, body string
		admin      bool
		status     int
		sent       []string // to each SGLang worker
	}{
		{"a request, which the client or an engine has named", `{"rid":"mine-0001","x":1}`, false, 200, []string{`{"rid":"` + mine + `"}`, `{"rid":"mine-0001"}`}},
		{"a name of an answer", `{"rid":"` + mine + `"}`, false, 200, []string{`{"rid":"` + mine + `"}`}},
		{"all", `{"abort_all":true}`, false, 403, nil},
		{"all, allowed", `{"abort_all":true,"rid":"x"}`, true, 200, []string{`{"abort_all":true}`}},
		{"no name", `{"rid":""}`, false, 400, nil},
		{"a name that others begin with", `{"rid":"a"}`, false, 200, []string{`{"rid":"` + keys.Owner(0).Scoped("a") + `"}`}},
		{"a list", `{"rid":["mine-0001"]}`, false, 400, nil},
		{"nothing", ``, false, 400, nil},
		{"too much", `{"rid":"` + strings.Repeat("x", bodyLimit) + `"}`, false, 413, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, b, vllm := newWorker(t, 0, 200), newWorker(t, 1, 200), newWorker(t, 2, 200)
			status, answer := site(t, test.admin, true, a, b, vllm)("POST", "/abort_request", test.body)
			if status != test.status || status == 200 && answer != "" {
				t.Errorf("%d %s", status, answer)
			}
			var want []string
			for _, sent := range test.sent {
				want = append(want, "POST /abort_request "+sent)
			}
			if !slices.Equal(a.questions(), want) || !slices.Equal(b.questions(), want) || len(vllm.questions()) != 0 {
				t.Errorf("%q, %q and %q were asked", a.questions(), b.questions(), vllm.questions())
			}
		})
	}
	if status, answer := site(t, false, false, newWorker(t, 0, 200), newWorker(t, 1, 500))("POST", "/abort_request", `{"rid":"mine-0001"}`); status != 502 {
		t.Errorf("one failed: %d %s", status, answer)
	}
}

func TestFlushGoesToSGLangWorkers(t *testing.T) {
	sglang, vllm := newWorker(t, 0, 200), newWorker(t, 1, 200)
	status, answer := site(t, true, true, sglang, vllm)("POST", "/flush_cache", "")
	if status != 200 || gjson.Get(answer, "#.worker_id").Raw != "[0]" || len(sglang.questions()) != 1 || len(vllm.questions()) != 0 {
		t.Errorf("%d %s", status, answer) // both ranks of the one are one server
	}
	if status, answer := site(t, true, true, newWorker(t, 0, 200))("POST", "/flush_cache", ""); status != 404 || !strings.Contains(answer, errNoSGLang.Error()) {
		t.Errorf("%d %s", status, answer)
	}
}

func TestPagesOfOtherSitesAbortNothing(t *testing.T) {
	w := newWorker(t, 0, 200)
	h := newTestAPIOf(t, setup{}, nil, kv.Target{URL: w.URL, Engine: kv.EngineSGLang})
	out := httptest.NewRecorder()
	request := httptest.NewRequestWithContext(t.Context(), "POST", "/abort_request", strings.NewReader(`{"rid":"mine-0001"}`))
	request.Host = "127.0.0.1"
	request.Header.Set("Origin", "http://elsewhere")
	h.api.ServeHTTP(out, request)
	if out.Code != 403 || len(w.questions()) != 0 {
		t.Errorf("%d, %d questions", out.Code, len(w.questions()))
	}
}

func FuzzShownInfo(f *testing.F) {
	f.Add([]byte(`{"page_size":16,"internal_states":[{"last_gen_throughput":1},3]}`))
	f.Add([]byte(`{"internal_states":{"a":1}}`))
	f.Fuzz(func(t *testing.T, answer []byte) {
		if !gjson.ValidBytes(answer) {
			return
		}
		if shown := shownInfo(answer); !gjson.ValidBytes(shown) {
			t.Fatalf("%q is shown as %q", answer, shown)
		}
	})
}
