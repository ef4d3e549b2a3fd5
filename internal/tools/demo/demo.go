// Package demo generates traffic for a demonstration of the router: conversations, agents
// whose prompts share long prefixes, clients that disconnect, and occasional failures of
// a worker.
package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/serve/keys"
)

const (
	// clientsPerWorker and maxClients bound the clients, each of which has one request
	// at a time.
	clientsPerWorker, maxClients = 3, 64
	// requestLimit is the time that a request may take.
	requestLimit = 2 * time.Minute
	// maxAnswer bounds an answer that is read, bytes.
	maxAnswer = 1 << 20
)

// Settings describe the traffic and its target.
type Settings struct {
	OpenAI  http.Handler // gets the requests
	Model   string
	Workers int
	Seed    uint64
	// Break makes a worker answer every request with that status; 0: normally.
	Break func(worker, status int)
	// Crash ends a worker, which then restarts.
	Crash func(worker int)
	Log   *slog.Logger

	pace time.Duration // in place of a second, in tests
}

// Run generates traffic until ctx is done, and returns when all requests have
// ended.
func Run(ctx context.Context, s Settings) {
	if s.pace == 0 {
		s.pace = time.Second
	}
	var all sync.WaitGroup
	for i := range min(maxClients, clientsPerWorker*max(1, s.Workers)) {
		all.Go(func() {
			c := client{Settings: s, random: rand.New(rand.NewPCG(s.Seed, uint64(i)))}
			c.live(ctx)
		})
	}
	all.Go(func() { s.trouble(ctx) })
	all.Wait()
}

// trouble makes one worker after the other fail for a while, and every third time
// crash.
func (s *Settings) trouble(ctx context.Context) {
	random := rand.New(rand.NewPCG(s.Seed, 1<<32))
	for round := 0; s.sleep(ctx, 25+random.Float64()*20); round++ {
		worker := random.IntN(max(1, s.Workers))
		if round%3 == 2 {
			s.Log.Info("demo: a worker crashes", "worker", worker)
			s.Crash(worker)
			continue
		}
		s.Log.Info("demo: a worker fails for a while", "worker", worker)
		s.Break(worker, http.StatusInternalServerError)
		s.sleep(ctx, 10+random.Float64()*5)
		s.Break(worker, 0)
	}
}

// sleep waits for that many seconds; not ok: ctx has ended.
func (s *Settings) sleep(ctx context.Context, seconds float64) (ok bool) {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(time.Duration(seconds * float64(s.pace))):
		return true
	}
}

// ErrCrash is the cause of a crash by the demo.
var ErrCrash = errors.New("crash of the demo")

// client is one user at a time.
type client struct {
	Settings
	random *rand.Rand
}

// message is one of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// live plays one user after the other.
func (c *client) live(ctx context.Context) {
	for c.sleep(ctx, 2*c.random.Float64()) {
		switch what := c.random.Float64(); {
		case what < 0.5:
			c.converse(ctx)
		case what < 0.85:
			c.act(ctx)
		default:
			c.complete(ctx)
		}
	}
}

// converse is a person's chat: some turns, with time to read and to think.
func (c *client) converse(ctx context.Context) {
	chat := []message{{"system", "You are the assistant of " + places[c.random.IntN(len(places))] + ". " +
		text(uint64(c.random.IntN(4)), 180)}}
	for range 2 + c.random.IntN(5) {
		chat = append(chat, message{"user", c.words(8 + c.random.IntN(50))})
		answer, ok := c.chat(ctx, chat, 30+c.random.IntN(120))
		if !ok || !c.sleep(ctx, 0.5+3*c.random.Float64()) {
			return
		}
		chat = append(chat, message{"assistant", answer})
	}
}

// act is an agent: a long list of tools that all of its kind share, then quick steps.
func (c *client) act(ctx context.Context) {
	chat := []message{{"system", "You are an agent. Your tools are: " + text(100+uint64(c.random.IntN(3)), 900)},
		{"user", c.words(20 + c.random.IntN(40))}}
	for range 3 + c.random.IntN(6) {
		answer, ok := c.chat(ctx, chat, 15+c.random.IntN(40))
		if !ok || !c.sleep(ctx, 0.1+0.4*c.random.Float64()) {
			return
		}
		chat = append(chat, message{"assistant", answer}, message{"user", "The tool says: " + c.words(30+c.random.IntN(120))})
	}
}

// complete is a single prompt whose answer comes whole.
func (c *client) complete(ctx context.Context) {
	c.send(ctx, "/v1/completions", map[string]any{"model": c.Model, "prompt": "Continue: " + c.words(40+c.random.IntN(200)),
		"max_tokens": 20 + c.random.IntN(60)})
}

// chat sends a chat and returns the answer. Now and then the client leaves before its
// end.
func (c *client) chat(ctx context.Context, chat []message, tokens int) (answer string, ok bool) {
	if c.random.Float64() < 0.04 {
		leaving, cancel := context.WithTimeout(ctx, time.Duration((0.05+0.5*c.random.Float64())*float64(c.pace)))
		defer cancel()
		ctx = leaving
	}
	body, ok := c.send(ctx, "/v1/chat/completions", map[string]any{"model": c.Model, "messages": chat, "max_tokens": tokens, "stream": true})
	return streamed(body), ok
}

// send has the router answer a request; not ok: it did not, or not well.
func (c *client) send(ctx context.Context, path string, body map[string]any) (answer []byte, ok bool) {
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(keys.Inside(ctx), requestLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, path, bytes.NewReader(raw))
	if err != nil {
		return nil, false
	}
	request.RequestURI = path
	request.Header.Set("Content-Type", "application/json")
	w := &writer{ResponseRecorder: httptest.ResponseRecorder{Body: new(bytes.Buffer), Code: http.StatusOK}}
	c.OpenAI.ServeHTTP(w, request)
	return w.Body.Bytes(), w.Code == http.StatusOK && ctx.Err() == nil
}

// errTooLong ends an answer that is longer than maxAnswer.
var errTooLong = errors.New("the answer is too long")

// writer keeps an answer of a bounded length.
type writer struct{ httptest.ResponseRecorder }

// Write implements io.Writer.
func (w *writer) Write(b []byte) (int, error) {
	if w.Body.Len()+len(b) > maxAnswer {
		return 0, errTooLong
	}
	return w.ResponseRecorder.Write(b)
}

// WriteString implements io.StringWriter.
func (w *writer) WriteString(s string) (int, error) { return io.WriteString(struct{ io.Writer }{w}, s) }

// streamed is the text of a stream.
func streamed(events []byte) string {
	var out strings.Builder
	for line := range bytes.Lines(events) {
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			out.WriteString(gjson.GetBytes(data, "choices.0.delta.content").String())
		}
	}
	return out.String()
}
