package proxy

import (
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
)

// Bound of a worker's report on one request, tokens: more than any model takes or
// writes. The numbers of a worker that reports more, or less than nothing, must
// not spoil counters and means.
const (
	maxReportedPrompt = 1 << 24
	maxReportedOutput = 1 << 20
)

// reported reads a number of tokens, which is from 0 to most for any number that the worker
// says.
func reported(v gjson.Result, most int) int {
	n := v.Float()
	switch {
	case !(n > 0): // or no number
		return 0
	case n > float64(most):
		return most
	}
	return int(n)
}

// readTiers reads SGLang's report of the tiers that cached tokens came from.
func readTiers(details gjson.Result) (t kv.TierTokens) {
	if !details.IsObject() {
		return t
	}
	t.Device, t.Host = reported(details.Get("device"), maxReportedPrompt), reported(details.Get("host"), maxReportedPrompt)
	storage := reported(details.Get("storage"), maxReportedPrompt)
	if details.Get("storage_backend").Str == "HiCacheFile" {
		t.Disk = storage
	} else {
		t.External = storage
	}
	return t
}

// ReadUsage returns the usage of an answer or a chunk, in the format of chat
// completions or of the responses and messages APIs. Numbers are clamped to 0 and
// to 2^24 tokens of a prompt, 2^20 of an answer.
func ReadUsage(body []byte) Usage {
	u := gjson.GetBytes(body, "usage")
	if !u.IsObject() {
		u = gjson.GetBytes(body, "response.usage")
	}
	if !u.IsObject() {
		return Usage{}
	}
	prompt := func(name string) int { return reported(u.Get(name), maxReportedPrompt) }
	output := u.Get("completion_tokens")
	if !output.Exists() {
		output = u.Get("output_tokens")
	}
	usage := Usage{OutputTokens: reported(output, maxReportedOutput)}
	if u.Get("cache_read_input_tokens").Type == gjson.Number { // counted apart from the others by the messages API
		usage.Known, usage.CachedKnown, usage.CachedTokens = true, true, prompt("cache_read_input_tokens")
		usage.OutputTokens = reported(u.Get("output_tokens"), maxReportedOutput)
		usage.PromptTokens = min(maxReportedPrompt, prompt("input_tokens")+prompt("cache_creation_input_tokens")+usage.CachedTokens)
		usage.Partial = usage.PromptTokens == maxReportedPrompt
		return usage
	}
	completions := u.Get("prompt_tokens").Exists()
	name, details := "prompt_tokens", "prompt_tokens_details.cached_tokens"
	if !completions {
		name = "input_tokens"
	}
	cached := u.Get(details)
	if !cached.Exists() {
		cached = u.Get("input_tokens_details.cached_tokens")
	}
	usage.Known = u.Get(name).Exists()
	usage.PromptTokens = prompt(name)
	usage.Partial = usage.PromptTokens == maxReportedPrompt
	usage.CachedKnown = cached.Exists() && cached.Type != gjson.Null
	usage.CachedTokens = reported(cached, maxReportedPrompt)
	usage.CachedByTier = readTiers(gjson.GetBytes(body, "sglext.cached_tokens_details"))
	usage.CachedUntold = completions && !usage.CachedKnown && usage.OutputTokens > 0
	return usage
}
