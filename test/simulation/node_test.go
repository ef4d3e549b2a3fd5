package simulation

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/peers/replica"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// defaults are the settings of the parts, with the defaults of their flags.
type defaults struct {
	router router.Settings
	policy policies.Settings
	proxy  proxy.Settings
}

func newDefaults() defaults {
	d := defaults{testkit.Defaults[router.Settings](), testkit.Defaults[policies.Settings](), testkit.Defaults[proxy.Settings]()}
	d.proxy.RequestTimeout, d.proxy.DisaggPrefillTimeout, d.proxy.DisaggHandoverTimeout = requestTimeout, legTimeout, legTimeout
	return d
}

// requestTimeout is the maximum wait for a worker's next byte.
const requestTimeout = 20 * time.Second

// legTimeout is the longest time for a prompt at a prefill worker, and for its handing over.
const legTimeout = 8 * time.Second

// node is one incarnation of a router: the real index, event streams, books, mesh and
// proxy, wired as the root package wires them.
type node struct {
	world       *world
	id          int
	host        string
	incarnation uint64
	streamed    uint64 // event streams so far

	log       *slog.Logger
	saved     *events.Snapshot // nil: it keeps none
	endSaving func()
	tree      *radix.Tree
	index     radix.Index // tree, as KV events change it
	router    *router.Router
	mesh      *replica.Mesh // nil: it is alone
	proxy     *proxy.Proxy
	http      *http.Transport
	peers     *events.Peers
	server    *http.Server

	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex         // guards the rest; only the world's goroutine changes follows
	follows map[uint64]*follow // by worker
	asked   []time.Time        // when requests came
	retries []time.Time        // when one was sent again out of the budget
	asks    map[uint64]bool    // workers that have failed a request, and whether its retry counts
	refused map[string]bool    // workers, by URL host, that have last refused a request with a status below 500
	homes   map[string]home    // of sessions, as this router has decided last
}

// follow is a node's state of one worker.
type follow struct {
	generation int       // 0: it is not up here
	since      time.Time // when the stream began
	stream     *events.Stream
	cancel     context.CancelFunc
	done       chan struct{}
}

func hostOf(router int) string { return fmt.Sprintf("r%d", router) }

// salt returns a number for a part of this incarnation, derived from the seed.
func (n *node) salt(part uint64) uint64 {
	return mix(n.world.seed, uint64(n.id), n.incarnation, part)
}

// startNode starts a router.
func startNode(w *world, id int) *node {
	n := &node{world: w, id: id, host: hostOf(id), follows: map[uint64]*follow{}, asks: map[uint64]bool{}, refused: map[string]bool{}, endSaving: func() {}, homes: map[string]home{}}
	w.incarnations[id]++
	n.incarnation = uint64(w.incarnations[id])
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.log = w.logger(n.host)
	n.tree = radix.NewTree()
	n.index = w.sabotage.index(n.tree)
	rule, err := policies.New(w.setup.Policy, w.defaults.policy)
	if err != nil {
		panic(err)
	}
	n.router = router.New(w.setup.router(w.defaults.router), router.Deps{Index: n.index, Policy: rule, BlockSize: blockSize, Seed: n.salt(0), Log: n.log})
	n.http = web.NewTransport(nil)
	n.http.DialContext = w.net.dialer(n.host, n.salt(0), 3*time.Second, 10*time.Second)
	n.proxy = proxy.New(w.setup.proxy(w.defaults.proxy), proxy.Deps{Observer: observer{n: n}, Failed: observer{n: n}.failed, Names: n.router.Names(), Transport: watched{n}, Log: n.log})
	if w.setup.Routers > 1 {
		n.join()
	}
	if w.setup.Peers {
		var urls []string
		for other := range w.setup.Routers {
			if other != id {
				urls = append(urls, "http://"+hostOf(other)+":7000")
			}
		}
		n.peers = events.NewPeers(urls, "", n.http)
	}
	n.openSnapshot()
	listener, err := w.net.listen(n.host+":7000", nil)
	if err != nil {
		panic(err)
	}
	n.server = &http.Server{Handler: http.HandlerFunc(n.events), ErrorLog: log.New(io.Discard, "", 0)}
	n.running.Go(func() { _ = n.server.Serve(listener) })
	return n
}

// join connects the node to the mesh.
func (n *node) join() {
	w := n.world
	n.mesh = replica.New(replica.Deps{Router: n.router, Log: n.log, ID: n.salt(0) | 1, Link: w.net.openLink(n.host, n.incarnation, w.losses)})
	n.running.Go(func() { n.mesh.Run(n.ctx) })
}

