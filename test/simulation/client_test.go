package simulation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
)

// client is one request of a gateway to a router.
type client struct {
	world  *world
	node   *node
	id     string
	prompt *prompt
	output int
	stream bool
	body   string
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}

	session  string // empty: none
	fellBack bool   // its prefill leg has failed; the request's goroutine uses it

	routed   bool                  // guarded by node.mu
	pairing  bool                  // a pair is being chosen; guarded by node.mu
	tries    int                   // likewise
	booked   [legs]*router.Booking // likewise, of the last decision
	beside   []*router.Booking     // likewise, of attempts beside it
	hedging  int                   // likewise, decisions on these that are asked for
	aborted  bool                  // its router has ended an attempt since the last decision; guarded by node.mu
	yields   [legs + 1]uint64      // the leg's goroutine uses it
	attempts [legs]attempt         // guarded by world.mu
	result   string                // read after done
}

// request sends a request to a node.
func (w *world) request(n *node, s step) {
	id := fmt.Sprintf("q%d", len(w.clients))
	c := &client{
		world: w, node: n, id: id, prompt: w.prompts[s.N], output: s.M, stream: s.What == doStream, done: make(chan struct{}),
		body: fmt.Sprintf(`{ "prompt":%d,"max_tokens":%d, "stream":%t}`, s.N, s.M, s.What == doStream),
	}
	if s.S > 0 {
		c.session = fmt.Sprintf("s%d", s.S)
	}
	c.ctx, c.cancel = context.WithCancel(context.WithValue(n.ctx, inquirer{}, c))
	n.mu.Lock()
	n.asked = append(n.asked, time.Now())
	n.mu.Unlock()
	w.mu.Lock()
	w.clients[id], w.inOrder = c, append(w.inOrder, c)
	w.mu.Unlock()
	if s.D > 0 {
		time.AfterFunc(s.D, c.cancel)
	}
	go c.run()
}

// run sends the request and judges the answer.
func (c *client) run() {
	defer close(c.done)
	defer c.cancel()
	began := time.Now()
	out := &recorder{header: http.Header{}}
	body, _ := jsonbody.Parse([]byte(c.body))
	x := &proxy.Exchange{ID: c.id, Route: "/v1/completions", Arrived: began}
	err := c.node.proxy.Forward(c.ctx, out, proxy.Upstream{
		Method: http.MethodPost, Path: "/v1/completions", Header: proxy.ClientHeader(http.Header{"Content-Type": {"application/json"}}, c.id, false, false),
		Body: body, Route: "/v1/completions", RequestID: c.id, MaxRetries: c.world.defaults.proxy.Retries, EndMarked: c.stream,
		Paired: c.node.router.Paired() || c.world.setup.Enforce,
	}, x, c)
	c.leave()
	tokens, fault := c.judge(out, err)
	c.result = fmt.Sprintf("%s: status %d, %d tokens, %d tries, ended %t", c.id, out.status, tokens, c.tries, err == nil)
	switch took := time.Since(began); {
	case fault != "":
		c.world.fail("%s: %s: status %d, error %v, body %q", c.id, fault, out.status, err, out.body.String())
	case c.tries > c.world.defaults.mostTries():
		c.world.fail("%s was sent to workers %d times, at most %d are allowed", c.id, c.tries, c.world.defaults.mostTries())
	case took > time.Duration(c.tries+1)*c.world.setup.longestTry():
		c.world.fail("%s took %s with %d tries", c.id, took, c.tries)
	}
}

// judge returns the number of received tokens, and the error of the answer.
func (c *client) judge(out *recorder, err error) (tokens int, fault string) {
	ended, text := false, ""
	switch {
	case err != nil && !errors.Is(err, proxy.ErrAnswered):
		if out.status != 0 {
			return 0, "something was written before an error that says nothing was"
		}
		return 0, ""
	case out.status != http.StatusOK:
		return 0, ""
	case c.stream:
		for _, event := range strings.Split(out.body.String(), "\n\n") {
			data, is := strings.CutPrefix(event, "data: ")
			if ended = ended || data == "[DONE]"; is && data != "[DONE]" {
				text += gjson.Get(data, "choices.0.text").Str
			}
		}
	default:
		ended, text = gjson.Valid(out.body.String()), gjson.Get(out.body.String(), "choices.0.text").Str
	}
	from := ""
	for i, token := range strings.Fields(text) {
		at := strings.LastIndexByte(token, '.')
		if i == 0 {
			from = token[:at]
		}
		if token[:at] != from {
			return i, "tokens of two attempts"
		}
		if n, _ := strconv.Atoi(token[at+1:]); n != i {
			return i, fmt.Sprintf("token %d where %d comes next", n, i)
		}
		tokens++
	}
	switch {
	case tokens > c.output:
		fault = "more tokens than asked for"
	case err == nil && !ended:
		fault = "an answer without an end is taken for whole"
	case err == nil && tokens != c.output:
		fault = fmt.Sprintf("an answer of %d tokens instead of %d is taken for whole", tokens, c.output)
	}
	return tokens, fault
}

// recorder is the client's side of an answer.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (r *recorder) Header() http.Header { return r.header }

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
}

// Write implements http.ResponseWriter.
func (r *recorder) Write(b []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	return r.body.Write(b)
}

// FlushError implements flushing for http.ResponseController.
func (r *recorder) FlushError() error { return nil }

// SetWriteDeadline implements deadlines for http.ResponseController.
func (r *recorder) SetWriteDeadline(time.Time) error { return nil }
