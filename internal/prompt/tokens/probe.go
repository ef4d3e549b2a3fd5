package tokens

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tidwall/gjson"
	"golang.org/x/sync/errgroup"

	"kvrouter/internal/base/jsonbody"
)

// probe is a request whose tokens are compared with a worker's.
type probe struct {
	path     string // of the worker's render route
	body     string
	features []string
}

// probes are the shapes that a chat can have; what differs in one is left to
// the workers.
var probes = []probe{
	{"/v1/chat/completions", `{"messages":[{"role":"system","content":"You are terse."},{"role":"user","content":"What is 2+2?"}]}`, nil},
	{"/v1/chat/completions",
		`{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello! How can I help?"},{"role":"user","content":"Tell me more."},{"role":"assistant","content":null},{"role":"user","content":"Go on"}],"add_generation_prompt":false}`, nil},
	{"/v1/chat/completions",
		`{"messages":[{"role":"user","content":"  naïve café 日本語 🙂\t\n\n<|im_start|> &lt; \"quoted\" 'single' \\ 12345  "},{"role":"assistant","content":"\n ok \n"},{"role":"user","content":""}]}`, nil},
	{"/v1/chat/completions",
		`{"messages":[{"role":"user","content":"Weather in Paris?"}],"tools":[{"type":"function","function":{"name":"get_weather","description":"It's the \"weather\" <now> & later","parameters":{"type":"object","properties":{"zone":{"type":"string","enum":["a","é"]},"days":{"type":"integer","default":1.5},"ok":{"type":"boolean","default":true}},"required":["zone"]}}}],"tool_choice":"none"}`, []string{"tools"}},
	{"/v1/chat/completions",
		`{"messages":[{"role":"user","content":"Weather?"},{"role":"assistant","content":null,"tool_calls":[{"id":"call_abc12","type":"function","function":{"name":"get_weather","arguments":"{\"zone\": \"é\", \"days\": 2, \"more\": [1.0, null, true]}"}}]},{"role":"tool","tool_call_id":"call_abc12","content":"{\"c\": 21}"},{"role":"assistant","content":"It is 21 C."},{"role":"user","content":"Thanks"}]}`, []string{"tool_calls"}},
	{"/v1/chat/completions",
		`{"messages":[{"role":"user","content":[{"type":"text","text":"First part."},{"type":"text","text":"Second part."}]}]}`,
		[]string{"parts"}},
	{"/v1/chat/completions",
		`{"messages":[{"role":"user","content":"Count."},{"role":"assistant","content":"one, two,"}],"add_generation_prompt":false,"continue_final_message":true}`, []string{"continue"}},
	{"/v1/completions", `{"prompt":"Once upon a time, naïve 日本語\n"}`, []string{"completion"}},
}

