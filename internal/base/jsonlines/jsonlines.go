// Package jsonlines writes JSON lines to a file without blocking its callers, and reads
// such files even if they are damaged.
package jsonlines

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// flushEvery is the time that a line may stay in memory, and how often a disk that
	// takes nothing is tried again.
	flushEvery = time.Second
	// maxBuffer bounds the bytes that wait for the disk beside the queue.
	maxBuffer = 1 << 20
	// maxQueued bounds the memory of the lines in the queue, bytes.
	maxQueued = 64 << 20
	// MaxLine is the maximum length of a line, bytes.
	MaxLine = 64 << 20
)

// Writer writes values to a file, one line of JSON for each. A nil Writer writes
// nothing. It is safe for concurrent use.
type Writer struct {
	File *os.File
	what string // the lines are, for the log
	log  *slog.Logger
	lost atomic.Uint64 // lines that found the queue full, or the disk or the file

	most   int64        // bytes that the file may have; 0: any number
	full   atomic.Bool  // it has them
	queued atomic.Int64 // memory of the lines in the queue, bytes

	mu     sync.RWMutex // guards closed, and that nothing is queued after it
	closed bool
	queue  chan queuedLine
	done   chan struct{} // closed when all is written
}

// queuedLine is a line that waits, and how much memory it takes, bytes.
type queuedLine struct {
	line any
	size int
}

// Open opens a file to append lines to. A new file is readable by its owner only.
// An incomplete last line, left by a full disk or a killed process, is completed or
// removed: torn is the number of removed bytes. Symbolic links, devices and pipes
// are refused.
func Open(name string) (file *os.File, torn int64, err error) {
	file, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		return nil, 0, fmt.Errorf("%s is a symbolic link: give the path of the file itself", name)
	}
	if err != nil {
		return nil, 0, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", name)
	}
	if err == nil {
		torn, err = mend(file, info.Size())
	}
	if err != nil {
		_ = file.Close()
		return nil, 0, err
	}
	return file, torn, nil
}

// mend ends the last line of a file of that many bytes, if nothing does: with a
// line end if it is whole, else by cutting it off. It returns the number of bytes that it cut
// off.
func mend(file *os.File, size int64) (torn int64, err error) {
	start, err := lastLine(file, size)
	if err != nil || start == size {
		return 0, err
	}
	if size-start <= MaxLine {
		line := make([]byte, size-start)
		if _, err := file.ReadAt(line, start); err != nil {
			return 0, err
		}
		if json.Valid(line) {
			_, err := file.WriteString("\n")
			return 0, err
		}
	}
	return size - start, file.Truncate(start)
}

// lastLine returns where the last line begins of a file of that many bytes; its
// size if it ends with a line end.
func lastLine(file io.ReaderAt, size int64) (int64, error) {
	part := make([]byte, 64<<10)
	for end := size; end > 0; {
		start := max(0, end-int64(len(part)))
		n, err := file.ReadAt(part[:end-start], start)
		if err != nil && err != io.EOF {
			return 0, err
		}
		if at := bytes.LastIndexByte(part[:n], '\n'); at >= 0 {
			return start + int64(at) + 1, nil
		}
		end = start
	}
	return 0, nil
}

// ErrStop ends Read without an error.
var ErrStop = errors.New("stop reading")

// Read calls yield with each line of a file that is not empty, and its number from
// 1, until yield returns an error, which Read returns unless it is ErrStop. whole means that the line
// ends with a newline; otherwise it may be incomplete. A line longer than MaxLine
// is an error.
func Read(from io.Reader, yield func(number int, line []byte, whole bool) error) error {
	lines := bufio.NewReaderSize(from, 64<<10)
	var long []byte
	for number := 1; ; number++ {
		long = long[:0]
		var part []byte
		var err error
		for {
			part, err = lines.ReadSlice('\n')
			if !errors.Is(err, bufio.ErrBufferFull) {
				break
			}
			if long = append(long, part...); len(long) > MaxLine {
				return fmt.Errorf("line %d is longer than %d bytes", number, MaxLine)
			}
		}
		if err != nil && err != io.EOF {
			return fmt.Errorf("after line %d: %w", number-1, err)
		}
		line := part
		if len(long) > 0 {
			long = append(long, part...)
			line = long
		}
		if trimmed := bytes.TrimSpace(line); len(trimmed) > 0 {
			failed := yield(number, trimmed, err == nil)
			if errors.Is(failed, ErrStop) {
				return nil
			}
			if failed != nil {
				return failed
			}
		}
		if err == io.EOF {
			return nil
		}
	}
}

// Begins reports whether a line begins with start, ignoring spaces, or ends before
// it could. Such a line that is not JSON is incomplete.
func Begins(line []byte, start string) bool {
	line = bytes.ReplaceAll(line[:min(len(line), 4*len(start))], []byte(" "), nil)
	n := min(len(line), len(start))
	return n > 0 && string(line[:n]) == start[:n]
}

