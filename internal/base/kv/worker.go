package kv

// Worker is a worker as reported by service discovery: a file, DNS or Kubernetes.
// Missing values are queried from the worker itself.
type Worker struct {
	ID       uint64 // stable and unique
	Name     string // display name: printable ASCII, not necessarily unique; empty: none
	URL      string // http://host:port, no slash at the end
	KVEvents string // ZMQ endpoint of rank 0's KV events; empty: as the worker reports
	Replay   string // of their replay; likewise
	Load     string // of its load; likewise
	Cordon   Cordon
	Disagg

	// EventsPort is the port on which rank 0 of a vLLM server publishes KV events if the
	// server has no route that reports it; rank i uses this port plus i. 0: none.
	EventsPort uint16
}

// Cordon is the reason why a worker gets no new requests, as displayed; empty: it gets
// requests.
type Cordon string

// The reasons.
const (
	CordonNotReady Cordon = "not ready" // it may come back
	CordonDraining Cordon = "draining"  // it finishes its requests and leaves
)
