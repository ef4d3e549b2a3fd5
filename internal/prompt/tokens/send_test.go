package tokens

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/chat"
)

// answering returns a worker that renders as m does, and answers requests for a token: its
// answer depends on the tokens that use returns of a request and the prompt that its text has.
func answering(m *Model, sglang bool, use func(body *jsonbody.Body, text []uint32) ([]uint32, error)) Asker {
	renders := probeWorker(m, func(_ string, _ []byte, tokens []uint32) []uint32 { return tokens })
	return func(ctx context.Context, path string, raw []byte) ([]byte, error) {
		body, _ := jsonbody.Parse(raw)
		if path != sentChat.path && path != sentCompletion.path || body.Get("max_tokens").Int() != 1 {
			return renders(ctx, path, raw)
		}
		var text []uint32
		if given := body.Get("prompt"); given.IsArray() {
			text, _ = ReadTokens(given)
		} else {
			of, _ := jsonbody.Parse(fmt.Appendf(nil, `{"messages":%s}`, cmp.Or(body.Get("messages").Raw, "[]")))
			if path == sentCompletion.path {
				of = body
			}
			var err error
			if text, err = NewSource(m, nil, 0, quiet()).ownTokens(sglang, path, of); err != nil {
				return nil, err
			}
		}
		used, err := use(body, text)
		if err != nil {
			return nil, err
		}
		return fmt.Appendf(nil, `{"choices":[{"message":{"content":"after %[1]v"},"text":"after %[1]v","finish_reason":"length"}],"usage":{"prompt_tokens":%[2]d}}`, used, len(used)), nil
	}
}

// givenIDs returns the tokens that a request has for the prompt of a chat.
func givenIDs(body *jsonbody.Body) []uint32 {
	for _, list := range []gjson.Result{body.Get("kv_transfer_params").Get("prompt_token_ids"), body.Get("input_ids")} {
		if ids, err := ReadTokens(list); err == nil && list.IsArray() {
			return ids
		}
	}
	return nil
}

// TestWhatWorkersTakeIsSeenFromTheirAnswers: one that ignores token ids, or answers otherwise
// with them, does not take them.
func TestWhatWorkersTakeIsSeenFromTheirAnswers(t *testing.T) {
	m := wordModel(t, chat.Options{})
	takes := func(body *jsonbody.Body, text []uint32) ([]uint32, error) {
		if ids := givenIDs(body); ids != nil {
			return ids, nil
		}
		return text, nil
	}
	hasIDs := func(body *jsonbody.Body) bool { return givenIDs(body) != nil || body.Get("prompt").IsArray() }
	flips := 0
	for _, c := range []struct {
		name string
		use  func(body *jsonbody.Body, text []uint32) ([]uint32, error)
		want []string // nil: unknown
	}{
		{"it takes them", takes, []string{sentChat.path, sentCompletion.path}},
		{"it ignores them on chats", func(_ *jsonbody.Body, text []uint32) ([]uint32, error) { return text, nil }, []string{sentCompletion.path}},
		{"it refuses them", func(body *jsonbody.Body, text []uint32) ([]uint32, error) {
			if hasIDs(body) {
				return nil, &AskError{Status: 422}
			}
			return text, nil
		}, []string{}},
		{"it adds a token to them", func(body *jsonbody.Body, text []uint32) ([]uint32, error) {
			if used, _ := takes(body, text); hasIDs(body) {
				return append([]uint32{1}, used...), nil
			}
			return text, nil
		}, []string{}},
		{"it answers others", func(body *jsonbody.Body, text []uint32) ([]uint32, error) {
			if used, _ := takes(body, text); hasIDs(body) {
				used = slices.Clone(used)
				used[0]++
				return used, nil
			}
			return text, nil
		}, []string{}},
		{"an answer flips once", func(body *jsonbody.Body, text []uint32) ([]uint32, error) {
			used, _ := takes(body, text)
			if flips++; flips == 1 {
				used = slices.Clone(used)
				used[0]++
			}
			return used, nil
		}, []string{sentChat.path, sentCompletion.path}},
		{"it fails", func(*jsonbody.Body, []uint32) ([]uint32, error) { return nil, errors.New("down") }, nil},
	} {
		for _, sglang := range []bool{false, true} {
			flips = 0
			source := NewSource(m, nil, time.Second, quiet())
			peer := Peer{ID: 1, Generation: 3, SGLang: sglang, Ask: answering(m, sglang, c.use), MayTake: func(context.Context) bool { return true }}
			source.compareWith(t.Context(), []Peer{peer})
			takes, known := source.Takes(1, 3)
			if known != (c.want != nil) || known && !slices.Equal(takes.Routes(), c.want) {
				t.Errorf("%s, SGLang %v: %v %v, want %v", c.name, sglang, takes.Routes(), known, c.want)
			}
			if _, known := source.Takes(1, 4); known {
				t.Error("the next incarnation is known")
			}
		}
	}
}

