package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
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

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
)

// routerProcess is a running kvrouter over mock workers.
type routerProcess struct {
	*site
	t *testing.T
}

// startProcess starts kvrouter and waits until so many workers are ready. It ends
// with the test.
func startProcess(t *testing.T, workers int, args ...string) *routerProcess {
	t.Helper()
	path, err := plainProgram()
	if err != nil {
		t.Fatal(err)
	}
	ports := testkit.FreePorts(t, 2+4*workers)
	all := []string{fmt.Sprintf("--http-port=%d", ports), fmt.Sprintf("--router-port=%d", ports+1)}
	if workers > 0 {
		all = append(all, "--engine=mocker", fmt.Sprintf("--num-workers=%d", workers),
			fmt.Sprintf("--base-worker-port=%d", ports+2), fmt.Sprintf("--base-kv-events-port=%d", ports+2+workers),
			fmt.Sprintf("--base-kv-replay-port=%d", ports+2+2*workers), fmt.Sprintf("--base-metrics-port=%d", ports+2+3*workers))
	}
	p := &routerProcess{t: t, site: &site{
		t: t, command: exec.Command(path, append(all, args...)...), log: &testkit.LogBuffer{}, ended: make(chan struct{}),
		openAI: fmt.Sprintf("http://127.0.0.1:%d", ports), selection: fmt.Sprintf("http://127.0.0.1:%d", ports+1),
	}}
	p.command.Stdout, p.command.Stderr = p.log, p.log
	if err := p.command.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.command.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		p.command.Process.Kill()
		<-p.ended
		http.DefaultClient.CloseIdleConnections()
		if t.Failed() {
			t.Logf("end of the log:\n%s", p.log.Tail())
		}
	})
	testkit.Eventually(t, 20*time.Second, "the router is ready", func() bool {
		return p.status("/ready") == http.StatusOK
	})
	return p
}

// status is that of a GET on the OpenAI port, over a connection of its own; 0: it
// is not answered.
func (p *routerProcess) status(path string) int {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	response, err := client.Get(p.openAI + path)
	if err != nil {
		return 0
	}
	response.Body.Close()
	return response.StatusCode
}

func (p *routerProcess) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.command.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// over waits for the process's end and returns its exit code, -1 after a signal.
func (p *routerProcess) over(limit time.Duration) int {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(limit):
		p.t.Fatalf("still there %s later", limit)
	}
	return p.command.ProcessState.ExitCode()
}

// says waits for a line of the log.
func (p *routerProcess) says(text string) {
	p.t.Helper()
	testkit.Eventually(p.t, 10*time.Second, "the log says: "+text, func() bool { return strings.Contains(p.log.String(), text) })
}

