package gateway

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/envoy"
	"kvrouter/internal/tools/mocker"
	"kvrouter/test"
)

// pickerAt is where a test's router is an endpoint picker.
type pickerAt int

// newPicker returns a free place.
func newPicker(t testing.TB) pickerAt {
	t.Helper()
	if os.Getenv(envoy.Program) == "" {
		t.Skip("make test-gateway runs it")
	}
	return pickerAt(testkit.FreePorts(t, 2))
}

func (p pickerAt) address() string { return fmt.Sprintf("127.0.0.1:%d", int(p)) }
func (p pickerAt) health() string  { return fmt.Sprintf("127.0.0.1:%d", int(p)+1) }

// flags are those of a picker there, with others.
func (p pickerAt) flags(more ...string) []string {
	return append([]string{fmt.Sprintf("--ext-proc-port=%d", int(p)), fmt.Sprintf("--ext-proc-health-port=%d", int(p)+1)}, more...)
}

// one is flags for a gateway that takes one address.
func (p pickerAt) one(more ...string) []string {
	return p.flags(append(more, "--ext-proc-fallbacks=0")...)
}

// gateway is an Envoy and the router that is its picker. Chats go through Envoy.
type gateway struct {
	*test.Router              // as seen through Envoy
	direct       *test.Router // the router's own OpenAI port
	envoy        *envoy.Envoy
}

// behind starts an Envoy whose picker is s, at p.
func behind(s *test.Router, p pickerAt, o envoy.Options) *gateway {
	s.T.Helper()
	o.Picker = p.address()
	g := &gateway{direct: s, envoy: envoy.Start(s.T, o)}
	through := *s
	through.OpenAI = g.envoy.URL
	g.Router = &through
	g.envoy.WaitForPicker(true)
	return g
}

// do sends a request to the gateway and reads its whole answer.
func (g *gateway) do(method, path, body string, headers ...string) (*http.Response, string) {
	g.T.Helper()
	return send(g.T, method, g.envoy.URL+path, body, headers...)
}

// send sends a request with headers, names and values in turn, and reads its whole
// answer.
func send(t testing.TB, method, url, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(answer)
}

// freed waits until the router has nothing booked any more.
func (g *gateway) freed() {
	g.T.Helper()
	testkit.Eventually(g.T, 20*time.Second, "all bookings freed", func() bool {
		return !slices.ContainsFunc(g.Workers(), func(w selection.WorkerRecord) bool { return w.InFlight != 0 || w.PrefillTokens != 0 })
	})
}

// fakeArgs are the flags of a router of these workers.
func fakeArgs(workers []*testkit.FakeWorker) []string {
	args := []string{"--engine=none", "--no-kv-events", "--drain-timeout=1s"}
	for i, w := range workers {
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", w.URL, i))
	}
	return args
}

// routeFakes starts a router over workers whose answers the test gives, and waits until
// all are up.
func routeFakes(t testing.TB, workers []*testkit.FakeWorker, args ...string) *test.Router {
	t.Helper()
	s := test.Start(t, append(fakeArgs(workers), args...)...)
	s.WaitReady(len(workers), 20*time.Second)
	return s
}

// wireTap stands before a worker and keeps what comes and what goes.
type wireTap struct {
	*httptest.Server
	mu        sync.Mutex // guards what follows
	requests  map[string]string
	responses map[string]*bytes.Buffer
}

// headerTestChat names a chat to the taps.
const headerTestChat = "X-Test-Chat"

func newWireTap(t testing.TB, worker string) *wireTap {
	t.Helper()
	to, err := url.Parse(worker)
	if err != nil {
		t.Fatal(err)
	}
	r := &wireTap{requests: map[string]string{}, responses: map[string]*bytes.Buffer{}}
	transport := &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}
	carry := &httputil.ReverseProxy{Transport: transport, FlushInterval: -1, Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(to) }, ModifyResponse: func(response *http.Response) error {
		if name := response.Request.Header.Get(headerTestChat); name != "" {
			b := &bytes.Buffer{}
			r.mu.Lock()
			r.responses[name] = b
			r.mu.Unlock()
			response.Body = struct {
				io.Reader
				io.Closer
			}{io.TeeReader(response.Body, b), response.Body}
		}
		return nil
	}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if name := request.Header.Get(headerTestChat); name != "" {
			body, err := io.ReadAll(request.Body)
			if err != nil {
				return
			}
			r.mu.Lock()
			r.requests[name] = string(body)
			r.mu.Unlock()
			request.Body = io.NopCloser(bytes.NewReader(body))
		}
		carry.ServeHTTP(w, request)
	}))
	t.Cleanup(func() {
		r.Close()
		transport.CloseIdleConnections()
	})
	return r
}

