package keys

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"kvrouter/internal/base/web"
)

// door is a ring behind a guard, at a time of the test's. Its route answers with
// what the header X-Answer says, after the prompt tokens of X-Prompt are charged, and
// settled to those of X-Computed.
type door struct {
	*Ring
	handler http.Handler
	file    string
	time    time.Time
	inside  func() // called by a request that was let in; nil: nothing
}

func newDoor(t *testing.T, settings Settings, given []string, file string) *door {
	t.Helper()
	d := &door{file: filepath.Join(t.TempDir(), "keys.yaml"), time: time.Unix(1_000_000, 0)}
	if file != "" {
		settings.APIKeysFile = d.file
	}
	d.Ring = New(settings, given)
	d.now = func() time.Time { return d.time }
	if file != "" {
		d.write(t, file)
	}
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.Use(d.Guard(web.Fail))
	engine.GET("/", func(c *gin.Context) {
		if d.inside != nil {
			d.inside()
		}
		n, _ := strconv.Atoi(c.GetHeader("X-Prompt"))
		charge, err := d.Prompt(c, n, c.GetHeader("X-Estimated") != "")
		if err != nil {
			web.Fail(c, http.StatusTooManyRequests, err.Error())
			return
		}
		if computed, err := strconv.Atoi(c.GetHeader("X-Computed")); err == nil {
			charge.Settle(computed)
		}
		status, _ := strconv.Atoi(c.GetHeader("X-Answer"))
		c.Status(max(status, http.StatusOK))
	})
	d.handler = engine
	return d
}

// giving is a request that gives a key.
func giving(key string) *http.Request {
	return &http.Request{Header: http.Header{"Authorization": {"Bearer " + key}}, URL: &url.URL{}}
}

// write puts keys into the file and has them read.
func (d *door) write(t *testing.T, text string) {
	t.Helper()
	if err := os.WriteFile(d.file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	use, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	use()
}

func (d *door) ask(key string, headers ...string) *http.Response {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	d.handler.ServeHTTP(w, r)
	return w.Result()
}

// counted returns the metrics of the ring: name, labels and value of each.
func (d *door) counted(t *testing.T) map[string]float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewCollector(d.Ring))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]float64{}
	for _, family := range families {
		for _, m := range family.Metric {
			name := strings.TrimSuffix(strings.TrimPrefix(family.GetName(), "kvrouter_key_"), "_total")
			for _, label := range m.Label {
				name += " " + label.GetValue()
			}
			if v := m.GetCounter().GetValue(); v > 0 {
				found[name] = v
			}
		}
	}
	return found
}

func TestWithoutKeysNobodyIsAsked(t *testing.T) {
	d := newDoor(t, Settings{}, nil, "")
	if got := d.ask("").StatusCode; got != 200 || d.Asks() {
		t.Errorf("%d", got)
	}
	if got := d.counted(t); len(got) != 0 {
		t.Errorf("counted %v", got)
	}
}

func TestKeysOfFlagsAndFile(t *testing.T) {
	d := newDoor(t, Settings{}, []string{"flag-1", "flag-2"}, "- {name: team, key: of-file}\n- {name: hashed, key-sha256: '"+sumText("of-hash")+"'}")
	for key, want := range map[string]int{"": 401, "flag": 401, "flag-1,flag-2": 401, "of-hash ": 401, sumText("of-hash"): 401, "flag-1": 200, "flag-2": 200, "of-file": 200, "of-hash": 200} {
		if got := d.ask(key).StatusCode; got != want {
			t.Errorf("key %q: %d, want %d", key, got, want)
		}
	}
	d.ask("of-file", "X-Answer", "404")
	d.ask("of-file", "X-Answer", "502")
	want := map[string]float64{"requests  refused": 5, "requests api-key-1 ok": 1, "requests api-key-2 ok": 1, "requests team ok": 1, "requests team refused": 1, "requests team failed": 1, "requests hashed ok": 1}
	got := d.counted(t)
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s: %v, want %v", name, got[name], n)
		}
	}
	if len(got) != len(want) {
		t.Errorf("counted %v", got)
	}
}

func TestFileThatWasNotReadLetsNobodyIn(t *testing.T) {
	d := newDoor(t, Settings{APIKeysFile: "/nowhere/keys.yaml"}, nil, "")
	if got := d.ask("").StatusCode; got != 401 {
		t.Errorf("%d", got)
	}
	if _, err := d.Read(); err == nil || !strings.Contains(err.Error(), "--api-keys-file") {
		t.Errorf("%v", err)
	}
}

func TestKeyInFlagsAndFileIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys.yaml")
	if err := os.WriteFile(file, []byte("- {name: a, key: "+secret+"}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Settings{APIKeysFile: file}, []string{secret}).Read(); err == nil || strings.Contains(err.Error(), secret) {
		t.Errorf("%v", err)
	}
}

