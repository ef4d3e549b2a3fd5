package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// writer is a fake vLLM whose answer's token at place p of the sequence is 1000 + p, with
// the text "p,". So the rest of an answer is right only if it begins after the last token
// that the client has.
type writer struct {
	requests atomic.Int32
	bodies   chan string
	seen     chan struct{}                 // closed when the client has a part of the answer
	dies     func(request int) (after int) // tokens until the connection breaks: below 0, it does not; one more than all, it does after the usage
	engine   bool                          // an error event takes the place of the broken connection
	old      bool                          // it ignores kv_transfer_params.prompt_token_ids
	mute     bool                          // it returns no token ids
	drains   bool                          // it is cordoned in place of dying, and its answer stands still
	drain    func()
	tokens   bool      // it takes the tokens of prompts
	strict   bool      // it refuses unknown fields
	halves   bool      // places that 3 divides are half a character, which has its text with the other half
	fault    string    // of its first answer's sixth token: "repeated", "skipped", "wrong id"
	kind     kv.Engine // SGLang refuses to stream token ids of chats
	script   *script   // it answers as SGLang does; nil: as vLLM
	decode   func([]uint32) (string, error)
	form     uint64 // of its events; 0: compact
}

func (v *writer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := readBody(r)
	v.bodies <- string(body.Raw)
	dies := v.dies(int(v.requests.Add(1)))
	chat := r.URL.Path == testkit.ChatPath
	if v.strict && body.Get("return_token_ids").Exists() {
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"error":{"message":"unknown field return_token_ids"}}`)
		return
	}
	if v.kind == kv.EngineSGLang && chat && body.Get("return_token_ids").Bool() {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	if v.script != nil {
		v.script.serve(v, w, r, body, dies)
		return
	}
	ids, most := []int64{1, 2, 3}, int(body.Get("max_tokens").Int()) // of the prompt "hi"
	given := body.Get("kv_transfer_params").Get("prompt_token_ids")
	if !chat {
		given = body.Get("prompt")
	}
	if given.IsArray() && !v.old {
		ids = nil
		for _, id := range given.Array() {
			ids = append(ids, id.Int())
		}
	}
	faulty := v.fault != "" && v.requests.Load() == 1
	list := func(of ...int64) string {
		if !body.Get("return_token_ids").Bool() || v.mute {
			return "null"
		}
		text, _ := json.Marshal(of)
		return string(text)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	id, object := fmt.Sprintf("answer-%p-%d", v, v.requests.Load()), "text_completion"
	if chat {
		object = "chat.completion.chunk"
	}
	event := func(choices, rest string) {
		fmt.Fprintf(w, `data: {"id":%q,"object":%q,"created":%d,"model":"m","choices":[%s]%s}`+"\n\n", id, object, 1000+v.requests.Load(), choices, rest)
		w.(http.Flusher).Flush()
	}
	die := func() {
		<-v.seen // or the router tries another worker instead
		v.die(w, r)
	}
	if chat {
		event(`{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}`, `,"prompt_token_ids":`+list(ids...))
	}
	for i := range most {
		if i == dies {
			die()
			return
		}
		place := int64(len(ids) + i)
		finish := "null"
		if i == most-1 {
			finish = `"length"`
		}
		text := strconv.Quote(fmt.Sprintf("%d,", place))
		if v.halves && place%3 == 1 {
			if text = `"\u00e9"`; i == 0 {
				text = `"\ufffd"` // it has the other half from the prompt
			}
		}
		half := v.halves && place%3 == 0 && i < most-1
		if half {
			text = `""`
		}
		token, times := 1000+place, 1
		if faulty && i == 5 {
			switch v.fault {
			case "repeated":
				times = 2
			case "skipped":
				continue
			case "wrong id":
				token = 7
			}
		}
		if chat && (half || !v.halves && place%5 == 0) { // a token without text
			event(fmt.Sprintf(`{"index":0,"delta":{},"logprobs":null,"finish_reason":%s,"token_ids":%s}`, finish, list(token)), "")
			continue
		}
		for range times {
			if chat {
				event(fmt.Sprintf(`{"index":0,"delta":{"content":%s},"logprobs":null,"finish_reason":%s,"token_ids":%s}`, text, finish, list(token)), "")
				continue
			}
			first := "null"
			if i == 0 {
				first = list(ids...)
			}
			event(fmt.Sprintf(`{"index":0,"text":%s,"logprobs":null,"finish_reason":%s,"prompt_token_ids":%s,"token_ids":%s}`, text, finish, first, list(token)), "")
		}
	}
	if dies == most {
		die()
		return
	}
	if body.Get("stream_options").Get("include_usage").Bool() {
		event("", fmt.Sprintf(`,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d,"created_cache_tokens":%d}}`,
			len(ids), len(ids)+most, most, len(ids)-3, len(ids)))
	}
	if dies > most {
		die()
		return
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// die ends an answer as the test has it.
func (v *writer) die(w http.ResponseWriter, r *http.Request) {
	if v.drain != nil {
		v.drain()
		<-r.Context().Done()
	}
	if v.engine {
		fmt.Fprint(w, `data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}`+"\n\ndata: [DONE]\n\n")
		return
	}
	panic(http.ErrAbortHandler)
}

// reader closes seen at its first byte.
type reader struct {
	*httptest.ResponseRecorder
	once sync.Once
	seen chan struct{}
}

func (r *reader) Write(b []byte) (int, error) {
	r.once.Do(func() { close(r.seen) })
	return r.ResponseRecorder.Write(b)
}

// migrated counts by result.
type migrated struct {
	testkit.SilentObserver
	results chan string
}

func (m migrated) Migrated(result string) { m.results <- result }

// continues is a chooser whose answers may be continued.
type continues struct {
	chooseOne
	next func(exclude []uint64, answered []uint32) (router.Decision, error)
}

func (c continues) Continue(exclude []uint64, answered []uint32) (router.Decision, error) {
	return c.next(exclude, answered)
}

// TestAStreamGoesOnAtAnotherWorker compares the client's bytes with those of an answer that
// was not interrupted.
func TestAStreamGoesOnAtAnotherWorker(t *testing.T) {
	const usage = `,"stream_options":{"include_usage":true}`
	never := func(int) int { return -1 }
	first := func(after int) func(int) int {
		return func(request int) int {
			if request == 1 {
				return after
			}
			return -1
		}
	}
	always := func(after int) func(int) int { return func(int) int { return after } }
	for name, c := range map[string]struct {
		options   string // of the request
		dies      func(int) int
		change    func(*writer)
		result    string // of kvrouter_migrations_total; empty: none
		why       string // in the error event; empty: the answer is whole
		completed bool   // it asks for a completion too
	}{
		"not interrupted":         {"", never, nil, "", "", true},
		"after one token":         {usage, first(1), nil, MigratedOK, "", true},
		"in the middle":           {usage, first(9), nil, MigratedOK, "", true},
		"without usage":           {"", first(9), nil, MigratedOK, "", true},
		"before the last token":   {usage, first(19), nil, MigratedOK, "", true},
		"before its usage":        {usage, first(20), nil, MigratedOK, "", true},
		"before the end":          {"", first(20), nil, MigratedOK, "", true},
		"after its usage":         {usage, first(21), nil, MigratedOK, "", true},
		"before its usage, moved": {usage, func(n int) int { return []int{0, 9, 11}[n] }, nil, MigratedOK, "", true},
		"after its usage, moved":  {usage, func(n int) int { return []int{0, 9, 12}[n] }, nil, MigratedOK, "", true},
		"by a drain":              {usage, first(9), func(v *writer) { v.drains = true }, MigratedOK, "", false},
		"by its engine":           {usage, first(9), func(v *writer) { v.engine = true }, MigratedOK, "", true},
		"three times":             {usage, func(n int) int { return []int{0, 3, 4, 5, -1}[n] }, nil, MigratedOK, "", true},
		"too often":               {usage, always(2), nil, MigratedFailed, whyLimit, true},
		"with token ids":          {usage + `,"return_token_ids":true`, first(9), nil, MigratedOK, "", true},
		"without token ids":       {"", first(9), func(v *writer) { v.mute = true }, MigratedRefused, whyNoTokens, true},
		"without a worker for it": {"", first(9), func(v *writer) { v.old = true }, MigratedFailed, whyNotTaken, false},
		"at a strict engine":      {"", func(n int) int { return []int{0, -1, 9, -1}[n] }, func(v *writer) { v.strict = true }, MigratedRefused, whyNoTokens, true},
		"of SGLang's chats":       {"", first(9), func(v *writer) { v.kind = kv.EngineSGLang }, MigratedRefused, whyChat, false},
		"with tools":              {`,"tools":[{}]`, first(9), nil, MigratedRefused, whyTools, false},
		"with a format":           {`,"response_format":{"type":"json_object"}`, first(9), nil, MigratedRefused, whyGuided, true},
		"within a character":      {usage, first(10), func(v *writer) { v.halves = true }, MigratedOK, "", true},
		"at its second half":      {usage + `,"return_token_ids":true`, first(10), func(v *writer) { v.halves = true }, MigratedOK, "", true},
		"with a stop character":   {`,"stop":["}",";"]`, first(9), nil, MigratedOK, "", true},
		"with a stop string":      {`,"stop":"END"`, first(9), nil, MigratedRefused, whyStop, true},
		"with stop strings":       {`,"stop":["}","END"]`, first(9), nil, MigratedRefused, whyStop, true},
		"with stop strings shown": {`,"stop":["END"],"include_stop_str_in_output":true`, first(9), nil, MigratedOK, "", true},
		"with a penalty":          {`,"presence_penalty":1`, first(9), nil, MigratedRefused, whyPenalty, true},
	} {
		for _, path := range []string{testkit.ChatPath, "/v1/completions"} {
			if path != testkit.ChatPath && !c.completed {
				continue
			}
			t.Run(name+path, func(t *testing.T) {
				v := &writer{dies: c.dies}
				if c.change != nil {
					c.change(v)
				}
				whole, _ := answerOf(t, path, c.options, &writer{dies: never, halves: v.halves})
				got, result := answerOf(t, path, c.options, v)
				if result != c.result {
					t.Errorf("result %q, want %q: %s", result, c.result, got)
				}
				if c.why == "" {
					if normal(got) != normal(whole) {
						t.Errorf("the client has\n%s\nof an uninterrupted answer it has\n%s", got, whole)
					}
					return
				}
				at := strings.Index(got, `data: {"error"`)
				if at < 0 || !strings.Contains(got[at:], c.why) || strings.Count(got, `"error"`) != 1 {
					t.Fatalf("want one error event with %q, got\n%s", c.why, got)
				}
				if text := textOf(got[:at]); !strings.HasPrefix(textOf(whole), text) {
					t.Errorf("text %q, of %q", text, textOf(whole))
				}
			})
		}
	}
}

// TestTheRestFollowsTheTokensOfTheWorker has a worker that repeats an event, skips one, or
// returns an id that is not that of the text: the next worker gets the ids as they came, so
// that nothing of the answer is doubled or missing that the first worker has not doubled or left
// out.
func TestTheRestFollowsTheTokensOfTheWorker(t *testing.T) {
	for fault, want := range map[string]string{
		"repeated": "1003 1004 1005 1006 1007 1008 1008 1009 1010 1011",
		"skipped":  "1003 1004 1005 1006 1007 1009 1010 1011",
		"wrong id": "1003 1004 1005 1006 1007 7 1009 1010 1011",
	} {
		t.Run(fault, func(t *testing.T) {
			v := &writer{fault: fault, dies: func(n int) int { return []int{0, 9, -1}[n] }}
			got, result := answerOf(t, "/v1/completions", `,"return_token_ids":true,"stream_options":{"include_usage":true}`, v)
			if result != MigratedOK {
				t.Errorf("result %q", result)
			}
			<-v.bodies // of the first worker
			var sent []string
			for _, id := range gjson.Get(<-v.bodies, "prompt").Array()[3:] {
				sent = append(sent, id.Raw)
			}
			if text := strings.Join(sent, " "); text != want {
				t.Errorf("the next worker gets %s, want %s", text, want)
			}
			for place := 3 + len(sent); len(sent) < 20; place++ {
				sent = append(sent, strconv.Itoa(1000+place))
			}
			var shown []string
			for line := range strings.Lines(got) {
				for _, id := range gjson.Get(strings.TrimPrefix(line, "data: "), "choices.0.token_ids").Array() {
					shown = append(shown, id.Raw)
				}
			}
			if !slices.Equal(shown, sent) {
				t.Errorf("the client has %v, want %v", shown, sent)
			}
		})
	}
}

// normal replaces what differs between any two answers.
func normal(events string) string {
	var out []string
	id, created := "", ""
	for line := range strings.Lines(events) {
		data, ok := strings.CutPrefix(line, "data: ")
		if v := gjson.Get(data, "id"); ok && v.Exists() {
			if id == "" {
				id, created = v.Raw, gjson.Get(data, "created").Raw
			}
			line = strings.Replace(strings.Replace(line, id, `"id"`, 1), `"created":`+created, `"created":0`, 1)
		}
		out = append(out, strings.Replace(line, `,"created_cache_tokens":3`, "", 1)) // a worker that dies before its usage reports none
	}
	return strings.Join(out, "")
}

// textOf returns the text of an answer.
func textOf(events string) (text string) {
	for line := range strings.Lines(events) {
		data := strings.TrimPrefix(line, "data: ")
		text += gjson.Get(data, "choices.0.delta.content").Str + gjson.Get(data, "choices.0.text").Str
	}
	return text
}

func readBody(r *http.Request) *jsonbody.Body {
	raw := make([]byte, r.ContentLength)
	for n := 0; n < len(raw); {
		m, err := r.Body.Read(raw[n:])
		if n += m; err != nil {
			break
		}
	}
	body, _ := jsonbody.Parse(raw)
	return body
}

// answerOf sends a request of 20 tokens to one of two servers of v, and returns the
// client's bytes.
func answerOf(t *testing.T, path, options string, v *writer) (events, result string) {
	v.bodies = make(chan string, 100)
	rt := routertest.New(t, "round-robin", 0)
	for i := range uint64(5) {
		var handler http.Handler = v
		if v.form > 0 {
			handler = testkit.Reformed(v, v.form)
		}
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		rt.Up(kv.Target{Key: kv.WorkerKey{Worker: i}, URL: server.URL, Generation: 1, Engine: v.kind})
	}
	results := make(chan string, 10)
	settings := testkit.Defaults[Settings]()
	if v.drains {
		settings.DrainMigrateAfter = time.Millisecond
		v.drain = func() {
			if err := rt.Health.Cordon(0); err != nil {
				t.Error(err)
			}
		}
	}
	p := New(settings, Deps{Observer: migrated{results: results}, Failed: func(uint64) {}})
	t.Cleanup(p.Close)
	prompt := []uint32{1, 2, 3}
	text := `"messages":[{"role":"user","content":"hi"}]`
	switch path {
	case completionRoute:
		text = `"prompt":"hi"`
	case generateRoute:
		text = `"text":"hi"`
		if !strings.Contains(options, "sampling_params") {
			options += `,"sampling_params":{"max_new_tokens":20}`
		}
	}
	body, ok := jsonbody.Parse([]byte(`{` + text + `,"stream":true,"max_tokens":20` + options + `}`))
	if !ok {
		t.Fatal("no JSON")
	}
	u := Upstream{Method: http.MethodPost, Path: path, Route: path, Header: http.Header{web.HeaderRequest: {"r"}}, Body: body, EndMarked: true, MaxRetries: 2}
	u.AskUsage = true
	u.Migration = NewMigration(path, body, prompt, true, SeveralAnswers(path, body), v.decode)
	u.PromptTokens = NewPromptTokens(path, body, prompt, func(*kv.Target) bool { return v.tokens })
	x := &Exchange{}
	v.seen = make(chan struct{})
	w := &reader{ResponseRecorder: httptest.NewRecorder(), seen: v.seen}
	request := router.Request{Tokens: prompt}
	err := p.Forward(context.Background(), w, u, x, continues{chooseOne(func(exclude []uint64) (router.Decision, error) {
		request.Exclude = exclude
		return rt.Route(t.Context(), request)
	}), func(exclude []uint64, answered []uint32) (router.Decision, error) {
		for i, token := range answered {
			if v.fault == "" && token != uint32(1000+len(prompt)+i) {
				t.Fatalf("%d tokens answered: %v", len(answered), answered)
			}
		}
		request := request
		request.Exclude, request.Tokens = exclude, slices.Concat(prompt, answered)
		return rt.Route(t.Context(), request)
	}})
	if failed := strings.Contains(w.Body.String(), `"error"`); failed != (err != nil) {
		t.Errorf("%v: %s", err, w.Body)
	}
	if err == nil && (x.Usage.PromptTokens != 3 || x.Usage.OutputTokens != 20) {
		t.Errorf("usage %+v", x.Usage)
	}
	if d, u := x.Predicted(); u.CachedKnown && (u.PromptTokens != d.Tokens || path != generateRoute && u.CachedTokens != d.Tokens-3) {
		t.Errorf("%d of %d tokens are compared with a prediction for %d", u.CachedTokens, u.PromptTokens, d.Tokens)
	}
	if x.Decision.OverlapTokens > 3 || x.Usage.CachedTokens > 3 {
		t.Errorf("of a prompt of 3 tokens %d were predicted, %d reported", x.Decision.OverlapTokens, x.Usage.CachedTokens)
	}
	if n := routertest.InFlight(rt); n != 0 {
		t.Errorf("%d are still booked", n)
	}
	if len(results) > 1 {
		t.Errorf("%d results", len(results))
	}
	if len(results) > 0 {
		result = <-results
	}
	return w.Body.String(), result
}

// FuzzMigration holds that no stream of a worker, however it is cut, breaks a Migration, that its
// memory is bounded by what came, and that a stream without token ids goes on as it is.
func FuzzMigration(f *testing.F) {
	f.Add("data: {\"id\":\"a\",\"created\":1,\"choices\":[{\"delta\":{\"content\":\"x\"},\"token_ids\":[1,2]}]}\n\n", uint8(7), false)
	f.Add("data: {\"choices\":[{\"delta\":{},\"token_ids\":[4294967296]}]}\n\ndata: [DONE]\n\n", uint8(3), true)
	f.Add("data: {\"error\":{\"code\":500}}\n\n", uint8(1), true)
	f.Add("data: {\"prompt_token_ids\":[1,2,3,1001],\"id\":\"b\",\"choices\":[{\"delta\":{\"role\":\"a\"}}],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":1}}\n\n", uint8(200), true)
	body, _ := jsonbody.Parse([]byte(`{"stream":true,"max_tokens":5,"messages":[]}`))
	f.Fuzz(func(t *testing.T, stream string, cut uint8, rest bool) {
		s := NewMigration(testkit.ChatPath, body, []uint32{1, 2, 3}, true, false, nil)
		s.ask(new(kv.Target), body)
		s.begun, s.added = true, !rest
		if rest {
			s.tokens, s.id, s.created = []uint32{1001}, `"a"`, "1"
			s.rest(&edits{client: body})
		}
		events := eventScanner{Migration: s}
		var out []byte
		for text := []byte(stream); len(text) > 0; {
			n := min(len(text), int(cut)+1)
			out = append(out, events.Scan(text[:n])...)
			text = text[n:]
		}
		out = append(out, events.End()...)
		if len(s.tokens) > len(stream)+1 {
			t.Errorf("%d tokens of %d bytes", len(s.tokens), len(stream))
		}
		if !rest && !strings.Contains(stream, "token_ids") && !strings.Contains(stream, "error") && !strings.Contains(stream, `"delta":{}`) && string(out) != stream {
			t.Errorf("%q became %q", stream, out)
		}
		s.dialect.close(s, nil)
	})
}

func TestPromptTokensAreTakenOutOfTheFirstEvent(t *testing.T) {
	for name, test := range map[string]struct {
		s           Migration
		event, want string
	}{
		"vLLM's":          {Migration{dialect: vllmChat{}, added: true}, `{"choices":[],"prompt_token_ids":[1,2,3],"usage":null}`, `{"choices":[],"prompt_token_ids":null,"usage":null}`},
		"SGLang's":        {Migration{dialect: newSGLangCompletion(), added: true}, `{"choices":[],"prompt_token_ids":[1,2,3],"usage":null}`, `{"choices":[],"usage":null}`},
		"empty":           {Migration{dialect: vllmChat{}, added: true}, `{"prompt_token_ids":[]}`, `{"prompt_token_ids":null}`},
		"without end":     {Migration{dialect: vllmChat{}, added: true}, `{"prompt_token_ids":[1,2`, `{"prompt_token_ids":[1,2`},
		"of the client":   {Migration{}, `{"prompt_token_ids":[1]}`, `{"prompt_token_ids":[1]}`},
		"to be verified":  {Migration{dialect: vllmChat{}, added: true, moves: 1}, `{"prompt_token_ids":[1]}`, `{"prompt_token_ids":[1]}`},
		"of later events": {Migration{dialect: vllmChat{}, added: true, answer: answer{id: `"a"`}}, `{"prompt_token_ids":[1]}`, `{"prompt_token_ids":[1]}`},
	} {
		if got := test.s.trim([]byte(test.event)); string(got) != test.want {
			t.Errorf("%s: %s became %s", name, test.event, got)
		}
	}
}

// TestTheFirstTextIsReadAlike holds quick against the reading of any event.
func TestTheFirstTextIsReadAlike(t *testing.T) {
	body, _ := jsonbody.Parse([]byte(`{"stream":true,"messages":[]}`))
	asking, _ := jsonbody.Parse([]byte(`{"stream":true,"messages":[],"return_token_ids":true}`))
	const head = `data: {"id":"a","created":1,"model":"m",`
	for event, quickly := range map[string]bool{
		head + `"choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"token_ids":[1,2]}]}`:                            true,
		head + `"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2],"more":["token_ids"]}],"usage":{"a":[1]}}`:     true,
		head + `"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2]}],"prompt_token_ids":null}`:                    true,
		head + `"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2]}],"prompt_token_ids":[7]}`:                     false,
		head + `"choices":[{"index":0,"delta":{"content":""},"token_ids":[1,2]}]}`:                                             false,
		head + `"choices":[{"index":0,"delta":{"role":"a","content":""}}]}`:                                                    false,
		head + `"choices":[{"index":0,"delta":{"content":"x"}}]}`:                                                              false,
		`data: {"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2]}],"id":"a","created":1,"model":"m"}`:           false,
		`data: {"id":"a","created":1,"model":{"m":[{"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2]}]}]}}`:     false,
		`data: {"created":1,"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2]}]}`:                                false,
		`event: x` + "\n" + `data: {"id":"a","created":1,"model":"m","choices":[{"delta":{"content":"x"},"token_ids":[1,2]}]}`: false,
	} {
		for _, request := range []*jsonbody.Body{body, asking} {
			fast := NewMigration(testkit.ChatPath, request, []uint32{1, 2, 3}, true, false, nil)
			slow := NewMigration(testkit.ChatPath, request, []uint32{1, 2, 3}, true, false, nil)
			out, ok := vllmChats.quick(fast, nil, []byte(event+"\n\n"), false)
			if ok != quickly {
				t.Errorf("%s: quick %v", event, ok)
			}
			if !ok {
				continue
			}
			slow.dialect = vllmChat{choices: vllmChats}
			want := vllmChats.show(slow, nil, []byte(event+"\n\n"), false)
			if string(out) != string(want) || fast.id != slow.id || fast.created != slow.created || fast.model != slow.model || fast.text != slow.text || !slices.Equal(fast.tokens, slow.tokens) {
				t.Errorf("%s became\n%s, not\n%s: %+v, not %+v", event, out, want, fast, slow)
			}
		}
	}
}

// BenchmarkMigration reads one event of a token with its id, and takes the id out.
func BenchmarkMigration(b *testing.B) {
	body, _ := jsonbody.Parse([]byte(`{"stream":true,"max_tokens":5,"messages":[]}`))
	event := []byte(`data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":[12345]}]}` + "\n\n")
	s := NewMigration(testkit.ChatPath, body, []uint32{1, 2, 3}, true, false, nil)
	s.ask(new(kv.Target), body)
	s.begun = true
	events := eventScanner{Migration: s}
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	for b.Loop() {
		if events.Scan(event); len(s.tokens) > maxMigratedAnswer/2 {
			s.tokens = s.tokens[:0]
		}
	}
}