// New returns a Writer to file, which it will close. At most waiting lines of 64
// MiB in total are queued for the disk; further ones are lost and counted. A failed
// write is retried every second. The log reports the start and end of such a
// failure, and Close the number of missing lines. what names the lines in the log.
// The caller must call Close.
func New(file *os.File, waiting int, what string, log *slog.Logger) *Writer {
	l := &Writer{File: file, what: what, log: log, queue: make(chan queuedLine, waiting), done: make(chan struct{})}
	go l.write() // until Close
	return l
}

// Lost returns the number of lines that are missing in the file so far.
func (l *Writer) Lost() uint64 {
	if l == nil {
		return 0
	}
	return l.lost.Load()
}

// Limit sets the maximum size of the file, bytes. The first line beyond it and all
// later ones are lost and counted, so that the file has no gap. Call it before the
// first Write.
func (l *Writer) Limit(bytes int64) { l.most = bytes }

// Write queues a value, which must not change afterwards; size is its approximate
// memory, bytes. It never waits.
func (l *Writer) Write(line any, size int) {
	if l == nil {
		return
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.closed {
		return
	}
	if l.full.Load() || !l.enqueue(queuedLine{line, size}) {
		l.lost.Add(1)
	}
}

// enqueue reports whether the queue had room.
func (l *Writer) enqueue(line queuedLine) bool {
	if l.queued.Add(int64(line.size)) <= maxQueued {
		select {
		case l.queue <- line:
			return true
		default:
		}
	}
	l.queued.Add(-int64(line.size))
	return false
}

// Close writes the queued lines and closes the file.
func (l *Writer) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		close(l.queue)
	}
	l.mu.Unlock()
	<-l.done
}

// write writes the queue to the file until it is closed.
func (l *Writer) write() {
	defer close(l.done)
	ticker := time.NewTicker(flushEvery)
	defer ticker.Stop()
	out := buffer{writer: l}
	if info, err := l.File.Stat(); err == nil {
		out.written = info.Size()
	}
	for open := true; open; {
		select {
		case next, more := <-l.queue:
			l.queued.Add(-int64(next.size))
			if open = more; more {
				out.add(next.line)
			}
		case <-ticker.C:
			out.flush()
		}
	}
	out.flush()
	l.lost.Add(uint64(bytes.Count(out.bytes, []byte("\n"))))
	if err := l.File.Close(); err != nil && out.failing == nil {
		l.log.Error("cannot write "+l.what, "error", err)
	}
	if n := l.lost.Load(); n > 0 {
		l.log.Warn("lines were lost in "+l.what, "lost", n)
	}
}

// buffer has the lines that a Writer's goroutine has not brought to the disk yet.
// It begins in the middle of a line where the disk took a part of that.
type buffer struct {
	writer  *Writer
	bytes   []byte
	failing error // the disk takes nothing; nil: it does
	written int64 // size of the file with the bytes in it
}

// add takes a line; it is lost where the disk takes nothing and no room is left, or
// the file has its limit.
func (b *buffer) add(line any) {
	if b.writer.full.Load() || b.failing != nil && len(b.bytes) >= maxBuffer {
		b.writer.lost.Add(1)
		return
	}
	text, err := json.Marshal(line)
	if err != nil {
		b.writer.lost.Add(1)
		b.writer.log.Error("cannot write a line to "+b.writer.what, "error", err)
		return
	}
	size := int64(len(text) + 1)
	if most := b.writer.most; most > 0 && b.written+size > most {
		b.writer.full.Store(true)
		b.writer.lost.Add(1)
		b.writer.log.Warn(b.writer.what+" has reached its maximum size: writing has stopped", "bytes", b.written, "most", most)
		return
	}
	b.written += size
	b.bytes = append(append(b.bytes, text...), '\n')
	if b.failing == nil && len(b.bytes) >= maxBuffer {
		b.flush()
	}
}

// flush brings the lines to the disk. What that does not take stays, and the next
// flush continues at its end.
func (b *buffer) flush() {
	if len(b.bytes) == 0 {
		return
	}
	n, err := b.writer.File.Write(b.bytes)
	b.bytes = b.bytes[:copy(b.bytes, b.bytes[n:])]
	log, what := b.writer.log, b.writer.what
	switch {
	case err != nil && b.failing == nil:
		log.Error("cannot write "+what+"; retrying every second", "error", err)
	case err == nil && b.failing != nil:
		log.Warn("resumed writing "+what, "lost", b.writer.lost.Load())
	}
	b.failing = err
	if len(b.bytes) == 0 && cap(b.bytes) > 2*maxBuffer {
		b.bytes = nil // of a line that was unusually long
	}
}
