// Package guard recovers panics in parsers of untrusted input.
package guard

import (
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"sync"
)

// Edges are the places where the router parses untrusted input.
const (
	KVEvents      = "kv_events"      // one connection to a worker's KV events, its replays included
	KVEventBatch  = "kv_event_batch" // one batch of KV events
	WorkerLoad    = "worker_load"    // a worker's load, from its socket or its metrics page
	WorkerMetrics = "worker_metrics" // a worker's metrics page, for the size of its cache
	Replica       = "replica"        // one connection to another router
	ReplicaServer = "replica_server" // one connection from another router
	ExtProc       = "ext_proc"       // one message of a gateway
	other         = "other"          // edges beyond maxEdges
	maxEdges      = 64               // edges with their own count
	maxStack      = 4 << 10          // bytes of a panic's stack that are logged
)

// Edges counts the panics at each edge. It is safe for concurrent use; nil counts
// nothing.
type Edges struct {
	mu     sync.Mutex // guards panics
	panics map[string]uint64
}

// New returns Edges with the edges of this package, all without a panic.
func New() *Edges {
	return &Edges{panics: map[string]uint64{KVEvents: 0, KVEventBatch: 0, WorkerLoad: 0, WorkerMetrics: 0, Replica: 0, ReplicaServer: 0,
		ExtProc: 0}}
}

// PanicError is the error that Do returns for a panic.
type PanicError struct {
	Edge  string
	Cause any
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("panic in the parser of %s: %v", e.Edge, e.Cause)
}

// Do runs f and returns its error. A panic in f becomes a *PanicError, is counted for
// the edge and logged with its stack: the first one, and each at which their number has doubled. A nil log logs nothing. Locks without a deferred
// unlock stay locked, and goroutines that f starts are not covered.
func (e *Edges) Do(edge string, log *slog.Logger, f func() error) (err error) {
	defer func() {
		cause := recover()
		if cause == nil {
			return
		}
		n := e.count(edge)
		err = &PanicError{edge, cause}
		if log != nil && n&(n-1) == 0 {
			stack := debug.Stack()
			log.Error("panic in a parser of untrusted input: the input is dropped", "edge", edge, "panics", n, "cause", fmt.Sprintf("%.200v", cause),
				"stack", string(stack[:min(len(stack), maxStack)]))
		}
	}()
	return f()
}

// count counts a panic and returns their number at the edge; 0: it is not counted.
func (e *Edges) count(edge string) uint64 {
	if e == nil {
		return 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.panics == nil {
		e.panics = map[string]uint64{}
	}
	if _, known := e.panics[edge]; !known && len(e.panics) >= maxEdges {
		edge = other
	}
	e.panics[edge]++
	return e.panics[edge]
}

// Panics returns the number of panics at each edge.
func (e *Edges) Panics() map[string]uint64 {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return maps.Clone(e.panics)
}
