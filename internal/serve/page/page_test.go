package page

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

const testKey = "sesame"

// bench is a page over a router of two workers, which counts what is asked of it.
type bench struct {
	*Page
	server *httptest.Server
	router *router.Router
	index  radix.Index
	totals atomic.Int64 // times that the totals were summed up
	asked  []string     // of workers
	status int          // that they answer
	openAI http.HandlerFunc
}

// newBench serves a page that asks for those keys.
func newBench(t *testing.T, keys ...string) *bench {
	t.Helper()
	b := &bench{index: radix.NewTree(), status: http.StatusOK}
	b.router = router.New(testkit.Defaults[router.Settings](), router.Deps{Index: b.index, Policy: policytest.MustPolicy(t, "kv"), BlockSize: testkit.BlockSize, Seed: 1})
	var attached []workers.Attached
	for i := range uint64(2) {
		attached = append(attached, workers.Attached{Server: probe.Server{ID: i, URL: fmt.Sprintf("http://127.0.0.1:%d", i+1)}})
		b.router.Up(kv.Target{Key: kv.WorkerKey{Worker: i}, Generation: 1, URL: attached[i].URL, Engine: []kv.Engine{kv.EngineVLLM, kv.EngineSGLang}[i]})
	}
	fleet := workers.New(workers.Settings{Attached: attached, BlockSize: testkit.BlockSize}, workers.Deps{Index: b.index, Log: slog.New(slog.DiscardHandler)})
	settings, models := Settings{Host: "127.0.0.1", Keys: web.NewKeys(keys), Policy: "kv", Version: "test"}, routertest.Models(b.router)
	b.Page = New(settings, Deps{
		Journal: NewJournal(settings, models, nil), Models: models, Fleet: fleet, Proxy: b,
		Totals: func() metrics.Totals { b.totals.Add(1); return metrics.Totals{} },
		Ready:  func() (bool, bool) { return true, false },
		OpenAI: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { b.openAI(w, r) }),
		Log:    slog.New(slog.DiscardHandler),
	})
	b.server = httptest.NewServer(b.Over(http.NotFoundHandler()))
	t.Cleanup(b.server.Close)
	t.Cleanup(b.Close)
	return b
}

// began reports a request of that name, and returns it.
func (b *bench) began(id string, x *proxy.Exchange) *proxy.Exchange {
	x.ID = id
	b.Began(nil, x)
	return x
}

// run has the page compute what it shows until the test ends.
func (b *bench) run(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { b.Page.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
}

// Ask is that of a Proxy.
func (b *bench) Ask(_ context.Context, t kv.Target, method, path string, _ http.Header, _ []byte) (int, []byte, error) {
	b.asked = append(b.asked, fmt.Sprintf("%d %s %s", t.Key.Worker, method, path))
	return b.status, fmt.Appendf(nil, `{"success":%v}`, b.status == http.StatusOK), nil
}

// send sends a request of the page's own script; header has pairs of a name and a
// value.
func (b *bench) send(t testing.TB, method, path, body string, header ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequest(method, b.server.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(headerPage, "1")
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		if request.Header.Del(header[i]); header[i+1] != "" {
			request.Header.Set(header[i], header[i+1])
		}
		if header[i] == "Host" {
			request.Host = header[i+1]
		}
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, Timeout: 10 * time.Second}
	defer client.CloseIdleConnections()
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, _ := io.ReadAll(response.Body)
	return response, string(answer)
}

// look opens a stream and calls use with each event until it returns false.
func (b *bench) look(t testing.TB, use func(event string, data []byte) bool) {
	response, err := http.Get(b.server.URL + "/ui/stream")
	if err != nil {
		t.Error(err)
		return
	}
	defer response.Body.Close()
	lines := bufio.NewReader(response.Body)
	event := ""
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		if name, is := strings.CutPrefix(line, "event: "); is {
			event = strings.TrimSpace(name)
		}
		if data, is := strings.CutPrefix(line, "data: "); is && !use(event, []byte(data)) {
			return
		}
	}
}

