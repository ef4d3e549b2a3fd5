package events

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// A snapshot is the blocks of every followed rank in a file, each rank with the
// last batch that they are as of: its number and the hash of its bytes. A router
// that starts from it requests a replay of that batch. Only if it is returned
// unchanged do the blocks count, and the batches after it are applied to them. A
// batch contains its creation time, so a restarted engine cannot send the same
// one. Every other answer leaves the rank empty.
//
// The replay must still have the batch then. So the file is written not only every
// interval, but as soon as a rank has published a quarter of what its replay keeps.

// Settings are the flags of a Snapshot and of a Recording.
type Settings struct {
	IndexSnapshot         string        `group:"Routing" placeholder:"FILE" help:"Save the index of KV events to FILE, and restore it at the start: a worker whose replay proves that it is still the same process resumes where the file ends; the others start empty. Each router needs its own file."`
	IndexSnapshotInterval time.Duration `group:"Routing" default:"30s" help:"Maximum time between two writes of --index-snapshot while the index changes. It is written earlier if a worker has published a quarter of its replay buffer."`

	RecordEvents         string `group:"Routing" placeholder:"FILE" help:"Append the changes that KV events make to the index to FILE, one JSON line each, in the format of Dynamo's recorder, for 'kvrouter replay-events'."`
	RecordEventsMaxBytes int64  `group:"Routing" default:"1073741824" hidden:"" help:"Maximum size of the file of --record-events, bytes; recording stops there."`
}

// Validate checks the settings. follows reports whether KV events are followed.
func (s Settings) Validate(follows bool) error {
	switch {
	case s.RecordEvents != "" && !follows:
		return errors.New("--record-events: KV events are off with --no-kv-events or a policy that ignores caches; leave one of them out")
	case s.RecordEventsMaxBytes < 1:
		return fmt.Errorf("--record-events-max-bytes %d: must be at least 1", s.RecordEventsMaxBytes)
	case s.IndexSnapshotInterval < minSnapshotInterval:
		return fmt.Errorf("--index-snapshot-interval %v: must be at least %v", s.IndexSnapshotInterval, minSnapshotInterval)
	case s.IndexSnapshot == "":
		return nil
	}
	if info, err := os.Stat(filepath.Dir(s.IndexSnapshot)); err != nil || !info.IsDir() {
		return fmt.Errorf("--index-snapshot %s: the folder %s does not exist: create it", s.IndexSnapshot, filepath.Dir(s.IndexSnapshot))
	}
	return nil
}

const (
	minSnapshotInterval = 100 * time.Millisecond
	// usualBuffer is the replay buffer, batches, of a rank that does not report its own:
	// the default of vLLM and of SGLang.
	usualBuffer = 10_000
	// The file is written ahead of its time once a rank has published a quarter
	// (1/snapshotShare) of what its replay keeps, but not within snapshotRest times as
	// long as the last write took.
	snapshotShare, snapshotRest = 4, 4
	// snapshotEnd is the longest time for the last write, at the router's end;
	// snapshotLimit for one before.
	snapshotEnd, snapshotLimit = 10 * time.Second, time.Minute
	// snapshotKept is how long after the start the file's blocks of a rank are
	// kept that has not been heard of yet.
	snapshotKept = 10 * time.Minute
)

// savedRank is one rank in a snapshot.
type savedRank struct {
	worker          kv.WorkerKey
	endpoint, topic string
	at              position
	layout          kv.Layout
	complete        bool            // no block that the rank held is missing
	pinned          bool            // Stream.pinned
	lower           radix.LowerDump // without its blocks
	blocks          int
	runs            []byte // as in the file
	// settled means that its blocks are in the index, or never will be.
	settled atomic.Bool
}

// Snapshot saves the index to a file. The methods of a nil Snapshot do nothing.
type Snapshot struct {
	settings  Settings
	blockSize int
	log       *slog.Logger
	opened    time.Time
	off       bool          // the file belongs to another process: it is not written
	failures  atomic.Uint64 // failed writes

	mu    sync.Mutex // guards ranks
	ranks map[kv.WorkerKey]*savedRank

	// The rest belongs to Run.

	written map[kv.WorkerKey]position // positions in the file
	began   time.Time                 // of the last write
	rest    time.Duration             // from then on, before a write ahead of its time
	failing bool                      // the last write failed
}

