package testkit

import (
	"bytes"
	"sync"
)

// LogBuffer is a log that can be read while it is written.
type LogBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

// Write appends p.
func (l *LogBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns all that was written.
func (l *LogBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Tail returns the last 6,000 bytes.
func (l *LogBuffer) Tail() string {
	log := l.String()
	return log[max(0, len(log)-6000):]
}
