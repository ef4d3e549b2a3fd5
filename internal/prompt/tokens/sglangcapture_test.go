package tokens

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/testkit"
)

var updateGolden = flag.Bool("update-golden", false, "write testdata/sglang/captured.json from a real server")

// captured is what a real SGLang server with the test model said of a request.
type captured struct {
	Name   string   `json:"name"`
	Route  string   `json:"route"`
	Body   string   `json:"body"`
	Tokens []uint32 `json:"tokens,omitempty"` // by its /tokenize; none: that does not take such requests
	Count  int      `json:"count"`            // prompt tokens, by its answer's usage; 0: it refused the request
}

var sglangRoutes = map[string]string{"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses", "completion": "/v1/completions", "generate": "/generate"}

// TestTokensAreThoseOfARealSGLang holds the prompt tokens computed here against what
// a real server said. KVROUTER_SGLANG_URL and -update-golden ask one again.
func TestTokensAreThoseOfARealSGLang(t *testing.T) {
	const path = "testdata/sglang/captured.json"
	if url := os.Getenv("KVROUTER_SGLANG_URL"); url != "" && *updateGolden {
		captureSGLang(t, url, path)
	}
	raw, err := os.ReadFile(path)
	var list []captured
	if err == nil {
		err = json.Unmarshal(raw, &list)
	}
	if err != nil {
		t.Fatal(err)
	}
	source := NewSource(testModel(t), (&askedWorker{}).ask, 0, quiet())
	source.Met(true)
	equal, unknown := 0, 0
	for _, c := range list {
		prompts, err := promptsOf(t, source, c)
		switch {
		case err != nil:
			t.Errorf("%s: %v", c.Name, err)
		case c.Count == 0:
		case prompts[0].Source != SourceLocal:
			if unknown++; !testkit.LeftToSGLang(c.Name) {
				t.Errorf("%s: not computed here: %s", c.Name, c.Body)
			}
		case len(prompts[0].Tokens) != c.Count, c.Tokens != nil && !slices.Equal(prompts[0].Tokens, c.Tokens):
			t.Errorf("%s: %d tokens here, %d there: %s\n%v\n%v", c.Name, len(prompts[0].Tokens), c.Count, c.Body, prompts[0].Tokens, c.Tokens)
		default:
			equal++
		}
	}
	if equal < 70 || unknown > 5 {
		t.Errorf("%d prompts of %d are the server's, %d are left to it", equal, len(list), unknown)
	}
}

func promptsOf(t *testing.T, source *Source, c captured) ([]Prompt, error) {
	body, ok := jsonbody.Parse([]byte(c.Body))
	if !ok {
		return nil, fmt.Errorf("not an object: %s", c.Body)
	}
	switch c.Route {
	case "/v1/chat/completions":
		return []Prompt{source.ChatBody(t.Context(), body)}, nil
	case "/v1/completions":
		return source.CompletionBody(t.Context(), body), nil
	case "/generate":
		return source.GenerateBody(t.Context(), body), nil
	}
	return []Prompt{source.Other(t.Context(), c.Route, body.Raw)}, nil
}

// captureSGLang asks the server at url for all that the test needs.
func captureSGLang(t *testing.T, url, path string) {
	list := testkit.SGLangChats()
	for name, body := range map[string]string{
		"completion: text": `{"prompt":"Once upon a time, naïve 日本語\n"}`, "completion: without special tokens": `{"prompt":"Hi <|im_start|>","add_special_tokens":false}`,
		"completion: ids": `{"prompt":[1,2,3,400]}`, "generate: text": `{"text":"Once upon a time"}`, "generate: ids": `{"input_ids":[1,2,3,400]}`,
		"generate: logprobs": `{"text":"Once upon a time","return_logprob":true,"logprob_start_len":2}`,
	} {
		kind, _, _ := bytes.Cut([]byte(name), []byte(":"))
		list = append(list, testkit.ParityChat{Name: name, Kind: string(kind), Body: body})
	}
	slices.SortStableFunc(list, func(a, b testkit.ParityChat) int { return bytes.Compare([]byte(a.Kind), []byte(b.Kind)) })
	out := []byte("[")
	for i, c := range list {
		got := captured{Name: c.Name, Route: sglangRoutes[c.Kind], Body: c.Body}
		body, err := sjson.Set(c.Body, map[string]string{"responses": "max_output_tokens", "generate": "sampling_params.max_new_tokens"}[c.Kind], 4)
		if c.Kind != "responses" && c.Kind != "generate" {
			body, err = sjson.Set(c.Body, "max_tokens", 1)
		}
		if err == nil && c.Kind != "generate" {
			body, err = sjson.Set(body, "model", "smollm2-135m-instruct")
		}
		if err != nil {
			t.Fatal(err)
		}
		answer := postSGLang(t, url+got.Route, body)
		for _, field := range []string{"usage.prompt_tokens", "meta_info.prompt_tokens", "usage.input_tokens"} {
			got.Count = max(got.Count, int(answer.Get(field).Int()))
		}
		got.Count += int(answer.Get("usage.cache_read_input_tokens").Int())
		request, ok := []byte(c.Body), c.Kind == "completion"
		if c.Kind == "chat" {
			request, ok = sglangTokenize(request)
		}
		if tokens := postSGLang(t, url+"/tokenize", string(request)).Get("tokens"); ok && c.Name != "completion: ids" && got.Count > 0 {
			if got.Tokens, err = ReadTokens(tokens); err != nil {
				t.Fatal(c.Name, err)
			}
		}
		line, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			out = append(out, ',')
		}
		out = append(append(out, '\n'), line...)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(out, "\n]\n"...), 0o644); err != nil {
		t.Fatal(err)
	}
}

func postSGLang(t *testing.T, url, body string) gjson.Result {
	response, err := http.Post(url, "application/json", bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return gjson.ParseBytes(answer)
}
