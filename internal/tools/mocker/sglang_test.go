package mocker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/engine"
)

const testPage = 16 // tokens; with the built-in model as many bytes

// testWorkers starts so many SGLang workers, which end with the test.
func testWorkers(t *testing.T, n int, tweak func(*Settings)) []*Worker {
	t.Helper()
	model, err := OpenBuiltinModel()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(model.Close)
	cfg := testkit.Defaults[Settings]()
	cfg.API, cfg.SpeedupRatio, cfg.ServedModelName, cfg.BlockSize, cfg.KVEvents = "sglang", 0, ModelName, testPage, true
	cfg.NumGPUBlocks, cfg.Parts = 512, make([]kv.Disagg, n)
	if tweak != nil {
		tweak(&cfg)
	}
	ranks := cfg.DataParallelSize
	ports := testkit.FreePorts(t, n+3*n*ranks)
	cfg.Ports = process.Ports{HTTP: ports, KVEvents: ports + n, KVReplay: ports + n + n*ranks, Load: ports + n + 2*n*ranks, Ranks: ranks}
	for i := range cfg.Parts {
		if cfg.Parts[i].Role == kv.RolePrefill {
			cfg.Parts[i].Bootstrap = kv.Bootstrap{Host: "127.0.0.1", Port: uint16(ports + i)}
		}
	}
	if err := cfg.Validate(n); err != nil {
		t.Fatal(err)
	}
	m, err := NewMocker(cfg, model, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var workers []*Worker
	for i := range n {
		w, err := m.Start(i)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			http.DefaultClient.CloseIdleConnections()
			w.End(errors.New("the test has ended"))
			<-w.Ended()
		})
		workers = append(workers, w)
	}
	return workers
}

func testWorker(t *testing.T, tweak func(*Settings)) *Worker {
	t.Helper()
	return testWorkers(t, 1, tweak)[0]
}

// url is where the worker serves path.
func (w *Worker) url(path string) string { return "http://" + w.listener.Addr().String() + path }

// ask sends a request with a JSON body, or without one a GET.
func (w *Worker) ask(t testing.TB, path, body string, headers ...string) (status int, answer string) {
	t.Helper()
	return w.askWith(t, t.Context(), path, body, headers...)
}

func (w *Worker) askWith(t testing.TB, ctx context.Context, path, body string, headers ...string) (status int, answer string) {
	t.Helper()
	method := http.MethodPost
	if body == "" {
		method = http.MethodGet
	}
	in, err := http.NewRequestWithContext(ctx, method, w.url(path), strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return 0, ""
	}
	in.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		in.Header.Set(headers[i], headers[i+1])
	}
	out, err := http.DefaultClient.Do(in)
	if err != nil {
		return 0, err.Error()
	}
	defer out.Body.Close()
	text, _ := io.ReadAll(out.Body)
	return out.StatusCode, string(text)
}