func TestNobodyWithoutTheKeyGetsAnything(t *testing.T) {
	b := newBench(t, "other", testKey)
	b.openAI = func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }
	paths := []struct{ method, path, body string }{
		{"GET", "/ui/stream", ""}, {"GET", "/ui/requests/a", ""}, {"POST", "/ui/workers/0/drain", ""}, {"POST", "/ui/workers/0/readmit", ""},
		{"POST", "/ui/workers/0/reset-cache", ""}, {"POST", "/ui/where", `{"prompt":"a"}`}, {"POST", "/ui/try", `{}`},
		{"GET", "/debug/pprof/", ""}, {"GET", "/debug/pprof/heap", ""}, {"GET", "/debug/vars", ""},
	}
	for _, p := range paths {
		for _, header := range [][]string{{}, {"Authorization", "Bearer sesam"}, {"Cookie", cookieName + "="}, {"Cookie", cookieName + "=" + testKey}} {
			if response, answer := b.send(t, p.method, p.path, p.body, header...); response.StatusCode != http.StatusUnauthorized {
				t.Errorf("%s %s with %v: %d %.80s", p.method, p.path, header, response.StatusCode, answer)
			}
		}
	}
	for _, path := range []string{"/ui/", "/"} {
		if response, _ := b.send(t, "GET", path, ""); response.StatusCode >= 400 {
			t.Errorf("GET %s: %d", path, response.StatusCode)
		}
	}
	if len(b.asked) > 0 || len(b.router.Health.Cordoned()) > 0 {
		t.Errorf("something was done: %v %v", b.asked, b.router.Health.Cordoned())
	}
}

func TestForeignPagesChangeNothing(t *testing.T) {
	b := newBench(t)
	refused := [][]string{
		{headerPage, ""}, {headerPage, "0"}, {"Origin", "http://evil.example"}, {"Origin", "null"}, {"Host", "evil.example"},
	}
	for _, header := range refused {
		for _, path := range []string{"/ui/workers/0/drain", "/ui/sign-in", "/ui/sign-out"} {
			if response, answer := b.send(t, "POST", path, "", header...); response.StatusCode != http.StatusForbidden {
				t.Errorf("%s with %v: %d %s", path, header, response.StatusCode, answer)
			}
		}
	}
	if response, _ := b.send(t, "POST", "/ui/where", "{}", "Content-Type", "text/plain"); response.StatusCode != http.StatusUnsupportedMediaType {
		t.Errorf("a form's body: %d", response.StatusCode)
	}
	if len(b.router.Health.Cordoned()) > 0 {
		t.Error("a foreign page had a worker rest")
	}
	if response, answer := b.send(t, "POST", "/ui/workers/0/drain", "", "Origin", b.server.URL); response.StatusCode != http.StatusNoContent {
		t.Errorf("the page itself: %d %s", response.StatusCode, answer)
	}
}

func TestSignInGivesACookieThatIsNotTheKey(t *testing.T) {
	b := newBench(t, testKey)
	now := time.Unix(1_000_000, 0)
	b.now = func() time.Time { return now }
	for body, want := range map[string]int{`{"key":"wrong"}`: 401, `{"key":""}`: 401, `{}`: 400, `{"key":7}`: 400, `[`: 400, `{"key":"` + strings.Repeat("a", signInLimit) + `"}`: 400} {
		if response, answer := b.send(t, "POST", "/ui/sign-in", body); response.StatusCode != want || response.Header.Get("Set-Cookie") != "" {
			t.Errorf("%.30s: %d %s", body, response.StatusCode, answer)
		}
	}
	response, _ := b.send(t, "POST", "/ui/sign-in", `{"key":"sesame"}`)
	cookies := response.Cookies()
	if response.StatusCode != http.StatusNoContent || len(cookies) != 1 {
		t.Fatalf("%d, cookies %v", response.StatusCode, cookies)
	}
	cookie := cookies[0]
	if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode || cookie.Path != "" || cookie.MaxAge != 12*3600 || strings.Contains(cookie.Value, testKey) || len(cookie.Value) < 32 {
		t.Errorf("the cookie is %+v", cookie)
	}
	with := []string{"Cookie", cookieName + "=" + cookie.Value}
	get := func() int {
		response, _ := b.send(t, "GET", "/ui/requests/none", "", with...)
		return response.StatusCode
	}
	if got := get(); got != http.StatusNotFound {
		t.Errorf("with the cookie: %d", got)
	}
	if response, _ := b.send(t, "GET", "/debug/vars", "", with...); response.StatusCode != http.StatusUnauthorized {
		t.Errorf("the cookie opens /debug: %d", response.StatusCode)
	}
	if now = now.Add(sessionLife); get() != http.StatusUnauthorized {
		t.Error("the session outlives its time")
	}
	now = now.Add(time.Minute)
	response, _ = b.send(t, "POST", "/ui/sign-in", `{"key":"sesame"}`)
	with[1] = cookieName + "=" + response.Cookies()[0].Value
	if get() != http.StatusNotFound {
		t.Error("the second session does not hold")
	}
	if response, _ = b.send(t, "POST", "/ui/sign-out", "", with...); response.StatusCode != http.StatusNoContent || response.Cookies()[0].MaxAge >= 0 || get() != http.StatusUnauthorized {
		t.Error("the session holds after the sign-out")
	}
	if response, _ := b.send(t, "GET", "/ui/requests/none", "", "Authorization", "Bearer "+testKey); response.StatusCode != http.StatusNotFound {
		t.Errorf("with the key itself: %d", response.StatusCode)
	}
}

