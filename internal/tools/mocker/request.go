package mocker

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/tools/engine"
)

const (
	// completionMaxTokens is vLLM's max_tokens of a completion that names none.
	completionMaxTokens = 16
	// maxChoices is vLLM's limit of n.
	maxChoices = 16384
	// maxTokens bounds the tokens of all choices of a request, their prompts
	// included.
	maxTokens = 1 << 24
	// greedyBelow is the temperature below which vLLM does not sample.
	greedyBelow = 1e-5
)

// refusal is why a mock worker refuses a request, in vLLM 0.32's words.
type refusal struct {
	status  int
	kind    string // error.type
	message string
	param   string // empty: null
}

// badRequest returns the problem of a value that vLLM's own checks refuse.
func badRequest(param, format string, args ...any) *refusal {
	return &refusal{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...), param}
}

// badBody is the type of the error about a body of the wrong form.
const badBody = "Bad Request"

// badField returns the problem of a field of the wrong type.
func badField(name, want string, got gjson.Result) *refusal {
	return &refusal{
		http.StatusBadRequest, badBody,
		fmt.Sprintf("1 validation error:\n  {'loc': 'body.%s', 'msg': 'Input should be a valid %s', 'input': '%.100s'}", name, want,
			got.String()), "body." + name,
	}
}

// fields reads fields of a request; the first that is wrong stays in
// problem.
type fields struct {
	body    *jsonbody.Body
	problem *refusal
}

func (f *fields) fail(problem *refusal) {
	if f.problem == nil {
		f.problem = problem
	}
}

// number returns a field; null and none give otherwise.
func (f *fields) number(name string, otherwise float64) float64 {
	v := f.body.Get(name)
	switch v.Type {
	case gjson.Null:
		return otherwise
	case gjson.Number:
		return v.Num
	}
	f.fail(badField(name, "number", v))
	return otherwise
}

// integer is number for whole ones.
func (f *fields) integer(name string, otherwise int) int {
	v := f.body.Get(name)
	if v.Type == gjson.Null {
		return otherwise
	}
	if v.Type != gjson.Number || v.Num != float64(int(v.Num)) {
		f.fail(badField(name, "integer", v))
	}
	return int(v.Num)
}

func (f *fields) flag(name string) bool { return f.body.Get(name).Bool() }

// within checks a sampling parameter, which changes nothing here.
func (f *fields) within(name string, ok func(float64) bool, says string, named bool) {
	v := f.number(name, 1) // which all of them allow
	if ok(v) {
		return
	}
	text, param := strconv.FormatFloat(v, 'g', -1, 64), ""
	if !strings.ContainsAny(text, ".e") {
		text += ".0"
	}
	message := fmt.Sprintf("%s must be %s, got %s.", name, says, text)
	if named {
		param = name
		message += fmt.Sprintf(" (parameter=%s, value=%s)", name, text)
	}
	f.fail(badRequest(param, "%s", message))
}

// unsupportedFields are fields that would shape an answer in a way that mock
// workers cannot, each with what of it changes nothing.
var unsupportedFields = []struct {
	name     string
	harmless func(gjson.Result) bool
}{
	{"logprobs", isFalse}, {"top_logprobs", isZero}, {"prompt_logprobs", IsNull}, {"logprob_token_ids", IsNull},
	{"echo", isFalse}, {"suffix", IsNull}, {"use_beam_search", isFalse}, {"prompt_embeds", IsNull},
	{"response_format", func(v gjson.Result) bool { return IsNull(v) || v.Get("type").Str == "text" }},
	{"structured_outputs", IsNull}, {"ec_transfer_params", IsNull},
	{"tool_choice", func(v gjson.Result) bool { return IsNull(v) || v.Str == "auto" || v.Str == "none" }},
}

// IsNull reports whether a field is missing or null.
func IsNull(v gjson.Result) bool { return v.Type == gjson.Null }

func isFalse(v gjson.Result) bool { return v.Type == gjson.Null || v.Type == gjson.False }
func isZero(v gjson.Result) bool {
	return v.Type == gjson.Null || v.Type == gjson.Number && v.Num == 0
}

// check refuses requests that mock workers cannot serve or that vLLM refuses whatever the
// prompt is.
func (f *fields) check(transfers bool) {
	f.supported()
	if v := f.body.Get("kv_transfer_params"); !IsNull(v) && !transfers && !(len(v.Map()) == 1 && !IsNull(promptIDs(f.body))) {
		f.fail(badRequest("kv_transfer_params",
			"kv_transfer_params: this simulated worker hands nothing over; start it with --prefill-workers and --decode-workers"))
	}
	if options := f.body.Get("stream_options"); options.IsObject() && len(options.Map()) > 0 && !f.flag("stream") {
		f.fail(badRequest("stream_options", "Stream options can only be defined when `stream=True`. (parameter=stream_options)"))
	}
	if salt := f.body.Get("cache_salt"); !IsNull(salt) && salt.Str == "" {
		f.fail(badRequest("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"))
	}
	f.within("temperature", func(v float64) bool { return v >= 0 }, "non-negative", true)
	f.within("temperature", func(v float64) bool { return v <= 2 }, "in [0, 2]", true)
	f.within("top_p", func(v float64) bool { return v > 0 && v <= 1 }, "in (0, 1]", true)
	for _, name := range []string{"presence_penalty", "frequency_penalty"} {
		f.within(name, func(v float64) bool { return v >= -2 && v <= 2 }, "in [-2, 2]", false)
	}
}