// captured is a file of what a real server has answered.
func captured(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "sglang", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// shape maps the path of each value in a JSON text to its type; lists have the shape of
// their first element.
func shape(v gjson.Result) map[string]string {
	out := map[string]string{}
	var visit func(path string, v gjson.Result)
	visit = func(path string, v gjson.Result) {
		switch {
		case v.IsObject():
			v.ForEach(func(key, value gjson.Result) bool {
				visit(path+"."+key.Str, value)
				return true
			})
		case v.IsArray() && v.Get("0").Exists():
			visit(path+"[]", v.Get("0"))
		case v.IsBool():
			out[path] = "bool"
		case v.IsArray():
			out[path] = "list"
		default:
			out[path] = v.Type.String()
		}
	}
	visit("", v)
	return out
}

// differ reports what of two shapes differs; null is of any type. With part the second
// may have more.
func differ(got, want map[string]string, part bool) (list []string) {
	for path, kind := range got {
		switch other, has := want[path]; {
		case !has:
			list = append(list, path+" is not the server's")
		case other != kind && other != "Null" && kind != "Null":
			list = append(list, fmt.Sprintf("%s is %s, the server's %s", path, kind, other))
		}
	}
	for path := range want {
		if _, has := got[path]; !has && !part {
			list = append(list, path+" is missing")
		}
	}
	slices.Sort(list)
	return list
}

func TestSGLangAnswersAreAsCaptured(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.SpeedupRatio = 1 }) // tokens come one by one
	prompt := strings.Repeat("The history of the city of Rome. ", 4)
	for _, c := range []struct {
		path, body, file string
		part             bool
	}{
		{"/v1/chat/completions", `{"model":"MODEL","messages":[{"role":"user","content":"Hi"}],"max_tokens":20,"temperature":0}`, "chat.json", false},
		{"/generate", `{"input_ids":[1,38,75,112,149,186,223,3,77,24],"sampling_params":{"temperature":0,"max_new_tokens":8}}`, "generate.json", false},
		{"/get_model_info", "", "model_info.json", false},
		{"/model_info", "", "model_info.json", false},
		{"/get_server_info", "", "server_info.json", true},
		{"/server_info", "", "server_info.json", true},
	} {
		status, answer := w.ask(t, c.path, c.body)
		if problems := differ(shape(gjson.Parse(answer)), shape(gjson.Parse(captured(t, c.file))), c.part); status != 200 || len(problems) > 0 {
			if c.part {
				problems = slices.DeleteFunc(problems, func(p string) bool { return strings.HasPrefix(p, ".kv_events.load_") }) // were off
			}
			if len(problems) > 0 {
				t.Errorf("%s: %d, %q\n%s", c.path, status, problems, answer)
			}
		}
	}
	_, loads := w.ask(t, "/v1/loads", "")
	want := shape(gjson.Parse(captured(t, "loads.json")))
	delete(want, ".loads[].decode_moments[]")
	if problems := differ(shape(gjson.Parse(loads)), want, false); len(problems) > 0 {
		t.Errorf("/v1/loads: %q\n%s", problems, loads)
	}
	if _, core := w.ask(t, "/v1/loads?include=core", ""); gjson.Get(core, "loads.0.memory").Exists() || gjson.Get(core, "loads.0.queues").Exists() || !gjson.Get(core, "loads.0.num_running_reqs").Exists() {
		t.Errorf("include=core: %s", core)
	}
	if _, text := w.ask(t, "/flush_cache", "{}"); text != captured(t, "flush_cache.txt") {
		t.Errorf("/flush_cache: %q", text)
	}

	// The first event of a stream has a time that the others lack, the last has more.
	body := fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":40},"stream":true}`, prompt)
	w.ask(t, "/generate", body) // what comes again is cached, as in the capture
	_, own := w.ask(t, "/generate", body)
	got, real := streamOf(own), streamOf(captured(t, "generate_stream.txt"))
	if problems := differ(shape(got[0]), shape(real[0]), false); len(problems) > 0 {
		t.Errorf("first event: %q\n%s", problems, got[0].Raw)
	}
	if problems := differ(shape(got[len(got)-1]), shape(real[len(real)-1]), false); len(problems) > 0 {
		t.Errorf("last event: %q\n%s", problems, got[len(got)-1].Raw)
	}
	for i, event := range got {
		if whole := got[len(got)-1].Get("text").Str; !strings.HasPrefix(whole, event.Get("text").Str) || i > 0 && len(event.Get("output_ids").Array()) <= len(got[i-1].Get("output_ids").Array()) {
			t.Errorf("event %d: %q of %q", i, event.Get("text").Str, whole)
		}
	}
	if !strings.HasSuffix(own, "}}\n\ndata: [DONE]\n\n") {
		t.Errorf("the end is %q", own[len(own)-40:])
	}
}

// TestSGLangCompletionsStreamTheirTokensAsCaptured compares the streams of completions with token
// ids: which members an event has, and in which order.
func TestSGLangCompletionsStreamTheirTokensAsCaptured(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.SpeedupRatio = 1 }) // tokens come one by one
	_, own := w.ask(t, "/v1/completions", `{"model":"m","prompt":"Hi","max_tokens":40,"stream":true,"return_token_ids":true,"stream_options":{"include_usage":true}}`)
	got, real := streamOf(own), streamOf(captured(t, "completion_stream.txt"))
	numbers := regexp.MustCompile(`0(,0)*`)
	texts := regexp.MustCompile(`"text":"[^"]*"`)
	form := func(event gjson.Result) string {
		return texts.ReplaceAllString(numbers.ReplaceAllString(strings.ReplaceAll(shapeText(event), event.Get("model").Raw, `"m"`), "0"), `"text":""`)
	}
	for name, place := range map[string]func(events []gjson.Result) gjson.Result{
		"first":  func(events []gjson.Result) gjson.Result { return events[0] },
		"second": func(events []gjson.Result) gjson.Result { return events[1] },
		"last":   func(events []gjson.Result) gjson.Result { return events[len(events)-2] },
		"usage":  func(events []gjson.Result) gjson.Result { return events[len(events)-1] },
	} {
		if own, want := form(place(got)), form(place(real)); own != want {
			t.Errorf("%s event\n%s\nthe server's\n%s", name, own, want)
		}
	}
	var ids int
	for _, event := range got {
		ids += len(event.Get("choices.0.token_ids").Array())
	}
	if want := got[len(got)-1].Get("usage.completion_tokens").Int(); int64(ids) != want {
		t.Errorf("%d ids of %d tokens", ids, want)
	}
}

// streamOf returns a stream's events but the last, which has no data.
func streamOf(text string) (events []gjson.Result) {
	for event := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		if data := strings.TrimPrefix(event, "data: "); data != "[DONE]" {
			events = append(events, gjson.Parse(data))
		}
	}
	return events
}

