package gateway

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/envoy"
	"kvrouter/test"
)

const gatewayChat = `{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":3}`

// wantRefusal checks an answer that the picker gives itself.
func wantRefusal(t *testing.T, response *http.Response, answer string, status int, retry bool) {
	t.Helper()
	refusal := gjson.Get(answer, "error")
	if response.StatusCode != status || (response.Header.Get("Retry-After") != "") != retry || !strings.HasPrefix(response.Header.Get("Content-Type"), "application/json") ||
		refusal.Get("message").Str == "" || refusal.Get("type").Str == "" || refusal.Get("code").Int() != int64(status) {
		t.Errorf("%s, %v\n%s\nwant %d in OpenAI's shape, Retry-After: %v", response.Status, response.Header, answer, status, retry)
	}
}

// fakeWorkers returns so many that answer a chat with their number.
func fakeWorkers(t *testing.T, n int) (workers []*testkit.FakeWorker, addresses []string) {
	t.Helper()
	for i := range n {
		workers = append(workers, testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"worker":%d}`, i)
		}))
		addresses = append(addresses, workers[i].Listener.Addr().String())
	}
	return workers, addresses
}

// subsetOf is the header of a subset hint: a text with commas for a string, a list else.
func subsetOf(t *testing.T, hint any) string {
	t.Helper()
	value, err := structpb.NewValue(hint)
	if err != nil {
		t.Fatal(err)
	}
	text, err := proto.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString(text)
}

func TestGatewayObeysTheSubset(t *testing.T) {
	p := newPicker(t)
	workers, at := fakeWorkers(t, 4)
	g := behind(routeFakes(t, workers, p.one("--policy=round-robin")...), p, envoy.Options{})
	const nobody = "127.0.0.9:1"
	for name, test := range map[string]struct {
		hint any
		want []string // who serves; none: 503
	}{
		"a list":                   {[]any{at[1], at[2]}, []string{"1", "2"}},
		"a text":                   {at[0] + "," + at[3], []string{"0", "3"}},
		"a text with blanks":       {at[0] + ", " + at[3], []string{"0", "3"}},
		"one":                      {[]any{at[2]}, []string{"2"}},
		"one of ours, one unknown": {[]any{nobody, at[1]}, []string{"1"}},
		"none of ours":             {[]any{nobody}, nil},
		"none of ours, as a text":  {nobody, nil},
	} {
		t.Run(name, func(t *testing.T) {
			served := map[string]bool{}
			for range 8 {
				response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json", envoy.SubsetHeader, subsetOf(t, test.hint))
				if test.want == nil {
					wantRefusal(t, response, answer, http.StatusServiceUnavailable, true)
					continue
				}
				served[gjson.Get(answer, "worker").Raw] = true
			}
			if len(served) != len(test.want) || slices.ContainsFunc(test.want, func(w string) bool { return !served[w] }) {
				t.Errorf("served by %v, want %v", served, test.want)
			}
		})
	}
	g.freed()
}

// streamed sends chat i, whose answer of so many tokens streams.
func streamed(ctx context.Context, url string, i, tokens int) (*http.Response, error) {
	prompt := strings.Repeat(fmt.Sprintf("prompt %d of many ", i), 8)
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, prompt, tokens)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(request)
}

// streamHead begins an answer that streams, by its first token.
func streamHead(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: %s\n\n", testkit.TokenEvent)
	http.NewResponseController(w).Flush()
}

// TestGatewayShedsLoad fills two slow workers beyond their threshold.
func TestGatewayShedsLoad(t *testing.T) {
	p := newPicker(t)
	g := behind(test.StartMocks(t, 2, p.one("--policy=kv", "--block-size=4", "--mock=num-gpu-blocks=64", "--speedup-ratio=0.01", "--active-decode-blocks-threshold=0.2")...).Router, p, envoy.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	var streaming sync.WaitGroup
	for i := range 2 {
		streaming.Go(func() {
			if response, err := streamed(ctx, g.OpenAI, i, 8); err == nil {
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
		})
		testkit.Eventually(t, 10*time.Second, "the request is on its way", func() bool { return g.InFlight() == i+1 })
	}
	response, err := streamed(ctx, g.OpenAI, 2, 8)
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(response.Body)
	response.Body.Close()
	wantRefusal(t, response, string(answer), http.StatusTooManyRequests, true)
	if response.Header.Get("X-Llm-D-Request-Dropped-Reason") == "" {
		t.Error("no reason is given")
	}
	cancel()
	streaming.Wait()
	g.freed()
}

// TestGatewayWithoutWorkersIs503 drains the only worker: the picker is asked, and has none.
func TestGatewayWithoutWorkersIs503(t *testing.T) {
	p := newPicker(t)
	workers, _ := fakeWorkers(t, 1)
	g := behind(routeFakes(t, workers, p.one()...), p, envoy.Options{})
	workers[0].Close()
	refused := 0
	testkit.Eventually(t, 30*time.Second, "the picker has no worker", func() bool {
		response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json")
		if response.Header.Get("X-Llm-D-Request-Dropped-Reason") == "" {
			return false // Envoy's own: it could not reach the worker
		}
		wantRefusal(t, response, answer, http.StatusServiceUnavailable, true)
		refused++
		return true
	})
	for _, at := range []string{p.address(), p.health()} { // a gateway is to hear it from the picker
		wantHealth(t, at, insecure.NewCredentials(), grpc_health_v1.HealthCheckResponse_SERVING)
	}
	g.freed()
}

// TestGatewayKeepsSessionsAndRenamesModels sends what llm-d's clients send in headers.
func TestGatewayKeepsSessionsAndRenamesModels(t *testing.T) {
	p := newPicker(t)
	workers, _ := fakeWorkers(t, 3)
	g := behind(routeFakes(t, workers, p.one("--policy=round-robin", "--served-model-name=m")...), p, envoy.Options{})
	response, served := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json")
	token := response.Header.Get(proxy.HeaderSession)
	for range 5 {
		if _, again := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json", proxy.HeaderSession, token); again != served {
			t.Errorf("the session went from %s to %s", served, again)
		}
	}
	if _, other := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json"); other == served {
		t.Errorf("without the session the turn is %s's again", other)
	}
	renamed := strings.Replace(gatewayChat, `"m"`, `"alias"`, 1)
	if _, answer := g.do(http.MethodPost, testkit.ChatPath, renamed, "Content-Type", "application/json", "x-llm-d-model-name-rewrite", "m"); !strings.HasPrefix(answer, `{"worker":`) {
		t.Errorf("renamed: %s", answer)
	}
	for i, w := range workers {
		w.Mu.Lock()
		if bodies := strings.Join(w.Bodies, ""); strings.Contains(bodies, "alias") {
			t.Errorf("worker %d was sent %s", i, bodies)
		}
		w.Mu.Unlock()
	}
	g.freed()
}

// TestGatewayFallsBack closes one of three workers, which the router does not know yet:
// Envoy tries the next of the list.
func TestGatewayFallsBack(t *testing.T) {
	p := newPicker(t)
	workers, at := fakeWorkers(t, 3)
	g := behind(routeFakes(t, workers, p.flags("--policy=round-robin")...), p, envoy.Options{Workers: at})
	workers[1].Close()
	served := map[string]int{}
	for range 9 {
		response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json")
		if response.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", response.Status, answer)
		}
		worker := gjson.Get(answer, "worker").Raw
		if said := response.Header.Get(web.HeaderWorker); said != worker {
			t.Errorf("worker %s has answered, the header says %q", worker, said)
		}
		served[worker]++
	}
	if served["1"] > 0 || served["0"]+served["2"] != 9 {
		t.Errorf("served by %v", served)
	}
	g.freed()
}

// TestGatewayFreesWhatAClientLeft: clients leave while they send, while they wait, and
// in the midst of their answer.
func TestGatewayFreesWhatAClientLeft(t *testing.T) {
	p := newPicker(t)
	began := make(chan bool, 10)
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Test-Silent") == "" {
			streamHead(w)
		}
		began <- true
		<-r.Context().Done()
		began <- false
	})
	g := behind(routeFakes(t, []*testkit.FakeWorker{worker}, p.one()...), p, envoy.Options{})
	for _, silent := range []string{"", "yes"} {
		ctx, cancel := context.WithCancel(t.Context())
		request, _ := http.NewRequestWithContext(ctx, http.MethodPost, g.envoy.URL+testkit.ChatPath, strings.NewReader(`{"model":"m","messages":[],"stream":true}`))
		request.Header.Set("X-Test-Silent", silent)
		left := make(chan error, 1)
		go func() {
			response, err := http.DefaultClient.Do(request)
			if err == nil {
				_, err = io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			left <- err
		}()
		<-began
		if n := g.InFlight(); n != 1 {
			t.Errorf("silent %q: %d requests booked, want 1", silent, n)
		}
		cancel()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("silent %q: %v", silent, err)
		}
		g.freed()
		<-began // the worker has been told, too
	}

	// Half a body, and no more.
	half, rest := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, g.envoy.URL+testkit.ChatPath, half)
	left := make(chan error, 1)
	go func() {
		_, err := http.DefaultClient.Do(request)
		left <- err
	}()
	if _, err := io.WriteString(rest, `{"model":"m","messages":[{"role":"user","content":"Hi`); err != nil {
		t.Fatal(err)
	}
	cancel()
	rest.Close()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	g.freed()
	if n := len(worker.Received()); n != 2 {
		t.Errorf("%d requests have come to the worker, want 2", n)
	}
}

// TestGatewayWithoutItsPicker kills the picker, in the midst of a stream, and starts it
// again.
func TestGatewayWithoutItsPicker(t *testing.T) {
	for _, open := range []bool{true, false} {
		t.Run(map[bool]string{true: "FailOpen", false: "FailClose"}[open], func(t *testing.T) {
			p := newPicker(t)
			began, end := make(chan struct{}, 1), make(chan struct{})
			worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Test-Long") != "" {
					streamHead(w)
					select {
					case <-end:
						io.WriteString(w, "data: [DONE]\n\n")
					case <-r.Context().Done():
					}
					return
				}
				io.WriteString(w, `{"worker":0}`)
			})
			args := p.flags("--engine=none", "--no-kv-events", "--worker=url="+worker.URL)
			port := testkit.FreePorts(t, 2)
			s := test.StartAt(t, test.PlainProgram, port, nil, args...)
			s.WaitReady(1, 20*time.Second)
			e := envoy.Start(t, envoy.Options{Picker: p.address(), Open: open, Workers: []string{worker.Listener.Addr().String()}})
			e.WaitForPicker(true)
			ask := func() (*http.Response, string) {
				return send(t, http.MethodPost, e.URL+testkit.ChatPath, gatewayChat, "Content-Type", "application/json")
			}
			if response, answer := ask(); response.StatusCode != http.StatusOK || response.Header.Get(web.HeaderWorker) != "0" {
				t.Fatalf("%s %v %s", response.Status, response.Header, answer)
			}
			broken := make(chan string, 1)
			go func() {
				request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, e.URL+testkit.ChatPath, strings.NewReader(gatewayChat))
				request.Header.Set("X-Test-Long", "yes")
				response, err := http.DefaultClient.Do(request)
				if err != nil {
					began <- struct{}{}
					broken <- err.Error()
					return
				}
				defer response.Body.Close()
				first := make([]byte, 10)
				_, _ = io.ReadFull(response.Body, first)
				began <- struct{}{}
				rest, err := io.ReadAll(response.Body)
				broken <- fmt.Sprintf("%s, then %v", append(first, rest...), err)
			}()
			<-began
			s.Kill()
			select {
			case how := <-broken:
				t.Logf("the stream that was on its way: %s", how)
				if strings.Contains(how, "DONE") {
					t.Error("the stream has ended as if it were whole")
				}
			case <-time.After(10 * time.Second):
				t.Error("the stream that was on its way hangs")
			}
			close(end)
			e.WaitForPicker(false)
			for range 3 {
				response, answer := ask()
				if open && (response.StatusCode != http.StatusOK || answer != `{"worker":0}` || response.Header.Get(web.HeaderWorker) != "") {
					t.Errorf("FailOpen: %s %v %s", response.Status, response.Header, answer)
				}
				if !open && response.StatusCode/100 != 5 {
					t.Errorf("FailClose: %s %s", response.Status, answer)
				}
			}
			test.StartAt(t, test.PlainProgram, port, nil, args...).WaitReady(1, 20*time.Second)
			e.WaitForPicker(true)
			testkit.Eventually(t, 10*time.Second, "the picker picks again", func() bool {
				response, _ := ask()
				return response.StatusCode == http.StatusOK && response.Header.Get(web.HeaderWorker) == "0"
			})
		})
	}
}

