package health

import (
	"container/list"
	"sync"
	"time"
)

const (
	// BudgetSeconds is the time span over which retries are counted. BudgetLeast is the
	// number of retries per span that are allowed in addition to the share of the requests,
	// so that small loads have retries, too.
	BudgetSeconds, BudgetLeast = 10, 10
	// budgetClients is the maximum number of clients of a budget. Beyond it the least
	// recently active one is removed; its requests and retries still count in the total.
	budgetClients = 1024
	// reservedShare is the part of a client's unused fair share that others cannot take.
	// mostOfFair is the maximum for a client, as a multiple of its fair share, if others
	// leave theirs unused.
	reservedShare, mostOfFair = 0.5, 2
)

// Denial is why a retry is denied. The values are metric labels.
type Denial string

// The reasons.
const (
	DeniedTotal  Denial = "total"  // the whole budget is used up
	DeniedClient Denial = "client" // the rest is for other clients
)

// Budget bounds retries to a share of the requests, so that they do not multiply the load
// where all workers fail, and divides them between clients, so that the failures of one
// client do not cost another its retries.
//
// Of the last BudgetSeconds the total is BudgetLeast + share x all requests. A client's
// fair share of it is BudgetLeast / clients + share x its own requests; clients are those
// that sent a request or had a retry in that time. Half of the fair share (reservedShare)
// is reserved for the client. A reserved retry is granted even if the total is used up,
// such as when a client is new. The rest is granted in the order of requests, up to twice
// the fair share (mostOfFair): with a share of 0.2, a client that fails everywhere has at
// most 1.4 attempts per request, in addition to its part of BudgetLeast.
//
// It is safe for concurrent use. A nil Budget has no limit.
type Budget struct {
	share float64

	mu      sync.Mutex // guards the rest
	all     spending
	clients map[string]*list.Element // of *spending, in recent
	recent  *list.List               // most recently active first
}

// spending is the requests and retries of one client, or of all, in the last
// BudgetSeconds.
type spending struct {
	client            string
	at                int64 // Unix time of the latest second that is counted
	window            [BudgetSeconds]struct{ requests, retries int }
	requests, retries int   // sums of window
	heard             int64 // Unix time of its last request or retry
}

// NewBudget returns a budget with that share of the requests.
func NewBudget(share float64) *Budget {
	return &Budget{share: share, clients: map[string]*list.Element{}, recent: list.New()}
}

// Request counts a request of a client.
func (b *Budget) Request(client string, now time.Time) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	at := now.Unix()
	b.all.upTo(at).requests++
	b.all.requests++
	s := b.of(client, at)
	s.upTo(at).requests++
	s.requests++
	b.forget(at)
}

// Take counts a retry of a client if the budget allows it; otherwise it returns the reason.
func (b *Budget) Take(client string, now time.Time) Denial {
	if b == nil {
		return ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	at := now.Unix()
	all := b.all.upTo(at)
	s := b.of(client, at)
	own := s.upTo(at)
	b.forget(at)
	if denied := b.denied(s, at); denied != "" {
		return denied
	}
	all.retries++
	b.all.retries++
	own.retries++
	s.retries++
	return ""
}

// denied returns the reason why a retry of a client is denied, given the counts of the
// client and of all for that second.
func (b *Budget) denied(s *spending, at int64) Denial {
	free := BudgetLeast + b.share*float64(b.all.requests) - float64(b.all.retries)
	reserved := b.reserved(s)
	switch {
	case reserved >= 1:
		return ""
	case free < 1:
		return DeniedTotal
	case reserved > 0: // clients with few requests have fractions of retries, which add up
		return ""
	case float64(s.retries+1) > mostOfFair*b.fair(s):
		return DeniedClient
	}
	for e := b.recent.Front(); e != nil; e = e.Next() {
		if other := e.Value.(*spending); other != s {
			other.upTo(at)
			free -= b.reserved(other)
		}
	}
	if free < 1 {
		return DeniedClient
	}
	return ""
}

// fair is a client's fair share of the total.
func (b *Budget) fair(s *spending) float64 {
	return BudgetLeast/float64(len(b.clients)) + b.share*float64(s.requests)
}

// reserved is the part of its fair share that others cannot take.
func (b *Budget) reserved(s *spending) float64 {
	return max(0, reservedShare*b.fair(s)-float64(s.retries))
}

// of returns the counts of a client and makes it the most recently active one.
func (b *Budget) of(client string, at int64) *spending {
	if e := b.clients[client]; e != nil {
		b.recent.MoveToFront(e)
		s := e.Value.(*spending)
		s.heard = max(s.heard, at)
		return s
	}
	s := &spending{client: client, heard: at}
	b.clients[client] = b.recent.PushFront(s)
	return s
}

// forget removes clients that were not active within BudgetSeconds, and those beyond
// budgetClients.
func (b *Budget) forget(at int64) {
	for e := b.recent.Back(); e != b.recent.Front(); e = b.recent.Back() {
		s := e.Value.(*spending)
		if at-s.heard < BudgetSeconds && len(b.clients) <= budgetClients {
			return
		}
		b.recent.Remove(e)
		delete(b.clients, s.client)
	}
}

// upTo removes counts older than BudgetSeconds from the sums, and returns the counts of
// that second, or of the latest one if the clock has been set back.
func (s *spending) upTo(at int64) *struct{ requests, retries int } {
	at = max(at, s.at)
	for s.at = max(s.at, at-BudgetSeconds); s.at < at; {
		s.at++
		old := &s.window[uint64(s.at)%BudgetSeconds]
		s.requests, s.retries = s.requests-old.requests, s.retries-old.retries
		*old = struct{ requests, retries int }{}
	}
	return &s.window[uint64(at)%BudgetSeconds]
}