// TestSGLangStreamsHaveItsShape pins what no capture has; it follows from SGLang's source.
func TestSGLangStreamsHaveItsShape(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.SpeedupRatio = 1 }) // tokens come one by one
	const usage = `{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":0},"reasoning_tokens":0,"completion_tokens_details":null}`
	head := func(object, choices string) string {
		return `{"id":"?","object":"` + object + `","created":0,"model":"any","choices":[` + choices + `]`
	}
	const chat, text = "chat.completion.chunk", "text_completion"
	delta := func(fields, end string) string {
		return `{"index":0,"delta":{"reasoning_content":null` + fields + `},"logprobs":null,` + end + `}`
	}
	const open, length = `"finish_reason":null,"matched_stop":null`, `"finish_reason":"length","matched_stop":null`
	for _, c := range []struct {
		path, options string
		want          []string // first, one between, and the last ones
	}{
		{"/v1/chat/completions", "", []string{
			head(chat, delta(`,"role":"assistant","content":""`, open)) + "}", head(chat, delta(`,"content":"?"`, open)) + "}", head(chat, delta("", length)) + "}"}},
		{"/v1/chat/completions", `,"stream_options":{"include_usage":true}`, []string{
			head(chat, delta(`,"role":"assistant","content":""`, open)) + "}", head(chat, delta(`,"content":"?"`, open)) + "}", head(chat, delta("", length)) + "}", head(chat, "") + `,"usage":` + usage + "}"}},
		{"/v1/chat/completions", `,"stream_options":{"continuous_usage_stats":true}`, []string{
			head(chat, delta(`,"role":"assistant","content":""`, open)) + "}", head(chat, delta(`,"content":"?"`, open)) + `,"usage":` + usage + "}", head(chat, delta("", length)) + "}"}},
		{"/v1/completions", `,"stream_options":{"include_usage":true}`, []string{
			head(text, `{"index":0,"text":"?","logprobs":null,`+open+`}`) + `,"usage":null}`, head(text, `{"index":0,"text":"?","logprobs":null,`+open+`}`) + `,"usage":null}`,
			head(text, `{"index":0,"text":"?","logprobs":null,`+length+`}`) + `,"usage":null}`,
			head(text, "") + `,"usage":` + strings.Replace(usage, `,"completion_tokens_details":null`, "", 1) + "}"}},
	} {
		_, answer := w.ask(t, c.path, `{"model":"any","messages":[{"role":"user","content":"Hi"}],"prompt":"Hi","max_tokens":40,"stream":true`+c.options+`}`)
		events := streamOf(answer)
		got := []string{shapeText(events[0]), shapeText(events[1])}
		for _, event := range events[len(events)-len(c.want)+2:] {
			got = append(got, shapeText(event))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s %s\ngot  %s\nwant %s", c.path, c.options, strings.Join(got, "\n     "), strings.Join(c.want, "\n     "))
		}
	}
}

// shapeText is an event with what differs from one to the next taken out.
func shapeText(v gjson.Result) string {
	var out bytes.Buffer
	var write func(key string, v gjson.Result)
	write = func(key string, v gjson.Result) {
		switch {
		case v.IsObject() || v.IsArray():
			out.WriteByte(v.Raw[0])
			first := true
			v.ForEach(func(name, value gjson.Result) bool {
				if !first {
					out.WriteByte(',')
				}
				if first = false; v.IsObject() {
					fmt.Fprintf(&out, "%q:", name.Str)
				}
				write(name.Str, value)
				return true
			})
			out.WriteByte(v.Raw[len(v.Raw)-1])
		case v.Type == gjson.Number:
			out.WriteByte('0')
		case key == "id" || (key == "content" || key == "text") && v.Str != "":
			out.WriteString(`"?"`)
		default:
			out.WriteString(v.Raw)
		}
	}
	write("", v)
	return out.String()
}