// TestGatewayPassesAllKindsOfRequests: what the router knows to be for a worker reaches
// one byte for byte, with what else there is around a body. The rest it answers itself, as
// on its own port.
func TestGatewayPassesAllKindsOfRequests(t *testing.T) {
	p := newPicker(t)
	type met struct {
		method, path, kind, body string
		trailer                  http.Header
	}
	came := make(chan met, 10)
	worker := testkit.NewFakeWorker(t, nil)
	own := worker.Config.Handler
	worker.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(headerTestChat) == "" || r.URL.Path == "/v1/models" { // the router asks
			own.ServeHTTP(w, r)
			return
		}
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Test-Sum")
		w.Header().Set("Content-Type", "text/plain")
		_, _ = w.Write(append([]byte("answer to "), body...))
		w.Header().Set("X-Test-Sum", "seven")
		came <- met{r.Method, r.URL.RequestURI(), r.Header.Get("Content-Type"), string(body), r.Trailer}
	})
	g := behind(routeFakes(t, []*testkit.FakeWorker{worker}, p.one("--allow-engine-admin")...), p, envoy.Options{})
	form := "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n" + strings.Repeat("\x00\xff", 100_000) + "\r\n--b--\r\n"
	for name, test := range map[string]struct {
		met
		own int // status of the router's own answer; 0: a worker answers
	}{
		"the models":               {met: met{method: http.MethodGet, path: "/v1/models"}, own: http.StatusOK},
		"a route of nobody":        {met: met{method: http.MethodPut, path: "/files/a", kind: "application/octet-stream", body: strings.Repeat("\x00\x01", 70_000)}, own: http.StatusNotFound},
		"a chat that is no JSON":   {met: met{method: http.MethodPost, path: testkit.ChatPath, kind: "application/json", body: "no JSON"}, own: http.StatusBadRequest},
		"a chat without a body":    {met: met{method: http.MethodPost, path: testkit.ChatPath}, own: http.StatusBadRequest},
		"embeddings":               {met: met{method: http.MethodPost, path: "/v1/embeddings", kind: "application/json", body: `{"model":"m","input":["a","b"]}`}},
		"a form":                   {met: met{method: http.MethodPost, path: "/v1/audio/transcriptions", kind: "multipart/form-data; boundary=b", body: form}},
		"a chat of unknown length": {met: met{method: http.MethodPost, path: testkit.ChatPath, kind: "application/json", body: gatewayChat, trailer: http.Header{}}},
		"a chat with a trailer":    {met: met{method: http.MethodPost, path: testkit.ChatPath, kind: "application/json", body: gatewayChat, trailer: http.Header{"X-Test-Count": {"9"}}}},
	} {
		t.Run(name, func(t *testing.T) {
			var body io.Reader
			if test.body != "" {
				body = strings.NewReader(test.body)
			}
			if test.trailer != nil {
				body = struct{ io.Reader }{body} // of unknown length: in chunks
			}
			request, _ := http.NewRequestWithContext(t.Context(), test.method, g.envoy.URL+test.path, body)
			request.Header.Set(headerTestChat, name)
			if test.kind != "" {
				request.Header.Set("Content-Type", test.kind)
			}
			request.Trailer = test.trailer
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := io.ReadAll(response.Body)
			response.Body.Close()
			if test.own != 0 {
				if err != nil || response.StatusCode != test.own || !gjson.ValidBytes(answer) || len(came) > 0 {
					t.Errorf("%s, %v, %d came to the worker: %.200s", response.Status, err, len(came), answer)
				}
				return
			}
			if err != nil || response.StatusCode != http.StatusOK || string(answer) != "answer to "+test.body {
				t.Errorf("%s, %v, %d bytes: %.200s", response.Status, err, len(answer), answer)
			}
			if got := response.Trailer.Get("X-Test-Sum"); got != "seven" {
				t.Errorf("the answer's trailer is %q", got)
			}
			if len(came) == 0 {
				t.Fatal("nothing has come to the worker")
			}
			got := <-came
			if got.method != test.method || got.path != test.path || got.kind != test.kind || got.body != test.body || got.trailer.Get("X-Test-Count") != test.trailer.Get("X-Test-Count") {
				t.Errorf("came: %s %s %s, %d bytes, trailer %v", got.method, got.path, got.kind, len(got.body), got.trailer)
			}
		})
	}
	g.freed()
}

