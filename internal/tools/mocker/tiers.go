package mocker

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/tools/engine"
)

// TierSettings are the keys of tiers below the cache of a mock worker.
type TierSettings struct {
	HostBlocks    int           `default:"0" simulate:"" help:"Blocks that a mock worker keeps in host memory (vLLM's OffloadingConnector, SGLang's hierarchical cache). 0: no host tier."`
	HostBandwidth float64       `default:"25" placeholder:"GB/S" simulate:"" help:"Bandwidth of loads from host memory, GB (10^9 bytes) per second. A worker's loads do not overlap."`
	HostLatency   time.Duration `default:"0s" simulate:"" help:"Fixed time of each load from host memory."`
	DiskBlocks    int           `default:"0" simulate:"" help:"Blocks that a mock worker keeps in files (vLLM's secondary tier fs, SGLang's storage backend file). Evictions are not published. 0: no files."`
	DiskBandwidth float64       `default:"2" placeholder:"GB/S" simulate:"" help:"Bandwidth of reads of files, GB per second."`
	DiskLatency   time.Duration `default:"0s" simulate:"" help:"Fixed time of each read of files."`
	DiskShared    bool          `simulate:"" help:"All mock workers share the files of disk-blocks (locality REMOTE in vLLM's events)."`
	PeerBandwidth float64       `name:"peer-bandwidth" default:"0" placeholder:"GB/S" simulate:"" help:"vLLM mock workers pull blocks from each other's host memory (vLLM's secondary tier p2p) at this bandwidth, GB per second. Requires host-blocks. 0: they do not."`
	PeerLatency   time.Duration `name:"peer-latency" default:"0s" simulate:"" help:"Fixed time of each pull."`
	PeerFailures  float64       `name:"peer-failures" default:"0" simulate:"" help:"Fault: share of the pulls, 0 to 1, of which nothing comes."`
	TierEvents    string        `default:"described" enum:"described,placeholder,none" help:"KV events of a vLLM mock worker's lower tiers: described (self_describing_kv_events), placeholder (vLLM's default: a hash without tokens and parent) or none."`
	SilentTiers   []uint64      `placeholder:"ID" help:"Fault: the lower tiers of mock worker ID take blocks and publish them, but no request finds any. Comma-separated."`
}

// validate checks the settings for the given number of workers.
func (c *TierSettings) validate(workers int) error {
	if c.HostBlocks < 0 || c.DiskBlocks < 0 || c.HostBlocks > maxTierBlocks || c.DiskBlocks > maxTierBlocks {
		return fmt.Errorf("--mock host-blocks=%d,disk-blocks=%d: give 0 to %d", c.HostBlocks, c.DiskBlocks, maxTierBlocks)
	}
	if !(c.HostBandwidth > 0) || !(c.DiskBandwidth > 0) || c.HostLatency < 0 || c.DiskLatency < 0 {
		return fmt.Errorf("--mock host-bandwidth=%v,disk-bandwidth=%v: both must be more than 0 GB/s, and host-latency and disk-latency cannot be negative", c.HostBandwidth, c.DiskBandwidth)
	}
	if !(c.PeerBandwidth >= 0) || c.PeerLatency < 0 || !(c.PeerFailures >= 0 && c.PeerFailures <= 1) {
		return fmt.Errorf("--mock peer-bandwidth=%v,peer-latency=%v,peer-failures=%v: give at least 0, and failures as a share up to 1", c.PeerBandwidth, c.PeerLatency, c.PeerFailures)
	}
	if c.PeerBandwidth > 0 && c.HostBlocks == 0 {
		return errors.New("--mock peer-bandwidth: workers pull from each other's host memory; set host-blocks")
	}
	for _, id := range c.SilentTiers {
		if id >= uint64(workers) {
			return fmt.Errorf("--mock silent-tiers=%d: the workers are 0 to %d", id, workers-1)
		}
	}
	return nil
}

// maxTierBlocks bounds the blocks of a tier, of 32 bytes each.
const maxTierBlocks = 1 << 24

