package tokens

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"time"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
)

// errTooLong marks a prompt that no engine with the model's limit takes: vLLM
// refuses it by its length, before it encodes it.
var errTooLong = fmt.Errorf("%w: the prompt exceeds the model's maximum length", chat.ErrNotRenderable)

// errNoTurn marks a prompt that was not encoded because others took the time.
var errNoTurn = fmt.Errorf("%w: timed out waiting for the encoder", chat.ErrNotRenderable)

// errClientLeft marks a prompt whose client disconnected before its turn.
var errClientLeft = fmt.Errorf("%w: the client has disconnected", errNoTurn)

const (
	// unknownModelLen is the assumed context of a model that reports none, tokens:
	// more than any known to date would make the bound useless.
	unknownModelLen = 1 << 20
	// maxModelLen bounds what workers may say, tokens.
	maxModelLen = 1 << 30
	// maxPrompts bounds the prompts of one request, and listedTexts how often the
	// text of the longest prompt may fit into them all.
	maxPrompts  = 4096
	listedTexts = 16
	// maxDetokenized bounds the tokens of a /detokenize request.
	maxDetokenized = 1 << 20
	// charsPerToken is the number of characters that a token of a prompt has at most on
	// average, where the vocabulary allows more: long tokens are runs of space.
	charsPerToken = 16
	// largeText is from how many bytes on a text counts as large: to encode it takes
	// more than about 0.5 ms, or 10 ms with crate tokenizers, and from hugeText on more
	// than about 60 MB with the latter. A text
	// longer than chat.MaxText is not encoded.
	largeText = 64 << 10
	hugeText  = 1 << 20
)

// bounds limit the work on the prompts of one request. The zero value has no
// limits: the request is not a stranger's.
type bounds struct {
	ctx    context.Context // nil: not cancelled
	wait   time.Duration   // longest wait for a turn to encode; 0: forever
	tokens int             // most tokens of a prompt; 0: any number
	chars  int             // most characters of a text that may be those tokens; 0: any number
	text   int             // most bytes of a text that is encoded in one piece; 0: any number
}

// bounds returns the limits for the request of ctx. Prompts longer than the model
// takes is not encoded. The rule is vLLM's (max_chars_per_token): the most tokens,
// each as long as the longest of the vocabulary, but here of charsPerToken at most.
func (m *Model) bounds(ctx context.Context, wait time.Duration) bounds {
	tokens := m.MaxModelLen()
	if tokens == 0 {
		tokens = unknownModelLen
	}
	return bounds{ctx: ctx, wait: wait, tokens: tokens, chars: tokens * min(m.longestToken, charsPerToken), text: chat.MaxText}
}

// fits reports whether a text may fit the model.
func (b bounds) fits(text string) bool {
	return b.chars == 0 || len(text) <= b.chars || utf8.RuneCountInString(text) <= b.chars
}

// fitsTexts reports whether a prompt that has all these texts may fit the model.
func (b bounds) fitsTexts(texts iter.Seq[string]) bool {
	longest, bytes := 0, 0
	for text := range texts {
		longest, bytes = max(longest, len(text)), bytes+len(text)
	}
	switch {
	case b.text > 0 && longest > b.text:
		return false
	case b.chars == 0 || bytes <= b.chars:
		return true
	}
	runes := 0
	for text := range texts {
		runes += utf8.RuneCountInString(text)
	}
	return runes <= b.chars
}

// longestToken returns the characters of the longest token in a tokenizer.json;
// 0: unknown.
func longestToken(tokenizerJSON []byte) (longest int) {
	eachToken(tokenizerJSON, func(_ int64, name string) { longest = max(longest, utf8.RuneCountInString(name)) })
	return longest
}

// eachToken calls take with each token of a tokenizer.json, and its id.
func eachToken(tokenizerJSON []byte, take func(id int64, name string)) {
	vocabulary := gjson.GetBytes(tokenizerJSON, "model.vocab")
	isMap, next := vocabulary.IsObject(), int64(0)
	vocabulary.ForEach(func(key, value gjson.Result) bool {
		if isMap {
			take(value.Int(), key.Str)
		} else { // Unigram: a list of [name, score]
			take(next, value.Get("0").Str)
			next++
		}
		return true
	})
	gjson.GetBytes(tokenizerJSON, "added_tokens").ForEach(func(_, added gjson.Result) bool {
		take(added.Get("id").Int(), added.Get("content").Str)
		return true
	})
}

// maxEncoders bounds the encodings of one size at a time: each has a thread, which
// remembers words in 8 MB and more.
const maxEncoders = 4

// turns hands out the right to encode. More encodings than processors finish no
// sooner, and each would hold a thread and its memory. Small texts have turns of
// their own: none ever waits for a large one. Huge ones go one by one.
type turns struct {
	small, large, huge chan struct{} // hold one entry for each encoding under way
}

func newTurns() turns {
	n := min(runtime.GOMAXPROCS(0), maxEncoders)
	return turns{small: make(chan struct{}, n), large: make(chan struct{}, n), huge: make(chan struct{}, 1)}
}

// take waits for the turn of a text of that many bytes. The caller takes one entry
// out of the channel when it is done; with an error, an errNoTurn or errTooLong,
// there is none.
func (t turns) take(b bounds, bytes int) (turn chan struct{}, err error) {
	switch turn = t.small; {
	case b.text > 0 && bytes > b.text:
		return nil, errTooLong
	case bytes > hugeText:
		turn = t.huge
	case bytes > largeText:
		turn = t.large
	}
	var left <-chan struct{}
	if b.ctx != nil {
		left = b.ctx.Done()
		if b.ctx.Err() != nil {
			return nil, errClientLeft
		}
	}
	select {
	case turn <- struct{}{}:
		return turn, nil
	default:
	}
	var late <-chan time.Time
	if b.wait > 0 {
		late = time.After(b.wait)
	}
	select {
	case turn <- struct{}{}:
		return turn, nil
	case <-left:
		return nil, errClientLeft
	case <-late:
		return nil, errNoTurn
	}
}

// readTokens is ReadTokens for at most that many tokens (0: any number); more are
// an errTooLong.
func readTokens(list gjson.Result, most int) (tokens []uint32, err error) {
	if !list.IsArray() {
		return nil, chat.NotRenderable("not a list of token ids")
	}
	jsonbody.EachElement(list.Raw, func(v gjson.Result) bool {
		switch {
		case v.Type != gjson.Number || v.Num < 0 || v.Num > 1<<32-1 || v.Num != float64(uint32(v.Num)):
			err = chat.NotRenderable("%.40s is not a token id", v.Raw)
		case most > 0 && len(tokens) == most:
			err = errTooLong
		default:
			tokens = append(tokens, uint32(v.Num))
		}
		return err == nil
	})
	if err != nil {
		return nil, err
	}
	return tokens, nil
}

// fallback returns the reason why a prompt is not known locally, as a metric label, and
// whether a worker may be asked for it.
func fallback(err error) (reason string, ask bool) {
	switch {
	case errors.Is(err, errTooLong):
		return reasonTooLong, false
	case errors.Is(err, errNoTurn):
		return reasonNoTurn, false
	case errors.Is(err, chat.ErrLimit):
		return reasonLimit, true
	}
	return reasonNotRenderable, true
}
