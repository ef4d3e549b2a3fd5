package proxy

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// fakeEngine is the HTTP side of one worker of a pair. It speaks its protocol,
// or fails as a test wants.
type fakeEngine struct {
	*httptest.Server
	id    uint64
	serve func(w http.ResponseWriter, r *http.Request, body gjson.Result)

	mu      sync.Mutex // guards the rest
	bodies  []string
	ids     []string // X-Request-Id of each
	rids    []string // that were aborted
	running int
}

// newFakeEngine starts an engine that answers inference requests with serve.
func newFakeEngine(t testing.TB, id uint64, serve func(w http.ResponseWriter, r *http.Request, body gjson.Result)) *fakeEngine {
	t.Helper()
	f := &fakeEngine{id: id, serve: serve}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil { // broken off within the body: no engine begins with that
		return
	}
	if r.URL.Path == "/tokenize" || strings.HasSuffix(r.URL.Path, "/render") || r.Method == http.MethodGet { // the router's own questions
		w.WriteHeader(http.StatusNotFound)
		return
	}
	f.mu.Lock()
	if r.URL.Path == "/abort_request" {
		f.rids = append(f.rids, gjson.GetBytes(body, "rid").Str)
		f.mu.Unlock()
		return
	}
	f.bodies = append(f.bodies, string(body))
	f.ids = append(f.ids, r.Header.Get(web.HeaderRequest))
	f.running++
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.running--
		f.mu.Unlock()
	}()
	f.serve(w, r, gjson.ParseBytes(body))
}

func (f *fakeEngine) received() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.bodies)
}

func (f *fakeEngine) aborted() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.rids)
}

// idle tells whether no request runs: all ended or were cancelled.
func (f *fakeEngine) idle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.running == 0
}

// asksOneToken tells whether a body allows an answer of one token only.
func asksOneToken(body gjson.Result) bool {
	return body.Get("max_tokens").Int() == 1 || body.Get("max_completion_tokens").Int() == 1
}

