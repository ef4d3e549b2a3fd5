package main

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/probe"
	"kvrouter/internal/settings"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
)

func TestMockChunksHaveVLLMsShape(t *testing.T) {
	s := startMockSite(t, 1)
	for _, c := range []struct{ path, body, first, last string }{
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}`,
			`{"id":"?","object":"chat.completion.chunk","created":0,"model":"mock","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}`,
			`{"id":"?","object":"chat.completion.chunk","created":0,"model":"mock","choices":[],"usage":{"prompt_tokens":21,"total_tokens":24,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0+mock"}`},
		{"/v1/completions", `{"prompt":"Hi","max_tokens":1,"stream":true,"return_token_ids":true}`,
			`{"id":"?","object":"text_completion","created":0,"model":"mock","choices":[{"index":0,"text":"?","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":[72,105],"token_ids":[0]}],"system_fingerprint":"vllm-0.32.0+mock"}`, ""},
	} {
		status, answer := post(t, s.workerURL(0)+c.path, c.body)
		events := strings.Split(strings.TrimSpace(string(answer)), "\n\n")
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
	_, whole := post(t, s.workerURL(0)+"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":8,"return_token_ids":true}`)
	_, again := post(t, s.workerURL(0)+"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":8}`)
	text := gjson.GetBytes(whole, "choices.0.message.content").Str
	if !gjson.ValidBytes(whole) || len(text) != 8 || text != gjson.GetBytes(again, "choices.0.message.content").Str {
		t.Errorf("%s\n%s", whole, again)
	}
	ids := gjson.GetBytes(whole, "choices.0.token_ids").Raw
	if _, back := post(t, s.workerURL(0)+"/detokenize", `{"tokens":`+ids+`}`); gjson.GetBytes(back, "prompt").Str != text {
		t.Errorf("token ids %s are %s, the text is %q", ids, back, text)
	}
	if _, rendered := post(t, s.workerURL(0)+"/v1/chat/completions/render", `{"messages":[{"role":"user","content":"Hi"}]}`); gjson.GetBytes(rendered, "token_ids").Raw != gjson.GetBytes(whole, "prompt_token_ids").Raw {
		t.Errorf("rendered %s", rendered)
	}
}

func TestMockAnswerLengths(t *testing.T) {
	s := startMockSite(t, 1, "--mock-output-tokens=20")
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
		_, answer := post(t, s.workerURL(0)+c.path, `{"messages":[{"role":"user","content":"Hi"}],"prompt":"Hi",`+c.options+`}`)
		if got := gjson.GetBytes(answer, "usage.completion_tokens").Int(); got != c.tokens || gjson.GetBytes(answer, "choices.0.finish_reason").Str != c.finish {
			t.Errorf("%s %s: %s", c.path, c.options, answer)
		}
	}
}

const completionsPath = "/v1/completions"

