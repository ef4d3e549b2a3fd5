package routes

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// packages returns the folder of the Python packages that vLLM reads sound files with. The tests
// are skipped unless `make test-routes` names it.
func packages(t *testing.T) string {
	folder := os.Getenv("KVROUTER_ROUTES")
	if folder == "" {
		t.Skip("make test-routes runs it")
	}
	return folder
}

// TestRoutesOfAGeneratingModel sends each request to a real vLLM worker, then through the router.
func TestRoutesOfAGeneratingModel(t *testing.T) {
	packages(t)
	s := test.StartEngines(t, 1, nil, "--", "--max-model-len", "2048", "--num-gpu-blocks-override", "60",
		"--enable-tokenizer-info-endpoint", "--enable-server-load-tracking")
	both := bothOf(t, s)
	const hello = `[{"role":"user","content":"Hello"}]`
	both.equal("/v1/chat/completions/batch", fmt.Sprintf(`{"messages":[%s,[{"role":"user","content":"Name a river."}]],"max_tokens":8,"temperature":0}`, hello), http.StatusOK)
	both.equal("/v1/chat/completions/batch", `{"messages":[]}`, http.StatusBadRequest)
	both.equal("/generative_scoring", `{"query":"Is this a river? ","items":["Rhine","bread"],"label_token_ids":[100,200]}`, http.StatusOK)
	both.equal("/v1/completions/render", `{"prompt":"A river"}`, http.StatusOK)

	rendered := both.equal("/v1/chat/completions/render", `{"messages":`+hello+`,"max_tokens":8,"temperature":0}`, http.StatusOK)
	answered := both.equal("/inference/v1/generate", string(rendered), http.StatusOK)
	both.equal("/v1/chat/completions/derender", fmt.Sprintf(`{"generate_response":%s}`, answered), http.StatusOK)
	both.equal("/v1/completions/derender", fmt.Sprintf(`{"generate_responses":[%s]}`, answered), http.StatusOK)

	both.equal("/invocations", `{"messages":`+hello+`,"max_tokens":8,"temperature":0}`, http.StatusOK)
	both.equal("/invocations", `{"prompt":"A river","max_tokens":8,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`, http.StatusOK)
	both.equal("/invocations", `{"x":1}`, http.StatusBadRequest)
	both.equal("/v1/systemone", `{"state":"A river.","questions":{"wet":{"type":"noul","instructions":"Is it wet?"}}}`, http.StatusNotImplemented) // of this model
	for _, route := range []string{"/ping", "/tokenizer_info", "/load"} {
		both.same(route, http.StatusOK, func(base string) (int, string) {
			status, answer := testkit.HTTPGet(t, base+route)
			return status, string(answer)
		})
	}
	aborted(t, s)

	// Routes of other models: the engine's own refusal arrives.
	for _, route := range []string{"/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"} {
		both.equal(route, `{"input":"A river","text_1":"a","text_2":"b","query":"a","documents":["b"]}`, http.StatusNotFound)
	}
	both.equal("/v1/audio/speech", `{"input":"A river","voice":"alloy"}`, http.StatusNotFound)
}

// TestRoutesOfAnEmbeddingModel is the same for a model that generates no tokens.
func TestRoutesOfAnEmbeddingModel(t *testing.T) {
	packages(t)
	s := test.StartEngines(t, 1, nil, "--", "--max-model-len", "2048", "--num-gpu-blocks-override", "60", "--runner", "pooling", "--convert", "embed")
	both := bothOf(t, s)
	both.equal("/v1/embeddings", `{"input":["A river","A mountain"]}`, http.StatusOK)
	both.equal("/v1/embeddings", `{"input":"A river","encoding_format":"base64"}`, http.StatusOK)
	both.equal("/v2/embed", `{"texts":["A river"]}`, http.StatusOK)
	both.equal("/pooling", `{"input":"A river"}`, http.StatusOK)
	for _, route := range []string{"/score", "/v1/score"} {
		both.equal(route, `{"text_1":"A river","text_2":["Rhine","bread"]}`, http.StatusOK)
	}
	for _, route := range []string{"/rerank", "/v1/rerank", "/v2/rerank"} {
		both.equal(route, `{"query":"A river","documents":["Rhine","bread"]}`, http.StatusOK)
	}
	both.equal("/v1/chat/completions/batch", `{"messages":[[{"role":"user","content":"Hello"}]]}`, http.StatusNotFound)
}

// aborted has a client abort a long answer by its id when it has begun.
func aborted(t *testing.T, s *test.Router) {
	t.Helper()
	body := `{"prompt":"A river","request_id":"mine","max_tokens":1900,"ignore_eos":true,"stream":true}`
	response, err := http.Post(s.OpenAI+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Scan()
	if status, answer := test.Post(t, s.OpenAI+"/inference/v1/abort_requests", `{"request_ids":["cmpl-mine-0"]}`); status != http.StatusOK {
		t.Fatalf("abort: %d %s", status, answer)
	}
	events, finish := 1, ""
	for lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: {"); ok {
			events, finish = events+1, gjson.Get("{"+data, "choices.0.finish_reason").Str
		}
	}
	if finish != "abort" || events > 1000 {
		t.Errorf("the aborted answer has %d events and ends with %q", events, finish)
	}
	t.Logf("aborted after %d events", events)
}

// pair is a router and its worker.
type pair struct {
	t              *testing.T
	worker, router string
}

func bothOf(t *testing.T, s *test.Router) pair {
	return pair{t, *s.Workers()[0].Endpoint, s.OpenAI}
}

// equal reports a difference between the worker's answers to a request and to the same request
// through the router, or another status than that one. It returns the worker's answer.
func (p pair) equal(route, body string, status int) []byte {
	p.t.Helper()
	var own []byte
	p.same(route, status, func(base string) (int, string) {
		status, answer := test.Post(p.t, base+route, body)
		if base == p.worker {
			own = answer
		}
		return status, plain(answer)
	})
	return own
}

// same reports a difference between what ask gets from the worker and through the router, or
// another status than that one.
func (p pair) same(what string, want int, ask func(base string) (status int, answer string)) {
	p.t.Helper()
	status, own := ask(p.worker)
	routed, relayed := ask(p.router)
	if status != want || routed != want || own != relayed {
		p.t.Errorf("%s: want %d, the worker answers %d\n%.2000s\nthrough the router %d\n%.2000s", what, want, status, own, routed, relayed)
		return
	}
	p.t.Logf("%s: %d, %d bytes, equal: %.120s", what, status, len(relayed), relayed)
}

// plain returns an answer, or each event of a stream, without what differs between two answers
// to one request.
func plain(answer []byte) string {
	lines := strings.Split(string(answer), "\n")
	for i, line := range lines {
		data := strings.TrimPrefix(line, "data: ")
		var value any
		if json.Unmarshal([]byte(data), &value) != nil {
			continue
		}
		text, _ := json.Marshal(strip(value))
		lines[i] = string(text)
	}
	return strings.Join(lines, "\n")
}

// strip removes ids, times, and whether the prompt was cached, and rounds fractions: how a
// model's numbers are rounded depends on what it computes beside them.
func strip(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for _, name := range slices.Collect(maps.Keys(v)) {
			switch name {
			case "id", "request_id", "created", "metrics", "prompt_tokens_details":
				delete(v, name)
			default:
				v[name] = strip(v[name])
			}
		}
	case []any:
		for i := range v {
			v[i] = strip(v[i])
		}
	case float64:
		return math.Round(v*100) / 100
	}
	return value
}
