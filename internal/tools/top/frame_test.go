package top

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/testkit"
)

var rewrite = flag.Bool("update", false, "write testdata anew")

func pointer[T any](v T) *T { return &v }

// fleet is a router with workers of every kind.
func fleet() *page.State {
	at := 1_750_000_000.0
	return &page.State{
		At: at, Version: "v1", Uptime: 3*3600 + 125, Policy: "work", Models: []string{"m"}, Ready: true,
		Totals: page.Totals{Requests: 123456, Errors: 7, InFlight: 12, Queued: 2, PromptTokens: 2_000_000, CachedTokens: 1_500_000, ComparedTokens: 2_000_000},
		Rates:  page.Rates{RequestsPerSecond: 42.2, HitRate: pointer(.75), Exact: pointer(.994), TTFT50: pointer(.035), TTFT99: pointer(1.25), ITL50: pointer(.007), ITL99: pointer(.0204)},
		Workers: []page.Worker{
			{Worker: 0, State: page.StateReady, Since: at - 11_000, Model: "m", URL: "http://a:8100", InFlight: 9, Waiting: 2, Running: 7, LoadKnown: true, KVUsage: pointer(.97), Blocks: 12_345, PrefillTokens: 4000, HitRate: pointer(.8), EventLag: pointer(.0012), Known: kv.Exact.String()},
			{Worker: 1, State: page.StateEjected, Since: at - 3, Model: "m", URL: "http://b:8100", Why: "3 consecutive failures, the last: no connection", Restarts: 4, LoadKnown: false, Blocks: 100, Known: kv.Approximate.String()},
			{Worker: 10, State: page.StateStarting, Since: at - 20, Model: "m", URL: "http://c:8100"},
			{Worker: 2, State: page.StateReady, Since: at - 90_000, Model: "m", URL: "http://d:8100", InFlight: 3, Running: 3, LoadKnown: true, KVUsage: pointer(.31), Blocks: 2_345_678, HitRate: pointer(.7), EventLag: pointer(-.0002), Known: kv.Exact.String()},
		},
		Requests: []page.Request{
			{ID: "req-3", At: at, Route: "/v1/chat/completions", Model: "m", PromptTokens: 900, Predicted: 640, End: page.EndRunning, Attempts: 1, Worker: pointer(uint64(0))},
			{ID: "req-2", At: at - 1, Route: "/v1/chat/completions", Model: "m", PromptTokens: 12_000, Predicted: 640, Cached: pointer(576), TTFT: pointer(.05), Duration: pointer(2.5), OutputTokens: pointer(128), End: page.EndDone, Status: 200, Attempts: 2, Worker: pointer(uint64(2)), PrefillWorker: pointer(uint64(0))},
			{ID: "req-1", At: at - 2, Route: "/v1/completions", Model: "m", End: page.EndRefused, Status: 503, Attempts: 0},
		},
	}
}

// pods is a router with discovered workers, one of which drains and one is not ready.
func pods() *page.State {
	s := fleet()
	for i, w := range []struct{ name, state, why string }{
		{"vllm-7d9f8c6b5-x2x9q", page.StateReady, ""},
		{"vllm-llama-3-70b-instruct-decode-6c8d9f7b5-kq8zn-rank-3", page.StateDraining, "it is leaving"},
		{"vllm-7d9f8c6b5-4mmtl", page.StateNotReady, "it gets no new requests"},
		{"", page.StateReady, ""},
	} {
		s.Workers[i].Name, s.Workers[i].State, s.Workers[i].Why = w.name, w.state, w.why
	}
	s.Requests[0].WorkerName = s.Workers[0].Name
	s.Requests[1].WorkerName, s.Requests[1].PrefillName = s.Workers[1].Name, s.Workers[0].Name
	return s
}

// shared is a router with tenants in a fair queue.
func shared() *page.State {
	s := fleet()
	s.Fair = true
	s.Tenants = []page.Tenant{
		{Tenant: "flood", Weight: 1, Waiting: page.Waiting{Standard: 1000, Batch: 24}, Running: 12, OldestWait: 73.4, Behind: 2.31, Requests: 81_200, PromptTokens: 42_011_300, CachedTokens: 30_105_600, AnsweredTokens: 8_810_000, Wait: 9610, Shed: 12, Kept: 790, Missed: 22},
		{Tenant: "a-team-with-a-name-that-is-longer-than-others-of-the-site", Weight: 0.5, Waiting: page.Waiting{Interactive: 2}, Running: 1, OldestWait: 0.12, Requests: 12, PromptTokens: 1200, AnsweredTokens: 300},
		{Tenant: "(common)", Requests: 3, Kept: 3},
		{Tenant: "night", Requests: 1},
	}
	return s
}

func TestLongNamesKeepTheirEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		most int
		want string
	}{
		{"", 5, "4503599627370496"}, {"pod-a", 5, "pod-a"}, {"vllm-7d9f8c6b5-x2x9q", 20, "vllm-7d9f8c6b5-x2x9q"},
		{"vllm-7d9f8c6b5-x2x9q", 16, "vllm-7d…b5-x2x9q"}, {"vllm-7d9f8c6b5-x2x9q", 0, "vllm-…-x2x9q"},
		{"vllm-llama-3-70b-instruct-decode-6c8d9f7b5-kq8zn", 32, "vllm-llama-3-70b-in…d9f7b5-kq8zn"},
	} {
		got := called(1<<52, c.name, c.most)
		if got != c.want || c.name != "" && ansi.StringWidth(got) > max(c.most, 12) {
			t.Errorf("%q in %d: %q, want %q", c.name, c.most, got, c.want)
		}
	}
}

// checkFrame holds what is true of every frame in a terminal.
func checkFrame(t *testing.T, f frame) {
	t.Helper()
	f.zone = time.UTC
	text := f.text()
	lines := strings.Split(text, "\n")
	if f.height > 0 && len(lines) != f.height {
		t.Errorf("%d lines in a terminal of %d", len(lines), f.height)
	}
	for _, line := range lines {
		if width := ansi.StringWidth(line); width > max(f.width, minWidth) {
			t.Errorf("%d columns in a terminal of %d: %q", width, f.width, line)
		}
	}
	for i, part := range strings.Split(text, "\x1b") {
		if code, _, ok := strings.Cut(part, "m"); i > 0 && (!ok || len(code) > 3 || strings.Trim(code, "[0123456789") != "") {
			t.Errorf("an escape code that is no colour: %q", part)
		}
	}
	if strings.ContainsAny(text, "\a\b\t\r\v\f\x7f\u009b\u009d") {
		t.Errorf("a control character in %q", text)
	}
}

// TestFrames holds frames against files in testdata, which go test -update writes.
func TestFrames(t *testing.T) {
	lost := "dial tcp 127.0.0.1:7000: connect: connection refused; again in 4s"
	accounts := shared()
	accounts.Fair = false
	for name, f := range map[string]frame{
		"once":     {width: 160, state: fleet(), plain: true},
		"80x24":    {width: 80, height: 24, state: fleet()},
		"160x12":   {width: 160, height: 12, state: fleet(), sort: 2},
		"40x10":    {width: 40, height: 10, state: fleet(), skip: 3},
		"lost":     {width: 80, height: 10, state: fleet(), problem: lost},
		"begin":    {width: 80, height: 6, url: "http://127.0.0.1:7000/ui/stream"},
		"nobody":   {width: 80, height: 10, state: &page.State{Draining: true}},
		"hopeless": {width: 1, height: 1, state: fleet()},
		"named":    {width: 160, height: 20, state: pods()},
		"named80":  {width: 80, height: 20, state: pods()},
		"shared":   {width: 160, height: 32, state: shared()},
		"shared80": {width: 80, height: 20, state: shared()},
		"accounts": {width: 160, state: accounts, plain: true},
	} {
		f.zone = time.UTC
		checkFrame(t, f)
		file := filepath.Join("testdata", name+".txt")
		got := ansi.Strip(f.text())
		if *rewrite {
			testkit.WriteFile(t, file, got)
		}
		want, err := os.ReadFile(file)
		if err != nil || got != string(want) {
			t.Errorf("%s: %v; -update writes it anew\n%s", name, err, got)
		}
	}
}

func TestEverySizeIsFilled(t *testing.T) {
	state := shared()
	for i := range 40 {
		state.Workers = append(state.Workers, page.Worker{Worker: uint64(100 + i), State: page.StateReady, Role: "decode", Rank: 1, Model: strings.Repeat("漢", i)})
	}
	for width := 0; width < 200; width += 3 {
		for _, height := range []int{1, 2, 3, 5, 8, 13, 24, 60} {
			checkFrame(t, frame{width: width, height: height, state: state, skip: width})
		}
	}
}

