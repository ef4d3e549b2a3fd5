package openai

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// TestBodiesReachWorkersPlain: a body with a content coding or a byte order mark is read, and goes
// on without them and of the right length, on every route.
func TestBodiesReachWorkersPlain(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{}, worker.URL)
	zipped := func(text string) string {
		var out bytes.Buffer
		to := gzip.NewWriter(&out)
		to.Write([]byte(text))
		to.Close()
		return out.String()
	}
	const mark = "\xef\xbb\xbf"
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 50_000) + `"}],"input":"x","prompt":"x","query":"x","documents":["x"],"max_tokens":1}`
	for _, path := range []string{testkit.ChatPath, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/messages/count_tokens", "/tokenize", "/rerank"} {
		for name, test := range map[string]struct {
			body, coding string
			status       int
		}{
			"a mark":           {mark + body, "", 200},
			"gzip":             {zipped(body), "gzip", 200},
			"both":             {zipped(mark + body), "gzip", 200},
			"zstd":             {body, "zstd", 415},
			"another encoding": {"\xff\xfe{\x00}\x00", "", 400},
			"a bomb":           {zipped(strings.Repeat(" ", 2<<20)), "gzip", 413},
		} {
			if path == "/tokenize" && test.status == http.StatusOK {
				test.status = http.StatusNotFound // of the worker, which has no such route
			}
			before := len(worker.Received())
			headers := []string{"Content-Encoding", test.coding}
			if test.coding == "" {
				headers = nil
			}
			response, answer := h.post(t, path, test.body, headers...)
			if response.StatusCode != test.status || test.status == 415 && response.Header.Get("Accept-Encoding") == "" || test.status == 400 && !strings.Contains(answer, "UTF-16") {
				t.Errorf("%s, %s: %d %.300s", path, name, response.StatusCode, answer)
			}
			for _, got := range worker.Received()[before:] {
				worker.Mu.Lock()
				coding := worker.Header.Get("Content-Encoding")
				worker.Mu.Unlock()
				if coding != "" || !gjson.Valid(got) || gjson.Get(got, "model").Str != "m" {
					t.Errorf("%s, %s: a worker gets %.100q in %q", path, name, got, coding)
				}
			}
			if reached := len(worker.Received()) > before; path != "/tokenize" && reached != (test.status == http.StatusOK) {
				t.Errorf("%s, %s: reached a worker: %v", path, name, reached)
			}
		}
	}
	const thresholds = mark + `{"model":"m"}`
	for coding, text := range map[string]string{"identity": thresholds, "gzip": zipped(thresholds)} {
		if response, answer := h.post(t, "/busy_threshold", text, "Content-Encoding", coding); response.StatusCode != http.StatusOK {
			t.Errorf("in %q: %s %s", coding, response.Status, answer)
		}
	}
}
