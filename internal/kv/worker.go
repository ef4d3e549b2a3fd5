package kv

// Worker is a worker as whoever runs it tells of it: a file, DNS or Kubernetes. What
// it leaves out the worker is asked for itself.
type Worker struct {
	ID       uint64 // always the same of the same worker, and of no other
	Name     string // for people: printable ASCII; others may have the same. Empty: none
	URL      string // http://host:port, no slash at the end
	KVEvents string // ZMQ endpoint of rank 0's KV events; empty: as the worker says
	Replay   string // of their replay; likewise
	Load     string // of its load; likewise
	Held     Hold
	Disagg

	// EventsPort is where rank 0 of a vLLM server publishes KV events that knows no
	// route to say so; the events of rank i come from this port plus i. 0: nowhere.
	EventsPort uint16
}

// Hold says why a worker gets no new requests, in words for people; empty: it gets
// its share.
type Hold string

// The holds.
const (
	HoldNotReady Hold = "not ready" // it may come back
	HoldDraining Hold = "draining"  // it ends what it has begun, and goes
)