// fakeAnswer answers as an engine does, with the text given.
func fakeAnswer(w http.ResponseWriter, body gjson.Result, text string, extra ...jsonbody.Field) {
	usage := jsonbody.Field{Key: "usage", Raw: `{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}`}
	if !body.Get("stream").Bool() {
		reason := "stop"
		if asksOneToken(body) {
			reason = "length"
		}
		fields := append([]jsonbody.Field{{Key: "choices", Raw: fmt.Sprintf(`[{"message":{"content":%s},"finish_reason":"%s"}]`, Quoted(text), reason)}, usage}, extra...)
		w.Header().Set("Content-Type", "application/json")
		w.Write(jsonbody.AppendObject(nil, fields))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":%s}}]}\n\n", Quoted(text))
	http.NewResponseController(w).Flush()
	if body.Get("stream_options.include_usage").Bool() {
		fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":%s}\n\n", usage.Raw)
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

func fakeRefusal(w http.ResponseWriter, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	w.Write(web.DialectOpenAI.JSON(web.Fault{Status: http.StatusBadRequest, Message: message}))
}

// fakeProtocol is what the two engines of a pair share: which prompts the
// prefill side holds, or who waits for whom.
type fakeProtocol struct {
	t    testing.TB
	kind kv.Kind

	mu      sync.Mutex          // guards the rest
	meets   map[string]*meeting // by room
	held    map[string]bool     // vLLM: prompts that were computed and not fetched
	servers map[string]bool     // addresses of bootstrap servers
}

// meeting is two legs that wait for each other.
type meeting struct{ arrived [2]chan struct{} }

func newFakeProtocol(t testing.TB, kind kv.Kind) *fakeProtocol {
	return &fakeProtocol{t: t, kind: kind, meets: map[string]*meeting{}, held: map[string]bool{}, servers: map[string]bool{}}
}

// arrive notes that a leg has come.
func (p *fakeProtocol) arrive(name string, leg int) *meeting {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.meets[name]
	if m == nil {
		m = &meeting{[2]chan struct{}{make(chan struct{}), make(chan struct{})}}
		p.meets[name] = m
	}
	select {
	case <-m.arrived[leg]:
		p.t.Errorf("room %s was used twice", name)
	default:
		close(m.arrived[leg])
	}
	return m
}

// meet waits for the other leg; it tells whether that came.
func (p *fakeProtocol) meet(ctx context.Context, name string, leg int) bool {
	m := p.arrive(name, leg)
	select {
	case <-m.arrived[1-leg]:
		return true
	case <-ctx.Done():
		return false
	}
}

// prefill serves the prefill leg by the protocol.
func (p *fakeProtocol) prefill(w http.ResponseWriter, r *http.Request, body gjson.Result) {
	if p.kind == kv.KindSGLang {
		p.sglang(w, r, body, 0)
		return
	}
	params := body.Get("kv_transfer_params")
	if body.Get("stream").Bool() || !asksOneToken(body) || !body.Get("ignore_eos").Bool() || body.Get("stream_options").Exists() ||
		!params.Get("do_remote_decode").Bool() || params.Get("do_remote_prefill").Bool() {
		fakeRefusal(w, "no prefill leg: "+body.Raw)
		return
	}
	if p.kind == kv.KindMooncake {
		p.hold(params.Get("transfer_id").Str)
		fakeAnswer(w, body, "prefill")
		return
	}
	name := r.Header.Get(web.HeaderRequest) + rand.Text()
	p.hold(name)
	fakeAnswer(w, body, "prefill", jsonbody.Field{Key: "kv_transfer_params", Raw: nixlParams(name)})
}

// hold notes that the prefill side holds a prompt.
func (p *fakeProtocol) hold(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[name] {
		p.t.Errorf("transfer %s was used twice", name)
	}
	p.held[name] = true
}

// fetch tells whether the prefill side holds a prompt, and ends that.
func (p *fakeProtocol) fetch(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	held := p.held[name]
	delete(p.held, name)
	return held
}

// nixlParams is a NIXL worker's answer, with numbers and spaces that must reach
// the decode worker as they are.
func nixlParams(name string) string {
	return fmt.Sprintf(`{ "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2,3]], "remote_engine_id": %s, "tp_size": 1, "big": 18446744073709551615, "exact": 1.00 }`, Quoted(name))
}

// decode serves the decode leg by the protocol, or a whole request where the
// kind can.
func (p *fakeProtocol) decode(w http.ResponseWriter, r *http.Request, body gjson.Result) {
	if p.kind == kv.KindSGLang {
		p.sglang(w, r, body, 1)
		return
	}
	params := body.Get("kv_transfer_params")
	if !params.Exists() {
		fakeAnswer(w, body, "whole")
		return
	}
	if !params.Get("do_remote_prefill").Bool() || params.Get("do_remote_decode").Bool() {
		fakeRefusal(w, "no decode leg: "+body.Raw)
		return
	}
	if p.kind == kv.KindMooncake {
		if params.Get("remote_engine_id").Str != fakeMooncakeEngine || !p.isBootstrap(strings.TrimPrefix(params.Get("remote_bootstrap_addr").Str, "http://")) {
			fakeRefusal(w, "unknown engine: "+body.Raw)
		} else if !p.fetch(params.Get("transfer_id").Str) {
			fakeRefusal(w, "nothing is held for "+params.Raw) // a real one would wait for minutes
		} else {
			fakeAnswer(w, body, "decoded")
		}
		return
	}
	name := params.Get("remote_engine_id").Str
	if !p.fetch(name) || params.Raw != nixlParams(name) {
		fakeRefusal(w, "nothing is held for "+params.Raw)
		return
	}
	fakeAnswer(w, body, "decoded")
}

// sglang serves either leg: it answers when both have come.
func (p *fakeProtocol) sglang(w http.ResponseWriter, r *http.Request, body gjson.Result, leg int) {
	room := body.Get("bootstrap_room")
	info := body.Get("bootstrap_info")
	number, err := strconv.ParseUint(room.Raw, 10, 63)
	if err != nil || info.Get("bootstrap_room").Raw != room.Raw || info.Get("bootstrap_host").Str != body.Get("bootstrap_host").Str ||
		info.Get("bootstrap_port").Int() != body.Get("bootstrap_port").Int() || body.Get("rid").Str == "" ||
		!p.isBootstrap(net.JoinHostPort(body.Get("bootstrap_host").Str, body.Get("bootstrap_port").Raw)) {
		fakeRefusal(w, "Disaggregated request received without bootstrap room id: "+body.Raw)
		return
	}
	if p.meet(r.Context(), strconv.FormatUint(number, 10), leg) {
		fakeAnswer(w, body, []string{"prefill", "decoded"}[leg])
	}
}

// isBootstrap tells whether a prefill worker's bootstrap server is there; true
// if none was started.
func (p *fakeProtocol) isBootstrap(address string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.servers) == 0 || p.servers[address]
}

const fakeMooncakeEngine = "engine-7"

