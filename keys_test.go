package main

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
)

// keysFile writes a file of keys and returns the flag that names it.
func keysFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "keys.yaml")
	testkit.WriteFile(t, name, text)
	return "--api-keys-file=" + name
}

// as sends a body with a key.
func (s *mockSite) as(t *testing.T, key string, body map[string]any) (*http.Response, gjson.Result) {
	t.Helper()
	request, _ := http.NewRequest(http.MethodPost, s.openAI+testkit.ChatPath, strings.NewReader(string(mocker.MustJSON(body))))
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, gjson.ParseBytes(text)
}

// TestKeysWithSaltsShareNoBlocks: what one tenant has asked is neither in another's
// overlap nor in what the engine computes for it.
func TestKeysWithSaltsShareNoBlocks(t *testing.T) {
	s := startMockSite(t, 1, "--policy=kv", keysFile(t, `
- {name: a, key: key-a, salt: true}
- {name: b, key: key-b, salt: true}
- {name: c, key: key-c}
`), "--decision-headers")
	chat := map[string]any{"messages": say(strings.Repeat("a secret of a tenant ", 20)), "max_tokens": 1}
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
		_, answer := s.as(t, "key-"+step.key, dry)
		if got := answer.Get("nvext.overlap_tokens").Int(); (got > 0) != seen[step.key] {
			t.Errorf("step %d: %s is told in a dry run of %d tokens", i, step.key, got)
		}
		response, answer := s.as(t, "key-"+step.key, step.body)
		told, err := strconv.ParseInt(response.Header.Get(web.HeaderOverlap), 10, 64)
		cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
		if err != nil || told != cached || (cached > 0) != seen[step.knew] {
			t.Errorf("step %d of %s: %d tokens told, %d cached: %s", i, step.key, told, cached, answer.Raw)
		}
		seen[step.knew] = true
		s.settle()
	}
}

func TestPromptTokensOfAKeyAreLimited(t *testing.T) {
	s := startMockSite(t, 1, keysFile(t, "- {name: a, key: key-a, limits: {prompt-tokens-per-minute: 300}}"))
	chat := map[string]any{"messages": say(strings.Repeat("many words ", 16)), "max_tokens": 1} // about 200 bytes, a token each
	for i, want := range []int{200, 429} {
		response, answer := s.as(t, "key-a", chat)
		if response.StatusCode != want || response.Header.Get("x-ratelimit-limit-tokens") != "300" || (response.Header.Get("Retry-After") != "") != (want == 429) {
			t.Errorf("request %d: %s %v %s", i, response.Status, response.Header, answer.Raw)
		}
	}
	_, page := testkit.HTTPGet(t, s.openAI+"/metrics")
	for _, want := range []string{`kvrouter_key_requests_total{key="a",result="ok"} 1`, `kvrouter_key_requests_total{key="a",result="limited"} 1`, `kvrouter_key_limited_total{key="a",limit="prompt_tokens"} 1`} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s", want)
		}
	}
}

// TestSharedRequestsTellOnlyWhoMayKnow covers the headers of two workers.
func TestSharedRequestsTellOnlyWhoMayKnow(t *testing.T) {
	s := startMockPairs(t, kv.KindNIXL, 1, 1, "--no-decision-headers")
	response, _ := s.as(t, "", map[string]any{"messages": longPrompt(1), "max_tokens": 2})
	for _, name := range []string{web.HeaderWorker, web.HeaderOverlap, proxy.HeaderPrefillWorker, proxy.HeaderPrefillTime, proxy.HeaderHandoverTime} {
		if got := response.Header.Get(name); got != "" || response.StatusCode != 200 {
			t.Errorf("%s: %s is %q", response.Status, name, got)
		}
	}
}

// TestPortsThatOthersReachNeedAKey reads the flags as the program does.
func TestPortsThatOthersReachNeedAKey(t *testing.T) {
	for _, test := range []struct {
		args, want string // of the error; empty: none
	}{
		{"", ""},
		{"--host ::1", ""},
		{"--host 0.0.0.0", "--host 0.0.0.0"},
		{"--host 0.0.0.0 --insecure", ""},
		{"--host 0.0.0.0 --api-key k", ""},
		{"--host 0.0.0.0 --api-keys-file k.yaml", ""},
		{"--host 0.0.0.0 --router-api-key k", "--host 0.0.0.0"},
		{"--host 0.0.0.0 --tls-cert c --tls-key k", "--host 0.0.0.0"},
		{"--host 0.0.0.0 --tls-cert c --tls-key k --tls-client-ca a", ""},
		{"--router-host 10.0.0.1", "--router-host 10.0.0.1"},
		{"--router-host 10.0.0.1 --api-key k", "--router-host 10.0.0.1"},
		{"--router-host 10.0.0.1 --router-api-key k", ""},
		{"--host 0.0.0.0 --api-key k --replica-sync", "--replica-sync-host 0.0.0.0"},
		{"--host 0.0.0.0 --api-key k --replica-sync --replica-sync-host 127.0.0.1", ""},
		{"--host 0.0.0.0 --api-key k --replica-sync --replica-key 0123456789abcdef", ""},
		{"--replica-sync --replica-key short", "--replica-key"},
		{"--tls-cert c", "--tls-cert"},
		{"--drain-delay=-1s", "--drain-delay"},
	} {
		_, _, err := parseConfig(append([]string{"--engine=none"}, strings.Fields(test.args)...), testMachine(t))
		if (err == nil) != (test.want == "") || err != nil && !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: %v", test.args, fmt.Sprint(err))
		}
	}
}