// stream starts a stream of so many tokens and returns when its first byte has
// come. rest reads it to its end.
func (p *routerProcess) stream(tokens int) (rest func() string) {
	p.t.Helper()
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":"Hi"}],"stream":true,"max_tokens":%d,"ignore_eos":true}`, tokens)
	response, err := http.Post(p.openAI+testkit.ChatPath, "application/json", strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	first := make([]byte, 1)
	if _, err := io.ReadFull(response.Body, first); err != nil {
		p.t.Fatal(err)
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
	p := startProcess(t, 1, "--drain-delay=1s", "--drain-timeout=20s", "--speedup-ratio=4")
	rest := p.stream(1000) // of about 2 s, longer than the delay
	p.signal(syscall.SIGTERM)
	testkit.Eventually(t, 5*time.Second, "it is not ready any more", func() bool { return p.status("/ready") == http.StatusServiceUnavailable })
	if _, err := p.chat(t.Context(), say("during the delay"), false, 3); err != nil {
		t.Errorf("a request during the delay: %v", err)
	}
	testkit.Eventually(t, 10*time.Second, "it takes no connection any more", func() bool { return p.status("/ready") == 0 })
	if text := rest(); !strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Errorf("the stream ended with %q", text[max(0, len(text)-200):])
	}
	if code := p.over(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestStreamThatTakesTooLongEndsWithOneErrorEvent(t *testing.T) {
	p := startProcess(t, 1, "--drain-delay=0s", "--drain-timeout=300ms", "--speedup-ratio=1")
	rest := p.stream(5000)
	p.signal(syscall.SIGTERM)
	text := rest()
	events := strings.Split(strings.TrimSpace(text), "\n\n")
	last := strings.TrimPrefix(events[len(events)-1], "data: ")
	if strings.Count(text, `"error"`) != 1 || gjson.Get(last, "error.code").Int() != http.StatusServiceUnavailable || !strings.Contains(last, "shutting down") {
		t.Errorf("the stream ended with %q", text[max(0, len(text)-300):])
	}
	if code := p.over(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	for _, test := range []struct{ name, delay, line string }{
		{"during the delay", "60s", "not ready any more"},
		{"while draining", "0s", "draining: running requests"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := startProcess(t, 1, "--drain-delay="+test.delay, "--drain-timeout=60s", "--speedup-ratio=1")
			rest := p.stream(100_000)
			p.signal(syscall.SIGTERM)
			p.says(test.line)
			p.signal(syscall.SIGTERM)
			if code := p.over(5 * time.Second); code != -1 {
				t.Errorf("exit code %d", code)
			}
			rest()
		})
	}
}

// TestInterruptWaitsForNoBalancer: a person at the terminal is not to wait.
func TestInterruptWaitsForNoBalancer(t *testing.T) {
	p := startProcess(t, 1, "--drain-delay=60s")
	p.signal(syscall.SIGINT)
	if code := p.over(15 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestHangupReloadsAndABrokenFileChangesNothing(t *testing.T) {
	dir := t.TempDir()
	keys, settings := filepath.Join(dir, "keys.yaml"), filepath.Join(dir, "kvrouter.yaml")
	testkit.WriteFile(t, keys, "- {name: a, key: first-key}")
	testkit.WriteFile(t, settings, "log-level: info\nactive-decode-blocks-threshold: 0.9\n")
	p := startProcess(t, 1, "--drain-delay=0s", "--api-keys-file="+keys, "--config="+settings, "--router-api-key=r")
	status := func(key string) int {
		return p.with(t, key, testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}`)
	}
	thresholds := func() string {
		request, _ := http.NewRequest(http.MethodGet, p.openAI+"/busy_threshold", nil)
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
	p.says("nothing is reloaded")
	if second, third := status("second-key"), status("third-key"); second != 200 || third != 401 || thresholds() != "0.8" {
		t.Errorf("with a broken file the key has %d, the broken one %d, thresholds %s", second, third, thresholds())
	}
	if log := p.log.String(); strings.Contains(log, "-key\"") || strings.Contains(log, "third-key") || strings.Contains(log, "second-key") {
		t.Error("a key is in the log")
	}
	p.signal(syscall.SIGTERM)
	if code := p.over(15 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// with posts a body with a key and returns the status.
func (p *routerProcess) with(t *testing.T, key, path, body string) int {
	t.Helper()
	request, _ := http.NewRequest(http.MethodPost, p.openAI+path, strings.NewReader(body))
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

// TestLogThatNobodyReadsDoesNotEndTheRouter: head, or a log collector's restart,
// closes the pipe.
func TestLogThatNobodyReadsDoesNotEndTheRouter(t *testing.T) {
	path, err := plainProgram()
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
	defer command.Process.Kill()
	p := &routerProcess{t: t, site: &site{t: t, command: command, openAI: fmt.Sprintf("http://127.0.0.1:%d", ports), ended: make(chan struct{})}}
	testkit.Eventually(t, 20*time.Second, "it listens", func() bool { return p.status("/health") == http.StatusOK })
	pipe.Close()
	for range 5 { // each is a line
		post(t, p.openAI+testkit.ChatPath, `{"messages":[]}`)
	}
	if got := p.status("/health"); got != http.StatusOK {
		t.Errorf("health is %d", got)
	}
	go func() {
		command.Wait()
		close(p.ended)
	}()
	p.signal(syscall.SIGTERM)
	if code := p.over(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	http.DefaultClient.CloseIdleConnections()
}

// TestSharedStreamThatIsCutEndsWithOneErrorEvent is of a request that two workers
// share.
func TestSharedStreamThatIsCutEndsWithOneErrorEvent(t *testing.T) {
	s := startMockPairs(t, kv.KindNIXL, 1, 1, "--drain-timeout=100ms", "--speedup-ratio=1")
	body := mocker.MustJSON(map[string]any{"messages": longPrompt(1), "stream": true, "max_tokens": 5000, "ignore_eos": true})
	response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.ReadFull(response.Body, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.end() }()
	text, err := io.ReadAll(response.Body)
	if err != nil || strings.Count(string(text), `"error"`) != 1 || !strings.Contains(string(text[max(0, len(text)-300):]), "shutting down") {
		t.Errorf("the stream ended with %q, %v", text[max(0, len(text)-300):], err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestRequestWithoutAFirstByteIsToldToAskAgain: what the end of --drain-timeout
// cuts before it began is not lost silently.
func TestRequestWithoutAFirstByteIsToldToAskAgain(t *testing.T) {
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
	s := startApp(t, testkit.FreePorts(t, 2), "--engine=none", "--drain-timeout=100ms", "--token-timeout=100ms", "--worker="+worker.URL)
	testkit.Eventually(t, 10*time.Second, "the worker is up", func() bool { return len(s.app.router.Targets()) == 1 })
	answers := make(chan *http.Response, 1)
	go func() {
		response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", strings.NewReader(`{"model":"m","messages":[]}`))
		if err != nil {
			t.Error(err)
		}
		answers <- response
	}()
	<-arrived
	if err := s.end(); err != nil {
		t.Error(err)
	}
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
	s := startApp(t, testkit.FreePorts(t, 2), "--engine=none", "--tls-cert="+cert, "--tls-key="+key)
	client := server.Client()
	defer client.CloseIdleConnections()
	for _, url := range []string{s.openAI, s.selection} {
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
	if _, _, err := parseConfig([]string{"--engine=none", "--tls-cert=" + cert}, testMachine(t)); err == nil {
		t.Error("a certificate without a key is taken")
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
		body := mocker.MustJSON(map[string]any{"messages": say(fmt.Sprint("chat ", i%20, strings.Repeat(" words", 20))), "max_tokens": 20, "ignore_eos": true, "stream": i%2 == 0})
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
	farm := startMockSite(t, 4, "--speedup-ratio=4")
	ports := testkit.FreePorts(t, 4)
	start := func(i int) (end func() error) {
		args := []string{"--engine=none", "--drain-delay=500ms", "--drain-timeout=20s", fmt.Sprintf("--http-port=%d", ports+2*i), fmt.Sprintf("--router-port=%d", ports+2*i+1)}
		for w := range 4 {
			args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", farm.workerURL(w), w))
		}
		_, end = runApp(t, io.Discard, args...)
		return end
	}
	b := &balancer{routers: make([]atomic.Pointer[string], 2)}
	b.client.Transport = &http.Transport{MaxIdleConnsPerHost: 200}
	defer b.client.CloseIdleConnections()
	ctx, stop := context.WithCancel(t.Context())
	var watching, clients sync.WaitGroup
	ends := []func() error{start(0), start(1)}
	for i := range ends {
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
	for range 2 {
		for i := range ends {
			if err := ends[i](); err != nil {
				t.Error(err)
			}
			ends[i] = start(i)
			ready(i)
		}
	}
	close(done)
	clients.Wait()
	stop()
	watching.Wait()
	for _, end := range ends {
		if err := end(); err != nil {
			t.Error(err)
		}
	}
	if lost.Load() > 0 || sent.Load() < 200 {
		t.Errorf("%d of %d requests were lost", lost.Load(), sent.Load())
	}
	t.Logf("%d requests, %d lost", sent.Load(), lost.Load())
}
