package test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// status is that of a GET on the OpenAI port, over a connection of its own; 0: it
// is not answered.
func (r *Router) status(path string) int {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	response, err := client.Get(r.OpenAI + path)
	if err != nil {
		return 0
	}
	response.Body.Close()
	return response.StatusCode
}

// signal sends the program a signal.
func (r *Router) signal(s syscall.Signal) {
	r.T.Helper()
	if err := r.Command.Process.Signal(s); err != nil {
		r.T.Fatal(err)
	}
}

// stream starts a stream of so many tokens and returns when its first byte has
// come. rest reads it to its end.
func (r *Router) stream(tokens int) (rest func() string) {
	r.T.Helper()
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":"Hi"}],"stream":true,"max_tokens":%d,"ignore_eos":true}`, tokens)
	response, err := http.Post(r.OpenAI+testkit.ChatPath, "application/json", strings.NewReader(body))
	if err != nil {
		r.T.Fatal(err)
	}
	first := make([]byte, 1)
	if _, err := io.ReadFull(response.Body, first); err != nil {
		r.T.Fatal(err)
	}
	return func() string {
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			return err.Error()
		}
		return string(first) + string(text)
	}
}

func TestTerminatedRouterServesThenDrains(t *testing.T) {
	t.Parallel()
	p := StartMocker(t, 1, "--drain-delay=1s", "--drain-timeout=20s", "--speedup-ratio=4")
	rest := p.stream(1000) // of about 2 s, longer than the delay
	p.signal(syscall.SIGTERM)
	testkit.Eventually(t, 5*time.Second, "it is not ready any more", func() bool { return p.status("/ready") == http.StatusServiceUnavailable })
	if _, err := p.Chat(t.Context(), Say("during the delay"), false, 3); err != nil {
		t.Errorf("a request during the delay: %v", err)
	}
	testkit.Eventually(t, 10*time.Second, "it takes no connection any more", func() bool { return p.status("/ready") == 0 })
	if text := rest(); !strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Errorf("the stream ended with %q", text[max(0, len(text)-200):])
	}
	if code := p.WaitEnd(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestStreamThatTakesTooLongEndsWithOneErrorEvent(t *testing.T) {
	t.Parallel()
	p := StartMocker(t, 1, "--drain-delay=0s", "--drain-timeout=300ms", "--speedup-ratio=1")
	rest := p.stream(5000)
	p.signal(syscall.SIGTERM)
	text := rest()
	events := strings.Split(strings.TrimSpace(text), "\n\n")
	last := strings.TrimPrefix(events[len(events)-1], "data: ")
	if strings.Count(text, `"error"`) != 1 || gjson.Get(last, "error.code").Int() != http.StatusServiceUnavailable || !strings.Contains(last, "shutting down") {
		t.Errorf("the stream ended with %q", text[max(0, len(text)-300):])
	}
	if code := p.WaitEnd(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, delay, line string }{
		{"during the delay", "60s", "not ready, still serving"},
		{"while draining", "0s", "draining: waiting for in-flight requests"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := StartMocker(t, 1, "--drain-delay="+test.delay, "--drain-timeout=60s", "--speedup-ratio=1")
			rest := p.stream(100_000)
			p.signal(syscall.SIGTERM)
			p.says(test.line)
			p.signal(syscall.SIGTERM)
			if code := p.WaitEnd(5 * time.Second); code != -1 {
				t.Errorf("exit code %d", code)
			}
			rest()
		})
	}
}

