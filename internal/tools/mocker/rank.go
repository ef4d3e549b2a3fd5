package mocker

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/tools/engine"
)

// Rank is one data-parallel rank of a simulated worker: an engine of its own with
// its own cache, KV events and load. The engine belongs to one goroutine; Do runs a
// function there.
type Rank struct {
	w        *Worker
	number   int
	Events   *Events // nil: publishes none
	loads    *zmq.Publisher
	Counts   counts
	inFlight atomic.Int64 // choices being answered

	wake chan struct{} // holds a token when commands has some

	mu       sync.Mutex // guards commands
	commands []func(*engine.Engine)

	// What follows belongs to the engine's goroutine.
	Engine   *engine.Engine
	changes  []Event    // of the step under way
	lower    []Event    // of vLLM's lower tiers, since the last batch
	shuffle  *rand.Rand // orders them
	loadsEnd time.Time  // when the last load from lower tiers ends
	// published has the hashes of blocks with another name in events: SGLang's events do not
	// distinguish blocks that differ by their extra_key alone. By the name in the engine.
	published map[uint64]uint64

	loadChanged chan struct{} // holds a token when load is new
	load        atomic.Pointer[Load]
	free        atomic.Int64 // blocks that hold nothing
	adapters    atomic.Pointer[shownAdapters]
}

// Load is a rank's load as published.
type Load struct {
	Waiting int     `json:"num_waiting_reqs"`
	Running int     `json:"num_running_reqs"`
	Usage   float64 `json:"kv_cache_usage"`

	// Reported by SGLang only, tokens.
	Used     int `json:"-"` // of requests in the batch
	Queued   int `json:"-"` // of waiting prompts
	Uncached int `json:"-"` // those of them that were not in the cache
}

// shownAdapters are the LoRA adapters of requests that run or wait after a step.
type shownAdapters struct {
	names string // separated by commas
	at    time.Time
}

// counts are the counters of a rank on the metrics page.
type counts struct {
	PromptTokens, GenerationTokens, prefixQueries, prefixHits, ExternalHits, finishedLength, finishedStop, Aborted atomic.Int64

	prefilled, prefillMicros atomic.Int64 // prompt tokens computed, and how long the passes took that did
	evicted                  atomic.Int64 // tokens of blocks
	tiers                    tierCounts
}

// newRank opens the ports of a worker's rank, numbered after those of the
// workers and ranks before it.
func newRank(w *Worker, number int, settings engine.Settings) (*Rank, error) {
	r := &Rank{w: w, number: number, wake: make(chan struct{}, 1), loadChanged: make(chan struct{}, 1), published: map[uint64]uint64{}}
	r.free.Store(int64(settings.Blocks))
	settings.Silent = slices.Contains(w.cfg.SilentTiers, uint64(w.number))
	r.shuffle = rand.New(rand.NewPCG(w.random.Uint64(), 2))
	r.Engine = engine.New(settings, r.cacheChanged, w.tiers()...)
	r.Engine.LoadNow = r.loadLower
	r.Engine.Fetch = func(request *engine.Request) { close(request.Tag.(*Choice).fetching) }
	cfg, at := &w.cfg, w.number*w.cfg.Ports.Ranks+number
	var err error
	if cfg.KVEvents {
		if r.Events, err = NewEvents(cfg.at(cfg.Ports.KVEvents+at), cfg.at(cfg.Ports.KVReplay+at), cfg.BlockSize); err != nil {
			return nil, err
		}
		r.Events.Rank, r.Events.array, r.Events.sglang = number, cfg.ArrayEvents, w.sglang()
		r.Events.Keep = cfg.BufferSteps
		r.Events.drop, r.Events.duplicate, r.Events.delay = cfg.DropEvents, cfg.DuplicateEvents, cfg.DelayEvents
		r.Events.random = rand.New(rand.NewPCG(w.random.Uint64(), 1))
	}
	if r.loads, err = zmq.NewPublisher(cfg.at(cfg.Ports.Load + at)); err != nil {
		r.Events.Close()
		return nil, err
	}
	return r, nil
}

func (r *Rank) unlisten() {
	r.Events.Close()
	r.loads.Close()
}

// Do schedules a call of f with the engine between two of its steps. It does not
// wait.
func (r *Rank) Do(f func(*engine.Engine)) {
	r.mu.Lock()
	r.commands = append(r.commands, f)
	r.mu.Unlock()
	signalOnce(r.wake)
}

