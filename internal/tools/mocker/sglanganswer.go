package mocker

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"kvrouter/internal/prompt/tokens"
)

// sglangKind is the kind of the route with the same errors as path: SGLang's
// own routes have another shape of them than OpenAI's.
func sglangKind(path string) kind {
	if path == "/generate" || path == "/abort_request" {
		return generateKind
	}
	return chatKind
}

// sglangBody is the problem in SGLang's shape, in a stream or for the whole.
func (problem *refusal) sglangBody(of kind, streamed bool) []byte {
	name := problem.kind
	if problem.status >= http.StatusInternalServerError {
		name = strconv.Itoa(problem.status)
	}
	whole := map[string]any{"object": "error", "message": problem.message, "type": name, "param": nil, "code": problem.status}
	switch {
	case problem.kind == badBody: // found before the route is reached
	case of == generateKind && streamed:
		return MustJSON(map[string]any{"error": map[string]any{"message": problem.message, "type": "invalid_request_error",
			"code": problem.status, "retryable": false}})
	case of == generateKind && problem.status == http.StatusBadRequest:
		return MustJSON(map[string]any{"error": map[string]any{"message": problem.message}})
	case streamed:
		return MustJSON(map[string]any{"error": whole})
	}
	return MustJSON(whole)
}

// appendSGLangChunk appends the server-sent events for the tokens of a choice from
// those sent to below now.
func (a *Answer) appendSGLangChunk(out []byte, c *Choice, now int) []byte {
	switch a.kind {
	case generateKind:
		return append(a.appendGenerated(append(out, "data: "...), c, now), "\n\n"...)
	case completionKind:
		out = fmt.Appendf(a.head(out), `"choices":[{"index":%d,"text":%s,"logprobs":null`, c.index, quote(c.Part(now)))
		out = c.appendFinish(out, now == c.Output)
		if a.tokenIDs {
			out = a.appendIDs(append(out, `,"token_ids":`...), c.tokens[c.prompt+c.Sent:c.prompt+now])
			if c.Sent == 0 {
				out = a.appendIDs(append(out, `,"prompt_token_ids":`...), c.tokens[:c.prompt])
			}
		}
		out = append(out, `}],"usage":`...)
		if a.continuousUsage {
			out = appendSGLangUsage(out, c.prompt, now, -1)
		} else {
			out = append(out, "null"...)
		}
		return append(out, "}\n\n"...)
	}
	if c.Sent == 0 {
		out = a.appendDelta(out, c, `"reasoning_content":null,"role":"assistant","content":""`, false, -1)
	}
	if text := c.Part(now); text != "" {
		out = a.appendDelta(out, c, `"reasoning_content":null,"content":`+string(quote(text)), false, now)
	}
	return out
}

// appendDelta appends a chat's event. With usage it reports that of that many tokens;
// less than 0: none.
func (a *Answer) appendDelta(out []byte, c *Choice, delta string, last bool, usage int) []byte {
	out = fmt.Appendf(a.head(out), `"choices":[{"index":%d,"delta":{%s},"logprobs":null`, c.index, delta)
	out = append(c.appendFinish(out, last), "}]"...)
	if a.continuousUsage && usage >= 0 {
		out = appendSGLangUsage(append(out, `,"usage":`...), c.prompt, usage, int(c.cached.Load()))
	}
	return append(out, "}\n\n"...)
}

// appendFinish appends why a choice ended, if it has.
func (c *Choice) appendFinish(out []byte, ended bool) []byte {
	finish, reason := c.ending(ended)
	return fmt.Appendf(out, `,"finish_reason":%s,"matched_stop":%s`, finish, reason)
}

// appendSGLangEnd appends the events that follow after the last choice's last.
func (a *Answer) appendSGLangEnd(out []byte) []byte {
	if a.kind == chatKind {
		for _, c := range a.choices {
			out = a.appendDelta(out, c, `"reasoning_content":null`, true, -1)
		}
	}
	if text := a.appendSources(nil); len(text) > 0 && a.kind != generateKind {
		out = append(append(append(a.head(out), `"choices":[]`...), text...), "}\n\n"...)
	}
	if a.usage && a.kind != generateKind {
		out = a.appendWholeUsage(append(a.head(out), `"choices":[],"usage":`...), a.kind == chatKind)
		out = append(out, "}\n\n"...)
	}
	return append(out, "data: [DONE]\n\n"...)
}