func TestSGLangPagesSayWhatFollowersNeed(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.DataParallelSize, s.Lora = 2, []string{"sql"} })
	for _, path := range []string{"/health", "/health_generate", "/ping", "/ready"} {
		if status, answer := w.ask(t, path, ""); status != 200 || answer != "" {
			t.Errorf("%s: %d %q", path, status, answer)
		}
	}
	for _, path := range []string{"/kv_event_sources", "/load", "/version", "/livez", "/get_load"} {
		if status, answer := w.ask(t, path, ""); status != 404 || answer != `{"detail":"Not Found"}` {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	for _, path := range []string{"/v1/chat/completions/render", "/v1/completions/render", "/reset_prefix_cache", "/v1/load_lora_adapter"} {
		if status, answer := w.ask(t, path, "{}"); status != 404 {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	_, info := w.ask(t, "/server_info", "")
	ports := w.cfg.Ports
	for path, want := range map[string]string{
		"disaggregation_mode": "null", "disaggregation_bootstrap_port": "8998", "dist_init_addr": "", "page_size": "16", "dp_size": "2", "served_model_name": ModelName,
		"max_total_num_tokens": "8192", "version": "0.5.23", "internal_states.#": "2", "kv_events.endpoint_host": "*", "kv_events.topic": "kv-events",
		"kv_events.block_size": "16", "kv_events.dp_size": "2", "kv_events.load_topic": "load", "kv_events.endpoint_port_base": fmt.Sprint(ports.KVEvents),
		"kv_events.replay_endpoint_port_base": fmt.Sprint(ports.KVReplay), "kv_events.load_endpoint_port_base": fmt.Sprint(ports.Load),
	} {
		if got := gjson.Get(info, path); got.String() != want {
			t.Errorf("%s is %s, want %s", path, got.Raw, want)
		}
	}
	_, models := w.ask(t, "/v1/models", "")
	if got := gjson.Get(models, "data.#.id").Raw; got != `["mock","sql"]` || gjson.Get(models, "data.0.owned_by").Str != "sglang" || gjson.Get(models, "data.0.max_model_len").Int() != 8192 ||
		gjson.Get(models, "data.0.root").Str != "mock" || gjson.Get(models, "data.0.permission").Exists() {
		t.Errorf("%s", models)
	}
	for range 4 {
		w.ask(t, "/generate", `{"text":"`+strings.Repeat("x", 40)+`","sampling_params":{"max_new_tokens":2}}`)
	}
	testkit.Eventually(t, 10*time.Second, "an idle engine", func() bool { return w.Ranks[0].CurrentLoad() == Load{} && w.Ranks[1].CurrentLoad() == Load{} })
	_, page := w.ask(t, "/metrics", "")
	for _, want := range []string{
		`sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="mock",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0`,
		`sglang:num_queue_reqs{dp_rank="1",`, `sglang:generation_tokens_total{dp_rank="0",engine_type="unified",model_name="mock",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 4`,
		`sglang:kv_evictable_tokens{dp_rank="1",engine_type="unified",model_name="mock",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 32`,
		`tp_rank="0",mode="device_hit"} 32`, "# TYPE sglang:token_usage gauge",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("no %s in\n%s", want, page)
		}
	}
	off := testWorker(t, func(s *Settings) { s.KVEvents = false })
	if _, info := off.ask(t, "/server_info", ""); gjson.Get(info, "kv_events").Raw != "null" {
		t.Errorf("without events: %s", gjson.Get(info, "kv_events").Raw)
	}
	if _, page := off.ask(t, "/metrics", ""); strings.Contains(page, "dp_rank") {
		t.Error("one rank has no number")
	}
}

func TestSGLangGenerateTakesWhatTheServerTakes(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.OutputTokens = 5 })
	for _, c := range []struct {
		body, path, want string
	}{
		{`{"text":"Hello"}`, "meta_info.prompt_tokens", "5"},
		{`{"text":"Hello"}`, "meta_info.finish_reason.type", "stop"},
		{`{"text":"Hello","sampling_params":{"max_new_tokens":3}}`, "meta_info.finish_reason.length", "3"},
		{`{"text":"Hello","sampling_params":{"max_new_tokens":3}}`, "output_ids.#", "3"},
		{`{"text":"Hello","sampling_params":{"max_new_tokens":9,"ignore_eos":true}}`, "meta_info.completion_tokens", "9"},
		{`{"text":"Hello","rid":"mine"}`, "meta_info.id", "mine"},
		{`{"input_ids":[65,66,67]}`, "meta_info.prompt_tokens", "3"},
		{`{"text":["a","bb"]}`, "#.meta_info.prompt_tokens", "[1,2]"},
		{`{"text":["a","bb"],"rid":"b"}`, "#.meta_info.id", `["b_0","b_1"]`},
		{`{"text":["a","bb"],"rid":["p","q"]}`, "#.meta_info.id", `["p","q"]`},
		{`{"text":["a"]}`, "#.meta_info.prompt_tokens", "[1]"},
		{`{"input_ids":[[65],[66,67]],"sampling_params":[{"max_new_tokens":2},{"max_new_tokens":2}]}`, "#.meta_info.completion_tokens", "[2,2]"},
		{`{"text":"Hello","sampling_params":{"n":3,"temperature":0}}`, "#.meta_info.prompt_tokens", "[5,5,5]"},
		{`{"input_ids":[65,66],"sampling_params":{"max_new_tokens":0}}`, "output_ids", "[]"},
		{`{"input_ids":[65,66],"sampling_params":{"max_new_tokens":0}}`, "meta_info.finish_reason", `{"type":"length","length":0}`},
		{`{"input_ids":[65,66],"return_prompt_token_ids":true}`, "prompt_token_ids", "[65,66]"},
		{`{"text":["a","b"],"rid":["x"]}`, "error.message", "The specified rids length mismatch with the batch_size for batch processing."},
		{`{}`, "error.message", "Either text, input_ids or input_embeds should be provided."},
		{`{"input_ids":[]}`, "error.message", "input_ids cannot be empty."},
		{`{"text":"x","sampling_params":{"max_new_tokens":9000}}`, "error.message", "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of 9001 tokens: 1 tokens from the input messages and 9000 tokens for the completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit."},
		{`{"text":"` + strings.Repeat("x", 8192) + `"}`, "error.message", "The input (8192 tokens) is longer than the model's context length (8192 tokens)."},
		{`{"text":"x","routed_dp_rank":1}`, "error.message", "routed_dp_rank=1 out of range [0, 1)"},
		{`{"text":"x","data_parallel_rank":0}`, "meta_info.prompt_tokens", "1"},
	} {
		status, answer := w.ask(t, "/generate", c.body)
		got := gjson.Get(answer, c.path)
		if value := got.String(); value != c.want || strings.HasPrefix(c.path, "error") != (status == 400) {
			t.Errorf("%.200s: %d, %s is %q, want %q", c.body, status, c.path, value, c.want)
		}
	}
	// A stream has begun when its error is found; a batch says whose event it is.
	if status, answer := w.ask(t, "/generate", `{"stream":true}`); status != 200 || answer != `data: {"error":{"code":400,"message":"Either text, input_ids or input_embeds should be provided.","retryable":false,"type":"invalid_request_error"}}`+"\n\ndata: [DONE]\n\n" {
		t.Errorf("%d %s", status, answer)
	}
	_, answer := w.ask(t, "/generate", `{"text":["a","bb"],"stream":true,"sampling_params":{"max_new_tokens":2}}`)
	seen := map[int64]int64{}
	for _, event := range streamOf(answer) {
		if !event.Get("index").Exists() {
			t.Fatalf("no index: %s", event.Raw)
		}
		seen[event.Get("index").Int()] = event.Get("meta_info.completion_tokens").Int()
	}
	if !maps.Equal(seen, map[int64]int64{0: 2, 1: 2}) {
		t.Errorf("%v of\n%s", seen, answer)
	}
}

