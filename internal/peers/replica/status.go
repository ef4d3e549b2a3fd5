package replica

import (
	"cmp"
	"slices"
	"time"
)

// Kinds of a Network.
const (
	KindEmbedded = "embedded" // a NATS server in each router
	KindExisting = "existing" // NATS servers of an operator
	KindDynamo   = "dynamo"   // Dynamo's protocol over ZeroMQ
)

// Network is the state of a Link. All times are in seconds.
type Network struct {
	Kind      string   `json:"kind"`
	Name      string   `json:"name,omitempty"`     // of the cluster, or the subjects' prefix on existing servers
	ID        string   `json:"id,omitempty"`       // of this router
	Server    string   `json:"server,omitempty"`   // existing server that is connected
	Connected bool     `json:"connected"`          // messages can be sent
	RoundTrip *float64 `json:"round_trip_seconds"` // to that server; nil: unknown
	Routes    []Route  `json:"routes,omitempty"`   // to other embedded servers, at most MaxPeers
	Unsent    uint64   `json:"-"`                  // batches and messages that were not sent
	Missed    uint64   `json:"-"`                  // batches that were lost because this router was behind
}

// Route is a connection to the embedded server of another router.
type Route struct {
	ID           string   `json:"id"` // that router says
	Address      string   `json:"address"`
	RoundTrip    *float64 `json:"round_trip_seconds"` // nil: not measured yet
	PendingBytes int      `json:"pending_bytes"`      // that wait to be sent there
	MessagesIn   int64    `json:"messages_in"`        // of NATS: batches of updates
	MessagesOut  int64    `json:"messages_out"`
}

// Member is another router.
type Member struct {
	ID       string    `json:"id"` // name of the Link for it
	Kvrouter bool      `json:"kvrouter"`
	Since    time.Time `json:"since"`       // of its first message
	Lag      float64   `json:"lag_seconds"` // since its last message
	InFlight int       `json:"in_flight"`   // its requests on workers that are up here
	Homeless int       `json:"no_worker"`   // its requests on workers that are not
	Differs  int       `json:"differing_digests"`
}

// Status is what a router knows of the others.
type Status struct {
	Network
	Members []Member `json:"members"` // by ID
	Counts  struct {
		Counts
		Unsent uint64 `json:"unsent"`
		Missed uint64 `json:"missed"`
	} `json:"counts"`
}

// Status returns what is known of the other routers. It sends nothing and waits for none of them.
func (r *Mesh) Status() (s Status) {
	s.Network = r.link.Network()
	s.Counts.Counts, s.Counts.Unsent, s.Counts.Missed = r.Counts(), s.Unsent, s.Missed
	s.Members = []Member{}
	now := time.Now()
	r.books.Lock()
	defer r.books.Unlock()
	for from, p := range r.members {
		if p.id == 0 {
			continue // no router has spoken there yet
		}
		s.Members = append(s.Members, Member{
			ID: from, Kvrouter: p.own, Since: p.since.UTC(), Lag: max(0, now.Sub(p.last)).Round(time.Millisecond).Seconds(),
			InFlight: p.booked, Homeless: p.waiting, Differs: p.differing,
		})
	}
	slices.SortFunc(s.Members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	return s
}
