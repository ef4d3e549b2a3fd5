package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
)

// startMockPairs starts a router over prefill and decode mock workers of a kind.
func startMockPairs(t testing.TB, kind kv.Kind, prefills, decodes int, args ...string) *mockSite {
	t.Helper()
	return startMocks(t, prefills+decodes, append([]string{
		fmt.Sprintf("--prefill-workers=%d", prefills), fmt.Sprintf("--decode-workers=%d", decodes), "--mock-disagg-kind=" + kind.String(),
	}, args...)...)
}

// mockPair is a protocol between mock workers and whose servers they are.
type mockPair struct {
	kind kv.Kind
	api  string
}

func (p mockPair) name() string { return p.kind.String() + " " + p.api }

// idle tells whether nothing is in flight: no booking, no request, block or room
// of a worker.
func (s *mockSite) idle() bool {
	for _, target := range s.app.router.Targets() {
		w := s.app.mocker.Worker(int(target.Key.Worker))
		w.Rooms.Mu.Lock()
		rooms := len(w.Rooms.ByID)
		w.Rooms.Mu.Unlock()
		if rooms > 0 || s.rank(target.Key).CurrentLoad() != (mocker.Load{}) {
			return false
		}
	}
	return s.inFlight() == 0
}

// longPrompt is a chat of some 500 tokens of its own.
func longPrompt(i int) []map[string]string {
	return say(fmt.Sprint("topic ", i, strings.Repeat(fmt.Sprint(" words about ", i), 120)))
}

// TestSoakOfPairs has clients come, stay and leave over prefill and decode workers
// that crash, one of which also hangs: none waits for ever, and nothing is left
// of them anywhere.
func TestSoakOfPairs(t *testing.T) {
	d := soakTime(t)
	for _, kind := range []kv.Kind{kv.KindNIXL, kv.KindSGLang} {
		t.Run(kind.String(), func(t *testing.T) {
			c := newChurn(t)
			c.chats = 1 << 30 // few have been before, so that most are shared
			c.first = startMockPairs(t, kind, 3, 3, "--speedup-ratio=10", "--mock-num-gpu-blocks=2048", "--disagg-min-uncached-tokens=64",
				"--mock-crash-every=5s", "--mock-hang-worker=2=15s", "--mock-kv-lease=2s", "--mock-bootstrap-timeout=10s",
				"--disagg-prefill-timeout=3s", "--disagg-handover-timeout=3s", "--request-timeout=6s")
			quiet := c.footprint()
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			var clients sync.WaitGroup
			for i := range churnClients {
				clients.Go(func() { c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 6)), c.first.openAI, i%3 == 0) })
			}
			clients.Wait()
			c.client.CloseIdleConnections()
			_, page := testkit.HTTPGet(t, c.first.openAI+"/metrics")
			for line := range strings.Lines(string(page)) {
				if strings.HasPrefix(line, "kvrouter_disagg_requests_total") || strings.HasPrefix(line, "kvrouter_retries_total") {
					t.Log(strings.TrimSpace(line))
				}
			}
			t.Logf("%d answers, %d clients left, %d refused, %d cut short, %d hung", c.whole.Load(), c.left.Load(), c.refused.Load(), c.broken.Load(), c.hung.Load())
			if wrong := c.wrong.Load(); wrong != nil {
				t.Error(*wrong)
			}
			if c.hung.Load() > 0 || c.whole.Load() == 0 || c.left.Load() == 0 {
				t.Error("clients hung, or nothing happened")
			}
			c.idle(quiet)
			testkit.Eventually(t, time.Minute, "nothing is left at the workers", c.first.idle) // the one that hangs is started again
			if err := c.first.app.router.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// streamed is a request for so many tokens to a mock site, with a prompt of its
// own that fills more than a fifth of the memory below.
func streamed(s *mockSite, ctx context.Context, i, tokens int) (*http.Response, error) {
	prompt := strings.Repeat(fmt.Sprintf("prompt %d of many ", i), 8)
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, prompt, tokens)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(request)
}