func TestSGLangErrorsHaveItsShapes(t *testing.T) {
	w := testWorker(t, nil)
	for _, c := range []struct {
		path, body, media string
		status            int
		kind, message     string
	}{
		{"/v1/chat/completions", `{"messages":[]}`, "application/json", 400, "BadRequestError", "Messages cannot be empty."},
		{"/v1/completions", `{"prompt":""}`, "application/json; charset=utf-8", 400, "BadRequestError", "Prompt cannot be empty"},
		{"/v1/completions", `{"prompt":"x","max_tokens":0}`, "application/json", 400, "Bad Request", "max_tokens must be positive"},
		{"/v1/completions", `{"prompt":"x","max_tokens":8192}`, "application/json", 400, "BadRequestError", "Requested token count exceeds"},
		{"/v1/completions", `{"prompt":"x"}`, "text/plain", 400, "Bad Request", "Only 'application/json' is allowed"},
		{"/v1/completions", `[1]`, "application/json", 400, "Bad Request", "not a JSON object"},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"cache_salt":5}`, "application/json", 400, "Bad Request", "cache_salt"},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"stream":true,"return_token_ids":true}`, "application/json", 400, "BadRequest", "not supported with streaming"},
		{"/generate", `{"text":5}`, "application/json", 400, "Bad Request", "text"},
		{"/generate", `{"text":5,"stream":true}`, "application/json", 400, "Bad Request", "text"},
		{"/generate", `{"input_ids":["a"]}`, "application/json", 400, "Bad Request", "input_ids"},
		{"/generate", `{"text":"x","rid":5}`, "application/json", 400, "Bad Request", "rid"},
		{"/v1/chat/completions", `{"model":"mock:none","messages":[{"role":"user","content":"Hi"}]}`, "application/json", 400, "BadRequestError", "never been loaded: none"},
		{"/tokenize", `{}`, "application/json", 400, "Bad Request", "Exactly one of 'prompt' or 'messages' must be provided."},
	} {
		status, answer := w.ask(t, c.path, c.body, "Content-Type", c.media)
		v := gjson.Parse(answer)
		if status != c.status || v.Get("object").Str != "error" || v.Get("type").Str != c.kind || v.Get("code").Int() != int64(c.status) || v.Get("param").Raw != "null" || !strings.Contains(v.Get("message").Str, c.message) {
			t.Errorf("%s %s: %d %s", c.path, c.body, status, answer)
		}
	}
	w.Failing.Store(503)
	if status, answer := w.ask(t, "/generate", `{"text":"x"}`); status != 503 || gjson.Get(answer, "object").Str != "error" || gjson.Get(answer, "type").Str != "503" {
		t.Errorf("%d %s", status, answer)
	}
}