// bootstrap starts what a prefill worker's bootstrap server is to the router;
// for NIXL there is none.
func (p *fakeProtocol) bootstrap() kv.Bootstrap {
	if p.kind == kv.KindNIXL {
		return kv.Bootstrap{}
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.kind != kv.KindMooncake || r.URL.Path != "/query" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		fmt.Fprintf(w, `{"0":{"engine_id":%s,"worker_addr":{"0":{"0":"tcp://127.0.0.1:1"}}}}`, Quoted(fakeMooncakeEngine))
	}))
	p.t.Cleanup(server.Close)
	at := testkit.BootstrapAt(p.t, server)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.servers[at.String()] = true
	return at
}

// pairFleet is a proxy over prefill workers 0, 1, ... and decode workers 10, 11, ..., of one
// kind, behind a server that forwards all requests.
type pairFleet struct {
	*httptest.Server
	tally
	router          *router.Router
	proxy           *Proxy
	protocol        *fakeProtocol
	prefill, decode []*fakeEngine
	failed          chan uint64
	ended           chan *Exchange
}

// tally counts what an observer hears, by its name.
type tally struct {
	testkit.SilentObserver
	mu   sync.Mutex // guards seen
	seen map[string]int
}

func (c *tally) count(what ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen[strings.TrimSpace(fmt.Sprintln(what...))]++
}

func (c *tally) Retried(worker uint64) { c.count("retried", worker) }

func (c *tally) StayedWhole(why string) { c.count("whole", why) }

func (c *tally) Prefilled(kind kv.Kind, _ time.Duration) { c.count(kind, "prefill") }

func (c *tally) HandedOver(kind kv.Kind, _ time.Duration) { c.count(kind, "handover") }

func (c *tally) SharedEnded(kind kv.Kind, result string, first time.Duration) {
	if c.count(kind, result); first > 0 {
		c.count(kind, "transfer")
	}
}

// counted returns how often that was counted.
func (c *tally) counted(what ...any) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen[strings.TrimSpace(fmt.Sprintln(what...))]
}

// counts waits until that was counted so often.
func (c *tally) counts(t testing.TB, n int, what ...any) {
	t.Helper()
	testkit.Eventually(t, 5*time.Second, fmt.Sprint(n, " times ", what), func() bool { return c.counted(what...) == n })
}

// newPairFleet starts the proxy and its workers. The protocol serves the legs; wrap, if not nil,
// wraps what serves those of an engine.
func newPairFleet(t testing.TB, settings Settings, kind kv.Kind, prefills, decodes int, wrap func(id uint64, serve engineServe) engineServe, options ...routertest.Option) *pairFleet {
	t.Helper()
	if wrap == nil {
		wrap = func(_ uint64, serve engineServe) engineServe { return serve }
	}
	h := newFrontedFleet(t, settings, options...)
	h.protocol = newFakeProtocol(t, kind)
	add := func(engines *[]*fakeEngine, id uint64, role kv.Role, serve engineServe) {
		engine := newFakeEngine(t, id, wrap(id, serve))
		*engines = append(*engines, engine)
		target := kv.Target{Key: kv.WorkerKey{Worker: id}, URL: engine.URL, Ranks: 1, Generation: 1, Disagg: kv.Disagg{Role: role, Kind: kind}}
		if role == kv.RolePrefill {
			target.Bootstrap = h.protocol.bootstrap()
		}
		h.router.Up(target)
	}
	for i := range prefills {
		add(&h.prefill, uint64(i), kv.RolePrefill, h.protocol.prefill)
	}
	for i := range decodes {
		add(&h.decode, uint64(10+i), kv.RoleDecode, h.protocol.decode)
	}
	return h
}

// newFrontedFleet starts a proxy without workers, behind a server.
func newFrontedFleet(t testing.TB, settings Settings, options ...routertest.Option) *pairFleet {
	t.Helper()
	settings.DisaggPrefillTimeout = cmp.Or(settings.DisaggPrefillTimeout, 30*time.Second)
	settings.DisaggHandoverTimeout = cmp.Or(settings.DisaggHandoverTimeout, 30*time.Second)
	settings.RetryBudget = 100 // no request of a test finds it used up
	h := &pairFleet{router: routertest.New(t, "round-robin", 0, options...), failed: make(chan uint64, 100), ended: make(chan *Exchange, 10_000)}
	h.seen = map[string]int{}
	h.proxy = New(settings, Deps{Observer: &h.tally, Failed: func(w uint64) { h.failed <- w }, Log: slog.New(slog.DiscardHandler)})
	h.Server = httptest.NewServer(http.HandlerFunc(h.forward))
	t.Cleanup(func() {
		h.Close()
		h.proxy.Close()
		if n := routertest.InFlight(h.router); n != 0 {
			t.Errorf("%d requests are still booked", n)
		}
	})
	return h
}

