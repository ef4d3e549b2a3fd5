package workers

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/fleet/probe"
)

// CacheState says how the KV cache of a worker is known.
type CacheState struct {
	Known     kv.Knowledge `json:"known"`
	BlockSize int          `json:"block_size"`       // tokens
	Reason    string       `json:"reason,omitempty"` // why it is not known exactly
	Remedy    string       `json:"remedy,omitempty"` // what would make it known exactly
	Since     time.Time    `json:"since"`
}

// sizeBlocks sets the tokens of a block of the worker: by its events, else by what it reports, else
// --block-size.
func (in *incarnation) sizeBlocks(registered int) {
	reported := in.reported.Block
	if in.info != nil {
		reported = in.info.BlockSize()
	}
	if !in.w.attached { // it was given one
		reported = 0
	}
	size := cmp.Or(int(in.eventBlock.Load()), registered, reported, in.f.cfg.BlockSize)
	in.blockSize = min(max(size, 1), kv.MaxBlock)
}

// resized reports whether the worker's events have shown another block size than it is followed with,
// so that they are followed anew. If the size changes again and again, the pauses between two such times grow.
func (in *incarnation) resized() bool {
	size := int(in.eventBlock.Load())
	if size == 0 || size == in.blockSize || time.Now().Before(in.resizeAfter) {
		return false
	}
	in.resizePause = min(max(2*in.resizePause, minResizePause), maxResizePause)
	in.resizeAfter = time.Now().Add(in.resizePause)
	in.f.log.Info(fmt.Sprintf("%s: its KV events have another block size than expected: following them anew", in.w),
		"expected", in.blockSize, "block_size", size)
	return true
}

// Limits of the pause after the events of a worker are followed anew for their block size.
const (
	minResizePause = time.Second
	maxResizePause = time.Minute
)

// noteBlockSize notes the block size that the worker's events have. Only the first that is not the
// expected one causes a health check.
func (in *incarnation) noteBlockSize(tokens int) {
	if in.eventBlock.Swap(int64(tokens)) == 0 {
		in.w.checkSoon()
	}
}

// knows returns how the cache of a rank is known, and why not exactly.
func (in *incarnation) knows(key kv.WorkerKey) (known kv.Knowledge, reason string) {
	if !in.f.cfg.KVEvents && !in.f.cfg.Assumes {
		return kv.LoadOnly, "the policy does not use cached prefixes"
	}
	if !in.f.cfg.KVEvents {
		return kv.Approximate, "the router does not follow KV events (--no-kv-events, or --prefix-source approx)"
	}
	if in.keepsNone() {
		return kv.LoadOnly, "its engine keeps no prompts"
	}
	in.w.mu.Lock()
	stream := in.w.streams[key]
	in.w.mu.Unlock()
	if stream == nil && in.w.claims.rival != nil {
		return kv.Approximate, fmt.Sprintf("its KV events endpoint %s is that of %s", in.w.claims.awaited, in.w.claims.rival)
	}
	if stream == nil {
		return kv.Approximate, "no KV events of it are followed"
	}
	stats := stream.Stats()
	switch {
	case !stats.Connected.Load() && time.Since(in.began) > in.f.timing.unheardAfter:
		return kv.Approximate, "no connection to its KV events at " + stream.Src.Endpoint
	case stats.BlockSizeMismatch.Load() > 0 && stats.Cold.Load():
		return kv.Approximate, "the blocks of its KV events cannot be followed"
	case stats.Cold.Load() && stats.Batches.Load() > 0:
		return kv.Approximate, "its KV events do not go back to its start"
	}
	return kv.Exact, ""
}

// review sets how the caches of the worker's targets are known, and announces those that have changed.
func (in *incarnation) review() {
	if in.up && in.reviseTargets() {
		in.announceAnew()
	}
}