// TestInterruptWaitsForNoBalancer: a person at the terminal is not to wait.
func TestInterruptWaitsForNoBalancer(t *testing.T) {
	t.Parallel()
	p := StartMocker(t, 1, "--drain-delay=60s")
	p.signal(syscall.SIGINT)
	if code := p.WaitEnd(15 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestHangupReloadsAndABrokenFileChangesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keys, settings := filepath.Join(dir, "keys.yaml"), filepath.Join(dir, "kvrouter.yaml")
	testkit.WriteFile(t, keys, "- {name: a, key: first-key}")
	testkit.WriteFile(t, settings, "log-level: info\nactive-decode-blocks-threshold: 0.9\n")
	ports := testkit.FreePorts(t, 6)
	args := []string{"--engine=mocker", "--num-workers=1", "--drain-delay=0s", "--api-keys-file=" + keys, "--config=" + settings, "--router-api-key=r"} // and no --log-level
	for i, flag := range []string{"http-port", "router-port", "base-worker-port", "base-kv-events-port", "base-kv-replay-port", "base-metrics-port"} {
		args = append(args, fmt.Sprintf("--%s=%d", flag, ports+i))
	}
	p := &Router{Process: Run(t, Program, nil, args...), OpenAI: fmt.Sprintf("http://127.0.0.1:%d", ports), Port: fmt.Sprintf("http://127.0.0.1:%d", ports+1)}
	testkit.Eventually(t, 20*time.Second, "the router is ready", func() bool { return p.status("/ready") == http.StatusOK })
	status := func(key string) int {
		return p.as(key, map[string]any{"messages": Say("Hi"), "max_tokens": 1}).StatusCode
	}
	thresholds := func() string {
		request, _ := http.NewRequest(http.MethodGet, p.OpenAI+"/busy_threshold", nil)
		request.Header.Set("Authorization", "Bearer r")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		return gjson.GetBytes(text, "thresholds.0.active_decode_blocks_threshold").Raw
	}
	if got := status("first-key"); got != 200 || thresholds() != "0.9" {
		t.Fatalf("%d, thresholds %s", got, thresholds())
	}
	testkit.WriteFile(t, keys, "- {name: a, key: second-key}")
	testkit.WriteFile(t, settings, "log-level: debug\nactive-decode-blocks-threshold: 0.8\n")
	p.signal(syscall.SIGHUP)
	p.says("SIGHUP: reloaded")
	if first, second := status("first-key"), status("second-key"); first != 401 || second != 200 || thresholds() != "0.8" {
		t.Errorf("the old key has %d, the new one %d, thresholds %s", first, second, thresholds())
	}
	p.says("level=DEBUG")
	testkit.WriteFile(t, keys, "- {name: a, key: third-key, limit: 1}")
	testkit.WriteFile(t, settings, "log-level: info\nactive-decode-blocks-threshold: 0.7\n")
	p.signal(syscall.SIGHUP)
	p.says("SIGHUP: reload failed, keeping the current settings")
	if second, third := status("second-key"), status("third-key"); second != 200 || third != 401 || thresholds() != "0.8" {
		t.Errorf("with a broken file the key has %d, the broken one %d, thresholds %s", second, third, thresholds())
	}
	if log := p.Log.String(); strings.Contains(log, "-key\"") || strings.Contains(log, "third-key") || strings.Contains(log, "second-key") {
		t.Error("a key is in the log")
	}
	p.signal(syscall.SIGTERM)
	if code := p.WaitEnd(15 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestLogThatNobodyReadsDoesNotEndTheRouter: head, or a log collector's restart,
// closes the pipe.
func TestLogThatNobodyReadsDoesNotEndTheRouter(t *testing.T) {
	t.Parallel()
	path, err := Program()
	if err != nil {
		t.Fatal(err)
	}
	ports := testkit.FreePorts(t, 2)
	command := exec.Command(path, "--engine=none", "--log-level=debug", "--drain-delay=0s", fmt.Sprintf("--http-port=%d", ports), fmt.Sprintf("--router-port=%d", ports+1))
	pipe, err := command.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	p := &Router{Process: &Process{T: t, Command: command, Log: &testkit.LogBuffer{}, Ended: make(chan struct{})}, OpenAI: fmt.Sprintf("http://127.0.0.1:%d", ports)}
	defer command.Process.Kill()
	testkit.Eventually(t, 20*time.Second, "it listens", func() bool { return p.status("/health") == http.StatusOK })
	pipe.Close()
	for range 5 { // each is a line
		Post(t, p.OpenAI+testkit.ChatPath, `{"messages":[]}`)
	}
	if got := p.status("/health"); got != http.StatusOK {
		t.Errorf("health is %d", got)
	}
	go func() { // until the program ends
		command.Wait()
		close(p.Ended)
	}()
	p.signal(syscall.SIGTERM)
	if code := p.WaitEnd(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	http.DefaultClient.CloseIdleConnections()
}

// TestSharedStreamThatIsCutEndsWithOneErrorEvent is of a request that two workers
// share.
func TestSharedStreamThatIsCutEndsWithOneErrorEvent(t *testing.T) {
	t.Parallel()
	s := StartPairs(t, kv.KindNIXL, 1, 1, "--drain-timeout=100ms", "--speedup-ratio=1")
	body := mocker.MustJSON(map[string]any{"messages": LongPrompt(1), "stream": true, "max_tokens": 5000, "ignore_eos": true})
	response, err := http.Post(s.OpenAI+testkit.ChatPath, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.ReadFull(response.Body, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	s.signal(syscall.SIGTERM)
	text, err := io.ReadAll(response.Body)
	if err != nil || strings.Count(string(text), `"error"`) != 1 || !strings.Contains(string(text[max(0, len(text)-300):]), "shutting down") {
		t.Errorf("the stream ended with %q, %v", text[max(0, len(text)-300):], err)
	}
	if code := s.WaitEnd(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestRequestWithoutAFirstByteIsToldToAskAgain: what the end of --drain-timeout
// cuts before it began is not lost silently.
func TestRequestWithoutAFirstByteIsToldToAskAgain(t *testing.T) {
	t.Parallel()
	arrived := make(chan bool, 1)
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
		case testkit.ChatPath:
			io.Copy(io.Discard, r.Body) // else the client's end is not seen
			arrived <- true
			<-r.Context().Done()
		default:
			http.NotFound(w, r)
		}
	}))
	defer worker.Close()
	s := Start(t, "--engine=none", "--drain-timeout=100ms", "--token-timeout=100ms", "--worker="+worker.URL)
	s.WaitReady(1, 10*time.Second)
	answers := make(chan *http.Response, 1)
	go func() {
		response, err := http.Post(s.OpenAI+testkit.ChatPath, "application/json", strings.NewReader(`{"model":"m","messages":[]}`))
		if err != nil {
			t.Error(err)
		}
		answers <- response
	}()
	<-arrived
	s.Stop()
	response := <-answers
	if response == nil {
		return
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" || !strings.Contains(string(text), "shutting down") {
		t.Errorf("%s %s", response.Status, text)
	}
}

func TestBothPortsSpeakTLS(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	defer server.Close()
	pair := server.TLS.Certificates[0]
	private, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	testkit.WriteFile(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]})))
	testkit.WriteFile(t, key, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
	s := Start(t, "--engine=none", "--tls-cert="+cert, "--tls-key="+key)
	client := server.Client()
	defer client.CloseIdleConnections()
	for _, url := range []string{s.OpenAI, s.Port} {
		response, err := client.Get(strings.Replace(url, "http:", "https:", 1) + "/health")
		if err != nil {
			t.Error(err)
			continue
		}
		response.Body.Close()
		if plain, err := http.Get(url + "/health"); response.StatusCode != http.StatusOK || err != nil || plain.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %s by TLS, %v without", url, response.Status, plain)
		} else {
			plain.Body.Close()
		}
	}
	if text, err := Output(t, "--engine=none", "--tls-cert="+cert); err == nil {
		t.Errorf("a certificate without a key is taken: %s", text)
	}
}

