package zoo

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/base/zmq"
	"kvrouter/internal/testkit"
)

// listener receives an engine's KV events beside the router. Its lines are those of
// internal/cache/events/testdata/zoo: a request comes after the events of its own blocks.
type listener struct {
	mu       sync.Mutex
	received map[uint32]int   // batches, by rank
	before   map[uint32]int   // those of earlier requests
	last     time.Time        // of the last one
	lines    map[uint32][]any // by rank
}

type eventLine struct {
	Kind    string `json:"kind"`
	Seq     uint64 `json:"seq"`
	Payload []byte `json:"payload"`
}

type requestLine struct {
	Kind    string    `json:"kind"`
	Adapter string    `json:"lora_name,omitempty"`
	Prompt  []uint32  `json:"prompt_token_ids"`
	Usage   usageLine `json:"usage"`
}

type usageLine struct {
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// listen subscribes to the KV events of all ranks, by their ports, until the test ends.
func listen(t *testing.T, ports []string) *listener {
	t.Helper()
	l := &listener{received: map[uint32]int{}, lines: map[uint32][]any{}}
	ctx, stop := context.WithCancel(t.Context())
	var done sync.WaitGroup
	t.Cleanup(func() {
		stop()
		done.Wait()
	})
	for rank, port := range ports {
		conn, err := zmq.DialSub(ctx, "tcp://127.0.0.1:"+port, "")
		if err != nil {
			t.Fatal(err)
		}
		done.Go(func() {
			defer conn.Close()
			for {
				frames, err := conn.Recv()
				if err != nil {
					return
				}
				if len(frames) == 3 && len(frames[1]) == 8 {
					l.add(uint32(rank), binary.BigEndian.Uint64(frames[1]), frames[2])
				}
			}
		})
	}
	return l
}

func (l *listener) add(rank uint32, seq uint64, payload []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.received[rank]++
	l.last = time.Now()
	l.lines[rank] = append(l.lines[rank], eventLine{"event", seq, slices.Clone(payload)})
}

// settled waits until no further batch has come for a while and the router has applied
// all of them, by its count for each rank.
func (l *listener) settled(t *testing.T, applied func(rank uint32) int) {
	t.Helper()
	const quiet = 250 * time.Millisecond
	since := time.Now()
	testkit.Eventually(t, 30*time.Second, "the events of the last request applied", func() bool {
		l.mu.Lock()
		last, received := l.last, maps.Clone(l.received)
		l.mu.Unlock()
		if time.Since(since) < quiet || time.Since(last) < quiet {
			return false
		}
		for rank, n := range received {
			if applied(rank) < n {
				return false
			}
		}
		return true
	})
}

// request adds a request and what the engine found of it, to the rank whose events have
// come since the last one. One that no rank stored a block for is left out.
func (l *listener) request(one *conversation, cached int) {
	line := requestLine{Kind: "request", Adapter: one.adapter, Prompt: slices.Clone(one.tokens)}
	line.Usage.Details.Cached = cached
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank, n := range l.received {
		if n > l.before[rank] {
			l.lines[rank] = append(l.lines[rank], line)
		}
	}
	l.before = maps.Clone(l.received)
}

// write writes the lines of each rank to a file in a folder.
func (l *listener) write(t *testing.T, folder, name string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank, lines := range l.lines {
		var text bytes.Buffer
		zip, err := gzip.NewWriterLevel(&text, gzip.BestCompression)
		if err != nil {
			t.Fatal(err)
		}
		out := json.NewEncoder(zip)
		for _, line := range lines {
			if err := out.Encode(line); err != nil {
				t.Fatal(err)
			}
		}
		if err := zip.Close(); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(folder, name+".jsonl.gz")
		if len(l.lines) > 1 {
			path = filepath.Join(folder, fmt.Sprintf("%s-rank%d.jsonl.gz", name, rank))
		}
		testkit.WriteFile(t, path, text.String())
	}
}
