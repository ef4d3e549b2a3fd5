package simulate

import (
	"math/rand/v2"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/tools/engine"
)

// beginLoad starts the load of a request's blocks from lower tiers, after those before it
// on its worker.
func (s *simulator) beginLoad(r *engine.Request) {
	flight := r.Tag.(*flight)
	worker := &s.workers[flight.worker]
	begin := max(worker.loadsEnd, s.now)
	if r.Load.External > 0 { // its source sends to one worker after the other
		source := &s.workers[flight.source]
		begin = max(begin, source.sendsEnd)
		source.sendsEnd = begin + r.Peer.Takes(int(r.Load.External)*s.Engine.BlockSize)
	}
	worker.loadsEnd = begin + worker.engine.LoadTime(r)
	s.after(worker.loadsEnd-s.now, func() {
		s.countLoad(flight.worker, r)
		worker.engine.Loaded(r)
		s.wake(flight.worker)
	})
}

// countsEvery is the time between two readings of a worker's counters by the router.
const countsEvery = 5 * time.Second

// countLoad counts what a load has moved, and reports it to the routers from time to time.
func (s *simulator) countLoad(w int, r *engine.Request) {
	worker := &s.workers[w]
	worker.engine.EachLoad(r, func(store *engine.Store, tokens int) {
		bytes, seconds := &worker.moved.HostBytes, &worker.moved.HostSeconds
		switch store.Tier {
		case kv.Host:
			worker.moved.HostTokens += float64(tokens)
		case kv.External:
			bytes, seconds = &worker.moved.PeerBytes, &worker.moved.PeerSeconds
		default:
			bytes, seconds = &worker.moved.DiskBytes, &worker.moved.DiskSeconds
		}
		*bytes += float64(tokens * store.Loads.BytesPerToken)
		*seconds += store.Loads.Takes(tokens).Seconds()
	})
	if s.now-worker.reported < countsEvery {
		return
	}
	worker.reported = s.now
	for _, router := range s.routers {
		router.Transferred(kv.WorkerKey{Worker: uint64(w)}, worker.moved)
	}
}

// pull lets a flight have blocks of another worker's host memory, unless the pull fails.
func (s *simulator) pull(f *flight, from int) {
	s.pulls++
	if s.Peers.Failures > 0 && s.drawPull.Float64() < s.Peers.Failures {
		return
	}
	f.source = from
	for _, store := range s.workers[from].engine.Lower {
		if store.Tier == kv.Host {
			f.Served, f.Peer = store.Leading(f.Blocks), s.Peers.Loads
		}
	}
}

// peerAddress returns the address from which others pull worker w's blocks; unknown: workers
// do not pull.
func (s *Simulation) peerAddress(w int) kv.Bootstrap {
	if s.Peers.Bandwidth == 0 || s.WithoutPulls {
		return kv.Bootstrap{}
	}
	return kv.Bootstrap{Host: "simulated", Port: uint16(1 + w)}
}

// LoadFirst is the name of a policy that only simulations have: the worker with the
// fewest requests in flight, which pulls all that another one has. It is the rule of
// llm-d's p2p-source-producer behind placement by load.
const LoadFirst = "load-first"

type loadFirst struct{}

func (loadFirst) Traits() policy.Traits { return policy.Traits{HostCredit: 1, DiskCredit: 1} }

func (loadFirst) Choose(q policy.Query, candidates []policy.Candidate, random *rand.Rand) int {
	at := policy.Best(candidates, random, func(c *policy.Candidate) float64 { return -float64(c.Load.InFlight) })
	candidates[at].Pull.Tokens = candidates[at].Pull.Blocks * q.BlockSize
	return at
}

// NewPolicy returns a policy by its name: one of package policies, LoadFirst, StickyLeastLoaded or ConsistentHash.
func NewPolicy(name string, settings policies.Settings) (policy.Policy, error) {
	switch name {
	case LoadFirst:
		return loadFirst{}, settings.Validate()
	case StickyLeastLoaded:
		return stickyLeastLoaded{map[string]kv.WorkerKey{}}, settings.Validate()
	case ConsistentHash:
		return consistentHash{}, settings.Validate()
	}
	return policies.New(name, settings)
}

// changeOf returns what an event changes in the index.
func (s *Simulation) changeOf(event engine.Event) radix.Change {
	at := radix.LowerTier{Tier: event.Tier}
	for _, t := range s.Tiers {
		at.Shared = at.Shared || t.Tier == event.Tier && t.Shared
	}
	if event.Stored {
		return radix.Change{Kind: radix.Stored, LowerTier: at, Parent: event.Parent, HasParent: event.HasParent, Blocks: event.Blocks}
	}
	return radix.Change{Kind: radix.Removed, LowerTier: at, Hashes: event.Removed}
}

// TierReport is what requests were loaded from tiers below the cache when they were first
// admitted, as shares of all prompt tokens.
type TierReport struct {
	Host float64 `json:"host"`
	Disk float64 `json:"disk"`
	// Peer is what came from other workers, and Pulls how many requests were to pull.
	Peer  float64 `json:"peer,omitempty"`
	Pulls int     `json:"pulls,omitempty"`
}

// tierReport returns that of the run; nil: the workers have no such tiers.
func (s *simulator) tierReport() *TierReport {
	if len(s.Tiers) == 0 {
		return nil
	}
	prompt, host, disk, peer := 0, 0, 0, 0
	for _, f := range s.ledger {
		prompt += f.Prompt
		host += int(f.Lower.Host) * s.Engine.BlockSize
		disk += int(f.Lower.Disk) * s.Engine.BlockSize
		peer += int(f.Lower.External) * s.Engine.BlockSize
	}
	return &TierReport{Host: float64(host) / float64(prompt), Disk: float64(disk) / float64(prompt), Peer: float64(peer) / float64(prompt),
		Pulls: s.pulls}
}
