// Package simulation runs routers, workers and the network between them in virtual time. A
// seed draws a world, a script of requests and faults, and all random choices. The router's
// parts are the real ones.
package simulation

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/health"
)

// world is one simulation.
type world struct {
	seed     uint64
	setup    *setup
	losses   *losses
	defaults *defaults
	sabotage sabotage
	show     func(string) // gets each line of the trace; may be nil
	net      *network
	began    time.Time
	prompts  []*prompt
	known    map[uint64]known // blocks, by engine hash

	workers      []*worker
	nodes        []*node // nil where one is down
	incarnations []int
	touched      int
	trace        xxh3.Hasher

	folder string   // of snapshots
	copies [][]byte // of snapshots as they were once

	mu      sync.Mutex            // guards what follows
	failure string                // the first
	bound   map[binding]time.Time // of sessions: when that was decided last
	clients map[string]*client
	inOrder []*client
	counts  counts
}

// known is a block's place in a prompt.
type known struct {
	local, parent uint64
	hasParent     bool
}

// counts are what happened in a world.
type counts struct {
	Steps, Requests, Answered, Retries, Denied           int
	Batches, Gaps, Replays, Restarts, PeerEvents, Resent uint64
	Faults, Shared, Transfers, Restored                  int
	SessionsNew, SessionsKept, SessionsMoved             uint64
	Network                                              faults
	Cold, Streams                                        int // at the end
	Virtual                                              time.Duration
}

// add adds others.
func (c *counts) add(o counts) {
	c.Steps, c.Requests, c.Answered, c.Retries, c.Denied = c.Steps+o.Steps, c.Requests+o.Requests, c.Answered+o.Answered, c.Retries+o.Retries, c.Denied+o.Denied
	c.Batches, c.Gaps, c.Replays, c.Restarts, c.PeerEvents, c.Resent = c.Batches+o.Batches, c.Gaps+o.Gaps, c.Replays+o.Replays, c.Restarts+o.Restarts, c.PeerEvents+o.PeerEvents, c.Resent+o.Resent
	c.Faults, c.Shared, c.Transfers, c.Restored = c.Faults+o.Faults, c.Shared+o.Shared, c.Transfers+o.Transfers, c.Restored+o.Restored
	c.SessionsNew, c.SessionsKept, c.SessionsMoved = c.SessionsNew+o.SessionsNew, c.SessionsKept+o.SessionsKept, c.SessionsMoved+o.SessionsMoved
	c.Network = faults{c.Network.Lost + o.Network.Lost, c.Network.Doubled + o.Network.Doubled, c.Network.Swapped + o.Network.Swapped, c.Network.Delayed + o.Network.Delayed}
	c.Cold, c.Streams, c.Virtual = c.Cold+o.Cold, c.Streams+o.Streams, c.Virtual+o.Virtual
}

// newWorld returns the world of a scenario.
func newWorld(s *scenario, d *defaults) *world {
	w := &world{seed: s.Seed, setup: &s.Setup, losses: &s.Setup.Losses, defaults: d, clients: map[string]*client{}, known: map[uint64]known{}, bound: map[binding]time.Time{}}
	w.prompts = newPrompts(rand.New(rand.NewPCG(s.Seed, 1)), s.Setup.Blocks)
	for _, p := range w.prompts {
		for i, b := range p.blocks {
			at := known{local: b.Local, hasParent: i > 0}
			if i > 0 {
				at.parent = p.blocks[i-1].Engine
			}
			w.known[b.Engine] = at
		}
	}
	return w
}

// run runs the script in a synctest bubble.
func (w *world) run(script []step) {
	w.began = time.Now()
	if w.setup.Snapshot > 0 {
		w.folder = snapshotFolder()
		defer os.RemoveAll(w.folder)
	}
	w.net = newNetwork(w.seed)
	w.net.delay, w.net.spike, w.net.faulty = w.setup.Delay, w.setup.Spike, true
	for i := range w.setup.Workers {
		wk := &worker{world: w, id: uint64(i), host: workerHost(i), blocks: w.setup.Blocks, keep: w.setup.Keep[i], replay: w.setup.Replay[i], role: w.setup.role(i), attempts: map[string]int{}}
		if wk.start(); w.sabotage == unseenGap {
			wk.lost = 3
		}
		w.workers = append(w.workers, wk)
	}
	w.nodes, w.incarnations = make([]*node, w.setup.Routers), make([]int, w.setup.Routers)
	for i := range w.nodes {
		w.startNode(i)
	}
	for _, s := range script {
		time.Sleep(time.Until(w.began.Add(s.At)))
		if s.trouble() {
			w.count(func(c *counts) { c.Faults++ })
			w.keepSnapshots()
		}
		w.do(s)
		if w.settle(s.String()) {
			break
		}
	}
	if !w.failed() {
		w.recover()
	}
	w.count(func(c *counts) { c.Virtual, c.Steps, c.Requests = time.Since(w.began), len(script), len(w.inOrder) })
	w.stop()
	w.count(func(c *counts) { c.Network = w.net.met })
}