// sglangProbes are probes for SGLang: what its chats have beside, and its tools, which
// it shows to the template only where the model may use them.
var sglangProbes = append(slices.DeleteFunc(slices.Clone(probes), func(p probe) bool { return slices.Contains(p.features, "tools") }),
	probe{"/v1/chat/completions", strings.Replace(probes[toolsProbe].body, `,"tool_choice":"none"`, "", 1), []string{"tools"}},
	probe{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Count."},{"role":"assistant","content":"one, two,"}]}`,
		[]string{"answer last"}},
	probe{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Think."}],"reasoning_effort":"high"}`, []string{"reasoning"}},
	probe{"/v1/chat/completions", `{"messages":[{"role":"user","content":"Answer."}],"reasoning_effort":"none"}`, []string{"reasoning"}},
)

// toolsProbe is which of the probes has tools.
const toolsProbe = 3

// Peer is a worker whose own prompt tokens are compared with the router's.
type Peer struct {
	ID         uint64
	Generation int  // counts its incarnations; a new one is compared again
	SGLang     bool // it runs SGLang, and renders by its rules
	// Complete sets the other fields, when the worker is due: there may be thousands that are
	// not. false: it is gone. nil: they are set.
	Complete func(*Peer) bool
	Ask      Asker
	// MaxModelLen queries the maximum length of a prompt with its answer, tokens; 0: it does not
	// report it. nil: not queried.
	MaxModelLen func(ctx context.Context) int
	// MayTake reports whether the worker is to be asked whether it takes token ids. nil: not.
	MayTake func(ctx context.Context) bool
}

const (
	// compareEvery is the pause between looks for workers to be compared with.
	compareEvery = time.Second
	// compareAgain is after how long a worker that differs is compared again, and
	// the longest pause before one is that could not be asked: the first is
	// compareEvery, each next one double.
	compareAgain = time.Minute
	// comparedAtOnce is the number of workers that are compared side by side.
	comparedAtOnce = 4
)

// verdict is the result of the comparison with one worker.
type verdict struct {
	generation  int
	sglang      bool
	differs     map[string]bool // by feature; one that it would not render is left out
	maxModelLen int             // tokens; 0: unknown
	takes       Takes
	takesKnown  bool      // it has been asked
	failures    int       // in a row: it could not be asked
	again       time.Time // when to compare again; zero: not in this incarnation
}

// KeepComparing compares the router's prompt tokens with those of each ready worker
// until ctx is done. While the tokens of a feature differ from those of most
// workers, workers tokenize such prompts. Without a model it only determines the
// engine of most workers.
func (t *Source) KeepComparing(ctx context.Context, peers func() []Peer) {
	ticker := time.NewTicker(compareEvery)
	defer ticker.Stop()
	for {
		t.compareWith(ctx, peers())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// Probe compares the router's prompt tokens with those of one worker, which it
// queries by the Asker. An error means that the query failed.
func (t *Source) Probe(ctx context.Context) error {
	if t.model == nil {
		return nil
	}
	v, err := t.compare(ctx, Peer{Ask: t.ask, SGLang: t.SGLang()})
	if err != nil {
		return fmt.Errorf("comparing prompt tokens with a worker: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.verdicts[0] = v
	t.decide()
	return nil
}

// compareWith compares with those peers that are due, and forgets what
// workers brought that are there no more. While none is, nothing is forgotten.
func (t *Source) compareWith(ctx context.Context, peers []Peer) {
	if len(peers) == 0 {
		return
	}
	t.chooseRules(peers)
	if t.model == nil {
		return
	}
	var due []Peer
	t.mu.Lock()
	there := make(map[uint64]bool, len(peers))
	for _, p := range peers {
		there[p.ID] = true
		v, known := t.verdicts[p.ID]
		if !known || v.generation != p.Generation || !v.again.IsZero() && !t.now().Before(v.again) {
			due = append(due, p)
		}
	}
	gone := len(t.verdicts)
	maps.DeleteFunc(t.verdicts, func(id uint64, _ verdict) bool { return !there[id] })
	gone -= len(t.verdicts)
	t.mu.Unlock()
	if len(due) == 0 && gone == 0 {
		return
	}
	var group errgroup.Group
	group.SetLimit(comparedAtOnce)
	for _, p := range due {
		group.Go(func() error {
			if p.Complete != nil && !p.Complete(&p) {
				return nil
			}
			v, err := t.compare(ctx, p)
			if err == nil && p.MaxModelLen != nil {
				limited, cancel := context.WithTimeout(ctx, t.timeout)
				v.maxModelLen = min(maxModelLen, p.MaxModelLen(limited))
				cancel()
			}
			if err == nil && p.MayTake != nil {
				t.askTakes(ctx, p, &v)
			}
			t.settle(ctx, p, v, err)
			return nil
		})
	}
	_ = group.Wait() // no function has an error
	t.mu.Lock()
	defer t.mu.Unlock()
	t.decide()
}

// chooseRules takes the rules of most of the workers; with as many of either engine
// they stay as they are.
func (t *Source) chooseRules(peers []Peer) {
	sglang := 0
	for _, p := range peers {
		if p.SGLang {
			sglang++
		}
	}
	t.counted.Store(true)
	t.someSGLang.Store(sglang > 0)
	if most := 2*sglang > len(peers); 2*sglang != len(peers) && t.sglang.CompareAndSwap(!most, most) && t.model != nil {
		t.mu.Lock()
		t.decide()
		t.mu.Unlock()
	}
}

// Met reports the engine of a worker that is about to get requests: the rules of
// the last one apply until KeepComparing has counted.
func (t *Source) Met(sglang bool) {
	if sglang {
		t.someSGLang.Store(true)
	}
	if !t.counted.Load() {
		t.sglang.Store(sglang)
	}
}

// SGLang reports whether SGLang's rules apply because most workers run it. A nil
// Source has vLLM's rules.
func (t *Source) SGLang() bool { return t != nil && t.sglang.Load() }

// settle keeps the verdict of a comparison with a worker; err means that it could
// not be asked: its earlier result in this incarnation stays.
func (t *Source) settle(ctx context.Context, p Peer, v verdict, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		before := t.verdicts[p.ID]
		if before.generation == p.Generation {
			v = before
		}
		v.failures = before.failures + 1
		v.again = t.now().Add(min(compareAgain, compareEvery<<min(v.failures-1, 10)))
		if v.failures == 1 && ctx.Err() == nil {
			t.log.Warn("cannot compare prompt tokens with a worker yet; retrying", "worker", p.ID, "error", err)
		}
	}
	v.generation, v.sglang = p.Generation, p.SGLang
	t.verdicts[p.ID] = v
}

// decide brings up to date which features are left to the workers, and the longest
// prompt that one of them takes. The caller holds mu.
func (t *Source) decide() {
	compared, differ, longest := map[string]int{}, map[string]int{}, 0
	for _, v := range t.verdicts {
		longest = max(longest, v.maxModelLen)
		if v.sglang != t.SGLang() {
			continue // its rules do not apply
		}
		for feature, differs := range v.differs {
			compared[feature]++
			if differs {
				differ[feature]++
			}
		}
	}
	t.model.SetMaxModelLen(longest)
	for feature := range t.disabled {
		if 2*differ[feature] <= compared[feature] {
			delete(t.disabled, feature)
			t.log.Info("computing prompt tokens locally again", "feature", feature, "workers", compared[feature], "differ", differ[feature])
		}
	}
	for _, feature := range slices.Sorted(maps.Keys(differ)) {
		if 2*differ[feature] > compared[feature] && !t.disabled[feature] {
			t.disabled[feature] = true
			t.log.Warn("prompt tokens differ from those of most workers; requesting them from workers", "feature", feature,
				"workers", compared[feature], "differ", differ[feature])
		}
	}
}

// compare makes all probes with one worker. An error means that it could not be
// asked.
func (t *Source) compare(ctx context.Context, p Peer) (v verdict, err error) {
	v.differs = map[string]bool{}
	list := probes
	if v.sglang = p.SGLang; v.sglang {
		list = sglangProbes
	}
	for _, probe := range list {
		own, theirs, ok, err := t.probe(ctx, p, probe)
		if err != nil {
			return verdict{}, err
		}
		if !ok {
			continue
		}
		differs := !slices.Equal(own, theirs)
		for _, f := range probe.names() {
			if differs && !v.differs[f] {
				v.again = t.now().Add(compareAgain)
				t.log.Debug("a worker's prompt tokens differ", "worker", p.ID, "feature", f, "router", len(own), "theirs", len(theirs),
					"first_difference", firstDifference(own, theirs))
			}
			v.differs[f] = v.differs[f] || differs
		}
	}
	return v, nil
}

// names are the features that the probe speaks of.
func (p probe) names() []string {
	if p.features == nil {
		return []string{"chat"}
	}
	return p.features
}

// probe returns the tokens of a probe, the router's own and a worker's; not ok: one
// of the two does not render it, and the same will apply to requests like it.
func (t *Source) probe(ctx context.Context, peer Peer, p probe) (own, theirs []uint32, ok bool, err error) {
	body := []byte(p.body)
	parsed, _ := jsonbody.Parse(body)
	if own, err = t.ownTokens(peer.SGLang, p.path, parsed); err != nil {
		t.log.Debug("cannot render a probe", "why", err)
		return nil, nil, false, nil
	}
	theirs, refused, err := t.askProbe(ctx, peer, p.path, body)
	if refused != "" {
		t.log.Debug("a worker refused a probe", "worker", peer.ID, "answer", refused)
	}
	return own, theirs, err == nil && refused == "", err
}

// ownTokens returns the tokens of a request with one prompt, by an engine's rules.
func (t *Source) ownTokens(sglang bool, path string, body *jsonbody.Body) (own []uint32, err error) {
	switch {
	case path != "/v1/completions":
		return t.model.engineChatTokens(sglang, bounds{}, body)
	case sglang:
		return t.model.promptTokens(bounds{}, body.Get("prompt"), gjson.Result{}, true)
	}
	lists, err := t.model.CompletionBodyTokens(body)
	if err != nil {
		return nil, err
	}
	return lists[0], nil
}

// askProbe returns a worker's tokens of a probe, or its refusal.
func (t *Source) askProbe(ctx context.Context, peer Peer, path string, body []byte) (tokens []uint32, refused string, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	var answer []byte
	if err = errNoRender; !peer.SGLang {
		answer, err = render(ctx, peer.Ask, path+"/render", body)
	}
	if err == nil {
		item := gjson.ParseBytes(answer)
		if item.IsArray() {
			item = item.Get("0")
		}
		if tokens, err = readTokens(item.Get("token_ids"), maxAnswered); err != nil {
			return nil, err.Error(), nil // it has answered, but nothing of use
		}
		return tokens, "", nil
	}
	if errors.Is(err, errNoRender) {
		request, ok := body, true
		if path == "/v1/chat/completions" {
			request, ok = t.asTokenize(peer.SGLang, body)
		}
		if !ok {
			return nil, "no route returns the tokens", nil
		}
		if tokens, err = t.askTokenize(ctx, peer.Ask, request); err == nil {
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