// of returns what the worker was sent for a chat, and what it answered.
func (r *wireTap) of(name string) (request string, response []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if b := r.responses[name]; b != nil {
		response = b.Bytes()
	}
	return r.requests[name], response
}

// Sizes of TestGatewayAnswersAreTheWorkers.
const (
	gatewayClients       = 8
	gatewayConversations = 50 // of a client
	gatewayTurns         = 5
)

// gatewayPrompt returns the first message of a conversation, which is 1 to 100 KB, and
// what its body has besides: with that, one body in 50 has 1 MB.
func gatewayPrompt(client, conversation int) (text, note string) {
	length := []int{1, 2, 3, 4, 6, 8, 12}[(client+conversation)%7] << 10
	switch (client + conversation) % 50 {
	case 10, 30:
		length = 100 << 10
	case 20:
		note = strings.Repeat("n", 1<<20-length-8<<10)
	}
	line := fmt.Sprintf("client %d asks for the %dth time; ", client, conversation)
	return strings.Repeat(line, length/len(line)+1), note
}

// TestGatewayAnswersAreTheWorkers holds conversations through Envoy: each request
// reaches a worker as it was sent, each answer the client as the worker gave it, and
// the prediction is what the worker had cached.
func TestGatewayAnswersAreTheWorkers(t *testing.T) {
	p := newPicker(t)
	mocks := test.StartWorkers(t, 4, "--speedup-ratio=0", "--mock=num-gpu-blocks=100000", "--mock=output-tokens=16")
	var taps []*wireTap
	args := []string{"--engine=none", "--drain-timeout=5s", "--model=" + test.BuiltinModel(t), "--served-model-name=mock"}
	for i := range 4 {
		taps = append(taps, newWireTap(t, mocks.URL(i)))
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", taps[i].URL, i))
	}
	s := test.StartAt(t, test.PlainProgram, testkit.FreePorts(t, 2), nil, p.one(args...)...) // 2,000 chats take the other too long
	s.WaitReady(4, 30*time.Second)
	(&test.Mocks{Router: s, Workers: mocks, T: t}).Follow()
	g := behind(s, p, envoy.Options{})

	var mu sync.Mutex // guards what follows
	var chats, streams, cached, wrong int
	served := map[uint64]int{}
	began := time.Now()
	var clients sync.WaitGroup
	for client := range gatewayClients {
		clients.Go(func() {
			for conversation := range gatewayConversations {
				text, note := gatewayPrompt(client, conversation)
				messages := test.Say(text)
				for turn := range gatewayTurns {
					name, stream := fmt.Sprintf("%d-%d-%d", client, conversation, turn), (conversation+turn)%2 == 0
					body := map[string]any{"messages": messages, "max_tokens": 16, "metadata": map[string]string{"note": note}}
					if stream {
						body["stream"], body["stream_options"] = true, map[string]bool{"include_usage": true}
					}
					sent := string(mocker.MustJSON(body))
					response, got := g.do(http.MethodPost, testkit.ChatPath, sent, "Content-Type", "application/json", headerTestChat, name)
					a, err := test.ReadAnswer(response.Header, strings.NewReader(got), stream)
					if err != nil || response.StatusCode != http.StatusOK || !a.Finished || a.Broken || a.Worker > 3 {
						t.Errorf("chat %s: %s, %+v, %v: %.300s", name, response.Status, a, err, got)
						return
					}
					came, answered := taps[a.Worker].of(name)
					if came != sent {
						t.Errorf("chat %s: %d bytes sent, others came to worker %d, %d bytes", name, len(sent), a.Worker, len(came))
					}
					if got != string(answered) {
						t.Errorf("chat %s: worker %d answered\n%s\nthe client got\n%s", name, a.Worker, answered, got)
					}
					mu.Lock()
					chats++
					served[a.Worker]++
					cached += a.Cached
					if stream {
						streams++
					}
					if a.Predicted != a.Cached {
						wrong++
						t.Logf("chat %s: predicted %d, worker %d had %d of %d", name, a.Predicted, a.Worker, a.Cached, a.Prompt)
					}
					mu.Unlock()
					messages = append(messages, test.Say("", a.Text, "and then?")[1:]...)
					waitApplied(s, mocks, kv.WorkerKey{Worker: a.Worker})
				}
			}
		})
	}
	clients.Wait()
	t.Logf("%d chats in %s, %d streamed, served %v, %d tokens cached, %d predictions wrong", chats, time.Since(began).Round(time.Millisecond), streams, served, cached, wrong)
	if want := gatewayClients * gatewayConversations * gatewayTurns; chats != want || streams != want/2 || wrong > 0 || cached == 0 || len(served) != 4 {
		t.Errorf("want %d chats, half of them streamed, some cached, all four workers in use, no prediction wrong", want)
	}
	g.freed()
}

