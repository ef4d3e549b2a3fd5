// Package directives finds the members and headers of a request that set addresses, ranks, files or
// code for an engine. Only trusted clients may send them.
package directives

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// transferParams have one member that is harmless: the tokens of the prompt, which a router above
// sends too.
const (
	transferParams = "kv_transfer_params"
	promptTokens   = "prompt_token_ids"
)

// names are the members that direct an engine, wherever it may look for them.
var names = set(
	// Transfers of KV blocks and of encoder outputs: from which host, port and memory, and for whom
	// blocks are kept. vLLM takes those of transferParams and ecTransferParams as they are.
	transferParams, "ec_transfer_params", "do_remote_prefill", "do_remote_decode", "remote_host", "remote_hosts", "remote_port",
	"remote_engine_id", "remote_block_ids", "remote_bootstrap_addr", "remote_kv_source", "remote_handshake_port", "remote_notify_port",
	"transfer_id", "disagg_spec",
	"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_info", "bootstrap_pair_key", "decode_tp_size",
	"disaggregated_params", "kv_hints",
	// SGLang's encoder servers and sockets.
	"encoder_urls", "num_items_assigned", "need_wait_for_mm_inputs", "http_worker_ipc",
	// Data-parallel ranks.
	"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", rank,
	// Code, and the state and the cache entries of others.
	"custom_logit_processor", "logits_processors", "session_params", "mm_hashes",
)

// rank is a hint to the router inside nvext, where no engine reads it.
const (
	rank  = "dp_rank"
	hints = "nvext"
)

// contents are top members of which everything is data to the engines: a tool may have a
// parameter of any name.
var contents = set(
	"messages", "system", "instructions", "prompt", "suffix", "input", "inputs", "text", "texts", "query", "queries", "documents", "items",
	"text_1", "text_2", "data_1", "data_2",
	"tools", "tool_choice", "functions", "function_call", "response_format", "structured_outputs", "guided_json", "json_schema",
	"output_config", "output_format", "chat_template_kwargs", "metadata",
	"input_ids", "token_ids", "input_embeds", "prompt_embeds", "logit_bias", "image_data", "video_data", "audio_data",
)

// set returns the set of those names.
func set(names ...string) map[string]bool {
	m := make(map[string]bool, len(names))
	for _, name := range names {
		m[name] = true
	}
	return m
}

// Find returns the path of the first member of a body that directs an engine; empty: there is
// none. Members that are null direct nothing.
func Find(body *jsonbody.Body) (path string) {
	body.Each(func(m jsonbody.Member) bool {
		switch {
		case m.Value.Type == gjson.Null:
		case m.Key == transferParams && onlyTokens(m.Value):
		case names[m.Key]:
			path = m.Key
		case m.Value.Type == gjson.JSON && !contents[m.Key]:
			if name := within(m.Value.Raw, m.Key == hints); name != "" {
				path = m.Key + "." + name
			}
		}
		return path == ""
	})
	return path
}

// onlyTokens reports whether transfer parameters have no more than the tokens of the prompt.
func onlyTokens(params gjson.Result) bool {
	only := params.IsObject()
	jsonbody.EachName(params.Raw, func(name, rest string) bool {
		only = only && (name == promptTokens || isNull(rest))
		return only
	})
	return only
}

// within returns the first name in a JSON text that directs an engine; empty: there is none.
func within(text string, hints bool) (found string) {
	jsonbody.EachName(text, func(name, rest string) bool {
		if names[name] && !isNull(rest) && !(hints && name == rank) {
			found = name
		}
		return found == ""
	})
	return found
}

// isNull reports whether a text begins with null.
func isNull(text string) bool { return strings.HasPrefix(text, "null") }

// FindIn is Find for a body that is no JSON object: for the fields of a form, and what of them is
// JSON, as vllm_xargs is. What cannot be read is searched for the names.
func FindIn(contentType string, body []byte) (path string) {
	kind, params, err := mime.ParseMediaType(contentType)
	switch {
	case err == nil && kind == "multipart/form-data":
		path, err = inForm(multipart.NewReader(bytes.NewReader(body), params["boundary"]))
	case err == nil && kind == "application/x-www-form-urlencoded":
		var fields url.Values
		fields, err = url.ParseQuery(jsonbody.View(body))
		for name, values := range fields {
			for _, value := range values {
				if found := inField(name, value); found != "" {
					path = found
				}
			}
		}
	default:
		return within(jsonbody.View(body), false)
	}
	if path != "" || err == nil {
		return path
	}
	for name := range names {
		if bytes.Contains(body, []byte(name)) {
			return name
		}
	}
	return within(jsonbody.View(body), false)
}

// maxField bounds the text of a field that is looked at, bytes.
const maxField = 1 << 20

// inForm is FindIn for a multipart form.
func inForm(form *multipart.Reader) (path string, err error) {
	for {
		part, err := form.NextRawPart()
		if err == io.EOF {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		var value []byte
		if part.FileName() == "" {
			if value, err = io.ReadAll(io.LimitReader(part, maxField)); err != nil {
				return "", err
			}
		}
		if path = inField(part.FormName(), string(value)); path != "" {
			return path, nil
		}
	}
}

// inField returns the name in a field of a form that directs an engine; empty: there is none.
func inField(field, value string) string {
	if names[field] {
		return field
	}
	if !contents[field] && strings.ContainsRune(value, '{') {
		if name := within(value, false); name != "" {
			return field + "." + name
		}
	}
	return ""
}

// headers direct an engine, or a sidecar or a router in front of it, to an address.
var headers = set(
	"X-Prefiller-Host-Port", "X-Prefiller-Url", "X-Encoder-Hosts-Ports", "X-Data-Parallel-Host-Port", "X-Kv-Cache-Source-Host-Port",
	"X-Smg-Target-Worker",
)

// overrides begins the names of SGLang's headers that take the place of members of the body.
const overrides = "X-Override-"

// rankHeader is not among headers: a pinned request may name the rank of its worker.
const rankHeader = "X-Data-Parallel-Rank"

// DropHeaders deletes the headers that direct an engine, those too of which a server takes
// underscores for dashes.
func DropHeaders(header http.Header) {
	for name := range header {
		dashed := name
		if strings.IndexByte(name, '_') >= 0 {
			dashed = http.CanonicalHeaderKey(strings.ReplaceAll(name, "_", "-"))
		}
		if headers[dashed] || strings.HasPrefix(dashed, overrides) || dashed == rankHeader && dashed != name {
			delete(header, name)
		}
	}
}
