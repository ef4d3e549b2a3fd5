package mocker

import (
	"errors"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/engine"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// vllmWorkers starts mock vLLM workers with blocks of 64 tokens, which end with the
// test.
func vllmWorkers(t *testing.T, n int, tweak func(*Settings)) []*Worker {
	t.Helper()
	return testWorkers(t, n, func(s *Settings) {
		s.API, s.SpeedupRatio, s.BlockSize, s.NumGPUBlocks = "vllm", 20, 64, 16384
		if tweak != nil {
			tweak(s)
		}
	})
}

func vllmWorker(t *testing.T, tweak func(*Settings)) *Worker {
	t.Helper()
	return vllmWorkers(t, 1, tweak)[0]
}

func TestMockChunksHaveVLLMsShape(t *testing.T) {
	w := vllmWorker(t, nil)
	for _, c := range []struct{ path, body, first, last string }{
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}`,
			`{"id":"?","object":"chat.completion.chunk","created":0,"model":"mock","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}`,
			`{"id":"?","object":"chat.completion.chunk","created":0,"model":"mock","choices":[],"usage":{"prompt_tokens":21,"total_tokens":24,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0+mock"}`},
		{"/v1/completions", `{"prompt":"Hi","max_tokens":1,"stream":true,"return_token_ids":true}`,
			`{"id":"?","object":"text_completion","created":0,"model":"mock","choices":[{"index":0,"text":"?","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":[72,105],"token_ids":[0]}],"system_fingerprint":"vllm-0.32.0+mock"}`, ""},
	} {
		status, answer := w.ask(t, c.path, c.body)
		events := strings.Split(strings.TrimSpace(answer), "\n\n")
		if status != 200 || events[len(events)-1] != "data: [DONE]" {
			t.Fatalf("%d %s", status, answer)
		}
		check := func(event, want string) {
			t.Helper()
			got := strings.TrimPrefix(event, "data: ")
			for path, value := range map[string]string{"id": `"?"`, "created": "0", "choices.0.text": `"?"`, "choices.0.token_ids": "[0]"} {
				if v := gjson.Get(got, path); v.Exists() && v.Type != gjson.Null {
					got = got[:v.Index] + value + got[v.Index+len(v.Raw):]
				}
			}
			if got != want {
				t.Errorf("%s:\n%s\nwant\n%s", c.path, got, want)
			}
		}
		check(events[0], c.first)
		if c.last != "" {
			check(events[len(events)-2], c.last)
		}
		finished := 0
		for _, event := range events {
			if strings.Contains(event, `"finish_reason":"length"`) {
				finished++
			}
		}
		if finished != 1 {
			t.Errorf("%s: %d chunks end the answer", c.path, finished)
		}
	}
	_, whole := w.ask(t, "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":8,"return_token_ids":true}`)
	_, again := w.ask(t, "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":8}`)
	text := gjson.Get(whole, "choices.0.message.content").Str
	if !gjson.Valid(whole) || len(text) != 8 || text != gjson.Get(again, "choices.0.message.content").Str {
		t.Errorf("%s\n%s", whole, again)
	}
	ids := gjson.Get(whole, "choices.0.token_ids").Raw
	if _, back := w.ask(t, "/detokenize", `{"tokens":`+ids+`}`); gjson.Get(back, "prompt").Str != text {
		t.Errorf("token ids %s are %s, the text is %q", ids, back, text)
	}
	if _, rendered := w.ask(t, "/v1/chat/completions/render", `{"messages":[{"role":"user","content":"Hi"}]}`); gjson.Get(rendered, "token_ids").Raw != gjson.Get(whole, "prompt_token_ids").Raw {
		t.Errorf("rendered %s", rendered)
	}
}