// supported refuses what mock workers cannot do.
func (f *fields) supported() {
	for _, u := range unsupportedFields {
		if v := f.body.Get(u.name); !u.harmless(v) {
			f.fail(badRequest(u.name, "%s: %.100s is not supported by simulated workers; leave it out", u.name, v.Raw))
		}
	}
}

// choices returns n.
func (f *fields) choices() int {
	n := f.integer("n", 1)
	switch {
	case n < 1:
		f.fail(badRequest("", "n must be at least 1, got %d.", n))
	case n > maxChoices:
		f.fail(badRequest("", "n must be at most %d, got %d. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.",
			maxChoices, n))
	case n > 1 && f.number("temperature", 1) < greedyBelow:
		f.fail(badRequest("", "n must be 1 when using greedy sampling, got %d.", n))
	}
	return n
}

// limit returns the most tokens of an answer; longest is the model's length.
func (f *fields) limit(chat bool, longest int) int {
	name, limit := "max_tokens", completionMaxTokens
	if chat {
		limit = longest
		if !IsNull(f.body.Get("max_completion_tokens")) {
			name = "max_completion_tokens"
		}
	}
	limit = f.integer(name, limit)
	if limit > longest && !IsNull(f.body.Get(name)) {
		f.fail(badRequest(name,
			"%s=%d cannot be greater than max_model_len=%d. Please request fewer output tokens. (parameter=%[1]s, value=%[2]d)", name, limit,
			longest))
	}
	return limit
}

// stop reads where an answer ends before its length.
func (f *fields) stop() Stop {
	s := Stop{After: f.integer("min_tokens", 0), Keep: f.flag("include_stop_str_in_output"), ignoreEnd: f.flag("ignore_eos")}
	if s.After < 0 {
		f.fail(badRequest("", "min_tokens must be greater than or equal to 0, got %d.", s.After))
	}
	list := f.body.Get("stop")
	texts := list.Array()
	if list.Type != gjson.Null && list.Type != gjson.String && !list.IsArray() {
		f.fail(badField("stop", "string", list))
	}
	for _, v := range texts {
		switch {
		case v.Type != gjson.String:
			f.fail(badField("stop", "string", v))
		case v.Str == "":
			f.fail(badRequest("", "stop cannot contain an empty string."))
		}
		s.Texts = append(s.Texts, v.Str)
	}
	if list := f.body.Get("stop_token_ids"); !IsNull(list) {
		var err error
		if s.Tokens, err = tokens.ReadTokens(list); err != nil || !list.IsArray() {
			f.fail(badField("stop_token_ids", "list of integers", list))
		}
	}
	return s
}

// promptIDs returns the tokens that replace a chat's messages.
func promptIDs(body *jsonbody.Body) gjson.Result {
	return body.Get("kv_transfer_params").Get("prompt_token_ids")
}

// prompts returns the prompts of a request as tokens.
func (w *Worker) prompts(body *jsonbody.Body, chat bool) ([][]uint32, *refusal) {
	if ids := promptIDs(body); chat && !IsNull(ids) {
		tokens, err := tokens.ReadTokens(ids)
		if err != nil || len(tokens) == 0 || !ids.IsArray() {
			return nil, badRequest("kv_transfer_params.prompt_token_ids",
				"`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers. "+
					"(parameter=kv_transfer_params.prompt_token_ids)")
		}
		return [][]uint32{tokens}, nil
	}
	if chat {
		tokens, err := w.model.ChatBodyTokens(body)
		if err != nil {
			return nil, badRequest("", "%v", err)
		}
		return [][]uint32{tokens}, nil
	}
	prompt := body.Get("prompt")
	if IsNull(prompt) || prompt.Type == gjson.String && prompt.Str == "" {
		return nil, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
	}
	if prompt.IsArray() && !prompt.Get("0").Exists() {
		return nil, badRequest("", "You must pass at least one prompt")
	}
	prompts, err := w.model.CompletionBodyTokens(body)
	if err != nil {
		return nil, badRequest("", "%v", err)
	}
	for _, tokens := range prompts {
		if len(tokens) == 0 {
			return nil, badRequest("", "The decoder prompt cannot be empty")
		}
	}
	return prompts, nil
}