// Ask is Do, but waits until f has been called; it returns false if the worker has
// ended before.
func (r *Rank) Ask(ctx context.Context, f func(*engine.Engine)) bool {
	done := make(chan struct{})
	r.Do(func(e *engine.Engine) {
		f(e)
		close(done)
	})
	select {
	case <-done:
		return true
	case <-ctx.Done():
	case <-r.w.ctx.Done():
	}
	return false
}

// submit has the engine begin with an answer; leave must follow. It does not
// wait: refused gets an error if the engine cannot take a choice.
func (r *Rank) submit(answer *Answer) (refused <-chan error) {
	failed := make(chan error, 1)
	r.inFlight.Add(int64(len(answer.choices)))
	r.Do(func(e *engine.Engine) {
		for _, c := range answer.choices {
			if err := e.Submit(c.request); err != nil {
				failed <- err
				return
			}
			r.Counts.PromptTokens.Add(int64(c.prompt))
			r.Counts.prefixQueries.Add(int64(c.prompt))
		}
	})
	return failed
}

// leave ends an answer: what its handler has not taken whole is aborted.
func (r *Rank) leave(answer *Answer) {
	r.inFlight.Add(-int64(len(answer.choices)))
	for _, c := range answer.choices {
		r.Counts.prefixHits.Add(c.hits.Load())
		if len(r.Engine.Lower) > 0 {
			r.Counts.tiers.queries.Add(int64(c.prompt) - c.hits.Load())
			r.Counts.tiers.host.Add(c.host.Load())
			r.Counts.tiers.disk.Add(c.disk.Load())
			r.Counts.tiers.peer.Add(c.peer.Load())
		}
		switch {
		case c.Sent < c.Output || c.Finish == finishAbort:
			r.Counts.Aborted.Add(1)
			r.Do(func(e *engine.Engine) { e.Abort(c.request) })
		case c.Finish == "stop":
			r.Counts.finishedStop.Add(1)
		default:
			r.Counts.finishedLength.Add(1)
		}
	}
}

// maxLate is how far the engine's steps may be behind their times before it
// stops catching up: sleeping is only exact to a millisecond or so.
const maxLate = 20 * time.Millisecond

// stuckPoll is how often an engine that stands still checks whether it may continue.
const stuckPoll = 10 * time.Millisecond

// step runs the engine, one step after the other, until the worker ends.
func (r *Rank) step() {
	var due time.Time // when the step under way ends
	for r.w.ctx.Err() == nil {
		r.runCommands()
		took, busy := r.Engine.Begin()
		if !busy {
			if r.w.sglang() { // a request that was aborted has left blocks
				r.publishChanges()
			} else if lower := r.takeLower(); len(lower) > 0 {
				r.Events.add(lower)
			}
			r.reportLoad()
			select {
			case <-r.w.ctx.Done():
			case <-r.wake:
			}
			due = time.Time{}
			continue
		}
		r.publishChanges()
		if n := r.Engine.Prefill(); n > 0 {
			r.Counts.prefilled.Add(int64(n))
			r.Counts.prefillMicros.Add(took.Microseconds())
		}
		now := time.Now()
		if due.Before(now.Add(-maxLate)) {
			due = now
		}
		due = due.Add(took)
		if r.w.cfg.SpeedupRatio > 0 && !r.w.wait(time.Until(due)) {
			return
		}
		if r.w.Hung.Load() {
			<-r.w.ctx.Done()
			return
		}
		for r.w.Stuck.Load() {
			if !r.w.wait(stuckPoll) {
				return
			}
		}
		ended := r.Engine.End()
		if r.w.sglang() { // blocks computed by the pass are in the cache now
			r.publishChanges()
		}
		for _, done := range ended {
			r.Counts.GenerationTokens.Add(1)
			done.Tag.(*Choice).advance(done)
		}
		r.reportLoad()
	}
}

func (r *Rank) runCommands() {
	r.mu.Lock()
	commands := r.commands
	r.commands = nil
	r.mu.Unlock()
	for _, f := range commands {
		f(r.Engine)
	}
}

