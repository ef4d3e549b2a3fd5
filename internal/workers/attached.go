package workers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
)

// Attached is a worker that somebody else runs, as given by --worker.
type Attached struct {
	ID        uint64
	HasID     bool   // ID was given; else ParseConfig has chosen the next free one
	URL       string // http://host:port, no slash at the end
	KVEvents  string // ZMQ endpoint of its KV events; empty: asked of the worker
	Replay    string // ZMQ endpoint of their replay; empty: asked of the worker
	Load      string // ZMQ endpoint of its load; empty: asked of the worker, else its /metrics is polled
	KeyEnv    string // environment variable with its key; empty: it has none of its own
	kv.Disagg        // what it leaves out is asked of the worker

	// EventsPort is where rank 0 of a vLLM server publishes KV events that has no route
	// to say so; rank i does at this port plus i. 0: it publishes none.
	EventsPort uint16

	Key kv.Secret // bearer key that it asks for; may be empty
}

// attachedKeys are the keys that UnmarshalText reads.
const attachedKeys = "url, id, kv-events, replay, load, key-env, role, kind, bootstrap"

// UnmarshalText reads url=...,id=...,kv-events=...,replay=...,load=...,key-env=...,
// role=...,kind=...,bootstrap=... in any order, or a bare URL.
func (w *Attached) UnmarshalText(text []byte) error {
	*w = Attached{}
	seen := map[string]bool{}
	for part := range strings.SplitSeq(string(text), ",") {
		part = strings.TrimSpace(part)
		key, value, found := strings.Cut(part, "=")
		if !found && strings.Contains(part, "://") {
			key, value = "url", part
		} else if !found || value == "" {
			return fmt.Errorf("worker %q: %q is not key=value; keys are %s", text, part, attachedKeys)
		}
		if seen[key] {
			return fmt.Errorf("worker %q: %s is given twice", text, key)
		}
		seen[key] = true
		var err error
		switch key {
		case "id":
			w.HasID = true
			w.ID, err = strconv.ParseUint(value, 10, 64)
			if err != nil {
				return fmt.Errorf("worker %q: id=%s is not a whole number from 0", text, value)
			}
		case "url":
			if w.URL, err = kv.ParseURL(value); errors.Is(err, kv.ErrUserinfo) {
				return fmt.Errorf("worker: url: %w", err) // not to be shown
			}
		case "kv-events":
			w.KVEvents, err = kv.ParseEndpoint(value)
		case "replay":
			w.Replay, err = kv.ParseEndpoint(value)
		case "load":
			w.Load, err = kv.ParseEndpoint(value)
		case "key-env":
			w.KeyEnv = value
		case "role":
			err = w.Role.UnmarshalText([]byte(value))
		case "kind":
			err = w.Kind.UnmarshalText([]byte(value))
		case "bootstrap":
			err = w.Bootstrap.UnmarshalText([]byte(value))
		default:
			return fmt.Errorf("worker %q: unknown key %s; keys are %s", text, key, attachedKeys)
		}
		if err != nil {
			return fmt.Errorf("worker %q: %s: %w", text, key, err)
		}
	}
	if w.URL == "" {
		return fmt.Errorf("worker %q: url is missing; give url=http://host:port", text)
	}
	return nil
}

// kvEventSource is what vLLM tells about the KV events of one rank.
type kvEventSource struct {
	Enable   bool   `json:"enable_kv_cache_events"`
	Kind     string `json:"publisher"`
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay_endpoint"`
	Topic    string `json:"topic"`
	bufferSteps
}

// bufferSteps is how many batches a replay keeps, as an engine tells it.
type bufferSteps struct {
	Buffer json.RawMessage `json:"buffer_steps"` // a number, or whatever it may be
}

// batches is the number; 0: it does not tell.
func (b bufferSteps) batches() int {
	steps, err := strconv.ParseFloat(string(b.Buffer), 64)
	if err != nil {
		return 0
	}
	return int(min(max(steps, 0), math.MaxInt32))
}

