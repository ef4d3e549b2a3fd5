package tokens

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/encode"
	"kvrouter/internal/prompt/native"
)

// Model computes prompt tokens with a model's tokenizer and chat template, as vLLM 0.32
// or SGLang 0.5.23 does. All methods but Close are safe for concurrent use.
type Model struct {
	encoder     *encode.Encoder
	segments    *encode.Segments
	chats       *chat.Renderer
	turns       turns
	files       *chat.Files
	maxModelLen atomic.Int64

	longestToken int  // of the vocabulary, characters; 0: unknown
	square       bool // encoding takes a time in proportion to the square of a text's length
	wordPiece    bool // the tokenizer's algorithm

	read func() ([]byte, error) // returns tokenizer.json, which is too large to keep
	// Vocabulary returns the name of each token by its id.
	Vocabulary func() []string
}

// openModel reads the tokenizer and the chat templates in a model's folder, for an
// engine with these chat options. A model without a usable template opens too: its chats
// are chat.ErrNotRenderable.
func openModel(dir string, options chat.Options, limits chat.Limits) (*Model, error) {
	path := filepath.Join(dir, "tokenizer.json")
	files, err := chat.ReadFiles(dir, limits)
	if err != nil {
		return nil, err
	}
	return NewModel(path, func() ([]byte, error) { return chat.ReadJSON(path, limits.MaxTokenizerBytes) }, files, options)
}

// NewModel returns a model of the tokenizer.json that read returns and of the files
// beside it. Errors name the tokenizer by path.
func NewModel(path string, read func() ([]byte, error), files *chat.Files, options chat.Options) (*Model, error) {
	library, err := native.Open()
	if err != nil {
		return nil, err
	}
	library.BoundArenas()
	read = encode.WithoutLimits(read)
	raw, err := read()
	if err != nil {
		return nil, fmt.Errorf("the model folder has no readable tokenizer.json: %w", err)
	}
	square, err := encode.Check(library, raw)
	if err != nil {
		return nil, fmt.Errorf("%s is refused: %w", path, err)
	}
	defer library.ReadInPages()()
	encoder, err := encode.New(library, raw, read)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	m := &Model{
		encoder: encoder, segments: encode.NewSegments(raw, encoder.Encode, encode.DefaultCache), chats: chat.NewRenderer(files, options),
		turns: newTurns(), files: files, read: read, square: square,
		longestToken: longestToken(raw), wordPiece: gjson.GetBytes(raw, "model.type").Str == "WordPiece",
	}
	m.Vocabulary = sync.OnceValue(m.readVocabulary)
	m.maxModelLen.Store(int64(files.MaxModelLen))
	return m, nil
}

// Encoder names the library that encodes, and the reason if it is not the fast one.
func (m *Model) Encoder() (name, why string) { return m.encoder.Library() }

// Problem returns why the model's chat templates are not used; empty: they are, or there
// are none.
func (m *Model) Problem() string { return m.chats.Problem() }

// Close frees the model; no other call may be running.
func (m *Model) Close() {
	m.encoder.Close()
	m.chats.Close()
}

// MaxModelLen is the maximum length of a prompt with its answer, tokens: the model's, or
// the engine's after SetMaxModelLen. 0 means unknown.
func (m *Model) MaxModelLen() int { return int(m.maxModelLen.Load()) }

// SetMaxModelLen records the engine's limit, 1 to 2^30 tokens; any other number is
// left out.
func (m *Model) SetMaxModelLen(n int) {
	if n >= 1 && n <= maxModelLen {
		m.maxModelLen.Store(int64(n))
	}
}

// ChatBodyTokens returns the prompt tokens of the body of a /v1/chat/completions
// request. chat.ErrNotRenderable means that only the engine can compute them.
func (m *Model) ChatBodyTokens(body *jsonbody.Body) ([]uint32, error) {
	return m.boundedChatTokens(bounds{}, body)
}

// boundedChatTokens is ChatBodyTokens within bounds; its error may be errTooLong or
// errNoTurn.
func (m *Model) boundedChatTokens(b bounds, body *jsonbody.Body) ([]uint32, error) {
	req, err := m.chats.Parse(body, chat.Completion)
	if err != nil {
		return nil, err
	}
	if m.files.Harmony {
		return nil, chat.NotRenderable("the engine renders gpt_oss with its own code")
	}
	return m.chatTokens(b, req)
}

// ChatOf returns the chat that SGLang makes of a request of another API. See chat.FromOther.
func (m *Model) ChatOf(path string, body *jsonbody.Body) (*jsonbody.Body, error) {
	return chat.FromOther(path, body, m.chats.SystemRule())
}

// SGLangChatTokens is ChatBodyTokens by SGLang's rules.
func (m *Model) SGLangChatTokens(body *jsonbody.Body) ([]uint32, error) {
	return m.sglangChatTokens(bounds{}, body)
}

