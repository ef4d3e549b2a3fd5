package workers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/peers/cells"
)

// Cell is the state of a router below this one, as its worker.
type Cell struct {
	Router       string  `json:"router"` // names the process
	Version      string  `json:"version"`
	Ready        bool    `json:"ready"`
	Workers      int     `json:"workers"`       // ranks below it that are up
	NetworkMS    float64 `json:"network_ms"`    // measured: of a round trip
	SummaryBytes int     `json:"summary_bytes"` // memory of its summary; 0: it reports no usable one
	Received     uint64  `json:"summary_received_bytes"`
	Snapshots    uint64  `json:"summary_snapshots"` // whole summaries received

	Below []string `json:"below,omitempty"` // names of the routers below it
}

const (
	// cellPause and cellPauseMost bound the pause before a router is tried again. A try costs
	// it no more than a request.
	cellPause     = 250 * time.Millisecond
	cellPauseMost = 5 * time.Second
	// cellAgain is the pause between two tries to resume a stream that was cut.
	cellAgain = 100 * time.Millisecond
	// pingEvery is the time between two measurements of the round trip.
	pingEvery = time.Second
)

// superviseCell follows a router below this one until ctx is done, over all its incarnations.
func (f *Fleet) superviseCell(ctx context.Context, w *worker) {
	c := &cell{f: f, w: w, view: &summary.View{}}
	for pause := cellPause; ctx.Err() == nil; pause = min(2*pause, cellPauseMost) {
		if c.follow(ctx) {
			pause = cellPause
		}
		if !f.sleep(ctx, spread(pause), w.wake) {
			break
		}
	}
	f.update(w, func(s *Status) { s.State = StateStopped })
}

// cell is a router below this one. One goroutine uses it.
type cell struct {
	f    *Fleet
	w    *worker
	view *summary.View // kept from stream to stream: a router that returns may resume it

	stream  *cells.Stream
	reports chan heard
	opened  time.Time // when the stream was opened
	heard   time.Time // of the last report
	last    cells.State
	info    cells.Info
	way     cells.Way
	running sync.WaitGroup // the reader of the stream, and the measurement
	in      *incarnation   // nil: it has not been ready yet
	held    bool           // it is not ready: it gets no new requests, and those in flight continue
	counts  Cell
}

// heard is a report, or the end of a stream.
type heard struct {
	cells.Report
	err error
}

// follow follows the router from its first report to its end, and reports whether there was one.
func (c *cell) follow(ctx context.Context) (met bool) {
	c.w.applyDiscovered()
	ctx, end := context.WithCancel(ctx)
	defer c.running.Wait()
	defer end()
	if err := c.open(ctx); err != nil {
		c.f.unreachable(ctx, c.w, err)
		return false
	}
	c.counts = Cell{Router: c.stream.Hello.Router, Version: c.stream.Hello.Version}
	ways := c.measure(ctx)
	defer c.leave()
	if err := c.take(ctx, c.stream.First); err != nil {
		c.f.unreachable(ctx, c.w, err)
		return false
	}
	c.listen(ctx)
	for {
		select {
		case <-ctx.Done():
			return true
		case looked := <-c.w.look:
			close(looked) // its models are in its reports
		case <-c.w.discoveryChanges():
			c.w.applyDiscovered()
		case <-c.w.wake: // the stream shows it first
		case took := <-ways:
			c.way.Add(took)
		case r := <-c.reports:
			err := r.err
			if err == nil {
				err = c.take(ctx, r.Report)
			} else {
				err = c.resume(ctx, err)
			}
			if err != nil {
				c.down(ctx, err)
				return true
			}
		}
	}
}

// open opens a stream, whose reports are sent to c.reports.
func (c *cell) open(ctx context.Context) error {
	stream, err := c.f.cells.Open(ctx, c.w.spec.URL, c.w.currentKey(), c.view)
	if err != nil {
		return err
	}
	reports := make(chan heard)
	c.stream, c.reports, c.opened, c.heard = stream, reports, time.Now(), time.Now()
	return nil
}