// waitApplied waits until the router's index has all that a rank has published so far:
// events travel apart from answers.
func waitApplied(s *test.Router, w *test.Workers, key kv.WorkerKey) {
	s.T.Helper()
	published := float64(w.Rank(key).Events.Added.Load())
	batches := func(kind string) string {
		return fmt.Sprintf(`kvrouter_kv_events_total{dp_rank="%d",kind="%s",worker_id="%d"}`, key.Rank, kind, key.Worker)
	}
	testkit.Eventually(s.T, 20*time.Second, "events applied", func() bool {
		page := s.Metrics()
		return page[batches("batches")]+page[batches("replayed_batches")] >= published
	})
	s.Metrics() // a batch is counted just before it is applied
}

// TestGatewayPredictsAsTheOpenAIPort sends the same conversations, one by one, through
// the gateway and through the router's own port, over workers too small for them.
func TestGatewayPredictsAsTheOpenAIPort(t *testing.T) {
	p := newPicker(t)
	mocks := test.StartMocks(t, 3, p.one("--mock=num-gpu-blocks=60")...)
	g := behind(mocks.Router, p, envoy.Options{})
	reused := map[string]int{}
	for way, s := range map[string]*test.Router{"gateway": g.Router, "OpenAI port": g.direct} {
		for i := range 12 {
			chat := test.Say(fmt.Sprint("topic ", way, i%4, " ", strings.Repeat("lorem ipsum ", 20+5*(i%4))))
			for turn := range 3 {
				a, err := s.Chat(t.Context(), chat, turn%2 == 0, 100)
				if err != nil || !a.Finished {
					t.Fatal(err, a)
				}
				if a.Predicted != a.Cached {
					t.Errorf("%s, chat %d turn %d: predicted %d, the worker had %d of %d", way, i, turn, a.Predicted, a.Cached, a.Prompt)
				}
				reused[way] += a.Cached
				chat = append(chat, test.Say("", a.Text, "go on")[1:]...)
				mocks.Settle()
			}
		}
	}
	if reused["gateway"] == 0 || reused["OpenAI port"] == 0 {
		t.Errorf("tokens reused: %v", reused)
	}
	g.freed()
}

// TestGatewayHoldsNothingBack has a worker that sends its next event only once the
// client has the one before. The client reads the chunks as they are on the wire.
func TestGatewayHoldsNothingBack(t *testing.T) {
	p := newPicker(t)
	got := make(chan struct{})
	var events []string
	for i := range 50 {
		events = append(events, fmt.Sprintf("data: {\"choices\":[{\"delta\":{\"content\":\"token %d\"}}]}\n\n", i))
	}
	events = append(events, "data: "+usageEvent+"\n\n", "data: [DONE]\n\n")
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, e := range events {
			io.WriteString(w, e)
			w.(http.Flusher).Flush()
			select {
			case <-got:
			case <-r.Context().Done():
				return
			}
		}
	})
	g := behind(routeFakes(t, []*testkit.FakeWorker{worker}, p.one()...), p, envoy.Options{})
	for way, at := range map[string]string{"gateway": g.envoy.URL, "worker": worker.URL} {
		chunks := rawChunks(t, strings.TrimPrefix(at, "http://"), `{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}`, func() { got <- struct{}{} })
		if !slices.Equal(chunks, events) {
			t.Errorf("%s: chunks\n%q\nwant\n%q", way, chunks, events)
		}
	}
	g.freed()
}

