package events

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"strings"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

// A dump is an index as JSON, in the form of Dynamo's services: an object with
// "MODEL:GROUP": {"block_size": N, "events": [...]} for each partition, where
// the events are store events in an order in which parents come first. Their
// event ids only number them.

// dumpTier is the tier of an engine's own cache.
const dumpTier = "device"

// DumpEvent is one event of a dump.
type DumpEvent struct {
	WorkerID    uint64      `json:"worker_id"`
	StorageTier string      `json:"storage_tier"`
	Event       dumpKVEvent `json:"event"`
}

type dumpKVEvent struct {
	EventID int      `json:"event_id"`
	Data    dumpData `json:"data"`
	DPRank  uint32   `json:"dp_rank"`
}

// dumpData has one field, or none for an event that is no store event.
type dumpData struct {
	Stored *dumpStored `json:"stored,omitempty"`
}

// UnmarshalJSON ignores events of other types, such as "cleared".
func (d *dumpData) UnmarshalJSON(text []byte) error {
	*d = dumpData{}
	if len(text) > 0 && text[0] != '{' {
		return nil
	}
	type plain dumpData
	return json.Unmarshal(text, (*plain)(d))
}

type dumpStored struct {
	ParentHash    *uint64     `json:"parent_hash"`
	StartPosition *int        `json:"start_position"`
	Blocks        []dumpBlock `json:"blocks"`
}

// placed reports whether the blocks' place is known. Without a parent they can stand at
// a prompt's beginning only: to store others there would be a wrong match.
func (s *dumpStored) placed() bool {
	return s.ParentHash != nil || s.StartPosition == nil || *s.StartPosition == 0
}

// parent returns the engine's hash of the block that they follow.
func (s *dumpStored) parent() (hash uint64, has bool) {
	if s.ParentHash == nil {
		return 0, false
	}
	return *s.ParentHash, true
}

// stored appends the blocks as an index takes them.
func (s *dumpStored) stored(to []kv.StoredBlock) []kv.StoredBlock {
	for _, b := range s.Blocks {
		to = append(to, kv.StoredBlock{Engine: b.BlockHash, Local: b.TokensHash})
	}
	return to
}

type dumpBlock struct {
	BlockHash  uint64 `json:"block_hash"`
	TokensHash uint64 `json:"tokens_hash"`
}

// DumpPart is one partition of a dump to write.
type DumpPart struct {
	Name    string // MODEL:GROUP
	Workers []kv.WorkerKey
}

// WriteDump writes the blocks of the workers of all parts. Consecutive blocks are
// in one event.
func WriteDump(w io.Writer, index radix.Index, blockSize int, parts []DumpPart) error {
	out := bufio.NewWriter(w)
	out.WriteByte('{') // an error stays in out until Flush
	for i, part := range parts {
		if i > 0 {
			out.WriteByte(',')
		}
		name, _ := json.Marshal(part.Name) // a string always can be
		fmt.Fprintf(out, `%s:{"block_size":%d,"events":[`, name, blockSize)
		events := 0
		for _, key := range part.Workers {
			for run := range runsOf(index.DumpOf(key)) {
				if events > 0 {
					out.WriteByte(',')
				}
				event := dumpKVEvent{EventID: events, Data: dumpData{run.stored()}, DPRank: key.Rank}
				text, _ := json.Marshal(DumpEvent{WorkerID: key.Worker, StorageTier: dumpTier, Event: event}) // plain values always can be
				if _, err := out.Write(text); err != nil {
					return err // the reader is gone
				}
				events++
			}
		}
		out.WriteByte(']')
		if err := writeGroups(out, index, part.Workers); err != nil {
			return err
		}
		if err := writeLower(out, index, part.Workers); err != nil {
			return err // the reader is gone
		}
		out.WriteByte('}')
	}
	out.WriteByte('}')
	return out.Flush()
}

// dumpGroups is the member of a partition, beside those of Dynamo's form, with the
// KV-cache groups of its workers. It comes after the events.
const dumpGroups = "cache_groups"

