package page

import (
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

func TestTryGoesInsideAndComesBackUnchanged(t *testing.T) {
	b := newBench(t, testKey)
	b.openAI = func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path != chatPath || r.Method != "POST" || string(body) != `{"stream":true}` || r.Header.Get("Authorization") != "" || r.Header.Get("Cookie") != "" {
			t.Errorf("%s %s %v %s", r.Method, r.URL, r.Header, body)
		}
		w.Header().Set(web.HeaderRequest, r.Header.Get(web.HeaderRequest))
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		io.WriteString(w, "data: [DONE]\n\n")
	}
	response, answer := b.send(t, "POST", "/ui/try?model=x", `{"stream":true}`, "Authorization", "Bearer "+testKey, "Cookie", "a=b")
	if id := response.Header.Get(web.HeaderRequest); response.StatusCode != 200 || answer != "data: 1\n\ndata: [DONE]\n\n" || !strings.HasPrefix(id, "page-") {
		t.Errorf("%d %q %q", response.StatusCode, answer, id)
	}
}

// TestTryNeedsAKeyWhereOnlyTheOpenAIPortAsks: else it would be a way around that port's
// keys and limits.
func TestTryNeedsAKeyWhereOnlyTheOpenAIPortAsks(t *testing.T) {
	for _, test := range []struct {
		name   string
		keys   []string // of the router port
		keyed  bool     // the OpenAI port
		header []string
		want   int
	}{
		{"no keys at all", nil, false, nil, 200},
		{"no key", nil, true, nil, 401},
		{"a wrong key", nil, true, []string{"Authorization", "Bearer wrong"}, 401},
		{"a key of the OpenAI port", nil, true, []string{"Authorization", "Bearer sk"}, 200},
		{"the same beyond its limit", nil, true, []string{"Authorization", "Bearer sk"}, 429},
		{"the router port's key", []string{testKey}, true, []string{"Authorization", "Bearer " + testKey}, 200},
		{"the OpenAI port's where the router port has one", []string{testKey}, true, []string{"Authorization", "Bearer sk"}, 401},
	} {
		b := newBench(t, test.keys...)
		b.settings.APIKeyed = test.keyed
		ring := keys.New(keys.Settings{}, nil)
		if test.keyed {
			file := filepath.Join(t.TempDir(), "keys.yaml")
			testkit.WriteFile(t, file, "- {name: a, key: sk, limits: {requests-per-second: 0.001, burst: 1}}")
			ring = keys.New(keys.Settings{APIKeysFile: file}, nil)
			use, err := ring.Read()
			if err != nil {
				t.Fatal(err)
			}
			use()
		}
		engine := gin.New()
		engine.POST(chatPath, ring.Guard(web.Fail), func(c *gin.Context) { c.String(200, "ok") })
		b.openAI = engine.ServeHTTP
		if test.want == http.StatusTooManyRequests {
			b.send(t, "POST", "/ui/try", `{}`, test.header...)
		}
		response, answer := b.send(t, "POST", "/ui/try", `{}`, test.header...)
		if response.StatusCode != test.want || test.want != 200 && !strings.Contains(answer, "error") {
			t.Errorf("%s: %d %s, want %d", test.name, response.StatusCode, answer, test.want)
		}
		if state := b.state(time.Now()); state.TryAsks != (test.keyed && test.keys == nil) {
			t.Errorf("%s: the page asks for a key: %v", test.name, state.TryAsks)
		}
	}
}