func TestGatewayRefusesBodiesThatAreTooLarge(t *testing.T) {
	p := newPicker(t)
	workers, _ := fakeWorkers(t, 1)
	g := behind(routeFakes(t, workers, p.one("--max-body-bytes=100000")...), p, envoy.Options{})
	body := func(n int) string {
		return `{"model":"m","messages":[],"x":"` + strings.Repeat("x", n) + `"}`
	}
	for _, chunked := range []bool{false, true} {
		for n, want := range map[int]int{90_000: http.StatusOK, 110_000: http.StatusRequestEntityTooLarge, 3_000_000: http.StatusRequestEntityTooLarge} {
			var reader io.Reader = strings.NewReader(body(n))
			if chunked {
				reader = struct{ io.Reader }{reader}
			}
			response, err := http.Post(g.envoy.URL+testkit.ChatPath, "application/json", reader)
			if err != nil {
				t.Fatalf("%d bytes, chunked %v: %v", n, chunked, err)
			}
			answer, _ := io.ReadAll(response.Body)
			response.Body.Close()
			if want != http.StatusOK {
				wantRefusal(t, response, string(answer), want, false)
			} else if response.StatusCode != want {
				t.Errorf("%d bytes, chunked %v: %s %s", n, chunked, response.Status, answer)
			}
		}
	}
	if n := len(workers[0].Received()); n != 2 {
		t.Errorf("%d requests have come to the worker, want 2", n)
	}
	g.freed()
}