// Tiers returns the tiers below the cache of each rank, from the fastest on.
func (c *Settings) Tiers() (tiers []engine.TierSettings) {
	if c.HostBlocks > 0 {
		tiers = append(tiers, engine.TierSettings{
			Tier: kv.Host, Blocks: c.HostBlocks, Loads: engine.Loads{Fixed: c.HostLatency, Bandwidth: c.HostBandwidth, BytesPerToken: c.KVBytesPerToken},
		})
	}
	if c.DiskBlocks > 0 {
		tiers = append(tiers, engine.TierSettings{
			Tier: kv.Disk, Blocks: c.DiskBlocks, Loads: engine.Loads{Fixed: c.DiskLatency, Bandwidth: c.DiskBandwidth, BytesPerToken: c.KVBytesPerToken},
			Shared: c.DiskShared, Unpublished: true,
		})
	}
	return tiers
}

// Peers returns how mock workers pull from each other.
func (c *Settings) Peers() engine.PeerSettings {
	return engine.PeerSettings{Loads: engine.Loads{Fixed: c.PeerLatency, Bandwidth: c.PeerBandwidth, BytesPerToken: c.KVBytesPerToken}, Failures: c.PeerFailures}
}

// Values of key tier-events.
const (
	tierPlaceholder = "placeholder"
	tierNone        = "none"
)

// tierCounts count loads from lower tiers.
type tierCounts struct {
	peer, pullBytes       atomic.Int64 // tokens and bytes from other workers
	pullMicros            atomic.Int64
	queries, host, disk   atomic.Int64 // tokens that the cache did not have, and those found below
	loadBytes, loadMicros atomic.Int64 // from the host, those that come from files too
	readBytes, readMicros atomic.Int64 // from files
}

// loadLower ends the load of a request from lower tiers when its time has passed, after the
// loads before it.
func (r *Rank) loadLower(request *engine.Request) {
	took := r.Engine.LoadTime(request)
	r.countLoad(request)
	if speed := r.w.cfg.SpeedupRatio; speed > 0 {
		took = time.Duration(float64(took) / speed)
	} else {
		took = 0
	}
	now := time.Now()
	if r.loadsEnd.Before(now) {
		r.loadsEnd = now
	}
	r.loadsEnd = r.loadsEnd.Add(took)
	due := r.loadsEnd
	r.w.beside.Go(func() { // ends with the worker at the latest
		if r.w.wait(time.Until(due)) {
			r.Do(func(e *engine.Engine) { e.Loaded(request) })
		}
	})
}

// countLoad counts what a load moves, as vLLM.
func (r *Rank) countLoad(request *engine.Request) {
	r.Engine.EachLoad(request, func(s *engine.Store, tokens int) {
		bytes, micros := &r.Counts.tiers.loadBytes, &r.Counts.tiers.loadMicros
		switch s.Tier {
		case kv.Disk:
			bytes, micros = &r.Counts.tiers.readBytes, &r.Counts.tiers.readMicros
		case kv.External:
			bytes, micros = &r.Counts.tiers.pullBytes, &r.Counts.tiers.pullMicros
		}
		bytes.Add(int64(tokens * s.Loads.BytesPerToken))
		micros.Add(s.Loads.Takes(tokens).Microseconds())
	})
}

// tierChanged applies one change of a lower tier.
func (r *Rank) tierChanged(e engine.Event) {
	switch {
	case r.w.sglang() && e.Tier != kv.Host: // its storage is announced nowhere
	case !r.w.sglang() && r.w.cfg.TierEvents == tierNone:
	case r.w.sglang():
		r.changes = append(r.changes, r.change(e)...)
	default:
		r.lower = append(r.lower, r.change(e)...)
	}
}

// change is the published form of a change of a lower tier: vLLM has one event for each
// block.
func (r *Rank) change(e engine.Event) []Event {
	shared := slices.ContainsFunc(r.Engine.Lower, func(s *engine.Store) bool { return s.Tier == e.Tier && s.Shared })
	if !e.Stored {
		return []Event{{Tier: e.Tier, Shared: shared, Removed: r.renamed(e.Removed)}}
	}
	whole := r.stored(e)
	whole.Tier, whole.Shared, whole.Placeholder = e.Tier, shared, r.w.cfg.TierEvents == tierPlaceholder
	if r.w.sglang() {
		return []Event{whole}
	}
	size := r.w.cfg.BlockSize
	events := make([]Event, len(whole.Stored))
	for i := range events {
		one := whole
		one.Stored, one.Tokens = whole.Stored[i:i+1], whole.Tokens[i*size:(i+1)*size]
		if i > 0 {
			one.Parent, one.HasParent = whole.Stored[i-1].Engine, true
		}
		events[i] = one
	}
	return events
}