func TestWhereAsksWithoutSending(t *testing.T) {
	b := newBench(t)
	b.openAI = func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if parsed, ok := jsonbody.Parse(body); !ok || parsed.Get("stream").Bool() || parsed.Get("nvext").Get("annotations").Get("0").String() != "query_instance_id:" {
			t.Errorf("%s asks %s", r.URL, body)
		}
		if strings.Contains(string(body), "unknown model") {
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"error":{"message":"no such model"}}`)
			return
		}
		if _, explained := b.router.Receipts.Last(0); !explained {
			t.Error("the decision is not explained")
		}
		receipt := explained(2)
		receipt.QueryOnly = true
		x := &proxy.Exchange{Arrived: time.Now(), Status: 200, Worker: "none", Route: r.URL.Path, Receipts: []*router.Receipt{receipt}}
		b.Finished(b.began(r.Header.Get(web.HeaderRequest), x), time.Now())
	}
	tests := []struct {
		name, body string
		want       int
		route      string
	}{
		{"a chat", `{"messages":[],"stream":true,"nvext":{"annotations":["x"]}}`, 200, chatPath},
		{"a completion", `{"prompt":"a"}`, 200, completionPath},
		{"neither", `{"input":"a"}`, 400, ""},
		{"no JSON", `{"messages":`, 400, ""},
		{"refused", `{"prompt":"unknown model"}`, 404, ""},
		{"too large", `{"prompt":"` + strings.Repeat("a", whereLimit) + `"}`, 413, ""},
	}
	for _, test := range tests {
		response, answer := b.send(t, "POST", "/ui/where", test.body)
		var receipt struct {
			Worker  *uint64 `json:"worker_id,string"`
			Error   string  `json:"error"`
			Request Request `json:"request"`
		}
		json.Unmarshal([]byte(answer), &receipt)
		if response.StatusCode != test.want || test.want == 200 && (receipt.Worker == nil || receipt.Request.Route != test.route) || test.want != 200 && receipt.Error == "" {
			t.Errorf("%s: %d %s", test.name, response.StatusCode, answer)
		}
	}
	if len(b.requests.list()) != 0 {
		t.Error("dry runs are listed")
	}
}

func TestTheBeginningOfAPrompt(t *testing.T) {
	long := strings.Repeat("ü", 3000)
	tests := []struct{ name, body, want string }{
		{"a chat's last message", `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi\nthere"}]}`, "hi there"},
		{"parts", `{"messages":[{"role":"user","content":[{"type":"image_url"},{"type":"text","text":"look"}]}]}`, "look"},
		{"a completion", `{"prompt":"once"}`, "once"},
		{"several", `{"prompt":["one","two"]}`, "one"},
		{"tokens", `{"prompt":[1,2]}`, ""},
		{"SGLang's", `{"text":"t"}`, "t"},
		{"long", `{"prompt":"` + long + `"}`, long[:2*maxPromptText]},
		{"long and escaped", `{"prompt":"` + strings.Repeat(`\ud83d\ude00`, 3000) + `"}`, strings.Repeat("😀", maxPromptText)},
		{"long and backslashed", `{"prompt":"` + strings.Repeat(`\\`, 3000) + `"}`, strings.Repeat(`\`, maxPromptText)},
		{"nothing", `{}`, ""},
	}
	for _, test := range tests {
		body, ok := jsonbody.Parse([]byte(test.body))
		if got := promptText(body); !ok || got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}

func TestInsideNeedsNoKey(t *testing.T) {
	if r, _ := http.NewRequestWithContext(keys.Inside(t.Context()), "GET", "/", nil); r.Header.Get("Authorization") != "" {
		t.Error("the key goes along")
	}
}

func FuzzPromptText(f *testing.F) {
	for _, seed := range []string{`{"prompt":"a"}`, `{"messages":[{"content":[{"text":"\ud83d"}]}]}`, `{"text":"\\\u0000"}`, `{"prompt":"` + strings.Repeat(`\n`, 1300) + `"}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		body, ok := jsonbody.Parse(raw)
		if !ok {
			return
		}
		if text := promptText(body); !utf8.ValidString(text) || utf8.RuneCountInString(text) > maxPromptText || strings.ContainsAny(text, "\n\r\x00") {
			t.Errorf("%q", text)
		}
	})
}

func FuzzDryRun(f *testing.F) {
	for _, seed := range []string{`{"prompt":"a","stream":true}`, `{"messages":[],"nvext":1,"nvext":2}`, `{}`, `[`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		path, asked, problem := dryRun(raw)
		if problem != "" {
			return
		}
		body, ok := jsonbody.Parse(asked)
		if !ok || path == "" || body.Get("stream").Bool() || body.Get("nvext").Get("annotations").Get("0").String() != "query_instance_id:" {
			t.Errorf("%s makes %s", raw, asked)
		}
	})
}

func FuzzReadKey(f *testing.F) {
	for _, seed := range []string{`{"key":"a"}`, `{"key":null}`, `{"key":["a"]}`, `{`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if key, ok := readKey(strings.NewReader(text)); ok && !strings.Contains(text, "key") && !strings.Contains(strings.ToLower(text), `\u00`) && !strings.Contains(strings.ToLower(text), "key") && key != "" {
			t.Errorf("%q is the key of %q", key, text)
		}
	})
}
