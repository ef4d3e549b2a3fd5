package events

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/base/jsonlines"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

const (
	// recordingQueue is how many changes may wait for the disk.
	recordingQueue = 10_000
	// recordedMemory is about the memory of a change beside its blocks, bytes.
	recordedMemory = 256
)

// recordedLine is one line of a recording, in the form of Dynamo's recorder
// (lib/llm/src/recorder.rs).
type recordedLine struct {
	Timestamp uint64       `json:"timestamp"` // ms since the recording began
	Event     *routerEvent `json:"event"`
}

// Recording is an index that writes its changes to a file. The methods of a nil
// Recording do nothing.
type Recording struct {
	radix.Reader
	index radix.Applier
	lines *jsonlines.Writer
	log   *slog.Logger

	// mu guards all below. It is held while a change is made and recorded, so that a replay has the
	// order of the index, whose locks may be taken under it.
	mu    sync.Mutex
	began time.Time // of the first change
	next  map[kv.WorkerKey]uint64
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
	r := &Recording{Reader: index, index: index, lines: jsonlines.New(file, recordingQueue, "the record of KV events", log), log: log,
		next: map[kv.WorkerKey]uint64{}}
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
		case err == nil && line.Event != nil && line.Event.Event.Data != (changeText{}):
			return jsonlines.ErrStop
		case err != nil && !json.Valid(text) && jsonlines.Begins(text, recordingStart): // torn
			return nil
		}
		return fmt.Errorf("%s: the file contains other data than KV events; use another name", name)
	})
}

// Apply makes and records a change; one of blocks even if the rank does not have some of them.
func (r *Recording) Apply(w kv.WorkerKey, c *radix.Change) (radix.Applied, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ranks []kv.WorkerKey // of a worker that is forgotten
	if c.Kind == radix.Forgotten {
		ranks = slices.DeleteFunc(r.Workers(), func(other kv.WorkerKey) bool { return other.Worker != w.Worker })
	}
	set := c.Setting()
	plain := c.Kind == radix.LayoutSet && len(r.LayoutOf(w).Groups) == 0 && set.Layout.Plain(set.BlockSize)
	done, err := r.index.Apply(w, c)
	if err != nil {
		return done, err
	}
	switch c.Kind {
	case radix.Stored, radix.Held, radix.Removed:
		for from := 0; from < c.Size(); from += dumpedTogether {
			part := c.Part(from, min(from+dumpedTogether, c.Size()))
			r.note(w, &part)
		}
	case radix.Cleared, radix.LookaheadStored, radix.ChunkSet, radix.LowerRestored:
		r.note(w, c)
	case radix.DeviceCleared:
		if r.LowerOf(w) == (radix.LowerState{}) { // Dynamo's form says all
			c = &radix.Change{Kind: radix.Cleared}
		}
		r.note(w, c)
	case radix.LayoutSet:
		if !plain { // which it was before, too
			r.note(w, c)
		}
	case radix.DoubtSettled:
		if done.Settled {
			r.note(w, c)
		}
	case radix.Forgotten:
		for _, rank := range ranks {
			r.note(rank, c)
		}
		maps.DeleteFunc(r.next, func(rank kv.WorkerKey, _ uint64) bool { return rank.Worker == w.Worker })
	}
	return done, nil
}

// note queues a change. It never waits for the disk. The caller holds the lock.
func (r *Recording) note(w kv.WorkerKey, c *radix.Change) {
	if r.began.IsZero() { // each recording begins at 0: so the next one in a file differs from this
		r.began = time.Now()
	}
	r.lines.Write(recordedLine{
		Timestamp: uint64(time.Since(r.began).Milliseconds()),
		Event:     newRouterEvent(w, r.next[w], textOf(c, true)),
	}, recordedMemory+16*len(c.Blocks)+8*(len(c.Hashes)+len(c.Skipped)))
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
