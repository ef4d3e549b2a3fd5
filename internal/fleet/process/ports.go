package process

import (
	"encoding/json"
	"fmt"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
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
	HTTP, KVEvents, KVReplay, Load, NIXL, Bootstrap, P2P int

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

// EventsConfig is an engine's --kv-events-config: where the first rank of a worker
// publishes its KV events. Engines add a rank's number to the ports.
type EventsConfig struct {
	Enable   bool   `json:"enable_kv_cache_events,omitempty"` // vLLM's
	Kind     string `json:"publisher"`
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay_endpoint"`
	Topic    string `json:"topic"`
	Buffer   int    `json:"buffer_steps"`
}

// EventsConfig returns that of started worker i. Engines bind an endpoint with a wildcard
// and connect to any other; a plugin of each narrows the wildcard to loopback.
func (p Ports) EventsConfig(i int) EventsConfig {
	first := i * p.Ranks
	return EventsConfig{
		Kind: "zmq", Endpoint: fmt.Sprintf("tcp://*:%d", p.KVEvents+first),
		Replay: fmt.Sprintf("tcp://127.0.0.1:%d", p.KVReplay+first), Topic: KVEventsTopic, Buffer: ReplayBatches,
	}
}

// String returns the value of the flag.
func (c EventsConfig) String() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // texts and numbers can always be written
	}
	return string(text)
}

// LoadEndpoint returns the load endpoint of rank r of started worker i.
func (p Ports) LoadEndpoint(i, r int) string {
	return fmt.Sprintf("tcp://127.0.0.1:%d", p.Load+i*p.Ranks+r)
}