// vllmRefusals are requests with what vLLM 0.32 answers to them, for a model of
// that many tokens. Of a field of the wrong type only the status and the name are
// the same here.
func vllmRefusals(longest int) []vllmRefusal {
	say := func(options string) string { return `{"messages":[{"role":"user","content":"Hi"}],` + options + `}` }
	complete := func(prompt string) string { return `{"prompt":` + prompt + `,"max_tokens":2}` }
	tokens := func(n int) string { return complete(`[` + strings.Repeat("5,", n-1) + `5]`) }
	tooLong := func(qualifier string, n int) string {
		return fmt.Sprintf("This model's maximum context length is %d tokens. However, your prompt contains %s%d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%[3]d)", longest, qualifier, n)
	}
	unknown := "The model `nope` does not exist. Valid aliases: MODEL."
	return []vllmRefusal{
		{testkit.ChatPath, say(`"n":0`), 400, "", "n must be at least 1, got 0."},
		{testkit.ChatPath, say(`"n":2,"temperature":0`), 400, "", "n must be 1 when using greedy sampling, got 2."},
		{testkit.ChatPath, say(`"n":20000`), 400, "", "n must be at most 16384, got 20000. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."},
		{testkit.ChatPath, say(`"n":"x"`), 400, "body.n", ""},
		{testkit.ChatPath, say(`"max_tokens":0`), 400, "max_tokens", "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"},
		{testkit.ChatPath, say(`"max_completion_tokens":-1`), 400, "max_tokens", "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)"},
		{testkit.ChatPath, say(`"max_tokens":2.5`), 400, "body.max_tokens", ""},
		{testkit.ChatPath, say(`"max_tokens":100000`), 400, "max_tokens", fmt.Sprintf("max_tokens=100000 cannot be greater than max_model_len=%d. Please request fewer output tokens. (parameter=max_tokens, value=100000)", longest)},
		{testkit.ChatPath, say(`"max_tokens":3,"min_tokens":5`), 400, "", "min_tokens must be less than or equal to max_tokens=3, got 5."},
		{testkit.ChatPath, say(`"min_tokens":-1`), 400, "", "min_tokens must be greater than or equal to 0, got -1."},
		{testkit.ChatPath, say(`"stop":[""]`), 400, "", "stop cannot contain an empty string."},
		{testkit.ChatPath, say(`"stop":5`), 400, "body.stop", ""},
		{testkit.ChatPath, say(`"temperature":3`), 400, "temperature", "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"},
		{testkit.ChatPath, say(`"temperature":-1`), 400, "temperature", "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"},
		{testkit.ChatPath, say(`"top_p":0`), 400, "top_p", "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"},
		{testkit.ChatPath, say(`"presence_penalty":3`), 400, "", "presence_penalty must be in [-2, 2], got 3.0."},
		{testkit.ChatPath, say(`"stream_options":{"include_usage":true}`), 400, "stream_options", "Stream options can only be defined when `stream=True`. (parameter=stream_options)"},
		{testkit.ChatPath, say(`"cache_salt":""`), 400, "cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"},
		{testkit.ChatPath, say(`"model":"nope"`), 404, "model", unknown},
		{completionsPath, `{"model":"nope","prompt":"Hi"}`, 404, "model", unknown},
		{"/tokenize", `{"model":"nope","prompt":"Hi"}`, 404, "model", unknown},
		{completionsPath, complete(`""`), 400, "prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"},
		{completionsPath, complete(`[]`), 400, "", "You must pass at least one prompt"},
		{completionsPath, complete(`["a",""]`), 400, "", "The decoder prompt cannot be empty"},
		{completionsPath, tokens(longest + 100), 400, "input_tokens", tooLong("", longest+100)},
		{completionsPath, tokens(longest + 1), 400, "input_tokens", tooLong("at least ", longest+1)},
		{completionsPath, tokens(longest), 400, "max_tokens", "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"},
		{testkit.ChatPath, `{"messages":[{"role":"user","content":"` + strings.Repeat("a b ", longest) + `"}]}`, 400, "input_tokens", tooLong("at least ", longest+1)},
	}
}

type vllmRefusal struct {
	path, body string
	status     int
	param      string // empty: null
	message    string // MODEL stands for the model's name; empty: any
}

// checkRefusals holds what a server answers to bad requests against vLLM's answers.
func checkRefusals(t *testing.T, url, model string, longest int) {
	t.Helper()
	for _, c := range vllmRefusals(longest) {
		status, answer := post(t, url+c.path, c.body)
		e := gjson.GetBytes(answer, "error")
		want := strings.ReplaceAll(c.message, "MODEL", model)
		if status != c.status || int(e.Get("code").Int()) != c.status || e.Get("param").String() != c.param || want != "" && e.Get("message").Str != want {
			t.Errorf("%s %.200s: %d %.600s\nwant %d, param %q, %s", c.path, c.body, status, answer, c.status, c.param, want)
		}
	}
}

func TestMockRefusesWhatVLLMRefuses(t *testing.T) {
	s := startMockSite(t, 1, "--mock-num-gpu-blocks=4")
	checkRefusals(t, s.workerURL(0), mocker.ModelName, 4*64)
	for path, body := range map[string]string{testkit.ChatPath: `{"messages":`, completionsPath: `{"prompt":{}}`, "/tokenize": `{}`} {
		if status, answer := post(t, s.workerURL(0)+path, body); status != 400 || !gjson.GetBytes(answer, "error.message").Exists() {
			t.Errorf("%s %s: %d %s", path, body, status, answer)
		}
	}
	if status, _ := post(t, s.workerURL(0)+"/v1/embeddings", `{"input":"x"}`); status != 404 {
		t.Errorf("another API: %d", status)
	}
}