// listen begins to read the stream, until it ends or ctx is done.
func (c *cell) listen(ctx context.Context) {
	stream, reports := c.stream, c.reports
	c.running.Go(func() {
		defer context.AfterFunc(ctx, stream.Close)()
		for {
			report, err := stream.Next()
			select {
			case reports <- heard{report, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				stream.Close()
				return
			}
		}
	})
}

// measure measures round trips until ctx is done. The first one, which opens the connection, does
// not count.
func (c *cell) measure(ctx context.Context) <-chan time.Duration {
	ways, url := make(chan time.Duration), c.w.spec.URL
	c.running.Go(func() {
		for connected := false; ctx.Err() == nil; c.f.sleep(ctx, pingEvery, nil) {
			took, err := c.f.cells.Ping(ctx, url)
			if err == nil && !connected {
				took, err = c.f.cells.Ping(ctx, url)
			}
			if connected = err == nil; !connected {
				continue
			}
			select {
			case ways <- took:
			case <-ctx.Done():
			}
		}
	})
	return ways
}

// take applies a report. An error ends the incarnation.
func (c *cell) take(ctx context.Context, r cells.Report) error {
	c.heard, c.last = time.Now(), r.State
	c.counts.Received += r.Bytes
	c.counts.Snapshots += r.Snapshots
	changed := r.Info != nil
	if changed {
		if c.in != nil && len(c.info.Models) > 0 && !slices.Contains(r.Info.Models, c.info.Models[0]) && len(r.Info.Models) > 0 {
			return fmt.Errorf("it now serves %q: attaching it again", r.Info.Models[0])
		}
		c.info = *r.Info
	}
	if c.in == nil {
		_, whole := c.view.Position()
		switch {
		case !c.last.Ready:
			c.f.update(c.w, func(s *Status) { s.State, s.LastError = StateConnecting, "no worker of it is ready" })
			return nil
		case c.stream.Hello.Summary && !whole: // it follows the first report
			return nil
		case c.way.Shortest() == 0 && time.Since(c.opened) < cells.Silence: // it would seem to be local
			return nil
		}
		return c.begin(ctx)
	}
	if c.in.blockSize = c.blockSize(); changed || c.in.targets[0].TotalBlocks != c.last.Blocks {
		c.aim()
		c.in.announceAnew()
	}
	c.show()
	return nil
}

// begin makes the router a routing target.
func (c *cell) begin(ctx context.Context) error {
	in := c.f.begin(ctx, c.w)
	in.answered, in.met, in.engine = true, true, c.info.Engine
	if err := in.join(kv.Served{Names: c.base(), Root: c.info.Root}); err != nil {
		in.end(err.Error())
		return err
	}
	c.in = in
	c.f.update(c.w, func(s *Status) { s.Engine = in.engine })
	in.blockSize = c.blockSize()
	if !c.stream.Hello.Summary {
		c.f.update(c.w, func(s *Status) { s.Predictions = "unknown: it reports no summary (--cell)" })
		c.f.log.Warn(fmt.Sprintf("%s: routed by load alone, because it reports no summary", c.w), "url", c.w.spec.URL,
			"remedy", "start that router with --cell")
	}
	for _, l := range c.info.Lookaheads {
		// cannot fail
		_, _ = in.index.Apply(kv.WorkerKey{Worker: in.w.id}, &radix.Change{Kind: radix.LookaheadStored, Set: &radix.Setting{Lookahead: l}})
	}
	c.aim()
	in.markUp()
	c.f.log.Info(fmt.Sprintf("%s: attached", c.w), "url", c.w.spec.URL, "router", c.stream.Hello.Router, "version", c.stream.Hello.Version,
		"models", c.info.Models, "workers", c.last.Workers)
	c.show()
	return nil
}

// blockSize returns the tokens in a block of the router's workers.
func (c *cell) blockSize() int {
	return min(max(cmp.Or(c.info.BlockSize, c.stream.Hello.BlockSize), 1), kv.MaxBlock)
}

// cache says how the caches of the router's workers are known: its summary has those of workers that
// it knows exactly.
func (c *cell) cache() CacheState {
	state := CacheState{BlockSize: c.in.blockSize, Since: time.Now()}
	if !c.stream.Hello.Summary {
		state.Known, state.Reason, state.Remedy = kv.LoadOnly, "it reports no summary (--cell)", "start that router with --cell"
	}
	return state
}

// base returns the names of the base model.
func (c *cell) base() []string {
	return slices.DeleteFunc(slices.Clone(c.info.Models), func(name string) bool { return slices.Contains(c.info.Adapters, name) })
}

// aim sets the routing target.
func (c *cell) aim() {
	c.in.aim([]uint32{0}, nil, kv.Target{Ranks: 1, Models: c.info.Models, Adapters: c.info.Adapters, TotalBlocks: c.last.Blocks})
	c.f.update(c.w, func(s *Status) {
		s.Models = c.info.Models
		if cache := c.cache(); s.Cache.Known != cache.Known || s.Cache.BlockSize != cache.BlockSize || s.Cache.Since.IsZero() {
			s.Cache = cache
		}
	})
}

// show passes on the router's report.
func (c *cell) show() {
	before := c.held
	if c.held = !c.last.Ready; c.held || before { // again and again, because discovery may readmit it
		c.f.members.CordonDiscovered(c.w.id, c.held || c.w.current().Cordon != "")
	}
	if c.held != before {
		c.f.log.Info(fmt.Sprintf("%s: ready: %t", c.w, !c.held), "leaving", c.last.Leaving)
	}
	c.f.members.ShowCell(kv.WorkerKey{Worker: c.w.id}, c.last.Report(c.heard, c.way.Shortest()), c.view)
	now := c.counts
	now.Ready, now.Workers, now.SummaryBytes = c.last.Ready, c.last.Workers, c.view.Bytes()
	now.Below = c.info.Below
	now.NetworkMS = float64(c.way.Shortest()) / float64(time.Millisecond)
	c.f.update(c.w, func(s *Status) { s.Cell = &now })
}

// resume reopens the stream that ended with err. An error means that the router is down.
func (c *cell) resume(ctx context.Context, err error) error {
	if c.in == nil || errors.Is(err, cells.ErrContent) {
		return err
	}
	if c.last.Leaving {
		return c.drains(ctx)
	}
	router := c.counts.Router
	for limit := c.heard.Add(cells.Silence); time.Now().Before(limit); {
		until, cancel := context.WithDeadline(ctx, limit)
		opened := c.reopen(ctx, until)
		cancel()
		switch {
		case opened == nil && c.stream.Hello.Router == router:
			return c.take(ctx, c.stream.First)
		case opened == nil:
			return errors.New("it was restarted")
		case probe.Refused(opened), ctx.Err() != nil:
			return opened
		}
		err = opened
		if !c.f.sleep(ctx, cellAgain, nil) {
			return err
		}
	}
	return err
}

// reopen is open within until; the stream lives on until ctx is done.
func (c *cell) reopen(ctx, until context.Context) error {
	opening, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(until, cancel)
	err := c.open(opening)
	if !stop() && err == nil {
		c.stream.Close()
		err = context.Cause(until)
	}
	if err != nil {
		cancel()
		return err
	}
	c.listen(ctx)
	return nil
}

// drains waits until the requests of a router that leaves have ended, or it is replaced. It
// returns why it is down.
func (c *cell) drains(ctx context.Context) error {
	for limit := time.Now().Add(c.f.timing.leaveLimit); time.Now().Before(limit) && c.f.members.Busy(c.w.id); {
		if !c.f.sleep(ctx, cellAgain, nil) {
			return ctx.Err()
		}
	}
	return errors.New("it has left")
}

// down takes the router out of routing.
func (c *cell) down(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	if c.in != nil && c.in.up {
		c.f.log.Warn(fmt.Sprintf("%s: down: %v", c.w, err), "url", c.w.spec.URL)
		c.in.markDown(err.Error())
	}
	c.f.update(c.w, func(s *Status) { s.State, s.LastError = StateConnecting, err.Error() })
}

// leave ends the incarnation.
func (c *cell) leave() {
	c.stream.Close()
	if c.in != nil {
		c.in.end("no longer followed")
		c.in = nil
	}
	if c.held {
		c.held = false
		c.f.members.CordonDiscovered(c.w.id, c.w.current().Cordon != "")
	}
	c.f.update(c.w, func(s *Status) { s.Cell = nil })
}