// takeLower returns the changes of vLLM's lower tiers since the last batch: stores in no
// order, but after the removals before them.
func (r *Rank) takeLower() []Event {
	for from := 0; from < len(r.lower); from++ {
		to := from
		for to < len(r.lower) && r.lower[to].Removed == nil {
			to++
		}
		run := r.lower[from:to]
		r.shuffle.Shuffle(len(run), func(i, j int) { run[i], run[j] = run[j], run[i] })
		from = to
	}
	taken := r.lower
	r.lower = nil
	return taken
}

// renamed returns the names outside of blocks that leave the cache or a tier.
func (r *Rank) renamed(removed []uint64) []uint64 {
	removed = slices.Clone(removed)
	for i, name := range removed {
		published, renamed := r.published[name]
		if !renamed {
			continue
		}
		removed[i] = published
		kept := r.Engine.Pool.Find(name) != 0 || slices.ContainsFunc(r.Engine.Lower, func(s *engine.Store) bool { return s.Has(name) })
		if !kept {
			delete(r.published, name)
		}
	}
	return removed
}

// tierMetrics adds vLLM's metrics of the tiers below the cache.
func (p *metricsPage) tierMetrics(cfg *Settings) {
	for _, source := range []struct {
		name   string
		tokens func(*counts) int64
	}{
		{"device", func(c *counts) int64 { return c.prefixHits.Load() }},
		{"host", func(c *counts) int64 { return c.tiers.host.Load() }},
		{"p2p", func(c *counts) int64 { return c.tiers.peer.Load() }},
		{"disk", func(c *counts) int64 { return c.tiers.disk.Load() }},
	} {
		p.add("counter", "prompt_tokens_cached_by_source_total", fmt.Sprintf(`,source=%q`, source.name),
			func(r *Rank, _ Load) float64 { return float64(source.tokens(&r.Counts)) })
	}
	if len(cfg.Tiers()) == 0 {
		return
	}
	seconds := func(micros func(*tierCounts) *atomic.Int64) func(*Rank, Load) float64 {
		return func(r *Rank, _ Load) float64 { return float64(micros(&r.Counts.tiers).Load()) / 1e6 }
	}
	p.add("counter", "external_prefix_cache_queries_total", "",
		func(r *Rank, _ Load) float64 { return float64(r.Counts.tiers.queries.Load()) })
	p.count("kv_offload_load_bytes_total", "", func(c *counts) *atomic.Int64 { return &c.tiers.loadBytes })
	p.add("counter", "kv_offload_load_time_total", "", seconds(func(t *tierCounts) *atomic.Int64 { return &t.loadMicros }))
	p.count("kv_offload_total_bytes_total", `,transfer_type="CPU_to_GPU"`, func(c *counts) *atomic.Int64 { return &c.tiers.loadBytes })
	p.add("counter", "kv_offload_total_time_total", `,transfer_type="CPU_to_GPU"`,
		seconds(func(t *tierCounts) *atomic.Int64 { return &t.loadMicros }))
	p.gauge("kv_offload_cpu_cache_usage_perc", func(*Rank, Load) float64 { return 0 }) // nothing is pinned
	if cfg.pulls() {
		p.count("kv_offload_tiering_read_bytes_total", `,tier="2:p2p"`, func(c *counts) *atomic.Int64 { return &c.tiers.pullBytes })
		p.add("counter", "kv_offload_tiering_read_time_total", `,tier="2:p2p"`,
			seconds(func(t *tierCounts) *atomic.Int64 { return &t.pullMicros }))
	}
	if cfg.DiskBlocks > 0 {
		p.count("kv_offload_tiering_read_bytes_total", `,tier="1:fs"`, func(c *counts) *atomic.Int64 { return &c.tiers.readBytes })
		p.add("counter", "kv_offload_tiering_read_time_total", `,tier="1:fs"`,
			seconds(func(t *tierCounts) *atomic.Int64 { return &t.readMicros }))
	}
}