// settle waits until all goroutines are blocked, and checks the invariants. It reports
// whether one is violated.
func (w *world) settle(what string) (failed bool) {
	synctest.Wait()
	w.check()
	w.note(what)
	return w.failed()
}

// do executes one step. A step that the state of the world no longer permits does nothing.
func (w *world) do(s step) {
	a, b := w.host(s.A), w.host(s.B)
	switch s.What {
	case doRequest, doStream:
		if a.node != nil {
			w.request(a.node, s)
		}
	case doCrash:
		if a.worker != nil {
			a.worker.crash()
		} else if a.node != nil {
			w.stopWith(a.node, s.File, s.M)
		}
	case doStart:
		if a.worker != nil {
			a.worker.start()
		} else if a.node == nil {
			w.startNode(a.number)
		}
	case doLook:
		if a.node != nil {
			a.node.look(b.worker)
		}
	case doRepublish:
		a.worker.republish()
	case doReset:
		a.worker.reset()
	case doCut:
		w.net.partition(s.A, s.B)
	case doMend:
		w.net.mend(s.A, s.B)
	case doBreak:
		w.net.resetAll(s.A, s.B)
	case doVanish:
		w.net.vanish(s.A, s.B)
	default:
		a.worker.set(mode(strings.TrimPrefix(s.What, "set-")))
	}
}

// machine is a host: a worker, or a router and its number.
type machine struct {
	worker *worker
	node   *node // nil: it is down
	number int
}

func (w *world) host(name string) (m machine) {
	if name == "" {
		return m
	}
	m.number = int(name[1] - '0')
	if name[0] == 'w' {
		m.worker = w.workers[m.number]
	} else {
		m.node = w.nodes[m.number]
	}
	return m
}

func (w *world) startNode(i int) {
	n := startNode(w, i)
	w.nodes[i] = n
	for _, worker := range w.workers {
		n.look(worker)
	}
}

func (w *world) stopNode(n *node, crash bool) {
	w.nodes[n.id] = nil
	n.stop(crash)
	w.gather(n)
}

// stop ends everything.
func (w *world) stop() {
	for _, n := range w.nodes {
		if n != nil {
			w.stopNode(n, false)
		}
	}
	for _, worker := range w.workers {
		worker.crash()
	}
	for _, c := range w.inOrder {
		<-c.done
	}
	time.Sleep(time.Minute) // net/http dials on when a request is over
}

// fail records a violated invariant.
func (w *world) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failLocked(format, args...)
}

func (w *world) failLocked(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf("at %s: ", time.Since(w.began)) + fmt.Sprintf(format, args...)
	}
}

func (w *world) failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure != ""
}

// count changes the counts.
func (w *world) count(change func(*counts)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.counts)
}

// gather adds the counts of a stopped node.
func (w *world) gather(n *node) {
	_, sessions := n.router.Sessions()
	w.count(func(c *counts) {
		c.SessionsNew, c.SessionsKept, c.SessionsMoved = c.SessionsNew+sessions.New, c.SessionsKept+sessions.Kept, c.SessionsMoved+sessions.Moved
		if n.mesh != nil {
			c.Resent += n.mesh.Counts().Resent
		}
	})
}

// bodyOf returns the body of a request.
func (w *world) bodyOf(id string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := w.clients[id]; c != nil {
		return c.body
	}
	return ""
}

