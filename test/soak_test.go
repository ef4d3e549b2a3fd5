package test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/tokenstest"
	"kvrouter/internal/tokens"
	"kvrouter/internal/web"
)

// The soak tests keep simulated workers busy through real sockets. They run for
// KVROUTER_SOAK (such as 60s; `make soak` sets it) and not at all without it.

const (
	soakRequests = 200    // in flight
	soakPrompts  = 10_000 // remembered, to look them up
	// soakPause is how long a worker may be stopped to look at its cache.
	soakPause = 300 * time.Millisecond
	// soakRest is how long a client waits that got no answer.
	soakRest = 100 * time.Millisecond
)

// soak is a run of many clients, each of which has one chat after the other:
// one of a few system prompts and several turns that carry the answers before.
type soak struct {
	workers *Workers      // that are looked at; nil: none are
	router  *Router       // whose index is held against them
	model   *tokens.Model // of the prompts
	where   func() string // URL of the port for the next request
	clients int           // each with one request in flight
	leaving float64       // share of the requests whose client goes away within a second
	client  *http.Client
	system  []string
	limit   time.Duration // no answer may take longer

	mu       sync.Mutex // guards what follows
	exact    int        // predicted as many cached tokens as the worker reported
	over     int        // predicted more
	under    int        // predicted fewer
	refused  map[int]int
	broken   int // streams that ended with an error event
	left     int // clients that went away
	hung     int
	stalled  int             // of those, after the answer had begun
	odd      []string        // neither an answer nor one clear error
	firsts   []time.Duration // of each answer, until its first byte
	wholes   []time.Duration // of each answer, until its end
	prompts  [][]map[string]string
	seen     int // of prompts, those replaced included
	cached   int
	prompted int
}

func soakTime(t *testing.T) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(os.Getenv("KVROUTER_SOAK"))
	if err != nil {
		t.Skip("set KVROUTER_SOAK=60s, or run `make soak`")
	}
	return d
}

func newSoak(workers *Workers, router *Router, limit time.Duration) *soak {
	model, err := mocker.OpenBuiltinModel()
	if err != nil {
		panic(err) // it comes with the program
	}
	s := &soak{workers: workers, router: router, model: model, where: func() string { return router.OpenAI }, clients: soakRequests, limit: limit, refused: map[int]int{}, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: soakRequests}}}
	random := rand.New(rand.NewPCG(1, 1))
	for range 40 {
		s.system = append(s.system, soakText(random, 1500))
	}
	return s
}

// soakText returns about n bytes of words.
func soakText(random *rand.Rand, n int) string {
	words := strings.Fields(mocker.Vocabulary)
	var text strings.Builder
	for text.Len() < n {
		text.WriteString(words[random.IntN(len(words))])
		text.WriteByte(' ')
	}
	return text.String()
}

// load has the clients ask until ctx ends, and waits for their last answers. They
// begin one after the other within rise: all at once would only show how many ask
// a cold worker for the same system prompt before it has computed it.
func (s *soak) load(ctx context.Context, rise time.Duration) {
	var clients sync.WaitGroup
	for i := range s.clients {
		clients.Go(func() {
			select {
			case <-time.After(rise * time.Duration(i) / time.Duration(s.clients)):
			case <-ctx.Done():
			}
			random := rand.New(rand.NewPCG(uint64(i), 2))
			for ctx.Err() == nil {
				s.converse(ctx, random)
			}
		})
	}
	clients.Wait()
	s.client.CloseIdleConnections()
}

// run has the clients ask for d, and calls every after each tick.
func (s *soak) run(d, tick time.Duration, every func(elapsed time.Duration)) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	var load sync.WaitGroup
	load.Go(func() { s.load(ctx, d/10) })
	began := time.Now()
	ticker := time.NewTicker(max(time.Second, tick))
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-ticker.C:
			every(time.Since(began))
		}
	}
	ticker.Stop()
	load.Wait()
}

// converse has one chat of some turns.
func (s *soak) converse(ctx context.Context, random *rand.Rand) {
	messages := []map[string]string{{"role": "system", "content": s.system[random.IntN(len(s.system))]}}
	for range 4 {
		if ctx.Err() != nil {
			return
		}
		messages = append(messages, map[string]string{"role": "user", "content": soakText(random, 100+random.IntN(500))})
		patience := s.limit
		if random.Float64() < s.leaving {
			patience = time.Duration(50+random.IntN(950)) * time.Millisecond
		}
		text, ok := s.ask(messages, random.IntN(2) == 0, 30+random.IntN(70), patience)
		if !ok {
			<-time.After(soakRest)
			return
		}
		messages = append(messages, map[string]string{"role": "assistant", "content": text})
	}
}

