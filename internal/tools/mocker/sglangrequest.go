package mocker

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/tools/engine"
)

const (
	// generateMaxTokens is SGLang's max_new_tokens of a /generate that names none.
	generateMaxTokens = 128
	// sglangModel is the model's name in the answer to a request that names none.
	sglangModel = "default"
)

// invalid returns the problem of a value that SGLang refuses.
func invalid(format string, args ...any) *refusal { return badRequest("", format, args...) }

// prepareSGLang reads a request as SGLang's server does and makes up its answer.
func (w *Worker) prepareSGLang(body *jsonbody.Body, of kind) (*Answer, *refusal) {
	f := &fields{body: body}
	f.supported()
	if of == generateKind {
		f.generateFields()
	}
	n, stop := f.integer("n", 1), f.stop()
	if of == generateKind {
		stop.After = f.integer("min_new_tokens", 0)
	}
	stop.Keep = f.flag("no_stop_trim")
	limit, named := f.sglangLimit(of)
	if temperature := f.number("temperature", 1); temperature < 0 {
		f.fail(invalid("temperature must be a non-negative finite number, got %v.", temperature))
	}
	if n < 1 || n > maxChoices {
		f.fail(invalid("n must be at least 1 and at most %d, got %d.", maxChoices, n))
	}
	f.body = body
	f.names(of)
	if of == chatKind && f.flag("stream") && f.flag("return_token_ids") {
		f.fail(&refusal{http.StatusBadRequest, "BadRequest",
			"return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using return_token_ids=true.",
			""})
	}
	if f.problem != nil {
		return nil, f.problem
	}
	if _, hasRoom := bootstrapRoom(body, 0); w.part.Role != kv.RoleBoth && !hasRoom {
		return nil, invalid("Invalid request: Disaggregated request received without bootstrap room id. req.rid=%q", body.Get("rid").String())
	}
	prompts, problem := w.sglangPrompts(body, of)
	if problem != nil {
		return nil, problem
	}
	a := &Answer{
		sglang: true, kind: of, model: cmp.Or(body.Get("model").String(), sglangModel), created: time.Now().Unix(), received: time.Now(),
		blockSize: w.cfg.BlockSize, prompts: prompts, samples: n, More: make(chan struct{}, 1), list: n > 1 || isBatch(body),
		promptIDs: f.flag("return_prompt_token_ids"), stream: f.flag("stream"), tokenIDs: body.Get("return_token_ids").Bool(),
		details: body.Get("return_cached_tokens_details").Bool(), logprobs: of == generateKind && body.Get("return_logprob").Bool(), storage: w.cfg.DiskBlocks > 0,
		usage: body.Get("stream_options").Get("include_usage").Bool(), continuousUsage: body.Get("stream_options").Get("continuous_usage_stats").Bool(),
	}
	total := 0
	for i, prompt := range prompts {
		own, problem := w.sglangOwner(body, of, i)
		if problem != nil {
			return nil, problem
		}
		length, problem := w.sglangLength(len(prompt), limit, named)
		if problem != nil {
			return nil, problem
		}
		if total += n * (len(prompt) + length); total > maxTokens {
			return nil, invalid("prompts and answers of all choices have more than the %d tokens that a simulated worker takes in one request; "+
				"ask for fewer", maxTokens)
		}
		stops := stop
		if stops.After < 0 || stops.After > length {
			return nil, invalid("min_new_tokens must be in [0, max_new_tokens(%d)], got %d.", length, stops.After)
		}
		silent := length == 0
		if silent || w.prefillsFor(body) { // the engine makes at least one
			length, stops.After = 1, min(stops.After, 1)
		}
		seed := xxh3.Hash(kv.TokenBytes(prompt))
		for range n {
			c := w.choose(a, own, prompt, length, stops, seed)
			if c.silent = silent; silent {
				c.Text = ""
			}
			a.choices = append(a.choices, c)
			seed++
		}
	}
	return a, nil
}

// generateFields checks what only /generate has, and has the following fields read
// from sampling_params, of which all prompts of a batch have the first's.
func (f *fields) generateFields() {
	for _, name := range []string{"return_hidden_states", "input_embeds", "image_data", "video_data", "audio_data",
		"session_params"} {
		if v := f.body.Get(name); !isFalse(v) {
			f.fail(invalid("%s: %.100s is not supported by simulated workers; leave it out", name, v.Raw))
		}
	}
	params := itemOf(f.body.Get("sampling_params"), 0)
	if IsNull(params) {
		params = gjson.Parse("{}")
	}
	body, ok := jsonbody.Parse([]byte(params.Raw))
	if !ok {
		f.fail(badField("sampling_params", "dictionary", params))
		return
	}
	f.body = body
}

