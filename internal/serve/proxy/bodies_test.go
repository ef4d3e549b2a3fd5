package proxy

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

var update = flag.Bool("update", false, "write testdata/bodies.txt")

// bodiesGolden has the bodies that workers get, by request and fleet.
const bodiesGolden = "testdata/bodies.txt"

// listener is the workers of a request: it notes what they get. Streams break off after one
// token, so that the rest is asked for.
type listener struct {
	mu  sync.Mutex // guards got
	got []string
}

func (l *listener) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/query") {
		return answerWith("application/json", `{"0":{"engine_id":"e"},"1":{"engine_id":"e"}}`), nil
	}
	if r.URL.Path == "/abort_request" {
		return answerWith("application/json", `{}`), nil
	}
	body := []byte{}
	if r.Body != nil {
		body, _ = io.ReadAll(r.Body)
	}
	l.mu.Lock()
	l.got = append(l.got, string(body))
	l.mu.Unlock()
	switch {
	case !bytes.Contains(body, []byte(`"stream":true`)):
		return answerWith("application/json", `{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true}}`), nil
	case r.URL.Path == generateRoute:
		return answerWith("text/event-stream", `data: {"text":"a","output_ids":[7],"meta_info":{"id":"i","prompt_tokens":3,"completion_tokens":1}}`+"\n\n"), nil
	case r.URL.Path == chatRoute:
		return answerWith("text/event-stream", `data: {"id":"i","created":1,"model":"m","choices":[{"delta":{"content":"a"},"token_ids":[7]}]}`+"\n\n"), nil
	}
	return answerWith("text/event-stream", `data: {"id":"i","created":1,"model":"m","choices":[{"text":"a","token_ids":[7]}]}`+"\n\n"), nil
}

// answerWith is an answer that breaks off if it is a stream.
func answerWith(kind, text string) *http.Response {
	body := io.Reader(strings.NewReader(text))
	if kind == "text/event-stream" {
		body = io.MultiReader(body, iotest.ErrReader(errors.New("broken")))
	}
	return &http.Response{StatusCode: 200, Status: "200 OK", Header: http.Header{"Content-Type": {kind}}, Body: io.NopCloser(body)}
}

// bodyOf is a body as it is written.
func bodyOf(e *edits) string {
	head, rest := e.write()
	return string(head) + string(rest)
}