// wholeSGLang returns the answer that is not streamed.
func (a *Answer) wholeSGLang() []byte {
	if a.kind == generateKind {
		var out []byte
		for i, c := range a.choices {
			if i > 0 {
				out = append(out, ',')
			}
			out = a.appendGenerated(out, c, c.Output)
		}
		if a.list {
			out = append(append([]byte{'['}, out...), ']')
		}
		return out
	}
	out := append(a.open(nil, "chat.completion"), `"choices":[`...)
	for i, c := range a.choices {
		if i > 0 {
			out = append(out, ',')
		}
		form := `{"index":%d,"text":%s,"logprobs":null`
		if a.isChat() {
			form = `{"index":%d,"message":{"role":"assistant","content":%s,"reasoning_content":null},"logprobs":null`
		}
		out = c.appendFinish(fmt.Appendf(out, form, i, quote(c.Text)), true)
		if made := c.tokens[c.prompt : c.prompt+c.Output]; a.tokenIDs && a.isChat() {
			out = a.appendIDs(append(out, `,"prompt_token_ids":`...), c.tokens[:c.prompt])
			out = a.appendIDs(append(out, `,"response_token_ids":`...), made)
		} else if a.tokenIDs {
			out = a.appendIDs(append(out, `,"token_ids":`...), made)
			out = a.appendIDs(append(out, `,"prompt_token_ids":`...), c.tokens[:c.prompt])
		}
		out = append(out, '}')
	}
	out = a.appendWholeUsage(append(out, `],"usage":`...), true)
	out = fmt.Appendf(out, `,"metadata":{"weight_version":%s,`, quote(a.version))
	out = append(a.choices[0].appendVersions(out), '}')
	return append(a.appendSources(out), '}')
}

// appendWholeUsage appends the usage of all: like SGLang it counts each prompt, and
// its cached part, once.
func (a *Answer) appendWholeUsage(out []byte, nulls bool) []byte {
	prompt, generated, cached := 0, 0, 0
	for i, c := range a.choices {
		generated += c.Output
		if i%a.samples == 0 {
			prompt += c.prompt
			cached += int(c.cached.Load())
		}
	}
	out = appendSGLangUsage(out, prompt, generated, cached)
	if !nulls {
		out = append(out[:len(out)-len(noDetails)], '}')
	}
	return out
}

// noDetails is the end of a usage of a model that does not reason.
const noDetails = `,"completion_tokens_details":null}`

// appendSGLangUsage appends a usage; cached less than 0: it is left out.
func appendSGLangUsage(out []byte, prompt, generated, cached int) []byte {
	out = fmt.Appendf(out, `{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":`, prompt, prompt+generated,
		generated)
	if cached < 0 {
		out = append(out, "null"...)
	} else {
		out = fmt.Appendf(out, `{"cached_tokens":%d}`, cached)
	}
	return append(out, `,"reasoning_tokens":0`+noDetails...)
}

// sources are the tiers that a choice's cached tokens came from, JSON.
func (c *Choice) sources() string {
	storage := ""
	if c.Answer.storage {
		storage = fmt.Sprintf(`,"storage":%d,"storage_backend":"HiCacheFile"`, c.disk.Load())
	}
	return fmt.Sprintf(`{"device":%d,"host":%d%s}`, c.hits.Load(), c.host.Load(), storage)
}

// appendSources appends the sources of the first choice that has any, if the request
// asks for them.
func (a *Answer) appendSources(out []byte) []byte {
	for _, c := range a.choices {
		if a.details && c.cached.Load() > 0 {
			return fmt.Appendf(out, `,"sglext":{"cached_tokens_details":%s}`, c.sources())
		}
	}
	return out
}

// appendVersions appends which weights made a choice's tokens.
func (c *Choice) appendVersions(out []byte) []byte {
	return fmt.Appendf(out, `"weight_versions":[{"version":%s,"start":0,"end":%d}]`, quote(c.Answer.version), c.shown(c.Output))
}

