package process

import (
	"fmt"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
)

const (
	// KVEventsTopic is the ZeroMQ topic of the KV events of started workers.
	KVEventsTopic = "kv-events"
	// ReplayBatches is how many event batches an engine keeps for a router that
	// missed some, about 100 bytes each in a quiet cache.
	ReplayBatches = 10_000
)

// Ports are the ports of started workers, all on loopback. Worker i listens on
// HTTP+i, and Bootstrap+i if it is one of SGLang's that computes prompts. The
// others count ranks: rank r of worker i has the base plus i·Ranks+r.
type Ports struct {
	HTTP, KVEvents, KVReplay, Load, NIXL, Bootstrap int

	Ranks int // data-parallel ranks of a worker, at least 1
}

// URL is where started worker i listens, without a slash at the end.
func (p Ports) URL(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", p.HTTP+i) }

// Sources returns where the KV events of started worker i are, rank by rank.
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

// LoadEndpoint is where rank r of started worker i publishes its load.
func (p Ports) LoadEndpoint(i, r int) string {
	return fmt.Sprintf("tcp://127.0.0.1:%d", p.Load+i*p.Ranks+r)
}
