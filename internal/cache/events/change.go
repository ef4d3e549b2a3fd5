package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// routerEvent is a change in a recording or a dump, in the form of Dynamo's services (RouterEvent
// of lib/kv-router/src/protocols.rs).
type routerEvent struct {
	WorkerID    uint64          `json:"worker_id"`
	StorageTier string          `json:"storage_tier"`
	Domain      json.RawMessage `json:"residency_domain,omitempty"` // owner of the cache, where it may not be the worker
	Event       cacheEvent      `json:"event"`
}

type cacheEvent struct {
	EventID uint64     `json:"event_id"` // counts the events of a rank, in a dump those of all ranks
	Data    changeText `json:"data"`
	DPRank  uint32     `json:"dp_rank"`
}

// deviceTier is the tier of an engine's own cache.
const deviceTier = "device"

// newRouterEvent returns a change of w as the event of that number.
func newRouterEvent(w kv.WorkerKey, number uint64, data changeText) *routerEvent {
	return &routerEvent{WorkerID: w.Worker, StorageTier: deviceTier, Event: cacheEvent{EventID: number, Data: data, DPRank: w.Rank}}
}

// changeText is a radix.Change as JSON, as recordings, answers of routers and dumps have it. One
// of its members is set, or Cleared with Kept.
type changeText struct {
	Stored  *storedText  `json:"stored,omitempty"`
	Removed *removedText `json:"removed,omitempty"`
	Cleared bool         `json:"cleared,omitempty"` // in recordings "cleared" stands for the whole
	// Kept is what remains of the lower tiers when the blocks are Cleared; empty: nothing.
	Kept string `json:"kept,omitempty"`

	// Not in Dynamo's form: KV-cache groups other than the first, and lower tiers.
	Layout  *layoutText `json:"layout,omitempty"`
	Held    *groupText  `json:"held,omitempty"`
	Dropped *groupText  `json:"dropped,omitempty"`
	Lower   *lowerText  `json:"lower,omitempty"`
	// DeviceCleared stands for Cleared and Kept in recordings.
	DeviceCleared string `json:"device_cleared,omitempty"`
	// Tail is blocks within a prompt, and Lookahead what the hashes of a rank's blocks depend on.
	Tail      *storedText    `json:"tail,omitempty"`
	Lookahead *lookaheadText `json:"lookahead,omitempty"`

	Recorded bool `json:"-"` // it is written in the form of recordings
}

// Kinds of Kept.
const (
	keptLower = "lower" // all of them, doubtful
	keptFiles = "files" // those below the host
)

// storedText is blocks that follow each other.
type storedText struct {
	ParentHash    *uint64     `json:"parent_hash"`
	StartPosition *int        `json:"start_position"`
	Blocks        []blockText `json:"blocks"`
	Skipped       []uint64    `json:"skipped,omitempty"` // of a Tail: local hashes of blocks before them that are not held
}

type blockText struct {
	BlockHash  uint64 `json:"block_hash"`
	TokensHash uint64 `json:"tokens_hash"`
}

// removedText is engine hashes: a list, in recordings as the member of an object.
type removedText struct {
	Hashes   []uint64
	Recorded bool
}

type removedObject struct {
	BlockHashes []uint64 `json:"block_hashes"`
}

// MarshalJSON writes one of the two forms.
func (t removedText) MarshalJSON() ([]byte, error) {
	if t.Recorded {
		return json.Marshal(removedObject{t.Hashes})
	}
	return json.Marshal(t.Hashes)
}

// UnmarshalJSON reads both.
func (t *removedText) UnmarshalJSON(text []byte) error {
	if t.Recorded = text[0] == '{'; t.Recorded {
		var object removedObject
		err := json.Unmarshal(text, &object)
		t.Hashes = object.BlockHashes
		return err
	}
	return json.Unmarshal(text, &t.Hashes)
}

// layoutText is the KV-cache groups of a rank.
type layoutText struct {
	Groups string `json:"groups"` // as kv.Layout's String writes them
	Block  int    `json:"block_size"`
}

// groupText is blocks of a KV-cache group by their engine hashes.
type groupText struct {
	Group  int      `json:"group"` // place in the layout, at least 1
	Blocks []uint64 `json:"blocks"`
}

// lookaheadText is a kv.Lookahead.
type lookaheadText struct {
	Tokens int `json:"tokens"`
	Cut    int `json:"cut"`
}