func TestCookiesUnderTLSAreSecure(t *testing.T) {
	b := newBench(t, testKey)
	b.settings.Secure = true
	response, _ := b.send(t, "POST", "/ui/sign-in", `{"key":"sesame"}`)
	if cookie := response.Cookies()[0]; !cookie.Secure {
		t.Errorf("%+v", cookie)
	}
}

// TestWrongKeysDoNotKeepTheRightOneOut: neither at the sign-in nor as bearer.
func TestWrongKeysDoNotKeepTheRightOneOut(t *testing.T) {
	b := newBench(t, testKey)
	for _, test := range []struct {
		name  string
		ask   func(key string) int
		right int
	}{
		{"sign-in", func(key string) int {
			response, _ := b.send(t, "POST", "/ui/sign-in", `{"key":"`+key+`"}`)
			return response.StatusCode
		}, http.StatusNoContent},
		{"bearer", func(key string) int {
			response, _ := b.send(t, "GET", "/ui/requests/none", "", "Authorization", "Bearer "+key)
			return response.StatusCode
		}, http.StatusNotFound},
		{"bearer of profiles", func(key string) int {
			response, _ := b.send(t, "GET", "/debug/vars", "", "Authorization", "Bearer "+key)
			return response.StatusCode
		}, http.StatusOK},
	} {
		got := map[int]int{}
		for range 100 {
			got[test.ask("wrong")]++
		}
		if got[http.StatusTooManyRequests] == 0 || got[http.StatusTooManyRequests]+got[http.StatusUnauthorized] != 100 {
			t.Errorf("%s: wrong keys are answered %v", test.name, got)
		}
		if status := test.ask(testKey); status != test.right {
			t.Errorf("%s: the right key is answered %d", test.name, status)
		}
	}
	if response, _ := b.send(t, "GET", "/ui/requests/none", ""); response.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a key: %d", response.StatusCode)
	}
}

func TestSessionsAreBounded(t *testing.T) {
	s, now := newSessions(), time.Unix(1_000_000, 0)
	first := s.begin(now)
	var last string
	for i := range maxSessions {
		last = s.begin(now.Add(time.Duration(i+1) * time.Second))
	}
	if len(s.open) != maxSessions || s.holds(first, now) || !s.holds(last, now) {
		t.Errorf("%d sessions; the first holds: %v, the last: %v", len(s.open), s.holds(first, now), s.holds(last, now))
	}
}

func TestTwentyViewersCostOneStateASecond(t *testing.T) {
	b := newBench(t)
	b.run(t)
	const lookers, states = 20, 3
	began := time.Now()
	var all sync.WaitGroup
	for range lookers {
		all.Go(func() {
			seen, trends := 0, 0
			b.look(t, func(event string, data []byte) bool {
				switch event {
				case eventState:
					var s State
					if err := json.Unmarshal(data, &s); err != nil || len(s.Workers) != 2 {
						t.Errorf("%v: %s", err, data)
					}
					seen++
				case eventTrends:
					trends++
				}
				return seen < states
			})
			if seen < states || trends < 1 {
				t.Errorf("a viewer got %d states, %d trends", seen, trends)
			}
		})
	}
	all.Wait()
	if most, n := uint64(time.Since(began).Seconds())+2, b.viewers.made.Load(); n > most {
		t.Errorf("%d states were computed in %s for %d viewers, want at most %d", n, time.Since(began).Round(time.Millisecond), lookers, most)
	}
	testkit.Eventually(t, 5*time.Second, "all have left", func() bool { return !b.viewers.watched() })
}

