package workers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

const withLateAdapter = `{"data":[{"id":"base","parent":null},{"id":"late","parent":"base"}]}`

func TestModelsAreLookedAtWithTheHealth(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, twoRanks)
	a.start()
	f := attachedFleet(t, a, "")
	var mu sync.Mutex
	adapters := map[kv.WorkerKey][]string{}
	up := f.hooks.Up
	f.hooks.Up = func(target kv.Target) {
		mu.Lock()
		adapters[target.Key] = target.Adapters
		mu.Unlock()
		up(target)
	}
	f.timing.modelsEvery = f.timing.healthEvery
	f.start()
	f.wantEvents("up 3.0 g1", "up 3.1 g1")
	a.set(func() { a.models = http.StatusServiceUnavailable }) // reports nothing, and changes nothing
	a.set(func() { a.models, a.list = http.StatusOK, withLateAdapter })
	f.wantEvents("up 3.0 g1", "up 3.1 g1", "up 3.0 g1", "up 3.1 g1")
	mu.Lock()
	defer mu.Unlock()
	for _, key := range []kv.WorkerKey{{Worker: 3, Rank: 0}, {Worker: 3, Rank: 1}} {
		if !slices.Equal(adapters[key], []string{"late"}) {
			t.Errorf("%v has the adapters %q", key, adapters[key])
		}
	}
	if got := f.Workers()[0].Models; !slices.Equal(got, []string{"base", "late"}) {
		t.Errorf("models %q", got)
	}
	f.stop()
	a.server.Close()
}

func TestRequestsForUnknownModelsShareFewLooks(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.start()
	f := attachedFleet(t, a, "")
	f.timing.modelsEvery, f.timing.lookEvery, f.timing.lookLimit = time.Hour, time.Hour, 5*time.Second
	f.start()
	f.wantEvents("up 3.0 g1")
	a.set(func() { a.list = withLateAdapter })
	f.LookForModels(t.Context())
	if got := f.Workers()[0].Models; !slices.Equal(got, []string{"base", "late"}) {
		t.Errorf("models %q after the look", got)
	}
	// The next look is an hour away: these give up with their clients.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	var asking sync.WaitGroup
	for range 20 {
		asking.Go(func() { f.LookForModels(ctx) })
	}
	asking.Wait()
	a.set(func() {
		if a.listed != 2 { // when it was attached, and for the first
			t.Errorf("the worker was asked %d times", a.listed)
		}
	})
	f.stop()
	a.server.Close()
}

// joining notes who joins and leaves, and gives each model an index.
type joining struct {
	mu      sync.Mutex // guards the rest
	log     []string
	indexes map[string]*radix.Tree
	refuses string // this base model
}

// join is a fleet's hook.
func (j *joining) join(worker uint64, serves kv.Served) (radix.Index, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	name := strings.Join(serves.Names, "+")
	j.log = append(j.log, fmt.Sprintf("join %d %s of %s", worker, name, serves.Root))
	if name == j.refuses {
		return nil, errors.New("it is one too many")
	}
	if j.indexes == nil {
		j.indexes = map[string]*radix.Tree{}
	}
	if j.indexes[name] == nil {
		j.indexes[name] = radix.NewTree()
	}
	return j.indexes[name], nil
}

func (j *joining) leave(worker uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.log = append(j.log, fmt.Sprintf("leave %d", worker))
}

// want waits until that is the log.
func (j *joining) want(t *testing.T, want ...string) {
	t.Helper()
	testkit.Settles(t, func() error {
		j.mu.Lock()
		defer j.mu.Unlock()
		if !slices.Equal(j.log, want) {
			return fmt.Errorf("%q, want %q", j.log, want)
		}
		return nil
	})
}

// cacheOf is a vLLM's metrics page.
func cacheOf(size int) string {
	return fmt.Sprintf("# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"%d\",num_gpu_blocks=\"101\"} 1\n", size)
}