// Failures returns the number of failed writes; 0 for nil.
func (s *Snapshot) Failures() uint64 {
	if s == nil {
		return 0
	}
	return s.failures.Load()
}

// OpenSnapshot reads the file if it exists; it returns nil if no file is set. An
// invalid file is logged and ignored.
func OpenSnapshot(settings Settings, blockSize int, log *slog.Logger) *Snapshot {
	if settings.IndexSnapshot == "" {
		return nil
	}
	s := &Snapshot{settings: settings, blockSize: blockSize, log: log.With("file", settings.IndexSnapshot), opened: time.Now()}
	data, err := readSnapshotFile(settings.IndexSnapshot)
	if errors.Is(err, fs.ErrNotExist) {
		return s
	}
	if err == nil {
		s.ranks, err = parseSnapshot(data, blockSize)
	}
	if err != nil {
		s.off = errors.Is(err, errNoSnapshot)
		s.log.Warn("--index-snapshot cannot be used: starting with an empty index", "error", err)
		return s
	}
	blocks := 0
	for _, rank := range s.ranks {
		blocks += rank.blocks
	}
	s.log.Info("read the index snapshot; it is used for workers that prove to be the same process", "ranks", len(s.ranks), "blocks", blocks)
	return s
}

// Resume continues the stream from the file's blocks of its rank, once the rank has
// proved that it is the same process. This requires a replay endpoint. Call it
// before the stream's Run.
func (s *Snapshot) Resume(stream *Stream) {
	if s == nil || stream.Src.Replay == "" || stream.Src.Seeded {
		return
	}
	s.mu.Lock()
	rank := s.ranks[stream.Src.Worker]
	s.mu.Unlock()
	if rank == nil || rank.settled.Load() {
		return
	}
	if rank.endpoint != stream.Src.Endpoint || rank.topic != stream.Src.Topic {
		rank.settled.Store(true)
		stream.log.Info("the worker's blocks of --index-snapshot are not used: its KV event endpoint has changed", "from", rank.endpoint)
		return
	}
	stream.saved, stream.sure = rank, true
	stream.next, stream.sum, stream.layout, stream.layoutText = rank.at.next, rank.at.sum, rank.layout, rank.at.layout
}

// restore puts the snapshot's blocks into the index: the publisher has proved that
// they are its own.
func (s *Stream) restore() {
	rank := s.saved
	if rank == nil {
		return
	}
	cold := !rank.complete
	s.alter(radix.Change{Kind: radix.Cleared})
	s.setLayout(rank.layout)
	if len(rank.lower.Stores) > 0 {
		s.alter(radix.Change{Kind: radix.LowerRestored, Set: &radix.Setting{Stores: rank.lower.Stores}})
	}
	for r := (snapshotReader{data: rank.runs}); len(r.data) > 0; {
		c, ok := r.change(rank.lower.Stores, s.blocks, s.hashes)
		s.blocks, s.hashes = c.Blocks, c.Hashes
		if !ok {
			continue
		}
		if _, err := s.alter(c); err != nil {
			cold = true
		}
	}
	if rank.lower.Chunk > 0 || rank.lower.Doubtful {
		s.alter(radix.Change{Kind: radix.LowerRestored, Set: &radix.Setting{Chunk: rank.lower.Chunk, Doubtful: rank.lower.Doubtful}})
	}
	s.pinned.Store(rank.pinned)
	s.chunkBlocks = rank.lower.Chunk
	s.stats.Cold.Store(cold)
	s.stats.LastSeq.Store(rank.at.next - 1)
	s.history.reach(rank.at) // before the file's copy is forgotten: the next file has one of the two
	s.settle()
	s.log.Info("restored the worker's blocks from --index-snapshot", "batch", rank.at.next-1, "blocks", s.index.Blocks(s.Src.Worker))
}

