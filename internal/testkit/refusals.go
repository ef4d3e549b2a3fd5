package testkit

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// vllmRefusals are requests with what vLLM 0.32 answers to them, for a model of
// that many tokens. Of a field of the wrong type only the status and the name are
// the same here.
func vllmRefusals(longest int) []vllmRefusal {
	say := func(options string) string { return `{"messages":[{"role":"user","content":"Hi"}],` + options + `}` }
	complete := func(prompt string) string { return `{"prompt":` + prompt + `,"max_tokens":2}` }
	tokens := func(n int) string { return complete(`[` + strings.Repeat("5,", n-1) + `5]`) }
	tooLong := func(qualifier string, n int) string {
		return fmt.Sprintf("This model's maximum context length is %d tokens. However, your prompt contains %s%d input tokens, which exceeds "+
			"this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%[3]d)",
			longest, qualifier, n)
	}
	unknown := "The model `nope` does not exist. Valid aliases: MODEL."
	return []vllmRefusal{
		{ChatPath, say(`"n":0`), 400, "", "n must be at least 1, got 0."},
		{ChatPath, say(`"n":2,"temperature":0`), 400, "", "n must be 1 when using greedy sampling, got 2."},
		{ChatPath, say(`"n":20000`), 400, "",
			"n must be at most 16384, got 20000. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."},
		{ChatPath, say(`"n":"x"`), 400, "body.n", ""},
		{ChatPath, say(`"max_tokens":0`), 400, "max_tokens", "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"},
		{ChatPath, say(`"max_completion_tokens":-1`), 400, "max_tokens",
			"max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)"},
		{ChatPath, say(`"max_tokens":2.5`), 400, "body.max_tokens", ""},
		{ChatPath, say(`"max_tokens":100000`), 400, "max_tokens",
			fmt.Sprintf("max_tokens=100000 cannot be greater than max_model_len=%d. Please request fewer output tokens. (parameter=max_tokens, "+
				"value=100000)", longest)},
		{ChatPath, say(`"max_tokens":3,"min_tokens":5`), 400, "", "min_tokens must be less than or equal to max_tokens=3, got 5."},
		{ChatPath, say(`"min_tokens":-1`), 400, "", "min_tokens must be greater than or equal to 0, got -1."},
		{ChatPath, say(`"stop":[""]`), 400, "", "stop cannot contain an empty string."},
		{ChatPath, say(`"stop":5`), 400, "body.stop", ""},
		{ChatPath, say(`"temperature":3`), 400, "temperature", "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"},
		{ChatPath, say(`"temperature":-1`), 400, "temperature",
			"temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"},
		{ChatPath, say(`"top_p":0`), 400, "top_p", "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"},
		{ChatPath, say(`"presence_penalty":3`), 400, "", "presence_penalty must be in [-2, 2], got 3.0."},
		{ChatPath, say(`"stream_options":{"include_usage":true}`), 400, "stream_options",
			"Stream options can only be defined when `stream=True`. (parameter=stream_options)"},
		{ChatPath, say(`"cache_salt":""`), 400, "cache_salt",
			"Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"},
		{ChatPath, say(`"model":"nope"`), 404, "model", unknown},
		{"/v1/completions", `{"model":"nope","prompt":"Hi"}`, 404, "model", unknown},
		{"/tokenize", `{"model":"nope","prompt":"Hi"}`, 404, "model", unknown},
		{"/v1/completions", complete(`""`), 400, "prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"},
		{"/v1/completions", complete(`[]`), 400, "", "You must pass at least one prompt"},
		{"/v1/completions", complete(`["a",""]`), 400, "", "The decoder prompt cannot be empty"},
		{"/v1/completions", tokens(longest + 100), 400, "input_tokens", tooLong("", longest+100)},
		{"/v1/completions", tokens(longest + 1), 400, "input_tokens", tooLong("at least ", longest+1)},
		{"/v1/completions", tokens(longest), 400, "max_tokens", "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"},
		{ChatPath, `{"messages":[{"role":"user","content":"` + strings.Repeat("a b ", longest) + `"}]}`, 400, "input_tokens",
			tooLong("at least ", longest+1)},
	}
}

type vllmRefusal struct {
	path, body string
	status     int
	param      string // empty: null
	message    string // MODEL stands for the model's name; empty: any
}

// CheckRefusals compares the answers of a server, vLLM or what stands for it, to bad
// requests against vLLM's. It serves a model of that name and of a context of longest
// tokens.
func CheckRefusals(t testing.TB, url, model string, longest int) {
	t.Helper()
	for _, c := range vllmRefusals(longest) {
		response, err := http.Post(url+c.path, "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		status := response.StatusCode
		e := gjson.GetBytes(answer, "error")
		want := strings.ReplaceAll(c.message, "MODEL", model)
		if status != c.status || int(e.Get("code").Int()) != c.status || e.Get("param").String() != c.param || want != "" &&
			e.Get("message").Str != want {
			t.Errorf("%s %.200s: %d %.600s\nwant %d, param %q, %s", c.path, c.body, status, answer, c.status, c.param, want)
		}
	}
}
