package main

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// The tests of --index-snapshot kill router processes whose simulated workers live on
// in this one.

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

// startArchive starts workers with short replay buffers, and a router with args.
func startArchive(t *testing.T, args ...string) *archive {
	t.Helper()
	farm := startMockSite(t, archiveWorkers, "--speedup-ratio=10", fmt.Sprint("--mock-num-gpu-blocks=", archiveBlocks), "--mock-buffer-steps="+archiveBuffer())
	for i := range archiveWorkers {
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", farm.workerURL(i), i))
	}
	a := &archive{soak: newSoak(farm, chaosLimit), routers: startRollout(t, 1, args...)}
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
				question := []map[string]string{message("system", a.system[random.IntN(len(a.system))]), message("user", soakText(random, 100))}
				if _, ok := a.ask(question, true, 8, a.limit); !ok {
					<-time.After(soakRest)
				}
			}
		})
	}
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
		found = a.compare(t, a.some(), a.routers.router(0).matches)
		if found.wrong+found.missing == 0 && found.workers == archiveWorkers || time.Now().After(end) {
			return found
		}
	}
}

// TestARouterKilledUnderLoadKeepsItsIndex kills the router twice in the middle of its
// load, and starts it again with --index-snapshot and then without. What the
// workers can replay is not enough to know what they hold.
func TestARouterKilledUnderLoadKeepsItsIndex(t *testing.T) {
	a := startArchive(t, "--index-snapshot="+filepath.Join(t.TempDir(), "index"))
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
	// The hit rates are told, not judged: how they move hangs on the machine's speed, too.
	if kept.missing > 0 {
		t.Error("the index is lost")
	}
	if lost.missing == 0 {
		t.Error("the workers' replay alone tells what they hold: the test shows nothing")
	}
	for _, found := range []standing{kept, lost} {
		if found.wrong > 0 || found.workers < archiveWorkers || found.blocks == 0 {
			t.Error("wrong matches, or nothing was compared")
		}
	}
}
