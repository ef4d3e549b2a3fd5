package simulation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/tools/engine"
	"kvrouter/internal/tools/mocker"
)

// passTokens is how many tokens an engine computes in a pass.
const passTokens = 64

// blockSize is that of the simulated engines, tokens.
const blockSize = 4

// prompt is one prompt of a world with the answer that every engine gives.
type prompt struct {
	tokens []uint32         // prompt and answer
	length int              // tokens of the prompt
	local  []uint64         // hashes of the prompt's full blocks
	blocks []kv.StoredBlock // all full blocks
}

// mode is how a worker treats requests.
type mode string

const (
	serves  mode = "serves"
	fails   mode = "fails"   // 500
	presses mode = "presses" // 429 with Retry-After
	breaks  mode = "breaks"  // the connection, after two tokens
	hangs   mode = "hangs"   // the engine makes no progress
)

// worker is a simulated vLLM server: an engine with its cache, a publisher of KV events
// and an HTTP server. It can die and start again.
type worker struct {
	world  *world
	id     uint64
	host   string
	blocks int // of the cache
	keep   int // batches in the replay buffer
	replay bool
	role   kv.Disagg

	mu         sync.Mutex // guards the rest
	up         bool
	generation int
	mode       mode
	changed    chan struct{} // closed when mode changes
	engine     *engine.Engine
	publisher  *mocker.Events
	history    []*publication // of all publishers, the last one's at the end
	pending    []mocker.Event // unpublished changes of the cache
	lost       int            // batches to lose before they are numbered
	wake       chan struct{}
	cancel     context.CancelFunc
	server     *http.Server
	side       *http.Server // of the transfer port; nil: it has none
	running    sync.WaitGroup
	attempts   map[string]int // by request
	rooms      map[string]*room
	named      map[string]context.CancelFunc // requests that can be aborted by that name
	life       context.Context               // of this incarnation
}

// call is a request in the engine.
type call struct {
	prompt *prompt
	emit   chan int      // gets the tokens so far
	placed chan struct{} // closed when there are blocks for a prompt that is fetched
	failed chan error    // gets why it cannot be
}

// publication is the batches of one publisher.
type publication struct {
	whole bool      // it began with an empty cache
	ended time.Time // zero: it has not
	seqs  int       // batches so far
	held  map[uint64][]span
	count []int // of blocks held after each batch
	now   int
}

// span is the batches after which a block is held: from the first up to, but not including,
// the second; 0 means no end.
type span [2]int

// apply records the changes of the next batch.
func (p *publication) apply(events []mocker.Event) {
	remove := func(block uint64) {
		if spans := p.held[block]; len(spans) > 0 && spans[len(spans)-1][1] == 0 {
			spans[len(spans)-1][1] = p.seqs + 1
			p.now--
		}
	}
	for _, e := range events {
		for block := range p.held {
			if e.Cleared {
				remove(block)
			}
		}
		for _, block := range e.Removed {
			remove(block)
		}
		for _, b := range e.Stored {
			if spans := p.held[b.Engine]; len(spans) == 0 || spans[len(spans)-1][1] != 0 {
				p.held[b.Engine] = append(spans, span{p.seqs + 1, 0})
				p.now++
			}
		}
	}
	p.seqs++
	p.count = append(p.count, p.now)
}

// has reports whether a block is held after that many batches.
func (p *publication) has(block uint64, batches int) bool {
	for _, s := range p.held[block] {
		if s[0] <= batches && (s[1] == 0 || batches < s[1]) {
			return true
		}
	}
	return false
}

// held returns the number of blocks after that many batches.
func (p *publication) heldAfter(batches int) int {
	if batches == 0 {
		return 0
	}
	return p.count[batches-1]
}

func (w *worker) key() kv.WorkerKey { return kv.WorkerKey{Worker: w.id} }