// ask sends one request to its end and counts how it ended; ok: an answer. Who has
// less patience than the limit goes away when it ends.
func (s *soak) ask(messages []map[string]string, stream bool, tokens int, patience time.Duration) (text string, ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var first time.Duration // until the answer began
	failed := func(format string, args ...any) {
		s.note(func() {
			switch {
			case ctx.Err() == nil:
				s.odd = append(s.odd, fmt.Sprintf(format, args...))
			case patience < s.limit:
				s.left++
			default:
				s.hung++
				if first > 0 {
					s.stalled++
				}
			}
		})
	}
	fields := map[string]any{"messages": messages, "max_tokens": tokens, "stream": stream}
	if stream {
		fields["stream_options"] = map[string]bool{"include_usage": true}
	}
	body := mocker.MustJSON(fields)
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.where()+testkit.ChatPath, bytes.NewReader(body))
	request.Header.Set("Content-Type", "application/json") // SGLang asks for it
	began := time.Now()
	response, err := s.client.Do(request)
	if err != nil {
		failed("%v", err)
		return "", false
	}
	defer response.Body.Close()
	first = time.Since(began)
	var u proxy.Usage
	whole, problems := false, 0
	if !stream || response.StatusCode != http.StatusOK {
		answer, err := io.ReadAll(response.Body)
		if err != nil || !gjson.ValidBytes(answer) {
			failed("%d %.100s %v", response.StatusCode, answer, err)
			return "", false
		}
		if response.StatusCode != http.StatusOK {
			s.note(func() {
				s.refused[response.StatusCode]++
				if gjson.GetBytes(answer, "error.message").Str == "" {
					s.odd = append(s.odd, string(answer))
				}
			})
			return "", false
		}
		text, u, whole = gjson.GetBytes(answer, "choices.0.message.content").Str, proxy.ReadUsage(answer), true
	} else {
		lines := bufio.NewScanner(response.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			data, found := strings.CutPrefix(lines.Text(), "data: ")
			switch {
			case !found:
			case data == "[DONE]":
				whole = true
			case strings.Contains(data, `"error"`):
				problems++
			default:
				text += gjson.Get(data, "choices.0.delta.content").Str
				if got := proxy.ReadUsage([]byte(data)); got.Known {
					u = got
				}
			}
		}
	}
	if problems > 1 || problems == 0 && (!whole || !u.Known || len(text) != u.OutputTokens) {
		failed("answer %.100q ended early or twice, %d error events, usage %+v", text, problems, u)
		return "", false
	}
	predicted, _ := strconv.Atoi(response.Header.Get(web.HeaderOverlap))
	s.note(func() {
		if problems > 0 {
			s.broken++
			return
		}
		s.firsts, s.wholes = append(s.firsts, first), append(s.wholes, time.Since(began))
		switch {
		case predicted == u.CachedTokens:
			s.exact++
		case predicted > u.CachedTokens:
			s.over++
		default:
			s.under++
		}
		s.cached += u.CachedTokens
		s.prompted += u.PromptTokens
		if at := soakSlot(s.seen); at == len(s.prompts) {
			s.prompts = append(s.prompts, messages)
		} else {
			s.prompts[at] = messages
		}
		s.seen++
	})
	return text, problems == 0
}

func (s *soak) note(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *soak) String() string {
	answers := s.exact + s.over + s.under
	return fmt.Sprintf("%d answers, %.3f %% predicted exactly (%d too many, %d too few), %.1f %% of %d prompt tokens cached; %d broken streams, refused %v, %d clients left, %d hung, %d odd",
		answers, 100*float64(s.exact)/float64(max(1, answers)), s.over, s.under, 100*float64(s.cached)/float64(max(1, s.prompted)), s.prompted, s.broken, s.refused, s.left, s.hung, len(s.odd))
}

// standing is what came out of holding the index against the workers' caches,
// prompt by prompt.
type standing struct {
	workers int // compared
	prompts int // compared, with each worker
	blocks  int // that the caches hold of them
	wrong   int // matches that go further than the cache
	missing int // matches that do not go as far
}

// matcher returns what an index matches of the n-th of some prompts.
type matcher func(n int) []kv.Match

// indexed looks prompts up at the router port.
func (s *soak) indexed(t *testing.T, prompts [][]uint64) matcher {
	return matches(s.router)(t, prompts)
}

