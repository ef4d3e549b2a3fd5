package proxy

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// taker is a worker that keeps the bodies sent to it and answers them by refuse: status and
// message, or 200.
type taker struct {
	bodies []string
	refuse func(body string) (status int, message string)
}

func (w *taker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	body := string(readBody(r).Raw)
	w.bodies = append(w.bodies, body)
	if status, message := w.refuse(body); status != http.StatusOK {
		rw.WriteHeader(status)
		fmt.Fprintf(rw, `{"error":{"message":%q}}`, message)
		return
	}
	fmt.Fprint(rw, `{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":{"remote_block_ids":[1]},"usage":{"prompt_tokens":3,"completion_tokens":1}}`)
}

// takes answers everything.
func takes(string) (int, string) { return http.StatusOK, "" }

// promptIDs are the prompt's tokens in a body; refusesIDs answers bodies with them with that
// status.
func promptIDs(body string) string {
	for _, path := range []string{"kv_transfer_params.prompt_token_ids", "input_ids", "prompt"} {
		if ids := gjson.Get(body, path); ids.IsArray() {
			return ids.Raw
		}
	}
	return ""
}

func refusesIDs(status int, message string) func(string) (int, string) {
	return func(body string) (int, string) {
		if promptIDs(body) != "" {
			return status, message
		}
		return http.StatusOK, ""
	}
}

// tokenFleet is one worker of an engine behind a proxy.
type tokenFleet struct {
	*taker
	proxy  *Proxy
	router *router.Router
}

func newTokenFleet(t *testing.T, engine kv.Engine, refuse func(string) (int, string)) *tokenFleet {
	f := &tokenFleet{taker: &taker{refuse: refuse}, proxy: newTestProxy(t, 0), router: routertest.New(t, "round-robin", 0)}
	server := httptest.NewServer(f.taker)
	t.Cleanup(server.Close)
	f.router.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}, URL: server.URL, Generation: 1, Engine: engine})
	return f
}

// send sends a request whose prompt has the tokens 1 to 3 and returns the client's answer.
func (f *tokenFleet) send(t *testing.T, path, body string) *httptest.ResponseRecorder {
	t.Helper()
	u := tokenRequest(t, path, body)
	w := httptest.NewRecorder()
	err := f.proxy.Forward(t.Context(), w, u, &Exchange{}, chooseOne(func(exclude []uint64) (router.Decision, error) {
		return f.router.Route(t.Context(), router.Request{Tokens: []uint32{1, 2, 3}, Exclude: exclude})
	}))
	if err != nil {
		t.Fatal(err)
	}
	if n := routertest.InFlight(f.router); n != 0 {
		t.Errorf("%d are still booked", n)
	}
	return w
}

func tokenRequest(t *testing.T, path, text string) Upstream {
	body, ok := jsonbody.Parse([]byte(text))
	if !ok {
		t.Fatalf("%s is no object", text)
	}
	u := Upstream{Method: http.MethodPost, Path: path, Route: path, Header: http.Header{}, Body: body, MaxRetries: 2}
	u.AskUsage = true
	u.PromptTokens = NewPromptTokens(path, body, []uint32{1, 2, 3}, func(*kv.Target) bool { return true })
	return u
}

const (
	hiChat  = `"messages":[{"role":"user","content":"hi"}]`
	hiTexts = `"prompt":"hi"`
)

// TestPromptsThatEnginesNeedAsText stay as they are.
func TestPromptsThatEnginesNeedAsText(t *testing.T) {
	for _, c := range []struct{ path, body string }{
		{chatRoute, `{` + hiChat + `,"echo":true}`},
		{chatRoute, `{` + hiChat + `,"prompt_logprobs":0}`},
		{chatRoute, `{` + hiChat + `,"n":2}`},
		{chatRoute, `{` + hiChat + `,"truncate_prompt_tokens":-1}`},
		{chatRoute, `{` + hiChat + `,"kv_transfer_params":{"a":1}}`},
		{chatRoute, `{` + hiChat + `,"input_ids":[4]}`},
		{completionRoute, `{` + hiTexts + `,"echo":true}`},
		{completionRoute, `{` + hiTexts + `,"suffix":"x"}`},
		{completionRoute, `{"prompt":[1,2,3]}`},
		{completionRoute, `{"prompt":["hi"]}`},
		{ResponsesRoute, `{"input":"hi"}`},
	} {
		f := newTokenFleet(t, kv.EngineVLLM, takes)
		f.send(t, c.path, c.body)
		if len(f.bodies) != 1 || f.bodies[0] != c.body {
			t.Errorf("%s: %s\nbecame %s", c.path, c.body, f.bodies)
		}
	}
}

// TestARefusedRequestIsSentAsTheClientWroteIt: and a worker that says why gets no more
// tokens.
func TestARefusedRequestIsSentAsTheClientWroteIt(t *testing.T) {
	for _, c := range []struct {
		name       string
		refuse     func(string) (int, string)
		remembered bool
		status     int
	}{
		{"it names them", refusesIDs(400, "prompt_token_ids is unknown"), true, 200},
		{"it does not name them", refusesIDs(422, "no"), false, 200},
		{"it is too long with them", refusesIDs(413, "no"), false, 200},
		{"the client is wrong", func(string) (int, string) { return 400, "temperature" }, false, 400},
	} {
		for _, path := range []string{chatRoute, completionRoute} {
			f := newTokenFleet(t, kv.EngineVLLM, c.refuse)
			client := `{` + hiChat + `}`
			if path == completionRoute {
				client = `{` + hiTexts + `}`
			}
			for range 2 {
				if w := f.send(t, path, client); w.Code != c.status {
					t.Errorf("%s, %s: the client got %d %s", c.name, path, w.Code, w.Body)
				}
			}
			want := []bool{true, false, true, false} // with tokens
			if c.remembered {
				want = []bool{true, false, false}
			}
			if len(f.bodies) != len(want) {
				t.Fatalf("%s, %s: %d requests: %s", c.name, path, len(f.bodies), f.bodies)
			}
			for i, with := range want {
				if got := promptIDs(f.bodies[i]) != ""; got != with || !with && f.bodies[i] != client {
					t.Errorf("%s, %s: request %d was %s", c.name, path, i, f.bodies[i])
				}
			}
		}
	}
}