// reviseTargets sets Known of the targets. It reports whether any has changed.
func (in *incarnation) reviseTargets() (changed bool) {
	state := CacheState{BlockSize: in.blockSize, Since: time.Now()}
	for i := range in.targets {
		known, reason := in.knows(in.targets[i].Key)
		if known > state.Known {
			state.Known, state.Reason = known, reason
		}
		changed = changed || in.targets[i].Known != known
		in.targets[i].Known = known
	}
	before := in.w.current().Cache
	if before.Known != state.Known || before.Reason != state.Reason || before.BlockSize != state.BlockSize || before.Since.IsZero() {
		if state.Known != kv.Exact && in.f.cfg.KVEvents {
			state.Remedy = in.eventsRemedy()
		}
		in.f.update(in.w, func(s *Status) { s.Cache = state })
	}
	in.logKnown(state)
	return changed
}

// logKnown logs how the worker's cache is known, if that has changed. A server may name its events only
// once its engine runs.
func (in *incarnation) logKnown(state CacheState) {
	remedy, _, quoted := strings.Cut(in.w.current().Cache.Remedy, "--kv-events-config '")
	if quoted { // the log would escape its quotes
		remedy += "the arguments that kvrouter doctor prints"
	}
	late := in.info != nil || time.Since(in.began) >= in.f.timing.silentAfter
	switch {
	case state.Reason == in.w.logged || !in.f.cfg.KVEvents || state.Known != kv.Exact && !late:
		return
	case state.Known == kv.Exact:
		in.f.log.Info(fmt.Sprintf("%s: its KV cache is known exactly", in.w), "url", in.w.spec.URL, "block_size", state.BlockSize)
	case state.Known == kv.LoadOnly:
		in.f.log.Warn(fmt.Sprintf("%s: routed by load only: %s", in.w, state.Reason), "url", in.w.spec.URL, "remedy", remedy)
	default:
		in.f.log.Warn(fmt.Sprintf("%s: its KV cache is known approximately: %s", in.w, state.Reason), "url", in.w.spec.URL,
			"block_size", state.BlockSize, "remedy", remedy)
	}
	in.w.logged = state.Reason
}

// emptyAssumed takes the assumed blocks of a rank whose engine was restarted before a health check could
// see that. Events say it themselves.
func (in *incarnation) emptyAssumed(rank kv.WorkerKey) {
	in.w.mu.Lock()
	follows := in.w.streams[rank] != nil
	in.w.mu.Unlock()
	if !follows {
		in.f.log.Debug(fmt.Sprintf("%s: its counters began again: its prompts no longer count as cached", in.w))
		_, _ = in.index.Apply(rank, &radix.Change{Kind: radix.DeviceCleared}) // cannot fail
	}
}

// eventsRemedy says what makes the worker's cache known exactly.
func (in *incarnation) eventsRemedy() string {
	if in.w.claims.rival != nil {
		return "name the KV events endpoint of each worker itself"
	}
	if in.info != nil {
		if _, remedy := in.info.KeepsPrompts(); remedy != "" {
			return remedy
		}
		return in.info.EventsRemedy(in.portShift()) + in.orName("kv-events")
	}
	remedy := "start it with " + probe.EventFlags(in.engine, in.portShift()) + in.orName("kv-events")
	if in.w.attached && in.engine == kv.EngineVLLM && in.reported.Engines == 0 { // llama.cpp, Ollama and others have no such flag
		return "if it runs vLLM, " + remedy
	}
	return remedy
}

// portShift is how far the ports of the worker's sockets must be from the usual ones: those belong to the
// first worker of its host.
func (in *incarnation) portShift() (ports int) {
	host := plainHost(probe.HostOf(in.w.spec.URL))
	for _, other := range in.f.all() {
		if other == in.w {
			break
		}
		if at := other.current(); plainHost(probe.HostOf(at.URL)) == host {
			ports += max(1, len(at.Ranks))
		}
	}
	return ports
}