func TestMockNamesWhatItCannotDo(t *testing.T) {
	s := startMockSite(t, 1)
	for _, c := range []struct {
		option  string
		refused bool
	}{
		{`"logprobs":true`, true}, {`"logprobs":false`, false}, {`"top_logprobs":0`, false}, {`"prompt_logprobs":1`, true}, {`"echo":true`, true},
		{`"suffix":"x"`, true}, {`"use_beam_search":true`, true}, {`"response_format":{"type":"json_object"}`, true},
		{`"response_format":{"type":"text"}`, false}, {`"tool_choice":"required"`, true}, {`"tool_choice":{"type":"function"}`, true},
		{`"tool_choice":"auto"`, false}, {`"kv_transfer_params":{"do_remote_decode":true}`, true}, {`"kv_transfer_params":null`, false},
	} {
		status, answer := post(t, s.workerURL(0)+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,`+c.option+`}`)
		name, _, _ := strings.Cut(strings.Trim(c.option, `"`), `"`)
		if refused := status == 400 && gjson.GetBytes(answer, "error.param").Str == name; refused != c.refused || !refused && status != 200 {
			t.Errorf("%s: %d %s", c.option, status, answer)
		}
	}
}

func TestMockAnswersSeveralChoicesAndPrompts(t *testing.T) {
	s := startMockSite(t, 1)
	body := `{"prompt":["` + strings.Repeat("one prompt ", 20) + `","another"],"n":2,"max_tokens":5,"return_token_ids":true`
	_, whole := post(t, s.workerURL(0)+completionsPath, body+`}`)
	choices := gjson.GetBytes(whole, "choices").Array()
	if len(choices) != 4 || gjson.GetBytes(whole, "usage.prompt_tokens").Int() != 227 || gjson.GetBytes(whole, "usage.completion_tokens").Int() != 20 {
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
	_, stream := post(t, s.workerURL(0)+completionsPath, body+`,"stream":true,"stream_options":{"include_usage":true}}`)
	streamed := make([]string, 4)
	finished, usage := 0, gjson.Result{}
	for event := range strings.SplitSeq(strings.TrimSpace(string(stream)), "\n\n") {
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
	_, chat := post(t, s.workerURL(0)+testkit.ChatPath, `{"messages":[{"role":"user","content":"`+strings.Repeat("shared ", 30)+`"}],"n":3,"max_tokens":2}`)
	u := gjson.GetBytes(chat, "usage")
	if u.Get("prompt_tokens").Int() != 229 || u.Get("completion_tokens").Int() != 6 || u.Get("prompt_tokens_details.cached_tokens").Int() != 192 {
		t.Errorf("%s", chat)
	}
}

func TestMockStopsAsVLLMDoes(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5}
	texts := []string{"ab", "cd", "e", "fa", "bc"}
	for _, c := range []struct {
		stop   mocker.Stop
		output int
		text   string
		finish string
		reason string
	}{
		{mocker.Stop{}, 5, "abcdefabc", "length", ""},
		{mocker.Stop{Texts: []string{"de"}}, 3, "abc", "stop", `"de"`},
		{mocker.Stop{Texts: []string{"de"}, Keep: true}, 3, "abcde", "stop", `"de"`},
		{mocker.Stop{Texts: []string{"ef", "cd"}}, 2, "ab", "stop", `"cd"`}, // the one that ends first
		{mocker.Stop{Texts: []string{"abc", "bc"}}, 2, "", "stop", `"abc"`}, // of those, the one named first
		{mocker.Stop{Texts: []string{"ab"}, After: 1}, 5, "abcdef", "stop", `"ab"`},
		{mocker.Stop{Texts: []string{"bcd"}, After: 1}, 2, "a", "stop", `"bcd"`}, // its end comes later
		{mocker.Stop{Texts: []string{"zz"}}, 5, "abcdefabc", "length", ""},
		{mocker.Stop{Tokens: []uint32{3}}, 3, "abcd", "stop", "3"},
		{mocker.Stop{Tokens: []uint32{3}, Keep: true}, 3, "abcde", "stop", "3"},
		{mocker.Stop{Tokens: []uint32{2, 5}, After: 2}, 5, "abcdefa", "stop", "5"},
		{mocker.Stop{Tokens: []uint32{3}, Texts: []string{"e"}}, 3, "abcd", "stop", "3"}, // a stop token's text is not looked at
	} {
		choice := &mocker.Choice{Output: 5, Text: strings.Join(texts, ""), Finish: "length"}
		end := 0
		for _, text := range texts {
			end += len(text)
			choice.Ends = append(choice.Ends, end)
		}
		c.stop.Cut(choice, tokens)
		if choice.Output != c.output || choice.Text != c.text || choice.Finish != c.finish || choice.Reason != c.reason {
			t.Errorf("%+v: %d tokens, %q, %s, %s", c.stop, choice.Output, choice.Text, choice.Finish, choice.Reason)
		}
		// What is told step by step is never taken back.
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

	s := startMockSite(t, 1)
	ask := func(options string) gjson.Result {
		_, answer := post(t, s.workerURL(0)+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],`+options+`}`)
		return gjson.ParseBytes(answer)
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