// tooLong is the problem of a prompt that has more tokens than the model takes.
// vLLM cuts texts, though not lists of tokens, one token after that.
func (w *Worker) tooLong(tokens int, isText bool) *refusal {
	if isText {
		tokens = w.maxModelLen + 1
	}
	qualifier := ""
	if tokens == w.maxModelLen+1 {
		qualifier = "at least "
	}
	return badRequest("input_tokens",
		"This model's maximum context length is %d tokens. However, your prompt contains %s%d input tokens, which exceeds this limit even "+
			"without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%[3]d)",
		w.maxModelLen, qualifier, tokens)
}

// prepare reads a request and makes up its answer.
func (w *Worker) prepare(body *jsonbody.Body, of kind) (*Answer, *refusal) {
	chat := of == chatKind
	f := &fields{body: body}
	f.check(w.part.Kind == kv.KindNIXL || w.cfg.pulls())
	n, limit, stop := f.choices(), f.limit(chat, w.maxModelLen), f.stop()
	if w.prefillsFor(body) {
		limit, stop.After = 1, min(stop.After, 1)
	}
	if f.problem != nil {
		return nil, f.problem
	}
	adapter, problem := w.served(body.Get("model").String())
	if problem != nil {
		return nil, problem
	}
	prompts, problem := w.prompts(body, chat)
	if problem != nil {
		return nil, problem
	}
	options := body.Get("stream_options")
	own := owner{adapter: adapter, salt: body.Get("cache_salt").Str}
	a := &Answer{
		kind: of, model: w.cfg.ServedModelName, created: time.Now().Unix(),
		blockSize: w.cfg.BlockSize, prompts: prompts, samples: n, More: make(chan struct{}, 1),
		stream: f.flag("stream"), tokenIDs: f.flag("return_token_ids"),
		usage: options.Get("include_usage").Bool(), continuousUsage: options.Get("continuous_usage_stats").Bool(),
	}
	if adapter.Name != "" {
		a.model = adapter.Name
	}
	isText := chat || body.Get("prompt").Type == gjson.String || body.Get("prompt.0").Type == gjson.String
	total := 0
	for _, prompt := range prompts {
		if len(prompt) > w.maxModelLen {
			return nil, w.tooLong(len(prompt), isText)
		}
		length := min(limit, w.maxModelLen-len(prompt))
		switch total += n * (len(prompt) + length); {
		case length < 1:
			return nil, badRequest("max_tokens", "max_tokens must be at least 1, got %d. (parameter=max_tokens, value=%[1]d)", length)
		case stop.After > length:
			return nil, badRequest("", "min_tokens must be less than or equal to max_tokens=%d, got %d.", length, stop.After)
		case total > maxTokens:
			return nil, badRequest("n",
				"prompts and answers of all choices have more than the %d tokens that a simulated worker takes in one request; ask for fewer",
				maxTokens)
		}
		seed := xxh3.Hash(kv.TokenBytes(prompt))
		for range n {
			a.choices = append(a.choices, w.choose(a, own, prompt, length, stop, seed))
			seed++
		}
	}
	return a, nil
}

// choose makes up one answer to a prompt: of that many tokens, or fewer where it
// stops before. The same seed gives the same.
func (w *Worker) choose(a *Answer, own owner, prompt []uint32, length int, stop Stop, seed uint64) *Choice {
	c := &Choice{Answer: a, owner: own, index: len(a.choices), prompt: len(prompt), Finish: "length"}
	if natural := max(w.cfg.OutputTokens, stop.After); natural < length && !stop.ignoreEnd {
		length, c.Finish = natural, "stop"
	}
	tokens, texts := w.words.answer(seed, length)
	var text strings.Builder
	for _, t := range texts {
		text.WriteString(t)
		c.Ends = append(c.Ends, text.Len())
	}
	c.Text = text.String()
	c.Output = len(tokens)
	stop.Cut(c, tokens)
	c.tokens = append(append(make([]uint32, 0, len(prompt)+c.Output), prompt...), tokens[:c.Output]...)
	local := kv.HashBlocks(nil, c.tokens, w.cfg.BlockSize, own.adapter.Name, own.salt)
	blocks := make([]kv.StoredBlock, len(local))
	hashes := kv.SequenceHashes(nil, local)
	for i, hash := range hashes {
		blocks[i] = kv.StoredBlock{Engine: hash, Local: local[i]}
		if own.extra != "" {
			blocks[i].Engine = xxh3.HashStringSeed(own.extra, hash)
		}
	}
	if own.extra != "" {
		c.published = hashes
	}
	c.request = &engine.Request{Blocks: blocks, Prompt: len(prompt), Output: c.Output, Tag: c, Adapter: own.adapter.Name}
	return c
}
