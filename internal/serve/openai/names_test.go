package openai

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

// TestNamesOfRequestsAreTheirClients has two keys, and clients without one, give the same name to
// requests, or the beginning of another one's, in all spellings and on all routes. No name that an
// engine gets begins with one of another client, or of another name.
func TestNamesOfRequestsAreTheirClients(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") })
	for _, config := range []setup{{}, {APIKey: []string{"key-a", "key-b"}}} {
		h := newTestAPIOf(t, config, nil, sglangTargets(worker.URL)...)
		names := map[string]string{} // whose each is
		for _, key := range []string{"key-a", "key-b"} {
			for _, name := range []string{"", "r", "req-", "req-abc"} {
				for _, route := range []string{testkit.ChatPath, generateRoute, "/v1/embeddings", proxy.ResponsesRoute} {
					for _, body := range []string{`{"model":"m","rid":%q}`, `{"model":"m","\u0072id":%q}`, `{"rid":"other","model":"m","rid":%q}`, `{"model":"m","rid":[%q]}`} {
						before := len(worker.Received())
						response, answer := h.post(t, route, fmt.Sprintf(body, name), "Authorization", "Bearer "+key, "Content-Type", "application/vnd.api+json", web.HeaderRequest, "mine")
						got := worker.Received()
						if response.StatusCode != http.StatusOK || len(got) != before+1 || response.Header.Get(web.HeaderRequest) != "mine" {
							t.Fatalf("%s %s: %d %s", route, body, response.StatusCode, answer)
						}
						sent := gjson.Get(got[before], "rid")
						if sent.IsArray() {
							sent = sent.Get("0")
						}
						whose := name
						if config.APIKey != nil {
							whose = key + " " + name
						}
						if strings.Count(got[before], "rid") != 1 || !strings.HasPrefix(sent.Str, name) || names[sent.Str] != "" && names[sent.Str] != whose {
							t.Errorf("%s of %s became %s", fmt.Sprintf(body, name), key, got[before])
						}
						names[sent.Str] = whose
						if id := worker.Header.Get(web.HeaderRequest); (id == "mine") != (config.APIKey == nil) {
							t.Errorf("the request's id became %s", id)
						}
					}
				}
			}
		}
		if want := 4 * max(1, len(config.APIKey)); len(names) != want {
			t.Errorf("%d names, want %d: %v", len(names), want, names)
		}
		for one := range names {
			for other := range names {
				if one != other && strings.HasPrefix(other, one) {
					t.Errorf("%s begins with %s", other, one)
				}
			}
		}
	}
}

// TestTheBodyNamesARequest holds that a name in the body is the request's where no header gives
// one: vLLM would prefer any header to it.
func TestTheBodyNamesARequest(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") })
	for _, config := range []setup{{}, {APIKey: []string{"key-a", "key-b"}}} {
		h := newTestAPI(t, config, worker.URL)
		for _, c := range []struct{ header, body, want string }{
			{"", `{"request_id":"mine-1"}`, "mine-1"},
			{"head-1", `{"request_id":"mine-1"}`, "head-1"},
			{"head\t1", `{"request_id":"mine-1"}`, "mine-1"},
			{"", `{"request_id":"mine\n1"}`, ""},
			{"", `{"request_id":""}`, ""},
			{"", `{"request_id":null}`, ""},
			{"", `{"request_id":"` + strings.Repeat("x", 257) + `"}`, ""},
		} {
			sent := map[string]bool{}
			for _, key := range []string{"key-a", "key-b"} {
				headers := []string{"Authorization", "Bearer " + key}
				if c.header != "" {
					headers = append(headers, web.HeaderRequest, c.header)
				}
				response, answer := h.post(t, testkit.ChatPath, c.body, headers...)
				if id := response.Header.Get(web.HeaderRequest); response.StatusCode != http.StatusOK || id == "" || c.want != "" && id != c.want {
					t.Errorf("%q %s: %d %s, named %s", c.header, c.body, response.StatusCode, answer, id)
				}
				sent[worker.Header.Get(web.HeaderRequest)] = true
			}
			if config.APIKey == nil && c.want != "" && !sent[c.want] || config.APIKey != nil && (len(sent) != 2 || sent[c.want]) {
				t.Errorf("%q %s reaches the worker as %v", c.header, c.body, sent)
			}
		}
	}
}

// TestAnotherKeysRequestIsNotAborted holds that a key aborts what it has named, and nothing else.
func TestAnotherKeysRequestIsNotAborted(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") })
	h := newTestAPIOf(t, setup{APIKey: []string{"key-a", "key-b"}, AllowEngineAdmin: true}, nil, sglangTargets(worker.URL)...)
	h.post(t, generateRoute, `{"text":"hi","rid":"mine-0001"}`, "Authorization", "Bearer key-a")
	running := gjson.Get(worker.Received()[0], "rid").Str
	for _, c := range []struct {
		key, rid string
		aborts   bool
	}{{"key-a", "mine-0001", true}, {"key-a", running, true}, {"key-b", "mine-0001", false}, {"key-b", running, false}, {"key-b", "mine-", false}} {
		before := len(worker.Received())
		h.post(t, "/abort_request", fmt.Sprintf(`{"rid":%q}`, c.rid), "Authorization", "Bearer "+c.key)
		for _, got := range worker.Received()[before:] {
			if rid := gjson.Get(got, "rid").Str; strings.HasPrefix(running, rid) != c.aborts {
				t.Errorf("%s aborts %s: %s of %s", c.key, c.rid, got, running)
			}
		}
	}
	for path, body := range map[string]string{"/abort_request": `{"abort_all":true}`, "/v1/unload_lora_adapter": `{"lora_name":"sql"}`, "/flush_cache": ``} {
		before := len(worker.Received())
		if response, answer := h.post(t, path, body, "Authorization", "Bearer key-b"); response.StatusCode != http.StatusForbidden || len(worker.Received()) != before {
			t.Errorf("%s of a key that is not trusted: %d %s", path, response.StatusCode, answer)
		}
	}
}