// forward forwards a client's request, which may be shared, and answers where that fails.
func (h *pairFleet) forward(w http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body)
	body, _ := jsonbody.Parse(raw)
	path, id := r.URL.Path, cmp.Or(r.Header.Get(web.HeaderRequest), rand.Text())
	u := Upstream{
		Method: r.Method, Path: path, Route: path, Header: ClientHeader(r.Header, id, false, false), RequestID: id, Body: body,
		AskUsage: path == chatRoute, EndMarked: path != "/v1/audio/transcriptions", Paired: h.router.Paired(), CachedTokensMislead: ComputesAnew(body),
	}
	if h.router.Count() > 1 {
		u.MaxRetries = 1
	}
	prompt := testkit.Tokens(1, 64)
	if h.router.Several() {
		u.Migration = NewMigration(path, body, prompt, true, false, nil)
	}
	c := &fleetChooser{router: h.router, ctx: r.Context(), rule: router.PairRule{Enforce: h.proxy.settings.EnforceDisagg}}
	c.request = router.Request{Tokens: prompt, NumTokens: len(prompt), Model: "m"}
	if u.Paired {
		u.Aggregated, c.request.Kinds = WhyWhole(path, body, false, false)
	}
	x := &Exchange{ID: id, Route: path, Worker: kv.NoWorker, Arrived: time.Now()}
	err := h.proxy.Forward(r.Context(), w, u, x, c)
	if err != nil && !errors.Is(err, ErrAnswered) && r.Context().Err() == nil {
		x.Status = http.StatusBadGateway
		var late *LegTimeout
		switch {
		case errors.As(err, &late), errors.Is(err, ErrSilent):
			x.Status = http.StatusGatewayTimeout
		case errors.Is(err, router.ErrNoWorker), errors.Is(err, router.ErrNoPair):
			x.Status = http.StatusServiceUnavailable
		}
		w.WriteHeader(x.Status)
		w.Write(web.DialectOpenAI.JSON(web.Fault{Status: x.Status, Message: err.Error()}))
	}
	h.ended <- x
}

// post sends a body and returns the whole answer.
func (h *pairFleet) post(t testing.TB, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := h.Client().Do(request)
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

type engineServe func(w http.ResponseWriter, r *http.Request, body gjson.Result)

// hangsUp closes the connection without an answer.
func hangsUp(w http.ResponseWriter, r *http.Request, _ gjson.Result) { hangUp(w, r) }

// hangUp ends the connection without an answer.
func hangUp(w http.ResponseWriter, _ *http.Request) {
	connection, _, err := http.NewResponseController(w).Hijack()
	if err == nil {
		connection.Close()
	}
}

// streamHead begins an answer's stream with its first event.
func streamHead(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: %s\n\n", testkit.TokenEvent)
	http.NewResponseController(w).Flush()
}

// neverAnswers never answers.
func neverAnswers(_ http.ResponseWriter, r *http.Request, _ gjson.Result) { <-r.Context().Done() }

// answersStatus answers with a status alone.
func answersStatus(status int) engineServe {
	return func(w http.ResponseWriter, _ *http.Request, _ gjson.Result) { w.WriteHeader(status) }
}

// settled waits until no engine serves anything and nothing is booked.
func (h *pairFleet) settled(t testing.TB) {
	t.Helper()
	for _, engine := range slices.Concat(h.prefill, h.decode) {
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("worker %d idle", engine.id), engine.idle)
	}
	testkit.Eventually(t, 10*time.Second, "nothing booked", func() bool {
		return !slices.ContainsFunc(h.router.Loads(), func(l router.WorkerLoad) bool {
			return l.ActiveRequests != 0 || l.PotentialPrefillTokens != 0 || l.PotentialDecodeBlocks != 0
		})
	})
	if err := h.router.Check(); err != nil {
		t.Error(err)
	}
}

// blamed returns the workers that were reported as failed, in order.
func (h *pairFleet) blamed() []uint64 {
	var ids []uint64
	for {
		select {
		case id := <-h.failed:
			ids = append(ids, id)
		default:
			return ids
		}
	}
}

// sharedChat is a request whose prompt is long enough to be shared.
func sharedChat(stream bool, more ...jsonbody.Field) string {
	messages, _ := json.Marshal([]map[string]any{{"role": "user", "content": strings.Repeat("Why is the sky blue? ", 30)}})
	fields := append([]jsonbody.Field{{Key: "model", Raw: `"m"`}, {Key: "stream", Raw: strconv.FormatBool(stream)}, {Key: "messages", Raw: string(messages)}}, more...)
	return string(jsonbody.AppendObject(nil, fields))
}
