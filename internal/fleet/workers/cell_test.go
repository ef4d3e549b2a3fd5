package workers

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/testkit"
)

// lowerRouter is a router below a fleet; it can go and come back.
type lowerRouter struct {
	t       *testing.T
	address string
	hello   cells.Hello
	book    *summary.Book
	ready   atomic.Bool
	key     string // that it asks for

	server *http.Server
	end    context.CancelFunc
	ended  chan struct{}
}

func newLowerRouter(t *testing.T) *lowerRouter {
	c := &lowerRouter{t: t, address: fmt.Sprintf("127.0.0.1:%d", testkit.FreePorts(t, 1)), book: summary.NewBook(), hello: cells.Hello{Router: "kvrouter-1", BlockSize: 64}}
	c.ready.Store(true)
	return c
}

func (c *lowerRouter) start() {
	c.t.Helper()
	reporter := cells.NewReporter(cells.Flags{CellInterval: 20 * time.Millisecond, CellRate: 1_000_000}, cells.Deps{
		Hello: c.hello, Book: c.book, Log: slog.New(slog.DiscardHandler),
		Info:  func() cells.Info { return cells.Info{Models: []string{"m"}} },
		State: func() cells.State { return cells.State{Ready: c.ready.Load(), Workers: 4, Blocks: 1000, Running: 2} },
	})
	listener, err := net.Listen("tcp", c.address)
	if err != nil {
		c.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /cell", func(w http.ResponseWriter, r *http.Request) {
		if c.key != "" && r.Header.Get("Authorization") != "Bearer "+c.key {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		reporter.ServeHTTP(w, r)
	})
	c.server = &http.Server{Handler: mux}
	ctx, end := context.WithCancel(context.Background())
	c.end, c.ended = end, make(chan struct{})
	go func() {
		defer close(c.ended)
		reporter.Run(ctx)
	}()
	go func() { _ = c.server.Serve(listener) }()
}

// kill ends the router without a word.
func (c *lowerRouter) kill() {
	_ = c.server.Close()
	c.end()
	<-c.ended
}

// follow returns a running fleet of this cell, with id 3, and what it shows.
func (c *lowerRouter) follow(key kv.Secret, change func(*hooks)) (*fakeFleet, *atomic.Pointer[policy.CellReport]) {
	cfg := fakeConfig(c.t, 0)
	cfg.fleet.Attached = []Attached{{Server: probe.Server{ID: 3, URL: "http://" + c.address, Key: key, Disagg: kv.Disagg{Kind: kv.KindRouter}}}}
	f := newFakeFleet(c.t, cfg)
	var shown atomic.Pointer[policy.CellReport]
	f.hooks.Cell = func(_ kv.WorkerKey, r policy.CellReport, _ *summary.View) { shown.Store(&r) }
	if change != nil {
		change(&f.hooks)
	}
	f.start()
	return f, &shown
}

func TestARouterBelowIsFollowed(t *testing.T) {
	defer goleak.VerifyNone(t)
	c := newLowerRouter(t)
	c.key = "secret"
	c.start()
	f, shown := c.follow("secret", nil)
	f.wantEvents("up 3.0 g1")
	testkit.Eventually(t, 10*time.Second, "the way is measured", func() bool {
		r := shown.Load()
		return r != nil && r.Network > 0 && r.Workers == 4 && r.Load.Running == 2
	})
	w := f.Workers()[0]
	if w.State != StateReady || w.Cell == nil || w.Cell.Router != "kvrouter-1" || !w.Cell.Ready || w.Models[0] != "m" || w.Predictions != "" {
		t.Errorf("%+v", w)
	}
	c.kill()
	f.wantEvents("up 3.0 g1", "down 3.0 g1")
	c.hello.Router = "kvrouter-2"
	c.start()
	f.wantEvents("up 3.0 g1", "down 3.0 g1", "up 3.0 g2")
	f.stop()
	c.kill()
}

func TestARouterBelowThatIsNotReadyGetsNoNewRequests(t *testing.T) {
	defer goleak.VerifyNone(t)
	c := newLowerRouter(t)
	c.ready.Store(false)
	c.start()
	var held atomic.Bool
	f, _ := c.follow("", func(h *hooks) { h.Hold = func(_ uint64, hold bool) { held.Store(hold) } })
	testkit.Eventually(t, 10*time.Second, "it waits for a worker", func() bool { return strings.Contains(f.Workers()[0].LastError, "no worker of it is ready") })
	c.ready.Store(true)
	f.wantEvents("up 3.0 g1")
	c.ready.Store(false)
	testkit.Eventually(t, 10*time.Second, "it gets no requests", held.Load)
	c.ready.Store(true)
	testkit.Eventually(t, 10*time.Second, "it gets requests again", func() bool { return !held.Load() })
	f.wantEvents("up 3.0 g1") // its requests continued
	f.stop()
	c.kill()
}

func TestRoutersBelowThatCannotBeUsed(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*lowerRouter)
		key    kv.Secret
		says   string // the last error, or about predictions
		up     bool
	}{
		"a wrong key": {func(c *lowerRouter) { c.key = "a" }, "b", "key-env", false},
		"no name":     {func(c *lowerRouter) { c.hello.Router = "" }, "", "another version", false},
		"no summary":  {func(c *lowerRouter) { c.book = nil }, "", "--cell", true},
	} {
		t.Run(name, func(t *testing.T) {
			c := newLowerRouter(t)
			test.change(c)
			c.start()
			f, _ := c.follow(test.key, nil)
			testkit.Eventually(t, 10*time.Second, "it says why", func() bool {
				w := f.Workers()[0]
				return strings.Contains(w.LastError+w.Predictions, test.says) && (w.State == StateReady) == test.up
			})
			f.stop()
			c.kill()
		})
	}
}