// FuzzSGLangBodies: whatever a body says, it is answered and the worker lives.
func FuzzSGLangBodies(f *testing.F) {
	for _, body := range []string{
		`{"text":"x"}`, `{"text":["a",1]}`, `{"input_ids":[[],[1]]}`, `{"input_ids":[-1]}`, `{"input_ids":[1e99,4294967296]}`, `{"text":"x","sampling_params":[]}`,
		`{"text":"x","sampling_params":{"n":1e9}}`, `{"text":"x","sampling_params":{"max_new_tokens":-5,"stop":[1]}}`, `{"text":"x","rid":{"a":1},"extra_key":[["a"]]}`,
		`{"prompt":[[1],"x"],"routed_dp_rank":"1"}`, `{"messages":[{"role":"user","content":"Hi"}],"n":0,"stop":""}`, `{"tokens":[[1],2]}`, `{"tokens":[99999999]}`,
		`{"prompt":["a",null],"messages":null}`, `{"rid":"","abort_all":"yes"}`, `{"text":"x","sampling_params":{"max_new_tokens":2,"min_new_tokens":3}}`,
		`{"text":"x","bootstrap_room":[1.5],"lora_path":[1]}`, `{"text":"x","sampling_params":{"stop_token_ids":[1,"x"],"n":2},"stream":true}`,
	} {
		f.Add(body)
	}
	model, err := OpenBuiltinModel()
	if err != nil {
		f.Fatal(err)
	}
	defer model.Close()
	cfg := testkit.Defaults[Settings]()
	cfg.API, cfg.SpeedupRatio, cfg.ServedModelName, cfg.BlockSize, cfg.NumGPUBlocks, cfg.Parts = "sglang", 0, ModelName, testPage, 64, make([]kv.Disagg, 1)
	cfg.Ports = process.Ports{HTTP: testkit.FreePorts(f, 2), Ranks: 1}
	cfg.Ports.Load = cfg.Ports.HTTP + 1
	m, err := NewMocker(cfg, model, slog.New(slog.DiscardHandler))
	if err != nil {
		f.Fatal(err)
	}
	w, err := m.Start(0)
	if err != nil {
		f.Fatal(err)
	}
	defer func() {
		http.DefaultClient.CloseIdleConnections()
		w.End(errors.New("the test has ended"))
		<-w.Ended()
	}()
	f.Fuzz(func(t *testing.T, body string) {
		for _, path := range []string{"/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_request"} {
			if status, answer := w.ask(t, path, body+" "); status != 200 && (status < 400 || status > 499) {
				t.Errorf("%s %s: %d %s", path, body, status, answer)
			}
		}
	})
}

func TestSGLangTokenizes(t *testing.T) {
	w := testWorker(t, nil)
	for _, c := range []struct{ path, body, want string }{
		{"/tokenize", `{"model":"any","prompt":"AB"}`, `{"count":2,"max_model_len":8192,"tokens":[65,66]}`},
		{"/v1/tokenize", `{"prompt":["AB","C"]}`, `{"count":[2,1],"max_model_len":8192,"tokens":[[65,66],[67]]}`},
		{"/detokenize", `{"tokens":[65,66]}`, `{"text":"AB"}`},
		{"/v1/detokenize", `{"tokens":[[65,66],[67]]}`, `{"text":["AB","C"]}`},
	} {
		if status, answer := w.ask(t, c.path, c.body); status != 200 || answer != c.want {
			t.Errorf("%s %s: %d %s", c.path, c.body, status, answer)
		}
	}
	chat := `"messages":[{"role":"user","content":"Hi"}]`
	_, tokens := w.ask(t, "/tokenize", "{"+chat+"}")
	_, answer := w.ask(t, "/v1/chat/completions", "{"+chat+`,"max_tokens":1}`)
	if n := gjson.Get(tokens, "count").Int(); n == 0 || n != gjson.Get(answer, "usage.prompt_tokens").Int() {
		t.Errorf("%s\n%s", tokens, answer)
	}
}

// TestSGLangChatsAreRenderedByItsRules: a chat's last message of an assistant becomes
// the user's, or with continue_final_message is gone on with.
func TestSGLangChatsAreRenderedByItsRules(t *testing.T) {
	w := testWorker(t, nil)
	const start = "<|im_start|>user\nHi<|im_end|>\n"
	for body, want := range map[string]string{
		`"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yo"}]`:                               start + "<|im_start|>user\nYo<|im_end|>\n<|im_start|>assistant\n",
		`"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yo"}],"continue_final_message":true`: start + "<|im_start|>assistant\nYo",
		`"messages":[{"role":"user","content":[{"type":"text","text":"H"},{"type":"text","text":"i"}]}]`:                "<|im_start|>user\nH i<|im_end|>\n<|im_start|>assistant\n",
	} {
		_, tokens := w.ask(t, "/tokenize", "{"+body+"}")
		_, text := w.ask(t, "/detokenize", `{"tokens":`+gjson.Get(tokens, "tokens").Raw+`}`)
		_, answer := w.ask(t, "/v1/chat/completions", "{"+body+`,"max_tokens":1}`)
		if got := gjson.Get(text, "text").Str; got != want {
			t.Errorf("%s\ngot  %q\nwant %q", body, got, want)
		}
		if gjson.Get(answer, "usage.prompt_tokens").Int() != gjson.Get(tokens, "count").Int() {
			t.Errorf("%s: %s", body, answer)
		}
	}
}

