package workers

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"time"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
)

// ranks is how many data-parallel ranks the server has, each with its own cache; at
// least 1, and perhaps far more than can be.
func (i *serverInfo) ranks() int64 {
	replicas, attn := min(max(i.Replicas, 1), 2*kv.MaxRanks), min(max(i.AttnRanks, 1), 2*kv.MaxRanks)
	switch {
	case i.Events != nil && i.Events.Ranks > 0:
		return i.Events.Ranks
	case i.DPAttention: // the two may tell of the same ranks
		return max(replicas, attn)
	}
	return replicas * attn
}

// cacheBlocks is how many blocks of a size the KV cache of a rank holds; 0: unknown.
func (i *serverInfo) cacheBlocks(size int) int {
	return int(min(max(i.CacheTokens, 0), kv.MaxTokens)) / size
}

// passTokens is how many prompt tokens the engine computes in a pass at most; 0:
// unknown.
func (i *serverInfo) passTokens() int { return int(min(max(i.PassTokens, 0), kv.MaxTokens)) }

// publishes tells whether the server names a publisher of KV events that can be
// followed.
func (i *serverInfo) publishes() bool {
	return i.Events != nil && i.Events.Port != 0 && (i.Events.Publisher == "" || i.Events.Publisher == "zmq")
}

// endpoint returns where rank 0 has a socket: on the port that the server tells, at the
// host that it tells or, where that is a wildcard, the host of the worker's URL. Empty:
// there is none.
func (i *serverInfo) endpoint(base string, port uint16) string {
	if !i.publishes() || port == 0 {
		return ""
	}
	endpoint, err := kv.ParseEndpoint(reachable(fmt.Sprintf("tcp://%s:%d", i.Events.Host, port), hostOf(base)))
	if err != nil {
		return ""
	}
	return endpoint
}

// sources returns where so many ranks publish their KV events. What spec gives is that
// of rank 0: as on the server, ranks have consecutive ports.
func (i *serverInfo) sources(spec Attached, ranks int) map[uint32]events.Source {
	var first events.Source
	if i.publishes() {
		first = events.Source{Endpoint: i.endpoint(spec.URL, i.Events.Port), Replay: i.endpoint(spec.URL, i.Events.Replay), Topic: i.Events.Topic}
	}
	var keeps bufferSteps
	_ = json.Unmarshal([]byte(i.EventsConfig), &keeps) // else it stays unknown
	first.Buffer = keeps.batches()
	first.Endpoint, first.Replay = cmp.Or(spec.KVEvents, first.Endpoint), cmp.Or(spec.Replay, first.Replay)
	byRank := map[uint32]events.Source{}
	for rank := uint32(0); rank < uint32(ranks) && first.Endpoint != ""; rank++ {
		source := first
		source.Endpoint, source.Replay = ofRank(first.Endpoint, rank), ofRank(first.Replay, rank)
		byRank[rank] = source
	}
	return byRank
}

// loadOf returns where a rank publishes its load; empty: it does not. What spec gives
// goes before what the server tells.
func (i *serverInfo) loadOf(spec Attached, rank uint32) string {
	if spec.Load != "" {
		return spec.loadOf(rank)
	}
	if i.Events == nil {
		return ""
	}
	return ofRank(i.endpoint(spec.URL, i.Events.Load), rank)
}

// ofRank returns the endpoint of a rank where that of rank 0 is known: ranks have
// consecutive ports. An endpoint without a port is that of all.
func ofRank(endpoint string, rank uint32) string {
	address, port, found := cutLast(endpoint, ":")
	number, err := strconv.ParseUint(port, 10, 16)
	if rank == 0 || !found || err != nil {
		return endpoint
	}
	return fmt.Sprintf("%s:%d", address, number+uint64(rank))
}

// Configurations that turn on what the router follows.
const (
	sglangEvents = `--kv-events-config '{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5757"}' --load-publish-endpoint tcp://*:5657`
	vllmEvents   = `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5757"}'`
)

// keepsPrompts tells whether the server keeps the blocks of prompts at all, and if not
// by which flags it would.
func (i *serverInfo) keepsPrompts() (keeps bool, remedy string) {
	switch {
	case i.NoRadix:
		return false, "start it without --disable-radix-cache"
	case *i.Mode == kv.RoleDecode.String() && !i.DecodeRadix:
		return false, "a decode server keeps prompts with --disaggregation-decode-enable-radix-cache only"
	}
	return true, ""
}

// eventsRemedy says how the server is made to publish KV events.
func (i *serverInfo) eventsRemedy() string {
	if i.EventsConfig != "" {
		return "its --kv-events-config names no publisher over TCP: start it with " + sglangEvents
	}
	return "start it with " + sglangEvents
}

