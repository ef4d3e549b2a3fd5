package discovery

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// watched is what a source reports while a test runs.
type watched struct {
	t     *testing.T
	path  string            // of the file, if any
	log   testkit.LogBuffer // has a lock of its own
	mu    sync.Mutex        // guards lists
	lists [][]kv.Worker

	failed atomic.Bool // the last reading of the file
}

// fileRead is called after each reading of the file.
func (w *watched) fileRead(failed bool) { w.failed.Store(failed) }

// logger is a log that the test may read.
func (w *watched) logger() *slog.Logger { return testLog(&w.log) }

func testLog(to *testkit.LogBuffer) *slog.Logger { return slog.New(slog.NewTextHandler(to, nil)) }

// watch receives what a source reports until the test ends.
func (w *watched) watch(s Source) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for list := range s.Watch(ctx) {
			w.mu.Lock()
			w.lists = append(w.lists, list)
			w.mu.Unlock()
		}
	}()
	w.t.Cleanup(func() { cancel(); <-done })
}

// last is the newest list.
func (w *watched) last() []kv.Worker {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lists) == 0 {
		return nil
	}
	return w.lists[len(w.lists)-1]
}

// all are the lists so far.
func (w *watched) all() [][]kv.Worker {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.lists)
}

// count is how many lists were told.
func (w *watched) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.lists)
}

// shown is a list as a test writes it: name=url and what is not usual.
func shown(list []kv.Worker) string {
	var all []string
	for _, w := range list {
		text := w.Name + "=" + strings.TrimPrefix(w.URL, "http://")
		if w.Role != kv.RoleBoth || w.Kind != kv.KindNone {
			text += fmt.Sprintf(" %s/%s", w.Role, w.Kind)
		}
		if w.Bootstrap.Known() {
			text += " " + w.Bootstrap.String()
		}
		if w.P2P.Known() {
			text += " p2p " + w.P2P.String()
		}
		if w.Cordon != "" {
			text += " " + string(w.Cordon)
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// wants waits until the newest list is that one.
func (w *watched) wants(want string) {
	w.t.Helper()
	testkit.Settles(w.t, func() error {
		if got := shown(w.last()); w.count() == 0 || got != want {
			return fmt.Errorf("%d lists, the last %q; want %q\n%s", w.count(), got, want, w.log.Tail())
		}
		return nil
	})
}

// says waits until the log has that text.
func (w *watched) says(text string) {
	w.t.Helper()
	testkit.Settles(w.t, func() error {
		if !strings.Contains(w.log.String(), text) {
			return fmt.Errorf("the log has no %q:\n%s", text, w.log.Tail())
		}
		return nil
	})
}

func TestSourcesThatMakeNoSense(t *testing.T) {
	for value, want := range map[string]string{
		"file:":                          "the file name is missing",
		"workers.yaml":                   "unknown source",
		"http://h:1":                     "unknown source",
		"dns://vllm.ns":                  "dns+srv://",
		"dns://vllm.ns:0":                "with a name and the workers' port",
		"dns://vllm.ns:70000":            "with a name and the workers' port",
		"dns://:8100":                    "with a name and the workers' port",
		"dns://u@h:1":                    "with a name and the workers' port",
		"dns+srv://":                     "full name of the SRV records",
		"dns+srv://_http._tcp.vllm:8100": "the port is in them",
	} {
		if err := (Settings{Discovery: value}).Validate(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--discovery "+value) {
			t.Errorf("%q: %v", value, err)
		}
	}
	for _, value := range []string{"", "file:workers.yaml", "dns://vllm.ns:8100", "dns+srv://_http._tcp.vllm.ns.svc.cluster.local"} {
		if err := (Settings{Discovery: value}).Validate(); err != nil {
			t.Errorf("%q: %v", value, err)
		}
	}
	if s, err := Open(Settings{}, nil, slog.Default()); s != nil || err != nil {
		t.Errorf("%v, %v", s, err)
	}
}

func TestIDsAreStableAndAboveAllOthers(t *testing.T) {
	a, b := idOf("http://10.0.0.1:8000"), idOf("http://10.0.0.2:8000")
	if a == b || a != idOf("http://10.0.0.1:8000") || a < 1<<52 || a >= 1<<53 {
		t.Errorf("%x and %x", a, b)
	}
}
