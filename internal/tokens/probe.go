package tokens

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tidwall/gjson"
)

// probe is a request whose tokens are compared with a worker's.
type probe struct {
	path     string // of the worker's render route
	body     string
	features []string
}

// probes are the shapes that a chat can have; what differs in one is left to
// the workers from then on.
var probes = []probe{
	{"/v1/chat/completions", `{"messages":[{"role":"system","content":"You are terse."},{"role":"user","content":"What is 2+2?"}]}`, nil},
	{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello! How can I help?"},{"role":"user","content":"Tell me more."},{"role":"assistant","content":null},{"role":"user","content":"Go on"}],"add_generation_prompt":false}`, nil},
	{"/v1/chat/completions", `{"messages":[{"role":"user","content":"  naïve café 日本語 🙂\t\n\n<|im_start|> &lt; \"quoted\" 'single' \\ 12345  "},{"role":"assistant","content":"\n ok \n"},{"role":"user","content":""}]}`, nil},
	{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Weather in Paris?"}],"tools":[{"type":"function","function":{"name":"get_weather","description":"It's the \"weather\" <now> & later","parameters":{"type":"object","properties":{"zone":{"type":"string","enum":["a","é"]},"days":{"type":"integer","default":1.5},"ok":{"type":"boolean","default":true}},"required":["zone"]}}}],"tool_choice":"none"}`, []string{"tools"}},
	{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Weather?"},{"role":"assistant","content":null,"tool_calls":[{"id":"call_abc12","type":"function","function":{"name":"get_weather","arguments":"{\"zone\": \"é\", \"days\": 2, \"more\": [1.0, null, true]}"}}]},{"role":"tool","tool_call_id":"call_abc12","content":"{\"c\": 21}"},{"role":"assistant","content":"It is 21 C."},{"role":"user","content":"Thanks"}]}`, []string{"tool_calls"}},
	{"/v1/chat/completions", `{"messages":[{"role":"user","content":[{"type":"text","text":"First part."},{"type":"text","text":"Second part."}]}]}`, []string{"parts"}},
	{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Count."},{"role":"assistant","content":"one, two,"}],"add_generation_prompt":false,"continue_final_message":true}`, []string{"continue"}},
	{"/v1/completions", `{"prompt":"Once upon a time, naïve 日本語\n"}`, []string{"completion"}},
}

// Probe compares the prompts computed here with a worker's own. Features that
// differ are left to the workers from then on. The error tells that no worker
// could be asked, so that the call may be tried again.
func (t *Source) Probe(ctx context.Context) error {
	if t.model == nil {
		return nil
	}
	for _, p := range probes {
		if err := t.probe(ctx, p); err != nil {
			return fmt.Errorf("comparing prompt tokens with a worker: %w", err)
		}
	}
	return nil
}

func (t *Source) probe(ctx context.Context, p probe) error {
	body := []byte(p.body)
	var own []uint32
	var err error
	if p.path == "/v1/completions" {
		var lists [][]uint32
		if lists, err = t.model.CompletionTokens(body); err == nil {
			own = lists[0]
		}
	} else {
		own, err = t.model.ChatTokens(body)
	}
	if err != nil {
		t.log.Debug("a probe cannot be rendered here", "why", err)
		return nil // the same will hold for requests like it
	}
	theirs, refused, err := t.askProbe(ctx, p.path, body)
	if err != nil {
		return err
	}
	if refused != "" {
		t.log.Debug("a worker refused a probe", "answer", refused)
		return nil
	}
	if slices.Equal(own, theirs) {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	features := p.features
	if features == nil {
		features = []string{"chat"}
	}
	for _, f := range features {
		if !t.disabled[f] {
			t.disabled[f] = true
			t.log.Warn("prompt tokens differ from a worker's, so workers are asked for them", "feature", f,
				"router", len(own), "worker", len(theirs), "first_difference", firstDifference(own, theirs))
		}
	}
	return nil
}

// askProbe returns a worker's tokens of a probe, or its refusal.
func (t *Source) askProbe(ctx context.Context, path string, body []byte) (tokens []uint32, refused string, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	answer, err := t.askRender(ctx, path+"/render", body)
	if err == nil {
		item := gjson.ParseBytes(answer)
		if item.IsArray() {
			item = item.Get("0")
		}
		tokens, err = ReadTokens(item.Get("token_ids"))
		return tokens, "", err
	}
	if errors.Is(err, errNoRender) {
		request, ok := body, true
		if path == "/v1/chat/completions" {
			request, ok = t.asTokenize(body)
		}
		if !ok {
			return nil, "no route tells", nil
		}
		if tokens, err = t.askTokenize(ctx, request); err == nil {
			return tokens, "", nil
		}
	}
	var refusal *AskError
	if errors.As(err, &refusal) && refusal.Status/100 == 4 {
		return nil, refusal.Error(), nil
	}
	return nil, "", err
}

func firstDifference(a, b []uint32) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}
