package test

import (
	"bytes"
	"encoding/binary"
	"kvrouter/internal/events"
	"kvrouter/internal/testkit"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

// TestBadIndexSnapshotsAreRefusedWithOneLine starts routers over a worker that has
// computed a chat long ago, each with another file.
func TestBadIndexSnapshotsAreRefusedWithOneLine(t *testing.T) {
	t.Parallel()
	farm := StartWorkers(t, 1, "--mock-buffer-steps=1")
	ports := testkit.FreePorts(t, 2)
	name := filepath.Join(t.TempDir(), "index")
	start := func() *Router {
		s := StartAt(t, Program, ports, nil, "--engine=none", "--index-snapshot="+name, "--index-snapshot-interval=100ms", "--worker=url="+farm.URL(0)+",id=0")
		s.WaitReady(1, 30*time.Second)
		return s
	}
	asks := func(s *Router, chat []map[string]string) Answer {
		a, err := s.Chat(t.Context(), chat, false, 64)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	old := Say(strings.Repeat("computed long ago ", 100))
	first := start()
	asks(first, old)
	newest := Say(strings.Repeat("computed just now ", 20))
	first.Settled(newest, asks(first, newest)) // the replay is of this one
	first.Stop()
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)/2] ^= 1
	head := good[:bytes.IndexByte(good, '\n')+1+4] // with the block size
	sealed := func(rest ...byte) []byte {          // with the checksum that belongs to it
		body := append(bytes.Clone(head), rest...)
		return binary.LittleEndian.AppendUint64(body, xxh3.Hash(body))
	}
	const beforeText = 1 + 8 + 4 + 8 + 8 + 1 + 8 // of a rank
	rank := append([]byte{1}, make([]byte, beforeText-1)...)
	for _, c := range []struct {
		name   string
		data   []byte
		whose  bool // it is a snapshot, to be replaced
		starts bool // with what it holds
	}{
		{"good", good, true, true},
		{"a bit flipped", flipped, true, false},
		{"truncated", good[:len(good)/2], true, false},
		{"empty", nil, true, false},
		{"another version", bytes.Replace(good, []byte("snapshot 1"), []byte("snapshot 2"), 1), true, false},
		{"a text of 65,535 bytes", sealed(append(rank, 0xff, 0xff)...), true, false},
		{"4,294,967,295 blocks", sealed(append(rank, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff)...), true, false},
		{"another magic", append([]byte("KV"), good[2:]...), false, false},
		{"somebody else's", []byte("worker: http://gpu-1:8100\n"), false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(name, c.data, 0o600); err != nil {
				t.Fatal(err)
			}
			s := start()
			if c.starts {
				testkit.Eventually(t, 30*time.Second, "it goes on from the file", func() bool { return strings.Contains(s.Log.String(), "goes on from") })
			}
			a := asks(s, old)
			if a.Cached < a.Prompt/2 || (a.Predicted > 0) != c.starts {
				t.Errorf("predicted %d tokens, the worker had %d of %d", a.Predicted, a.Cached, a.Prompt)
			}
			read := func() []byte { data, _ := os.ReadFile(name); return data }
			if c.whose && !c.starts {
				testkit.Eventually(t, 30*time.Second, "a good snapshot replaces the file", func() bool {
					log := new(testkit.LogBuffer)
					events.OpenSnapshot(events.Settings{IndexSnapshot: name}, 64, slog.New(slog.NewTextHandler(log, nil)))
					return strings.Contains(log.String(), "read the index snapshot")
				})
			}
			s.Stop()
			if !c.whose && !bytes.Equal(read(), c.data) {
				t.Error("somebody else's file was written")
			}
			var lines []string
			for line := range strings.Lines(s.Log.String()) {
				if strings.Contains(line, "level=DEBUG") {
					continue
				}
				if strings.Contains(line, "index-snapshot cannot be used") || !c.starts && strings.Contains(line, "snapshot") {
					lines = append(lines, line)
				}
			}
			if refused := len(lines) == 1; refused == c.starts || c.starts && len(lines) > 0 {
				t.Errorf("the log says %q", lines)
			}
		})
	}
}