const usageEvent = `{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`

// rawChunks posts a chat over a connection of its own and returns the chunks of the
// answer. It calls next after each but the empty one at the end.
func rawChunks(t *testing.T, address, body string, next func()) (chunks []string) {
	t.Helper()
	conn, err := net.DialTimeout("tcp", address, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n%s: raw\r\nContent-Length: %d\r\n\r\n%s", testkit.ChatPath, web.HeaderRequest, len(body), body)
	reader := bufio.NewReader(conn)
	line := func() string {
		text, err := reader.ReadString('\n')
		if err != nil {
			t.Fatalf("after %d chunks: %v", len(chunks), err)
		}
		return strings.TrimRight(text, "\r\n")
	}
	if status := line(); !strings.HasPrefix(status, "HTTP/1.1 200") {
		t.Fatal(status)
	}
	for line() != "" {
	}
	for {
		size, err := strconv.ParseUint(line(), 16, 32)
		if err != nil {
			t.Fatal(err)
		}
		if size == 0 {
			return chunks
		}
		chunk := make([]byte, size)
		if _, err := io.ReadFull(reader, chunk); err != nil {
			t.Fatal(err)
		}
		chunks = append(chunks, string(chunk))
		line()
		next()
	}
}

// TestGatewayHidesUsageThatNobodyAskedFor: the router wants the usage of each answer,
// the client has not asked for it.
func TestGatewayHidesUsageThatNobodyAskedFor(t *testing.T) {
	p := newPicker(t)
	g := behind(test.StartMocks(t, 1, p.one()...).Router, p, envoy.Options{})
	for _, asked := range []bool{false, true} {
		_, answer := g.do(http.MethodPost, testkit.ChatPath, fmt.Sprintf(`{"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":%v}}`, asked), "Content-Type", "application/json")
		if strings.Contains(answer, `"usage":{`) != asked || !strings.HasSuffix(answer, "data: [DONE]\n\n") {
			t.Errorf("asked %v:\n%s", asked, answer)
		}
	}
	if n := g.direct.Metrics()[`kvrouter_prompt_tokens_total{worker_id="0"}`]; n != 42 {
		t.Errorf("%v prompt tokens counted, want those of two prompts of 21", n)
	}
}

// TestGatewayRealVLLM sends 20 chats of five conversations to two real workers.
func TestGatewayRealVLLM(t *testing.T) {
	p := newPicker(t)
	s := test.StartEngines(t, 2, nil, p.one()...)
	e := envoy.Start(t, envoy.Options{Picker: p.address()})
	e.WaitForPicker(true)
	through := *s
	through.OpenAI = e.URL
	cached := 0
	for i := range 5 {
		chat := test.Say(strings.Repeat(fmt.Sprintf("Conversation %d goes on and on. ", i), 25))
		for turn := range 4 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			a, err := through.Chat(ctx, chat, turn%2 == 0, 8)
			cancel()
			if err != nil || !a.Finished {
				t.Fatalf("conversation %d turn %d: %+v, %v", i, turn, a, err)
			}
			if a.Predicted != a.Cached || (a.Cached == 0) != (turn == 0) {
				t.Errorf("conversation %d turn %d: predicted %d, worker %d had %d of %d", i, turn, a.Predicted, a.Worker, a.Cached, a.Prompt)
			}
			cached += a.Cached
			s.Settled(chat, a)
			chat = append(chat, test.Say("", a.Text, "Go on.")[1:]...)
		}
	}
	t.Logf("20 chats, %d tokens cached", cached)
	testkit.Eventually(t, 20*time.Second, "all bookings freed", func() bool {
		return !slices.ContainsFunc(s.Workers(), func(w selection.WorkerRecord) bool { return w.InFlight != 0 })
	})
}