// SGLangPromptTokens returns the tokens of SGLang's prompt, text or input_ids: a
// text, a list of texts, token ids, or a list of such lists.
func (m *Model) SGLangPromptTokens(prompt gjson.Result) ([][]uint32, error) {
	return m.sglangPromptTokens(bounds{}, prompt)
}

// engineChatTokens is boundedChatTokens by the rules of SGLang or of vLLM.
func (m *Model) engineChatTokens(sglang bool, b bounds, body *jsonbody.Body) ([]uint32, error) {
	if sglang {
		return m.sglangChatTokens(b, body)
	}
	return m.boundedChatTokens(b, body)
}

func (m *Model) chatTokens(b bounds, req *chat.Request) ([]uint32, error) {
	if !b.fitsTexts(req.Texts()) {
		return nil, errTooLong
	}
	rendered, err := m.chats.Render(req)
	if err != nil {
		return nil, err
	}
	defer rendered.Free()
	tokens, err := m.encode(b, rendered.Text, req.AddSpecial)
	if err != nil {
		return nil, err
	}
	return truncate(tokens, req.Truncate)
}

// CacheTokens sets the capacity of the token cache of text pieces. It must not be
// called while requests are served.
func (m *Model) CacheTokens(tokens int) { m.segments.SetCache(tokens) }

// encode is Encode through the cache and within bounds. The caller must not change the
// tokens.
func (m *Model) encode(b bounds, text string, addSpecial bool) (tokens []uint32, err error) {
	if !b.fits(text) {
		return nil, errTooLong
	}
	tokens, ok := m.segments.EncodeBy(func(text string, pieces []string, addSpecial bool) (tokens [][]uint32, ok bool) {
		tokens, err = m.encodePieces(b, text, pieces, addSpecial)
		return tokens, err == nil
	}, text, addSpecial)
	switch {
	case err != nil:
		return nil, err
	case !ok || len(tokens) == 0 && text != "":
		return nil, errNoTokens
	case len(tokens) > tokensPerByte*len(text)+tokensAround:
		return nil, errManyTokens
	}
	return tokens, nil
}

// A normalizer makes at most 12 bytes of one (U+FDFA in NFKD), and each byte is a token at
// most; what is put around a text has a few tokens.
const (
	tokensPerByte = 16
	tokensAround  = 1024
)

var (
	errNoTokens   = chat.NotRenderable("the tokenizer found no tokens")
	errManyTokens = chat.NotRenderable("the tokenizer makes more tokens of a text than it may")
	errSquare     = chat.NotRenderable("a text is too long for this tokenizer, whose time grows with the square of it")
)

// encodePieces encodes pieces of a text, as many in one turn as are a small text
// together: a prompt of many small pieces blocks no other request, and encoding it ends
// when its client leaves.
func (m *Model) encodePieces(b bounds, text string, pieces []string, addSpecial bool) (tokens [][]uint32, err error) {
	if m.square && slices.ContainsFunc(pieces, func(piece string) bool { return len(piece) > encode.SquareText }) {
		return nil, errSquare
	}
	for len(pieces) > 0 {
		n, size := 1, len(pieces[0])
		for n < len(pieces) && size+len(pieces[n]) <= largeText {
			size += len(pieces[n])
			n++
		}
		some, err := m.encodeTurn(b, text, pieces[:n], size, addSpecial)
		if err != nil {
			return nil, err
		}
		tokens, pieces = append(tokens, some...), pieces[n:]
	}
	return tokens, nil
}

// encodeTurn encodes pieces of that many bytes when their turn comes.
func (m *Model) encodeTurn(b bounds, text string, pieces []string, size int, addSpecial bool) ([][]uint32, error) {
	turn, err := m.turns.take(b, size)
	if err != nil {
		return nil, err
	}
	defer func() { <-turn }()
	tokens, ok := m.encoder.Encode(text, pieces, addSpecial)
	if !ok {
		return nil, errNoTokens
	}
	return tokens, nil
}

// truncate applies truncate_prompt_tokens where it leaves the tokens alone.
func truncate(tokens []uint32, limit gjson.Result) ([]uint32, error) {
	if limit.Type == gjson.Null {
		return tokens, nil
	}
	if limit.Type != gjson.Number || limit.Num < 0 || float64(len(tokens)) > limit.Num {
		return nil, chat.NotRenderable("truncate_prompt_tokens cuts the prompt")
	}
	return tokens, nil
}

// CompletionBodyTokens returns the tokens of each prompt of the body of a
// /v1/completions request: a text, token ids, or a list of either.
func (m *Model) CompletionBodyTokens(body *jsonbody.Body) ([][]uint32, error) {
	return m.boundedCompletionTokens(bounds{}, body)
}