func TestWorkersAreSorted(t *testing.T) {
	for keys, want := range map[string]string{"": "0 1 2 10", "w": "10 2 1 0", "s": "1 0 2 10", "f": "0 2 1 10", "ff": "1 10 2 0", "k": "0 2 1 10", "b": "2 0 1 10", "h": "0 2 1 10", "l": "0 2 1 10", "fw": "0 1 2 10", "x": "0 1 2 10"} {
		m := &model{frame: frame{state: fleet()}}
		for _, key := range keys {
			m.press(string(key))
		}
		var got []string
		for _, w := range (frame{state: m.state, sort: m.sort, reverse: m.reverse}).sorted() {
			got = append(got, count(float64(w.Worker)))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("keys %q: %v, want %s", keys, got, want)
		}
	}
}

func TestKeysScrollWithinTheFleet(t *testing.T) {
	// In 20 rows 8 workers are seen, beside the requests.
	m := &model{frame: frame{state: fleet(), width: 80, height: 20, zone: time.UTC}}
	for i := range 16 {
		m.state.Workers = append(m.state.Workers, page.Worker{Worker: uint64(100 + i), State: page.StateReady})
	}
	shown := func(first string) {
		t.Helper()
		if text := ansi.Strip(m.View().Content); !strings.Contains(text, "↑↓ "+first+"/") {
			t.Errorf("%s are not what is shown:\n%s", first, text)
		}
	}
	shown("1–8")
	for _, c := range []struct {
		key  string
		want int
	}{{"up", 0}, {"down", 1}, {"pgdown", 11}, {"up", 10}, {"home", 0}, {"end", 12}, {"down", 12}, {"up", 11}, {"pgup", 1}} {
		if command := m.press(c.key); m.skip != c.want || command != nil {
			t.Errorf("after %s %d workers are scrolled away, want %d", c.key, m.skip, c.want)
		}
		shown(fmt.Sprintf("%d–%d", c.want+1, c.want+8))
	}
	m.press("end")
	m.state.Workers = m.state.Workers[:12] // others have left
	m.View()
	if m.press("up"); m.skip != 3 {
		t.Errorf("in the smaller fleet %d workers are scrolled away", m.skip)
	}
	for _, key := range []string{"q", "ctrl+c", "esc"} {
		if command := m.press(key); command == nil || command() != tea.Quit() {
			t.Errorf("%s does not quit", key)
		}
	}
}

func TestNumbersAreShort(t *testing.T) {
	for n, want := range map[float64]string{0: "0", 999: "999", 1000: "1,000", 9999: "9,999", 12_345: "12.3k", 999_600: "1.00M", 1.5e9: "1.50G", 3e14: "300T", 1e300: "many", -1234: "-1,234"} {
		if got := count(n); got != want {
			t.Errorf("count(%v) = %s, want %s", n, got, want)
		}
	}
	for s, want := range map[float64]string{0: "0s", .00025: "250µs", .035: "35ms", .9999: "1.00s", 12.34: "12.3s", 187: "3m07s", 8100: "2h15m", 356_400: "4d03h", 1e300: "years", -.002: "-2ms"} {
		if got := seconds(s); got != want {
			t.Errorf("seconds(%v) = %s, want %s", s, got, want)
		}
	}
}

// screen is the output of a program.
type screen struct {
	mu  sync.Mutex // guards all
	out bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.Write(p)
}

func (s *screen) shows(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(ansi.Strip(s.out.String()), text)
}

func TestProgramShowsTheStreamUntilItIsQuit(t *testing.T) {
	for _, how := range []string{"key", "signal"} {
		input, keys := io.Pipe()
		out := &screen{}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		source := stream(t, answers(503), sends("v9", true))
		source.firstPause = 2 * time.Second // for the refusal to be drawn
		go func() {
			ended <- watch(ctx, source, tea.WithInput(input), tea.WithOutput(out), tea.WithWindowSize(80, 24), tea.WithoutSignals())
		}()
		testkit.Eventually(t, 20*time.Second, "the refusal is shown", func() bool { return out.shows("(503)") })
		testkit.Eventually(t, 20*time.Second, "the state is shown", func() bool { return out.shows("v9") }) // the terminal gets what has changed only
		if how == "key" {
			io.WriteString(keys, "q")
		} else {
			stop()
		}
		select {
		case err := <-ended:
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", how, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: it does not end", how)
		}
		stop()
		keys.Close()
	}
}

// text is the frame as draw draws it.
func (f frame) text() string {
	text, _ := f.draw()
	return text
}
