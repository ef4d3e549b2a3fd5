package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// hanging returns the URL of a server that takes requests and answers none until
// the test ends.
func hanging(t *testing.T) string {
	end := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-end }))
	t.Cleanup(func() { close(end); s.Close() })
	return s.URL
}

// modelsServer returns the URL of a worker that lists models so.
func modelsServer(t *testing.T, answer string) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, answer) }))
	t.Cleanup(s.Close)
	return s.URL
}

func TestOneHungWorkerTakesNoModelAway(t *testing.T) {
	p := newTestProxy(t, 0)
	targets := []kv.Target{
		{Key: kv.WorkerKey{Worker: 1}, URL: hanging(t), Models: []string{"m1", "m2"}},
		{Key: kv.WorkerKey{Worker: 2}, URL: modelsServer(t, `{"data":[{"id":"m2","max_model_len":8192},{"id":"m3"},7]}`), Models: []string{"m2"}},
		{Key: kv.WorkerKey{Worker: 3}, URL: modelsServer(t, `{"data":`+strings.Repeat("[", 2000)), Models: []string{"m\"4"}},
		{Key: kv.WorkerKey{Worker: 4}, URL: "http://127.0.0.1:1", Models: []string{"m5"}},
	}
	began := time.Now()
	list := p.Models(t.Context(), targets, http.Header{})
	if took := time.Since(began); took > 5*modelsTimeout {
		t.Errorf("took %v", took)
	}
	text, _ := json.Marshal(list)
	if ids := gjson.GetBytes(text, "#.id").String(); ids != `["m2","m3","m1","m\"4","m5"]` || gjson.GetBytes(text, "0.max_model_len").Int() != 8192 {
		t.Errorf("%s", text)
	}
	if list := p.Models(t.Context(), nil, nil); list == nil || len(list) != 0 {
		t.Errorf("%v without workers", list)
	}
}

func TestAllAreAskedSideBySideUntilOneIsHeard(t *testing.T) {
	p := newTestProxy(t, 0)
	var targets []kv.Target
	for i := range 3 * askedAtOnce {
		targets = append(targets, kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: modelsServer(t, fmt.Sprint(i))})
	}
	seen := map[string]bool{}
	p.AskAll(t.Context(), targets, Question{Method: http.MethodGet, Path: "/"}, func(a Answer) bool {
		if a.Err != nil || a.Status != 200 || string(a.Body) != fmt.Sprint(a.Target.Key.Worker) {
			t.Errorf("%+v", a)
		}
		seen[string(a.Body)] = true
		return true
	})
	if len(seen) != len(targets) {
		t.Errorf("%d of %d were heard", len(seen), len(targets))
	}
	targets[0].URL = hanging(t)
	heard := 0
	p.AskAll(t.Context(), targets[:2], Question{Method: http.MethodGet, Path: "/"}, func(a Answer) bool {
		heard++
		return false // the one that hangs is not waited for
	})
	if heard != 1 {
		t.Errorf("%d were heard", heard)
	}
	p.AskAll(t.Context(), targets[1:2], Question{Method: http.MethodGet, Path: "/", Limit: 1}, func(a Answer) bool {
		if len(a.Body) != 1 {
			t.Errorf("%d bytes of an answer that may have 1", len(a.Body))
		}
		return true
	})
}

func TestUsageIsAskedForWherePythonReadsIt(t *testing.T) {
	for _, test := range []struct{ name, body, want string }{
		{"none", `{"stream":true,"a":1}`, `{"stream_options":{"include_usage":true},"stream":true,"a":1}`},
		{"one", ` {"stream":true, "stream_options": {"x": 1} ,"a":1}`, `{"stream":true, "stream_options": {"x":1,"include_usage":true} ,"a":1}`},
		{"two", `{"stream":true,"stream_options":{"a":1},"stream_options":{"b":1},"z":[1]}`, `{"stream":true,"stream_options":{"a":1},"stream_options":{"b":1,"include_usage":true},"z":[1]}`},
		{"two, the last null", `{"stream":true,"stream_options":{"include_usage":true},"stream_options":null}`, `{"stream":true,"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}`},
		{"not wanted", `{"stream":true,"stream_options":{"include_usage":false}}`, `{"stream":true,"stream_options":{"include_usage":true}}`},
		{"twice not wanted", `{"stream":true,"stream_options":{"include_usage":true,"include_usage":false}}`, `{"stream":true,"stream_options":{"include_usage":true}}`},
		{"an escaped name", `{"stream":true,"stream\u005foptions":{},"a":1}`, `{"stream":true,"stream\u005foptions":{"include_usage":true},"a":1}`},
	} {
		body, ok := jsonbody.Parse([]byte(test.body))
		if !ok {
			t.Fatal(test.body)
		}
		sent := editsOf(&Upstream{Body: body, AskUsage: true})
		if got := bodyOf(&sent); got != test.want || !sent.usage {
			t.Errorf("%s: asked %v\n got %s\nwant %s", test.name, sent.usage, got, test.want)
		}
		if string(body.Raw) != test.body {
			t.Errorf("%s: the client's own bytes were changed: %s", test.name, body.Raw)
		}
	}
}

// TestUsageIsRequestedInABodyThatWasChangedBefore: the place of its stream_options is not known.
func TestUsageIsRequestedInABodyThatWasChangedBefore(t *testing.T) {
	body := parsed(t, `{"stream":true, "stream_options":{"a":1}}`).With("cache_salt", `"s"`)
	sent := editsOf(&Upstream{Body: body, AskUsage: true})
	if got, want := bodyOf(&sent), `{"cache_salt":"s","stream":true,"stream_options":{"a":1,"include_usage":true}}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