// eventSources finds an attached worker's event streams: those that the flags
// name, and for the rest what the worker itself says. None is no error: not
// every server publishes events.
func (f *Fleet) eventSources(ctx context.Context, w *worker) []events.Source {
	spec := w.Spec
	told := map[string]kvEventSource{}
	w.guess.endpoints, w.guess.contested = nil, false
	err := f.get(ctx, spec, "/kv_event_sources", f.Timing.probeLimit, &told)
	if err == nil {
		sources := f.sourcesOf(told, spec)
		w.hasTold(sources)
		return sources
	}
	f.log.Debug("worker names no KV event sources", "worker", spec.ID, "error", err)
	var status *statusError
	if spec.EventsPort == 0 || !errors.As(err, &status) || status.status != http.StatusNotFound {
		return f.sourcesOf(nil, spec)
	}
	sources := f.sourcesOf(f.usualSources(ctx, w), spec)
	if spec.KVEvents == "" && !f.guesses(w, sources) {
		return nil
	}
	return sources
}

// sourcesOf is eventSources of what the worker has told. Of more than kv.MaxRanks
// ranks the first count.
func (f *Fleet) sourcesOf(told map[string]kvEventSource, spec Attached) []events.Source {
	host := hostOf(spec.URL)
	byRank := map[uint32]events.Source{}
	for rank, source := range told {
		number, err := strconv.ParseUint(rank, 10, 32)
		if err != nil || !source.Enable || source.Endpoint == "" || (source.Kind != "" && source.Kind != "zmq") {
			continue
		}
		byRank[uint32(number)] = events.Source{
			Endpoint: reachable(source.Endpoint, host), Replay: reachable(source.Replay, host), Topic: source.Topic, Buffer: source.batches(),
		}
	}
	if spec.KVEvents != "" {
		first := byRank[0]
		first.Endpoint = spec.KVEvents
		byRank[0] = first
	}
	if first, ok := byRank[0]; ok && spec.Replay != "" {
		first.Replay = spec.Replay
		byRank[0] = first
	}
	return f.listSources(byRank, spec)
}

// listSources returns the sources in the order of their ranks.
func (f *Fleet) listSources(byRank map[uint32]events.Source, spec Attached) (sources []events.Source) {
	for rank, source := range byRank {
		source.Worker = kv.WorkerKey{Worker: spec.ID, Rank: rank}
		source.BlockSize = f.cfg.BlockSize
		sources = append(sources, source)
	}
	slices.SortFunc(sources, func(a, b events.Source) int { return a.Worker.Compare(b.Worker) })
	if len(sources) > kv.MaxRanks {
		f.tooManyRanks(spec, int64(len(sources)))
		sources = sources[:kv.MaxRanks]
	}
	return sources
}

// loadOf returns where a rank publishes its load; empty: only on /metrics. As
// with KV events, ranks take consecutive ports.
func (w Attached) loadOf(rank uint32) string { return ofRank(w.Load, rank) }