// names checks the fields that are texts, or lists of them.
func (f *fields) names(of kind) {
	for _, name := range []string{"rid", "cache_salt", "extra_key"} {
		v := f.body.Get(name)
		for _, one := range append(v.Array(), v) {
			if !IsNull(one) && one.Type != gjson.String && !one.IsArray() || one.IsArray() && one.Raw != v.Raw {
				f.fail(badField(name, "string", one))
			}
		}
	}
	if rid := f.body.Get("rid"); of == generateKind && rid.IsArray() && f.problem == nil {
		prompts := 1
		for _, name := range []string{"input_ids", "text"} {
			if list := f.body.Get(name); isBatch(f.body) && list.IsArray() {
				prompts = int(list.Get("#").Int())
			}
		}
		if int(rid.Get("#").Int()) != prompts {
			f.fail(invalid("The specified rids length mismatch with the batch_size for batch processing."))
		}
	}
}

// sglangLimit returns the most tokens of an answer; not named: nothing says it, and
// the context alone bounds it.
func (f *fields) sglangLimit(of kind) (limit int, named bool) {
	switch of {
	case generateKind:
		if limit = f.integer("max_new_tokens", generateMaxTokens); limit < 0 {
			f.fail(invalid("max_new_tokens must be at least 0, got %d.", limit))
		}
		return limit, true
	case completionKind:
		limit = f.integer("max_tokens", completionMaxTokens)
	default:
		for _, name := range []string{"max_completion_tokens", "max_tokens"} {
			if !IsNull(f.body.Get(name)) && limit == 0 {
				limit, named = f.integer(name, 0), true
			}
		}
		if !named {
			return 0, false
		}
	}
	if limit < 1 {
		f.fail(&refusal{http.StatusBadRequest, badBody, "max_tokens must be positive", ""})
	}
	return limit, true
}

// sglangLength returns the maximum length, tokens, of an answer to a prompt of that many.
func (w *Worker) sglangLength(prompt, limit int, named bool) (int, *refusal) {
	longest := w.maxModelLen
	switch {
	case prompt >= longest:
		return 0, invalid("The input (%d tokens) is longer than the model's context length (%d tokens).", prompt, longest)
	case !named:
		return longest - prompt, nil
	case prompt+limit > longest:
		return 0, invalid("Requested token count exceeds the model's maximum context length of %d tokens. You requested a total of %d tokens: "+
			"%d tokens from the input messages and %d tokens for the completion. Please reduce the number of tokens in the input messages or the "+
			"completion to fit within the limit.",
			longest, prompt+limit, prompt, limit)
	}
	return limit, nil
}

// isBatch reports whether a body of /generate has a list of prompts.
func isBatch(body *jsonbody.Body) bool {
	return body.Get("text").IsArray() || body.Get("input_ids").Get("0").IsArray()
}

// sglangPrompts returns the prompts of a request as tokens.
func (w *Worker) sglangPrompts(body *jsonbody.Body, of kind) (prompts [][]uint32, problem *refusal) {
	if of == generateKind {
		return w.generatePrompts(body)
	}
	if of == chatKind {
		if !body.Get("messages").Get("0").Exists() {
			return nil, invalid("Messages cannot be empty.")
		}
		if ids := body.Get("input_ids"); !IsNull(ids) { // they replace the messages
			if !ids.IsArray() || ids.Get("0").IsArray() || ids.Get("0").Type == gjson.String {
				return nil, badField("input_ids", "list of integers", ids)
			}
			if !ids.Get("0").Exists() {
				return nil, invalid("input_ids cannot be empty.")
			}
			return w.promptTokens("input_ids", ids)
		}
		tokens, err := w.model.SGLangChatTokens(body)
		if err != nil {
			return nil, invalid("%v", err)
		}
		return [][]uint32{tokens}, nil
	}
	prompt := body.Get("prompt")
	if IsNull(prompt) || prompt.Type == gjson.String && prompt.Str == "" || prompt.IsArray() && !prompt.Get("0").Exists() {
		return nil, invalid("Prompt cannot be empty")
	}
	return w.promptTokens("prompt", prompt)
}

// promptTokens returns the tokens of each prompt in a field.
func (w *Worker) promptTokens(name string, field gjson.Result) ([][]uint32, *refusal) {
	prompts, err := w.model.SGLangPromptTokens(field)
	if err != nil {
		return nil, badField(name, "string or list of integers", field)
	}
	for _, prompt := range prompts {
		if len(prompt) == 0 { // a real server's scheduler may die of it
			return nil, invalid("input_ids cannot be empty.")
		}
	}
	return prompts, nil
}

// generatePrompts returns those of /generate.
func (w *Worker) generatePrompts(body *jsonbody.Body) (prompts [][]uint32, problem *refusal) {
	text, ids := body.Get("text"), body.Get("input_ids")
	switch isText := text.Type == gjson.String || text.IsArray(); {
	case IsNull(text) && IsNull(ids):
		return nil, invalid("Either text, input_ids or input_embeds should be provided.")
	case !IsNull(text) && !isText || text.IsArray() && text.Get("0").Exists() && text.Get("0").Type != gjson.String:
		return nil, badField("text", "string", text)
	case isText:
		return w.promptTokens("text", text)
	case !ids.IsArray() || ids.Get("0").Type == gjson.String:
		return nil, badField("input_ids", "list of integers", ids)
	case !ids.Get("0").Exists():
		return nil, invalid("input_ids cannot be empty.")
	}
	return w.promptTokens("input_ids", ids)
}

