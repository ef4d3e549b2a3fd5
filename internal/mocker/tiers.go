package mocker

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
)

// TierFlags are the flags of tiers below the cache of a mock worker.
type TierFlags struct {
	MockHostBlocks    int           `group:"Mock workers, with --engine mocker" default:"0" help:"Blocks that a mock worker keeps in host memory (vLLM's OffloadingConnector, SGLang's hierarchical cache). 0: no host tier."`
	MockHostBandwidth float64       `group:"Mock workers, with --engine mocker" default:"25" placeholder:"GB/S" help:"Bandwidth of loads from host memory, GB (10^9 bytes) per second. A worker's loads do not overlap."`
	MockHostLatency   time.Duration `group:"Mock workers, with --engine mocker" default:"0s" help:"Fixed time of each load from host memory."`
	MockDiskBlocks    int           `group:"Mock workers, with --engine mocker" default:"0" help:"Blocks that a mock worker keeps in files (vLLM's secondary tier fs, SGLang's storage backend file). Evictions are not published. 0: no files."`
	MockDiskBandwidth float64       `group:"Mock workers, with --engine mocker" default:"2" placeholder:"GB/S" help:"Bandwidth of reads of files, GB per second."`
	MockDiskLatency   time.Duration `group:"Mock workers, with --engine mocker" default:"0s" help:"Fixed time of each read of files."`
	MockDiskShared    bool          `group:"Mock workers, with --engine mocker" help:"All mock workers share the files of --mock-disk-blocks (locality REMOTE in vLLM's events)."`
	MockPeerBandwidth float64       `group:"Mock workers, with --engine mocker" name:"mock-peer-bandwidth" default:"0" placeholder:"GB/S" help:"vLLM mock workers pull blocks from each other's host memory (vLLM's secondary tier p2p) at this bandwidth, GB per second. Requires --mock-host-blocks. 0: they do not."`
	MockPeerLatency   time.Duration `group:"Mock workers, with --engine mocker" name:"mock-peer-latency" default:"0s" help:"Fixed time of each pull."`
	MockPeerFailures  float64       `group:"Mock workers, with --engine mocker" name:"mock-peer-failures" default:"0" help:"Fault: share of the pulls, 0 to 1, that deliver nothing."`
	MockTierEvents    string        `group:"Mock workers, with --engine mocker" default:"described" enum:"described,placeholder,none" help:"KV events of a vLLM mock worker's lower tiers: described (self_describing_kv_events), placeholder (vLLM's default: a hash without tokens and parent) or none."`
	MockSilentTiers   []uint64      `group:"Mock workers, with --engine mocker" placeholder:"ID" help:"Fault: the lower tiers of mock worker ID take blocks and publish them, but no request finds any. Comma-separated."`
}

// validate checks the flags for the given number of workers.
func (c *TierFlags) validate(workers int) error {
	if c.MockHostBlocks < 0 || c.MockDiskBlocks < 0 || c.MockHostBlocks > maxTierBlocks || c.MockDiskBlocks > maxTierBlocks {
		return fmt.Errorf("--mock-host-blocks %d and --mock-disk-blocks %d: give 0 to %d", c.MockHostBlocks, c.MockDiskBlocks, maxTierBlocks)
	}
	if !(c.MockHostBandwidth > 0) || !(c.MockDiskBandwidth > 0) || c.MockHostLatency < 0 || c.MockDiskLatency < 0 {
		return fmt.Errorf("--mock-host-bandwidth %v and --mock-disk-bandwidth %v must be more than 0 GB/s, and --mock-host-latency and "+
			"--mock-disk-latency cannot be negative", c.MockHostBandwidth, c.MockDiskBandwidth)
	}
	if !(c.MockPeerBandwidth >= 0) || c.MockPeerLatency < 0 || !(c.MockPeerFailures >= 0 && c.MockPeerFailures <= 1) {
		return fmt.Errorf("--mock-peer-bandwidth %v, --mock-peer-latency %v and --mock-peer-failures %v: give at least 0, and failures as a "+
			"share up to 1", c.MockPeerBandwidth, c.MockPeerLatency, c.MockPeerFailures)
	}
	if c.MockPeerBandwidth > 0 && c.MockHostBlocks == 0 {
		return errors.New("--mock-peer-bandwidth: workers pull from each other's host memory; set --mock-host-blocks")
	}
	for _, id := range c.MockSilentTiers {
		if id >= uint64(workers) {
			return fmt.Errorf("--mock-silent-tiers %d: the workers are 0 to %d", id, workers-1)
		}
	}
	return nil
}

// maxTierBlocks bounds the blocks of a tier, of 32 bytes each.
const maxTierBlocks = 1 << 24

// Tiers returns the tiers below the cache of each rank, from the fastest on.
func (c *Settings) Tiers() (tiers []engine.TierSettings) {
	if c.MockHostBlocks > 0 {
		tiers = append(tiers, engine.TierSettings{
			Tier: kv.Host, Blocks: c.MockHostBlocks, Loads: engine.Loads{Fixed: c.MockHostLatency, Bandwidth: c.MockHostBandwidth,
				BytesPerToken: c.MockKVBytesPerToken},
		})
	}
	if c.MockDiskBlocks > 0 {
		tiers = append(tiers, engine.TierSettings{
			Tier: kv.Disk, Blocks: c.MockDiskBlocks, Loads: engine.Loads{Fixed: c.MockDiskLatency, Bandwidth: c.MockDiskBandwidth,
				BytesPerToken: c.MockKVBytesPerToken},
			Shared: c.MockDiskShared, Unpublished: true,
		})
	}
	return tiers
}

// Peers returns how mock workers pull from each other.
func (c *Settings) Peers() engine.PeerSettings {
	return engine.PeerSettings{Loads: engine.Loads{Fixed: c.MockPeerLatency, Bandwidth: c.MockPeerBandwidth,
		BytesPerToken: c.MockKVBytesPerToken}, Failures: c.MockPeerFailures}
}

// Names of --mock-tier-events.
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
	case !r.w.sglang() && r.w.cfg.MockTierEvents == tierNone:
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
	whole.Tier, whole.Shared, whole.Placeholder = e.Tier, shared, r.w.cfg.MockTierEvents == tierPlaceholder
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
	if cfg.MockDiskBlocks > 0 {
		p.count("kv_offload_tiering_read_bytes_total", `,tier="1:fs"`, func(c *counts) *atomic.Int64 { return &c.tiers.readBytes })
		p.add("counter", "kv_offload_tiering_read_time_total", `,tier="1:fs"`,
			seconds(func(t *tierCounts) *atomic.Int64 { return &t.readMicros }))
	}
}