// reachable replaces the wildcard of an endpoint that a server binds by the
// host that it is reached at.
func reachable(endpoint, host string) string {
	address, isTCP := strings.CutPrefix(endpoint, "tcp://")
	if !isTCP {
		return endpoint
	}
	bound, port, found := cutLast(address, ":")
	if !found || !slices.Contains([]string{"*", "0.0.0.0", "[::]", "::"}, bound) {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(host, port)
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}

// superviseAttached follows a worker that somebody else runs until ctx is done:
// through every time that it goes and comes back.
func (f *Fleet) superviseAttached(ctx context.Context, w *worker) {
	pause := f.Timing.backoffFirst
	for ctx.Err() == nil {
		wasUp := f.followAttached(ctx, w)
		if ctx.Err() != nil {
			break
		}
		if wasUp {
			pause = f.Timing.backoffFirst
		}
		if !f.sleep(ctx, spread(pause), w.wake) {
			break
		}
		pause = min(2*pause, f.cfg.RestartBackoffMax)
	}
	f.update(w, func(s *Status) { s.State = StateStopped })
}

// usualSources is where a vLLM server publishes its events that has no route to say so:
// its metrics page names its ranks. None: the page has failed, and is to be asked again.
func (f *Fleet) usualSources(ctx context.Context, w *worker) map[string]kvEventSource {
	sizes, err := f.reader(w).cacheSizes(ctx, w.Spec.URL+"/metrics")
	if err != nil && !isThere(err) {
		if w.guess.failures++; w.guess.failures < mostPagesInVain {
			return nil
		}
	}
	if w.guess.failures = 0; len(sizes) == 0 {
		sizes = cacheSizes{0: 0}
	}
	told := map[string]kvEventSource{}
	for rank := range sizes {
		if port := uint32(w.Spec.EventsPort) + rank; rank < kv.MaxRanks && port <= math.MaxUint16 {
			told[fmt.Sprint(rank)] = kvEventSource{Enable: true, Endpoint: fmt.Sprintf("tcp://*:%d", port)}
		}
	}
	return told
}

// followAttached follows one incarnation: from the first answer until the
// process is gone. It returns whether there was an answer.
func (f *Fleet) followAttached(ctx context.Context, w *worker) (wasUp bool) {
	w.takeTold()
	if err := f.look(ctx, w.Spec, false); err != nil {
		if ctx.Err() == nil {
			f.unreachable(w, err)
		}
		return false
	}
	served, err := f.models(ctx, w.Spec)
	if err != nil {
		if ctx.Err() == nil {
			f.unreachable(w, err)
		}
		return false
	}

	info, err := f.serverInfo(ctx, w.Spec)
	if err != nil && served.sglang { // what it tells decides how it is used
		if ctx.Err() == nil {
			f.unreachable(w, err)
		}
		return false
	}

	in := f.begin(ctx, w)
	defer in.end("no longer followed")
	in.answered = true
	if in.know(info); served.sglang {
		in.isSGLang() // behind a gateway that hides the rest, too
	}
	if err := in.join(in.serves(served)); err != nil {
		if ctx.Err() == nil {
			f.unreachable(w, err)
		}
		return false
	}
	in.takePart(partOf(w.Spec.Disagg, info, w.Spec.URL))
	sources := in.eventSources()
	in.follow(served, sources)
	f.log.Info(fmt.Sprintf("%s: attached", w), "url", w.Spec.URL, "engine", in.engine, "models", served.names, "event_streams", len(sources), "role", in.disagg.Role, "kind", in.disagg.Kind)
	in.tellOfEvents(sources)

	for {
		select {
		case <-ctx.Done():
			return true
		case looked := <-w.look:
			in.lookAtModels()
			close(looked)
		case <-w.told():
			sources = in.takeTold(ctx, sources)
			continue
		case <-w.wake:
		case <-time.After(in.pause()):
		}
		in.checkHealth()
		if in.gone {
			return true
		}
		if in.up && in.misses == 0 && f.contested(w) != w.guess.contested {
			sources = in.followAnew(ctx)
			continue
		}
		if in.info != nil || len(sources) > 0 || in.toldSilent || !in.up || in.misses > 0 || !f.cfg.KVEvents {
			continue
		}
		// A server may name its sources only once its engine runs.
		if sources = in.eventSources(); len(sources) > 0 {
			in.follow(in.served, sources)
		}
		in.tellOfEvents(sources)
	}
}

// eventSources finds the worker's event streams.
func (in *incarnation) eventSources() []events.Source {
	if in.info != nil {
		sources := in.f.listSources(in.info.sources(in.w.Spec, in.ranks), in.w.Spec)
		in.w.hasTold(sources)
		return sources
	}
	return in.f.eventSources(in.ctx, in.w)
}

// follow follows these event streams of an attached worker, and the load of what can
// then be routed to, and announces it.
func (in *incarnation) follow(served modelList, sources []events.Source) {
	for _, source := range sources {
		in.followEvents(source)
	}
	in.setTargets(served, sources)
	in.followLoads(in.loadOf)
	in.markUp()
}

// loadOf returns where a rank of an attached worker publishes its load; empty: only on
// its pages.
func (in *incarnation) loadOf(rank uint32) string {
	if in.info != nil {
		return in.info.loadOf(in.w.Spec, rank)
	}
	return in.w.Spec.loadOf(rank)
}

// unreachable notes that an attached worker does not answer; the first time
// since it last did for people to see.
func (f *Fleet) unreachable(w *worker, err error) {
	level := f.log.Debug
	f.update(w, func(s *Status) {
		if s.LastError == "" || s.State != StateConnecting {
			level = f.log.Warn
		}
		s.State = StateConnecting
		s.LastError = err.Error()
	})
	if errors.Is(err, errLeadsBack) {
		level = f.log.Error // it will not mend by itself
	}
	level(fmt.Sprintf("%s: not reachable yet, trying again for ever", w), "url", w.Spec.URL, "error", err)
}
