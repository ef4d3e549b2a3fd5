package events

import (
	"fmt"
	"iter"
	"slices"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

// lowerChange is a change of a worker's lower tiers, as routers exchange and record it. It
// is one of its lists, or none and the rest.
type lowerChange struct {
	Tier    string `json:"tier,omitempty"` // host, disk or external
	Shared  bool   `json:"shared,omitempty"`
	Store   string `json:"store,omitempty"`
	Again   bool   `json:"again,omitempty"`
	Partial bool   `json:"partial,omitempty"`

	Stored  *dumpStored `json:"stored,omitempty"`
	Held    []uint64    `json:"held,omitempty"` // engine hashes, without a place
	Removed []uint64    `json:"removed,omitempty"`

	SetChunk int   `json:"set_chunk,omitempty"`
	Settled  *bool `json:"settled,omitempty"` // of radix.Index.SettleLower

	// Of a rank as a whole: the stores before the blocks of a dump, the rest behind them.
	Chunk    int      `json:"chunk,omitempty"`
	Doubtful bool     `json:"doubtful,omitempty"`
	Stores   []string `json:"stores,omitempty"`
}

// lowerTierNamed returns a tier by the name that kv.Tier or Dynamo gives it.
func lowerTierNamed(name string) (kv.Tier, error) {
	switch name {
	case kv.Host.String(), dynamoHost:
		return kv.Host, nil
	case kv.Disk.String():
		return kv.Disk, nil
	case kv.External.String():
		return kv.External, nil
	}
	return 0, fmt.Errorf("%.40q is no lower tier: want host, disk or external", name)
}

// dynamoHost is Dynamo's name of the host tier; those of the others are ours.
const dynamoHost = "host_pinned"

func lowerChangeAt(at radix.LowerTier) lowerChange {
	return lowerChange{Tier: at.Tier.String(), Shared: at.Shared, Store: at.Store, Again: at.Again, Partial: at.Partial}
}

// blocks returns the number of blocks that c names.
func (c *lowerChange) blocks() int {
	n := len(c.Held) + len(c.Removed)
	if c.Stored != nil {
		n += len(c.Stored.Blocks)
	}
	return n
}

// apply makes the change for w. It may come from another router or a file. unknown is the
// number of removed blocks that were not in the index.
func (c *lowerChange) apply(index radix.Index, w kv.WorkerKey) (unknown int, err error) {
	if c.SetChunk > 0 {
		index.SetChunk(w, c.SetChunk)
		return 0, nil
	}
	if c.Settled != nil {
		index.SettleLower(w, index.LowerOf(w).Doubt, *c.Settled)
		return 0, nil
	}
	if c.blocks() == 0 {
		index.RestoreLower(w, c.Chunk, c.Doubtful, c.Stores)
		return 0, nil
	}
	at := radix.LowerTier{Worker: w, Shared: c.Shared, Store: c.Store, Again: c.Again, Partial: c.Partial}
	if at.Tier, err = lowerTierNamed(c.Tier); err != nil {
		return 0, err
	}
	switch {
	case c.Stored != nil:
		if !c.Stored.placed() {
			return 0, fmt.Errorf("%d stored blocks at position %d have no parent", len(c.Stored.Blocks), *c.Stored.StartPosition)
		}
		parent, hasParent := c.Stored.parent()
		index.StoreLower(at, parent, hasParent, c.Stored.stored(nil))
	case len(c.Held) > 0:
		index.HoldLower(at, c.Held)
	default:
		unknown = index.RemoveLower(at, c.Removed)
	}
	return unknown, nil
}

// lowerChanges yields what restores the lower tiers of a dump, in parts of up to
// dumpedTogether blocks. A part is valid until the next.
func lowerChanges(d radix.LowerDump) iter.Seq[lowerChange] {
	return func(yield func(lowerChange) bool) {
		if d.Empty() {
			return
		}
		if len(d.Stores) > 0 && !yield(lowerChange{Stores: d.Stores}) {
			return
		}
		var at radix.LowerTier
		var open run
		var held []uint64
		flush := func() bool {
			c := lowerChangeAt(at)
			switch {
			case len(open.blocks) > 0:
				c.Stored = open.stored()
			case len(held) > 0:
				c.Held = held
			default:
				return true
			}
			more := yield(c)
			open.blocks, held = open.blocks[:0], held[:0]
			return more
		}
		for b := range d.Blocks {
			n := len(open.blocks)
			follows := b.Placed && n > 0 && n < dumpedTogether && b.HasParent && open.blocks[n-1].Engine == b.Parent
			joins := !b.Placed && len(held) > 0 && len(held) < dumpedTogether
			if (b.At != at || !follows && !joins) && !flush() {
				return
			}
			at = b.At
			if !b.Placed {
				held = append(held, b.Engine)
				continue
			}
			if len(open.blocks) == 0 {
				open.parent, open.hasParent = b.Parent, b.HasParent
			}
			open.blocks = append(open.blocks, b.StoredBlock)
		}
		if flush() {
			yield(lowerChange{Chunk: d.Chunk, Doubtful: d.Doubtful})
		}
	}
}

// lowered notes a change of a lower tier by the open batch.
func (l *Log) lowered(c lowerChange) {
	var e peerEvent
	e.Data.Lower = &c
	b := l.newest()
	b.lowered = true
	if n := len(b.events); n > 0 && b.events[n-1].Data.Lower.joins(&c) {
		if b.blocks += c.blocks(); b.blocks > loggedBlocks {
			l.relay()
		}
		return
	}
	l.note(e, loggedLower+c.blocks())
}

// loggedLower is what a change of a lower tier counts beside its blocks in a Log: it takes
// some 300 bytes.
const loggedLower = 8

// joins adds the blocks of next to c, if both are hashes for the same.
func (c *lowerChange) joins(next *lowerChange) bool {
	if c == nil || c.Stored != nil || next.Stored != nil || c.Tier != next.Tier || c.Shared != next.Shared || c.Store != next.Store || c.Again != next.Again {
		return false
	}
	if held := len(c.Held) > 0; c.blocks() == 0 || next.blocks() == 0 || held != (len(next.Held) > 0) {
		return false
	}
	c.Held, c.Removed = append(c.Held, next.Held...), append(c.Removed, next.Removed...)
	return true
}

// lowerStored, lowerHeld and lowerRemoved note changes of the tier at.
func (l *Log) lowerStored(at radix.LowerTier, parent uint64, hasParent bool, blocks []kv.StoredBlock) {
	c := lowerChangeAt(at)
	c.Stored = run{parent, hasParent, blocks}.stored()
	l.lowered(c)
}

func (l *Log) lowerHeld(at radix.LowerTier, engine []uint64) {
	c := lowerChangeAt(at)
	c.Held = slices.Clone(engine)
	l.lowered(c)
}

func (l *Log) lowerRemoved(at radix.LowerTier, engine []uint64) {
	c := lowerChangeAt(at)
	c.Removed = slices.Clone(engine)
	l.lowered(c)
}
