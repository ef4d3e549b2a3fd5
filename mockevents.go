package main

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// mockEvent is one change of a mock worker's cache as it is published.
type mockEvent struct {
	cleared   bool
	removed   []uint64
	stored    []StoredBlock
	parent    uint64
	hasParent bool
	tokens    []uint32    // of the stored blocks
	adapter   mockAdapter // that computed them
	salt      string      // of the first one, if it starts a prompt that has one
}

// mockBatch is what one step of a mock worker published.
type mockBatch struct {
	at     time.Time
	events []mockEvent
}

// mockEventQueue bounds the batches that wait to be published, as vLLM does; an
// engine that is further ahead waits.
const mockEventQueue = 100_000

// mockEvents publishes a mock worker's KV events as vLLM's ZmqEventPublisher
// does: on a PUB socket, numbered from 0, with a ROUTER socket that sends the
// last ones again.
type mockEvents struct {
	rank      int  // data-parallel rank, as it ends a batch
	array     bool // old form: events as arrays
	blockSize int
	drop      float64       // share of the batches that are not sent
	duplicate float64       // share of the batches that are sent twice
	delay     time.Duration // from a step to the sending of its batch
	random    *rand.Rand    // decides about drop and duplicate

	pub     *ZMQPublisher
	router  *ZMQRouter
	batches chan mockBatch
	stop    chan struct{}
	running sync.WaitGroup
	added   atomic.Uint64 // batches, published or not yet

	mu     sync.Mutex // guards what follows, and makes sending and keeping one
	seq    uint64     // of the next batch
	kept   [][]byte   // payloads, a ring: batch n is kept[n % replayBatches]
	packer *msgpack.Encoder
	packed bytes.Buffer
}

// newMockEvents listens at both addresses. Until start is called it publishes
// nothing.
func newMockEvents(address, replayAddress string, blockSize int) (*mockEvents, error) {
	e := &mockEvents{blockSize: blockSize, batches: make(chan mockBatch, mockEventQueue), stop: make(chan struct{})}
	e.packer = msgpack.NewEncoder(&e.packed)
	e.packer.UseCompactInts(true)
	var err error
	if e.pub, err = NewZMQPublisher(address); err != nil {
		return nil, err
	}
	if e.router, err = NewZMQRouter(replayAddress, e.replay); err != nil {
		e.pub.Close()
		return nil, err
	}
	return e, nil
}

// start begins to publish what add brings; close ends that. Like add and close
// it does nothing where there are no events to be published.
func (e *mockEvents) start() {
	if e != nil {
		e.running.Go(e.run)
	}
}

// add queues a step's changes. The slices in it must not change any more.
func (e *mockEvents) add(events []mockEvent) {
	if e == nil {
		return
	}
	e.added.Add(1)
	select {
	case e.batches <- mockBatch{time.Now(), events}:
	case <-e.stop:
	}
}

// close ends both sockets; what is not yet sent is lost.
func (e *mockEvents) close() {
	if e == nil {
		return
	}
	close(e.stop)
	e.pub.Close()
	e.router.Close()
	e.running.Wait()
}

func (e *mockEvents) run() {
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

// publishNow publishes a step's changes without a queue.
func (e *mockEvents) publishNow(events ...mockEvent) { e.publish(mockBatch{time.Now(), events}) }

func (e *mockEvents) publish(batch mockBatch) {
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
		e.pub.Publish([]byte(KVEventsTopic), number, payload)
	}
	if len(e.kept) < replayBatches {
		e.kept = append(e.kept, payload)
	} else {
		e.kept[e.seq%replayBatches] = payload
	}
	e.seq++
}

// replay sends all kept batches from the asked one on, and the end mark. Like
// vLLM's it wants an empty frame before the number and ignores what is
// different.
func (e *mockEvents) replay(request [][]byte, reply func(frames ...[]byte) error) {
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
		payloads = append(payloads, e.kept[seq%replayBatches])
	}
	e.mu.Unlock()
	for i, payload := range payloads {
		if reply(nil, []byte(KVEventsTopic), binary.BigEndian.AppendUint64(nil, from+uint64(i)), payload) != nil {
			return
		}
	}
	_ = reply(nil, nil, binary.BigEndian.AppendUint64(nil, replayEnd), nil)
}

