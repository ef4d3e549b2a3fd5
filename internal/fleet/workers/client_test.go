package workers

import (
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/testkit"
)

// keyServer notes the Authorization of each path that is asked for.
type keyServer struct {
	*httptest.Server
	mu   sync.Mutex // guards seen
	seen map[string]string
}

func newKeyServer(t *testing.T) *keyServer {
	t.Helper()
	s := &keyServer{seen: map[string]string{}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.seen[r.URL.Path] = r.Header.Get("Authorization")
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
		case "/metrics":
			fmt.Fprint(w, "vllm:num_requests_running 1\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n")
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

// shown returns the keys that were shown at these paths, once all have been asked
// for.
func (s *keyServer) shown(t *testing.T, paths ...string) (keys []string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "all are asked for", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		keys = keys[:0]
		for _, path := range paths {
			key, asked := s.seen[path]
			if !asked {
				return false
			}
			keys = append(keys, key)
		}
		return true
	})
	return keys
}

func TestWhichKeyGoesToAnAttachedWorker(t *testing.T) {
	for _, test := range []struct {
		name            string
		own, flag, env  kv.Secret // key-env, --worker-api-key-env, VLLM_API_KEY
		passKey         bool      // the router asks its clients for keys
		probes, clients string    // the key in each
	}{
		{name: "none"},
		{name: "none, and the router has keys", passKey: true},
		{name: "its own", own: "own", flag: "flag", env: "env", probes: "own", clients: "own"},
		{name: "the flag's", flag: "flag", env: "env", probes: "flag", clients: "flag"},
		{name: "vLLM's variable: the client's own goes through", env: "env", probes: "env"},
		{name: "vLLM's variable, and the router has keys", env: "env", passKey: true, probes: "env", clients: "env"},
	} {
		t.Run(test.name, func(t *testing.T) {
			defer goleak.VerifyNone(t)
			s := newKeyServer(t)
			defer s.Close()
			cfg := fakeConfig(t, 0)
			cfg.fleet.WorkerKey, cfg.fleet.Key, cfg.fleet.PassKey = test.flag, test.env, test.passKey
			cfg.fleet.Attached = []Attached{{Server: probe.Server{ID: 3, URL: s.URL, Key: test.own}}}
			f := newFakeFleet(t, cfg)
			targets := make(chan kv.Target, 1)
			f.hooks.Up = func(target kv.Target) { targets <- target }
			f.start()
			if got := <-targets; string(got.Bearer) != test.clients {
				t.Errorf("clients' requests carry %q, want %q", string(got.Bearer), test.clients)
			}
			want := ""
			if test.probes != "" {
				want = "Bearer " + test.probes
			}
			for i, path := range []string{"/health", "/v1/models", "/metrics", "/kv_event_sources"} {
				if got := s.shown(t, path)[0]; got != want {
					t.Errorf("%d. %s was asked with %q, want %q", i, path, got, want)
				}
			}
			f.stop()
		})
	}
}

func TestRegisteredWorkersSeeTheirOwnKeyOnly(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, key := range []kv.Secret{"", "theirs"} {
		s := newKeyServer(t)
		cfg := fakeConfig(t, 0)
		cfg.fleet.WorkerKey, cfg.fleet.Key, cfg.fleet.PassKey = "flag", "env", true
		f := newFakeFleet(t, cfg)
		targets := make(chan kv.Target, 2)
		f.hooks.Up = func(target kv.Target) { targets <- target }
		f.start()
		r := registration(s.URL)
		r.Key = key
		f.register(r)
		if got := <-targets; got.Bearer != key {
			t.Errorf("clients' requests carry %q, want %q", string(got.Bearer), string(key))
		}
		want := ""
		if key != "" {
			want = "Bearer " + string(key)
		}
		for _, got := range s.shown(t, "/health", "/metrics") {
			if got != want {
				t.Errorf("asked with %q, want %q", got, want)
			}
		}
		r.Key = "new"
		f.register(r)
		if got := <-targets; got.Bearer != "new" || got.Generation != 1 {
			t.Errorf("after a change: %q, generation %d", string(got.Bearer), got.Generation)
		}
		for _, path := range []string{"/health", "/metrics"} {
			testkit.Eventually(t, 20*time.Second, path+" is asked for with the new key", func() bool { return s.shown(t, path)[0] == "Bearer new" })
		}
		f.stop()
		s.Close()
	}
}

func TestStartedWorkersHaveTheKeyTheyWereStartedWith(t *testing.T) {
	for _, test := range []struct {
		flag, started kv.Secret
		passKey       bool
		probes, goes  kv.Secret
	}{
		{"", "", true, "", ""},
		{"", "env", false, "env", ""},
		{"", "env", true, "env", "env"},
		{"flag", "", false, "flag", "flag"},
		{"flag", "args", false, "args", "args"},
	} {
		cfg := Settings{Started: make([]kv.Disagg, 1), Ports: process.Ports{HTTP: 1}, WorkerKey: test.flag, Key: test.started, PassKey: test.passKey}
		f := New(cfg, Deps{Log: slog.New(slog.DiscardHandler)})
		if w := f.workers[0]; w.spec.Key != test.probes || w.bearer() != test.goes {
			t.Errorf("%+v: probes show %q, requests carry %q", test, string(w.spec.Key), string(w.bearer()))
		}
	}
}

// newTLSServer is a worker with https, and the file of who signed its certificate.
func newTLSServer(t *testing.T) (server *httptest.Server, authority string) {
	t.Helper()
	server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	authority = filepath.Join(t.TempDir(), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(authority, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return server, authority
}

func TestWorkersWithTLS(t *testing.T) {
	defer goleak.VerifyNone(t)
	server, authority := newTLSServer(t)
	defer server.Close()
	flags := Flags{WorkerCA: authority, Worker: []Attached{{Server: probe.Server{ID: 3, URL: server.URL}}}}
	if err := flags.Resolve(func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	cfg := fakeConfig(t, 0)
	cfg.fleet.Attached, cfg.fleet.TLS = flags.Worker, flags.WorkerTLS
	f := newFakeFleet(t, cfg)
	f.start()
	f.wantEvents("up 3.0 g1")
	f.stop()
}