func TestSGLangTakesAnyModelsName(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.Lora = []string{"sql"} })
	for model, want := range map[string]string{`"model":"gpt-9",`: "gpt-9", "": "default", `"model":"mock",`: "mock", `"model":"mock:sql",`: "mock:sql"} {
		if status, answer := w.ask(t, "/v1/completions", `{`+model+`"prompt":"x","max_tokens":1}`); status != 200 || gjson.Get(answer, "model").Str != want {
			t.Errorf("%s: %d %s", model, status, answer)
		}
	}
}

func TestSGLangCountsWhatWasCached(t *testing.T) {
	w := testWorker(t, nil)
	cached := func(path, body, at string) int64 {
		t.Helper()
		status, answer := w.ask(t, path, body)
		if status != 200 {
			t.Fatalf("%s: %d %s", body, status, answer)
		}
		return gjson.Get(answer, at).Int()
	}
	const usage = "usage.prompt_tokens_details.cached_tokens"
	text := func(letter string) string { return strings.Repeat(letter, 100) } // 6 blocks
	own := func(letter, more string) string {
		return fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":1}%s}`, text(letter), more)
	}
	const meta = "meta_info.cached_tokens"
	for i, c := range []struct {
		path, body, at string
		want           int64
	}{
		{"/generate", own("a", ""), meta, 0},
		{"/generate", own("a", ""), meta, 96},
		{"/generate", own("a", `,"extra_key":"k"`), meta, 0},
		{"/generate", own("a", `,"extra_key":"k"`), meta, 96},
		{"/generate", own("a", `,"extra_key":"l"`), meta, 0},
		{"/generate", own("a", `,"cache_salt":"s"`), meta, 0},
		{"/generate", own("a", `,"cache_salt":"s"`), meta, 96},
		{"/generate", own("a", `,"cache_salt":"s","extra_key":"k"`), meta, 0},
		{"/generate", own("a", ""), meta, 96},
		{"/v1/completions", fmt.Sprintf(`{"prompt":[%q,%q],"max_tokens":1}`, text("a"), text("b")), usage, 96},
		{"/v1/completions", fmt.Sprintf(`{"prompt":[%q,%q],"max_tokens":1}`, text("a"), text("b")), usage, 192},
		// n > 1 has the prompt computed once before.
		{"/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"n":2}`, text("c")), usage, 96},
		{"/generate", fmt.Sprintf(`{"text":[%q,%q],"extra_key":["k","n"],"sampling_params":{"max_new_tokens":1}}`, text("a"), text("a")), "0." + meta, 96},
		{"/generate", fmt.Sprintf(`{"text":[%q,%q],"extra_key":["n","o"],"sampling_params":{"max_new_tokens":1}}`, text("a"), text("a")), "1." + meta, 0},
	} {
		if got := cached(c.path, c.body, c.at); got != c.want {
			t.Errorf("request %d, %.60s: %d cached, want %d", i, c.body, got, c.want)
		}
	}
	// An answer's blocks are there once it has ended: 100 and 60 tokens, the last of
	// which was never computed.
	_, first := w.ask(t, "/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":60}}`, text("d")))
	next := text("d") + gjson.Get(first, "text").Str + "!!"
	if got := cached("/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":1}}`, next), meta); got != 144 {
		t.Errorf("the next turn found %d tokens, want 144", got)
	}
}