// TestAFailureIsNoRefusalOfTokens: it is retried, or reported, as any other.
func TestAFailureIsNoRefusalOfTokens(t *testing.T) {
	f := newTokenFleet(t, kv.EngineVLLM, func(string) (int, string) { return 501, "prompt_token_ids" })
	if w := f.send(t, chatRoute, `{`+hiChat+`}`); w.Code != 501 || len(f.bodies) != 1 {
		t.Errorf("%d after %d requests", w.Code, len(f.bodies))
	}
}

// TestBothLegsGetTheTokensOfPrompts: each worker only if it takes them, and all again without
// them if one refuses.
func TestBothLegsGetTheTokensOfPrompts(t *testing.T) {
	for _, c := range []struct {
		name            string
		prefill, decode func(string) (int, string)
		take            func(*kv.Target) bool
		want            string // by request: P or D with tokens, p or d without
	}{
		{"both take them", takes, takes, func(*kv.Target) bool { return true }, "PD"},
		{"the prefill worker takes them", takes, takes, func(t *kv.Target) bool { return t.Role == kv.RolePrefill }, "Pd"},
		{"the decode worker takes them", takes, takes, func(t *kv.Target) bool { return t.Role == kv.RoleDecode }, "pD"},
		{"none takes them", takes, takes, func(*kv.Target) bool { return false }, "pd"},
		{"the prefill worker refuses them", refusesIDs(400, "no"), takes, func(*kv.Target) bool { return true }, "Ppd"},
		{"the decode worker refuses them", takes, refusesIDs(400, "no"), func(*kv.Target) bool { return true }, "PDpd"},
	} {
		for _, path := range []string{chatRoute, completionRoute} {
			t.Run(c.name+path, func(t *testing.T) {
				var got strings.Builder
				var servers [2]*httptest.Server
				for i, refuse := range []func(string) (int, string){c.prefill, c.decode} {
					servers[i] = httptest.NewServer(&taker{refuse: func(body string) (int, string) {
						letter := "pd"[i : i+1]
						if ids := promptIDs(body); ids == "[1,2,3]" {
							letter = strings.ToUpper(letter)
						} else if ids != "" {
							t.Errorf("tokens %s", ids)
						}
						got.WriteString(letter)
						if path == chatRoute && gjson.Get(body, "messages").Raw != `[{"role":"user","content":"hi"}]` {
							t.Errorf("messages in %s", body)
						}
						params := gjson.Get(body, "kv_transfer_params")
						if i == 0 && !params.Get("do_remote_decode").Bool() || i == 1 && params.Get("remote_block_ids").Raw != "[1]" || strings.Count(body, "kv_transfer_params") != 1 {
							t.Errorf("leg %d: transfer parameters in %s", i, body)
						}
						return refuse(body)
					}})
					t.Cleanup(servers[i].Close)
				}
				rt := routertest.New(t, "round-robin", 0)
				rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}, URL: servers[0].URL, Disagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}})
				rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 2}, URL: servers[1].URL, Disagg: kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}})
				p := newTestProxy(t, 0)
				text := `{` + hiChat + `}`
				if path == completionRoute {
					text = `{` + hiTexts + `}`
				}
				u := tokenRequest(t, path, text)
				u.PromptTokens.takes, u.Paired = c.take, true
				w := httptest.NewRecorder()
				err := p.Forward(t.Context(), w, u, &Exchange{}, &fleetChooser{router: rt, ctx: t.Context(), request: router.Request{Tokens: make([]uint32, 1000)}})
				if err != nil || w.Code != http.StatusOK || got.String() != c.want {
					t.Errorf("requests %s, want %s; the client got %d, %v: %s", got.String(), c.want, w.Code, err, w.Body)
				}
				if n := routertest.InFlight(rt); n != 0 {
					t.Errorf("%d are still booked", n)
				}
			})
		}
	}
}

// TestAStreamWithTheTokensOfItsPromptGoesOn: the rest of an answer is asked for once with the
// tokens, and without a second list.
func TestAStreamWithTheTokensOfItsPromptGoesOn(t *testing.T) {
	for _, path := range []string{testkit.ChatPath, completionRoute} {
		whole, _ := answerOf(t, path, "", &writer{dies: func(int) int { return -1 }})
		v := &writer{tokens: true, dies: func(request int) int { return []int{0, 9, -1}[request] }}
		got, result := answerOf(t, path, "", v)
		if result != MigratedOK || normal(got) != normal(whole) {
			t.Errorf("%s: %s: %s\nwant %s", path, result, got, whole)
		}
		for i, want := range []int{3, 12} {
			body := <-v.bodies
			if n := len(gjson.Parse(promptIDs(body)).Array()); n != want || strings.Count(body, "kv_transfer_params") > 1 || !gjson.Get(body, "return_token_ids").Bool() {
				t.Errorf("%s: request %d has %d tokens, want %d: %s", path, i, n, want, body)
			}
		}
	}
}
