package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

const completionsPath = "/v1/completions"

// LongPrompt is a chat of some 500 tokens of its own.
func LongPrompt(i int) []map[string]string {
	return Say(fmt.Sprint("topic ", i, strings.Repeat(fmt.Sprint(" words about ", i), 120)))
}

// exchange is a request and its answer.
type exchange struct {
	*http.Response
	Worker    string // that answered, by the header
	Predicted int    // tokens of overlap in the header; -1: it has none
	Prompt    int    // tokens of the prompt
	Cached    int    // tokens that the engine says it had
	Text      string
}

// json is the answer as JSON.
func (e exchange) json() gjson.Result { return gjson.Parse(e.Text) }

// send posts a body to a route of the OpenAI port, with headers in pairs, and reads the
// whole answer.
func (r *Router) send(path, body string, headers ...string) (e exchange) {
	r.T.Helper()
	request, err := http.NewRequestWithContext(r.T.Context(), http.MethodPost, r.OpenAI+path, strings.NewReader(body))
	if err != nil {
		r.T.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
	}
	if e.Response, err = http.DefaultClient.Do(request); err != nil {
		r.T.Fatal(err)
	}
	e.Text, e.Worker = readAll(r.T, e.Body), e.Header.Get(web.HeaderWorker)
	if e.Predicted, err = strconv.Atoi(e.Header.Get(web.HeaderOverlap)); err != nil {
		e.Predicted = -1
	}
	for line := range strings.Lines(e.Text) {
		data := []byte(strings.TrimPrefix(line, "data: "))
		if u := proxy.ReadUsage(data); u.Known {
			e.Prompt, e.Cached = u.PromptTokens, u.CachedTokens
		}
		if meta := gjson.GetBytes(data, "meta_info"); meta.Exists() { // SGLang's own API
			e.Prompt, e.Cached = int(meta.Get("prompt_tokens").Int()), int(meta.Get("cached_tokens").Int())
		}
	}
	return e
}

// ask sends a chat with these fields.
func (r *Router) ask(fields map[string]any, headers ...string) exchange {
	r.T.Helper()
	return r.send(testkit.ChatPath, string(mocker.MustJSON(fields)), headers...)
}

// pinned sends a chat to one rank.
func (r *Router) pinned(key kv.WorkerKey, fields map[string]any) exchange {
	r.T.Helper()
	fields["nvext"] = map[string]any{"backend_instance_id": key.Worker, "dp_rank": key.Rank}
	return r.ask(fields)
}

// as sends a chat with a key.
func (r *Router) as(key string, fields map[string]any) exchange {
	r.T.Helper()
	return r.ask(fields, "Authorization", "Bearer "+key)
}

// dump returns a line for each block in the index, sorted: rank, hash of the block before
// it, and its own two.
func (r *Router) dump() (lines []string) {
	r.T.Helper()
	gjson.ParseBytes(r.Get(r.Port + "/dump")).ForEach(func(_, held gjson.Result) bool {
		for _, event := range held.Get("events").Array() {
			stored := event.Get("event.data.stored")
			parent := stored.Get("parent_hash").String()
			for _, block := range stored.Get("blocks").Array() {
				lines = append(lines, fmt.Sprint(event.Get("worker_id"), ".", event.Get("event.dp_rank"), " ", parent, " ", block.Get("block_hash"), " ", block.Get("tokens_hash")))
				parent = block.Get("block_hash").String()
			}
		}
		return true
	})
	slices.Sort(lines)
	return lines
}

// attach starts another router over the workers, which is given their URLs alone, and
// waits until it follows all of them.
func (w *Workers) attach(t testing.TB, args ...string) *Mocks {
	t.Helper()
	s := &Mocks{Router: Start(t, append(append([]string{"--engine=none"}, w.Attach()...), args...)...), Workers: w, T: t}
	s.WaitReady(w.Count, 20*time.Second)
	s.Follow()
	return s
}

// says waits for a line of the log.
func (r *Router) says(text string) {
	r.T.Helper()
	testkit.Eventually(r.T, 10*time.Second, "the log says: "+text, func() bool { return strings.Contains(r.Log.String(), text) })
}

// keysFile writes a file of keys and returns the flag that names it.
func keysFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "keys.yaml")
	testkit.WriteFile(t, name, text)
	return "--api-keys-file=" + name
}

// deadURL is an address where nothing listens.
func deadURL(t testing.TB) string { return "http://" + testkit.DeadAddress(t) }

// readAll reads an answer's body and closes it.
func readAll(t testing.TB, body io.ReadCloser) string {
	t.Helper()
	defer body.Close()
	text, err := io.ReadAll(body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// sum adds up the samples of a metric.
func sum(page testkit.MetricsLines, name string) (sum float64) {
	for series, value := range page {
		if series == name || strings.HasPrefix(series, name+"{") {
			sum += value
		}
	}
	return sum
}

// fakeWorker is a server that is healthy, and answers chats by serve.
func fakeWorker(t *testing.T, serve http.HandlerFunc) (url string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
		case r.Method == http.MethodPost && (r.URL.Path == testkit.ChatPath || r.URL.Path == completionsPath):
			serve(w, r)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// reply is an answer of the router port.
type reply struct {
	status int
	gjson.Result
}

// ask sends a request with a query, nil for none, to a path below base.
func ask(t testing.TB, base, method, path string, query any) reply {
	t.Helper()
	var content io.Reader
	if query != nil {
		text, err := json.Marshal(query)
		if err != nil {
			t.Fatal(err)
		}
		content = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(t.Context(), method, base+path, content)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	return reply{response.StatusCode, gjson.Parse(readAll(t, response.Body))}
}