// dumpRank is the KV-cache groups of one rank in a dump, with some of their blocks: a
// rank has as many as its blocks need.
type dumpRank struct {
	WorkerID uint64        `json:"worker_id"`
	DPRank   uint32        `json:"dp_rank"`
	Layout   string        `json:"layout"`
	Held     []groupBlocks `json:"held"`
}

// listWriter writes a member of a partition that is a list. Without an item there is no
// member.
type listWriter struct {
	out     *bufio.Writer
	name    string
	written int
}

func (l *listWriter) add(item any) error {
	text, _ := json.Marshal(item) // plain values always can be
	if l.written++; l.written == 1 {
		fmt.Fprintf(l.out, `,%q:[`, l.name)
	} else {
		l.out.WriteByte(',')
	}
	_, err := l.out.Write(text)
	return err
}

func (l *listWriter) end() {
	if l.written > 0 {
		l.out.WriteByte(']')
	}
}

// writeGroups writes the groups of those of the workers that have others than one.
func writeGroups(out *bufio.Writer, index radix.Index, workers []kv.WorkerKey) error {
	list := listWriter{out: out, name: dumpGroups}
	for _, key := range workers {
		r := dumpRank{WorkerID: key.Worker, DPRank: key.Rank, Layout: index.LayoutOf(key).String()}
		if r.Layout == "" {
			continue
		}
		if err := list.add(r); err != nil {
			return err
		}
		for held := range heldTogether(index.HeldOf(key)) {
			r.Held = []groupBlocks{held}
			if err := list.add(r); err != nil {
				return err
			}
		}
	}
	list.end()
	return nil
}

// dumpTiers is a member of a partition as dumpGroups, with the lower tiers of its workers.
const dumpTiers = "lower_tiers"

// dumpLower is one change of the lower tiers of one rank in a dump.
type dumpLower struct {
	WorkerID uint64      `json:"worker_id"`
	DPRank   uint32      `json:"dp_rank"`
	Change   lowerChange `json:"change"`
}

// writeLower writes the lower tiers of the workers, if any has some.
func writeLower(out *bufio.Writer, index radix.Index, workers []kv.WorkerKey) error {
	list := listWriter{out: out, name: dumpTiers}
	for _, key := range workers {
		for change := range lowerChanges(index.DumpLowerOf(key)) {
			if err := list.add(dumpLower{WorkerID: key.Worker, DPRank: key.Rank, Change: change}); err != nil {
				return err
			}
		}
	}
	list.end()
	return nil
}

// dumpedTogether bounds the blocks of one event of a dump.
const dumpedTogether = 1024

// run is blocks that follow each other; the first follows parent, or begins a prompt.
type run struct {
	parent    uint64
	hasParent bool
	blocks    []kv.StoredBlock
}

// runsOf yields the blocks in runs of up to dumpedTogether. A run is valid until the next.
func runsOf(blocks iter.Seq[radix.PlacedBlock]) iter.Seq[run] {
	return func(yield func(run) bool) {
		var open run
		for block := range blocks {
			n := len(open.blocks)
			if n > 0 && n < dumpedTogether && block.HasParent && open.blocks[n-1].Engine == block.Parent {
				open.blocks = append(open.blocks, block.StoredBlock)
				continue
			}
			if n > 0 && !yield(open) {
				return
			}
			open = run{block.Parent, block.HasParent, append(open.blocks[:0], block.StoredBlock)}
		}
		if len(open.blocks) > 0 {
			yield(open)
		}
	}
}

// stored returns the blocks in the form of a dump.
func (r run) stored() *dumpStored {
	stored := &dumpStored{Blocks: make([]dumpBlock, len(r.blocks))}
	if r.hasParent {
		stored.ParentHash = &r.parent
	}
	for i, b := range r.blocks {
		stored.Blocks[i] = dumpBlock{BlockHash: b.Engine, TokensHash: b.Local}
	}
	return stored
}

// Limits of a dump that is read.
const (
	maxDumpBytes = 2 << 30
	maxDumpValue = 16 << 20         // bytes of one event, or of some blocks of a group
	maxDumpRanks = 1 << 16          // different workers and ranks
	dumpTimeout  = 60 * time.Second // for the whole of it
)