// TestGatewayTakesLargeBodies: Envoy may tell of the last piece of such a body twice.
func TestGatewayTakesLargeBodies(t *testing.T) {
	p := newPicker(t)
	workers, _ := fakeWorkers(t, 1)
	g := behind(routeFakes(t, workers, p.one()...), p, envoy.Options{})
	var sent []string
	for i := range 20 {
		sent = append(sent, fmt.Sprintf(`{"model":"m","messages":[],"i":%d,"x":"%s"}`, i, strings.Repeat("x", 1<<20+i*150_000)))
		var body io.Reader = strings.NewReader(sent[i])
		if i%2 == 1 {
			body = struct{ io.Reader }{body} // of unknown length: in chunks
		}
		response, err := http.Post(g.envoy.URL+testkit.ChatPath, "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if string(answer) != `{"worker":0}` {
			t.Errorf("%d bytes: %s %s", len(sent[i]), response.Status, answer)
		}
	}
	if !slices.Equal(workers[0].Received(), sent) {
		t.Error("other bodies have come to the worker")
	}
	g.freed()
}

func TestGatewayAsksForKeys(t *testing.T) {
	p := newPicker(t)
	workers, _ := fakeWorkers(t, 1)
	g := behind(routeFakes(t, workers, p.one("--api-key=right")...), p, envoy.Options{})
	for key, want := range map[string]int{"": 401, "Bearer wrong": 401, "Bearer right": 200} {
		response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json", "Authorization", key)
		if response.StatusCode != want || want == 401 && gjson.Get(answer, "error.type").Str != "invalid_api_key" {
			t.Errorf("%q: %s %s", key, response.Status, answer)
		}
	}
	if n := len(workers[0].Received()); n != 1 {
		t.Errorf("%d requests have come to the worker, want 1", n)
	}
}