func TestMockKeepsAdaptersAndSaltsApart(t *testing.T) {
	s := startMockSite(t, 2, "--mock-lora=sql,legal", "--policy=kv")
	_, list := testkit.HTTPGet(t, s.openAI+"/v1/models")
	if got := gjson.GetBytes(list, "data.#.id").Raw; got != `["legal","mock","sql"]` && got != `["mock","sql","legal"]` {
		t.Errorf("models %s", got)
	}
	text := strings.Repeat("the same words ", 20)
	for _, c := range []struct {
		model, salt string
		want        int64
	}{{"mock", "", 0}, {"sql", "", 0}, {"legal", "", 0}, {"sql", "a", 0}, {"sql", "", 256}, {"legal", "", 256}, {"mock", "", 256}, {"sql", "a", 256}, {"sql", "b", 0}, {"mock", "a", 0}, {"mock", "a", 256}} {
		body := map[string]any{"model": c.model, "messages": say(text), "max_tokens": 1}
		if c.salt != "" {
			body["cache_salt"] = c.salt
		}
		answer, predicted := s.ask(t, mocker.MustJSON(body))
		if cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(); cached != c.want || predicted != cached || answer.Get("model").Str != c.model {
			t.Errorf("%+v: %d cached, %d predicted: %s", c, cached, predicted, answer.Raw)
		}
		s.settle()
	}
}

func TestMockRanksHaveCachesOfTheirOwn(t *testing.T) {
	s := startMockSite(t, 2, "--mock-data-parallel-size=2")
	if targets := s.app.router.Targets(); len(targets) != 4 {
		t.Fatalf("%d targets", len(targets))
	}
	ranks := map[string]bool{}
	for i := range 12 {
		chat := mocker.MustJSON(map[string]any{"messages": say(fmt.Sprint(i%6, strings.Repeat(" rank and file", 20))), "max_tokens": 1})
		answer, predicted := s.ask(t, chat)
		cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
		if predicted != cached || (cached > 0) != (i >= 6) {
			t.Errorf("chat %d: %d cached, %d predicted", i, cached, predicted)
		}
		s.settle()
	}
	for _, target := range s.app.router.Targets() {
		if s.app.index.Blocks(target.Key) > 0 {
			ranks[fmt.Sprint(target.Key)] = true
		}
		if got, held := s.app.index.Blocks(target.Key), s.rank(target.Key); got > 0 && held.Counts.PromptTokens.Load() == 0 {
			t.Errorf("%v has %d blocks in the index and computed nothing", target.Key, got)
		}
	}
	if len(ranks) < 3 {
		t.Errorf("only %v were used", ranks)
	}

	// A worker asked directly goes where the header says.
	before := s.rank(kv.WorkerKey{Worker: 1, Rank: 1}).Counts.PromptTokens.Load()
	for header, want := range map[string]int{"1": 200, "2": 400, "-1": 400, "x": 200} {
		request, _ := http.NewRequest(http.MethodPost, s.workerURL(1)+completionsPath, strings.NewReader(`{"prompt":"Hi","max_tokens":1}`))
		request.Header.Set(web.HeaderRank, header)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != want || want == 400 && gjson.GetBytes(answer, "error.message").Str != "data_parallel_rank "+header+" is out of range [0, 2)." {
			t.Errorf("rank %s: %d %s", header, response.StatusCode, answer)
		}
	}
	if after := s.rank(kv.WorkerKey{Worker: 1, Rank: 1}).Counts.PromptTokens.Load(); after-before < 2 {
		t.Errorf("rank 1 got %d prompt tokens", after-before)
	}
	_, page := testkit.HTTPGet(t, s.workerURL(1)+"/metrics")
	_, sources := testkit.HTTPGet(t, s.workerURL(1)+"/kv_event_sources")
	if !strings.Contains(string(page), `vllm:num_requests_running{engine="1"`) || len(gjson.ParseBytes(sources).Map()) != 2 {
		t.Errorf("%s\n%s", page, sources)
	}
}

