package test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
)

// TestBadIndexSnapshotsAreRefusedWithOneLine starts routers over a worker that has
// computed a chat long ago, each with another file.
func TestBadIndexSnapshotsAreRefusedWithOneLine(t *testing.T) {
	t.Parallel()
	farm := StartWorkers(t, 1, "--mock=buffer-steps=1")
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
	const beforeText = 1 + 8 + 4 + 8 + 8 // of a rank
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
		{"another version", bytes.Replace(good, []byte("snapshot 3"), []byte("snapshot 2"), 1), true, false},
		{"a text of 65,535 bytes", sealed(append(rank, 0xff, 0xff)...), true, false},
		{"4,294,967,295 blocks", sealed(append(rank, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff)...), true, false},
		{"another magic", append([]byte("KV"), good[2:]...), false, false},
		{"somebody else's", []byte("worker: http://gpu-1:8100\n"), false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(name, c.data, 0o600); err != nil {
				t.Fatal(err)
			}
			s := start()
			if c.starts {
				testkit.Eventually(t, 30*time.Second, "it restores what the file holds", func() bool { return strings.Contains(s.Log.String(), "restored the worker's blocks") })
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

const (
	archiveWorkers   = 4
	archiveClients   = 16
	archiveDocuments = 240  // of 47 blocks each
	archiveBlocks    = 3600 // of a worker: the documents take four fifths of all
	archiveWarm      = 2000 // answers until questions are evicted, too
	archiveWindow    = 800  // answers over which a hit rate is taken
)

// archive is a load of short questions about a few long documents, which the workers
// have computed long ago: what they publish under it is about questions only.
type archive struct {
	*soak
	routers *rollout
}

// archiveBuffer is how many batches of KV events a worker can replay: those of some
// seconds. KVROUTER_BUFFER_STEPS may say less, down to 100 where the disk is quick: the
// file must be there before they are over.
func archiveBuffer() string { return cmp.Or(os.Getenv("KVROUTER_BUFFER_STEPS"), "400") }

// startArchive starts workers with short replay buffers, a router that follows them to
// the end, and one with args that may be killed.
func startArchive(t *testing.T, args ...string) *archive {
	t.Helper()
	farm := startSoaked(t, archiveWorkers, "--speedup-ratio=10", fmt.Sprint("--mock=num-gpu-blocks=", archiveBlocks), "--mock=buffer-steps="+archiveBuffer())
	a := &archive{soak: newSoak(farm.Workers, farm.Router, chaosLimit), routers: startRollout(t, 1, append(args, farm.Attach()...)...)}
	a.where, a.system = a.routers.where, nil
	random := rand.New(rand.NewPCG(3, 3))
	for range archiveDocuments {
		a.system = append(a.system, soakText(random, 3000))
	}
	return a
}

// during has the clients ask while f runs.
func (a *archive) during(t *testing.T, f func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	for i := range archiveClients {
		clients.Go(func() {
			for random := rand.New(rand.NewPCG(uint64(i), 4)); ctx.Err() == nil; {
				question := []map[string]string{Message("system", a.system[random.IntN(len(a.system))]), Message("user", soakText(random, 100))}
				if _, ok := a.ask(question, true, 8, a.limit, 0); !ok {
					<-time.After(soakRest)
				}
			}
		})
	}
	defer a.client.CloseIdleConnections()
	defer clients.Wait()
	defer cancel()
	f()
}

// hitRate is the share of the prompt tokens that the workers had, by their own account,
// of the next answers.
func (a *archive) hitRate(t *testing.T, answers int) float64 {
	t.Helper()
	var seen, cached, prompted int
	a.note(func() { seen, cached, prompted = a.seen, a.cached, a.prompted })
	rate := 0.0
	testkit.Eventually(t, 5*time.Minute, fmt.Sprint(answers, " answers"), func() (enough bool) {
		a.note(func() {
			enough = a.seen >= seen+answers
			rate = float64(a.cached-cached) / float64(max(1, a.prompted-prompted))
		})
		return enough
	})
	return rate
}

// compared compares what the router knows with the workers' caches, without load. What
// is on the way to the router gets some time: as long as anything is missing, up to
// limit.
func (a *archive) compared(t *testing.T, limit time.Duration) (found standing) {
	t.Helper()
	for end := time.Now().Add(limit); ; <-time.After(100 * time.Millisecond) {
		found = a.compare(t, a.some(), matches(a.routers.router(0)))
		if found.wrong+found.missing == 0 && found.workers == archiveWorkers || time.Now().After(end) {
			return found
		}
	}
}

// TestARouterKilledUnderLoadKeepsItsIndex kills the router twice in the middle of its
// load, and starts it again with --index-snapshot and then without. What the workers
// can replay is not enough to know what they hold.
func TestARouterKilledUnderLoadKeepsItsIndex(t *testing.T) {
	a := startArchive(t, "--drain-delay=0s", "--index-snapshot="+filepath.Join(t.TempDir(), "index"))
	var before, with, again, without float64
	a.during(t, func() {
		a.hitRate(t, archiveWarm)
		before = a.hitRate(t, archiveWindow)
		a.routers.kill(0)
		with = a.hitRate(t, archiveWindow)
	})
	kept := a.compared(t, time.Minute)
	a.during(t, func() {
		again = a.hitRate(t, archiveWindow)
		a.routers.kill(0, "--index-snapshot=")
		without = a.hitRate(t, archiveWindow)
	})
	lost := a.compared(t, 5*time.Second)
	t.Logf("hit rate %.4f, after a kill %.4f; later %.4f, after a kill without a snapshot %.4f", before, with, again, without)
	t.Logf("with a snapshot: %s", kept)
	t.Logf("without: %s", lost)
	t.Log(a)
	// The hit rates are logged, not judged: they depend on the machine's speed, too.
	if kept.missing > 0 {
		t.Error("the index is lost")
	}
	if lost.missing == 0 {
		t.Error("the workers' replay alone covers what they hold: the test shows nothing")
	}
	for _, found := range []standing{kept, lost} {
		if found.wrong > 0 || found.workers < archiveWorkers || found.blocks == 0 {
			t.Error("wrong matches, or nothing was compared")
		}
	}
}