func TestNothingIsComputedWithoutAViewer(t *testing.T) {
	b := newBench(t)
	b.show()
	x := &proxy.Exchange{ID: "a", Arrived: time.Now(), Request: &router.Request{Tokens: testkit.Tokens(1, 400)}, Default: true}
	b.Began(nil, x)
	b.Accepted(x, nil)
	if n, told := b.totals.Load(), b.viewers.made.Load(); n != 0 || told != 0 || b.prompts.nodes != 0 {
		t.Errorf("%d totals, %d events, %d prompts", n, told, b.prompts.nodes)
	}
	if _, explained := b.router.Receipts.Last(0); explained {
		t.Error("decisions are explained")
	}
	one := b.viewers.join("a", time.Now())
	b.show()
	b.Accepted(x, nil)
	if n := b.totals.Load(); n != 1 || len(one.state) != 1 || b.prompts.nodes != 1 {
		t.Errorf("with a viewer: %d totals, %d states, %d prompts", n, len(one.state), b.prompts.nodes)
	}
	b.viewers.leave(one)
	if b.viewers.watched() || b.viewers.last != nil {
		t.Error("what was shown is kept")
	}
}

func TestViewersAreBoundedAndSlowOnesSkip(t *testing.T) {
	b := newBench(t)
	var all []*viewer
	for range maxViewers {
		all = append(all, b.viewers.join("a", time.Now()))
	}
	if response, _ := b.send(t, "GET", "/ui/stream", ""); response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("one more: %d", response.StatusCode)
	}
	for range 5 {
		b.show() // nobody takes any
	}
	newest := <-all[0].state
	if string(newest) != string(b.viewers.last) || len(all[0].state) != 0 {
		t.Error("a slow viewer does not get the newest state next")
	}
	b.viewers.leave(all[1])
	if b.viewers.join("a", time.Now()) == nil {
		t.Error("no room after one has left")
	}
	b.Close()
	b.viewers.leave(all[2])
	if b.viewers.join("a", time.Now()) != nil {
		t.Error("one can look after the end")
	}
}

// TestNoClientTakesTheStreamsOfAll: beyond the bound, the oldest stream of the client with the
// most gives way, if it has been open for a while.
func TestNoClientTakesTheStreamsOfAll(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	fill := func(counts map[string]int) (v *viewers, of map[string][]*viewer) {
		v, of = newViewers(), map[string][]*viewer{}
		for client, n := range counts {
			for range n {
				now = now.Add(time.Second)
				of[client] = append(of[client], v.join(client, now))
			}
		}
		return v, of
	}
	v, of := fill(map[string]int{"a": maxViewers})
	if v.join("b", of["a"][0].since.Add(leastStay-1)) != nil {
		t.Error("a stream that has just begun gives way")
	}
	for i := range maxViewers - 1 {
		now = now.Add(leastStay)
		if v.join("b", now) == nil {
			t.Fatalf("stream %d of another client is refused", i)
		}
	}
	left := 0
	for one := range v.streams {
		if one.client == "a" {
			left++
		}
	}
	if left != maxViewers/2 {
		t.Errorf("%d streams are left to the first client", left)
	}
	select {
	case <-of["a"][0].replaced:
	default:
		t.Error("the oldest stays")
	}
	if n := len(v.streams); n != maxViewers {
		t.Errorf("%d streams", n)
	}
	v, of = fill(map[string]int{"a": maxViewers})
	now = now.Add(leastStay)
	if v.join("a", now) == nil {
		t.Error("a client does not replace its own")
	}
	v.leave(of["a"][0]) // which was replaced
	if n := len(v.streams); n != maxViewers {
		t.Errorf("%d streams after the end of one that was replaced", n)
	}
	each := map[string]int{}
	for i := range maxViewers {
		each[fmt.Sprint(i)] = 1
	}
	v, _ = fill(each)
	now = now.Add(leastStay)
	if v.join("new", now) != nil || v.join("1", now) != nil {
		t.Error("a client with one stream gives way")
	}
}

