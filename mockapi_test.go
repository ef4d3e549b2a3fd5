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

	"github.com/tidwall/gjson"

	"kvrouter/internal/settings"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
)

const completionsPath = "/v1/completions"

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

// compareWithMock holds a mock worker's answers against those of a real worker
// of the test model, whose context is that many tokens: the same refusals, and
// answers of the same fields.
func compareWithMock(t *testing.T, worker string, longest int) {
	dir := filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct")
	mock := startMockSite(t, 1, "--model="+dir, fmt.Sprintf("--mock-num-gpu-blocks=%d", longest/64), "--speedup-ratio=1")
	for _, url := range []string{worker, mock.workerURL(0)} {
		testkit.CheckRefusals(t, url, filepath.Base(dir), longest)
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