// TestAWorkerJoinsTheModelThatItServes before it is up, with its block size; its blocks
// are kept there, and one that serves another base model later is followed anew.
func TestAWorkerJoinsTheModelThatItServes(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, twoRanks)
	a.list, a.metrics = `{"data":[{"id":"alias","root":"org/a","parent":null},{"id":"late","root":"/adapters","parent":"alias"},{"id":"second name","root":"org/a"}]}`, cacheOf(16)
	a.start()
	f := attachedFleet(t, a, "")
	j := &joining{}
	f.hooks.Join, f.hooks.Leave = j.join, j.leave
	f.timing.modelsEvery = f.timing.healthEvery
	var mu sync.Mutex
	blocks := map[int]int{} // of the cache, by generation
	up := f.hooks.Up
	f.hooks.Up = func(target kv.Target) {
		if mu.Lock(); target.Key.Rank == 0 { // the only one that its page reports
			blocks[target.Generation] = target.TotalBlocks
		}
		mu.Unlock()
		up(target)
	}
	f.start()
	f.wantEvents("up 3.0 g1", "up 3.1 g1")
	first := "join 3 alias+second name of org/a"
	j.want(t, first)
	key := kv.WorkerKey{Worker: 3, Rank: 1}
	f.all()[0].mu.Lock()
	size := f.all()[0].streams[key].Src.BlockSize
	f.all()[0].mu.Unlock()
	if size != 16 {
		t.Errorf("its events are read in blocks of %d", size)
	}
	index := j.indexes["alias+second name"]
	if err := radixtest.Store(index, key, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		t.Fatal(err)
	}

	a.set(func() { a.list = `{"data":[{"id":"second name","root":"org/a"},{"id":"alias"}]}` }) // the same model in another order
	f.wantEvents("up 3.0 g1", "up 3.1 g1", "up 3.0 g1", "up 3.1 g1")
	a.set(func() { a.list, a.metrics = `{"data":[{"id":"other","root":"org/b"}]}`, cacheOf(32) })
	f.wantEvents("up 3.0 g1", "up 3.1 g1", "up 3.0 g1", "up 3.1 g1", "down 3.0 g1", "down 3.1 g1", "up 3.0 g2", "up 3.1 g2")
	j.want(t, first, "leave 3", "join 3 other of org/b")
	if n := index.Blocks(key); n != 0 {
		t.Errorf("the model that it left has %d blocks of it", n)
	}
	mu.Lock()
	if blocks[1] != 100 || blocks[2] != 100 {
		t.Errorf("caches of %v blocks", blocks)
	}
	mu.Unlock()
	f.stop()
	a.server.Close()
	j.want(t, first, "leave 3", "join 3 other of org/b", "leave 3")
}

// TestAWorkerOfOneModelTooManyIsNotUsed until there is room.
func TestAWorkerOfOneModelTooManyIsNotUsed(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.list, a.metrics = `{"data":[{"id":"b"}]}`, cacheOf(16)
	a.start()
	f := attachedFleet(t, a, "")
	j := &joining{refuses: "b"}
	f.hooks.Join, f.hooks.Leave = j.join, j.leave
	f.start()
	testkit.Settles(t, func() error {
		if status := f.Workers()[0]; status.State != StateConnecting || status.LastError != "it is one too many" || !strings.Contains(f.out.String(), "it is one too many") {
			return fmt.Errorf("%+v; log %s", status, f.out.String())
		}
		return nil
	})
	if got := f.seen(); len(got) > 0 {
		t.Errorf("it is announced: %q", got)
	}
	j.mu.Lock()
	j.refuses = ""
	j.mu.Unlock()
	testkit.Settles(t, func() error {
		if got := f.seen(); len(got) != 1 || !strings.HasPrefix(got[0], "up 3.0") {
			return fmt.Errorf("events %q", got)
		}
		return nil
	})
	f.stop()
	a.server.Close()
}

func TestARegisteredWorkerJoinsTheModelOfItsRegistration(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.start()
	f := newFakeFleet(t, fakeConfig(t, 0))
	j := &joining{}
	f.hooks.Join, f.hooks.Leave = j.join, j.leave
	f.start()
	r := Registration{ID: 7, URL: "http://" + a.address, Model: "b", Ranks: []uint32{0}, BlockSize: 16}
	if err := f.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	j.want(t, "join 7 b of ")
	j.mu.Lock()
	j.refuses = "c"
	j.mu.Unlock()
	r.Model = "c"
	if err := f.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	testkit.Settles(t, func() error {
		if status := f.Workers()[0]; status.LastError != "it is one too many" {
			return fmt.Errorf("%+v", status)
		}
		return nil
	})
	if !f.Unregister(7) {
		t.Error("it was not there")
	}
	if got := f.seen(); !slices.Equal(got, []string{"up 7.0 g1", "down 7.0 g1"}) {
		t.Errorf("events %q", got)
	}
	f.stop()
	a.server.Close()
}

func TestBlockSizesThatCannotBeAreNotBelieved(t *testing.T) {
	f := New(Settings{KVEvents: true, BlockSize: 64}, Deps{Log: slog.New(slog.DiscardHandler)})
	in := &incarnation{f: f, ctx: t.Context(), w: &worker{attached: true}}
	for _, test := range []struct {
		info probe.ServerInfo
		want int
	}{
		{probe.ServerInfo{PageSize: 1}, 1}, {probe.ServerInfo{PageSize: 16, Events: &probe.EventsInfo{}}, 16},
		{probe.ServerInfo{PageSize: 1, Events: &probe.EventsInfo{BlockSize: 64}}, 64}, {probe.ServerInfo{PageSize: -1, Events: &probe.EventsInfo{}}, 64},
		{probe.ServerInfo{PageSize: 1 << 40, Events: &probe.EventsInfo{}}, 1 << 16}, {probe.ServerInfo{}, 64},
	} {
		in.info = &test.info
		if in.sizeBlocks(0); in.blockSize != test.want {
			t.Errorf("%+v: %d, want %d", test.info, in.blockSize, test.want)
		}
	}
}