func TestSGLangAbortsAreAnswers(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.SpeedupRatio = 1 })
	long := func(rid string, more string) string {
		return fmt.Sprintf(`{"text":"one two","rid":%q,"sampling_params":{"max_new_tokens":4000,"ignore_eos":true}%s}`, rid, more)
	}
	type answer struct {
		status int
		text   string
	}
	send := func(path, body string) chan answer {
		out := make(chan answer, 1)
		go func() {
			status, text := w.ask(t, path, body)
			out <- answer{status, text}
		}()
		return out
	}
	running := func(n int) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, fmt.Sprint(n, " run"), func() bool { return w.Ranks[0].CurrentLoad().Running == n })
	}
	abort := func(body string) {
		t.Helper()
		if status, text := w.ask(t, "/abort_request", body); status != 200 || text != "" {
			t.Errorf("%s: %d %s", body, status, text)
		}
	}
	one, two := send("/generate", long("r1", "")), send("/generate", long("r11", ""))
	running(2)
	if status, text := w.ask(t, "/flush_cache", "{}"); status != 400 || text != "Flush cache failed.\n" {
		t.Errorf("flush while requests run: %d %s", status, text)
	}
	for _, unknown := range []string{`{"rid":"r"}`, `{"rid":"none"}`, `{}`} {
		abort(unknown)
	}
	if w.Ranks[0].CurrentLoad().Running != 2 {
		t.Error("requests of other names were aborted")
	}
	abort(`{"rid":"r11"}`)
	got := <-two
	v := gjson.Parse(got.text)
	if n := v.Get("meta_info.completion_tokens").Int(); got.status != 200 || v.Get("meta_info.finish_reason").Raw != `{"type":"abort","message":"Aborted","status_code":null,"err_type":null}` ||
		n == 0 || n >= 4000 || int64(len(v.Get("output_ids").Array())) != n {
		t.Errorf("%d %s", got.status, got.text)
	}
	running(1)
	stream := send("/generate", long("s", `,"stream":true`))
	chat := send("/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":4000,"ignore_eos":true,"rid":"c"}`)
	running(3)
	abort(`{"abort_all":true}`)
	for _, c := range []chan answer{one, stream, chat} {
		if got := <-c; got.status != 200 || !strings.Contains(got.text, `abort"`) {
			t.Errorf("%d %s", got.status, got.text)
		}
	}
	testkit.Eventually(t, 10*time.Second, "an idle engine", func() bool { return w.Ranks[0].CurrentLoad() == Load{} })
	if n := w.Ranks[0].Counts.Aborted.Load(); n != 4 {
		t.Errorf("%d aborted", n)
	}

	// A client that leaves ends its request, too.
	ctx, leave := context.WithCancel(t.Context())
	gone := make(chan int, 1)
	go func() {
		status, _ := w.askWith(t, ctx, "/generate", long("g", `,"stream":true`))
		gone <- status
	}()
	running(1)
	leave()
	<-gone
	testkit.Eventually(t, 10*time.Second, "an idle engine", func() bool { return w.Ranks[0].CurrentLoad() == Load{} })
}

func TestSGLangRanksAreChosenAsTheServerDoes(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.DataParallelSize = 2 })
	const completion, chat, own = "/v1/completions", "/v1/chat/completions", "/generate"
	for _, c := range []struct {
		path, header, more string
		status             int
		rank               int64 // less than 0: the next in turn
	}{
		{completion, "1", "", 200, 1}, {chat, "1", "", 200, 1}, {completion, "0", `,"routed_dp_rank":1`, 200, 0}, {completion, "", `,"routed_dp_rank":1`, 200, 1},
		{own, "", `,"routed_dp_rank":1`, 200, 1}, {own, "", `,"data_parallel_rank":1`, 200, 1}, {completion, "", `,"data_parallel_rank":0`, 200, 0},
		{own, "", "", 200, 0}, {own, "", "", 200, 1}, {own, "", "", 200, 0}, // in turn
		{own, "0", "", 200, 1}, // the header is not for this route
		{completion, "2", "", 400, 0}, {completion, "-1", "", 400, 0}, {completion, "x", "", 400, 0}, {own, "", `,"routed_dp_rank":2`, 400, 0}, {own, "", `,"routed_dp_rank":-1`, 400, 0},
	} {
		before := w.Ranks[c.rank].Counts.PromptTokens.Load()
		var headers []string
		if c.header != "" {
			headers = []string{web.HeaderRank, c.header}
		}
		status, answer := w.ask(t, c.path, `{"text":"x","prompt":"x","messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"sampling_params":{"max_new_tokens":1}`+c.more+`}`, headers...)
		if status != c.status || status == 200 && w.Ranks[c.rank].Counts.PromptTokens.Load() == before {
			t.Errorf("%s, header %q%s: %d %s", c.path, c.header, c.more, status, answer)
		}
		if told := gjson.Get(answer, "meta_info.dp_rank"); c.path == own && status == 200 && told.Int() != c.rank {
			t.Errorf("%s: %s", c.more, told.Raw)
		}
	}
}

func TestSGLangFlushEmptiesTheCache(t *testing.T) {
	w := testWorker(t, nil)
	body := `{"text":"` + strings.Repeat("z", 50) + `","sampling_params":{"max_new_tokens":1},"extra_key":"k"}`
	for i, want := range []int64{0, 48, 0} {
		if i == 2 {
			testkit.Eventually(t, 10*time.Second, "flushed", func() bool { status, _ := w.ask(t, "/flush_cache", ""); return status == 200 })
		}
		if _, answer := w.ask(t, "/generate", body); gjson.Get(answer, "meta_info.cached_tokens").Int() != want {
			t.Errorf("request %d: %s", i, answer)
		}
	}
	held := make(chan int)
	w.Ranks[0].Do(func(e *engine.Engine) { held <- e.Pool.Held() - e.Pool.Active() })
	if n := <-held; n != 3 {
		t.Errorf("%d blocks are left", n)
	}
}