func TestMockAnswerLengths(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) { s.OutputTokens = 20 })
	for _, c := range []struct {
		path, options string
		tokens        int64
		finish        string
	}{
		{"/v1/chat/completions", `"max_tokens":5`, 5, "length"},
		{"/v1/chat/completions", `"max_tokens":9,"max_completion_tokens":7`, 7, "length"},
		{"/v1/chat/completions", `"max_tokens":30`, 20, "stop"},
		{"/v1/chat/completions", `"max_tokens":30,"ignore_eos":true`, 30, "length"},
		{"/v1/chat/completions", `"max_tokens":30,"min_tokens":25`, 25, "stop"},
		{"/v1/chat/completions", `"top_p":1`, 20, "stop"},
		{"/v1/completions", `"top_p":1`, 16, "length"},
	} {
		_, answer := w.ask(t, c.path, `{"messages":[{"role":"user","content":"Hi"}],"prompt":"Hi",`+c.options+`}`)
		if got := gjson.Get(answer, "usage.completion_tokens").Int(); got != c.tokens || gjson.Get(answer, "choices.0.finish_reason").Str != c.finish {
			t.Errorf("%s %s: %s", c.path, c.options, answer)
		}
	}
}

func TestMockRefusesWhatVLLMRefuses(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) { s.NumGPUBlocks = 4 })
	testkit.CheckRefusals(t, w.url(""), ModelName, 4*64)
	for path, body := range map[string]string{testkit.ChatPath: `{"messages":`, "/v1/completions": `{"prompt":{}}`, "/tokenize": `{}`} {
		if status, answer := w.ask(t, path, body); status != 400 || !gjson.Get(answer, "error.message").Exists() {
			t.Errorf("%s %s: %d %s", path, body, status, answer)
		}
	}
	if status, _ := w.ask(t, "/v1/embeddings", `{"input":"x"}`); status != 404 {
		t.Errorf("another API: %d", status)
	}
}

