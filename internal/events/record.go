package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/jsonlines"
	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

const (
	// recordingQueue is how many changes may wait for the disk.
	recordingQueue = 10_000
	// recordedMemory is about the memory of a change beside its blocks, bytes.
	recordedMemory = 256
)

// recordedLine is one line of a recording, in the form of Dynamo's recorder
// (lib/llm/src/recorder.rs and RouterEvent of lib/kv-router/src/protocols.rs).
type recordedLine struct {
	Timestamp uint64         `json:"timestamp"` // ms since the recording began
	Event     *recordedEvent `json:"event"`
}

type recordedEvent struct {
	WorkerID    uint64          `json:"worker_id"`
	StorageTier string          `json:"storage_tier"`
	Domain      json.RawMessage `json:"residency_domain,omitempty"` // owner of the cache, where it may not be the worker
	Event       recordedChange  `json:"event"`
}

type recordedChange struct {
	EventID uint64       `json:"event_id"` // counts the events of a rank
	Data    recordedData `json:"data"`
	DPRank  uint32       `json:"dp_rank"`
}

// recordedData is one of its fields: {"stored":{...}}, {"removed":{...}} or "cleared".
type recordedData struct {
	Stored  *dumpStored      `json:"stored,omitempty"`
	Removed *recordedRemoved `json:"removed,omitempty"`
	Cleared bool             `json:"-"`
	// Not in Dynamo's form: KV-cache groups other than the first.
	Layout  *recordedLayout `json:"layout,omitempty"`
	Held    *groupBlocks    `json:"held,omitempty"`
	Dropped *groupBlocks    `json:"dropped,omitempty"`
	// Lower is a change of lower tiers, and Kept what a clearing of the device leaves of them.
	Lower *lowerChange `json:"lower,omitempty"`
	Kept  string       `json:"device_cleared,omitempty"` // as in peerEvent
}

// recordedLayout is the KV-cache groups of a rank.
type recordedLayout struct {
	Groups string `json:"groups"` // as kv.Layout's String writes them
	Block  int    `json:"block_size"`
}

type recordedRemoved struct {
	BlockHashes []uint64 `json:"block_hashes"`
}

// recordedCleared is what stands for the data of a cleared event.
const recordedCleared = `"cleared"`

// MarshalJSON writes the one field that is set.
func (d recordedData) MarshalJSON() ([]byte, error) {
	if d.Cleared {
		return []byte(recordedCleared), nil
	}
	type plain recordedData
	return json.Marshal(plain(d))
}

// UnmarshalJSON accepts exactly one of the forms.
func (d *recordedData) UnmarshalJSON(text []byte) error {
	*d = recordedData{}
	if string(text) == recordedCleared {
		d.Cleared = true
		return nil
	}
	type plain recordedData
	if err := json.Unmarshal(text, (*plain)(d)); err != nil {
		return err
	}
	set := 0
	for _, has := range []bool{d.Stored != nil, d.Removed != nil, d.Layout != nil, d.Held != nil, d.Dropped != nil, d.Lower != nil, d.Kept != ""} {
		if has {
			set++
		}
	}
	if set != 1 {
		return errors.New(`data is neither {"stored":...} nor {"removed":...} nor "cleared"`)
	}
	return nil
}

// Recording is an index that writes its changes to a file. The methods of a nil
// Recording do nothing.
type Recording struct {
	radix.Index
	lines *jsonlines.Writer
	log   *slog.Logger
	began time.Time // of the first change

	mu   sync.Mutex // guards began and next, and that lines come in the order of their numbers and times
	next map[kv.WorkerKey]uint64
}