// logger returns a part's logger.
func (w *world) logger(host string) *slog.Logger {
	if w.show == nil && w.setup.Snapshot > 0 {
		return slog.New(restores{w})
	}
	if w.show == nil {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(lines{w, host}, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

// lines shows log lines.
type lines struct {
	w    *world
	host string
}

// Write implements io.Writer.
func (l lines) Write(b []byte) (int, error) {
	l.w.show(fmt.Sprintf("%12s   %s %s", time.Since(l.w.began), l.host, strings.TrimSpace(string(b))))
	return len(b), nil
}

// note adds a line to the trace: a step, and the state after it.
func (w *world) note(what string) {
	out := &strings.Builder{}
	fmt.Fprintf(out, "%s %s:", time.Since(w.began), what)
	for i, n := range w.nodes {
		if n == nil {
			continue
		}
		fmt.Fprintf(out, " r%d", i)
		for _, worker := range w.workers {
			if s := n.stream(worker.id); s != nil {
				fmt.Fprintf(out, " %d/%t/%d", s.Stats().LastSeq.Load(), s.Stats().Cold.Load(), n.tree.Blocks(worker.key()))
			}
		}
		for _, load := range n.router.Loads() {
			fmt.Fprintf(out, " %d+%d+%d", load.ActiveRequests, load.PotentialPrefillTokens, load.PotentialDecodeBlocks)
		}
		list, _ := n.router.Health.Records()
		for _, record := range list {
			out.WriteString(" " + record.State)
		}
	}
	for _, c := range w.inOrder {
		select {
		case <-c.done:
			out.WriteString(" " + c.result)
		default:
		}
	}
	_, _ = w.trace.WriteString(out.String())
	if w.show != nil {
		w.show(out.String())
	}
}

// check checks the invariants of every moment.
func (w *world) check() {
	for _, n := range w.nodes {
		if n == nil {
			continue
		}
		if err := n.router.Check(); err != nil {
			w.fail("%s: books: %v", n.host, err)
		}
		booked, held := 0, 0
		for _, load := range n.router.Loads() {
			booked += load.ActiveRequests
		}
		if n.mesh != nil {
			held = int(n.mesh.Counts().Held)
		}
		if open, pairing := w.checkBookings(n); booked < open+held || booked > open+held+pairing {
			w.fail("%s: %d requests are booked, %d are under way, %d have one leg, and %d are of other routers", n.host, booked, open, pairing, held)
		}
		for _, worker := range w.workers {
			if s, since := n.followed(worker.id); s != nil {
				if err := w.checkIndex(n, worker, s, since); err != nil {
					w.fail("%s: index of worker %d: %v", n.host, worker.id, err)
				}
			}
		}
	}
}

// checkBookings checks the bookings of a node's clients, and returns how many have not
// ended, and how many clients may have one more.
func (w *world) checkBookings(n *node) (open, pairing int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.inOrder {
		if c.node == n {
			mine, more := c.checkBookings()
			if open += mine; more {
				pairing++
			}
		}
	}
	return open, pairing
}

// checkIndex holds a worker's blocks in an index against the batches that it has
// published up to the one that was applied last. A publisher that ended before the
// stream began counts no more.
func (w *world) checkIndex(n *node, worker *worker, s *events.Stream, since time.Time) error {
	if n.tree.Blocks(worker.key()) == 0 {
		return nil // an empty index is never wrong
	}
	batches, cold := int(s.Stats().LastSeq.Load())+1, s.Stats().Cold.Load()
	worker.mu.Lock()
	defer worker.mu.Unlock()
	var err error
	for i := len(worker.history) - 1; i >= 0; i-- {
		if p := worker.history[i]; batches <= p.seqs && (p.ended.IsZero() || !p.ended.Before(since)) {
			if err = w.compare(n, worker, p, batches, cold); err == nil {
				return nil
			}
		}
	}
	if err == nil {
		err = fmt.Errorf("no publisher has published batch %d", batches-1)
	}
	return err
}

// compare compares a worker's blocks in an index with those of a publication after that
// many batches: the index must have no others, and unless it is cold, all of them.
func (w *world) compare(n *node, worker *worker, p *publication, batches int, cold bool) error {
	count := 0
	for b := range n.tree.DumpOf(worker.key()) {
		if !p.has(b.Engine, batches) {
			return fmt.Errorf("block %x is in the index, and not in the cache after batch %d", b.Engine, batches-1)
		}
		at := w.known[b.Engine]
		if at.local != b.Local || b.HasParent && (!at.hasParent || at.parent != b.Parent) {
			return fmt.Errorf("block %x stands in another place in the index", b.Engine)
		}
		count++
	}
	if held := p.heldAfter(batches); !cold && count != held {
		return fmt.Errorf("%d blocks are in the index, %d in the cache after batch %d, and it is not marked cold", count, held, batches-1)
	}
	return nil
}

// recover ends all faults and waits until the routers have recovered.
func (w *world) recover() {
	w.net.calm()
	for _, worker := range w.workers {
		worker.start()
		worker.set(serves)
	}
	for i, n := range w.nodes {
		if n == nil {
			w.startNode(i)
			continue
		}
		for _, worker := range w.workers {
			n.look(worker)
		}
	}
	random := rand.New(rand.NewPCG(w.seed, 2))
	why := ""
	for range 240 {
		time.Sleep(time.Duration(300e6 + random.Int64N(400e6)))
		for _, n := range w.nodes {
			time.Sleep(time.Duration(1 + random.Int64N(20e6)))
			w.request(n, step{What: doStream, N: random.IntN(prompts), M: 1 + random.IntN(answer), S: random.IntN(w.setup.Sessions + 1)})
		}
		for _, worker := range w.workers {
			time.Sleep(time.Duration(1 + random.Int64N(20e6)))
			if w.touched++; w.touched < 4*touches {
				worker.touch(w.prompts[prompts+w.touched%touches])
			}
		}
		if w.settle("recovery") {
			return
		}
		if why = w.unwell(); why == "" {
			break
		}
	}
	if why != "" {
		w.fail("the troubles have ended %s ago, and still %s", time.Since(w.began.Add(w.setup.Long)), why)
		return
	}
	for _, c := range w.inOrder {
		<-c.done
	}
	for range 80 {
		time.Sleep(time.Duration(500e6 + random.Int64N(1e6)))
		if w.settle("rest") {
			return
		}
		if why = w.restless(); why == "" {
			return
		}
	}
	w.fail("nothing has been asked for 40 s, and still %s", why)
}

// unwell describes what has not recovered after the end of the faults; empty: nothing.
func (w *world) unwell() string {
	for _, n := range w.nodes {
		list, _ := n.router.Health.Records()
		for _, record := range list {
			if record.State != health.StateIn && !w.passedOver(n, int(record.Worker.Worker)) {
				return fmt.Sprintf("%s has worker %d as %s: %s", n.host, record.Worker.Worker, record.State, record.Why)
			}
		}
		if len(list) != len(w.workers) {
			return fmt.Sprintf("%s has %d of %d workers", n.host, len(list), len(w.workers))
		}
		if n.mesh != nil && n.mesh.Counts().Peers != len(w.nodes)-1 {
			return fmt.Sprintf("%s hears %d of %d routers", n.host, n.mesh.Counts().Peers, len(w.nodes)-1)
		}
	}
	return w.owners()
}

// restless describes load or work that is left although nothing is in flight; empty: none.
func (w *world) restless() string {
	for _, worker := range w.workers {
		if err := worker.idle(); err != nil {
			return fmt.Sprintf("worker %d is not idle: %v", worker.id, err)
		}
	}
	for _, n := range w.nodes {
		for _, load := range n.router.Loads() {
			if load.ActiveRequests != 0 || load.PotentialPrefillTokens != 0 || load.PotentialDecodeBlocks != 0 {
				return fmt.Sprintf("%s has load on worker %d: %+v", n.host, load.Key.Worker, load)
			}
		}
		if err := n.tree.Check(); err != nil {
			return fmt.Sprintf("%s: index: %v", n.host, err)
		}
		for _, worker := range w.workers {
			if why := w.stale(n, worker); why != "" {
				return fmt.Sprintf("%s: index of worker %d: %s", n.host, worker.id, why)
			}
		}
	}
	w.count(func(c *counts) {
		for _, n := range w.nodes {
			for _, worker := range w.workers {
				s := n.stream(worker.id).Stats()
				c.Batches, c.Gaps, c.Replays, c.Restarts, c.PeerEvents = c.Batches+s.Batches.Load(), c.Gaps+s.Gaps.Load(), c.Replays+s.Replays.Load(), c.Restarts+s.Restarts.Load(), c.PeerEvents+s.PeerEvents.Load()+s.PeerDumps.Load()
				if c.Streams++; s.Cold.Load() {
					c.Cold++
				}
			}
		}
		for _, client := range w.inOrder {
			if strings.Contains(client.result, "ended true") {
				c.Answered++
			}
		}
	})
	return ""
}

// stale describes how a worker's blocks in an index differ from its cache after all events
// were delivered.
func (w *world) stale(n *node, worker *worker) string {
	s := n.stream(worker.id)
	worker.mu.Lock()
	defer worker.mu.Unlock()
	p := worker.history[len(worker.history)-1]
	cold := s.Stats().Cold.Load()
	if cold && !worker.replay && n.tree.Blocks(worker.key()) == 0 {
		return "" // it waits for the next batch
	}
	if p.seqs > 0 && int(s.Stats().LastSeq.Load()) != p.seqs-1 {
		return fmt.Sprintf("batch %d was applied last, %d was published", s.Stats().LastSeq.Load(), p.seqs-1)
	}
	if err := w.compare(n, worker, p, p.seqs, cold); err != nil {
		return err.Error()
	}
	if cold && worker.replay && p.whole && p.seqs <= worker.keep {
		return "it is cold, although all of its history can be replayed"
	}
	var held []kv.Match
	for at, prompt := range w.prompts {
		held = n.tree.Match(prompt.local, len(prompt.local), kv.AllParts, held[:0])
		for _, m := range held {
			if m.Worker != worker.key() {
				continue
			}
			for _, b := range prompt.blocks[:m.Blocks] {
				if worker.engine.Pool.Find(b.Engine) == 0 {
					return fmt.Sprintf("%d blocks of prompt %d match, and block %x is not in the cache", m.Blocks, at, b.Engine)
				}
			}
		}
	}
	return ""
}
