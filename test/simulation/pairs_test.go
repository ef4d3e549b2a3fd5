package simulation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/tools/engine"
)

// transferPort is where a worker hands prompts over to others.
const transferPort = 8998

// keptLimit is how long a vLLM worker keeps a prompt that is not fetched, and joinLimit how
// long one leg of an SGLang pair waits for the other.
const keptLimit, joinLimit = 6 * time.Second, 4 * time.Second

// transfer is what a request to a vLLM worker says about its other leg.
type transfer struct {
	Keep      bool   `json:"do_remote_decode"`
	Fetch     bool   `json:"do_remote_prefill"`
	ID        string `json:"transfer_id"`       // with Mooncake
	Request   string `json:"remote_request_id"` // with NIXL
	Engine    string `json:"remote_engine_id"`
	Host      string `json:"remote_host"`
	Port      int    `json:"remote_port"`
	Bootstrap string `json:"remote_bootstrap_addr"`
}

// leg returns the leg of a request that a worker gets, the name of the room in which its
// legs meet, and where a decode worker fetches the prompt.
func (w *worker) leg(q *ask, name string) (leg kv.Leg, id, from string) {
	t, host := q.Transfer, ""
	query := url.Values{"prompt": {strconv.Itoa(q.Prompt)}}
	switch {
	case q.Room != nil && w.role.Role == kv.RolePrefill:
		return kv.LegPrefill, strconv.FormatUint(*q.Room, 10), ""
	case q.Room != nil:
		id, host = strconv.FormatUint(*q.Room, 10), fmt.Sprintf("http://%s:%d", q.RoomHost, q.RoomPort)
	case t == nil:
		return kv.LegWhole, "", ""
	case t.Keep:
		return kv.LegPrefill, cmp.Or(t.ID, name), ""
	default:
		id, host = cmp.Or(t.ID, t.Request), cmp.Or(t.Bootstrap, fmt.Sprintf("http://%s:%d", t.Host, t.Port))
		query.Set("engine", t.Engine)
	}
	query.Set("id", id)
	return kv.LegDecode, id, host + "/transfer?" + query.Encode()
}

// passedOver reports whether n may have no request for worker i, so that none is its trial. A
// prompt of which nearly all is cached goes whole to one worker, others to a pair.
func (w *world) passedOver(n *node, i int) bool {
	if w.setup.Kind == kv.KindNone {
		return false
	}
	role := w.workers[i].role
	for _, p := range w.prompts[:prompts] {
		cached := 0
		for _, m := range n.tree.Match(p.local, len(p.local), kv.AllParts, nil) {
			if w.workers[m.Worker.Worker].role.Takes(kv.LegWhole) {
				cached = max(cached, m.Blocks)
			}
		}
		least := p.length - cached*blockSize // some policies count a block less
		whole, shared := max(least, 1+(p.length-1)%blockSize) < w.setup.LeastUncached, least >= w.setup.LeastUncached
		if whole && role.Takes(kv.LegWhole) || shared && (role.Takes(kv.LegPrefill) || role.Takes(kv.LegDecode)) {
			return false
		}
	}
	return true
}

// judgeLeg holds a request that has come against what its client has sent and against the
// worker's role.
func (w *worker) judgeLeg(id string, body []byte, q *ask, leg kv.Leg) {
	sent := w.world.bodyOf(id)
	same := string(body) == sent
	switch {
	case leg == kv.LegPrefill && w.role.Kind != kv.KindSGLang: // rewritten: one token of the same prompt
		same = strings.HasPrefix(sent, fmt.Sprintf(`{ "prompt":%d,`, q.Prompt)) && q.Output == 1 && !q.Stream
	case leg != kv.LegWhole: // fields were added before the client's
		same = strings.HasSuffix(string(body), sent[1:])
	case w.world.setup.Enforce:
		w.world.fail("worker %d got %s whole, which must be shared", w.id, id)
	}
	if !same {
		w.world.fail("worker %d got the body %s of %s, want %s", w.id, body, id, sent)
	}
	if !w.role.Takes(leg) {
		w.world.fail("worker %d, whose role is %s, got leg %d of %s", w.id, w.role.Role, leg, id)
	}
}

// room is where the legs of a request meet at its prefill worker.
type room struct {
	prompt   int           // that of the prefill leg
	users    int           // the room is gone with the last
	asked    bool          // a decode worker has come
	joined   chan struct{} // closed then
	computed chan struct{} // closed when the prompt can be fetched
	left     chan struct{} // closed when it has been, or the decode worker has gone
	over     chan struct{} // closed when it is kept no more
}

// enter returns the room of that name; nil: there is none and none is to be made.
func (w *worker) enter(id string, create bool) *room {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rooms[id]
	if r == nil {
		if !create {
			return nil
		}
		r = &room{joined: make(chan struct{}), computed: make(chan struct{}), left: make(chan struct{}), over: make(chan struct{})}
		w.rooms[id] = r
	}
	r.users++
	return r
}

// leave ends enter.
func (w *worker) leave(id string, r *room) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.users--; r.users == 0 && w.rooms[id] == r {
		delete(w.rooms, id)
	}
}

// letGo ends a prefill leg: its prompt is kept no more.
func (w *worker) letGo(id string, r *room, request *engine.Request) {
	close(r.over)
	w.leave(id, r)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.engine.Abort(request)
	w.signal()
}