// matches asks a router which workers hold which part of the prompts.
func matches(r *Router) func(t *testing.T, prompts [][]uint64) matcher {
	return func(t *testing.T, prompts [][]uint64) matcher {
		found := make([][]kv.Match, len(prompts))
		for n, local := range prompts {
			status, answer := Post(t, r.Port+"/overlap_scores", string(mocker.MustJSON(map[string]any{"local_hashes": local, "num_tokens": 64*len(local) + 1})))
			if status != http.StatusOK {
				t.Fatalf("POST /overlap_scores: %d %s", status, answer)
			}
			for _, w := range gjson.GetBytes(answer, "workers").Array() {
				found[n] = append(found[n], kv.Match{Worker: kv.WorkerKey{Worker: w.Get("worker_id").Uint()}, Blocks: int(w.Get("device_blocks").Int())})
			}
		}
		return func(n int) []kv.Match { return found[n] }
	}
}

// compare stops each worker's engine in turn until the index has seen all that
// it told, and holds the index against its cache; look opens the index. A worker
// that hangs or dies is left out, and so is one whose last batch was dropped: that
// only shows after a while, and its clients cannot wait as long.
func (s *soak) compare(t *testing.T, asked [][]map[string]string, look func(t *testing.T, prompts [][]uint64) matcher) (found standing) {
	t.Helper()
	var prompts, sequences [][]uint64
	for _, messages := range asked {
		tokens, err := tokenstest.Chat(s.model, mocker.MustJSON(map[string]any{"messages": messages}))
		if err != nil {
			t.Fatal(err)
		}
		local := kv.HashBlocks(nil, tokens, s.workers.Settings.BlockSize, "", "")
		prompts, sequences = append(prompts, local), append(sequences, kv.SequenceHashes(nil, local))
	}
	match := look(t, prompts)
	for i := range s.workers.Count {
		key := kv.WorkerKey{Worker: uint64(i)}
		if w := s.workers.Worker(i); w.Hung.Load() || w.Stuck.Load() {
			continue
		}
		s.workers.Rank(key).Ask(t.Context(), func(e *engine.Engine) {
			limit := time.Now().Add(soakPause)
			for !s.workers.inStep(s.router.Metrics(), key, e.Pool.Keys()) {
				if time.Now().After(limit) {
					return
				}
				<-time.After(time.Millisecond)
			}
			found.workers++
			for n, local := range prompts {
				cached := slices.IndexFunc(sequences[n], func(h uint64) bool { return e.Pool.Find(h) == 0 })
				if cached < 0 {
					cached = len(local)
				}
				indexed := blocksOf(match(n), key)
				if indexed != cached { // the index may have changed since: now it stands still
					indexed = blocksOf(look(t, prompts[n:n+1])(0), key)
				}
				found.prompts++
				found.blocks += cached
				if indexed > cached {
					found.wrong++
				} else if indexed < cached {
					found.missing++
				}
			}
		})
	}
	return found
}

// blocksOf returns the blocks that a rank holds of a prompt.
func blocksOf(matches []kv.Match, key kv.WorkerKey) int {
	for _, m := range matches {
		if m.Worker == key {
			return m.Blocks
		}
	}
	return 0
}

func (f standing) String() string {
	return fmt.Sprintf("index against the caches of %d workers: %d prompts, %d blocks cached, %d wrong, %d incomplete", f.workers, f.prompts, f.blocks, f.wrong, f.missing)
}

// look compares some of the first and of the newest prompts.
func (s *soak) look(t *testing.T) standing { return s.compare(t, s.some(), s.indexed) }

// some returns the prompts that look compares.
func (s *soak) some() (asked [][]map[string]string) {
	const some = 300
	s.note(func() {
		asked = slices.Clone(s.prompts[:min(some, len(s.prompts))])
		for i := s.seen - some; i >= 0 && i < s.seen; i++ {
			asked = append(asked, s.prompts[soakSlot(i)])
		}
	})
	return asked
}

// soakSlot is where the prompt seen as number i is kept. The first show what
// should be gone by the end, the newest what should be there.
func soakSlot(i int) int {
	if i < soakPrompts {
		return i
	}
	return soakPrompts/2 + i%(soakPrompts/2)
}

// footprint is what the router's process uses.
type footprint struct {
	goroutines int
	heap       uint64 // bytes that are reachable
}

func (f footprint) String() string {
	return fmt.Sprintf("%d goroutines, heap %d MB", f.goroutines, f.heap>>20)
}