// TestBodiesThatWorkersGet compares the bodies that workers get with bodiesGolden, byte by byte.
func TestBodiesThatWorkersGet(t *testing.T) {
	random := []*regexp.Regexp{regexp.MustCompile(`bootstrap_room":\d+`), regexp.MustCompile(`r-[0-9a-zA-Z]{16,26}`)}
	fleets := []struct {
		name   string
		target kv.Target
		tokens bool // the worker takes those of prompts
		pulls  bool
		moves  bool // streams may be continued
		pair   kv.Kind
	}{
		{name: "vLLM"},
		{name: "vLLM, continued", moves: true},
		{name: "vLLM, tokens, continued", tokens: true, moves: true},
		{name: "vLLM, tokens, pulled", tokens: true, pulls: true},
		{name: "vLLM, pulled, continued", pulls: true, moves: true},
		{name: "SGLang, tokens, continued", target: kv.Target{Engine: kv.EngineSGLang}, tokens: true, moves: true},
		{name: "SGLang, two ranks, continued", target: kv.Target{Engine: kv.EngineSGLang, Ranks: 2}, moves: true},
		{name: "NIXL, continued", pair: kv.KindNIXL, moves: true},
		{name: "NIXL, tokens, continued", pair: kv.KindNIXL, tokens: true, moves: true},
		{name: "Mooncake, tokens", pair: kv.KindMooncake, tokens: true},
		{name: "SGLang's pair, tokens", pair: kv.KindSGLang, tokens: true},
		{name: "SGLang's pair, two ranks", target: kv.Target{Ranks: 2}, pair: kv.KindSGLang},
	}
	var out strings.Builder
	for _, request := range []struct{ path, body string }{
		{chatRoute, `{"stream":true,"messages":[ ], "max_tokens":20,"min_tokens":2,"stop":"x"}`},
		{chatRoute, `{"stream":true,"stream_options":{"x": 1},"max_completion_tokens":20}`},
		{chatRoute, `{"max_tokens":20,"stream":true,"stream_options":null,"return_token_\u0069ds":null}`},
		{chatRoute, `{ "model":"m", "rid":"own"}`},
		{completionRoute, `{"prompt":"hi" }`},
		{completionRoute, `{"stream":true,"prompt":"hi","stream_options": {}, "max_tokens":20}`},
		{generateRoute, `{"stream":true,"text":"hi","sampling_params":{"max_new_tokens":20,"min_new_tokens":3},"routed_dp_rank":7}`},
		{ResponsesRoute, `{"input":"hi","stream":false}`},
		{"/v1/embeddings", ` { } `},
	} {
		body, ok := jsonbody.Parse([]byte(request.body))
		if !ok {
			t.Fatal(request.body)
		}
		fmt.Fprintf(&out, "\n%s %s\n", request.path, request.body)
		for _, fleet := range fleets {
			l := &listener{}
			p := New(testkit.Defaults[Settings](), Deps{Observer: testkit.SilentObserver{}, Failed: func(uint64) {}, Transport: l, Log: slog.New(slog.DiscardHandler)})
			u := Upstream{Method: http.MethodPost, Path: request.path, Route: request.path, Header: http.Header{web.HeaderRequest: {"r"}}, RequestID: "r", Body: body, EndMarked: true, Paired: fleet.pair != 0}
			if request.path == chatRoute || request.path == completionRoute {
				u.AskUsage = true
			}
			u.PromptTokens = NewPromptTokens(request.path, body, []uint32{1, 2, 3}, func(*kv.Target) bool { return fleet.tokens })
			if fleet.moves {
				u.Migration = NewMigration(request.path, body, []uint32{1, 2, 3}, true, false, nil)
			}
			target := fleet.target
			target.URL, target.Ranks = "http://a", max(1, target.Ranks)
			target.Key.Rank, target.Disagg.Kind = uint32(target.Ranks-1), fleet.pair
			c := &fleetChooser{router: routertest.New(t, "round-robin", 0), ctx: t.Context()}
			if fleet.pulls {
				c.decided = func(d *router.Decision) {
					d.Source = &kv.Target{Disagg: kv.Disagg{P2P: kv.Bootstrap{Host: "p", Port: 5710}}}
				}
			}
			for i := range uint64(3) { // of a pair's, the first one computes prompts
				if target.Key.Worker, target.Bootstrap = i, (kv.Bootstrap{}); fleet.pair != 0 {
					target.Role = kv.RoleDecode
				}
				if fleet.pair != 0 && i == 0 {
					target.Role, target.Bootstrap = kv.RolePrefill, kv.Bootstrap{Host: "h", Port: 8998}
				}
				c.router.Up(target)
			}
			_ = p.Forward(t.Context(), httptest.NewRecorder(), u, &Exchange{}, c)
			p.Close()
			if fleet.pair == kv.KindSGLang { // both legs are sent at once
				slices.Sort(l.got)
			}
			for _, got := range l.got {
				if got == request.body {
					got = "unchanged"
				}
				for _, r := range random {
					got = r.ReplaceAllStringFunc(got, func(s string) string { return s[:strings.IndexAny(s, ":-")+1] + "RANDOM" })
				}
				fmt.Fprintf(&out, "%s: %s\n", fleet.name, got)
			}
		}
	}
	if *update {
		if err := os.WriteFile(bodiesGolden, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(bodiesGolden)
	if err != nil {
		t.Fatal(err)
	}
	wanted, got := strings.Split(string(want), "\n"), strings.Split(out.String(), "\n")
	for i := range min(len(wanted), len(got)) {
		if wanted[i] != got[i] {
			t.Fatalf("line %d of %s:\n%s\nis now\n%s", i+1, bodiesGolden, wanted[i], got[i])
		}
	}
	if len(wanted) != len(got) {
		t.Errorf("%d lines, want %d", len(got), len(wanted))
	}
}

// TestRanksAreNamed: in a header, and for SGLang's own route in the body, where it reads no header.
func TestRanksAreNamed(t *testing.T) {
	for _, test := range []struct {
		ranks      int
		path, body string
		want       string
	}{
		{2, generateRoute, `{ "text":"a"}`, `{"routed_dp_rank":1, "text":"a"}`},
		{2, generateRoute, `{"text":"a", "routed_dp_rank":0}`, `{"routed_dp_rank":1,"text":"a"}`}, // the router's, since it has counted on it
		{2, generateRoute, `{"text":"a", "routed_dp_r\u0061nk":null,"routed_dp_rank":0}`, `{"routed_dp_rank":1,"text":"a"}`},
		{1, generateRoute, `{ "text":"a"}`, `{ "text":"a"}`},
		{1, generateRoute, `{"text":"a", "routed_dp_rank":0}`, `{"text":"a", "routed_dp_rank":0}`},
		{2, completionRoute, `{ "text":"a"}`, `{ "text":"a"}`},
	} {
		u := &Upstream{Method: http.MethodPost, Route: test.path, Path: test.path, Body: parsed(t, test.body)}
		target := kv.Target{Key: kv.WorkerKey{Rank: 1}, URL: "http://a", Engine: kv.EngineSGLang, Ranks: test.ranks}
		request, err := new(Proxy).request(t.Context(), &sending{Upstream: u, edits: editsOf(u)}, target)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(request.Body)
		if rank := request.Header.Get(web.HeaderRank); string(got) != test.want || (rank == "1") != (test.ranks > 1) {
			t.Errorf("%d ranks, %s: %s, rank %q", test.ranks, test.path, got, rank)
		}
	}
}
