package proxy

import (
	"fmt"
	"strconv"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// Reasons why a request is aggregated. The values are metric labels.
const (
	wholePinned    = "pinned"  // it names its worker
	wholeOwn       = "own"     // its sender has split it already
	wholeAnswers   = "answers" // it wants several, and a prompt is handed over once
	wholePrompt    = "prompt"  // it wants to know about the prompt, which a decode worker does not compute
	wholeExperts   = "experts" // its answer has the experts of the prompt, which a decode worker does not compute
	wholeStored    = "stored"  // it goes on with what one worker keeps, or keeps on from here
	WholePrefilled = "prefill" // its prefill leg has failed before
)

// WhyWhole returns the reason why a request must be aggregated (empty: none), and
// the kinds of workers that can disaggregate it if no aggregated worker is up; 0:
// any. whole means that the sender names one worker for the request, multiple that
// it has several prompts: SGLang creates a bootstrap room for each prompt, but with
// several answers its decode worker waits forever.
func WhyWhole(path string, body *jsonbody.Body, whole, multiple bool) (why string, kinds kv.Kinds) {
	switch {
	case whole:
		return wholePinned, kv.KindsOf(kv.KindNone)
	case asks(body, "kv_transfer_params"), asks(body, "bootstrap_room"):
		return wholeOwn, kv.KindsOf(kv.KindNone)
	case SeveralAnswers(path, body):
		return wholeAnswers, kv.KindsOf(kv.KindNone)
	case multiple:
		return wholeAnswers, kv.KindsOf(kv.KindSGLang)
	case asks(body, "prompt_logprobs"), asks(body, "echo"), path == tokensRoute && number(body.Get("sampling_params").Get("prompt_logprobs")) > 0, path == generateRoute && ComputesAnew(body):
		return wholePrompt, kv.KindsOf(kv.KindSGLang)
	case path == ResponsesRoute && (asks(body, "background") || asks(body, "previous_response_id")):
		return wholeStored, kv.KindsOf(kv.KindNone)
	}
	return "", 0
}

// PrefillParams are the kv_transfer_params that make vLLM keep a prompt's blocks for
// another worker.
const PrefillParams = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// prefillBody returns the body of the prefill leg that a vLLM worker gets: the
// client's, but for one token that is not streamed, with the transfer parameters
// given. What makes the answer longer or is kept by the server is left out, as is
// what could end it for another reason than its length: blocks are kept only then.
// /v1/messages has no ignore_eos and takes no notice of it.
func prefillBody(path string, body *jsonbody.Body, params string) []byte {
	limit := "max_tokens"
	switch {
	case path == ResponsesRoute:
		limit = "max_output_tokens"
	case path == chatRoute && body.Get("max_completion_tokens").Exists():
		limit = "max_completion_tokens"
	}
	one := []jsonbody.Field{{Key: limit, Raw: "1"}, {Key: "ignore_eos", Raw: "true"}}
	if path == tokensRoute {
		sampling, _ := jsonbody.Parse([]byte(body.Get("sampling_params").Raw)) // none is well
		one = []jsonbody.Field{{Key: "sampling_params", Raw: string(jsonbody.AppendObject(nil, jsonbody.MergeFields(unlimited(sampling), one)))}}
	}
	over := append([]jsonbody.Field{{Key: "stream", Raw: "false"}}, one...)
	over = append(over, jsonbody.Field{Key: "kv_transfer_params", Raw: params})
	if path == ResponsesRoute {
		over = append(over, jsonbody.Field{Key: "store", Raw: "false"})
	}
	return jsonbody.AppendObject(make([]byte, 0, len(body.Raw)+512), jsonbody.MergeFields(unlimited(body), over))
}

// unlimited returns the members of an object but for those that limit an answer's length, end it or set its form.
func unlimited(object *jsonbody.Body) []jsonbody.Field {
	if object == nil {
		return nil
	}
	fields := make([]jsonbody.Field, 0, len(object.Top)+3)
	for _, m := range object.Top {
		switch m.Key {
		case "stream_options", "min_tokens", "return_token_ids", "max_tokens", "stop", "stop_token_ids", "stop_sequences":
			continue
		}
		fields = append(fields, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
	}
	return fields
}

// sglangFields are the members by which both SGLang servers of a pair find each
// other: at the top, and as Dynamo's workers take them.
func sglangFields(at kv.Bootstrap, room uint64) []jsonbody.Field {
	host, port, number := Quoted(at.Host), strconv.Itoa(int(at.Port)), strconv.FormatUint(room, 10)
	return []jsonbody.Field{
		{Key: "bootstrap_host", Raw: host}, {Key: "bootstrap_port", Raw: port}, {Key: "bootstrap_room", Raw: number},
		{Key: "bootstrap_info", Raw: fmt.Sprintf(`{"bootstrap_host":%s,"bootstrap_port":%s,"bootstrap_room":%s}`, host, port, number)},
	}
}

// Quoted returns s as a JSON string.
func Quoted(s string) string { return string(jsonbody.AppendString(nil, s)) }