// footprint reads the router's metrics page until two collections have run since its
// garbage was made, for 30 s at most: the least heap seen is what is reachable.
func (s *soak) footprint() footprint {
	f := footprint{heap: math.MaxUint64}
	collections := s.router.Metrics()["go_gc_duration_seconds_count"]
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		page := s.router.Metrics()
		f.goroutines, f.heap = int(page["go_goroutines"]), min(f.heap, uint64(page["go_memstats_heap_alloc_bytes"]))
		if page["go_gc_duration_seconds_count"] >= collections+3 {
			break
		}
	}
	return f
}

// startSoaked is StartMocks for a router without the race detector, whose memory counts.
func startSoaked(t *testing.T, workers int, args ...string) *Mocks {
	t.Helper()
	return StartOverAt(t, PlainProgram, testkit.FreePorts(t, 2), StartWorkers(t, workers, args...), append([]string{"--log-level=info"}, args...)...)
}

func TestSoak(t *testing.T) {
	d := soakTime(t)
	site := startSoaked(t, 8, "--speedup-ratio=10", "--mock-num-gpu-blocks=4096")
	s := newSoak(site.Workers, site.Router, 2*time.Minute)
	idle := s.footprint()
	// What fills up to its bound does so before the first look; both looks are
	// at a router without requests, so that what they hold does not count.
	s.run(d/3, d/36, func(time.Duration) {})
	s.freed(t)
	s.quiet(t, idle)
	before := s.footprint()
	s.run(d, d/12, func(elapsed time.Duration) {
		t.Logf("%3.0f s: %s, %d in flight", elapsed.Seconds(), s.footprint(), site.InFlight())
	})
	t.Log(s)
	s.freed(t)
	site.Settle()
	found := s.compare(t, s.prompts, s.indexed)
	t.Log(found)
	if found.wrong > 0 || found.missing > 0 || found.workers < 8 || found.blocks == 0 {
		t.Error("the index is not what the workers hold")
	}
	if answers := s.exact + s.over + s.under; answers == 0 || float64(s.exact) < 0.99*float64(answers) {
		t.Error("too few predictions are exact")
	}
	if s.hung > 0 || s.broken > 0 || len(s.refused) > 0 || len(s.odd) > 0 {
		t.Errorf("not every request was answered: %q", s.odd[:min(5, len(s.odd))])
	}
	s.quiet(t, idle)
	after := s.footprint()
	t.Logf("without requests: at first %s; after %.0f s %s; after %.0f s more %s", idle, (d / 3).Seconds(), before, d.Seconds(), after)
	if after.heap > before.heap+before.heap/4 {
		t.Errorf("the heap grew from %d to %d bytes", before.heap, after.heap)
	}
}

// quiet waits until the goroutines of requests and their connections have ended.
func (s *soak) quiet(t *testing.T, idle footprint) {
	t.Helper()
	testkit.Eventually(t, 15*time.Second, "goroutines gone", func() bool { return int(s.router.Metrics()["go_goroutines"]) <= idle.goroutines+20 })
}

// freed waits until no request is booked and checks that none left anything.
func (s *soak) freed(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "nothing in flight", func() bool { return s.router.InFlight() == 0 })
	for _, w := range s.router.Workers() {
		if w.PrefillTokens != 0 {
			t.Errorf("worker %d still has %d prompt tokens in flight", w.WorkerID, w.PrefillTokens)
		}
	}
}

func TestSoakWithFaults(t *testing.T) {
	d := soakTime(t)
	site := startSoaked(t, 8, "--speedup-ratio=10", "--mock-num-gpu-blocks=1536", "--request-timeout=5s",
		"--mock-drop-events=0.01", "--mock-duplicate-events=0.01", "--mock-crash-every=10s", "--mock-hang-worker=7=15s")
	s := newSoak(site.Workers, site.Router, time.Minute)
	looks := 0
	s.run(d, d/12, func(elapsed time.Duration) {
		found := s.look(t)
		t.Logf("%3.0f s: %s", elapsed.Seconds(), found)
		looks += found.workers
		if found.wrong > 0 {
			t.Error("a wrong match outlived a replay")
		}
	})
	t.Log(s)
	site.Settle() // after the last batch that was dropped, too
	found := s.compare(t, s.prompts, s.indexed)
	t.Log(found)
	if found.wrong > 0 || found.blocks == 0 || looks == 0 {
		t.Error("wrong matches are left, or nothing was compared")
	}
	if s.hung > 0 || len(s.odd) > 0 {
		t.Errorf("%d clients hung, odd answers %q", s.hung, s.odd[:min(5, len(s.odd))])
	}
	if s.exact == 0 {
		t.Error("no answers")
	}
	s.freed(t)
	gaps := 0.0
	for name, value := range site.Metrics() {
		if strings.HasPrefix(name, "kvrouter_kv_events_total{") && strings.Contains(name, `kind="gaps"`) {
			gaps += value
		}
	}
	t.Logf("%d restarts, %.0f gaps in the streams", int(site.Starts.Load())-site.Count, gaps)
}

