package radix

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// spinLock is a sync.RWMutex whose callers first try for a while before they
// sleep: where the lock is held for some microseconds only, falling asleep and
// being woken takes ten times as long. A writer lets readers that are trying go
// first, so that one with many short changes does not take the lock again before
// they have had it. A caller that has tried for long enough waits its turn in the
// RWMutex, so none waits forever.
type spinLock struct {
	sync.RWMutex
	trying atomic.Int32 // readers
}

// lockTries is how often the lock is tried for, some ns each, and triesInARow
// after how many others may use the processor.
const (
	lockTries   = 20_000
	triesInARow = 1000
)

// RLock locks for reading.
func (l *spinLock) RLock() {
	if l.TryRLock() {
		return
	}
	l.trying.Add(1)
	got := try(l.TryRLock)
	l.trying.Add(-1)
	if !got {
		l.RWMutex.RLock()
	}
}

// Lock locks for writing.
func (l *spinLock) Lock() {
	if !try(func() bool { return l.trying.Load() == 0 && l.TryLock() }) {
		l.RWMutex.Lock()
	}
}

func try(lock func() bool) bool {
	for i := range lockTries {
		if lock() {
			return true
		}
		if i%triesInARow == triesInARow-1 {
			runtime.Gosched()
		}
	}
	return false
}
