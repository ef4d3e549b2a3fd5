package cells

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit"
)

// below is a router below, without workers.
type below struct {
	*Reporter
	url    string
	book   *summary.Book
	ready  atomic.Bool
	models atomic.Pointer[[]string]
}

func startBelow(t *testing.T, change func(*Deps)) *below {
	t.Helper()
	b := &below{book: summary.NewBook()}
	b.ready.Store(true)
	b.models.Store(&[]string{"m"})
	deps := Deps{
		Hello: Hello{Router: "kvrouter-below", Version: "test", BlockSize: 16}, Book: b.book, Log: slog.New(slog.DiscardHandler),
		Info:  func() Info { return Info{Models: *b.models.Load()} },
		State: func() State { return State{Ready: b.ready.Load(), Workers: 3, Waits: [3]float64{1, 2, 3}} },
	}
	if change != nil {
		change(&deps)
	}
	b.Reporter = NewReporter(Flags{CellInterval: 20 * time.Millisecond, CellRate: 1_000_000}, deps)
	server := httptest.NewServer(b.Reporter)
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.Run(ctx)
	}()
	t.Cleanup(func() {
		end()
		<-ended
		server.CloseClientConnections()
		server.Close()
	})
	b.url = server.URL
	return b
}

func newClient(t *testing.T, hop web.Hop) *Client {
	c := NewClient(Settings{Hop: hop})
	t.Cleanup(c.Close)
	return c
}