// ask sends a chat through the router; predicted are the tokens of overlap that
// it names.
func (s *mockSite) ask(t *testing.T, body []byte) (answer gjson.Result, predicted int64) {
	t.Helper()
	response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	if predicted, err = strconv.ParseInt(response.Header.Get(web.HeaderOverlap), 10, 64); err != nil {
		t.Fatalf("%s: %s", response.Status, text)
	}
	return gjson.ParseBytes(text), predicted
}

func TestMockMetricsAreReadAsVLLMs(t *testing.T) {
	s := startMockSite(t, 1)
	chat := say(strings.Repeat("count me ", 30))
	for range 2 {
		if _, err := s.chat(t.Context(), chat, false, 5); err != nil {
			t.Fatal(err)
		}
	}
	// The engine lets go of a request a moment after its last token went out.
	testkit.Eventually(t, 20*time.Second, "an idle engine", func() bool {
		response, err := http.Get(s.workerURL(0) + "/metrics")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		page, err := probe.ParsePage(response.Body)
		if err != nil {
			return false
		}
		load, err := page.Load("")
		return err == nil && load.Running == 0 && load.Waiting == 0
	})
	response, err := http.Get(s.workerURL(0) + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	page, _ := io.ReadAll(response.Body)
	response.Body.Close()
	for _, want := range []string{`vllm:generation_tokens_total{engine="0",model_name="mock"} 10`, `vllm:prefix_cache_hits_total{engine="0",model_name="mock"} 256`, `finished_reason="length"} 2`} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s in\n%s", want, page)
		}
	}
	for path, want := range map[string]string{"/load": `{"server_load":0}`, "/version": `{"version":"` + mocker.Version + `"}`, "/health": ""} {
		response, err := http.Get(s.workerURL(0) + path)
		if err != nil {
			t.Fatal(err)
		}
		if answer, _ := io.ReadAll(response.Body); string(answer) != want {
			t.Errorf("%s: %s", path, answer)
		}
		response.Body.Close()
	}
}

