package guard

import (
	"sync"
	"time"
)

// pauseFactor is how much longer the pause is than what led to it: a function that always
// reaches its limits takes a tenth of a processor's time.
const pauseFactor = 10

// Pause keeps a function from being called again at once for an input as large as one for
// which it has reached a limit of time or memory. It is safe for concurrent use.
type Pause struct {
	mu    sync.Mutex // guards all below
	hits  uint64
	until time.Time
	size  int // of the smallest input since the pause began, bytes
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

// On reports whether the function must not be called now for an input of that many bytes.
func (p *Pause) On(size int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits > 0 && size >= p.size && time.Now().Before(p.until)
}