// OpenRecording returns the Index to use for changes: a Recording of
// --record-events, which the caller must close, or the index itself and nil. An
// error means that the file cannot be opened or contains other data.
func OpenRecording(settings Settings, index radix.Index, log *slog.Logger) (radix.Index, *Recording, error) {
	name := settings.RecordEvents
	if name == "" {
		return index, nil, nil
	}
	if err := checkRecording(name); err != nil {
		return nil, nil, fmt.Errorf("--record-events %w", err)
	}
	file, torn, err := jsonlines.Open(name)
	if err != nil {
		return nil, nil, fmt.Errorf("--record-events: %w", err)
	}
	if torn > 0 {
		log.Warn("removed the incomplete last line of the KV event record", "file", name, "bytes", torn)
	}
	r := &Recording{Index: index, lines: jsonlines.New(file, recordingQueue, "the record of KV events", log), log: log, next: map[kv.WorkerKey]uint64{}}
	r.lines.Limit(settings.RecordEventsMaxBytes)
	return r, r, nil
}

// recordingStart is what each line of a recording begins with.
const recordingStart = `{"timestamp":`

// checkRecording refuses a file whose first whole line is no event.
func checkRecording(name string) error {
	if info, err := os.Lstat(name); err != nil || !info.Mode().IsRegular() {
		return nil // opening it returns the error
	}
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	return jsonlines.Read(file, func(_ int, text []byte, _ bool) error {
		var line recordedLine
		switch err := json.Unmarshal(text, &line); {
		case err == nil && line.Event != nil && line.Event.Event.Data != (recordedData{}):
			return jsonlines.ErrStop
		case err != nil && !json.Valid(text) && jsonlines.Begins(text, recordingStart): // torn
			return nil
		}
		return fmt.Errorf("%s: the file contains other data than KV events; use another name", name)
	})
}

// Store stores and records blocks.
func (r *Recording) Store(w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) error {
	if err := r.Index.Store(w, parent, hasParent, blocks); err != nil {
		return err
	}
	for part := range slices.Chunk(blocks, dumpedTogether) {
		r.note(w, recordedData{Stored: run{parent, hasParent, part}.stored()}, 16*len(part))
		parent, hasParent = part[len(part)-1].Engine, true
	}
	return nil
}

// Remove removes and records blocks, including those that w does not have.
func (r *Recording) Remove(w kv.WorkerKey, engine []uint64) (unknown int) {
	unknown = r.Index.Remove(w, engine)
	for part := range slices.Chunk(engine, dumpedTogether) {
		r.note(w, recordedData{Removed: &recordedRemoved{slices.Clone(part)}}, 8*len(part))
	}
	return unknown
}

// SetLayout sets and records the layout of w.
func (r *Recording) SetLayout(w kv.WorkerKey, layout kv.Layout, block int) {
	r.Index.SetLayout(w, layout, block)
	if !layout.Plain(block) {
		r.note(w, recordedData{Layout: &recordedLayout{layout.String(), block}}, 0)
	}
}

// Hold and Drop change and record a group of w other than the first.
func (r *Recording) Hold(w kv.WorkerKey, group int, engine []uint64) {
	r.Index.Hold(w, group, engine)
	for part := range slices.Chunk(engine, dumpedTogether) {
		r.note(w, recordedData{Held: &groupBlocks{group, slices.Clone(part)}}, 8*len(part))
	}
}

// Drop records blocks including those that w does not have.
func (r *Recording) Drop(w kv.WorkerKey, group int, engine []uint64) (unknown int) {
	unknown = r.Index.Drop(w, group, engine)
	for part := range slices.Chunk(engine, dumpedTogether) {
		r.note(w, recordedData{Dropped: &groupBlocks{group, slices.Clone(part)}}, 8*len(part))
	}
	return unknown
}

// StoreLower stores and records blocks of a lower tier.
func (r *Recording) StoreLower(at radix.LowerTier, parent uint64, hasParent bool, blocks []kv.StoredBlock) (lost int) {
	lost = r.Index.StoreLower(at, parent, hasParent, blocks)
	for part := range slices.Chunk(blocks, dumpedTogether) {
		c := lowerChangeAt(at)
		c.Stored = run{parent, hasParent, part}.stored()
		r.note(at.Worker, recordedData{Lower: &c}, 16*len(part))
		parent, hasParent = part[len(part)-1].Engine, true
	}
	return lost
}

