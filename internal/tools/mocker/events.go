package mocker

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/process"
)

// Event is one published change of a mock worker's cache.
type Event struct {
	Tier      kv.Tier
	Cleared   bool
	Removed   []uint64
	Stored    []kv.StoredBlock
	Parent    uint64
	HasParent bool
	Tokens    []uint32 // of the stored blocks
	Adapter   Adapter  // that computed them
	Salt      string   // of the first one, if it starts a prompt that has one; with SGLang, of all

	// Of lower tiers:
	Shared      bool // several workers have the blocks
	Placeholder bool // vLLM's form without tokens and parent
}

// batch is what one step of a mock worker published.
type batch struct {
	at     time.Time
	events []Event
}

// eventQueue bounds the batches that wait to be published, as vLLM does; an
// engine that is further ahead waits.
const eventQueue = 100_000

// Events publishes a mock worker's KV events as vLLM's and SGLang's
// ZmqEventPublisher do: on a PUB socket, numbered from 0, with a ROUTER socket that
// replays the last ones.
type Events struct {
	Rank      int  // data-parallel rank, as it ends a batch
	array     bool // old form: events as arrays
	sglang    bool // SGLang's form
	blockSize int
	drop      float64       // share of the batches that are not sent
	duplicate float64       // share of the batches that are sent twice
	delay     time.Duration // from a step to the sending of its batch
	Keep      int           // batches that can be replayed
	random    *rand.Rand    // decides about drop and duplicate

	Pub     *zmq.Publisher
	router  *zmq.Router
	batches chan batch // made by start: its 5 MB serve add alone, not PublishNow
	stop    chan struct{}
	running sync.WaitGroup
	Added   atomic.Uint64 // batches, published or not yet

	mu     sync.Mutex // guards what follows, and makes sending and keeping one
	seq    uint64     // of the next batch
	kept   [][]byte   // payloads, a ring: batch n is kept[n % Keep]
	packer *msgpack.Encoder
	packed bytes.Buffer
}

// NewEvents listens at both addresses. It publishes nothing until start is called.
func NewEvents(address, replayAddress string, blockSize int, options ...zmq.Option) (*Events, error) {
	e := &Events{blockSize: blockSize, Keep: process.ReplayBatches, stop: make(chan struct{})}
	e.packer = msgpack.NewEncoder(&e.packed)
	e.packer.UseCompactInts(true)
	var err error
	if e.Pub, err = zmq.NewPublisher(address, options...); err != nil {
		return nil, err
	}
	if e.router, err = zmq.NewRouter(replayAddress, e.replay, options...); err != nil {
		e.Pub.Close()
		return nil, err
	}
	return e, nil
}

// start begins to publish what add brings; close ends that. Like add and close
// it does nothing where there are no events to be published.
func (e *Events) start() {
	if e != nil {
		e.batches = make(chan batch, eventQueue)
		e.running.Go(e.run)
	}
}

// add queues a step's changes, after start. The slices in it must not change any more.
func (e *Events) add(events []Event) {
	if e == nil {
		return
	}
	e.Added.Add(1)
	select {
	case e.batches <- batch{time.Now(), events}:
	case <-e.stop:
	}
}

// Close ends both sockets; queued messages are lost.
func (e *Events) Close() {
	if e == nil {
		return
	}
	close(e.stop)
	e.Pub.Close()
	e.router.Close()
	e.running.Wait()
}

func (e *Events) run() {
	for {
		select {
		case <-e.stop:
			return
		case batch := <-e.batches:
			if wait := e.delay - time.Since(batch.at); wait > 0 && e.delay > 0 {
				select {
				case <-e.stop:
					return
				case <-time.After(wait):
				}
			}
			e.publish(batch)
		}
	}
}

// PublishNow publishes a step's changes without a queue.
func (e *Events) PublishNow(events ...Event) { e.publish(batch{time.Now(), events}) }

func (e *Events) publish(batch batch) {
	e.mu.Lock()
	defer e.mu.Unlock()
	payload := e.encode(batch)
	number := binary.BigEndian.AppendUint64(nil, e.seq)
	times := 1
	if e.random != nil {
		if e.random.Float64() < e.drop {
			times = 0
		} else if e.random.Float64() < e.duplicate {
			times = 2
		}
	}
	for range times {
		e.Pub.Publish([]byte(process.KVEventsTopic), number, payload)
	}
	if len(e.kept) < e.Keep {
		e.kept = append(e.kept, payload)
	} else {
		e.kept[e.seq%uint64(e.Keep)] = payload
	}
	e.seq++
}

// replay sends all kept batches from the asked one on, and the end mark. Like
// vLLM's it wants an empty frame before the number and ignores what is
// different.
func (e *Events) replay(request [][]byte, reply func(frames ...[]byte) error) {
	if len(request) != 2 || len(request[1]) > 8 {
		return
	}
	var number [8]byte
	copy(number[8-len(request[1]):], request[1])
	e.mu.Lock()
	next := e.seq
	from := max(binary.BigEndian.Uint64(number[:]), next-uint64(len(e.kept)))
	var payloads [][]byte
	for seq := from; seq < next; seq++ {
		payloads = append(payloads, e.kept[seq%uint64(e.Keep)])
	}
	e.mu.Unlock()
	for i, payload := range payloads {
		if reply(nil, []byte(process.KVEventsTopic), binary.BigEndian.AppendUint64(nil, from+uint64(i)), payload) != nil {
			return
		}
	}
	_ = reply(nil, nil, binary.BigEndian.AppendUint64(nil, events.ReplayEnd), nil)
}

// encode returns the batch as the engine encodes it: [time, events, rank]. Writing to
// a buffer cannot fail.
func (e *Events) encode(batch batch) []byte {
	e.packed.Reset()
	p := e.packer
	p.UseArrayEncodedStructs(e.array)
	_ = p.EncodeArrayLen(3)
	_ = p.EncodeFloat64(float64(batch.at.UnixNano()) / 1e9)
	_ = p.EncodeArrayLen(len(batch.events))
	for i := range batch.events {
		if e.sglang {
			_ = p.Encode(sglangEvent(&batch.events[i], e.blockSize))
		} else {
			_ = p.Encode(vllmEvent(&batch.events[i], e.blockSize))
		}
	}
	_ = p.EncodeUint(uint64(e.Rank))
	return bytes.Clone(e.packed.Bytes())
}