// stop ends the node at once, or after a drain.
func (n *node) stop(crash bool) {
	if crash {
		n.world.net.resetAll(n.host, "")
	}
	n.endSaving()
	n.cancel()
	for worker := range n.follows {
		n.forget(worker)
	}
	_ = n.server.Close()
	n.running.Wait()
	n.proxy.Close()
}

// look updates the node's state of a worker, as health checks do.
func (n *node) look(w *worker) {
	w.mu.Lock()
	up, generation := w.up, w.generation
	w.mu.Unlock()
	f := n.follows[w.id]
	if f == nil {
		f = n.know(w.id)
	}
	if f.generation != 0 && (!up || f.generation != generation) {
		old := f.generation
		f.generation = 0
		n.router.Down(w.key())
		n.proxy.Abort(w.id, old, "it is down")
		if up || n.world.net.chance(uint64(n.id), w.id, uint64(old)) < 0.5 { // another process: the incarnation is over
			n.forget(w.id)
			f = n.know(w.id)
		}
	}
	if !up || f.generation == generation {
		return
	}
	f.generation = generation
	n.router.Up(kv.Target{Key: w.key(), URL: "http://" + w.host + ":8000", Ranks: 1, Generation: generation, TotalBlocks: w.blocks, MaxBatchedTokens: passTokens, Disagg: w.role})
	if f.stream == nil {
		n.follow(w, f)
	}
}

// know adds a worker.
func (n *node) know(worker uint64) *follow {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := &follow{}
	n.follows[worker] = f
	return f
}

// stream returns the event stream of a worker, or nil.
func (n *node) stream(worker uint64) *events.Stream {
	stream, _ := n.followed(worker)
	return stream
}

// followed returns the same, and since when.
func (n *node) followed(worker uint64) (*events.Stream, time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f := n.follows[worker]; f != nil {
		return f.stream, f.since
	}
	return nil, time.Time{}
}

// streams returns all of them, by worker.
func (n *node) streams() (list []*events.Stream) {
	for _, w := range n.world.workers {
		if stream := n.stream(w.id); stream != nil {
			list = append(list, stream)
		}
	}
	return list
}

// follow starts the worker's event stream.
func (n *node) follow(w *worker, f *follow) {
	source := events.Source{Worker: w.key(), Endpoint: "tcp://" + w.host + ":5557", Topic: process.KVEventsTopic, Buffer: w.keep, BlockSize: blockSize}
	if w.replay {
		source.Replay = "tcp://" + w.host + ":5757"
	}
	n.streamed++
	salt := n.salt(1 + n.streamed)
	random := rand.New(rand.NewPCG(n.world.seed, salt))
	stream := events.NewStream(source, n.index, events.Options{Peers: n.peers, Edges: guard.New(), Dial: n.world.net.dialer(n.host, salt, 5*time.Second, 30*time.Second), Random: random}, n.log)
	stream.SetCapacity(w.blocks)
	n.saved.Resume(stream)
	n.mu.Lock()
	f.stream, f.since = stream, time.Now()
	n.mu.Unlock()
	ctx, cancel := context.WithCancel(n.ctx)
	f.cancel, f.done = cancel, make(chan struct{})
	go func() {
		defer close(f.done)
		stream.Run(ctx)
	}()
}

// forget ends the event stream of a worker, and clears its index.
func (n *node) forget(worker uint64) {
	f := n.follows[worker]
	n.mu.Lock()
	delete(n.follows, worker)
	n.mu.Unlock()
	if f != nil && f.stream != nil {
		f.cancel()
		<-f.done
		f.stream.Close()
		radixtest.Forget(n.index, worker)
	}
}

// events answers GET /events of another router, as the router port does.
func (n *node) events(out http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	worker, _ := strconv.ParseUint(query.Get("worker_id"), 10, 64)
	stream := n.stream(worker)
	if stream == nil {
		http.Error(out, "it is not followed", http.StatusNotFound)
		return
	}
	answer := stream.History().Query(number(query, "start"), number(query, "end"), number(query, "check"))
	answer.BlockSize = blockSize
	_ = answer.Write(out)
}

func number(query url.Values, name string) *uint64 {
	n, err := strconv.ParseUint(query.Get(name), 10, 64)
	if err != nil {
		return nil
	}
	return &n
}