// balancer sends requests to the routers that are ready, as a balancer does that
// looks every few milliseconds.
type balancer struct {
	client  http.Client
	routers []atomic.Pointer[string] // URL; nil: not ready
	turn    atomic.Uint64
}

// watch looks at a router until ctx ends.
func (b *balancer) watch(ctx context.Context, i int, url string) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}
	for ctx.Err() == nil {
		response, err := client.Get(url + "/ready")
		if err == nil {
			response.Body.Close()
		}
		if err == nil && response.StatusCode == http.StatusOK {
			b.routers[i].Store(&url)
		} else {
			b.routers[i].Store(nil)
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// chat sends one chat to a ready router; err says how it was lost.
func (b *balancer) chat(i int) error {
	for range 500 {
		url := b.routers[b.turn.Add(1)%uint64(len(b.routers))].Load()
		if url == nil {
			<-time.After(time.Millisecond)
			continue
		}
		body := mocker.MustJSON(map[string]any{"messages": Say(fmt.Sprint("chat ", i%20, strings.Repeat(" words", 20))), "max_tokens": 20, "ignore_eos": true, "stream": i%2 == 0})
		response, err := b.client.Post(*url+testkit.ChatPath, "application/json", bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		switch {
		case err != nil:
			return err
		case response.StatusCode != http.StatusOK:
			return fmt.Errorf("%s: %s", response.Status, text)
		case i%2 == 0 && !bytes.HasSuffix(text, []byte("data: [DONE]\n\n")):
			return fmt.Errorf("a stream that ends with %q", text[max(0, len(text)-200):])
		}
		return nil
	}
	return errors.New("no router was ready for a long time")
}

// TestRollingRestartLosesNothing restarts two routers over four workers, one after
// the other, under 100 requests in flight.
func TestRollingRestartLosesNothing(t *testing.T) {
	farm := StartWorkers(t, 4, "--speedup-ratio=4")
	ports := testkit.FreePorts(t, 4)
	start := func(i int) *Router {
		return StartAt(t, Program, ports+2*i, nil, append([]string{"--engine=none", "--drain-delay=1500ms", "--drain-timeout=20s"}, farm.Attach()...)...)
	}
	b := &balancer{routers: make([]atomic.Pointer[string], 2)}
	b.client.Transport = &http.Transport{MaxIdleConnsPerHost: 200}
	defer b.client.CloseIdleConnections()
	ctx, stop := context.WithCancel(t.Context())
	var watching, clients sync.WaitGroup
	routers := []*Router{start(0), start(1)}
	for i := range routers {
		watching.Go(func() { b.watch(ctx, i, fmt.Sprintf("http://127.0.0.1:%d", ports+2*i)) })
	}
	ready := func(i int) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("router %d is ready", i), func() bool { return b.routers[i].Load() != nil })
	}
	ready(0)
	ready(1)
	var sent, lost atomic.Int64
	done := make(chan struct{})
	for c := range 100 {
		clients.Go(func() {
			for i := c; ; i += 100 {
				select {
				case <-done:
					return
				default:
				}
				sent.Add(1)
				if err := b.chat(i); err != nil && lost.Add(1) < 5 {
					t.Errorf("lost: %v", err)
				}
			}
		})
	}
	for i := range routers {
		routers[i].Stop()
		routers[i] = start(i)
		ready(i)
	}
	close(done)
	clients.Wait()
	stop()
	watching.Wait()
	if lost.Load() > 0 || sent.Load() < 200 {
		t.Errorf("%d of %d requests were lost", lost.Load(), sent.Load())
	}
	t.Logf("%d requests, %d lost", sent.Load(), lost.Load())
}