func TestMockNamesWhatItCannotDo(t *testing.T) {
	w := vllmWorker(t, nil)
	for _, c := range []struct {
		option  string
		refused bool
	}{
		{`"logprobs":true`, true}, {`"logprobs":false`, false}, {`"top_logprobs":0`, false}, {`"prompt_logprobs":1`, true}, {`"echo":true`, true},
		{`"suffix":"x"`, true}, {`"use_beam_search":true`, true}, {`"response_format":{"type":"json_object"}`, true},
		{`"response_format":{"type":"text"}`, false}, {`"tool_choice":"required"`, true}, {`"tool_choice":{"type":"function"}`, true},
		{`"tool_choice":"auto"`, false}, {`"kv_transfer_params":{"do_remote_decode":true}`, true}, {`"kv_transfer_params":null`, false},
	} {
		status, answer := w.ask(t, testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,`+c.option+`}`)
		name, _, _ := strings.Cut(strings.Trim(c.option, `"`), `"`)
		if refused := status == 400 && gjson.Get(answer, "error.param").Str == name; refused != c.refused || !refused && status != 200 {
			t.Errorf("%s: %d %s", c.option, status, answer)
		}
	}
}

func TestMockAnswersSeveralChoicesAndPrompts(t *testing.T) {
	w := vllmWorker(t, nil)
	body := `{"prompt":["` + strings.Repeat("one prompt ", 20) + `","another"],"n":2,"max_tokens":5,"return_token_ids":true`
	_, whole := w.ask(t, "/v1/completions", body+`}`)
	choices := gjson.Get(whole, "choices").Array()
	if len(choices) != 4 || gjson.Get(whole, "usage.prompt_tokens").Int() != 227 || gjson.Get(whole, "usage.completion_tokens").Int() != 20 {
		t.Fatalf("%s", whole)
	}
	texts := map[string]bool{}
	for i, c := range choices {
		texts[c.Get("text").Str] = true
		if prompt := len(c.Get("prompt_token_ids").Array()); c.Get("index").Int() != int64(i) || (prompt == 7) != (i >= 2) {
			t.Errorf("choice %d: %s", i, c.Raw)
		}
	}
	if len(texts) != 4 {
		t.Errorf("the choices are %v", texts)
	}

	// A stream has the same texts, and the second time the first prompt's blocks
	// are cached.
	_, stream := w.ask(t, "/v1/completions", body+`,"stream":true,"stream_options":{"include_usage":true}}`)
	streamed := make([]string, 4)
	finished, usage := 0, gjson.Result{}
	for event := range strings.SplitSeq(strings.TrimSpace(stream), "\n\n") {
		data := strings.TrimPrefix(event, "data: ")
		for _, c := range gjson.Get(data, "choices").Array() {
			streamed[c.Get("index").Int()] += c.Get("text").Str
			if c.Get("finish_reason").Str == "length" {
				finished++
			}
		}
		if u := gjson.Get(data, "usage"); u.Exists() {
			usage = u
		}
	}
	for i, c := range choices {
		if streamed[i] != c.Get("text").Str {
			t.Errorf("choice %d streamed %q, want %q", i, streamed[i], c.Get("text").Str)
		}
	}
	if finished != 4 || usage.Get("completion_tokens").Int() != 20 || usage.Get("prompt_tokens_details.cached_tokens").Int() != 192 {
		t.Errorf("%d ends, usage %s", finished, usage.Raw)
	}

	// All choices of a chat share one prompt.
	_, chat := w.ask(t, testkit.ChatPath, `{"messages":[{"role":"user","content":"`+strings.Repeat("shared ", 30)+`"}],"n":3,"max_tokens":2}`)
	u := gjson.Get(chat, "usage")
	if u.Get("prompt_tokens").Int() != 229 || u.Get("completion_tokens").Int() != 6 || u.Get("prompt_tokens_details.cached_tokens").Int() != 192 {
		t.Errorf("%s", chat)
	}
}

func TestMockStopsAsVLLMDoes(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5}
	texts := []string{"ab", "cd", "e", "fa", "bc"}
	for _, c := range []struct {
		stop   Stop
		output int
		text   string
		finish string
		reason string
	}{
		{Stop{}, 5, "abcdefabc", "length", ""},
		{Stop{Texts: []string{"de"}}, 3, "abc", "stop", `"de"`},
		{Stop{Texts: []string{"de"}, Keep: true}, 3, "abcde", "stop", `"de"`},
		{Stop{Texts: []string{"ef", "cd"}}, 2, "ab", "stop", `"cd"`}, // the one that ends first
		{Stop{Texts: []string{"abc", "bc"}}, 2, "", "stop", `"abc"`}, // of those, the one named first
		{Stop{Texts: []string{"ab"}, After: 1}, 5, "abcdef", "stop", `"ab"`},
		{Stop{Texts: []string{"bcd"}, After: 1}, 2, "a", "stop", `"bcd"`}, // its end comes later
		{Stop{Texts: []string{"zz"}}, 5, "abcdefabc", "length", ""},
		{Stop{Tokens: []uint32{3}}, 3, "abcd", "stop", "3"},
		{Stop{Tokens: []uint32{3}, Keep: true}, 3, "abcde", "stop", "3"},
		{Stop{Tokens: []uint32{2, 5}, After: 2}, 5, "abcdefa", "stop", "5"},
		{Stop{Tokens: []uint32{3}, Texts: []string{"e"}}, 3, "abcd", "stop", "3"}, // a stop token's text is not looked at
	} {
		choice := &Choice{Output: 5, Text: strings.Join(texts, ""), Finish: "length"}
		end := 0
		for _, text := range texts {
			end += len(text)
			choice.Ends = append(choice.Ends, end)
		}
		c.stop.Cut(choice, tokens)
		if choice.Output != c.output || choice.Text != c.text || choice.Finish != c.finish || choice.Reason != c.reason {
			t.Errorf("%+v: %d tokens, %q, %s, %s", c.stop, choice.Output, choice.Text, choice.Finish, choice.Reason)
		}
		// What is reported step by step is never taken back.
		told := ""
		for choice.Sent = 0; choice.Sent < choice.Output; choice.Sent++ {
			told += choice.Part(choice.Sent + 1)
			if !strings.HasPrefix(choice.Text, told) {
				t.Errorf("%+v: %q is told, the whole is %q", c.stop, told, choice.Text)
			}
		}
		if told != choice.Text {
			t.Errorf("%+v: in parts it is %q", c.stop, told)
		}
	}

	w := vllmWorker(t, nil)
	ask := func(options string) gjson.Result {
		_, answer := w.ask(t, testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],`+options+`}`)
		return gjson.Parse(answer)
	}
	whole := ask(`"max_tokens":60`).Get("choices.0.message.content").Str
	word := strings.Fields(whole)[5]
	stopped := ask(`"max_tokens":60,"stop":"` + word + `"`)
	at := strings.Index(whole, word)
	if c := stopped.Get("choices.0"); c.Get("message.content").Str != whole[:at] || c.Get("stop_reason").Str != word || c.Get("finish_reason").Str != "stop" ||
		stopped.Get("usage.completion_tokens").Int() != int64(at+len(word)) {
		t.Errorf("%s of %q", stopped.Raw, whole)
	}
}

