package relay

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// maxCells is the maximum number of cells below.
const maxCells = 64

// Cell is a worker that is a cell: a relay reports which blocks it has.
type Cell struct {
	Worker  uint64
	Address string // of the relay: host and port
	TLS     bool   // its port has TLS
}

// UnmarshalText reads ID=HOST:PORT, or ID=https://HOST:PORT.
func (c *Cell) UnmarshalText(text []byte) (err error) {
	id, address, found := strings.Cut(string(text), "=")
	address, c.TLS = strings.CutPrefix(address, "https://")
	if c.Worker, err = strconv.ParseUint(id, 10, 64); err != nil || !found {
		return fmt.Errorf("%q: want ID=HOST:PORT or ID=https://HOST:PORT, the id of a --worker and the address of its relay", text)
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%q: %w: want ID=HOST:PORT", text, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || host == "" {
		return fmt.Errorf("%q: want ID=HOST:PORT with a port of 1 to 65535", text)
	}
	c.Address = address
	return nil
}

// Below follows the relays of cells below this router. Run must follow.
type Below struct {
	cells []*below
	log   *slog.Logger
}

// below is one of them.
type below struct {
	Cell
	client *Client
	unfit  atomic.Bool // a warning of its pools was logged
}

// BelowDeps are what Below needs.
type BelowDeps struct {
	Model     string      // of the cells; empty: the one that a relay has pools of
	BlockSize int         // tokens
	TLS       *tls.Config // for cells with TLS; nil: the system's roots
	Log       *slog.Logger
}

// NewBelow makes the clients of the relays.
func NewBelow(cells []Cell, d BelowDeps) (*Below, error) {
	b := &Below{log: d.Log}
	for _, c := range cells {
		following := Following{Address: c.Address, Want: Want{Model: d.Model, BlockSize: d.BlockSize}, Log: d.Log}
		if c.TLS {
			following.TLS = cmp.Or(d.TLS, &tls.Config{MinVersion: tls.VersionTLS12})
		}
		client, err := NewClient(following)
		if err != nil {
			return nil, err
		}
		b.cells = append(b.cells, &below{Cell: c, client: client})
	}
	return b, nil
}

// lookTime is the time between two checks whether the pools of a cell can be used.
const lookTime = 10 * time.Second

// Run follows the relays until ctx ends.
func (b *Below) Run(ctx context.Context) {
	var all sync.WaitGroup
	for _, c := range b.cells {
		all.Go(func() { c.client.Run(ctx) })
	}
	ticker := time.NewTicker(lookTime)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-ticker.C:
			for _, c := range b.cells {
				if why := c.client.Unfit(); why != "" && !c.unfit.Swap(true) {
					b.log.Warn("no usable pool in the relay of a cell", "worker", c.Worker, "relay", c.Address, "why", why)
				}
			}
		}
	}
	all.Wait()
}

// Index is the part of an index that lookups and decisions use.
type Index interface {
	radix.Matcher
	radix.Applier
}

// Over returns an index that does what index does, and matches each cell with the blocks that
// its relay reports. As long as those are not known, the cell has the matches of index. One
// that never matches is returned as it is.
func (b *Below) Over(index Index) Index {
	if !index.CanMatch() {
		return index
	}
	return &overIndex{index, index, b}
}

// overIndex is an index with cells.
type overIndex struct {
	radix.Matcher
	radix.Applier
	below *Below
}

// Match appends the matches of all workers, ordered by worker.
func (o *overIndex) Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match {
	start := len(dst)
	dst = o.Matcher.Match(local, usable, parts, dst)
	if len(local) == 0 {
		return dst
	}
	var sequence []uint64
	added := false
	for _, c := range o.below.cells {
		held := c.client.held.Load()
		if held == nil {
			continue
		}
		if sequence == nil {
			sequence = kv.SequenceHashes(make([]uint64, 0, len(local)), local)
		}
		dst = append(dst[:start], slices.DeleteFunc(dst[start:], func(m kv.Match) bool { return m.Worker.Worker == c.Worker })...)
		if blocks := held.prefix(sequence); blocks > 0 {
			dst, added = append(dst, kv.Match{Worker: kv.WorkerKey{Worker: c.Worker}, Blocks: blocks}), true
		}
	}
	if added {
		slices.SortFunc(dst[start:], func(a, b kv.Match) int { return a.Worker.Compare(b.Worker) })
	}
	return dst
}

// Want selects the blocks that a client looks up: those of one model.
type Want struct {
	Model     string // empty: the base model of all pools, if it is one
	BlockSize int    // tokens
}

// holding is the filters of the pools that can be used for a Want.
type holding []*Filter

// count returns the fingerprints of all pools.
func (h holding) count() (n int) {
	for _, f := range h {
		n += f.Held()
	}
	return n
}

// prefix returns how many leading blocks the best pool holds.
func (h holding) prefix(sequence []uint64) (most int) {
	for _, f := range h {
		most = max(most, f.Prefix(sequence))
	}
	return most
}

// wanted returns the name of the model to look up; empty: it would mean several models. The
// caller has locked c.mu.
func (c *Client) wanted() string {
	name := c.settings.Want.Model
	var bases []string
	for i := range c.catalog.Pools {
		pool := &c.catalog.Pools[i]
		if m, serves := pool.Serves(name); serves {
			bases = append(bases, m.Base)
		}
		for j := range pool.Models {
			if name == "" {
				bases = append(bases, pool.Models[j].Base)
			}
		}
	}
	slices.Sort(bases)
	switch bases = slices.Compact(bases); {
	case len(bases) > 1:
		return ""
	case name == "" && len(bases) == 1:
		return bases[0]
	}
	return name
}

// unfitOf returns why a pool cannot be used for the Want; empty: it can.
func (c *Client) unfitOf(pool *Pool, model string) string {
	switch {
	case model == "" && c.settings.Want.Model != "":
		return fmt.Sprintf("its pools have different models with the name %q", c.settings.Want.Model)
	case model == "":
		return "its pools have several models: set --served-model-name"
	}
	m, serves := pool.Serves(model)
	switch {
	case !serves || m.Adapter != "":
		return fmt.Sprintf("no pool has model %q", model)
	case !pool.Has(Aggregated) && !pool.Has(Prefill) && !pool.Has(Legacy):
		return fmt.Sprintf("no pool computes prompts of model %q", model)
	case pool.BlockSize != c.settings.Want.BlockSize:
		return fmt.Sprintf("its blocks have %d tokens, those of this router %d: set --block-size", pool.BlockSize, c.settings.Want.BlockSize)
	case pool.Format != Standard:
		return "its blocks are hashed with the token behind them"
	}
	return ""
}

// choose sets held to the filters that can be used, nil if none is known. The caller holds
// c.mu.
func (c *Client) choose() {
	var chosen holding
	c.unfit = ""
	if c.catalog != nil {
		model, fits := c.wanted(), false
		for i := range c.catalog.Pools {
			pool := &c.catalog.Pools[i]
			if why := c.unfitOf(pool, model); why != "" {
				c.unfit = why
				continue
			}
			fits = true
			if m, _ := pool.Serves(model); c.unavailable(pool, m) {
				continue
			}
			if s := c.streams[pool.Producer]; s != nil && s.filter != nil && s.filter.Known() {
				chosen = append(chosen, s.filter)
			}
		}
		if fits {
			c.unfit = ""
		}
	}
	if len(chosen) == 0 {
		c.held.Store(nil)
		return
	}
	c.held.Store(&chosen)
}

// Unfit returns why no pool of the relay can be used for the Want; empty: one can, or the relay
// is not known.
func (c *Client) Unfit() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unfit
}