// TestAWorkerThatMayNotBeAskedTakesNothing, and one that could not be is asked again.
func TestAWorkerThatMayNotBeAskedTakesNothing(t *testing.T) {
	m := wordModel(t, chat.Options{})
	asked, fails := 0, true
	ask := answering(m, false, func(_ *jsonbody.Body, text []uint32) ([]uint32, error) {
		if asked++; fails {
			return nil, errors.New("busy")
		}
		return text, nil
	})
	now := time.Unix(1000, 0)
	source := NewSource(m, nil, time.Second, quiet())
	source.now = func() time.Time { return now }
	never := Peer{ID: 1, Ask: ask, MayTake: func(context.Context) bool { return false }}
	source.compareWith(t.Context(), []Peer{never, {ID: 2, Ask: ask}})
	if takes, known := source.Takes(1, 0); asked != 0 || !known || takes != (Takes{}) {
		t.Errorf("asked %d times: %v %v", asked, takes, known)
	}
	if _, known := source.Takes(2, 0); known {
		t.Error("known without --send-tokens")
	}
	may := Peer{ID: 3, Ask: ask, MayTake: func(context.Context) bool { return true }}
	source.compareWith(t.Context(), []Peer{may})
	fails, now = false, now.Add(compareAgain)
	source.compareWith(t.Context(), []Peer{may})
	if takes, known := source.Takes(3, 0); !known || takes != (Takes{Completion: true}) {
		t.Errorf("%v %v", takes, known)
	}
}

// TestWhichPromptsAreSent changes one condition after the other.
func TestWhichPromptsAreSent(t *testing.T) {
	m := wordModel(t, chat.Options{})
	long := func(change func(*Prompt)) *Prompt {
		p := &Prompt{Tokens: make([]uint32, SendFrom), Source: SourceLocal, Exact: SendFrom, Shape: "chat+tools"}
		change(p)
		return p
	}
	same := func(*Prompt) {}
	compared := func(v *verdict) {
		v.differs, v.maxModelLen, v.takes = map[string]bool{"chat": false, "tools": false, "completion": false}, SendFrom+100, Takes{Chat: true, Completion: true}
	}
	for _, c := range []struct {
		name    string
		prompt  *Prompt
		output  int
		verdict func(*verdict)
		want    bool
	}{
		{"a chat", long(same), 0, func(*verdict) {}, true},
		{"a completion", long(func(p *Prompt) { p.Shape = "completion" }), 100, func(*verdict) {}, true},
		{"a short one", long(func(p *Prompt) { p.Tokens, p.Exact = p.Tokens[1:], SendFrom-1 }), 0, func(*verdict) {}, false},
		{"a worker's tokens", long(func(p *Prompt) { p.Source = SourceWorker }), 0, func(*verdict) {}, false},
		{"placeholders", long(func(p *Prompt) { p.Exact-- }), 0, func(*verdict) {}, false},
		{"media", long(func(p *Prompt) { p.Media = make([]kv.Media, 1) }), 0, func(*verdict) {}, false},
		{"a feature that differs", long(same), 0, func(v *verdict) { v.differs["tools"] = true }, false},
		{"a feature that was not compared", long(func(p *Prompt) { p.Shape = "chat+parts" }), 0, func(*verdict) {}, false},
		{"an answer too long for the model", long(same), 101, func(*verdict) {}, false},
		{"a model of unknown length", long(same), 0, func(v *verdict) { v.maxModelLen = 0 }, false},
		{"a prompt as long as the model", long(same), 0, func(v *verdict) { v.maxModelLen = SendFrom }, false},
		{"a worker without chats", long(same), 0, func(v *verdict) { v.takes.Chat = false }, false},
		{"a worker without completions", long(func(p *Prompt) { p.Shape = "completion" }), 0, func(v *verdict) { v.takes.Completion = false }, false},
		{"another incarnation", long(same), 0, func(v *verdict) { v.generation++ }, false},
		{"the other engine's rules", long(same), 0, func(v *verdict) { v.sglang = true }, false},
		{"a shape that an engine has counted otherwise", long(func(p *Prompt) { p.Shape = "chat" }), 0, func(*verdict) {}, false},
	} {
		source := NewSource(m, nil, time.Second, quiet())
		source.PromptMismatch("chat", 1, 2)
		v := verdict{}
		compared(&v)
		c.verdict(&v)
		source.verdicts[7] = v
		if got := source.Sends(7, 0, c.prompt, c.output); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// TestWithoutAModelTheWorkerTokenizes the prompts of the questions.
func TestWithoutAModelTheWorkerTokenizes(t *testing.T) {
	m := wordModel(t, chat.Options{})
	ask := answering(m, false, func(body *jsonbody.Body, text []uint32) ([]uint32, error) {
		if ids := givenIDs(body); ids != nil {
			return ids, nil
		}
		return text, nil
	})
	takes, err := NewSource(nil, nil, time.Second, quiet()).AskTakes(t.Context(), Peer{Ask: ask})
	if err != nil || takes != (Takes{Chat: true, Completion: true}) {
		t.Errorf("%v, %v", takes, err)
	}
}

// TestTheQuestionsAreJSON and the tokens are not those of the other text.
func TestTheQuestionsAreJSON(t *testing.T) {
	for _, s := range []sent{sentChat, sentCompletion} {
		for _, sglang := range []bool{false, true} {
			for _, body := range []string{"{" + s.text + "}", "{" + s.other + s.tokens(sglang, "[1]") + "}"} {
				if !json.Valid([]byte(body)) {
					t.Errorf("%s is no JSON", body)
				}
			}
		}
		if s.other != "" && strings.Contains(s.text, s.other) {
			t.Errorf("%s in %s", s.other, s.text)
		}
	}
}