// lowerText is a change of a rank's lower tiers. It is one of its lists, or none and the rest.
type lowerText struct {
	Tier    string `json:"tier,omitempty"` // host, disk or external
	Shared  bool   `json:"shared,omitempty"`
	Store   string `json:"store,omitempty"`
	Again   bool   `json:"again,omitempty"`
	Partial bool   `json:"partial,omitempty"`

	Stored  *storedText `json:"stored,omitempty"`
	Held    []uint64    `json:"held,omitempty"` // engine hashes, without a place
	Removed []uint64    `json:"removed,omitempty"`

	SetChunk int   `json:"set_chunk,omitempty"`
	Settled  *bool `json:"settled,omitempty"` // of a doubt: the blocks are held

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
	return 0, fmt.Errorf("%.40q %w: want host, disk or external", name, errNoTier)
}

// dynamoHost is Dynamo's name of the host tier; those of the others are ours.
const dynamoHost = "host_pinned"

// textOf returns a change as recordings have it, or as routers exchange it. It shares no blocks
// with c.
func textOf(c *radix.Change, recorded bool) (t changeText) {
	t.Recorded = recorded
	set := c.Setting()
	switch c.Kind {
	case radix.Stored, radix.Held, radix.Removed:
		t.setBlocks(c)
	case radix.Cleared:
		t.Cleared = true
	case radix.DeviceCleared:
		kept := keptLower
		if c.Host {
			kept = keptFiles
		}
		if recorded {
			t.DeviceCleared = kept
		} else {
			t.Cleared, t.Kept = true, kept
		}
	case radix.LayoutSet:
		t.Layout = &layoutText{set.Layout.String(), set.BlockSize}
	case radix.LookaheadStored:
		t.Lookahead = &lookaheadText{set.Lookahead.Tokens, set.Lookahead.Cut}
	case radix.ChunkSet:
		t.Lower = &lowerText{SetChunk: set.Chunk}
	case radix.LowerRestored:
		t.Lower = &lowerText{Chunk: set.Chunk, Doubtful: set.Doubtful, Stores: slices.Clone(set.Stores)}
	case radix.DoubtSettled:
		t.Lower = &lowerText{Settled: &set.Held}
	case radix.Forgotten: // the rank has no more changes
		t.Cleared = true
	}
	return t
}

// setBlocks sets the text of blocks.
func (t *changeText) setBlocks(c *radix.Change) {
	var stored *storedText
	if c.Kind == radix.Stored {
		stored = storedTextOf(c)
	}
	switch hashes := slices.Clone(c.Hashes); {
	case c.Tier != kv.Device:
		t.Lower = &lowerText{Tier: c.Tier.String(), Shared: c.Shared, Store: c.Store, Again: c.Again, Partial: c.Partial, Stored: stored}
		if c.Kind == radix.Held {
			t.Lower.Held = hashes
		} else {
			t.Lower.Removed = hashes
		}
	case len(c.Skipped) > 0:
		t.Tail = stored
	case stored != nil:
		t.Stored = stored
	case c.Kind == radix.Held:
		t.Held = &groupText{int(c.Group), hashes}
	case c.Group > 0:
		t.Dropped = &groupText{int(c.Group), hashes}
	default:
		t.Removed = &removedText{hashes, t.Recorded}
	}
}

func storedTextOf(c *radix.Change) *storedText {
	t := &storedText{Blocks: make([]blockText, len(c.Blocks)), Skipped: slices.Clone(c.Skipped)}
	if c.HasParent {
		parent := c.Parent
		t.ParentHash = &parent
	}
	for i, b := range c.Blocks {
		t.Blocks[i] = blockText{BlockHash: b.Engine, TokensHash: b.Local}
	}
	return t
}

// Faults of a text.
var (
	errNoChange = errors.New(`data is neither {"stored":...} nor {"removed":...} nor "cleared"`)
	// errNoParent: stored blocks without a parent that do not begin a prompt. To store them
	// there would be a wrong match. The change has the blocks.
	errNoParent = errors.New("have no parent")
	errNoTier   = errors.New("is no lower tier")
)

// recordedCleared is the text of a clearing in a recording.
const recordedCleared = `"cleared"`

// MarshalJSON writes the members that are set.
func (t changeText) MarshalJSON() ([]byte, error) {
	if t.Cleared && t.Recorded {
		return []byte(recordedCleared), nil
	}
	type plain changeText
	return json.Marshal(plain(t))
}

// UnmarshalJSON accepts one change, in the form of recordings or of routers.
func (t *changeText) UnmarshalJSON(text []byte) error {
	*t = changeText{}
	if string(text) == recordedCleared {
		t.Cleared = true
		return nil
	}
	type plain changeText
	if err := json.Unmarshal(text, (*plain)(t)); err != nil {
		return err
	}
	set := 0
	for _, has := range []bool{
		t.Stored != nil, t.Removed != nil, t.Cleared, t.Layout != nil, t.Held != nil, t.Dropped != nil, t.Lower != nil, t.DeviceCleared != "",
		t.Tail != nil, t.Lookahead != nil,
	} {
		if has {
			set++
		}
	}
	if set != 1 {
		return errNoChange
	}
	return nil
}

