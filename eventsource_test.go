package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"
)

const testBlockSize = 4

var testWorker = WorkerKey{Worker: 3, Rank: 1}

// testEvent is an event in the shape that publisher.py and fakePublisher take.
type testEvent map[string]any

// promptTokens returns n blocks of tokens that no other number shares.
func promptTokens(number, n int) []uint32 {
	tokens := make([]uint32, n*testBlockSize)
	for i := range tokens {
		tokens[i] = uint32(number*1000 + i)
	}
	return tokens
}

// storedEvent returns the event that stores blocks from to below to of a prompt.
func storedEvent(number, from, to int) testEvent {
	e := testEvent{"stored": blockIDs(number, from, to), "tokens": promptTokens(number, to)[from*testBlockSize:], "block_size": testBlockSize}
	if from > 0 {
		e["parent"] = blockIDs(number, from-1, from)[0]
	}
	return e
}

func removedEvent(number, from, to int) testEvent {
	return testEvent{"removed": blockIDs(number, from, to)}
}

func blockIDs(number, from, to int) []uint64 {
	ids := []uint64{}
	for i := from; i < to; i++ {
		ids = append(ids, 1<<63+uint64(number*1000+i))
	}
	return ids
}

// wire returns the event as vLLM encodes it.
func (e testEvent) wire() any {
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

func payloadOf(t testing.TB, ts float64, events ...testEvent) []byte {
	t.Helper()
	list := make([]any, len(events))
	for i, e := range events {
		list[i] = e.wire()
	}
	b, err := msgpack.Marshal([]any{ts, list, testWorker.Rank})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// following is a stream that runs, with short waits.
type following struct {
	*EventStream
	from   EventSource
	holder Index
	log    *logBuffer
	stop   func()
}

// followStream starts a stream; it is stopped, and checked for what it leaves
// behind, at the end of the test or by stop.
func followStream(t *testing.T, src EventSource, tweak func(*EventStream)) *following {
	t.Helper()
	before := goleak.IgnoreCurrent()
	src.Worker = testWorker
	if src.BlockSize == 0 {
		src.BlockSize = testBlockSize
	}
	log := new(logBuffer)
	index := NewRadix()
	s := NewEventStream(src, index, slog.New(slog.NewTextHandler(log, nil)))
	s.timing.backoffMin, s.timing.backoffMax = 5*time.Millisecond, 100*time.Millisecond
	s.timing.replayLimit = 2 * time.Second
	if tweak != nil {
		tweak(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx)
	}()
	var once sync.Once
	f := &following{s, src, index, log, nil}
	f.stop = func() {
		once.Do(func() {
			cancel()
			select {
			case <-done:
			case <-time.After(10 * time.Second):
				t.Fatal("Run did not end with its context")
			}
			goleak.VerifyNone(t, before)
		})
	}
	t.Cleanup(f.stop)
	return f
}

// holds waits until the worker holds exactly so many leading blocks of the
// first n of a prompt.
func (f *following) holds(t *testing.T, number, n, want int) {
	t.Helper()
	local := HashBlocks(nil, promptTokens(number, n), testBlockSize, "", "")
	got := -1
	f.until(t, func() bool {
		got = 0
		for _, m := range f.holder.Match(local, nil) {
			if m.Worker == testWorker {
				got = m.Blocks
			}
		}
		return got == want
	}, func() string { return fmt.Sprintf("prompt %d: holds %d blocks of %d, want %d", number, got, n, want) })
}

func (f *following) until(t *testing.T, condition func() bool, otherwise func() string) {
	t.Helper()
	limit := time.After(20 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-limit:
			t.Fatalf("%s\nstats: %+v\nlog:\n%s", otherwise(), f.counts(), f.log)
		case <-tick.C:
		}
	}
}

// reaches waits until the counters named have at least the values given.
func (f *following) reaches(t *testing.T, want map[string]uint64) {
	t.Helper()
	f.until(t, func() bool {
		got := f.counts()
		for name, n := range want {
			if got[name] < n {
				return false
			}
		}
		return true
	}, func() string { return fmt.Sprintf("want at least %v", want) })
}

// has checks the counters named.
func (f *following) has(t *testing.T, want map[string]uint64) {
	t.Helper()
	got := f.counts()
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s is %d, want %d\nstats: %v\nlog:\n%s", name, got[name], n, got, f.log)
		}
	}
}