// Recovered is the result of reading a peer's dump.
type Recovered struct {
	Peer      string
	Blocks    int
	LeftOut   int                  // blocks whose parent the dump does not have, or whose tier is not known
	Partition map[uint64]Partition // of every worker in it
}

// RecoverIndex fills the index from the first of the peers (base URLs) that answers
// GET /dump with a dump. key is the bearer key for them; empty: none. The index
// must be empty, and nothing else may write to it meanwhile. After a failure it
// contains nothing of that peer. The error names every peer and its failure.
func RecoverIndex(ctx context.Context, index radix.Index, blockSize int, key string, peers []string, log *slog.Logger) (Recovered, error) {
	var failures []error
	for _, peer := range peers {
		recovered, err := recoverFrom(ctx, index, blockSize, key, peer, log)
		if err == nil {
			return recovered, nil
		}
		for worker := range recovered.Partition {
			index.Forget(worker)
		}
		failures = append(failures, fmt.Errorf("%s: %w", peer, err))
		if ctx.Err() != nil {
			break
		}
	}
	return Recovered{}, errors.Join(failures...)
}

func recoverFrom(ctx context.Context, index radix.Index, blockSize int, key, peer string, log *slog.Logger) (Recovered, error) {
	ctx, cancel := context.WithTimeout(ctx, dumpTimeout)
	defer cancel()
	answer, err := get(ctx, newPeerClient(), peer, "/dump", "", key)
	if err != nil {
		return Recovered{}, err
	}
	defer answer.Close()
	body := &io.LimitedReader{R: answer, N: maxDumpBytes}
	recovered, err := readDump(body, index, blockSize, log.With("peer", peer))
	recovered.Peer = peer
	if body.N == 0 {
		err = fmt.Errorf("its dump is larger than %d bytes", maxDumpBytes)
	}
	return recovered, err
}

// readDump stores a dump in the index. Partitions of another block size are
// left out. After an error the workers in the answer may hold a part.
func readDump(in io.Reader, index radix.Index, blockSize int, log *slog.Logger) (Recovered, error) {
	value := &valueReader{in, maxDumpValue}
	r := dumpReader{in: value, decoder: json.NewDecoder(value), index: index, blockSize: blockSize, log: log, ranks: map[kv.WorkerKey]bool{}, found: Recovered{Partition: map[uint64]Partition{}}}
	err := r.object(func(name string) error {
		at := strings.LastIndexByte(name, ':')
		if at < 0 {
			return fmt.Errorf("%q is not MODEL:GROUP", name)
		}
		return r.partition(Partition{name[:at], name[at+1:]})
	})
	if err != nil {
		return r.found, fmt.Errorf("it is not a dump: %w", err)
	}
	return r.found, nil
}

// valueReader fails where a value is too large to be read into memory.
type valueReader struct {
	in   io.Reader
	left int // bytes that may be read until the value ends
}

func (r *valueReader) Read(to []byte) (n int, err error) {
	if r.left <= 0 {
		return 0, fmt.Errorf("a value is larger than %d bytes", maxDumpValue)
	}
	n, err = r.in.Read(to[:min(len(to), r.left)])
	r.left -= n
	return n, err
}

// dumpReader reads a dump event by event, so that it need not fit into memory.
type dumpReader struct {
	in        *valueReader
	decoder   *json.Decoder
	index     radix.Index
	blockSize int
	log       *slog.Logger
	found     Recovered
	ranks     map[kv.WorkerKey]bool // in the dump
}

// object calls member for the name of every member of the object that comes
// next; member reads the value.
func (r *dumpReader) object(member func(name string) error) error {
	if err := r.delimiter('{'); err != nil {
		return err
	}
	for r.decoder.More() {
		token, err := r.decoder.Token()
		if err != nil {
			return err
		}
		name, _ := token.(string) // the decoder takes nothing else for a name
		r.in.left = maxDumpValue
		if err := member(name); err != nil {
			return err
		}
	}
	return r.delimiter('}')
}

// list calls item for every item of the list that comes next; item reads it.
func (r *dumpReader) list(item func() error) error {
	if err := r.delimiter('['); err != nil {
		return err
	}
	for r.decoder.More() {
		r.in.left = maxDumpValue
		if err := item(); err != nil {
			return err
		}
	}
	return r.delimiter(']')
}