// shown is how many of that many tokens are sent: none where none was requested,
// though the engine makes one.
func (c *Choice) shown(tokens int) int {
	if c.silent {
		return 0
	}
	return tokens
}

// appendGenerated appends /generate's answer for a choice with that many tokens: the
// whole text so far.
func (a *Answer) appendGenerated(out []byte, c *Choice, now int) []byte {
	shown, last, cached := c.shown(now), now == c.Output, c.cached.Load()
	finish, details, rank := "null", "null", "null"
	switch _, reason := c.ending(last); {
	case !last:
	case c.Finish == finishAbort:
		finish = `{"type":"abort","message":"Aborted","status_code":null,"err_type":null}`
	case c.Finish == "stop":
		finish = fmt.Sprintf(`{"type":"stop","matched":%s}`, reason)
	default:
		finish = fmt.Sprintf(`{"type":"length","length":%d}`, shown)
	}
	if cached > 0 {
		details = c.sources()
	}
	if a.rank != nil {
		rank = strconv.Itoa(*a.rank)
	}
	out = tokens.AppendTokens(fmt.Appendf(out, `{"text":%s,"output_ids":`, quote(c.Text[:c.known(now)])), c.tokens[c.prompt:c.prompt+shown])
	out = fmt.Appendf(out, `,"meta_info":{"id":%s,"finish_reason":%s,`, quote(c.id), finish)
	out = fmt.Appendf(out,
		`"prompt_tokens":%d,"weight_version":%s,"num_retractions":0,"storage_prefetch_wait":0.0,"storage_staging_wait":0.0,`, c.prompt, quote(a.version))
	out = fmt.Appendf(out, `"forward_entry_time":%s,"prefill_finished_time":%s,"queue_time":0.0,`, seconds(a.received), seconds(c.first))
	out = fmt.Appendf(out, `"reasoning_tokens":0,"completion_tokens":%d,"cached_tokens":%d,`, shown, cached)
	if last {
		out = append(c.appendVersions(out), ',')
	}
	if a.logprobs {
		out = append(out, `"input_token_logprobs":[],"output_token_logprobs":[`...)
		for i, id := range c.tokens[c.prompt : c.prompt+shown] {
			if i > 0 {
				out = append(out, ',')
			}
			out = fmt.Appendf(out, "[%g,%d,null]", logprobOf(id), id)
		}
		out = append(out, "],"...)
	}
	out = fmt.Appendf(out, `"cached_tokens_details":%s,"dp_rank":%s`, details, rank)
	out = append(a.appendTimes(out, c, now), '}')
	if a.promptIDs {
		out = tokens.AppendTokens(append(out, `,"prompt_token_ids":`...), c.tokens[:c.prompt])
	}
	if a.stream && a.list {
		out = fmt.Appendf(out, `,"index":%d`, c.index)
	}
	return append(out, '}')
}

// appendTimes appends when a choice of that many tokens came and how long it took:
// at its end, and of a stream in part with its first token.
func (a *Answer) appendTimes(out []byte, c *Choice, now int) []byte {
	end, last := time.Now(), now == c.Output
	if last {
		out = fmt.Appendf(out, `,"e2e_latency":%f,"request_received_ts":%s,"first_token_latency":%f,"api_server_dispatch_finish_ts":%s`,
			end.Sub(a.received).Seconds(), seconds(a.received), c.first.Sub(a.received).Seconds(), seconds(a.received))
		if a.stream {
			out = fmt.Appendf(out, `,"response_sent_to_client_ts":%s`, seconds(c.first))
		}
		out = fmt.Appendf(out, `,"request_finished_ts":%s`, seconds(end))
		if now > 1 {
			out = fmt.Appendf(out, `,"decode_throughput":%f`, float64(now)/max(1e-6, end.Sub(c.first).Seconds()))
		}
	}
	if last != a.stream && (last || c.Sent == 0) {
		out = fmt.Appendf(out, `,"response_sent_to_client_ts":%s`, seconds(end))
	}
	return out
}

// seconds is a time as in Python: seconds of the Unix epoch.
func seconds(t time.Time) string {
	return strconv.FormatFloat(float64(t.UnixNano())/1e9, 'f', 6, 64)
}
