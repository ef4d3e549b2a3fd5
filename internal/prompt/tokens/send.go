package tokens

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// SendFrom is the number of tokens of a prompt from which on a worker gets them: from there,
// it saves more than a millisecond. docs/prompt-tokens.md has the measurement.
const SendFrom = 1024

// Takes is what a worker takes token ids for, in place of the text of a prompt.
type Takes struct{ Chat, Completion bool }

// Routes returns the routes; it is never nil.
func (t Takes) Routes() []string {
	routes := []string{}
	if t.Chat {
		routes = append(routes, sentChat.path)
	}
	if t.Completion {
		routes = append(routes, sentCompletion.path)
	}
	return routes
}

// Takes returns what that incarnation of a worker takes token ids for, as it has shown;
// known is false while it has not been asked.
func (t *Source) Takes(worker uint64, generation int) (takes Takes, known bool) {
	if t == nil {
		return Takes{}, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	v, known := t.verdicts[worker]
	known = known && v.generation == generation && v.takesKnown
	if !known {
		return Takes{}, false
	}
	return v.takes, true
}

// Sends reports whether that incarnation of a worker is to get the tokens of a prompt. They
// must have been computed here and fully determine the prompt; the worker must have
// computed the same for each feature of the request; and the answer, of at most output
// tokens (0: the request does not say), must fit: an engine that takes token ids for a
// chat does not check that.
func (t *Source) Sends(worker uint64, generation int, p *Prompt, output int) bool {
	if p.Source != SourceLocal || len(p.Tokens) < SendFrom || p.Exact != len(p.Tokens) || len(p.Media) > 0 {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.verdicts[worker]
	if v.generation != generation || v.sglang != t.SGLang() || t.mismatches[p.Shape] > 0 || len(p.Tokens)+max(1, output) > v.maxModelLen {
		return false
	}
	for feature := range strings.SplitSeq(p.Shape, "+") {
		if differs, compared := v.differs[feature]; !compared || differs {
			return false
		}
	}
	if p.Shape == "completion" {
		return v.takes.Completion
	}
	return v.takes.Chat
}

// sent is a short request for one token after the prompt of a probe: with its text, and
// with its tokens beside or in place of another text. An engine that answers both alike
// has used the tokens.
type sent struct {
	path   string
	text   string // member, JSON
	other  string // member, JSON, that the tokens replace
	tokens func(sglang bool, list string) string
}

var (
	sentChat = sent{
		"/v1/chat/completions", strings.TrimSuffix(strings.TrimPrefix(probes[0].body, "{"), "}"), `"messages":[{"role":"user","content":"Hi"}],`,
		func(sglang bool, list string) string {
			if sglang {
				return `"input_ids":` + list
			}
			return `"kv_transfer_params":{"prompt_token_ids":` + list + `}`
		},
	}
	sentCompletion = sent{
		"/v1/completions", `"prompt":"Once upon a time, there was a"`, "", func(_ bool, list string) string { return `"prompt":` + list },
	}
)

// askTakes asks a worker what it takes token ids for. One that cannot be asked is compared
// again.
func (t *Source) askTakes(ctx context.Context, p Peer, v *verdict) {
	limited, cancel := context.WithTimeout(ctx, t.timeout)
	may := p.MayTake(limited)
	cancel()
	var err error
	if may {
		v.takes, err = t.AskTakes(ctx, p)
	}
	if v.takesKnown = err == nil; err != nil {
		v.again = t.now().Add(compareAgain)
		t.log.Debug("cannot ask a worker yet whether it takes token ids", "worker", p.ID, "error", err)
	}
}

// AskTakes asks a worker what it takes token ids for, by requests for one token. Without a
// model, the worker itself tokenizes their prompts. An error means that it could not be
// asked.
func (t *Source) AskTakes(ctx context.Context, p Peer) (takes Takes, err error) {
	if takes.Chat, err = t.askTakesOne(ctx, p, sentChat); err != nil {
		return Takes{}, err
	}
	if takes.Completion, err = t.askTakesOne(ctx, p, sentCompletion); err != nil {
		return Takes{}, err
	}
	return takes, nil
}

// takesTries is how often the two answers of a worker may differ: under load, the first
// token may hang on the other requests of its batch.
const takesTries = 2

// askTakesOne makes both requests of s.
func (t *Source) askTakesOne(ctx context.Context, p Peer, s sent) (takes bool, err error) {
	own, err := t.tokensOf(ctx, p, s)
	if err != nil || len(own) == 0 {
		return false, err
	}
	list, err := json.Marshal(own)
	if err != nil {
		return false, err
	}
	const tail = `,"max_tokens":1,"temperature":0,"stream":false}`
	for range takesTries {
		var answers [2]firstToken
		for i, body := range []string{"{" + s.text + tail, "{" + s.other + s.tokens(p.SGLang, string(list)) + tail} {
			var refused bool
			if answers[i], refused, err = t.firstToken(ctx, p, s.path, body); err != nil || refused {
				return false, err
			}
			if answers[i].prompt != len(own) {
				return false, nil
			}
		}
		if answers[0] == answers[1] {
			return true, nil
		}
	}
	return false, nil
}

// tokensOf returns the tokens of the prompt of s; none: they are not known.
func (t *Source) tokensOf(ctx context.Context, p Peer, s sent) ([]uint32, error) {
	raw := []byte("{" + s.text + "}")
	if t.model == nil {
		own, _, err := t.askProbe(ctx, p, s.path, raw)
		return own, err
	}
	body, ok := jsonbody.Parse(raw)
	if !ok {
		return nil, nil
	}
	own, err := t.ownTokens(p.SGLang, s.path, body)
	if err != nil {
		return nil, nil // it is not rendered here: no prompt like it is sent
	}
	return own, nil
}

// firstToken is what an answer of one token says.
type firstToken struct {
	choice string // JSON
	prompt int    // tokens
}

// firstToken asks a worker for one token. refused means that it refuses the request.
func (t *Source) firstToken(ctx context.Context, p Peer, path, body string) (first firstToken, refused bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	answer, err := p.Ask(ctx, path, []byte(body))
	var refusal *AskError
	if errors.As(err, &refusal) && refusal.Status/100 == 4 {
		return first, true, nil
	}
	if err != nil {
		return first, false, fmt.Errorf("asking for one token: %w", err)
	}
	parsed := gjson.ParseBytes(answer)
	for _, path := range []string{"choices.0.message.content", "choices.0.message.reasoning", "choices.0.message.reasoning_content",
		"choices.0.text", "choices.0.finish_reason", "choices.1"} {
		first.choice += parsed.Get(path).Raw + "\n"
	}
	if n := parsed.Get("usage.prompt_tokens"); n.Type == gjson.Number && n.Num >= 0 && n.Num <= maxModelLen {
		first.prompt = int(n.Int())
	}
	return first, false, nil
}