func TestGatewaySpeaksTLSToThePicker(t *testing.T) {
	p := newPicker(t)
	workers, _ := fakeWorkers(t, 1)
	g := behind(routeFakes(t, workers, p.one("--ext-proc-tls")...), p, envoy.Options{TLS: true})
	if response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json"); answer != `{"worker":0}` {
		t.Errorf("%s %s", response.Status, answer)
	}
	wantHealth(t, p.address(), credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}), grpc_health_v1.HealthCheckResponse_SERVING)
}

// TestGatewayPickerTellsItsHealth asks for it on both ports.
func TestGatewayPickerTellsItsHealth(t *testing.T) {
	p := newPicker(t)
	workers, _ := fakeWorkers(t, 1)
	routeFakes(t, workers, p.flags()...)
	for _, at := range []string{p.address(), p.health()} {
		wantHealth(t, at, insecure.NewCredentials(), grpc_health_v1.HealthCheckResponse_SERVING)
	}
}

// wantHealth asks a picker for the health of each service that gateways ask for.
func wantHealth(t *testing.T, address string, by credentials.TransportCredentials, want grpc_health_v1.HealthCheckResponse_ServingStatus) {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(by))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, service := range []string{"", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
		answer, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
		if err != nil || answer.Status != want {
			t.Errorf("%s: service %q: %v, %v", address, service, answer.GetStatus(), err)
		}
	}
}