// start starts the engine with an empty cache.
func (w *worker) start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.up {
		return
	}
	w.up, w.mode = true, serves
	w.generation++
	w.changed, w.wake = make(chan struct{}), make(chan struct{}, 1)
	w.pending = nil
	w.engine = engine.New(engine.Settings{Blocks: w.blocks, BlockSize: blockSize, MaxSeqs: 8, MaxBatchedTokens: passTokens, Caching: w.caching(), Timing: engine.DefaultTiming()}, w.cacheChanged)
	w.engine.Fetch = func(r *engine.Request) { close(r.Tag.(*call).placed) }
	w.rooms, w.named = map[string]*room{}, map[string]context.CancelFunc{}
	w.publish(true)
	ctx, cancel := context.WithCancel(context.Background())
	w.life, w.cancel = ctx, cancel
	listener, err := w.world.net.listen(w.host+":8000", nil)
	if err != nil {
		panic(err)
	}
	w.server = &http.Server{Handler: http.HandlerFunc(w.serve), ErrorLog: log.New(io.Discard, "", 0), BaseContext: func(net.Listener) context.Context { return ctx }}
	w.running.Go(func() { _ = w.server.Serve(listener) })
	if w.side = nil; w.role.Kind != kv.KindNone {
		listener, err := w.world.net.listen(fmt.Sprintf("%s:%d", w.host, transferPort), nil)
		if err != nil {
			panic(err)
		}
		side := &http.Server{Handler: http.HandlerFunc(w.sides), ErrorLog: w.server.ErrorLog, BaseContext: w.server.BaseContext}
		w.running.Go(func() { _ = side.Serve(listener) })
		w.side = side
	}
	w.running.Go(func() { w.run(ctx) })
}

// caching is when the engine's blocks come into its cache.
func (w *worker) caching() engine.Caching {
	switch {
	case w.role.Kind != kv.KindSGLang:
		return engine.CacheFilled
	case w.role.Role == kv.RoleDecode:
		return engine.CacheNothing
	}
	return engine.CacheComputed
}

// publish starts a publisher. w.mu is held.
func (w *worker) publish(whole bool) {
	listen := func(faults *losses) zmq.Option {
		return zmq.WithListen(func(address string) (net.Listener, error) {
			if address == w.host+":5757" {
				faults = &losses{Drop: faults.Drop, spared: 1} // replies are lost in a full queue
			}
			return w.world.net.listen(address, faults)
		})
	}
	events, err := mocker.NewEvents(w.host+":5557", w.host+":5757", blockSize, listen(w.world.losses))
	if err != nil {
		panic(err)
	}
	events.Keep = w.keep
	w.publisher = events
	w.endHistory()
	w.history = append(w.history, &publication{whole: whole, held: map[uint64][]span{}})
}

// endHistory notes that the last publisher has ended. w.mu is held.
func (w *worker) endHistory() {
	if n := len(w.history); n > 0 && w.history[n-1].ended.IsZero() {
		w.history[n-1].ended = time.Now()
	}
}

// crash ends the worker at once.
func (w *worker) crash() {
	w.mu.Lock()
	if !w.up {
		w.mu.Unlock()
		return
	}
	w.up = false
	publisher, server, side := w.publisher, w.server, w.side
	w.endHistory()
	w.cancel()
	w.mu.Unlock()
	w.world.net.resetAll(w.host, "")
	publisher.Close()
	_ = server.Close()
	if side != nil {
		_ = side.Close()
	}
	w.running.Wait()
}

// republish restarts the publisher alone: it counts from 0 again.
func (w *worker) republish() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.up {
		return
	}
	w.publisher.Close()
	w.publish(w.engine.Pool.Held() == 0)
}

// set changes how the worker treats requests.
func (w *worker) set(m mode) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mode = m
	close(w.changed)
	w.changed = make(chan struct{})
}

// reset empties the prefix cache, as POST /reset_prefix_cache does.
func (w *worker) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.up {
		w.engine.Reset()
		w.pending = append(w.pending, mocker.Event{Cleared: true})
		w.flush()
	}
}