func (r *dumpReader) delimiter(want json.Delim) error {
	token, err := r.decoder.Token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	if token != want {
		return fmt.Errorf("%v instead of %v", token, want)
	}
	return nil
}

func (r *dumpReader) partition(of Partition) error {
	size := 0
	return r.object(func(name string) error {
		switch name {
		case "block_size":
			if err := r.decoder.Decode(&size); err != nil {
				return err
			}
			if size != r.blockSize {
				r.log.Warn("part of the peer's index is not used: its block size differs; start both with the same --block-size",
					"part", of.String(), "peer_block_size", size, "block_size", r.blockSize)
			}
			return nil
		case "events":
			if size == 0 {
				return fmt.Errorf("%s: events precede block_size", of)
			}
			return r.events(of, size == r.blockSize)
		case dumpGroups:
			return r.list(func() error { return r.groups(of, size == r.blockSize) })
		case dumpTiers:
			return r.list(func() error { return r.lower(of, size == r.blockSize) })
		}
		var other json.RawMessage
		return r.decoder.Decode(&other)
	})
}

// groups reads the KV-cache groups of one rank.
func (r *dumpReader) groups(of Partition, wanted bool) error {
	var rank dumpRank
	if err := r.decoder.Decode(&rank); err != nil || !wanted {
		return err
	}
	layout, err := kv.ParseLayout(rank.Layout)
	if err != nil {
		return err
	}
	key, err := r.rank(of, rank.WorkerID, rank.DPRank)
	if err != nil {
		return err
	}
	if !fits(layout, r.blockSize) {
		r.index.Clear(key)
		return nil
	}
	r.index.SetLayout(key, layout, r.blockSize)
	for _, held := range rank.Held {
		r.index.Hold(key, held.Group, held.Blocks)
	}
	return nil
}

// lower reads one change of the lower tiers of a rank.
func (r *dumpReader) lower(of Partition, wanted bool) error {
	var e dumpLower
	if err := r.decoder.Decode(&e); err != nil || !wanted {
		return err
	}
	key, err := r.rank(of, e.WorkerID, e.DPRank)
	if err == nil {
		_, err = e.Change.apply(r.index, key)
	}
	return err
}

// rank notes a rank of the dump.
func (r *dumpReader) rank(of Partition, worker uint64, rank uint32) (kv.WorkerKey, error) {
	key := kv.WorkerKey{Worker: worker, Rank: rank}
	if r.ranks[key] = true; len(r.ranks) > maxDumpRanks {
		return key, fmt.Errorf("it contains more than %d workers and ranks", maxDumpRanks)
	}
	r.found.Partition[worker] = of
	return key, nil
}

func (r *dumpReader) events(of Partition, wanted bool) error {
	var blocks []kv.StoredBlock
	return r.list(func() error {
		var e DumpEvent
		if err := r.decoder.Decode(&e); err != nil {
			return err
		}
		stored := e.Event.Data.Stored
		if !wanted || stored == nil {
			return nil
		}
		key, err := r.rank(of, e.WorkerID, e.Event.DPRank)
		if err != nil {
			return err
		}
		if !stored.placed() {
			r.found.LeftOut += len(stored.Blocks)
			return nil
		}
		if !strings.EqualFold(e.StorageTier, dumpTier) && e.StorageTier != "" { // Dynamo's dumps have them among the others
			c := lowerChange{Tier: strings.ToLower(e.StorageTier), Stored: stored, Again: true}
			if _, err := c.apply(r.index, key); err != nil {
				r.found.LeftOut += len(stored.Blocks)
			}
			return nil
		}
		blocks = stored.stored(blocks[:0])
		parent, hasParent := stored.parent()
		err = r.index.Store(key, parent, hasParent, blocks)
		switch {
		case errors.Is(err, radix.ErrParentUnknown), errors.Is(err, radix.ErrSelfParent):
			r.found.LeftOut += len(blocks)
		case err != nil:
			return err
		default:
			r.found.Blocks += len(blocks)
		}
		return nil
	})
}
