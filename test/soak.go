package test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/tokenstest"
	"kvrouter/internal/tools/engine"
	"kvrouter/internal/tools/mocker"
)

const (
	soakRequests = 200    // in flight
	soakMost     = 1000   // connections that are kept
	soakPrompts  = 10_000 // remembered, to look them up
	// soakPause is how long a worker may be stopped to look at its cache.
	soakPause = 300 * time.Millisecond
	// soakRest is how long a client waits that got no answer.
	soakRest = 100 * time.Millisecond
)

// digits are what differs between messages of one kind.
var digits = regexp.MustCompile(`[0-9]+`)

// soak is a run of many clients, each of which has one chat after the other:
// one of a few system prompts and several turns that carry the answers before.
type soak struct {
	workers *Workers      // that are looked at; nil: none are
	router  *Router       // whose index is held against them
	model   *tokens.Model // of the prompts
	where   func() string // URL of the port for the next request
	clients int           // each with one request in flight
	leaving float64       // share of the requests whose client goes away within a second
	// a gateway is in front, whose own errors are text, and which ends a connection where the router would end the stream by an error event
	gateway bool
	client  *http.Client
	system  []string
	limit   time.Duration // no answer may take longer

	mu       sync.Mutex // guards what follows
	exact    int        // predicted as many cached tokens as the worker reported
	over     int        // predicted more
	under    int        // predicted fewer
	refused  map[int]int
	texts    map[string]int // of those, by what they said
	broken   int            // streams that ended with an error event
	cut      int            // answers whose connection the gateway ended before they did
	left     int            // clients that went away
	hung     int
	stalled  int             // of those, after the answer had begun
	late     []string        // of those, which
	odd      []string        // neither an answer nor one clear error
	firsts   []time.Duration // of each streamed answer, until its first byte
	wholes   []time.Duration // of each answer, until its end
	prompts  [][]map[string]string
	seen     int // of prompts, those replaced included
	cached   int
	prompted int
}

func newSoak(workers *Workers, router *Router, limit time.Duration) *soak {
	model, err := mocker.OpenBuiltinModel()
	if err != nil {
		panic(err) // it comes with the program
	}
	s := &soak{workers: workers, router: router, model: model, where: func() string { return router.OpenAI }, clients: soakRequests,
		limit: limit, refused: map[int]int{}, texts: map[string]int{},
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: soakMost}}}
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
		text, ok := s.ask(messages, random.IntN(2) == 0, 30+random.IntN(70), patience, 0)
		if !ok {
			<-time.After(soakRest)
			return
		}
		messages = append(messages, map[string]string{"role": "assistant", "content": text})
	}
}

// ask sends one request to its end and counts how it ended; ok: an answer. Who has
// less patience than the limit goes away when it ends. The client reads nothing of the
// answer until it has paused.
func (s *soak) ask(messages []map[string]string, stream bool, tokens int, patience, pause time.Duration) (text string, ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var first time.Duration // until the answer began
	worker, began := "", time.Now()
	failed := func(err error, format string, args ...any) {
		s.note(func() {
			switch {
			case ctx.Err() == nil && s.gateway && first > 0 && errors.Is(err, io.ErrUnexpectedEOF):
				s.cut++
			case ctx.Err() == nil:
				s.odd = append(s.odd, fmt.Sprintf(format, args...))
			case patience < s.limit:
				s.left++
			default:
				s.hung++
				if first > 0 {
					s.stalled++
				}
				s.late = append(s.late, fmt.Sprintf("begun at %s, streamed: %v, worker %q, first byte after %s", began.Format(time.TimeOnly), stream,
					worker, first.Round(time.Millisecond)))
			}
		})
	}
	fields := map[string]any{"messages": messages, "max_tokens": tokens, "stream": stream}
	if stream {
		fields["stream_options"] = map[string]bool{"include_usage": true}
	}
	body := mocker.MustJSON(fields)
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.where()+testkit.ChatPath, bytes.NewReader(body))
	request.Header.Set("Content-Type", "application/json") // SGLang requires it
	response, err := s.client.Do(request)
	if err != nil {
		failed(err, "%v", err)
		return "", false
	}
	defer response.Body.Close()
	first, worker = time.Since(began), response.Header.Get(web.HeaderWorker)
	if pause > 0 {
		<-time.After(pause)
	}
	var u proxy.Usage
	var cut error // that ended the stream
	whole, problems := false, 0
	if !stream || response.StatusCode != http.StatusOK {
		answer, err := io.ReadAll(response.Body)
		if s.gateway && err == nil && response.StatusCode/100 == 5 &&
			(len(answer) == 0 || strings.HasPrefix(response.Header.Get("Content-Type"), "text/plain")) {
			s.note(func() {
				s.refused[response.StatusCode]++
				s.texts[fmt.Sprintf("%d %.150s", response.StatusCode, answer)]++
			})
			return "", false
		}
		if err != nil || !gjson.ValidBytes(answer) {
			failed(err, "%d %.100s %v", response.StatusCode, answer, err)
			return "", false
		}
		if response.StatusCode != http.StatusOK {
			s.note(func() {
				s.refused[response.StatusCode]++
				message := gjson.GetBytes(answer, "error.message").Str
				if message == "" {
					s.odd = append(s.odd, string(answer))
				}
				s.texts[fmt.Sprintf("%d %.150s", response.StatusCode, digits.ReplaceAllString(message, "#"))]++
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
		cut = lines.Err()
	}
	if problems > 1 || problems == 0 && (!whole || !u.Known || len(text) != u.OutputTokens) {
		failed(cut, "answer %.100q ended early or twice, %d error events, usage %+v, %v", text, problems, u, cut)
		return "", false
	}
	predicted, _ := strconv.Atoi(response.Header.Get(web.HeaderOverlap))
	s.note(func() {
		if problems > 0 {
			s.broken++
			return
		}
		if s.wholes = append(s.wholes, time.Since(began)); stream {
			s.firsts = append(s.firsts, first)
		}
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
	return fmt.Sprintf("%d answers, %.3f %% predicted exactly (%d too many, %d too few), %.1f %% of %d prompt tokens cached; %d broken "+
		"streams, refused %v, %d clients left, %d hung, %d odd",
		answers, 100*float64(s.exact)/float64(max(1, answers)), s.over, s.under, 100*float64(s.cached)/float64(max(1, s.prompted)), s.prompted,
		s.broken, s.refused, s.left, s.hung, len(s.odd))
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
			status, answer := Post(t, r.Port+"/overlap_scores", string(mocker.MustJSON(map[string]any{"local_hashes": local,
				"num_tokens": 64*len(local) + 1})))
			if status != http.StatusOK {
				t.Fatalf("POST /overlap_scores: %d %s", status, answer)
			}
			for _, w := range gjson.GetBytes(answer, "workers").Array() {
				found[n] = append(found[n], kv.Match{Worker: kv.WorkerKey{Worker: w.Get("worker_id").Uint()},
					Blocks: int(w.Get("device_blocks").Int())})
			}
		}
		return func(n int) []kv.Match { return found[n] }
	}
}

// compare stops each worker's engine in turn until the index has seen all that
// it published, and compares the index with its cache; look opens the index. A worker
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
	return fmt.Sprintf("index against the caches of %d workers: %d prompts, %d blocks cached, %d wrong, %d incomplete", f.workers, f.prompts,
		f.blocks, f.wrong, f.missing)
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