// churn keeps two routers over the same workers busy while all about them comes
// and goes: workers that crash, workers that are registered and taken away,
// clients that leave, and the second router itself.
type churn struct {
	t     *testing.T
	first *Mocks   // has workers of its own
	farm  *Workers // that are registered with the first
	ports int      // of the second router: OpenAI, router port, replica port; then the first's replica port
	chats int      // different ones

	client  *http.Client
	whole   atomic.Int64 // answers that came to their end
	left    atomic.Int64 // clients that went away
	refused atomic.Int64 // clear errors
	broken  atomic.Int64 // answers that a dying worker or router cut short
	hung    atomic.Int64
	changes atomic.Int64 // workers registered or taken away
	routers atomic.Int64 // times that the second router was started
	moved   atomic.Int64 // requests of others that the first router has seen at a time, at most
	wrong   atomic.Pointer[string]
}

const (
	churnClients = 60
	churnWorkers = 4 // that the first router starts, and as many to be registered
	// churnFarmID is the id of the first worker that is registered.
	churnFarmID = 100
)

func TestSoakWithChurn(t *testing.T) {
	d := soakTime(t)
	c := newChurn(t)
	c.ports = testkit.FreePorts(t, 4)
	c.farm = StartWorkers(t, churnWorkers, "--speedup-ratio=10", "--mock-num-gpu-blocks=2048")
	c.first = startSoaked(t, churnWorkers, "--speedup-ratio=10", "--mock-num-gpu-blocks=2048", "--policy=kv", "--mock-crash-every=7s",
		"--replica-sync", fmt.Sprintf("--replica-sync-port=%d", c.ports+3), fmt.Sprintf("--replica-peers=127.0.0.1:%d", c.ports+2))
	quiet := c.footprint()
	c.run(d / 4)
	c.idle(quiet)
	early := c.footprint()
	c.run(d)
	c.idle(quiet)
	late := c.footprint()
	t.Logf("%d answers, %d clients left, %d refused, %d cut short, %d hung; %d workers registered or taken away, %d second routers, at most %d of their requests seen at a time",
		c.whole.Load(), c.left.Load(), c.refused.Load(), c.broken.Load(), c.hung.Load(), c.changes.Load(), c.routers.Load(), c.moved.Load())
	t.Logf("without requests: after %s %s; after %s more %s", d/4, early, d, late)
	if wrong := c.wrong.Load(); wrong != nil {
		t.Error(*wrong)
	}
	if c.hung.Load() > 0 || c.whole.Load() == 0 || c.left.Load() == 0 || c.changes.Load() == 0 || c.routers.Load() == 0 || c.moved.Load() == 0 {
		t.Error("clients hung, or nothing happened")
	}
	if late.heap > early.heap+early.heap/4+8<<20 {
		t.Errorf("the heap grew from %d to %d bytes", early.heap, late.heap)
	}
}

func newChurn(t *testing.T) *churn {
	return &churn{t: t, chats: 40, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: churnClients}}}
}

// footprint is what the first router uses without requests.
func (c *churn) footprint() footprint { return (&soak{router: c.first.Router}).footprint() }

// fail keeps the first thing that went wrong in a goroutine.
func (c *churn) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.wrong.CompareAndSwap(nil, &text)
}

// run has everything come and go for d, and ends all requests.
func (c *churn) run(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	var all sync.WaitGroup
	for i := range churnClients {
		all.Go(func() { c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 3)), c.first.OpenAI, i%3 == 0) })
		if i%3 == 0 {
			all.Go(func() {
				c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 4)), fmt.Sprintf("http://127.0.0.1:%d", c.ports), false)
			})
		}
	}
	all.Go(func() { c.register(ctx) })
	all.Go(func() {
		for c.pause(ctx, 100*time.Millisecond) {
			if n := int64(c.first.Metrics()["kvrouter_replica_bookings"]); n > c.moved.Load() {
				c.moved.Store(n)
			}
		}
	})
	c.replica(ctx)
	all.Wait()
	c.client.CloseIdleConnections()
}