// encode returns the batch as vLLM encodes it: [time, events, rank]. Writing to
// a buffer cannot fail.
func (e *mockEvents) encode(batch mockBatch) []byte {
	e.packed.Reset()
	p := e.packer
	_ = p.EncodeArrayLen(3)
	_ = p.EncodeFloat64(float64(batch.at.UnixNano()) / 1e9)
	_ = p.EncodeArrayLen(len(batch.events))
	for i := range batch.events {
		e.encodeEvent(&batch.events[i])
	}
	_ = p.EncodeUint(uint64(e.rank))
	return bytes.Clone(e.packed.Bytes())
}

// encodeEvent writes one event. Maps leave fields with their default out; arrays
// end before the trailing ones that have it.
func (e *mockEvents) encodeEvent(event *mockEvent) {
	p := e.packer
	switch {
	case event.cleared:
		e.open("AllBlocksCleared", 0)
	case event.removed != nil:
		e.open("BlockRemoved", 3)
		e.hashes("block_hashes", event.removed)
		e.text("medium", "GPU")
		e.name("group_idx")
		_ = p.EncodeUint(0)
	default:
		e.open("BlockStored", 10)
		hashes := make([]uint64, len(event.stored))
		for i, b := range event.stored {
			hashes[i] = b.Engine
		}
		e.hashes("block_hashes", hashes)
		e.name("parent_block_hash")
		if event.hasParent {
			_ = p.EncodeUint(event.parent)
		} else {
			_ = p.EncodeNil()
		}
		e.name("token_ids")
		_ = p.EncodeArrayLen(len(event.tokens))
		for _, t := range event.tokens {
			_ = p.EncodeUint(uint64(t))
		}
		e.name("block_size")
		_ = p.EncodeUint(uint64(e.blockSize))
		e.name("lora_id")
		if event.adapter.name == "" {
			_ = p.EncodeNil()
		} else {
			_ = p.EncodeUint(uint64(event.adapter.id))
		}
		e.text("medium", "GPU")
		e.name("lora_name")
		if event.adapter.name == "" {
			_ = p.EncodeNil()
		} else {
			_ = p.EncodeString(event.adapter.name)
		}
		e.extraKeys(event)
		e.name("group_idx")
		_ = p.EncodeUint(0)
		e.text("kv_cache_spec_kind", "full_attention")
	}
}

// extraKeys writes what enters the hash of each stored block beside its tokens.
func (e *mockEvents) extraKeys(event *mockEvent) {
	e.name("extra_keys")
	_ = e.packer.EncodeArrayLen(len(event.stored))
	for i := range event.stored {
		var keys []string
		if event.adapter.name != "" {
			keys = append(keys, event.adapter.name)
		}
		if i == 0 && event.salt != "" {
			keys = append(keys, event.salt)
		}
		if keys == nil {
			_ = e.packer.EncodeNil()
			continue
		}
		_ = e.packer.Encode(keys)
	}
}

// open begins an event with that many fields beside its type.
func (e *mockEvents) open(kind string, fields int) {
	if e.array {
		_ = e.packer.EncodeArrayLen(1 + fields)
	} else {
		_ = e.packer.EncodeMapLen(1 + fields)
		_ = e.packer.EncodeString("type")
	}
	_ = e.packer.EncodeString(kind)
}

func (e *mockEvents) name(field string) {
	if !e.array {
		_ = e.packer.EncodeString(field)
	}
}

func (e *mockEvents) text(field, value string) {
	e.name(field)
	_ = e.packer.EncodeString(value)
}

func (e *mockEvents) hashes(field string, hashes []uint64) {
	e.name(field)
	_ = e.packer.EncodeArrayLen(len(hashes))
	for _, h := range hashes {
		_ = e.packer.EncodeUint(h)
	}
}
