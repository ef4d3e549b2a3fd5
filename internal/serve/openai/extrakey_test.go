package openai

import (
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// TestExtraKeyKeepsItsBlocksApart: SGLang tells the blocks of a request with
// extra_key as those of plain ones, unless it has a salt too.
func TestExtraKeyKeepsItsBlocksApart(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	for _, c := range []struct {
		engine     kv.Engine
		path, body string
		salted     bool
	}{
		{kv.EngineSGLang, testkit.ChatPath, `{"model":"m","messages":[],"extra_key":"a"}`, true},
		{kv.EngineSGLang, testkit.ChatPath, `{"messages":[],  "extra_key":"a","model":"m"}`, true},
		{kv.EngineSGLang, testkit.ChatPath, `{"model":"m","messages":[],"extra_key":"a","cache_salt":"s"}`, true},
		{kv.EngineSGLang, testkit.ChatPath, `{"model":"m","messages":[],"extra_key":"","cache_salt":"s"}`, false},
		{kv.EngineSGLang, testkit.ChatPath, `{"model":"m","messages":[]}`, false},
		{kv.EngineSGLang, "/v1/messages", `{"model":"m","messages":[],"extra_key":"a"}`, false},
		{kv.EngineVLLM, testkit.ChatPath, `{"model":"m","messages":[],"extra_key":"a"}`, false},
	} {
		h := newTestAPIOf(t, setup{}, nil, kv.Target{URL: worker.URL, Models: []string{"m"}, Engine: c.engine})
		if response, answer := h.post(t, c.path, c.body); response.StatusCode != http.StatusOK {
			t.Fatalf("%d %s", response.StatusCode, answer)
		}
		received := worker.Received()
		got := received[len(received)-1]
		switch {
		case !c.salted && got != c.body:
			t.Errorf("%s: %s became %s", c.engine, c.body, got)
		case c.salted && (!strings.Contains(got, `"extra_key":"a"`) || strings.Count(got, "cache_salt") != 1 || len(gjson.Get(got, "cache_salt").Str) != 43):
			t.Errorf("%s: %s became %s", c.engine, c.body, got)
		}
	}
}