func open(t *testing.T, c *Client, url string, view *summary.View) *Stream {
	t.Helper()
	s, err := c.Open(t.Context(), url, "", view)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// until reads reports until is is true.
func until(t *testing.T, s *Stream, what string, is func(Report) bool) {
	t.Helper()
	for limit := time.Now().Add(10 * time.Second); time.Now().Before(limit); {
		r, err := s.Next()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if is(r) {
			return
		}
	}
	t.Fatal(what)
}

func TestAStreamTellsWhatChanges(t *testing.T) {
	b, c, view := startBelow(t, nil), newClient(t, web.NewHop()), &summary.View{}
	b.book.Hold(7)
	s := open(t, c, b.url, view)
	if s.Hello.Router != "kvrouter-below" || s.First.Info.Models[0] != "m" || !s.First.State.Ready || s.First.State.Workers != 3 {
		t.Errorf("first report: %+v %+v %+v", s.Hello, s.First.Info, s.First.State)
	}
	report := s.First.State.Report(time.Now(), time.Millisecond)
	if report.Waits[2] != 3*time.Millisecond || report.Workers != 3 || report.Network != time.Millisecond {
		t.Errorf("report: %+v", report)
	}
	until(t, s, "the block is reported", func(Report) bool { return view.Run([]uint64{7}) == 1 })
	b.book.Drop(7)
	b.book.Hold(8)
	until(t, s, "the change is reported", func(Report) bool { return view.Run([]uint64{8}) == 1 && view.Run([]uint64{7}) == 0 })
	b.models.Store(&[]string{"m", "adapter"})
	until(t, s, "the models are reported", func(r Report) bool { return r.Info != nil && len(r.Info.Models) == 2 })
	b.ready.Store(false)
	until(t, s, "readiness is reported", func(r Report) bool { return !r.State.Ready })
	if n := b.Counts().Readers.Load(); n != 1 {
		t.Errorf("%d readers", n)
	}
	b.Leave()
	until(t, s, "leaving is reported", func(r Report) bool { return r.State.Leaving })
	if _, err := s.Next(); !errors.Is(err, errEnded) {
		t.Errorf("a stream of a router that leaves: %v", err)
	}
}

// writer calls a function before each write.
type writer struct {
	*httptest.ResponseRecorder
	writes int
	before func(writes int)
}

func (w *writer) Write(p []byte) (int, error) {
	w.writes++
	w.before(w.writes)
	return w.ResponseRecorder.Write(p)
}

func TestLeavingIsToldAlsoWhereAReportIsBeingWritten(t *testing.T) {
	reporter := NewReporter(Flags{CellInterval: time.Hour}, Deps{
		Info: func() Info { return Info{} }, State: func() State { return State{} }, Log: slog.New(slog.DiscardHandler),
	})
	w := &writer{ResponseRecorder: httptest.NewRecorder(), before: func(writes int) {
		switch writes {
		case 1:
			reporter.report(false)
		case 2:
			reporter.Leave()
		}
	}}
	reporter.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if text := w.Body.String(); strings.Count(text, `"leaving":true`) != 1 || w.writes != 3 {
		t.Errorf("%d writes: %q", w.writes, text)
	}
}

func TestACutStreamIsResumed(t *testing.T) {
	b, c, view := startBelow(t, nil), newClient(t, ""), &summary.View{}
	first := open(t, c, b.url, view)
	b.book.Hold(1)
	until(t, first, "the block is reported", func(Report) bool { return view.Run([]uint64{1}) == 1 })
	first.Close()
	b.book.Hold(2)
	snapshots := b.Counts().Snapshots.Load()
	second := open(t, c, b.url, view)
	if view.Run([]uint64{1}) != 1 {
		t.Error("the view is empty while it waits to be resumed")
	}
	until(t, second, "the missed block is reported", func(Report) bool { return view.Run([]uint64{2}) == 1 })
	if n := b.Counts().Snapshots.Load() - snapshots; n != 0 {
		t.Errorf("%d snapshots to resume", n)
	}
}

func TestRoutersThatCannotBeFollowed(t *testing.T) {
	hop := web.NewHop()
	serve := func(status int, frames ...[]byte) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write(bytes.Join(frames, nil))
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	frame := func(kind byte, value any) []byte {
		f, err := appendJSON(nil, kind, value)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	good := Hello{Protocol: Protocol, Router: "kvrouter-x", BlockSize: 16, Hash: HashKind}
	with := func(change func(*Hello)) []byte {
		h := good
		change(&h)
		return frame(frameHello, h)
	}
	for name, c := range map[string]struct {
		url  string
		want error
		says string
	}{
		"itself":              {startBelow(t, func(d *Deps) { d.Hello.Router = hop.Name() }).url, ErrLeadsBack, "routing loop"},
		"one below itself":    {startBelow(t, func(d *Deps) { d.Info = func() Info { return Info{Below: []string{"other", hop.Name()}} } }).url, ErrLeadsBack, ""},
		"another version":     {serve(200, with(func(h *Hello) { h.Protocol = 2 })), ErrOther, "version 2"},
		"other hashes":        {serve(200, with(func(h *Hello) { h.Hash = "sha256" })), ErrOther, "sha256"},
		"no block size":       {serve(200, with(func(h *Hello) { h.BlockSize = 0 })), ErrOther, "out of range"},
		"a huge block":        {serve(200, with(func(h *Hello) { h.BlockSize = math.MaxInt })), ErrOther, "out of range"},
		"no name":             {serve(200, with(func(h *Hello) { h.Router = "" })), ErrOther, ""},
		"state before hello":  {serve(200, frame(frameState, State{})), ErrOther, ""},
		"no JSON":             {serve(200, appendFrame(nil, frameHello, []byte("{"))), ErrOther, ""},
		"cut hello":           {serve(200, with(func(*Hello) {})[:20]), nil, ""},
		"a huge frame":        {serve(200, []byte{0xff, 0xff, 0xff, 0xff, frameHello}), nil, "bytes"},
		"an empty frame":      {serve(200, []byte{0, 0, 0, 0, frameHello}), nil, "bytes"},
		"a page":              {serve(200, []byte(strings.Repeat("<html>", 100))), nil, ""},
		"no such path":        {serve(404), nil, "leave out kind=router"},
		"a wrong key":         {serve(401), nil, "key-env"},
		"a loop":              {serve(508), ErrLeadsBack, ""},
		"nothing":             {"http://" + testkit.DeadAddress(t), nil, ""},
		"an unknown engine":   {serve(200, frame(frameHello, good), appendFrame(nil, frameInfo, []byte(`{"engine":"tgi"}`))), ErrOther, ""},
		"waits that are text": {serve(200, frame(frameHello, good), frame(frameInfo, Info{}), appendFrame(nil, frameState, []byte(`{"waits_ms":"x"}`))), ErrOther, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := newClient(t, hop).Open(t.Context(), c.url, "", &summary.View{})
			if err == nil {
				s.Close()
				t.Fatal("it is followed")
			}
			if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestForeignNumbersAndListsAreBounded(t *testing.T) {
	s := State{Workers: -1, Running: math.MaxInt, Waiting: -5, Usage: math.NaN(), Blocks: math.MaxInt, Context: math.MaxInt, Waits: [3]float64{math.Inf(1), -1, math.NaN()}}
	s.clamp()
	if s.Workers != 0 || s.Running != kv.MaxTokens || s.Waiting != 0 || s.Usage != 0 || s.Blocks != maxBlocks || s.Context != maxTokens || s.Waits != [3]float64{float64(maxWait / time.Millisecond), 0, 0} {
		t.Errorf("%+v", s)
	}
	if r := s.Report(time.Now(), 0); r.Workers != 1 || r.Waits[0] != maxWait {
		t.Errorf("%+v", r)
	}
	i := Info{Models: make([]string, 5000), Root: strings.Repeat("x", 300), Lookaheads: []kv.Lookahead{{Tokens: 1 << 40}, {Tokens: 1, Cut: -1}, {Tokens: 2, Cut: 1}}}
	for n := range i.Models {
		i.Models[n] = "m"
	}
	i.Models[0], i.Models[1] = "", strings.Repeat("x", 300)
	i.clip()
	if len(i.Models) != maxNames-2 || i.Root != "" || len(i.Lookaheads) != 1 {
		t.Errorf("%d models, root %q, lookaheads %v", len(i.Models), i.Root, i.Lookaheads)
	}
}

func TestARouterIsFollowedByABoundedNumber(t *testing.T) {
	b, c := startBelow(t, nil), newClient(t, "")
	for range maxReaders {
		open(t, c, b.url, &summary.View{})
	}
	if _, err := c.Open(t.Context(), b.url, "", &summary.View{}); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("one more: %v", err)
	}
}

func TestTheShortestOfTheLastRoundTripsCounts(t *testing.T) {
	var w Way
	if w.Shortest() != 0 {
		t.Error("nothing was measured")
	}
	w.Add(time.Millisecond)
	for range roundTrips {
		w.Add(5 * time.Millisecond)
	}
	w.Add(9 * time.Millisecond)
	if got := w.Shortest(); got != 5*time.Millisecond {
		t.Errorf("%v: an old one counts", got)
	}
}

// FuzzStream reads foreign streams.
func FuzzStream(f *testing.F) {
	hello, _ := appendJSON(nil, frameHello, Hello{Protocol: Protocol, Router: "r", BlockSize: 16, Hash: HashKind, Summary: true})
	state, _ := appendJSON(nil, frameState, State{Ready: true, Workers: 2})
	info, _ := appendJSON(nil, frameInfo, Info{Models: []string{"m"}})
	book := summary.NewBook()
	book.Hold(1)
	book.Publish(0)
	all := bytes.Join([][]byte{hello, info, state}, nil)
	messages, _ := book.Snapshot()
	for _, m := range messages {
		all = appendFrame(all, frameSummary, m)
	}
	f.Add(append(all, state...))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newStream(t.Context(), &summary.View{})
		s.reports.SetLimit(rate.Inf)
		s.own, s.body = func(string) bool { return false }, io.NopCloser(bytes.NewReader(data))
		defer s.Close()
		for range 100 {
			r, err := s.Next()
			if err != nil {
				return
			}
			if r.State.Workers < 0 || r.State.Workers > 1<<16 || !(r.State.Usage >= 0) {
				t.Fatalf("%+v", r.State)
			}
		}
	})
}

func TestAStreamThatEndsWaitsForNoTurn(t *testing.T) {
	state, err := appendJSON(nil, frameState, State{})
	if err != nil {
		t.Fatal(err)
	}
	s := newStream(t.Context(), &summary.View{})
	s.body = io.NopCloser(bytes.NewReader(state))
	s.reports = rate.NewLimiter(rate.Every(time.Hour), 1)
	s.reports.Allow()
	time.AfterFunc(10*time.Millisecond, s.Close)
	if _, err := s.Next(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestFramesCarryTheirSize(t *testing.T) {
	f, err := appendJSON(nil, frameState, State{})
	if err != nil || int(binary.LittleEndian.Uint32(f)) != len(f)-4 {
		t.Fatalf("%v %d", err, len(f))
	}
	var s State
	if err := json.Unmarshal(f[5:], &s); err != nil {
		t.Fatal(err)
	}
}

func TestAnotherProcessIsNotResumed(t *testing.T) {
	c, view := newClient(t, ""), &summary.View{}
	before := startBelow(t, nil)
	before.book.Hold(1)
	until(t, open(t, c, before.url, view), "the block is reported", func(Report) bool { return view.Run([]uint64{1}) == 1 })
	after := startBelow(t, nil)
	s := open(t, c, after.url, view)
	if view.Run([]uint64{1}) != 0 {
		t.Error("what the process before held counts for the next one")
	}
	until(t, s, "it reports its own", func(r Report) bool { _, whole := view.Position(); return whole })
}
