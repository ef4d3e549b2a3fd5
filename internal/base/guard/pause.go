package guard

import (
	"sync"
	"time"
)

// pauseFactor is the length of the pause as a multiple of the call that caused it: a
// function that always reaches its limits takes a tenth of a processor's time.
const pauseFactor = 10

// Pause prevents immediate further calls of a function with inputs at least as large as one
// that reached a limit of time or memory. It is safe for concurrent use.
type Pause struct {
	mu    sync.Mutex // guards all below
	hits  uint64
	until time.Time
	size  int // smallest input since the pause began, bytes
}

// Hit begins or extends a pause after a call for an input of that many bytes took that
// long.
func (p *Pause) Hit(took time.Duration, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if !now.Before(p.until) || size < p.size {
		p.size = size
	}
	p.hits++
	if until := now.Add(pauseFactor * took); until.After(p.until) {
		p.until = until
	}
}

// Hits returns the number of calls that reached a limit.
func (p *Pause) Hits() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits
}

// On reports whether a call for an input of that many bytes must wait for the end of the
// pause.
func (p *Pause) On(size int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits > 0 && size >= p.size && time.Now().Before(p.until)
}
