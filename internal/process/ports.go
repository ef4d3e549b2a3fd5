package process

import (
	"fmt"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
)

const (
	// KVEventsTopic is the ZeroMQ topic of the KV events of started workers.
	KVEventsTopic = "kv-events"
	// ReplayBatches is the number of event batches that an engine keeps for replay,
	// about 100 bytes each in an idle cache.
	ReplayBatches = 10_000
)

// Ports are the ports of started workers, all on loopback. Worker i listens on
// HTTP+i, and Bootstrap+i if it is one of SGLang's that computes prompts. The
// others count ranks: rank r of worker i has the base plus i·Ranks+r.
type Ports struct {
	HTTP, KVEvents, KVReplay, Load, NIXL, Bootstrap int

	Ranks int // data-parallel ranks of a worker, at least 1
}

// URL returns the URL of started worker i, without a trailing slash.
func (p Ports) URL(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", p.HTTP+i) }

// Sources returns the KV event endpoints of started worker i by rank.
func (p Ports) Sources(i, blockSize int) []events.Source {
	sources := make([]events.Source, p.Ranks)
	for rank := range sources {
		at := i*p.Ranks + rank
		sources[rank] = events.Source{
			Worker: kv.WorkerKey{Worker: uint64(i), Rank: uint32(rank)}, BlockSize: blockSize, Topic: KVEventsTopic,
			Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", p.KVEvents+at), Replay: fmt.Sprintf("tcp://127.0.0.1:%d", p.KVReplay+at),
		}
	}
	return sources
}

// LoadEndpoint returns the load endpoint of rank r of started worker i.
func (p Ports) LoadEndpoint(i, r int) string {
	return fmt.Sprintf("tcp://127.0.0.1:%d", p.Load+i*p.Ranks+r)
}
