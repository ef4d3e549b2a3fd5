package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// The chaos tests run router processes of the built program for KVROUTER_CHAOS
// (such as 10m; `make chaos` sets it) and not at all without it.

const (
	chaosLimit = 30 * time.Second
	// slowMocks has simulated workers take 15 ms for a token, so that the machine's
	// two cores suffice for all.
	slowMocks = "--speedup-ratio=4 --mock=decode-ms=60,54,-25"
)

func TestChaos(t *testing.T) {
	RunChaos(t, ChaosTime(t), ChaosSettings{Clients: soakRequests, Pace: slowMocks, Limit: time.Minute, Phase: 80 * time.Second, Long: 600})
}

// TestChaosRollingRestart restarts two routers and four workers, one after the
// other, under 100 requests. Nobody may lose an answer by it.
func TestChaosRollingRestart(t *testing.T) {
	ChaosTime(t)
	const workers = 4
	var farm []*Router
	var args []string
	worker := func(port int) []string {
		return append(strings.Fields(slowMocks), "--engine=mocker", "--num-workers=1", "--mock=shutdown-timeout=8s",
			fmt.Sprintf("--base-worker-port=%d", port+2), fmt.Sprintf("--base-kv-events-port=%d", port+3),
			fmt.Sprintf("--base-kv-replay-port=%d", port+4), fmt.Sprintf("--base-metrics-port=%d", port+5))
	}
	ports := testkit.FreePorts(t, 6*workers)
	for i := range workers {
		port := ports + 6*i
		farm = append(farm, startPlain(t, port, worker(port)...))
		farm[i].WaitReady(1, readyLimit)
		args = append(args, fmt.Sprintf("--worker=url=http://127.0.0.1:%d,id=%d", port+2, i))
	}
	routers := startRollout(t, 2, args...)
	settled := func() {
		for i := range routers.sites {
			routers.router(i).WaitReady(workers, readyLimit)
		}
	}
	settled()
	s := newSoak(nil, nil, chaosLimit)
	s.where, s.clients = routers.where, 100
	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	load.Go(func() { s.load(ctx, time.Second) })
	defer load.Wait()
	defer cancel()
	warm := func(answers int) {
		testkit.Eventually(t, chaosLimit, "answers come", func() (enough bool) {
			s.note(func() { enough = len(s.wholes) >= answers })
			return enough
		})
	}
	warm(s.clients)
	began := time.Now()
	for i := range routers.sites {
		routers.restart(i)
		settled()
	}
	for i := range farm {
		farm[i] = restart(t, farm[i], worker(ports+6*i)...)
		settled()
	}
	took := time.Since(began)
	var answered int
	s.note(func() { answered = len(s.wholes) })
	warm(answered + s.clients)
	cancel()
	load.Wait()
	t.Logf("2 routers and %d workers restarted within %s: %d answered, %d lost, refused %v, %d streams cut, %d hung; whole answer p50 %s, p99 %s, longest %s",
		workers, took.Round(time.Second), len(s.wholes), len(s.odd), s.refused, s.broken, s.hung, quantile(s.wholes, 0.5), quantile(s.wholes, 0.99), quantile(s.wholes, 1))
	if len(s.odd) > 0 || len(s.refused) > 0 || s.broken > 0 || s.hung > 0 {
		t.Errorf("not every request was answered: %q", s.odd[:min(5, len(s.odd))])
	}
}

// TestChaosMemory has a router meet what takes memory and time all at once: bodies
// that were announced and do not come, a list of token ids and prompts far beyond
// what the model takes, for 5 s. Small chats beside them may not wait.
func TestChaosMemory(t *testing.T) {
	ChaosTime(t)
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}`)
	})
	s := startPlain(t, testkit.FreePorts(t, 2), "--engine=none", "--served-model-name=m",
		"--model="+ModelFolder(), "--worker=url="+worker.URL)
	s.WaitReady(1, readyLimit)
	idle, _ := memoryOf(s.Command.Process.Pid, "VmHWM")
	for range 200 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.OpenAI, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", testkit.ChatPath, 64<<20)
	}
	send := func(path, body string) { // again and again for a while
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
			response, err := http.Post(s.OpenAI+path, "application/json", strings.NewReader(body))
			if err != nil {
				t.Errorf("%s: %v", path, err)
				return
			}
			io.Copy(io.Discard, response.Body)
			response.Body.Close()
			if response.StatusCode/100 == 5 {
				t.Errorf("%s with %d MB: %s", path, len(body)>>20, response.Status)
			}
		}
	}
	var big sync.WaitGroup
	ids := `{"model":"m","prompt":[` + strings.Repeat("1,", 10<<20) + `1]}`
	big.Go(func() { send("/v1/completions", ids) })
	text := soakText(rand.New(rand.NewPCG(1, 1)), 12<<20)
	for i := range 3 {
		big.Go(func() {
			body, _ := json.Marshal(map[string]any{"model": "m", "messages": Say(fmt.Sprint(i, " ", text))})
			send(testkit.ChatPath, string(body))
		})
	}
	done := make(chan struct{})
	go func() {
		big.Wait()
		close(done)
	}()
	var longest time.Duration
	small := 0
	for running := true; running; small++ {
		select {
		case <-done:
			running = false
		case <-time.After(20 * time.Millisecond):
		}
		began := time.Now()
		if _, err := s.Chat(t.Context(), Say(fmt.Sprint("small chat ", small)), false, 1); err != nil {
			t.Error("a small chat: ", err)
		}
		longest = max(longest, time.Since(began))
	}
	peak, _ := memoryOf(s.Command.Process.Pid, "VmHWM")
	t.Logf("peak resident memory %.0f MB (%.0f before), the longest of %d small chats %s", peak, idle, small, longest.Round(time.Millisecond))
	if peak > 250 || longest > 500*time.Millisecond || small < 10 {
		t.Error("more than 250 MB, or a small chat that waited for more than 0.5 s, or too few of them")
	}
}
