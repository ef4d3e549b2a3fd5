package openai

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// hostileBodies are bodies whose shape no client of these routes would send.
func hostileBodies() map[string]string {
	return map[string]string{
		"nothing": "", "a number": "1", "null": "null", "a list": "[]", "a text": `"x"`, "half": `{"text":`, "two": `{"text":"a"}{"text":"b"}`, "NUL": "\x00", "no UTF-8": "{\"text\":\"\xff\xfe\"}",
		"an empty object":     `{}`,
		"a deep list":         `{"text":` + strings.Repeat("[", 50_000) + strings.Repeat("]", 50_000) + "}",
		"deep objects":        `{"text":` + strings.Repeat(`{"a":`, 9_000) + "1" + strings.Repeat("}", 9_000) + "}",
		"many members":        "{" + strings.Repeat(`"a":1,`, 150_000) + `"text":"x"}`,
		"one name twice":      `{"text":"a","text":["b"],"text":3,"prompt":"a","prompt":1,"tokens":[1],"tokens":"x"}`,
		"a number as text":    `{"text":1,"prompt":1,"tokens":1,"input_ids":1,"messages":1}`,
		"objects as text":     `{"text":{"a":1},"prompt":{"a":1},"tokens":{"a":1},"input_ids":{"a":1},"messages":{"a":1}}`,
		"texts in lists":      `{"text":[[["a"]],null,1],"prompt":[[["a"]],null,1],"tokens":[["a"],null],"input_ids":[[1],["a"],null]}`,
		"huge ids":            `{"input_ids":[99999999999999999999,-1,1e308,0.5],"tokens":[99999999999999999999,-1,1e308,0.5],"prompt":[4294967296,-1]}`,
		"a list of 100,000":   `{"text":[` + strings.Repeat(`"a",`, 100_000) + `"a"],"prompt":[` + strings.Repeat(`"a",`, 50_000) + `"a"]}`,
		"200,000 ids":         `{"input_ids":[` + strings.Repeat("1,", 200_000) + `1],"tokens":[` + strings.Repeat("1,", 200_000) + "1]}",
		"lone surrogates":     `{"text":"\ud800\udc00\ud800","prompt":"\udfff","rid":"\ud800"}`,
		"odd options":         `{"text":"a","prompt":"a","rid":{"a":1},"stream":"yes","sampling_params":[],"n":-1,"session_params":1,"lora_path":[null],"image_data":{"x":[]},"return_logprob":"x","data_parallel_rank":-5,"data_parallel_rank":1e99,"bootstrap_host":["a"],"bootstrap_room":-1}`,
		"300 KB of a name":    `{"text":"a","prompt":"a","model":"` + strings.Repeat("m", 300_000) + `"}`,
		"many answers":        `{"text":"a","prompt":"a","sampling_params":{"n":2147483648},"n":99999999999999999999}`,
		"a line of escapes":   `{"text":"` + strings.Repeat(`\u0000`, 100_000) + `","prompt":"` + strings.Repeat(`\"`, 50_000) + `"}`,
		"messages of nothing": `{"messages":[null,{},{"role":null},{"role":"user","content":[{"type":"text"},{"type":{}},null]}],"tools":[null],"chat_template":"{{ 1/0 }}"}`,
	}
}