// TestSeveralKeysTrustEachOtherOnlyIfTold: several keys are several clients, which
// need not trust each other.
func TestSeveralKeysTrustEachOtherOnlyIfTold(t *testing.T) {
	yes, no := true, false
	for _, test := range []struct {
		name          string
		settings      Settings
		given         []string
		file, key     string
		trusted, told bool
	}{
		{"no key", Settings{}, nil, "", "", true, true},
		{"one key", Settings{}, []string{"a"}, "", "a", true, true},
		{"two keys", Settings{}, []string{"a", "b"}, "", "b", false, false},
		{"two keys, flags", Settings{TrustHints: &yes, DecisionHeaders: &yes}, []string{"a", "b"}, "", "b", true, true},
		{"no key, flags", Settings{TrustHints: &no, DecisionHeaders: &no}, nil, "", "", false, false},
		{"a key of a file", Settings{}, nil, "- {name: a, key: a}", "a", false, false},
		{"that is trusted", Settings{}, nil, "- {name: a, key: a, trust-hints: true}", "a", true, false},
		{"that has a cache of its own", Settings{}, nil, "- {name: a, key: a, salt: true}", "a", false, true},
		{"the same without headers", Settings{DecisionHeaders: &no}, nil, "- {name: a, key: a, salt: true}", "a", false, false},
		{"distrusted beside a flag", Settings{TrustHints: &yes}, nil, "- {name: a, key: a, trust-hints: false}", "a", false, false},
		{"one of a flag beside a file", Settings{}, []string{"f"}, "- {name: a, key: a}", "f", false, false},
	} {
		d := newDoor(t, test.settings, test.given, test.file)
		caller, err := d.current.Load().find(giving(test.key))
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
		} else if caller.Trusted != test.trusted || caller.SeesDecisions != test.told {
			t.Errorf("%s: trusted %v, told %v", test.name, caller.Trusted, caller.SeesDecisions)
		}
	}
}

func TestRequestsASecond(t *testing.T) {
	d := newDoor(t, Settings{}, nil, "- {name: a, key: a, limits: {requests-per-second: 0.5, burst: 2}}\n- {name: b, key: b}")
	headers := func(r *http.Response) string {
		return strings.Join([]string{strconv.Itoa(r.StatusCode), r.Header.Get("x-ratelimit-limit-requests"), r.Header.Get("x-ratelimit-remaining-requests"), r.Header.Get("x-ratelimit-reset-requests"), r.Header.Get("Retry-After")}, " ")
	}
	for i, want := range []string{"200 2 1 2s ", "200 2 0 4s ", "429 2 0 4s 2"} {
		if got := headers(d.ask("a")); got != want {
			t.Errorf("request %d: %q, want %q", i, got, want)
		}
	}
	refused := d.ask("a")
	body, _ := io.ReadAll(refused.Body)
	var answer struct {
		Error struct{ Type, Message string }
	}
	if err := json.Unmarshal(body, &answer); err != nil || answer.Error.Type != "rate_limit_exceeded" || !strings.Contains(answer.Error.Message, "try again in 2 s") {
		t.Errorf("%s", body)
	}
	if got := headers(d.ask("b")); got != "200    " {
		t.Errorf("another key: %q", got)
	}
	d.time = d.time.Add(2 * time.Second)
	if got := headers(d.ask("a")); got != "200 2 0 4s " {
		t.Errorf("2 s later: %q", got)
	}
	if got := d.counted(t); got["limited a requests"] != 2 || got["requests a limited"] != 2 || got["requests a ok"] != 3 {
		t.Errorf("counted %v", got)
	}
}

func TestPromptTokensAMinute(t *testing.T) {
	d := newDoor(t, Settings{}, nil, "- {name: a, key: a, limits: {prompt-tokens-per-minute: 600}}")
	for i, test := range []struct {
		tokens          int
		after           time.Duration
		status          int
		left, wait, all string
	}{
		{500, 0, 200, "100", "", "50s"},
		{200, 0, 429, "100", "10", "50s"},
		{200, 10 * time.Second, 200, "0", "", "1m0s"},
		{601, 10 * time.Minute, 429, "600", "", "0s"}, // a minute never has as many
		{600, 0, 200, "0", "", "1m0s"},
		{0, 0, 200, "0", "", "1m0s"},
	} {
		d.time = d.time.Add(test.after)
		r := d.ask("a", "X-Prompt", strconv.Itoa(test.tokens))
		if r.StatusCode != test.status || r.Header.Get("x-ratelimit-remaining-tokens") != test.left || r.Header.Get("Retry-After") != test.wait || r.Header.Get("x-ratelimit-reset-tokens") != test.all || r.Header.Get("x-ratelimit-limit-tokens") != "600" {
			t.Errorf("request %d: %d, %v", i, r.StatusCode, r.Header)
		}
	}
	d.time = d.time.Add(time.Minute)
	if r := d.ask("a", "X-Prompt", "9000", "X-Estimated", "1", "X-Computed", "6700"); r.StatusCode != 200 {
		t.Errorf("an estimate beyond the limit: %d, %v", r.StatusCode, r.Header)
	}
	if r := d.ask("a", "X-Prompt", "0"); r.StatusCode != 429 || r.Header.Get("Retry-After") != "610" || r.Header.Get("x-ratelimit-remaining-tokens") != "0" {
		t.Errorf("in debt: %d, %v", r.StatusCode, r.Header)
	}
	d.write(t, "- {name: a, key: a, limits: {prompt-tokens-per-minute: 6000}}")
	if r := d.ask("a", "X-Prompt", "0"); r.StatusCode != 429 || r.Header.Get("Retry-After") != "61" {
		t.Errorf("in debt with another limit: %d, %v", r.StatusCode, r.Header)
	}
	d.time = d.time.Add(2*time.Minute + time.Second)
	for range 3 { // what is given back can be used again
		if r := d.ask("a", "X-Prompt", "6000", "X-Computed", "0"); r.StatusCode != 200 {
			t.Errorf("after a refund: %d, %v", r.StatusCode, r.Header)
		}
	}
	if got := d.counted(t)["limited a prompt_tokens"]; got != 4 {
		t.Errorf("counted %v", d.counted(t))
	}
}

