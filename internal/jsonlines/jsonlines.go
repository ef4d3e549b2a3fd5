// Package jsonlines writes lines of JSON to a file without making its callers wait.
package jsonlines

import (
	"bufio"
	"encoding/json"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// flushEvery is how long a line may stay in memory.
const flushEvery = time.Second

// Writer writes values to a file, one line of JSON for each. A nil Writer writes
// nothing. It is safe for concurrent use.
type Writer struct {
	File *os.File
	what string // the lines are, for the log
	log  *slog.Logger
	lost atomic.Uint64 // lines that found the queue full, or the disk

	mu     sync.RWMutex // guards closed, and that nothing is queued after it
	closed bool
	queue  chan any
	done   chan struct{} // closed when all is written
}

// New returns a Writer to file, which it will close. At most waiting lines wait
// for the disk; further ones are lost and counted, and Close logs the count. what
// names the lines in the log. The caller must call Close.
func New(file *os.File, waiting int, what string, log *slog.Logger) *Writer {
	l := &Writer{File: file, what: what, log: log, queue: make(chan any, waiting), done: make(chan struct{})}
	go l.write() // until Close
	return l
}

// Write queues a value, which must not change any more. It never waits.
func (l *Writer) Write(line any) {
	if l == nil {
		return
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.closed {
		return
	}
	select {
	case l.queue <- line:
	default:
		l.lost.Add(1)
	}
}

// Close writes what is left and closes the file.
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
	out := bufio.NewWriterSize(l.File, 1<<20)
	encoder := json.NewEncoder(out)
	ticker := time.NewTicker(flushEvery)
	defer ticker.Stop()
	var failure error
	fail := func(err error) {
		if err != nil && failure == nil {
			failure = err
			l.log.Error("cannot write "+l.what+" any more", "error", err)
		}
	}
	for open := true; open; {
		select {
		case line, more := <-l.queue:
			if open = more; !more {
				break
			}
			if failure != nil {
				l.lost.Add(1)
				break
			}
			fail(encoder.Encode(line))
		case <-ticker.C:
			fail(out.Flush())
		}
	}
	fail(out.Flush())
	fail(l.File.Close())
	if n := l.lost.Load(); n > 0 {
		l.log.Warn("lines are missing in "+l.what, "lost", n)
	}
}