// boundedCompletionTokens is CompletionBodyTokens within bounds; its error may be
// errTooLong or errNoTurn.
func (m *Model) boundedCompletionTokens(b bounds, body *jsonbody.Body) ([][]uint32, error) {
	if body.LoneSurrogate {
		return nil, chat.NotRenderable("the body has an unpaired surrogate")
	}
	var prompt, limit gjson.Result
	addSpecial := true
	for _, f := range body.Top {
		var err error
		switch f.Key {
		case "prompt":
			prompt = f.Value
		case "truncate_prompt_tokens":
			limit = f.Value
		case "add_special_tokens":
			err = chat.ReadBool(f.Value, f.Key, &addSpecial)
		case "suffix", "prompt_embeds":
			if f.Value.Type != gjson.Null {
				err = chat.NotRenderable("the request carries %q", f.Key)
			}
		case "kv_transfer_params":
			if v := f.Value.Get("prompt_token_ids"); v.Type != gjson.Null {
				err = chat.NotRenderable("the request has its own prompt tokens")
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return m.severalTokens(b, prompt, func(b bounds, p gjson.Result) ([]uint32, error) { return m.promptTokens(b, p, limit, addSpecial) })
}

// severalTokens returns the tokens that one finds for a prompt, or for each in a list
// of them, at least one, within bounds.
func (m *Model) severalTokens(b bounds, prompt gjson.Result, one func(bounds, gjson.Result) ([]uint32, error)) ([][]uint32, error) {
	if !severalPrompts(prompt) {
		tokens, err := one(b, prompt)
		return [][]uint32{tokens}, err
	}
	var out [][]uint32
	var err error
	left := b
	left.chars *= listedTexts
	left.tokens *= listedTexts
	jsonbody.EachElement(prompt.Raw, func(p gjson.Result) bool {
		var tokens []uint32
		if b.tokens > 0 && (len(out) == maxPrompts || left.tokens < 0) || b.chars > 0 && left.chars < 0 {
			err = errTooLong
		} else if tokens, err = one(b, p); err == nil {
			out = append(out, tokens)
			left.tokens -= len(tokens)
			left.chars -= len(p.Str)
		}
		return err == nil
	})
	if err == nil && len(out) == 0 {
		err = chat.NotRenderable("the prompt is an empty list")
	}
	return out, err
}

// severalPrompts reports whether a completion's prompt is a list of prompts, and not
// one: it looks at the first element only, as there may be millions of numbers.
func severalPrompts(prompt gjson.Result) bool {
	return prompt.IsArray() && firstOf(prompt).Type != gjson.Number
}

// firstOf returns the first element of a list; it does not exist if there is none.
func firstOf(list gjson.Result) (first gjson.Result) {
	if list.IsArray() {
		jsonbody.EachElement(list.Raw, func(e gjson.Result) bool {
			first = e
			return false
		})
	}
	return first
}

// promptTokens returns the tokens of one prompt; limit is the request's
// truncate_prompt_tokens.
func (m *Model) promptTokens(b bounds, prompt, limit gjson.Result, addSpecial bool) (tokens []uint32, err error) {
	switch {
	case prompt.Type == gjson.String:
		tokens, err = m.encode(b, prompt.Str, addSpecial)
	case prompt.IsArray():
		tokens, err = readTokens(prompt, b.tokens)
	default:
		err = chat.NotRenderable("a prompt is neither text nor token ids")
	}
	if err != nil {
		return nil, err
	}
	return truncate(tokens, limit)
}

// ReadTokens reads a list of token ids.
func ReadTokens(list gjson.Result) ([]uint32, error) { return readTokens(list, 0) }

// Encode returns the tokens of a text. addSpecial adds the tokens that the tokenizer puts
// around every text, such as a beginning-of-sequence token.
func (m *Model) Encode(text string, addSpecial bool) []uint32 {
	tokens, err := m.encodePieces(bounds{}, text, []string{text}, addSpecial)
	if err != nil {
		return nil // the tokenizer failed
	}
	return tokens[0]
}

// Decode returns the text of tokens, including special ones; empty if that needs
// the tokenizer's file and the file has changed.
func (m *Model) Decode(tokens []uint32) string {
	text, _ := m.decode(tokens)
	return text
}

// decode is Decode with the reason why there is no text.
func (m *Model) decode(tokens []uint32) (string, error) {
	text, err := m.encoder.Decode(tokens)
	if err != nil {
		return "", chat.NotRenderable("decoding: %v", err)
	}
	if m.files.CleanUpSpaces && m.wordPiece {
		text = spaceTidier.Replace(text)
	}
	return text, nil
}

// spaceTidier undoes the spaces that WordPiece puts before punctuation, as
// transformers does.
var spaceTidier = strings.NewReplacer(" .", ".", " ?", "?", " !", "!", " ,", ",", " ' ", "'",
	" n't", "n't", " 'm", "'m", " 's", "'s", " 've", "'ve", " 're", "'re")

// tokenString returns the tokenizer's own name of a token; empty if unknown.
func (m *Model) tokenString(token uint32) string {
	if names := m.Vocabulary(); int(token) < len(names) {
		return names[token]
	}
	return ""
}

// readVocabulary lists the names of all tokens by id.
func (m *Model) readVocabulary() (names []string) {
	raw, err := m.read()
	if err != nil {
		return nil
	}
	eachToken(raw, func(id int64, name string) {
		if id < 0 || id > 1<<24 {
			return
		}
		for int64(len(names)) <= id {
			names = append(names, "")
		}
		names[id] = strings.Clone(name)
	})
	return names
}

// BadRequest is a client error: the HTTP layer answers 400 with
// its text.
type BadRequest struct{ Reason string }

// Error returns the reason.
func (e *BadRequest) Error() string { return e.Reason }

// Tokenize answers a /tokenize request, for a chat or a text, in vLLM's format. The
// error is a *BadRequest, or chat.ErrNotRenderable if a worker must answer.
func (m *Model) Tokenize(body []byte) ([]byte, error) { return m.boundedTokenize(bounds{}, body) }

// boundedTokenize is Tokenize within bounds; its error may be errTooLong or
// errNoTurn.
func (m *Model) boundedTokenize(b bounds, body []byte) ([]byte, error) {
	if !json.Valid(body) {
		return nil, &BadRequest{"the body is not valid JSON"}
	}
	top := gjson.ParseBytes(body)
	if !top.IsObject() {
		return nil, &BadRequest{"the body must be a JSON object"}
	}
	tokens, names, err := m.tokenizeBody(b, top, body)
	if err != nil {
		return nil, err
	}
	out := fmt.Appendf(nil, `{"count":%d,"max_model_len":%d,"tokens":`, len(tokens), m.MaxModelLen())
	out = append(AppendTokens(out, tokens), `,"token_strs":`...)
	if !names {
		return append(out, "null}"...), nil
	}
	out = append(out, '[')
	for i, t := range tokens {
		if i > 0 {
			out = append(out, ',')
		}
		out = jsonbody.AppendString(out, m.tokenString(t))
	}
	return append(out, "]}"...), nil
}

func (m *Model) tokenizeBody(b bounds, top gjson.Result, body []byte) (tokens []uint32, names bool, err error) {
	if prompt := top.Get("prompt"); prompt.Exists() {
		if prompt.Type != gjson.String {
			return nil, false, &BadRequest{"prompt must be a string"}
		}
		addSpecial := true
		for key, into := range map[string]*bool{"add_special_tokens": &addSpecial, "return_token_strs": &names} {
			if v := top.Get(key); v.Exists() && v.Type != gjson.Null && chat.ReadBool(v, key, into) != nil {
				return nil, false, &BadRequest{key + " must be true or false"}
			}
		}
		tokens, err = m.encode(b, prompt.Str, addSpecial)
		return tokens, names, err
	}
	if !top.Get("messages").IsArray() {
		return nil, false, &BadRequest{"the request needs prompt (a string) or messages (a list)"}
	}
	parsed, err := chat.ParseBody(body)
	if err != nil {
		return nil, false, err
	}
	req, err := m.chats.Parse(parsed, chat.Tokenize)
	if err != nil {
		return nil, false, err
	}
	tokens, err = m.chatTokens(b, req)
	return tokens, req.WantsTokenStrs, err
}

// Detokenize answers a /detokenize request in vLLM's format. The error is a
// *BadRequest, or chat.ErrNotRenderable if a worker must answer.
func (m *Model) Detokenize(body []byte) ([]byte, error) {
	list := gjson.GetBytes(body, "tokens")
	if !json.Valid(body) || !list.IsArray() {
		return nil, &BadRequest{"the request needs tokens (a list of token ids)"}
	}
	tokens, err := readTokens(list, maxDetokenized)
	switch {
	case errors.Is(err, errTooLong):
		return nil, &BadRequest{fmt.Sprintf("tokens has more than %d token ids", maxDetokenized)}
	case err != nil:
		return nil, &BadRequest{"tokens must be a list of token ids, whole numbers from 0"}
	}
	text, err := m.decode(tokens)
	if err != nil {
		return nil, err
	}
	return append(jsonbody.AppendString([]byte(`{"prompt":`), text), '}'), nil
}

// AppendTokens appends tokens as a JSON list of numbers.
func AppendTokens(out []byte, tokens []uint32) []byte {
	out = append(out, '[')
	for i, t := range tokens {
		if i > 0 {
			out = append(out, ',')
		}
		out = fmt.Appendf(out, "%d", t)
	}
	return append(out, ']')
}