func TestStreamsEndWithThePage(t *testing.T) {
	b := newBench(t)
	b.run(t)
	ended := make(chan struct{})
	go func() { // ends with the stream
		defer close(ended)
		b.look(t, func(string, []byte) bool { return true })
	}()
	testkit.Eventually(t, 5*time.Second, "it looks", b.viewers.watched)
	b.Close()
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Error("the stream goes on")
	}
}

func TestActionsOnWorkers(t *testing.T) {
	b := newBench(t)
	tests := []struct {
		path   string
		status int // of the engine
		want   int
		asked  string
	}{
		{"/ui/workers/0/drain", 200, 204, ""},
		{"/ui/workers/7/drain", 200, 404, ""},
		{"/ui/workers/0/readmit", 200, 204, ""},
		{"/ui/workers/7/readmit", 200, 404, ""},
		{"/ui/workers/x/readmit", 200, 404, ""},
		{"/ui/workers/18446744073709551616/readmit", 200, 404, ""},
		{"/ui/workers/0/explode", 200, 404, ""},
		{"/ui/workers/0/reset-cache", 200, 204, "0 POST /reset_prefix_cache"},
		{"/ui/workers/1/reset-cache", 200, 204, "1 POST /flush_cache"},
		{"/ui/workers/0/reset-cache", 404, 502, "0 POST /reset_prefix_cache"},
		{"/ui/workers/0/reset-cache", 299, 409, "0 POST /reset_prefix_cache"}, // as the bench reports that it is in use
		{"/ui/workers/7/reset-cache", 200, 404, ""},
	}
	for _, test := range tests {
		b.asked, b.status = nil, test.status
		response, answer := b.send(t, "POST", test.path, "")
		if response.StatusCode != test.want || strings.Join(b.asked, ",") != test.asked || test.want >= 400 && !strings.Contains(answer, `"error"`) {
			t.Errorf("%s: %d %s, the workers were asked %v", test.path, response.StatusCode, answer, b.asked)
		}
		if _, rests := b.router.Health.Cordoned()[0]; rests != strings.HasSuffix(test.path, "0/drain") && test.path[len("/ui/workers/")] == '0' && test.want == 204 && len(b.asked) == 0 {
			t.Errorf("%s: it rests: %v", test.path, rests)
		}
	}
}

func TestEveryAnswerIsHardened(t *testing.T) {
	b := newBench(t)
	for _, path := range []string{"/", "/ui/", "/ui/nothing", "/ui/requests/a", "/debug/nothing", "/debug/pprof/profile?seconds=61", "/debug/pprof/profile?seconds=x", "/debug/pprof/trace?seconds=0", "/debug/pprof/cmdline"} {
		response, answer := b.send(t, "GET", path, "")
		header := response.Header
		if header.Get("Content-Security-Policy") != "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'" || header.Get("X-Content-Type-Options") != "nosniff" || header.Get("Referrer-Policy") == "" {
			t.Errorf("%s: %v", path, header)
		}
		if strings.Contains(path, "pprof") && response.StatusCode != 400 && response.StatusCode != 404 {
			t.Errorf("%s: %d %.80s", path, response.StatusCode, answer)
		}
	}
	if response, _ := b.send(t, "GET", "/", ""); response.StatusCode != http.StatusFound || response.Header.Get("Location") != "ui/" {
		t.Errorf("/ leads to %d %s", response.StatusCode, response.Header.Get("Location"))
	}
	response, _ := b.send(t, "GET", "/ui/", "")
	if again, _ := b.send(t, "GET", "/ui/", "", "If-None-Match", response.Header.Get("ETag")); again.StatusCode != http.StatusNotModified {
		t.Errorf("the same file again: %d", again.StatusCode)
	}
	if response, answer := b.send(t, "GET", "/debug/pprof/goroutine?debug=1", ""); response.StatusCode != 200 || !strings.Contains(answer, "goroutine profile") {
		t.Errorf("a profile: %d", response.StatusCode)
	}
	if response, _ := b.send(t, "POST", "/debug/pprof/profile", "seconds=1000", "Content-Type", "application/x-www-form-urlencoded"); response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("seconds in a body: %d", response.StatusCode)
	}
	alone := httptest.NewServer(b.Handler())
	defer alone.Close()
	response, err := http.Get(alone.URL + "/debug/pprof/")
	if err != nil || response.StatusCode != http.StatusNotFound {
		t.Errorf("the page's own port has profiles: %v %v", response, err)
	}
	response.Body.Close()
}