// TestHostileBodiesOfSGLangsAndTokenizerRoutes: each gets an answer that is no fault of
// the router, soon; nothing stays booked, and a good request is answered afterwards.
func TestHostileBodiesOfSGLangsAndTokenizerRoutes(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"text":"x","meta_info":{"prompt_tokens":3,"completion_tokens":1},"tokens":[1],"count":1,"prompt":"x"}`)
	})
	for name, engine := range map[string]kv.Engine{"vLLM": kv.EngineVLLM, "SGLang": kv.EngineSGLang} {
		targets := sglangTargets(worker.URL)
		targets[0].Engine = engine
		h := newTestAPIOf(t, setup{CollectUsage: true}, nil, targets...)
		for _, route := range []string{generateRoute, "/tokenize", "/detokenize", "/v1/completions", "/v1/embeddings"} {
			for what, body := range hostileBodies() {
				t.Run(name+route+"/"+what, func(t *testing.T) {
					began := time.Now()
					response, answer := h.post(t, route, body)
					if response.StatusCode == http.StatusInternalServerError || len(answer) > 10_000 || time.Since(began) > 20*time.Second {
						t.Errorf("%s after %s: %.300s", response.Status, time.Since(began), answer)
					}
				})
			}
		}
		if n := routertest.InFlight(h.router); n != 0 {
			t.Errorf("%s: %d requests are in flight", name, n)
		}
		route := map[kv.Engine]string{kv.EngineVLLM: "/v1/completions", kv.EngineSGLang: generateRoute}[engine]
		if response, answer := h.post(t, route, `{"text":"a","prompt":"a"}`); response.StatusCode != http.StatusOK {
			t.Errorf("%s: a good request: %s %.300s", name, response.Status, answer)
		}
	}
}

// TestHostileRecordings: forms of the transcription route, which are not JSON, go to the
// worker as they came or are refused.
func TestHostileRecordings(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"text":"x"}`) })
	h := newTestAPI(t, setup{}, worker.URL)
	random := rand.New(rand.NewPCG(1, 1))
	form := func(parts ...string) string { return "--b\r\n" + strings.Join(parts, "\r\n--b\r\n") + "\r\n--b--\r\n" }
	model := "Content-Disposition: form-data; name=\"model\"\r\n\r\nm"
	noise := make([]byte, 100_000)
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	for what, test := range map[string]struct{ kind, body string }{
		"a good one":               {"multipart/form-data; boundary=b", form(model, "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n"+string(noise))},
		"no boundary":              {"multipart/form-data", form(model)},
		"an empty boundary":        {"multipart/form-data; boundary=", form(model)},
		"a long boundary":          {"multipart/form-data; boundary=" + strings.Repeat("b", 5_000), form(model)},
		"another boundary":         {"multipart/form-data; boundary=c", form(model)},
		"no end":                   {"multipart/form-data; boundary=b", "--b\r\n" + model},
		"no parts":                 {"multipart/form-data; boundary=b", "--b--\r\n"},
		"a part without a name":    {"multipart/form-data; boundary=b", form("\r\n\r\nm")},
		"10,000 parts":             {"multipart/form-data; boundary=b", form(strings.Split(strings.Repeat("A: b\r\n\r\nx|", 10_000), "|")...)},
		"10,000 headers":           {"multipart/form-data; boundary=b", form(strings.Repeat("A: b\r\n", 10_000) + "\r\nx")},
		"a header without an end":  {"multipart/form-data; boundary=b", "--b\r\nA: " + strings.Repeat("x", 500_000)},
		"a model of 500 KB":        {"multipart/form-data; boundary=b", form(model + strings.Repeat("m", 500_000))},
		"a form in a form":         {"multipart/form-data; boundary=b", form("Content-Type: multipart/form-data; boundary=b\r\n\r\n" + form(model))},
		"a name with line ends":    {"multipart/form-data; boundary=b", form("Content-Disposition: form-data; name=\"model\r\nX: y\"\r\n\r\nm")},
		"noise":                    {"multipart/form-data; boundary=b", string(noise)},
		"noise that says it is":    {"application/json", string(noise)},
		"JSON":                     {"application/json", `{"model":"m","file":"x"}`},
		"JSON of another shape":    {"application/json; charset=\"", `[1]`},
		"parameters without end":   {"multipart/form-data; boundary=\"b", form(model)},
		"nothing":                  {"", ""},
		"a form with another kind": {"application/x-www-form-urlencoded", "model=m&file=" + strings.Repeat("%00", 10_000)},
	} {
		t.Run(what, func(t *testing.T) {
			before := len(worker.Received())
			response, err := http.Post(h.URL+"/v1/audio/transcriptions", test.kind, strings.NewReader(test.body))
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			answer, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != http.StatusOK && response.StatusCode != http.StatusBadRequest && response.StatusCode != http.StatusNotFound {
				t.Errorf("%s %.300s %v", response.Status, answer, err)
			}
			got := worker.Received()[before:]
			if response.StatusCode == http.StatusOK && (len(got) != 1 || !bytes.Equal([]byte(got[0]), []byte(test.body))) || response.StatusCode != http.StatusOK && len(got) != 0 {
				t.Errorf("%s: the worker got %s", response.Status, fmt.Sprintf("%d requests", len(got)))
			}
		})
	}
	if n := routertest.InFlight(h.router); n != 0 {
		t.Errorf("%d requests are in flight", n)
	}
}