// settle ends the wait for a proof of the snapshot's blocks.
func (s *Stream) settle() {
	if s.saved != nil {
		s.saved.settled.Store(true)
		s.saved = nil
	}
}

// Run writes the streams' blocks to the file at each interval until ctx is done,
// and once more then. A failed write leaves the file unchanged; of failures in a row the
// first is logged.
func (s *Snapshot) Run(ctx context.Context, streams func() []*Stream) {
	ticker := time.NewTicker(min(minSnapshotInterval, s.settings.IndexSnapshotInterval))
	defer ticker.Stop()
	s.began = time.Now()
	for running := true; running; {
		limit := snapshotLimit
		select {
		case <-ctx.Done():
			running, limit = false, snapshotEnd
		case now := <-ticker.C:
			if !s.due(now, streams()) {
				continue
			}
		}
		s.began = time.Now()
		writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
		err := s.save(writing, streams())
		cancel()
		switch {
		case err != nil:
			s.failures.Add(1)
			s.rest = s.settings.IndexSnapshotInterval // not the same failure again and again
			if !s.failing {
				s.log.Warn("cannot write --index-snapshot: the file is unchanged", "error", err)
			}
			s.failing = true
		case s.failing:
			s.log.Info("--index-snapshot can be written again")
			s.failing = false
		}
	}
}

// due reports whether the file must be written: after the interval, or once a rank has
// gone so far that its replay might soon not reach back to the file's position.
func (s *Snapshot) due(now time.Time, streams []*Stream) bool {
	age := now.Sub(s.began)
	return age >= s.settings.IndexSnapshotInterval || age >= s.rest && slices.ContainsFunc(streams, s.behind)
}

func (s *Snapshot) behind(stream *Stream) bool {
	if stream.Src.Replay == "" || !fitsSnapshot(stream.Src) {
		return false // the file is of no use to it
	}
	at, buffer := stream.history.position(), uint64(cmp.Or(stream.Src.Buffer, usualBuffer))
	return at.next > 0 && at.next-s.written[stream.Src.Worker].next >= max(1, buffer/snapshotShare) // below it: the engine has restarted
}

// save replaces the file if something has changed since the last call. A concurrent
// reader finds the complete old or new file.
func (s *Snapshot) save(ctx context.Context, streams []*Stream) error {
	waiting := s.waiting()
	if s.off || s.unchanged(streams) {
		return nil
	}
	temporary := s.settings.IndexSnapshot + ".tmp" // always the same, so that crashes leave one at most
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(temporary, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // whatever was there may be a link, or a pipe
	if err != nil {
		return err
	}
	written, size, err := writeSnapshot(ctx, file, s.blockSize, streams, waiting)
	s.rest = max(minSnapshotInterval, snapshotRest*time.Since(s.began)) // without the wait for the disk, which may be others'
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(temporary, s.settings.IndexSnapshot)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	s.written = written
	s.rest = max(s.rest, 2*time.Since(s.began)) // a slow disk rests half of the time
	s.log.Debug("wrote the index snapshot", "ranks", len(written), "bytes", size, "took", time.Since(s.began))
	return nil
}

// waiting returns the ranks of the file that have not been heard of yet: they go
// into the next file as they are. Those that are settled, or all after
// snapshotKept, are forgotten.
func (s *Snapshot) waiting() (ranks []*savedRank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := time.Since(s.opened) > snapshotKept
	for key, rank := range s.ranks {
		if late || rank.settled.Load() {
			delete(s.ranks, key)
			continue
		}
		ranks = append(ranks, rank)
	}
	return ranks
}

// unchanged reports whether the file is as of where the streams are now.
func (s *Snapshot) unchanged(streams []*Stream) bool {
	known := 0
	for _, stream := range streams {
		at := stream.history.position()
		if at.next == 0 || !fitsSnapshot(stream.Src) {
			continue
		}
		if known++; s.written[stream.Src.Worker] != at {
			return false
		}
	}
	return known == len(s.written)
}