// HoldLower stores and records blocks of a lower tier.
func (r *Recording) HoldLower(at radix.LowerTier, engine []uint64) (lost int) {
	lost = r.Index.HoldLower(at, engine)
	for part := range slices.Chunk(engine, dumpedTogether) {
		c := lowerChangeAt(at)
		c.Held = slices.Clone(part)
		r.note(at.Worker, recordedData{Lower: &c}, 8*len(part))
	}
	return lost
}

// RemoveLower removes and records blocks of a lower tier, including those that it does not
// have.
func (r *Recording) RemoveLower(at radix.LowerTier, engine []uint64) (unknown int) {
	unknown = r.Index.RemoveLower(at, engine)
	for part := range slices.Chunk(engine, dumpedTogether) {
		c := lowerChangeAt(at)
		c.Removed = slices.Clone(part)
		r.note(at.Worker, recordedData{Lower: &c}, 8*len(part))
	}
	return unknown
}

// SetChunk sets and records the chunks of w.
func (r *Recording) SetChunk(w kv.WorkerKey, blocks int) {
	r.Index.SetChunk(w, blocks)
	r.note(w, recordedData{Lower: &lowerChange{SetChunk: blocks}}, 0)
}

// RestoreLower sets and records the state of the lower tiers of w.
func (r *Recording) RestoreLower(w kv.WorkerKey, chunk int, doubtful bool, stores []string) {
	r.Index.RestoreLower(w, chunk, doubtful, stores)
	r.note(w, recordedData{Lower: &lowerChange{Chunk: chunk, Doubtful: doubtful, Stores: slices.Clone(stores)}}, 0)
}

// SettleLower settles and records a doubt.
func (r *Recording) SettleLower(w kv.WorkerKey, doubt uint32, held bool) (settled bool) {
	if settled = r.Index.SettleLower(w, doubt, held); settled {
		r.note(w, recordedData{Lower: &lowerChange{Settled: &held}}, 0)
	}
	return settled
}

// ClearDevice empties the device of w and records it.
func (r *Recording) ClearDevice(w kv.WorkerKey, host bool) {
	r.Index.ClearDevice(w, host)
	if r.Index.LowerOf(w) == (radix.LowerState{}) {
		r.note(w, recordedData{Cleared: true}, 0)
		return
	}
	kept := keptLower
	if host {
		kept = keptFiles
	}
	r.note(w, recordedData{Kept: kept}, 0)
}

// Clear empties w and records it.
func (r *Recording) Clear(w kv.WorkerKey) {
	r.Index.Clear(w)
	r.note(w, recordedData{Cleared: true}, 0)
}

// Forget empties all ranks of a worker, and records that.
func (r *Recording) Forget(worker uint64) {
	all := r.Index.Workers()
	r.Index.Forget(worker)
	for _, w := range all {
		if w.Worker == worker {
			r.note(w, recordedData{Cleared: true}, 0)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.next {
		if w.Worker == worker {
			delete(r.next, w)
		}
	}
}

// note queues a change whose blocks take that much memory, bytes. It never waits for
// the disk.
func (r *Recording) note(w kv.WorkerKey, data recordedData, blocks int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.began.IsZero() { // each recording begins at 0: so the next one in a file differs from this
		r.began = time.Now()
	}
	r.lines.Write(recordedLine{
		Timestamp: uint64(time.Since(r.began).Milliseconds()),
		Event:     &recordedEvent{WorkerID: w.Worker, StorageTier: dumpTier, Event: recordedChange{EventID: r.next[w], Data: data, DPRank: w.Rank}},
	}, recordedMemory+blocks)
	r.next[w]++
}

// Lost returns the number of changes that are missing in the file so far.
func (r *Recording) Lost() uint64 {
	if r == nil {
		return 0
	}
	return r.lines.Lost()
}

// recordingEnd is the time that Close waits for the disk.
const recordingEnd = 5 * time.Second

// Close writes the queued changes and closes the file. Its wait for a hung disk is
// limited, because the workers are ended next.
func (r *Recording) Close() {
	if r == nil {
		return
	}
	closed := make(chan struct{})
	go func() { // ends with the disk's last write
		r.lines.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(recordingEnd):
		r.log.Warn("the disk is too slow: the end of the KV event record may be missing", "waited", recordingEnd)
	}
}