// change returns the change of a text that another process has written. Where it sets a layout,
// the layout fits the block size of the text.
func (t *changeText) change() (radix.Change, error) {
	kept := t.Kept + t.DeviceCleared
	switch {
	case t.Lower != nil:
		return t.Lower.change()
	case t.Stored != nil:
		return t.Stored.change(radix.LowerTier{})
	case t.Tail != nil:
		return t.Tail.change(radix.LowerTier{})
	case t.Removed != nil:
		return radix.Change{Kind: radix.Removed, Hashes: t.Removed.Hashes}, nil
	case t.Held != nil:
		return t.Held.change(radix.Held)
	case t.Dropped != nil:
		return t.Dropped.change(radix.Removed)
	case t.Layout != nil:
		return t.Layout.change()
	case t.Lookahead != nil:
		return t.Lookahead.change()
	case kept != "":
		return radix.Change{Kind: radix.DeviceCleared, Host: kept == keptFiles}, nil
	case t.Cleared:
		return radix.Change{Kind: radix.Cleared}, nil
	}
	return radix.Change{}, errNoChange
}

// change returns what an event changes. Dynamo's form of a change of a lower tier becomes ours.
func (e *routerEvent) change() (radix.Change, error) {
	data := &e.Event.Data
	c, err := data.change()
	if e.StorageTier != "" && !strings.EqualFold(e.StorageTier, deviceTier) && (data.Stored != nil || data.Removed != nil) {
		var unknown error
		if c.Tier, unknown = lowerTierNamed(strings.ToLower(e.StorageTier)); unknown != nil {
			return c, unknown
		}
	}
	return c, err
}

func (t *storedText) change(at radix.LowerTier) (radix.Change, error) {
	c := radix.Change{Kind: radix.Stored, LowerTier: at, HasParent: t.ParentHash != nil, Skipped: t.Skipped,
		Blocks: make([]kv.StoredBlock, len(t.Blocks))}
	for i, b := range t.Blocks {
		c.Blocks[i] = kv.StoredBlock{Engine: b.BlockHash, Local: b.TokensHash}
	}
	if c.HasParent {
		c.Parent = *t.ParentHash
	} else if t.StartPosition != nil && *t.StartPosition != 0 {
		return c, fmt.Errorf("%d stored blocks at position %d %w", len(t.Blocks), *t.StartPosition, errNoParent)
	}
	return c, nil
}

func (t *groupText) change(kind radix.Kind) (radix.Change, error) {
	if t.Group < 1 || t.Group > kv.MaxCacheGroups {
		return radix.Change{}, fmt.Errorf("group %d: want 1 to %d", t.Group, kv.MaxCacheGroups)
	}
	return radix.Change{Kind: kind, Group: int32(t.Group), Hashes: t.Blocks}, nil
}

func (t *layoutText) change() (radix.Change, error) {
	layout, err := kv.ParseLayout(t.Groups)
	if err == nil && (t.Block < 1 || !fits(layout, t.Block)) {
		err = fmt.Errorf("layout %s does not fit blocks of %d tokens", layout, t.Block)
	}
	return radix.Change{Kind: radix.LayoutSet, Set: &radix.Setting{Layout: layout, BlockSize: t.Block}}, err
}

func (t *lookaheadText) change() (radix.Change, error) {
	if t.Tokens < 1 || t.Tokens > kv.MaxLookahead || t.Cut < 0 || t.Cut > kv.MaxLookahead {
		return radix.Change{}, fmt.Errorf("lookahead of %d tokens, cut %d: want 1 to %d, 0 to %d", t.Tokens, t.Cut, kv.MaxLookahead,
			kv.MaxLookahead)
	}
	return radix.Change{Kind: radix.LookaheadStored, Set: &radix.Setting{Lookahead: kv.Lookahead{Tokens: t.Tokens, Cut: t.Cut}}}, nil
}

