package test

import (
	"fmt"
	"io"
	"kvrouter/internal/testkit"
	"maps"
	"net/http"
	"strings"
	"testing"
)

// TestKeysWithSaltsShareNoBlocks: what one tenant has asked is neither in another's
// overlap nor in what the engine computes for it.
func TestKeysWithSaltsShareNoBlocks(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1, "--policy=kv", keysFile(t, `
- {name: a, key: key-a, salt: true}
- {name: b, key: key-b, salt: true}
- {name: c, key: key-c}
`), "--decision-headers")
	chat := map[string]any{"messages": Say(strings.Repeat("a secret of a tenant ", 20)), "max_tokens": 1}
	dry := maps.Clone(chat)
	dry["nvext"] = map[string]any{"annotations": []string{"query_instance_id"}}
	salted := maps.Clone(chat)
	salted["cache_salt"] = "mine"
	seen := map[string]bool{} // who has asked for the text, with the salt of its own
	for i, step := range []struct {
		key  string
		body map[string]any
		knew string
	}{
		{"a", chat, "a"}, {"a", chat, "a"}, {"b", chat, "b"}, {"c", chat, "c"}, {"b", chat, "b"}, {"c", chat, "c"},
		{"a", salted, "a mine"}, {"b", salted, "b mine"}, {"a", salted, "a mine"}, {"c", salted, "c mine"}, {"c", salted, "c mine"},
	} {
		dryRun := s.as("key-"+step.key, dry)
		if got := dryRun.json().Get("nvext.overlap_tokens").Int(); (got > 0) != seen[step.key] {
			t.Errorf("step %d: %s is told in a dry run of %d tokens", i, step.key, got)
		}
		a := s.as("key-"+step.key, step.body)
		if a.Predicted != a.Cached || (a.Cached > 0) != seen[step.knew] {
			t.Errorf("step %d of %s: %d tokens told, %d cached: %s", i, step.key, a.Predicted, a.Cached, a.Text)
		}
		seen[step.knew] = true
		s.Settle()
	}
}

func TestPromptTokensOfAKeyAreLimited(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1, keysFile(t, "- {name: a, key: key-a, limits: {prompt-tokens-per-minute: 300}}"))
	chat := map[string]any{"messages": Say(strings.Repeat("many words ", 16)), "max_tokens": 1} // about 200 bytes, a token each
	for i, want := range []int{200, 429} {
		response := s.as("key-a", chat)
		if response.StatusCode != want || response.Header.Get("x-ratelimit-limit-tokens") != "300" || (response.Header.Get("Retry-After") != "") != (want == 429) {
			t.Errorf("request %d: %s %v %s", i, response.Status, response.Header, response.Text)
		}
	}
	page := s.MetricsPage()
	for _, want := range []string{`kvrouter_key_requests_total{key="a",result="ok"} 1`, `kvrouter_key_requests_total{key="a",result="limited"} 1`, `kvrouter_key_limited_total{key="a",limit="prompt_tokens"} 1`} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s", want)
		}
	}
}

// TestNamesOfClientsAreOnNoOpenPort: metrics with the names of keys and tenants are served where
// the router port's key is given, and on the metrics port.
func TestNamesOfClientsAreOnNoOpenPort(t *testing.T) {
	t.Parallel()
	at := testkit.FreePorts(t, 1)
	s := StartMocks(t, 1, keysFile(t, "- {name: team-a, key: key-a, trust-hints: true, limits: {requests-per-second: 9}}"), "--router-api-key=key-router",
		fmt.Sprintf("--metrics-port=%d", at))
	alone := fmt.Sprintf("http://127.0.0.1:%d", at)
	for _, tenant := range []string{"", "tenant-7"} {
		chat, _ := http.NewRequest(http.MethodPost, s.OpenAI+testkit.ChatPath, strings.NewReader(`{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}`))
		chat.Header.Set("Authorization", "Bearer key-a")
		chat.Header.Set("x-llm-d-inference-fairness-id", tenant)
		if response, err := http.DefaultClient.Do(chat); err != nil || response.StatusCode != http.StatusOK {
			t.Fatal(response, err)
		} else {
			response.Body.Close()
		}
	}
	names := []string{`kvrouter_key_requests_total{key="team-a",result="ok"} 2`, `kvrouter_key_limited_total{key="team-a"`,
		`kvrouter_tenant_requests_total{tenant="team-a"} 1`, `kvrouter_tenant_requests_total{tenant="tenant-7"} 1`}
	for _, c := range []struct {
		url, key, host string
		status         int
		named          bool
	}{
		{url: s.OpenAI, status: 200},
		{url: s.OpenAI, key: "key-a", status: 200},
		{url: s.OpenAI, key: "key-router", status: 200},
		{url: s.OpenAI, key: "wrong", status: 200},
		{url: s.Port, status: 401},
		{url: s.Port, key: "key-a", status: 401},
		{url: s.Port, key: "key-router", status: 200, named: true},
		{url: alone, status: 200, named: true},
		{url: alone, key: "wrong", status: 200, named: true},
		{url: alone, host: "rebound.example.com", status: 403},
	} {
		request, err := http.NewRequest(http.MethodGet, c.url+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Host = c.host
		if c.key != "" {
			request.Header.Set("Authorization", "Bearer "+c.key)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		page := string(text)
		if err != nil || response.StatusCode != c.status {
			t.Errorf("%+v: %s, %v", c, response.Status, err)
		}
		if c.status == 200 && !strings.Contains(page, `kvrouter_requests_total{route="/v1/chat/completions",status="200",worker_id="0"} 2`) {
			t.Errorf("%+v: the page lacks what all may see", c)
		}
		if named := strings.Contains(page, "team-a") || strings.Contains(page, "tenant-7"); named != c.named {
			t.Errorf("%+v: names are shown: %v", c, named)
		}
		for _, series := range names {
			if c.named && !strings.Contains(page, series) {
				t.Errorf("%+v: no %s", c, series)
			}
		}
	}
	if status, _ := testkit.HTTPGet(t, alone+"/workers"); status != http.StatusNotFound {
		t.Errorf("the metrics port has a route for workers: %d", status)
	}
}
