package events

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// A dump is an index as JSON, in the form of Dynamo's services: an object with
// "MODEL:GROUP": {"block_size": N, "events": [...]} for each partition, where
// the events are store events in an order in which parents come first. Their
// event ids only number them.

// DumpPart is one partition of a dump to write.
type DumpPart struct {
	Name    string // MODEL:GROUP
	Workers []kv.WorkerKey
}

// WriteDump writes the blocks of the workers of all parts. Consecutive blocks are
// in one event. sizes returns the tokens in a worker's block; unit is that of most.
func WriteDump(w io.Writer, index radix.Reader, unit int, sizes func(kv.WorkerKey) int, parts []DumpPart) error {
	out := bufio.NewWriter(w)
	out.WriteByte('{') // an error stays in out until Flush
	for i, part := range parts {
		if i > 0 {
			out.WriteByte(',')
		}
		name, _ := json.Marshal(part.Name) // a string always can be
		fmt.Fprintf(out, `%s:{"block_size":%d,"events":[`, name, unit)
		events := uint64(0)
		for _, key := range part.Workers {
			for c := range storedChanges(index.DumpOf(key)) {
				if events > 0 {
					out.WriteByte(',')
				}
				text, _ := json.Marshal(newRouterEvent(key, events, textOf(c, false))) // plain values always can be
				if _, err := out.Write(text); err != nil {
					return err // the reader is gone
				}
				events++
			}
		}
		out.WriteByte(']')
		if err := writeGroups(out, index, sizes, part.Workers); err != nil {
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
	WorkerID uint64 `json:"worker_id"`
	DPRank   uint32 `json:"dp_rank"`
	Layout   string `json:"layout"`
	// BlockSize is the tokens in a block of the rank; 0: in one of the partition.
	BlockSize int         `json:"block_size,omitempty"`
	Held      []groupText `json:"held"`
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
func writeGroups(out *bufio.Writer, index radix.Reader, sizes func(kv.WorkerKey) int, workers []kv.WorkerKey) error {
	list := listWriter{out: out, name: dumpGroups}
	for _, key := range workers {
		r := dumpRank{WorkerID: key.Worker, DPRank: key.Rank, Layout: index.LayoutOf(key).String(), BlockSize: sizes(key)}
		if r.Layout == "" {
			continue
		}
		if err := list.add(r); err != nil {
			return err
		}
		for c := range heldChanges(index.HeldOf(key)) {
			r.Held = []groupText{*textOf(c, false).Held}
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
	WorkerID uint64    `json:"worker_id"`
	DPRank   uint32    `json:"dp_rank"`
	Change   lowerText `json:"change"`
}

// writeLower writes the lower tiers of the workers, if any has some.
func writeLower(out *bufio.Writer, index radix.Reader, workers []kv.WorkerKey) error {
	list := listWriter{out: out, name: dumpTiers}
	for _, key := range workers {
		for c := range lowerChanges(index.DumpLowerOf(key)) {
			if err := list.add(dumpLower{WorkerID: key.Worker, DPRank: key.Rank, Change: *textOf(c, false).Lower}); err != nil {
				return err
			}
		}
	}
	list.end()
	return nil
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
func RecoverIndex(ctx context.Context, index radix.Index, key string, peers []string, log *slog.Logger) (Recovered, error) {
	var failures []error
	for _, peer := range peers {
		recovered, err := recoverFrom(ctx, index, key, peer)
		if err == nil {
			return recovered, nil
		}
		for worker := range recovered.Partition {
			_, _ = index.Apply(kv.WorkerKey{Worker: worker}, &radix.Change{Kind: radix.Forgotten}) // cannot fail
		}
		failures = append(failures, fmt.Errorf("%s: %w", peer, err))
		if ctx.Err() != nil {
			break
		}
	}
	return Recovered{}, errors.Join(failures...)
}

func recoverFrom(ctx context.Context, index radix.Index, key, peer string) (Recovered, error) {
	ctx, cancel := context.WithTimeout(ctx, dumpTimeout)
	defer cancel()
	answer, err := get(ctx, newPeerClient(), peer, "/dump", "", key)
	if err != nil {
		return Recovered{}, err
	}
	defer answer.Close()
	body := &io.LimitedReader{R: answer, N: maxDumpBytes}
	recovered, err := readDump(body, index)
	recovered.Peer = peer
	if body.N == 0 {
		err = fmt.Errorf("its dump is larger than %d bytes", maxDumpBytes)
	}
	return recovered, err
}

// readDump stores a dump in the index. After an error the workers in the answer may hold a part.
func readDump(in io.Reader, index radix.Index) (Recovered, error) {
	value := &valueReader{in, maxDumpValue}
	r := dumpReader{in: value, decoder: json.NewDecoder(value), index: index, ranks: map[kv.WorkerKey]bool{},
		found: Recovered{Partition: map[uint64]Partition{}}}
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
	in      *valueReader
	decoder *json.Decoder
	index   radix.Index
	found   Recovered
	ranks   map[kv.WorkerKey]bool // in the dump
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
			return r.decoder.Decode(&size)
		case "events":
			if size == 0 {
				return fmt.Errorf("%s: events precede block_size", of)
			}
			return r.events(of)
		case dumpGroups:
			return r.list(func() error { return r.groups(of, size) })
		case dumpTiers:
			return r.list(func() error { return r.lower(of) })
		}
		var other json.RawMessage
		return r.decoder.Decode(&other)
	})
}

// groups reads the KV-cache groups of one rank.
func (r *dumpReader) groups(of Partition, size int) error {
	var rank dumpRank
	if err := r.decoder.Decode(&rank); err != nil {
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
	size = cmp.Or(rank.BlockSize, size)
	if size <= 0 || !fits(layout, size) {
		return r.apply(key, radix.Change{Kind: radix.Cleared}, nil)
	}
	err = r.apply(key, radix.Change{Kind: radix.LayoutSet, Set: &radix.Setting{Layout: layout, BlockSize: size}}, nil)
	for i := range rank.Held {
		if err == nil {
			c, wrong := rank.Held[i].change(radix.Held)
			err = r.apply(key, c, wrong)
		}
	}
	return err
}

// lower reads one change of the lower tiers of a rank.
func (r *dumpReader) lower(of Partition) error {
	var e dumpLower
	if err := r.decoder.Decode(&e); err != nil {
		return err
	}
	key, err := r.rank(of, e.WorkerID, e.DPRank)
	if err != nil {
		return err
	}
	c, err := e.Change.change()
	return r.apply(key, c, err)
}

// apply makes a change of a rank, unless reading it has failed.
func (r *dumpReader) apply(key kv.WorkerKey, c radix.Change, err error) error {
	if err == nil {
		_, err = r.index.Apply(key, &c)
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

func (r *dumpReader) events(of Partition) error {
	return r.list(func() error {
		var e routerEvent
		err := r.decoder.Decode(&e)
		if errors.Is(err, errNoChange) { // events of other types are ignored
			return nil
		}
		stored := e.Event.Data.Stored
		if err != nil || stored == nil {
			return err
		}
		key, err := r.rank(of, e.WorkerID, e.Event.DPRank)
		if err != nil {
			return err
		}
		c, err := e.change()
		c.Again = c.Tier != kv.Device // Dynamo's dumps have lower tiers among the others
		if err = r.apply(key, c, err); err != nil {
			r.found.LeftOut += len(stored.Blocks)
		} else if c.Tier == kv.Device {
			r.found.Blocks += len(stored.Blocks)
		}
		return nil
	})
}