func TestMockMetricsAreReadAsVLLMs(t *testing.T) {
	w := vllmWorker(t, nil)
	for range 2 {
		w.ask(t, testkit.ChatPath, `{"messages":[{"role":"user","content":"`+strings.Repeat("count me ", 30)+`"}],"max_tokens":5,"temperature":0}`)
	}
	// The engine lets go of a request a moment after its last token went out.
	var page string
	testkit.Eventually(t, 20*time.Second, "an idle engine", func() bool {
		_, page = w.ask(t, "/metrics", "")
		load := testkit.ReadMetricsPage(page)
		running, shown := load[`vllm:num_requests_running{engine="0",model_name="mock"}`]
		waiting, too := load[`vllm:num_requests_waiting{engine="0",model_name="mock"}`]
		return shown && too && running == 0 && waiting == 0
	})
	for _, want := range []string{`vllm:generation_tokens_total{engine="0",model_name="mock"} 10`, `vllm:prefix_cache_hits_total{engine="0",model_name="mock"} 256`, `finished_reason="length"} 2`} {
		if !strings.Contains(page, want) {
			t.Errorf("no %s in\n%s", want, page)
		}
	}
	for path, want := range map[string]string{"/load": `{"server_load":0}`, "/version": `{"version":"` + Version + `"}`, "/health": ""} {
		if status, answer := w.ask(t, path, ""); status != http.StatusOK || answer != want {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
}

func TestMockAdaptersAreLoadedAsInVLLM(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) { s.Lora = []string{"sql"} })
	for _, c := range []struct {
		route, body string
		status      int
		says        string
	}{
		{"load", `{"lora_name":"a","lora_path":"/a"}`, 200, "Success: LoRA adapter 'a' added successfully."},
		{"load", `{"lora_name":"a","lora_path":"/a"}`, 400, "'a' has already been loaded"},
		{"load", `{"lora_name":"a","lora_path":"/a","load_inplace":true}`, 200, "added"},
		{"load", `{"lora_name":"mock","lora_path":"/a"}`, 400, "conflicts with a served base model"},
		{"load", `{"lora_name":"b"}`, 400, "must be provided"},
		{"unload", `{"lora_name":"sql"}`, 200, "Success: LoRA adapter 'sql' removed successfully."},
		{"unload", `{"lora_name":"sql"}`, 404, "'sql' cannot be found"},
		{"unload", `{}`, 400, "needs to be provided"},
	} {
		status, answer := w.ask(t, "/v1/"+c.route+"_lora_adapter", c.body)
		if status != c.status || !strings.Contains(answer, c.says) {
			t.Errorf("%s %s: %d %s", c.route, c.body, status, answer)
		}
	}
	if _, list := w.ask(t, "/v1/models", ""); gjson.Get(list, "data.#.id").Raw != `["mock","a"]` {
		t.Errorf("%s", list)
	}
}

// TestMockAdaptersAreShownAndLoaded: of two adapters with one slot the second waits for the
// first, and its load delays its first token.
func TestMockAdaptersAreShownAndLoaded(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) {
		s.Lora, s.MaxLoras, s.LoraLoad, s.SpeedupRatio = []string{"sql", "legal"}, 1, 200*time.Millisecond, 1
	})
	if _, page := w.ask(t, "/metrics", ""); !strings.Contains(page, `vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} `) {
		t.Errorf("no adapters in\n%s", page)
	}
	answered := make(chan time.Duration, 2)
	began := time.Now()
	for _, name := range []string{"sql", "legal"} {
		go func() {
			w.ask(t, testkit.ChatPath, `{"model":"`+name+`","messages":[{"role":"user","content":"Hi"}],"max_tokens":20,"ignore_eos":true}`)
			answered <- time.Since(began)
		}()
	}
	testkit.Eventually(t, 10*time.Second, "both adapters on the page", func() bool {
		_, page := w.ask(t, "/metrics", "")
		return strings.Contains(page, `running_lora_adapters="sql,legal",waiting_lora_adapters="sql,legal"}`) || strings.Contains(page, `running_lora_adapters="legal,sql",waiting_lora_adapters="legal,sql"}`)
	})
	if first, second := <-answered, <-answered; first < 200*time.Millisecond || second < first+200*time.Millisecond {
		t.Errorf("answered after %s and %s", first, second)
	}
	loads := 0
	w.Ranks[0].Ask(t.Context(), func(e *engine.Engine) { loads = e.AdapterLoads })
	if loads != 2 {
		t.Errorf("%d loads", loads)
	}
}