// TestResponsesAreNotNamedLikeThoseOfOthers has a key name its response as another one's is called,
// which vLLM would let it.
func TestResponsesAreNotNamedLikeThoseOfOthers(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") })
	h := newTestAPI(t, setup{APIKey: []string{"key-a", "key-b"}}, worker.URL)
	sent := map[string]bool{}
	for _, key := range []string{"key-a", "key-b"} {
		h.post(t, proxy.ResponsesRoute, `{"model":"m","input":"hi","request_id":"resp_1"}`, "Authorization", "Bearer "+key)
	}
	for _, body := range worker.Received() {
		if id := gjson.Get(body, "request_id").Str; strings.Contains(body, `"hi"`) && strings.HasPrefix(id, "resp_1-") {
			sent[id] = true
		}
	}
	if len(sent) != 2 {
		t.Errorf("two keys' responses are %v", sent)
	}
	if response, answer := h.post(t, proxy.ResponsesRoute, `{"model":"m","input":"hi","request_id":{"a":1}}`, "Authorization", "Bearer key-a"); response.StatusCode != http.StatusBadRequest || gjson.Get(answer, "error.param").Str != "request_id" {
		t.Errorf("no name: %d %s", response.StatusCode, answer)
	}
}

// TestScopedNamesStayAsTheyAre holds that a name that a client reads in an answer is the one that
// it has given.
func TestScopedNamesStayAsTheyAre(t *testing.T) {
	for _, name := range []string{"", "a", "a-0123456789abcdef", strings.Repeat("x", 1000)} {
		if one := keys.Owner(7).Scoped(name); keys.Owner(7).Scoped(one) != one || keys.Owner(8).Scoped(one) == one {
			t.Errorf("%q: %q", name, one)
		}
	}
}

// TestCachedBlocksAreTheirClients has two keys give the same names to blocks: salts and extra keys.
func TestCachedBlocksAreTheirClients(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") })
	for _, several := range []bool{false, true} {
		config := setup{}
		if several {
			config.APIKey = []string{"key-a", "key-b"}
		}
		h := newTestAPIOf(t, config, nil, sglangTargets(worker.URL)...)
		for _, c := range []struct{ path, body, at string }{
			{testkit.ChatPath, `{"model":"m","cache_salt":"s","messages":[]}`, "cache_salt"},
			{testkit.ChatPath, `{"model":"m","cache_s\u0061lt":"s","messages":[]}`, "cache_salt"},
			{testkit.ChatPath, `{"model":"m","extra_key":"s","messages":[]}`, "cache_salt"},
			{completionsPath, `{"model":"m","cache_salt":"s","prompt":"x"}`, "cache_salt"},
			{"/v1/embeddings", `{"model":"m","cache_salt":"s","input":"x"}`, "cache_salt"},
		} {
			seen := map[string]bool{}
			for _, key := range []string{"key-a", "key-b"} {
				before := len(worker.Received())
				h.post(t, c.path, c.body, "Authorization", "Bearer "+key)
				got := worker.Received()[before:]
				if len(got) == 0 {
					t.Fatalf("%s %s reached no worker", c.path, c.body)
				}
				last := got[len(got)-1]
				value := gjson.Get(last, c.at)
				if value.Str == "" {
					t.Errorf("%s became %s", c.body, last)
				}
				seen[value.Str] = true
			}
			if want := map[bool]int{false: 1, true: 2}[several]; len(seen) != want || several && seen["s"] {
				t.Errorf("%s %s: two keys have %v", c.path, c.body, seen)
			}
		}
	}
}

// TestSeriesOfRequestsAreTheirClients has two keys give a series the same id, in a header and in
// the body.
func TestSeriesOfRequestsAreTheirClients(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	policy := new(policytest.Clerk)
	h := newTestAPIWith(t, routertest.New(t, "", 0, routertest.WithPolicy(policy)), setup{APIKey: []string{"key-a", "key-b"}}, nil, targetsAt(worker.URL)...)
	seen := map[string]int{}
	for _, key := range []string{"key-a", "key-b"} {
		h.post(t, testkit.ChatPath, `{"messages":[]}`, "Authorization", "Bearer "+key, "X-Prefix-Id", "s")
		h.post(t, testkit.ChatPath, `{"messages":[],"nvext":{"agent_hints":{"prefix_id":"s"}}}`, "Authorization", "Bearer "+key)
		h.post(t, testkit.ChatPath, `{"messages":[],"nvext":{"annotations":["prefix_id:s"]}}`, "Authorization", "Bearer "+key)
	}
	for _, query := range policy.Queries() {
		seen[query.Prefix.ID]++
	}
	if len(seen) != 2 || seen["s"] != 0 || seen[""] != 0 {
		t.Errorf("series: %v", seen)
	}
}
