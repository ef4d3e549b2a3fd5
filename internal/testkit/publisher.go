package testkit

import (
	"encoding/binary"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"go.uber.org/goleak"

	"kvrouter/internal/base/zmq"
)

// NewTestPublisher starts a publisher on a free port. It closes at the end of the
// test, which fails if goroutines are left.
func NewTestPublisher(t *testing.T) *zmq.Publisher {
	t.Helper()
	before := goleak.IgnoreCurrent()
	p, err := zmq.NewPublisher("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		goleak.VerifyNone(t, before)
	})
	return p
}

// FakePublisher publishes KV events like vLLM, and injects faults on demand.
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

// NewFakePublisher starts a publisher on two free ports. It closes at the end of the
// test.
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

// serve reads with zmq4, which exposes the answers to heartbeats.
func (p *FakePublisher) serve(conn *zmq.Conn, kind zmq4.SocketType) {
	p.Locked(func() { p.conns = append(p.conns, conn) })
	for {
		msg, err := conn.Conn.RecvMsg()
		if err != nil {
			return
		}
		p.Mu.Lock()
		if msg.Type == zmq4.CmdMsg {
			p.Pongs = append(p.Pongs, string(msg.Frames[0]))
		} else if kind == zmq4.Pub {
			if !strings.HasPrefix(string(msg.Frames[0]), "\x01kv") {
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

// Batch publishes the events as one batch. A lost batch goes to the replay buffer
// only.
func (p *FakePublisher) Batch(lost bool, events ...Event) {
	p.t.Helper()
	p.Payload(lost, Payload(p.t, float64(time.Now().UnixNano())/1e9, events...))
}

// Payload publishes an encoded batch. A lost batch goes to the replay buffer only.
func (p *FakePublisher) Payload(lost bool, payload []byte) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.History = append(p.History, payload)
	if !lost {
		p.Send(uint64(len(p.History)-1), payload)
	}
}

// Send sends a batch to all subscribers. The caller holds Mu.
func (p *FakePublisher) Send(seq uint64, payload []byte) {
	for _, s := range p.Subs {
		_ = s.Send([]byte("kv-events"), binary.BigEndian.AppendUint64(nil, seq), payload)
	}
}

// Drop closes every connection.
func (p *FakePublisher) Drop() {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for _, c := range p.conns {
		_ = c.Raw.Close()
	}
	p.conns, p.Subs = nil, nil
}

// Locked runs f while the publisher is paused.
func (p *FakePublisher) Locked(f func()) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	f()
}