// TestMockFaultsOfTests pins the faults that have no flag.
func TestMockFaultsOfTests(t *testing.T) {
	w := vllmWorker(t, nil)
	const chat = `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2}`
	w.Failing.Store(502)
	if status, answer := w.ask(t, testkit.ChatPath, chat); status != 502 || !gjson.Get(answer, "error.message").Exists() {
		t.Errorf("failing: %d %s", status, answer)
	}
	w.Failing.Store(0)
	w.Stuck.Store(true)
	answered := make(chan int, 1)
	go func() {
		status, _ := w.ask(t, testkit.ChatPath, chat)
		answered <- status
	}()
	testkit.Eventually(t, 5*time.Second, "the request waits", func() bool { return w.Ranks[0].Counts.PromptTokens.Load() > 0 })
	if status, _ := w.ask(t, "/health", ""); status != 200 || len(answered) > 0 {
		t.Errorf("stuck: health %d, %d answers", status, len(answered))
	}
	w.Stuck.Store(false)
	if status := <-answered; status != 200 {
		t.Errorf("no longer stuck: %d", status)
	}
}

// TestMockWorkerFinishesWhatItAnswers is about --mock shutdown-timeout.
func TestMockWorkerFinishesWhatItAnswers(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) { s.SpeedupRatio, s.ShutdownTimeout = 1, 20*time.Second })
	done := make(chan string, 1)
	go func() {
		_, answer := w.ask(t, testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":100,"stream":true}`)
		done <- answer
	}()
	testkit.Eventually(t, 5*time.Second, "the answer has begun", func() bool { return w.Ranks[0].Counts.GenerationTokens.Load() > 0 })
	w.Stop(errors.New("stopped by the test"))
	testkit.Eventually(t, 5*time.Second, "new connections are refused", func() bool {
		response, err := http.Get(w.url("/health"))
		if err == nil {
			response.Body.Close()
		}
		return err != nil
	})
	if len(done) > 0 {
		t.Error("the answer has ended before")
	}
	if answer := <-done; !strings.HasSuffix(answer, "data: [DONE]\n\n") || strings.Contains(answer, `"error"`) {
		t.Errorf("%s", answer)
	}
	testkit.Eventually(t, 10*time.Second, "it has ended", func() bool { return w.ctx.Err() != nil })
}

func TestMockFaultsHitTheNamedWorker(t *testing.T) {
	workers := vllmWorkers(t, 2, func(s *Settings) {
		s.SlowWorker, s.HangWorker = map[uint64]float64{1: 3}, map[uint64]time.Duration{1: 50 * time.Millisecond}
	})
	if fast, slow := workers[0].Ranks[0].Engine.Cfg.Timing.Speedup, workers[1].Ranks[0].Engine.Cfg.Timing.Speedup; fast != 20 || slow != 20.0/3 {
		t.Errorf("speeds %v and %v", fast, slow)
	}
	testkit.Eventually(t, 20*time.Second, "worker 1 hangs", workers[1].Hung.Load)
	if workers[0].Hung.Load() {
		t.Error("worker 0 hangs")
	}
}

// TestMockResetIsRefusedWhileRequestsHoldBlocks, as in vLLM.
func TestMockResetIsRefusedWhileRequestsHoldBlocks(t *testing.T) {
	rank := vllmWorker(t, nil).Ranks[0]
	rank.Ask(t.Context(), func(e *engine.Engine) {
		held := &engine.Request{Prompt: 200, Output: 2, Tag: &Choice{Answer: &Answer{More: make(chan struct{}, 1)}}}
		if err := e.Submit(held); err != nil {
			t.Error(err)
		}
		e.Begin()
		if rank.ResetPrefixCache(e, false) {
			t.Error("reset while a request holds blocks")
		}
		e.End()
	})
}