// cacheChanged applies one change of the engine's cache.
func (r *Rank) cacheChanged(e engine.Event) {
	if e.Tier != kv.Device {
		r.tierChanged(e)
		return
	}
	if !e.Stored {
		r.Counts.evicted.Add(int64(len(e.Removed) * r.w.cfg.BlockSize))
		removed := r.renamed(e.Removed)
		// A step's removals are one event, as long as no store comes between.
		if n := len(r.changes); n > 0 && r.changes[n-1].Removed != nil && r.changes[n-1].Tier == kv.Device {
			r.changes[n-1].Removed = append(r.changes[n-1].Removed, removed...)
			return
		}
		r.changes = append(r.changes, Event{Removed: removed})
		return
	}
	r.changes = append(r.changes, r.stored(e))
}

// stored is the published form of blocks that were stored.
func (r *Rank) stored(e engine.Event) Event {
	choice := e.Request.Tag.(*Choice)
	size := r.w.cfg.BlockSize
	change := Event{
		Stored: e.Blocks, Parent: e.Parent, HasParent: e.HasParent, Adapter: choice.adapter,
		Tokens: choice.tokens[e.First*size : (e.First+len(e.Blocks))*size],
	}
	if e.First == 0 || r.w.sglang() {
		change.Salt = choice.salt
	}
	if choice.extra != "" {
		change.Stored = slices.Clone(e.Blocks)
		for i := range change.Stored {
			published := choice.published[e.First+i]
			r.published[e.Blocks[i].Engine], change.Stored[i].Engine = published, published
		}
		if e.HasParent {
			change.Parent = choice.published[e.First-1]
		}
	}
	return change
}

func (r *Rank) publishChanges() {
	r.changes = append(r.changes, r.takeLower()...)
	if len(r.changes) > 0 {
		r.Events.add(r.changes)
		r.changes = nil
	}
}

// ResetPrefixCache empties the cache and, with lower, the tiers below it, of SGLang's
// the host. Like vLLM it refuses that while requests use
// blocks, like SGLang also while requests wait. vLLM's next step publishes it.
func (r *Rank) ResetPrefixCache(e *engine.Engine, lower bool) bool {
	running, waiting, usage := e.Load()
	if usage > 0 || r.w.sglang() && running+waiting > 0 {
		return false
	}
	e.Reset()
	for _, s := range e.Lower {
		if lower && (!r.w.sglang() || s.Tier == kv.Host) {
			s.Reset()
		}
	}
	if len(e.Lower) == 0 { // else tiers may have them
		clear(r.published)
	}
	r.changes = append(r.changes, Event{Cleared: true})
	if r.w.sglang() {
		r.publishChanges()
	}
	return true
}

// loadPause and loadRepeat are the shortest and the longest time between two
// messages about a worker's load.
const (
	loadPause  = 5 * time.Millisecond
	loadRepeat = time.Second
)

func (r *Rank) reportLoad() {
	running, waiting, usage := r.Engine.Load()
	load := &Load{Waiting: waiting, Running: running, Usage: usage}
	if r.w.cfg.loraSlots() > 0 {
		r.adapters.Store(&shownAdapters{strings.Join(r.Engine.Adapters(), ","), time.Now()})
	}
	if r.w.sglang() {
		load.Used = r.Engine.Pool.Active() * r.w.cfg.BlockSize
		load.Queued, load.Uncached = r.Engine.Queued()
		r.free.Store(int64(r.Engine.Pool.FreeBlocks()))
	}
	r.load.Store(load)
	signalOnce(r.loadChanged)
}

// CurrentLoad returns the load after the last step.
func (r *Rank) CurrentLoad() Load {
	if load := r.load.Load(); load != nil {
		return *load
	}
	return Load{}
}

// publishLoad sends the newest load when it is new, and from time to time. SGLang
// sends none again that is as the last.
func (r *Rank) publishLoad() {
	repeat := time.NewTicker(loadRepeat)
	defer repeat.Stop()
	var number uint64
	var last []byte
	for {
		again := false
		select {
		case <-r.w.ctx.Done():
			return
		case <-r.loadChanged:
		case <-repeat.C:
			again = true
		}
		load := r.load.Load()
		switch {
		case load == nil || r.w.Hung.Load():
		case !r.w.sglang():
			r.loads.Publish(MustJSON(load))
		default:
			if stat := r.loadStat(load); again || !bytes.Equal(stat, last) {
				r.loads.Publish([]byte(loadTopic), binary.BigEndian.AppendUint64(nil, number), stat)
				number++
				last = stat
			}
		}
		if !r.w.wait(loadPause) {
			return
		}
	}
}