// compareWithMock holds a mock worker's answers against those of a real worker
// of the test model, whose context is that many tokens: the same refusals, and
// answers of the same fields.
func compareWithMock(t *testing.T, worker string, longest int) {
	dir := filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct")
	mock := startMockSite(t, 1, "--model="+dir, fmt.Sprintf("--mock-num-gpu-blocks=%d", longest/64), "--speedup-ratio=1")
	for _, url := range []string{worker, mock.workerURL(0)} {
		checkRefusals(t, url, filepath.Base(dir), longest)
	}
	const six = `"max_tokens":6,"min_tokens":6,"temperature":1`
	const streamed = `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`
	for _, options := range []string{"", streamed, `,"n":2`, `,"n":2` + streamed, `,"return_token_ids":true`, `,"return_token_ids":true,"stream":true`, `,"ignore_eos":true`} {
		for path, prompt := range map[string]string{testkit.ChatPath: `"messages":[{"role":"user","content":"Hi"}]`, completionsPath: `"prompt":["Once upon","The dog"]`} {
			body := `{` + prompt + `,` + six + options + `}`
			status, real := post(t, worker+path, body)
			_, own := post(t, mock.workerURL(0)+path, body)
			if got, want := answerShapes(own), answerShapes(real); status != 200 || !slices.Equal(got, want) {
				t.Errorf("%s %s: %d\nmock: %s\nvLLM: %s", path, body, status, strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		}
	}
	for _, path := range []string{"/v1/models", "/kv_event_sources", "/load", "/version"} {
		_, real := testkit.HTTPGet(t, worker+path)
		_, own := testkit.HTTPGet(t, mock.workerURL(0)+path)
		if got, want := fieldNames(own), fieldNames(real); got != want {
			t.Errorf("%s\nmock: %s\nvLLM: %s", path, got, want)
		}
	}
}

// answerShapes returns the different shapes of an answer's events, or that of
// the whole, sorted.
func answerShapes(answer []byte) []string {
	shapes := map[string]bool{}
	for event := range strings.SplitSeq(strings.TrimSpace(string(answer)), "\n\n") {
		if data := strings.TrimPrefix(event, "data: "); data != "[DONE]" {
			shapes[shapeOf(gjson.Parse(data))] = true
		}
	}
	return slices.Sorted(maps.Keys(shapes))
}

// shapeOf returns a JSON value's fields in their order, with types for values.
func shapeOf(v gjson.Result) string {
	var parts []string
	switch {
	case v.IsObject():
		v.ForEach(func(key, value gjson.Result) bool {
			parts = append(parts, key.Str+" "+shapeOf(value))
			return true
		})
		return "{" + strings.Join(parts, ", ") + "}"
	case v.IsArray():
		for _, element := range v.Array() {
			parts = append(parts, shapeOf(element))
		}
		return "[" + strings.Join(slices.Compact(parts), ", ") + "]"
	}
	return v.Type.String()
}

// fieldNames returns the names of a JSON object's fields, and of those in it,
// sorted.
func fieldNames(text []byte) string {
	names := map[string]bool{}
	var visit func(v gjson.Result)
	visit = func(v gjson.Result) {
		v.ForEach(func(key, value gjson.Result) bool {
			if v.IsObject() {
				names[key.Str] = true
			}
			if value.IsObject() || value.IsArray() {
				visit(value)
			}
			return true
		})
	}
	visit(gjson.ParseBytes(text))
	return strings.Join(slices.Sorted(maps.Keys(names)), " ")
}

// adapters sends an adapter's name to one of vLLM's two routes for them.
func (s *mockSite) adapters(t *testing.T, base, route, name string) (status int, answer []byte) {
	t.Helper()
	return post(t, base+"/v1/"+route+"_lora_adapter", fmt.Sprintf(`{"lora_name":%q,"lora_path":"/adapters"}`, name))
}

func TestAdapterLoadedAtRunTimeIsServed(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv", "--mock-data-parallel-size=2", "--allow-engine-admin")
	text := strings.Repeat("the same words ", 20)
	chat := func(model string) (worker, problem string, cached, predicted int64) {
		t.Helper()
		response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", strings.NewReader(string(mocker.MustJSON(map[string]any{"model": model, "messages": say(text), "max_tokens": 1}))))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Sscan(response.Header.Get(web.HeaderOverlap), &predicted)
		answer := gjson.ParseBytes(body)
		return response.Header.Get(web.HeaderWorker), answer.Get("error.message").Str, answer.Get("usage.prompt_tokens_details.cached_tokens").Int(), predicted
	}
	if _, problem, _, _ := chat("late"); problem != "The model `late` does not exist." {
		t.Errorf("before it is loaded: %q", problem)
	}
	for _, key := range []kv.WorkerKey{{Worker: 0, Rank: 0}, {Worker: 0, Rank: 1}, {Worker: 1, Rank: 0}, {Worker: 1, Rank: 1}} { // the base model's blocks are everywhere
		s.pinned(t, key, map[string]any{"messages": say(text), "max_tokens": 1})
	}
	if status, answer := s.adapters(t, s.workerURL(1), "load", "late"); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	for i := range 6 {
		worker, problem, cached, predicted := chat("late")
		if worker != "1" || problem != "" || cached != predicted || (cached > 0) != (i > 0) {
			t.Errorf("request %d: worker %q, %q, %d cached, %d predicted", i, worker, problem, cached, predicted)
		}
		s.settle()
	}
	if status, answer := s.adapters(t, s.workerURL(1), "unload", "late"); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	chat("another") // is what has the workers asked again
	if _, problem, _, _ := chat("late"); problem != "The model `late` does not exist." {
		t.Errorf("after it is unloaded: %q", problem)
	}

	// Through the router it is loaded on every worker, once on each.
	status, answer := s.adapters(t, s.openAI, "load", "everywhere")
	if workers := gjson.GetBytes(answer, "#.worker_id").Raw; status != 200 || workers != "[0,1]" {
		t.Errorf("%d %s", status, answer)
	}
	if _, problem, _, _ := chat("everywhere"); problem != "" {
		t.Error(problem)
	}
	for _, target := range s.app.router.Targets() {
		if !slices.Equal(target.Models, []string{"mock", "everywhere"}) || !slices.Equal(target.Adapters, []string{"everywhere"}) {
			t.Errorf("%v serves %q, of them adapters %q", target.Key, target.Models, target.Adapters)
		}
	}
}

func TestMockAdaptersAreLoadedAsInVLLM(t *testing.T) {
	s := startMockSite(t, 1, "--mock-lora=sql")
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
		status, answer := post(t, s.workerURL(0)+"/v1/"+c.route+"_lora_adapter", c.body)
		if status != c.status || !strings.Contains(string(answer), c.says) {
			t.Errorf("%s %s: %d %s", c.route, c.body, status, answer)
		}
	}
	if _, list := testkit.HTTPGet(t, s.workerURL(0)+"/v1/models"); gjson.GetBytes(list, "data.#.id").Raw != `["mock","a"]` {
		t.Errorf("%s", list)
	}
}