func TestConcurrentRequests(t *testing.T) {
	d := newDoor(t, Settings{}, nil, "- {name: a, key: a, limits: {concurrent-requests: 2}}")
	arrived, goOn := make(chan bool), make(chan bool)
	d.inside = func() {
		arrived <- true
		<-goOn
	}
	var running sync.WaitGroup
	for range 2 {
		running.Go(func() { d.ask("a") })
		<-arrived
	}
	if r := d.ask("a"); r.StatusCode != 429 || r.Header.Get("Retry-After") != "1" {
		t.Errorf("a third one: %d", r.StatusCode)
	}
	close(goOn)
	running.Wait()
	d.inside = nil
	if r := d.ask("a"); r.StatusCode != 200 {
		t.Errorf("after their end: %d", r.StatusCode)
	}
	if got := d.counted(t); got["limited a concurrent"] != 1 {
		t.Errorf("counted %v", got)
	}
}

func TestReadAgain(t *testing.T) {
	const limited = "limits: {requests-per-second: 1, burst: 1}"
	d := newDoor(t, Settings{}, nil, "- {name: a, key: a, "+limited+"}\n- {name: b, key: b}")
	if got := d.ask("a").StatusCode; got != 200 {
		t.Fatal(got)
	}
	d.ask("b")
	d.write(t, "- {name: a, key: new, "+limited+"}\n- {name: c, key: c}")
	for key, want := range map[string]int{"a": 401, "b": 401, "c": 200, "new": 429} { // the new key has what the old one left
		if got := d.ask(key).StatusCode; got != want {
			t.Errorf("%s: %d, want %d", key, got, want)
		}
	}
	if got := d.counted(t); got["requests a ok"] != 1 || got["requests b ok"] != 0 {
		t.Errorf("counted %v", got)
	}
	if err := os.WriteFile(d.file, []byte("- broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Read(); err == nil {
		t.Error("a broken file was read")
	}
	if got := d.ask("c").StatusCode; got != 200 {
		t.Errorf("after a broken file: %d", got)
	}
	d.write(t, "- {name: a, key: new, limits: {requests-per-second: 2, burst: 2}}")
	if got := d.ask("new").StatusCode; got != 200 {
		t.Errorf("other limits begin anew: %d", got)
	}
}

// TestNobodyMakesAnothersSalt: salts of one key are one for each of its own, and
// those of two keys never meet.
func TestNobodyMakesAnothersSalt(t *testing.T) {
	d := newDoor(t, Settings{}, nil, "- {name: a, key: a, salt: true}\n- {name: b, key: b, salt: true}\n- {name: ab, key: c, salt: true}\n- {name: d, key: d}")
	caller := func(key string) *Caller {
		c, err := d.current.Load().find(giving(key))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if _, ok := caller("d").Salt("", false); ok {
		t.Error("a key without salt has one")
	}
	if alone, _ := newDoor(t, Settings{}, []string{"one"}, "").current.Load().find(giving("one")); alone == nil {
		t.Error("the only key is unknown")
	} else if _, ok := alone.Salt("x", true); ok {
		t.Error("the only key's salt is not its own")
	}
	rapid.Check(t, func(t *rapid.T) {
		own, other := rapid.String().Draw(t, "own"), rapid.String().Draw(t, "other")
		seen := map[string]string{}
		for _, key := range []string{"a", "b", "c", "d"} {
			for _, text := range []string{own, other} {
				salt, ok := caller(key).Salt(text, true)
				if again, _ := caller(key).Salt(text, true); !ok || again != salt {
					t.Fatalf("%s: %q, %v, then %q", key, salt, ok, again)
				}
				if whose, known := seen[salt]; known && whose != key+" "+text {
					t.Fatalf("%q is %q's and %q's", salt, whose, key+" "+text)
				}
				seen[salt] = key + " " + text
			}
		}
	})
}