// sglangOwner returns what keeps prompt i of a request apart. Any model's name is
// taken; what follows a colon in it is an adapter's.
func (w *Worker) sglangOwner(body *jsonbody.Body, of kind, i int) (own owner, problem *refusal) {
	own.salt, own.extra = itemOf(body.Get("cache_salt"), i).Str, itemOf(body.Get("extra_key"), i).Str
	adapter := itemOf(body.Get("lora_path"), i).Str
	if model := body.Get("model").String(); of != generateKind && model != w.cfg.ServedModelName {
		if _, after, has := strings.Cut(strings.TrimPrefix(model, w.cfg.ServedModelName), ":"); has {
			adapter = cmp.Or(strings.TrimSpace(after), adapter)
		}
	}
	if adapter == "" {
		return own, nil
	}
	for _, loaded := range w.loaded() {
		if loaded.Name == adapter {
			own.adapter = loaded
			return own, nil
		}
	}
	return own, invalid("Got LoRA adapter that has never been loaded: %s", adapter)
}

// sglangRank returns the rank of a request, or without one the next
// in turn. Only the routes of OpenAI's look at the header.
func (w *Worker) sglangRank(in *http.Request, body *jsonbody.Body, of kind) (*Rank, *refusal) {
	asked := body.Get("routed_dp_rank")
	if IsNull(asked) {
		asked = body.Get("data_parallel_rank")
	}
	if header := in.Header.Get(web.HeaderRank); header != "" && of != generateKind {
		number, err := strconv.Atoi(header)
		if err != nil {
			return nil, &refusal{http.StatusBadRequest, "400", fmt.Sprintf("Invalid X-Data-Parallel-Rank header: must be an integer, got '%s'",
				header), ""}
		}
		asked = gjson.Parse(strconv.Itoa(number))
	}
	if IsNull(asked) {
		return w.Ranks[(w.turn.Add(1)-1)%uint64(len(w.Ranks))], nil
	}
	number, err := strconv.Atoi(asked.Raw)
	if err != nil {
		return nil, badField("routed_dp_rank", "integer", asked)
	}
	if number < 0 || number >= len(w.Ranks) {
		return nil, invalid("routed_dp_rank=%d out of range [0, %d)", number, len(w.Ranks))
	}
	return w.Ranks[number], nil
}

// identify names the answer and its choices.
func (a *Answer) identify(body *jsonbody.Body, rank *Rank) {
	rid := body.Get("rid")
	for i, c := range a.choices {
		switch given := itemOf(rid, i/a.samples); {
		case given.Type != gjson.String || given.Str == "" || a.samples > 1:
			var random [16]byte
			_, _ = rand.Read(random[:]) // never fails
			c.id = hex.EncodeToString(random[:])
		case len(a.choices) > 1 && !rid.IsArray():
			c.id = fmt.Sprintf("%s_%d", given.Str, i)
		default:
			c.id = given.Str
		}
	}
	a.id = a.choices[0].id
	if len(rank.w.Ranks) > 1 {
		a.rank = &rank.number
	}
}

// abortable are the answer's choices as /abort_request finds them; unpair ends the
// wait for the other leg.
func (a *Answer) abortable(unpair func()) (list []*inference) {
	for _, c := range a.choices {
		list = append(list, &inference{c.id, func() {
			c.aborted.Store(true)
			unpair()
			signalOnce(a.More)
		}})
	}
	return list
}

// stopped reports whether some choice was aborted.
func (a *Answer) stopped() bool {
	for _, c := range a.choices {
		if c.aborted.Load() {
			return true
		}
	}
	return false
}

// warm computes the prompts once before there are several choices to each, as SGLang
// does. It returns false if the client has left.
func (w *Worker) warm(ctx context.Context, rank *Rank, answer *Answer) bool {
	if !w.sglang() || answer.samples == 1 {
		return true
	}
	warm := &Answer{More: make(chan struct{}, 1)}
	for i := 0; i < len(answer.choices); i += answer.samples {
		c := answer.choices[i]
		one := &Choice{Answer: warm, owner: c.owner, prompt: c.prompt, Output: 1, tokens: c.tokens, published: c.published, Finish: "length"}
		one.request = &engine.Request{Blocks: c.request.Blocks[:c.prompt/w.cfg.BlockSize], Prompt: c.prompt, Output: 1, Tag: one,
			Adapter: c.request.Adapter}
		warm.choices = append(warm.choices, one)
	}
	refused := rank.submit(warm)
	defer rank.leave(warm)
	for left := len(warm.choices); left > 0; {
		select {
		case <-warm.More:
			_, ended := warm.take(nil)
			left -= ended
		case <-refused: // so will the choices be
			return true
		case <-ctx.Done():
			return false
		case <-w.ctx.Done():
			panic(http.ErrAbortHandler)
		}
	}
	return true
}