// pause waits for d; not ok: ctx has ended.
func (c *churn) pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// ask sends one request after the other; leave: some clients go away before the
// end.
func (c *churn) ask(ctx context.Context, random *rand.Rand, url string, leave bool) {
	for ctx.Err() == nil {
		limit := time.Minute
		if leave {
			limit = time.Duration(1+random.IntN(150)) * time.Millisecond
		}
		text := fmt.Sprint("chat ", random.IntN(c.chats), " ", strings.Repeat("come and go ", 20+random.IntN(60)))
		c.one(url, Say(text), random.IntN(2) == 0, 20+random.IntN(100), limit, leave)
		c.pause(ctx, time.Duration(random.IntN(20))*time.Millisecond)
	}
}

// one sends a request and counts how it ended.
func (c *churn) one(url string, messages []map[string]string, stream bool, tokens int, limit time.Duration, leave bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	body := strings.NewReader(string(mocker.MustJSON(map[string]any{"messages": messages, "max_tokens": tokens, "stream": stream})))
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+testkit.ChatPath, body)
	request.Header.Set("Content-Type", "application/json")
	response, err := c.client.Do(request)
	end := ""
	if err == nil {
		defer response.Body.Close()
		lines := bufio.NewReader(response.Body)
		for err == nil {
			var line string
			if line, err = lines.ReadString('\n'); strings.TrimSpace(line) != "" {
				end = line
			}
		}
		if err == io.EOF {
			err = nil
		}
	}
	switch {
	case ctx.Err() != nil && leave:
		c.left.Add(1)
	case ctx.Err() != nil:
		c.hung.Add(1)
	case err != nil: // the second router is not there, or went away
		c.broken.Add(1)
	case response.StatusCode != http.StatusOK:
		c.refused.Add(1)
		if !strings.Contains(end, `"error"`) {
			c.fail("%s: %.200s", response.Status, end)
		}
	case stream && strings.TrimSpace(end) != "data: [DONE]":
		c.broken.Add(1)
	default:
		c.whole.Add(1)
	}
}

// register registers the farm's workers with the first router, and takes them
// away again.
func (c *churn) register(ctx context.Context) {
	random := rand.New(rand.NewPCG(5, 5))
	there := make([]bool, churnWorkers)
	toggle := func(i int) {
		source := c.farm.Settings.Ports.Sources(i, 64)[0]
		url, method, body, want := c.first.Port+"/workers", http.MethodPost, string(mocker.MustJSON(map[string]any{
			"worker_id": churnFarmID + i, "model_name": "mock", "endpoint": c.farm.URL(i), "kv_events_endpoint": source.Endpoint, "replay_endpoint": source.Replay, "block_size": 64,
		})), http.StatusCreated
		if there[i] {
			url, method, body, want = fmt.Sprintf("%s/%d", url, churnFarmID+i), http.MethodDelete, "", http.StatusOK
		}
		request, _ := http.NewRequest(method, url, strings.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			c.fail("%s %s: %v", method, url, err)
			return
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != want {
			c.fail("%s %s: %s %s", method, url, response.Status, answer)
		}
		there[i] = !there[i]
		c.changes.Add(1)
	}
	for c.pause(ctx, time.Duration(100+random.IntN(400))*time.Millisecond) {
		toggle(random.IntN(churnWorkers))
	}
	for i, is := range there {
		if is {
			toggle(i)
		}
	}
}

// replica starts the second router over the first one's workers, and ends it
// again.
func (c *churn) replica(ctx context.Context) {
	args := []string{"--engine=none", "--policy=kv", "--drain-timeout=300ms", "--replica-sync",
		fmt.Sprintf("--replica-sync-port=%d", c.ports+2), fmt.Sprintf("--replica-peers=127.0.0.1:%d", c.ports+3)}
	args = append(args, c.first.Attach()...)
	for running := true; running; {
		second := startPlain(c.t, c.ports, args...)
		c.routers.Add(1)
		running = c.pause(ctx, 3*time.Second)
		second.Stop()
	}
}

// idle waits until nothing is booked on the first router and nothing runs any
// more that requests have started.
func (c *churn) idle(quiet footprint) {
	c.t.Helper()
	(&soak{router: c.first.Router}).freed(c.t)
	http.DefaultClient.CloseIdleConnections()
	(&soak{router: c.first.Router}).quiet(c.t, quiet)
}