// touch has the engine compute a prompt without a client, so that it publishes events. One that
// caches nothing publishes only that its cache is emptied.
func (w *worker) touch(p *prompt) {
	if w.caching() == engine.CacheNothing {
		w.reset()
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.up {
		_ = w.engine.Submit(&engine.Request{Blocks: p.blocks, Prompt: p.length, Output: 1, Tag: &call{prompt: p}})
		w.signal()
	}
}

func (w *worker) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// cacheChanged records a change of the engine's cache. w.mu is held.
func (w *worker) cacheChanged(e engine.Event) {
	if !e.Stored {
		w.pending = append(w.pending, mocker.Event{Removed: slices.Clone(e.Removed)})
		return
	}
	tokens := e.Request.Tag.(*call).prompt.tokens[e.First*blockSize:][:len(e.Blocks)*blockSize]
	w.pending = append(w.pending, mocker.Event{Stored: slices.Clone(e.Blocks), Parent: e.Parent, HasParent: e.HasParent, Tokens: tokens})
}

// flush publishes the changes as one batch. w.mu is held.
func (w *worker) flush() {
	if len(w.pending) == 0 {
		return
	}
	p := w.history[len(w.history)-1]
	if w.lost > 0 { // unseenGap
		w.lost--
		p.apply(w.pending)
		p.seqs, p.count = p.seqs-1, p.count[:len(p.count)-1]
		w.pending = nil
		return
	}
	p.apply(w.pending)
	w.publisher.PublishNow(w.pending...)
	w.pending = nil
}

// run makes the engine's passes until ctx ends.
func (w *worker) run(ctx context.Context) {
	for ctx.Err() == nil {
		w.mu.Lock()
		took, busy := time.Duration(0), false
		changed, hung := w.changed, w.mode == hangs
		if !hung {
			took, busy = w.engine.Begin()
			w.flush()
		}
		w.mu.Unlock()
		if !busy {
			select {
			case <-ctx.Done():
			case <-changed:
			case <-w.wake:
			}
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(took):
		}
		w.mu.Lock()
		for _, r := range w.engine.End() {
			if c := r.Tag.(*call); c.emit != nil {
				c.emit <- r.Generated // buffered for all tokens
			}
		}
		w.flush()
		w.mu.Unlock()
	}
}

// ask is the body of a request.
type ask struct {
	Prompt int  `json:"prompt"`
	Output int  `json:"max_tokens"`
	Stream bool `json:"stream"`

	Room     *uint64   `json:"bootstrap_room"`
	RoomHost string    `json:"bootstrap_host"`
	RoomPort int       `json:"bootstrap_port"`
	Rid      string    `json:"rid"`
	Transfer *transfer `json:"kv_transfer_params"`
}

// serve answers a request for a completion. Each token of the answer names the worker,
// its generation, the attempt and its own number.
func (w *worker) serve(out http.ResponseWriter, r *http.Request) {
	w.running.Add(1)
	defer w.running.Done()
	id := r.Header.Get(web.HeaderRequest)
	body, err := io.ReadAll(r.Body)
	var question ask
	if err == nil {
		err = json.Unmarshal(body, &question)
	}
	if err != nil {
		return // its sender is gone
	}
	if r.URL.Path == "/abort_request" {
		w.abort(question.Rid)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	w.mu.Lock()
	w.attempts[id]++
	name := fmt.Sprintf("%d.%d.%d", w.id, w.generation, w.attempts[id])
	how, generation := w.mode, w.generation
	if question.Rid != "" {
		w.named[question.Rid] = cancel
		defer func(named map[string]context.CancelFunc) {
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(named, question.Rid)
		}(w.named)
	}
	w.mu.Unlock()
	leg, meeting, from := w.leg(&question, id+"."+name)
	w.judgeLeg(id, body, &question, leg)
	switch how {
	case fails:
		http.Error(out, `{"error":{"message":"it fails","code":500}}`, http.StatusInternalServerError)
		return
	case presses:
		out.Header().Set("Retry-After", "2")
		http.Error(out, `{"error":{"message":"it has too much to do","code":429}}`, http.StatusTooManyRequests)
		return
	}
	p := w.world.prompts[question.Prompt]
	c := &call{prompt: p, emit: make(chan int, question.Output), placed: make(chan struct{}), failed: make(chan error, 1)}
	request := &engine.Request{Blocks: p.blocks, Prompt: p.length, Output: question.Output, Tag: c, Keep: leg == kv.LegPrefill, Fetch: leg == kv.LegDecode}
	select { // or the engine may see a request whose end comes with it
	case <-ctx.Done():
		panic(http.ErrAbortHandler)
	case <-time.After(time.Microsecond + time.Duration(1e6*w.world.net.chance(xxh3.HashString(name)))):
	}
	var in *room
	if leg == kv.LegPrefill {
		request.Output = 1
		in = w.enter(meeting, true)
		w.mu.Lock()
		in.prompt = question.Prompt
		w.mu.Unlock()
		if w.role.Kind == kv.KindSGLang && !wait(ctx, in.joined, joinLimit) { // the decode worker comes first
			w.letGo(meeting, in, request)
			http.Error(out, `{"error":{"message":"no decode worker has come","code":500}}`, http.StatusInternalServerError)
			return
		}
	}
	w.mu.Lock()
	here := w.up && w.generation == generation
	if here {
		err = w.engine.Submit(request)
		w.signal()
	}
	w.mu.Unlock()
	if err != nil {
		w.world.fail("worker %d cannot take %s: %v", w.id, id, err)
	}
	switch {
	case in != nil && here && err == nil:
		w.prefill(ctx, out, &question, in, meeting, request, generation, how)
		return
	case in != nil:
		w.letGo(meeting, in, request)
		return
	case !here || err != nil:
		return
	}
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.engine.Abort(request)
		w.signal() // waiting requests may continue
	}()
	if leg == kv.LegDecode {
		w.running.Go(func() { w.fetch(ctx, from, id+"."+name, generation, request) })
	}
	w.answer(ctx, out, question, request, name, how)
}

// answer relays the engine's tokens.
func (w *worker) answer(ctx context.Context, out http.ResponseWriter, question ask, request *engine.Request, name string, how mode) {
	text := ""
	for i := range question.Output {
		select {
		case <-ctx.Done():
			panic(http.ErrAbortHandler)
		case err := <-request.Tag.(*call).failed:
			http.Error(out, fmt.Sprintf(`{"error":{"message":"%s","code":500}}`, err), http.StatusInternalServerError)
			return
		case <-request.Tag.(*call).emit:
		}
		if how == breaks && i == 2 {
			panic(http.ErrAbortHandler)
		}
		token := fmt.Sprintf("%s.%d ", name, i)
		if !question.Stream {
			text += token
			continue
		}
		if i == 0 {
			out.Header().Set("Content-Type", "text/event-stream")
		}
		reason := "null"
		if i == question.Output-1 {
			reason = `"length"`
		}
		fmt.Fprintf(out, `data: {"choices":[{"index":0,"text":"%s","finish_reason":%s}]}`+"\n\n", token, reason)
		_ = http.NewResponseController(out).Flush()
	}
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`, request.Prompt, question.Output, request.Cached)
	if question.Stream {
		fmt.Fprintf(out, `data: {"choices":[],"usage":%s}`+"\n\ndata: [DONE]\n\n", usage)
		return
	}
	fmt.Fprintf(out, `{"choices":[{"index":0,"text":"%s","finish_reason":"length"}],"usage":%s}`, text, usage)
}

// idle returns an error if the engine has work left.
func (w *worker) idle() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.engine.Check(); err != nil {
		return err
	}
	if running, waiting, usage := w.engine.Load(); running+waiting > 0 || usage > 0 {
		return fmt.Errorf("%d requests run, %d wait, and hold %.2f of the cache", running, waiting, usage)
	}
	last := w.history[len(w.history)-1]
	for block := range w.world.known { // the harness against the engine
		published, cached := last.has(block, last.seqs), w.engine.Pool.Find(block) != 0
		if published && !cached || last.whole && cached && !published {
			return errors.New("the published blocks are not those of the cache")
		}
	}
	return nil
}
