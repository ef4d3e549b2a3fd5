package testkit

import (
	"bytes"
	"encoding/binary"
	"kvrouter/internal/kv"
	"kvrouter/internal/zmq"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
)

const TestBlockSize = 4

var TestWorker = kv.WorkerKey{Worker: 3, Rank: 1}

// testEvent is an event in the shape that publisher.py and fakePublisher take.
type TestEvent map[string]any

// promptTokens returns n blocks of tokens that no other number shares.
func PromptTokens(number, n int) []uint32 {
	tokens := make([]uint32, n*TestBlockSize)
	for i := range tokens {
		tokens[i] = uint32(number*1000 + i)
	}
	return tokens
}

// storedEvent returns the event that stores blocks from to below to of a prompt.
func StoredEvent(number, from, to int) TestEvent {
	e := TestEvent{"stored": BlockIDs(number, from, to), "tokens": PromptTokens(number, to)[from*TestBlockSize:], "block_size": TestBlockSize}
	if from > 0 {
		e["parent"] = BlockIDs(number, from-1, from)[0]
	}
	return e
}

func RemovedEvent(number, from, to int) TestEvent {
	return TestEvent{"removed": BlockIDs(number, from, to)}
}

func BlockIDs(number, from, to int) []uint64 {
	ids := []uint64{}
	for i := from; i < to; i++ {
		ids = append(ids, 1<<63+uint64(number*1000+i))
	}
	return ids
}

// wire returns the event as vLLM encodes it.
func (e TestEvent) Wire() any {
	m := map[string]any{"medium": "GPU"}
	for k, v := range e {
		m[k] = v
	}
	switch {
	case e["stored"] != nil:
		m["type"], m["block_hashes"], m["token_ids"], m["parent_block_hash"] = "BlockStored", e["stored"], e["tokens"], e["parent"]
		delete(m, "stored")
		delete(m, "tokens")
		delete(m, "parent")
	case e["removed"] != nil:
		m["type"], m["block_hashes"] = "BlockRemoved", e["removed"]
		delete(m, "removed")
	case e["cleared"] != nil:
		m = map[string]any{"type": "AllBlocksCleared"}
	case e["as is"] != nil:
		return e["as is"]
	}
	return m
}

func PayloadOf(t testing.TB, ts float64, events ...TestEvent) []byte {
	t.Helper()
	list := make([]any, len(events))
	for i, e := range events {
		list[i] = e.Wire()
	}
	b, err := msgpack.Marshal([]any{ts, list, TestWorker.Rank})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// logBuffer is a log that a test may read while it is written.
type LogBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *LogBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *LogBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// end returns the last 6,000 bytes.
func (l *LogBuffer) End() string {
	log := l.String()
	return log[max(0, len(log)-6000):]
}

// fakePublisher publishes as vLLM does, and misbehaves on demand.
type FakePublisher struct {
	t           *testing.T
	Pub, Router *zmq.Listener

	Mu       sync.Mutex // guards what follows
	History  [][]byte   // payload by sequence number
	Subs     []*zmq.Conn
	conns    []*zmq.Conn
	Replayed []uint64 // start numbers asked for
	Pongs    []string // answers to heartbeats
	// replay overrides the answer to a request: the sequence numbers to send;
	// end false leaves out the end mark.
	Replay func(from uint64) (seqs []uint64, end bool)
}

func NewFakePublisher(t *testing.T) *FakePublisher {
	t.Helper()
	p := &FakePublisher{t: t}
	listen := func(kind zmq4.SocketType) *zmq.Listener {
		l, err := zmq.Listen("127.0.0.1:0", kind, func(conn *zmq.Conn) { p.serve(conn, kind) })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		return l
	}
	p.Pub, p.Router = listen(zmq4.Pub), listen(zmq4.Router)
	return p
}

// serve reads with zmq4, which shows the answers to heartbeats.
func (p *FakePublisher) serve(conn *zmq.Conn, kind zmq4.SocketType) {
	p.Locked(func() { p.conns = append(p.conns, conn) })
	for {
		msg, err := conn.RecvMsg()
		if err != nil {
			return
		}
		p.Mu.Lock()
		if msg.Type == zmq4.CmdMsg {
			p.Pongs = append(p.Pongs, string(msg.Frames[0]))
		} else if kind == zmq4.Pub {
			if string(msg.Frames[0]) != "\x01kv" {
				p.t.Errorf("subscription %q", msg.Frames[0])
			}
			p.Subs = append(p.Subs, conn)
		} else {
			p.answer(conn, msg.Frames)
		}
		p.Mu.Unlock()
	}
}

func (p *FakePublisher) answer(conn *zmq.Conn, frames [][]byte) {
	if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
		p.t.Errorf("replay request %q", frames)
		return
	}
	from := binary.BigEndian.Uint64(frames[1])
	p.Replayed = append(p.Replayed, from)
	var seqs []uint64
	end := true
	if p.Replay != nil {
		seqs, end = p.Replay(from)
	} else {
		for seq := from; seq < uint64(len(p.History)); seq++ {
			seqs = append(seqs, seq)
		}
	}
	for _, seq := range seqs {
		_ = conn.Send(nil, []byte("kv"), binary.BigEndian.AppendUint64(nil, seq), p.History[seq])
	}
	if end {
		_ = conn.Send(nil, nil, binary.BigEndian.AppendUint64(nil, math.MaxUint64), nil)
	}
}

// batch publishes one batch, to the replay buffer only if lost.
func (p *FakePublisher) Batch(lost bool, events ...TestEvent) {
	p.t.Helper()
	p.Payload(lost, PayloadOf(p.t, float64(time.Now().UnixNano())/1e9, events...))
}

func (p *FakePublisher) Payload(lost bool, payload []byte) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.History = append(p.History, payload)
	if !lost {
		p.Send(uint64(len(p.History)-1), payload)
	}
}

func (p *FakePublisher) Send(seq uint64, payload []byte) {
	for _, s := range p.Subs {
		_ = s.Send([]byte("kv-events"), binary.BigEndian.AppendUint64(nil, seq), payload)
	}
}

// drop closes every connection.
func (p *FakePublisher) Drop() {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for _, c := range p.conns {
		c.Break()
	}
	p.conns, p.Subs = nil, nil
}

// locked runs f while the publisher does nothing.
func (p *FakePublisher) Locked(f func()) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	f()
}
