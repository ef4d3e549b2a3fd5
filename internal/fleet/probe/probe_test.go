package probe

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

func TestQuestionsFollowNoRedirects(t *testing.T) {
	defer goleak.VerifyNone(t)
	var there atomic.Int64
	inner := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { there.Add(1) }))
	defer inner.Close()
	outer := httptest.NewServer(http.RedirectHandler(inner.URL, http.StatusTemporaryRedirect))
	defer outer.Close()
	c, at := newClient(t), Server{URL: outer.URL}
	if err := c.Health(t.Context(), at, time.Second, true); err == nil || !strings.Contains(err.Error(), "307") {
		t.Errorf("a redirect is no error: %v", err)
	}
	if _, err := c.Caches(t.Context(), at, kv.EngineVLLM, nil, nil); err == nil {
		t.Error("a redirected page was read")
	}
	_, _ = c.ServerInfo(t.Context(), at)
	_, _ = c.EventSources(t.Context(), at)
	if n := there.Load(); n != 0 {
		t.Errorf("%d requests at the other address", n)
	}
	c.Close()
}

func TestErrorsOfTLSHaveARemedy(t *testing.T) {
	defer goleak.VerifyNone(t)
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	authority := x509.NewCertPool()
	authority.AddCert(server.Certificate())
	for _, test := range []struct {
		name, url, says string
		trusted         bool
	}{
		{"an authority that is not known", server.URL, "--worker-ca", false},
		{"another name", strings.Replace(server.URL, "127.0.0.1", "localhost", 1), "use a name of its certificate in the URL", true},
		{"no TLS", strings.Replace(plain.URL, "http:", "https:", 1), "http://", true},
	} {
		settings := Settings{}
		if test.trusted {
			settings.TLS = &tls.Config{RootCAs: authority}
		}
		c := New(settings, nil, slog.New(slog.DiscardHandler))
		if err := c.Health(t.Context(), Server{URL: test.url}, 10*time.Second, true); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want %q", test.name, err, test.says)
		}
	}
}

// TestUnreachableAddressesDoNotDelayTheOthers: checks of them are few at a time, and
// apart from those of servers that have been healthy.
func TestUnreachableAddressesDoNotDelayTheOthers(t *testing.T) {
	defer goleak.VerifyNone(t)
	const dead, atOnce = 40, 5
	let := make(chan struct{})
	hung := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-let }))
	defer hung.Close()
	good := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer good.Close()
	c := newClient(t)
	c.firstLooks = make(chan struct{}, atOnce)
	var now, most atomic.Int64
	under := c.probes.Transport
	c.probes.Transport = roundTripper(func(r *http.Request) (*http.Response, error) {
		if strings.HasPrefix(hung.URL, "http://"+r.URL.Host) {
			n := now.Add(1)
			defer now.Add(-1)
			for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
			}
		}
		return under.RoundTrip(r)
	})
	var checks sync.WaitGroup
	for range dead {
		checks.Go(func() {
			if err := c.Health(t.Context(), Server{URL: hung.URL}, 50*time.Millisecond, false); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a hung server: %v", err)
			}
		})
	}
	testkit.Eventually(t, 20*time.Second, "all places are taken", func() bool { return now.Load() == atOnce })
	if err := c.Health(t.Context(), Server{URL: good.URL}, 20*time.Second, true); err != nil {
		t.Errorf("a good server: %v", err)
	}
	checks.Wait()
	if n := most.Load(); n != atOnce {
		t.Errorf("%d checks at once", n)
	}
	close(let)
}

// roundTripper is a function as a transport.
type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// TestServersWithoutHealth: a list of models stands for /health, and a route of chats for both.
func TestServersWithoutHealth(t *testing.T) {
	for _, test := range []struct {
		name     string
		statuses map[string]int // by path; 404 for others
		healthy  bool
		chats    string // empty: it answers them
	}{
		{"all routes", map[string]int{"/health": 200, "/v1/models": 200, "/v1/chat/completions": 400}, true, ""},
		{"no /health", map[string]int{"/v1/models": 200, "/v1/chat/completions": 400}, true, ""},
		{"no /health, and a broken list", map[string]int{"/v1/models": 503, "/v1/chat/completions": 422}, false, ""},
		{"sick, with a list", map[string]int{"/health": 503, "/v1/models": 200}, false, "neither /health"},
		{"not implemented", map[string]int{"/health": 501, "/v1/models": 405, "/v1/chat/completions": 400}, false, ""},
		{"only chats", map[string]int{"/v1/chat/completions": 200}, false, ""},
		{"chats with a key", map[string]int{"/health": 401, "/v1/models": 401, "/v1/chat/completions": 401}, false, ""},
		{"loading", map[string]int{"/v1/chat/completions": 503}, false, "503"},
		{"no engine", nil, false, "not the URL of an OpenAI server"},
		{"pages to read", map[string]int{"/v1/chat/completions": 405}, false, "not the URL of an OpenAI server"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			status := test.statuses[r.URL.Path]
			if status == 0 || (r.Method == http.MethodPost) != (r.URL.Path == "/v1/chat/completions") {
				status = http.StatusNotFound
			}
			w.WriteHeader(status)
		}))
		c := newClient(t)
		if err := c.Health(t.Context(), Server{URL: server.URL}, 10*time.Second, false); (err == nil) != test.healthy {
			t.Errorf("%s: health %v", test.name, err)
		}
		err := c.AnswersChats(t.Context(), Server{URL: server.URL})
		if (err == nil) != (test.chats == "") || err != nil && !strings.Contains(err.Error(), test.chats) {
			t.Errorf("%s: chats %v, want %q", test.name, err, test.chats)
		}
		server.Close()
	}
}
