package main

import (
	"bytes"
	"fmt"
	"strconv"

	"github.com/tidwall/gjson"
)

// Why a request is to stay whole, by what it asks for. The values are labels of
// metrics.
const (
	wholePinned    = "pinned"  // it names its worker
	wholeOwn       = "own"     // its sender has split it already
	wholeAnswers   = "answers" // it wants several, and a prompt is handed over once
	wholePrompt    = "prompt"  // it wants to know about the prompt, which a decode worker does not compute
	wholeStored    = "stored"  // it goes on with what one worker keeps, or is to be kept there
	wholePrefilled = "prefill" // its prefill leg has failed before
)

// whyWhole says why a request is to stay whole, if it is, and which kinds of
// workers can share it all the same where none takes it whole; 0: any. whole: its
// sender names one worker for all of it. SGLang makes a room of its own for each
// of several answers.
func whyWhole(path string, body *Body, whole, multiple bool) (why string, kinds Kinds) {
	several := func(key string) bool { return body.Get(key).Int() > 1 }
	asks := func(key string) bool {
		v := body.Get(key)
		return v.Exists() && v.Type != gjson.Null && v.Type != gjson.False
	}
	switch {
	case whole:
		return wholePinned, kindsOf(KindNone)
	case asks("kv_transfer_params"), asks("bootstrap_room"):
		return wholeOwn, kindsOf(KindNone)
	case multiple, several("n"), several("best_of"), asks("use_beam_search"):
		return wholeAnswers, kindsOf(KindSGLang)
	case asks("prompt_logprobs"), asks("echo"):
		return wholePrompt, kindsOf(KindSGLang)
	case path == "/v1/responses" && (asks("background") || asks("previous_response_id")):
		return wholeStored, kindsOf(KindNone)
	}
	return "", 0
}

// prefillParams is what tells vLLM to keep a prompt's blocks for another worker.
const prefillParams = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// prefillBody returns the body of the prefill leg that a vLLM worker gets: the
// client's, but for one token that is not streamed, with the transfer parameters
// given. What makes the answer longer or is kept by the server is left out, as is
// what could end it for another reason than its length: blocks are kept only then.
// /v1/messages has no ignore_eos and takes no notice of it.
func prefillBody(path string, body *Body, params string) []byte {
	fields := make([]jsonField, 0, len(body.top)+3)
	limit := "max_tokens"
	switch {
	case path == "/v1/responses":
		limit = "max_output_tokens"
	case path == "/v1/chat/completions" && body.Get("max_completion_tokens").Exists():
		limit = "max_completion_tokens"
	}
	for _, m := range body.top {
		switch m.key {
		case "stream_options", "min_tokens", "return_token_ids", "max_tokens", "stop", "stop_token_ids", "stop_sequences":
			continue
		}
		fields = append(fields, jsonField{m.key, m.value.Raw})
	}
	over := []jsonField{{"stream", "false"}, {limit, "1"}, {"ignore_eos", "true"}, {"kv_transfer_params", params}}
	if path == "/v1/responses" {
		over = append(over, jsonField{"store", "false"})
	}
	return appendObject(make([]byte, 0, len(body.Raw)+512), mergeFields(fields, over))
}

// withFields returns u with members added in front of its body's own, which stay
// where they are.
func (u Upstream) withFields(members ...jsonField) Upstream {
	object := appendObject(nil, members)
	object[len(object)-1] = ','
	if len(u.Head) > 0 {
		u.Head = append(object, u.Head[1:]...)
		return u
	}
	inside := bytes.IndexByte(u.Body, '{') + 1
	u.Head, u.Body = object, u.Body[inside:]
	if rest := bytes.TrimLeft(u.Body, " \t\r\n"); len(rest) > 0 && rest[0] == '}' {
		u.Head[len(u.Head)-1] = ' ' // there is nothing to be separated from
	}
	return u
}

// sglangFields are the members by which both SGLang servers of a pair find each
// other: at the top, and as Dynamo's workers take them.
func sglangFields(at Bootstrap, room uint64) []jsonField {
	host, port, number := quoted(at.Host), strconv.Itoa(int(at.Port)), strconv.FormatUint(room, 10)
	return []jsonField{
		{"bootstrap_host", host}, {"bootstrap_port", port}, {"bootstrap_room", number},
		{"bootstrap_info", fmt.Sprintf(`{"bootstrap_host":%s,"bootstrap_port":%s,"bootstrap_room":%s}`, host, port, number)},
	}
}

// quoted returns s as a JSON string.
func quoted(s string) string { return string(appendString(nil, s)) }