func (f *following) counts() map[string]uint64 {
	s := f.Stats()
	flag := map[bool]uint64{true: 1}
	counts := s.Counts()
	counts["connected"], counts["cold"], counts["last_seq"] = flag[s.Connected.Load()], flag[s.Cold.Load()], s.LastSeq.Load()
	return counts
}

// logBuffer is a log that a test may read while it is written.
type logBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// end returns the last 6,000 bytes.
func (l *logBuffer) end() string {
	log := l.String()
	return log[max(0, len(log)-6000):]
}

// fakePublisher publishes as vLLM does, and misbehaves on demand.
type fakePublisher struct {
	t           *testing.T
	pub, router *zmqListener

	mu       sync.Mutex // guards what follows
	history  [][]byte   // payload by sequence number
	subs     []*ZMQConn
	conns    []*ZMQConn
	replayed []uint64 // start numbers asked for
	pongs    []string // answers to heartbeats
	// replay overrides the answer to a request: the sequence numbers to send;
	// end false leaves out the end mark.
	replay func(from uint64) (seqs []uint64, end bool)
}

func newFakePublisher(t *testing.T) *fakePublisher {
	t.Helper()
	p := &fakePublisher{t: t}
	listen := func(kind zmq4.SocketType) *zmqListener {
		l, err := listenZMQ("127.0.0.1:0", kind, func(conn *ZMQConn) { p.serve(conn, kind) })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		return l
	}
	p.pub, p.router = listen(zmq4.Pub), listen(zmq4.Router)
	return p
}

// sourceOf is where a publisher's events are.
func sourceOf(p *fakePublisher) EventSource {
	return EventSource{Endpoint: p.pub.Endpoint(), Replay: p.router.Endpoint(), Topic: "kv"}
}

// serve reads with zmq4, which shows the answers to heartbeats.
func (p *fakePublisher) serve(conn *ZMQConn, kind zmq4.SocketType) {
	p.locked(func() { p.conns = append(p.conns, conn) })
	for {
		msg, err := conn.RecvMsg()
		if err != nil {
			return
		}
		p.mu.Lock()
		if msg.Type == zmq4.CmdMsg {
			p.pongs = append(p.pongs, string(msg.Frames[0]))
		} else if kind == zmq4.Pub {
			if string(msg.Frames[0]) != "\x01kv" {
				p.t.Errorf("subscription %q", msg.Frames[0])
			}
			p.subs = append(p.subs, conn)
		} else {
			p.answer(conn, msg.Frames)
		}
		p.mu.Unlock()
	}
}

func (p *fakePublisher) answer(conn *ZMQConn, frames [][]byte) {
	if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
		p.t.Errorf("replay request %q", frames)
		return
	}
	from := binary.BigEndian.Uint64(frames[1])
	p.replayed = append(p.replayed, from)
	var seqs []uint64
	end := true
	if p.replay != nil {
		seqs, end = p.replay(from)
	} else {
		for seq := from; seq < uint64(len(p.history)); seq++ {
			seqs = append(seqs, seq)
		}
	}
	for _, seq := range seqs {
		_ = conn.Send(nil, []byte("kv"), binary.BigEndian.AppendUint64(nil, seq), p.history[seq])
	}
	if end {
		_ = conn.Send(nil, nil, binary.BigEndian.AppendUint64(nil, math.MaxUint64), nil)
	}
}

// batch publishes one batch, to the replay buffer only if lost.
func (p *fakePublisher) batch(lost bool, events ...testEvent) {
	p.t.Helper()
	p.payload(lost, payloadOf(p.t, float64(time.Now().UnixNano())/1e9, events...))
}

func (p *fakePublisher) payload(lost bool, payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.history = append(p.history, payload)
	if !lost {
		p.send(uint64(len(p.history)-1), payload)
	}
}

func (p *fakePublisher) send(seq uint64, payload []byte) {
	for _, s := range p.subs {
		_ = s.Send([]byte("kv-events"), binary.BigEndian.AppendUint64(nil, seq), payload)
	}
}

// drop closes every connection.
func (p *fakePublisher) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Break()
	}
	p.conns, p.subs = nil, nil
}

// locked runs f while the publisher does nothing.
func (p *fakePublisher) locked(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// subscribed waits for so many subscribers and for the first replay after it.
func (f *following) subscribed(t *testing.T, p *fakePublisher) {
	t.Helper()
	f.until(t, func() (done bool) {
		p.locked(func() { done = len(p.subs) > 0 && (f.from.Replay == "" || len(p.replayed) > 0) })
		return done
	}, func() string { return "no subscription" })
}
