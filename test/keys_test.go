package test

import (
	"kvrouter/internal/testkit"
	"maps"
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
	_, page := testkit.HTTPGet(t, s.OpenAI+"/metrics")
	for _, want := range []string{`kvrouter_key_requests_total{key="a",result="ok"} 1`, `kvrouter_key_requests_total{key="a",result="limited"} 1`, `kvrouter_key_limited_total{key="a",limit="prompt_tokens"} 1`} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s", want)
		}
	}
}