// Continue implements proxy.Chooser.
func (c *client) Continue([]uint64, []uint32) (router.Decision, error) {
	return router.Decision{}, router.ErrNoWorker
}

// Rebook implements proxy.Chooser.
func (c *client) Rebook(router.Decision, kv.WorkerKey) (router.Decision, error) {
	return router.Decision{}, router.ErrNoWorker
}

// IsUp implements proxy.Chooser.
func (c *client) IsUp(t kv.Target) bool { return c.node.router.IsUp(t) }

// CloseIdleConnections is called by the proxy's Close.
func (t watched) CloseIdleConnections() { t.node.http.CloseIdleConnections() }

// observer checks the retries of a node against its budget.
type observer struct {
	testkit.SilentObserver
	n *node
}

// failed is called with each worker that failed a request, before the retry.
func (o observer) failed(worker uint64) {
	n := o.n
	list, panicking := n.router.Health.Records()
	at := slices.IndexFunc(list, func(r health.Record) bool { return r.Worker.Worker == worker })
	n.mu.Lock()
	defer n.mu.Unlock()
	refused := n.refused[n.world.workers[worker].host+":8000"] // it is paused for that, also where too many fail
	n.asks[worker] = !refused && (panicking || at >= 0 && (list[at].State == health.StateIn || list[at].State == health.StateBack))
}

// Retried implements proxy.Observer.
func (o observer) Retried(uint64) { o.n.world.count(func(c *counts) { c.Retries++ }) }

// SharedEnded implements proxy.Observer.
func (o observer) SharedEnded(_ kv.Kind, result string, _ time.Duration) {
	if result == proxy.SharedOK {
		o.n.world.count(func(c *counts) { c.Shared++ })
	}
}

// again holds a request that is sent again, after that worker has failed it, against the
// budget.
func (n *node) again(worker uint64) {
	n.mu.Lock()
	counts := n.asks[worker] // not: the worker is out, down or stuck
	n.asks[worker] = false
	n.mu.Unlock()
	if counts {
		n.spend()
	}
}

// spend holds an attempt against the budget.
func (n *node) spend() {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	n.retries = append(n.retries, now)
	within := func(list []time.Time, span time.Duration) (count int) {
		for _, at := range list {
			if now.Sub(at) < span {
				count++
			}
		}
		return count
	}
	// The budget counts whole seconds: its span is up to one shorter. Whether a retry counts
	// follows from the worker's state after the failure, which another request may have
	// changed: up to misread are taken for retries that count.
	const misread = 2
	const span = health.BudgetSeconds * time.Second
	if retries, most := within(n.retries, span-time.Second), health.BudgetLeast+n.world.defaults.proxy.RetryBudget*float64(within(n.asked, span)); float64(retries) >= most+1+misread {
		n.world.fail("%s: %d retries within %s, at most %.1f are allowed", n.host, retries, span, most)
	}
}

// RetryDenied implements proxy.Observer.
func (o observer) RetryDenied(string) {
	o.n.world.count(func(c *counts) { c.Denied++ })
	o.n.mu.Lock()
	defer o.n.mu.Unlock()
	clear(o.n.asks)
}

// mostTries is the number of decisions on one request: the first, those of its retries,
// three more where it was taken off a worker that is down or stuck, and one where its
// prefill leg has failed.
func (d *defaults) mostTries() int { return 1 + d.proxy.Retries + 3 + 1 }

// sabotage is a planted bug that the checks must find.
type sabotage string

const (
	sound       sabotage = ""
	lostRemoval sabotage = "a removal is lost"
	doubleFree  sabotage = "a booking is freed while its request runs"
	unseenGap   sabotage = "a batch is lost before it gets its number"
)

// index returns the index that a node's events change.
func (s sabotage) index(index radix.Index) radix.Index {
	if s == lostRemoval {
		return &forgetful{Reader: index, index: index}
	}
	return index
}

// booked is called with each booking.
func (s sabotage) booked(b *router.Booking) {
	if s == doubleFree {
		time.AfterFunc(40*time.Millisecond, b.End)
	}
}

// forgetful loses the fifth removal.
type forgetful struct {
	radix.Reader
	index    radix.Applier
	removals atomic.Int64
}

// Apply implements radix.Index.
func (f *forgetful) Apply(w kv.WorkerKey, c *radix.Change) (radix.Applied, error) {
	if c.Kind == radix.Removed && f.removals.Add(1) == 5 {
		return radix.Applied{}, nil
	}
	return f.index.Apply(w, c)
}
