package simulation

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kvrouter/internal/cache/events"
)

// fileFault is what becomes of the snapshot of a router that ends.
type fileFault string

const (
	fileKept  fileFault = "as a kill leaves it"
	fileWhole fileFault = "of an end in good order"
	fileTorn  fileFault = "cut off"
	fileWrong fileFault = "changed in one byte"
	fileStale fileFault = "an old one"
	fileOther fileFault = "that of another router"
	fileGone  fileFault = "gone"
)

var fileFaults = []fileFault{fileKept, fileKept, fileWhole, fileTorn, fileWrong, fileStale, fileStale, fileOther, fileGone}

// snapshotFolder makes a folder for the snapshots of a world, in memory where there is
// such a file system.
func snapshotFolder() string {
	for _, parent := range []string{"/dev/shm", ""} {
		if folder, err := os.MkdirTemp(parent, "kvrouter-simulation-"); err == nil {
			return folder
		}
	}
	panic("no folder for snapshots can be made")
}

func (w *world) snapshotOf(router int) string { return filepath.Join(w.folder, hostOf(router)) }

// openSnapshot opens the node's snapshot, and starts to write it. endSaving ends that with
// a last write, before the end of what follows workers empties the index.
func (n *node) openSnapshot() {
	w := n.world
	if w.setup.Snapshot == 0 {
		return
	}
	n.saved = events.OpenSnapshot(events.Settings{IndexSnapshot: w.snapshotOf(n.id), IndexSnapshotInterval: w.setup.Snapshot}, blockSize, n.log)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.saved.Run(ctx, n.streams)
	}()
	n.endSaving = func() {
		cancel()
		<-done
	}
}

// readSnapshot returns a router's snapshot; nil: it has none.
func (w *world) readSnapshot(router int) []byte {
	file, err := os.ReadFile(w.snapshotOf(router))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		panic(err)
	}
	return file
}

// keepSnapshots keeps a copy of each snapshot as it is now.
func (w *world) keepSnapshots() {
	if w.setup.Snapshot == 0 {
		return
	}
	for i := range w.nodes {
		if file := w.readSnapshot(i); file != nil {
			w.copies = append(w.copies, file)
		}
	}
}

// stopWith stops a node, with that fault of its snapshot. number says which copy or byte
// it is.
func (w *world) stopWith(n *node, fault fileFault, number int) {
	before := w.readSnapshot(n.id)
	w.stopNode(n, fault != fileWhole)
	file := slices.Clone(before)
	switch fault {
	case fileWhole:
		return
	case fileTorn:
		file = file[:len(file)*number/1000]
	case fileWrong:
		if len(file) > 0 {
			file[len(file)*number/1000] ^= byte(1 + number%255)
		}
	case fileStale:
		if len(w.copies) > 0 {
			file = w.copies[number%len(w.copies)]
		}
	case fileOther:
		file = w.readSnapshot((n.id + 1) % len(w.nodes))
	case fileGone:
		file = nil
	}
	err := os.Remove(w.snapshotOf(n.id))
	if file != nil {
		err = os.WriteFile(w.snapshotOf(n.id), file, 0o600)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		panic(err)
	}
}

// restores counts the ranks that are restored from a snapshot: the log alone says so.
type restores struct{ w *world }

// Enabled implements slog.Handler.
func (r restores) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

// Handle implements slog.Handler.
func (r restores) Handle(_ context.Context, record slog.Record) error {
	if strings.HasPrefix(record.Message, "restored the worker's blocks") {
		r.w.count(func(c *counts) { c.Restored++ })
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (r restores) WithAttrs([]slog.Attr) slog.Handler { return r }

// WithGroup implements slog.Handler.
func (r restores) WithGroup(string) slog.Handler { return r }