// change returns the change of a text. A settled doubt has no number yet.
func (t *lowerText) change() (c radix.Change, err error) {
	at := radix.LowerTier{Shared: t.Shared, Store: t.Store, Again: t.Again, Partial: t.Partial}
	switch {
	case t.SetChunk > 0:
		return radix.Change{Kind: radix.ChunkSet, Set: &radix.Setting{Chunk: t.SetChunk}}, nil
	case t.Settled != nil:
		return radix.Change{Kind: radix.DoubtSettled, Set: &radix.Setting{Held: *t.Settled}}, nil
	case len(t.Held)+len(t.Removed) == 0 && (t.Stored == nil || len(t.Stored.Blocks) == 0):
		return radix.Change{Kind: radix.LowerRestored, Set: &radix.Setting{Chunk: t.Chunk, Doubtful: t.Doubtful, Stores: t.Stores}}, nil
	}
	if at.Tier, err = lowerTierNamed(t.Tier); err != nil {
		return c, err
	}
	switch {
	case t.Stored != nil:
		return t.Stored.change(at)
	case len(t.Held) > 0:
		return radix.Change{Kind: radix.Held, LowerTier: at, Hashes: t.Held}, nil
	}
	return radix.Change{Kind: radix.Removed, LowerTier: at, Hashes: t.Removed}, nil
}

// dumpedTogether bounds the blocks of one change that is written.
const dumpedTogether = 1024

// heldBlock is a block of a worker rank, as an index has it.
type heldBlock struct {
	radix.LowerBlock       // on the device, At is the zero value
	group            int32 // other than the first: the block has no place
}

// together yields the changes that store blocks, each of up to dumpedTogether of them. A change
// is valid until the next.
func together(blocks iter.Seq[heldBlock]) iter.Seq[*radix.Change] {
	return func(yield func(*radix.Change) bool) {
		var c radix.Change
		for b := range blocks {
			n := c.Size()
			same := n < dumpedTogether && c.LowerTier == b.At && c.Group == b.group
			if b.Placed {
				same = same && c.Kind == radix.Stored && n > 0 && b.HasParent && c.Blocks[n-1].Engine == b.Parent
			} else {
				same = same && c.Kind == radix.Held
			}
			if !same {
				if n > 0 && !yield(&c) {
					return
				}
				c = radix.Change{Kind: radix.Held, LowerTier: b.At, Group: b.group, Blocks: c.Blocks[:0], Hashes: c.Hashes[:0]}
				if b.Placed {
					c.Kind, c.Parent, c.HasParent = radix.Stored, b.Parent, b.HasParent
				}
			}
			if b.Placed {
				c.Blocks = append(c.Blocks, b.StoredBlock)
			} else {
				c.Hashes = append(c.Hashes, b.Engine)
			}
		}
		if c.Size() > 0 {
			yield(&c)
		}
	}
}

// storedChanges yields the changes that restore the blocks of DumpOf.
func storedChanges(blocks iter.Seq[radix.PlacedBlock]) iter.Seq[*radix.Change] {
	return together(func(yield func(heldBlock) bool) {
		for b := range blocks {
			if !yield(heldBlock{LowerBlock: radix.LowerBlock{PlacedBlock: b, Placed: true}}) {
				return
			}
		}
	})
}

// heldChanges yields the changes that restore the blocks of HeldOf, copies one by one.
func heldChanges(others []radix.HeldBlock) iter.Seq[*radix.Change] {
	return together(func(yield func(heldBlock) bool) {
		for _, b := range others {
			for range b.Copies {
				one := heldBlock{group: int32(b.Group)}
				if one.Engine = b.Engine; !yield(one) {
					return
				}
			}
		}
	})
}

// lowerChanges yields the changes that restore the lower tiers of a dump.
func lowerChanges(d radix.LowerDump) iter.Seq[*radix.Change] {
	return func(yield func(*radix.Change) bool) {
		if d.Empty() {
			return
		}
		if len(d.Stores) > 0 && !yield(&radix.Change{Kind: radix.LowerRestored, Set: &radix.Setting{Stores: d.Stores}}) {
			return
		}
		for c := range together(func(yield func(heldBlock) bool) {
			for b := range d.Blocks {
				if !yield(heldBlock{LowerBlock: b}) {
					return
				}
			}
		}) {
			if !yield(c) {
				return
			}
		}
		yield(&radix.Change{Kind: radix.LowerRestored, Set: &radix.Setting{Chunk: d.Chunk, Doubtful: d.Doubtful}})
	}
}

// changesOf yields the changes that restore a rank in an index that has its layout.
func changesOf(blocks iter.Seq[radix.PlacedBlock], others []radix.HeldBlock, lower radix.LowerDump) iter.Seq[*radix.Change] {
	return func(yield func(*radix.Change) bool) {
		for _, part := range []iter.Seq[*radix.Change]{storedChanges(blocks), heldChanges(others), lowerChanges(lower)} {
			for c := range part {
				if !yield(c) {
					return
				}
			}
		}
	}
}