// tellOfEvents warns, once, of what the router does not learn of an attached worker's
// blocks. Sources are those that are followed.
func (in *incarnation) tellOfEvents(sources []events.Source) {
	if !in.f.cfg.KVEvents || in.toldSilent {
		return
	}
	remedy := "start it with " + vllmEvents + in.orName("kv-events")
	keeps, late := true, in.info == nil
	switch {
	case in.info != nil:
		keeps, remedy = in.info.keepsPrompts()
		if remedy == "" {
			remedy = in.info.eventsRemedy() + in.orName("kv-events")
		}
	case in.engine == kv.EngineSGLang:
		remedy = "start it with " + sglangEvents + in.orName("kv-events")
	}
	silent := len(sources) == 0 || !keeps && in.w.Spec.KVEvents == ""
	if silent && late && time.Since(in.began) < in.f.Timing.silentAfter {
		return // it may name them yet
	}
	in.toldSilent = true
	if silent {
		in.f.log.Warn(fmt.Sprintf("%s: publishes no KV events: routed by load only", in.w), "url", in.w.Spec.URL, "remedy", remedy)
		return
	}
	if in.info != nil && in.info.Events != nil && in.info.Events.BlockSize > 0 && in.info.Events.BlockSize != int64(in.blockSize) {
		in.f.log.Error(fmt.Sprintf("%s: the engine's block size differs from the router's: its events are dropped; start both with the same size (--page-size of SGLang, --block-size of the router)", in.w),
			"url", in.w.Spec.URL, "engine", in.info.Events.BlockSize, "router", in.blockSize)
	}
	for _, source := range sources {
		if source.Replay == "" {
			in.f.log.Warn(fmt.Sprintf("%s: its KV events have no replay: blocks that it stored before are not known", in.w), "url", in.w.Spec.URL, "rank", source.Worker.Rank,
				"remedy", `give its --kv-events-config a "replay_endpoint":"tcp://*:5757"`+in.orName("replay"))
			return
		}
	}
}

// orName says where an endpoint of the worker can be named. Only --worker and a file
// have a place for it.
func (in *incarnation) orName(key string) string {
	switch {
	case in.w.found != nil:
		return ", or, with --discovery file:, name " + key + " there"
	case in.w.added != nil:
		return "" // whoever adds a worker gives its URL alone
	}
	return ", or name " + key + "= in --worker"
}

// know takes in what an SGLang server tells of itself.
func (in *incarnation) know(info *serverInfo) {
	if info == nil {
		return
	}
	in.info, in.ranks = info, int(min(info.ranks(), kv.MaxRanks))
	if n := info.ranks(); n > kv.MaxRanks {
		in.f.tooManyRanks(in.w.Spec, n)
	}
	in.isSGLang()
}

// isSGLang notes that the worker runs SGLang.
func (in *incarnation) isSGLang() {
	in.engine = kv.EngineSGLang
	in.f.update(in.w, func(s *Status) { s.Engine = in.engine })
}

// tooManyRanks warns of ranks that are not followed.
func (f *Fleet) tooManyRanks(spec Attached, named int64) {
	f.log.Warn(fmt.Sprintf("worker %d: names %d data-parallel ranks: only the first %d are followed", spec.ID, named, kv.MaxRanks), "url", spec.URL)
}

// loadsPath is where an SGLang server lists the loads of its ranks.
const loadsPath = "/v1/loads?include=core"

// sglangSizes asks an SGLang server how many blocks the KV cache of each rank has. What
// the server tells of itself is rank 0's: others may have more or less memory.
func (in *incarnation) sglangSizes(ranks []uint32) (map[uint32]int, error) {
	info, blocks := in.info, map[uint32]int{}
	var err error
	if info == nil { // the router has started it
		info, err = in.f.serverInfo(in.ctx, in.w.Spec)
	}
	if info != nil && info.CacheTokens > 0 {
		for _, rank := range ranks {
			blocks[rank] = info.cacheBlocks(in.blockSize)
		}
	}
	if in.ranks > 1 || len(ranks) > 1 {
		if list, failure := in.f.reader(in.w).listLoads(in.ctx, in.w.Spec.URL+loadsPath); failure == nil {
			maps.Copy(blocks, list.blocks(in.blockSize))
		}
	}
	return blocks, err
}

// errStuck says that an SGLang server's HTTP side answers, and its engine does not.
type errStuck time.Duration

func (e errStuck) Error() string {
	return fmt.Sprintf("its scheduler has not answered for %s", time.Duration(e))
}

// look asks the worker whether it is well. An SGLang server that has been well is asked
// for /ping, which costs nothing: its /health computes a token, and takes a second.
func (in *incarnation) look() error {
	if in.engine != kv.EngineSGLang || !in.answered {
		return in.f.look(in.ctx, in.w.Spec, in.answered)
	}
	err := in.f.lookAt(in.ctx, in.w.Spec, "/ping", true)
	var status *statusError
	if errors.As(err, &status) && status.status == http.StatusNotFound {
		return in.f.look(in.ctx, in.w.Spec, true)
	}
	if err == nil && in.stuck.Load() {
		return errStuck(in.f.Timing.engineLimit)
	}
	return err
}

// watchEngine tells look, until the incarnation ends, whether an SGLang server's
// schedulers work: each publishes its load once a second, and one that does not is asked
// for its state, for which no token is computed either.
func (in *incarnation) watchEngine(spec Attached) {
	for in.f.sleep(in.ctx, spread(in.f.Timing.engineEvery), nil) {
		stuck := false
		if !in.heard.since(time.Now().Add(-in.f.Timing.engineEvery)) {
			err := in.f.getInfo(in.ctx, spec, in.f.Timing.engineLimit, nil)
			stuck = errors.Is(err, context.DeadlineExceeded)
		}
		if in.ctx.Err() == nil && in.stuck.Swap(stuck) != stuck {
			in.f.ReportFailure(in.w.id)
		}
	}
}

// hearing is when load sockets last spoke. Its methods are safe for concurrent use; the
// zero value has no sockets.
type hearing struct {
	mu   sync.Mutex
	last map[kv.WorkerKey]time.Time
}

// note notes that a rank's socket speaks; at the zero time: that it has one.
func (h *hearing) note(rank kv.WorkerKey, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last == nil {
		h.last = map[kv.WorkerKey]time.Time{}
	}
	h.last[rank] = now
}

// since tells whether there are sockets, and all have spoken after then.
func (h *hearing) since(then time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, last := range h.last {
		if last.Before(then) {
			return false
		}
	}
	return len(h.last) > 0
}