// engineID names the incarnation of that number.
func (w *worker) engineID(generation int) string { return fmt.Sprintf("%s.%d", w.host, generation) }

// sides serves the requests of other workers, and those of routers to the bootstrap server.
func (w *worker) sides(out http.ResponseWriter, r *http.Request) {
	w.running.Add(1)
	defer w.running.Done()
	w.mu.Lock()
	engine := w.engineID(w.generation)
	w.mu.Unlock()
	if r.URL.Path == "/query" {
		fmt.Fprintf(out, `{"0":{"engine_id":"%s"}}`, engine)
		return
	}
	query := r.URL.Query()
	var in *room
	if named := query.Get("engine"); named == "" || named == engine {
		in = w.enter(query.Get("id"), w.role.Kind == kv.KindSGLang)
	}
	if in == nil {
		http.Error(out, "nothing is kept under that name", http.StatusNotFound)
		return
	}
	defer w.leave(query.Get("id"), in)
	w.mu.Lock()
	asked := in.asked
	in.asked = true
	w.mu.Unlock()
	if asked {
		w.world.fail("worker %d: two decode workers fetch prompt %s of one request", w.id, query.Get("prompt"))
		return
	}
	defer close(in.left)
	close(in.joined)
	select {
	case <-r.Context().Done():
		return
	case <-in.over:
	case <-in.computed:
	case <-time.After(joinLimit):
	}
	select {
	case <-in.computed:
	default:
		http.Error(out, "the prompt did not arrive", http.StatusGone)
		return
	}
	if strconv.Itoa(in.prompt) != query.Get("prompt") {
		w.world.fail("worker %d: prompt %d is fetched for prompt %s", w.id, in.prompt, query.Get("prompt"))
	}
	out.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(out).Flush()
	select {
	case <-r.Context().Done():
	case <-in.over:
	}
}

// prefill computes a prompt for another worker. The engine has got the request.
func (w *worker) prefill(ctx context.Context, out http.ResponseWriter, q *ask, in *room, id string, request *engine.Request, generation int, how mode) {
	kept := false
	defer func() {
		if !kept {
			w.letGo(id, in, request)
		}
	}()
	select {
	case <-ctx.Done():
		panic(http.ErrAbortHandler)
	case <-request.Tag.(*call).emit:
	}
	if how == breaks {
		panic(http.ErrAbortHandler)
	}
	close(in.computed)
	params := ""
	if w.role.Kind == kv.KindSGLang { // it answers once the prompt has been fetched
		if !wait(ctx, in.left, joinLimit) {
			http.Error(out, `{"error":{"message":"nothing has fetched the prompt","code":500}}`, http.StatusInternalServerError)
			return
		}
	} else {
		params = fmt.Sprintf(`,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"%s","remote_request_id":"%s","remote_host":"%s","remote_port":%d}`,
			w.engineID(generation), id, w.host, transferPort)
		kept = true
		w.running.Go(func() {
			defer w.letGo(id, in, request)
			if wait(w.life, in.joined, keptLimit) {
				wait(w.life, in.left, time.Hour)
			}
		})
	}
	if q.Stream {
		fmt.Fprintf(out, `data: {"choices":[{"index":0,"text":"x","finish_reason":"length"}]}`+"\n\ndata: [DONE]\n\n")
		return
	}
	fmt.Fprintf(out, `{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":%d,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":%d}}%s}`, request.Prompt, request.Cached, params)
}

// wait waits for c, and reports whether that came in time.
func wait(ctx context.Context, c <-chan struct{}, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// fetch brings the prompt of a decode leg, for which the engine has to have blocks first.
func (w *worker) fetch(ctx context.Context, from, name string, generation int, request *engine.Request) {
	c := request.Tag.(*call)
	select {
	case <-c.placed:
	case <-ctx.Done():
		return
	}
	err := w.bring(ctx, from, xxh3.HashString(name))
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		w.world.count(func(c *counts) { c.Transfers++ })
	} else if w.role.Kind == kv.KindSGLang {
		c.failed <- err
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.up && w.generation == generation {
		w.engine.Fetched(request, err == nil) // a vLLM worker computes a prompt that does not come
		w.signal()
	}
}

// bring gets a prompt from another worker.
func (w *worker) bring(ctx context.Context, from string, salt uint64) error {
	ctx, cancel := context.WithTimeout(ctx, joinLimit+time.Duration(1e6*w.world.net.chance(salt, 1)))
	defer cancel()
	transport := &http.Transport{DialContext: w.world.net.dialer(w.host, salt, 3*time.Second, 10*time.Second), DisableKeepAlives: true}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", response.StatusCode)
	}
	gone := make(chan struct{})
	w.running.Go(func() { // ends with the body
		_, _ = io.Copy(io.Discard, response.Body)
		close(gone)
	})
	if wait(ctx, gone, time.Duration(2e7*w.world.net.chance(salt, 2))) {
		return errors.New("the prefill worker is gone")
	}
	return ctx.Err()
}

// abort ends the request of that name, as SGLang's /abort_request does.
func (w *worker) abort(rid string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if end := w.named[rid]; end != nil {
		end()
	}
}

// proxy returns the settings of proxies.
func (s *setup) proxy(d proxy.Settings) proxy.Settings {
	d.DisaggMinUncachedTokens, d.EnforceDisagg = s.LeastUncached, s.Enforce
	return d
}