// TestGatewayConformance has the request say where it goes, as the conformance tests of
// the Gateway API Inference Extension do.
func TestGatewayConformance(t *testing.T) {
	p := newPicker(t)
	workers, at := fakeWorkers(t, 3)
	g := behind(routeFakes(t, workers, p.one("--ext-proc-conformance")...), p, envoy.Options{})
	for i, address := range at {
		response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json", "test-epp-endpoint-selection", address)
		if answer != fmt.Sprintf(`{"worker":%d}`, i) || response.Header.Get("X-Conformance-Test-Served-Endpoint") != address {
			t.Errorf("to worker %d: %s %v", i, answer, response.Header)
		}
	}
	g.freed()
}

// TestGatewayNamesThePrefillWorker has a decode worker with a sidecar like llm-d's: it
// has the worker that the picker names compute the prompt, and then answers.
func TestGatewayNamesThePrefillWorker(t *testing.T) {
	p := newPicker(t)
	prefill := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"kv_transfer_params":{"remote":1}}`) })
	sidecar := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		leg, err := http.NewRequestWithContext(r.Context(), http.MethodPost, "http://"+r.Header.Get("X-Prefiller-Host-Port")+r.URL.Path, strings.NewReader(`{"leg":"prefill"}`))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		leg.Header.Set(web.HeaderRequest, r.Header.Get(web.HeaderRequest))
		response, err := http.DefaultClient.Do(leg)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer response.Body.Close()
		_, _ = io.Copy(w, response.Body)
	})
	s := test.Start(t, p.one("--engine=none", "--no-kv-events", "--disagg-min-uncached-tokens=0", "--drain-timeout=1s",
		"--worker=url="+prefill.URL+",id=0,role=prefill,kind=nixl", "--worker=url="+sidecar.URL+",id=1,role=decode,kind=nixl")...)
	s.WaitReady(2, 20*time.Second)
	g := behind(s, p, envoy.Options{})
	response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json")
	if answer != `{"kv_transfer_params":{"remote":1}}` {
		t.Errorf("%s %s", response.Status, answer)
	}
	if got := prefill.Received(); !slices.Equal(got, []string{`{"leg":"prefill"}`}) {
		t.Errorf("the prefill worker got %q", got)
	}
	if got := sidecar.Received(); !slices.Equal(got, []string{gatewayChat}) {
		t.Errorf("the sidecar got %q", got)
	}
	g.freed()
}

// TestGatewayPassesErrorsOfWorkersOn: a worker's own refusal is the client's answer.
func TestGatewayPassesErrorsOfWorkersOn(t *testing.T) {
	p := newPicker(t)
	const refusal = `{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}`
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadRequest)
		io.WriteString(w, refusal)
	})
	g := behind(routeFakes(t, []*testkit.FakeWorker{worker}, p.one()...), p, envoy.Options{})
	if response, answer := g.do(http.MethodPost, testkit.ChatPath, gatewayChat, "Content-Type", "application/json"); response.StatusCode != http.StatusBadRequest || answer != refusal {
		t.Errorf("%s %s", response.Status, answer)
	}
	g.freed()
}
