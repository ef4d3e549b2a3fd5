package test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// TestAnyWorkerIsMatchedInItsOwnBlocks: servers of several block sizes, with KV events and without, are
// attached by URL alone. What is predicted is what each finds, whatever its size. One that comes back
// with another size, and with events, becomes exact.
func TestAnyWorkerIsMatchedInItsOwnBlocks(t *testing.T) {
	start := func(ports int, args ...string) *Router {
		return Start(t, append([]string{"--engine=mocker", "--num-workers=1", fmt.Sprintf("--base-worker-port=%d", ports),
			fmt.Sprintf("--base-kv-events-port=%d", ports+1), fmt.Sprintf("--base-kv-replay-port=%d", ports+2),
			fmt.Sprintf("--base-metrics-port=%d", ports+3)}, args...)...)
	}
	url := func(ports int) string { return fmt.Sprintf("http://127.0.0.1:%d", ports) }
	ports := []int{testkit.FreePorts(t, 4), testkit.FreePorts(t, 4), testkit.FreePorts(t, 4), testkit.FreePorts(t, 4)}
	stock := start(ports[0], "--block-size=16", "--no-kv-events")
	start(ports[1], "--block-size=48")
	start(ports[2], "--block-size=640")
	start(ports[3], "--block-size=1", "--mock=api=sglang")
	r := Start(t, url(ports[0]), url(ports[1]), url(ports[2]), url(ports[3]))
	r.WaitReady(4, 30*time.Second)
	for i, size := range []int{16, 48, 640, 1} {
		known := kv.Exact
		if i == 0 {
			known = kv.Approximate
		}
		if c := r.Workers()[i].Cache; c.Known != known || c.BlockSize != size || (c.Remedy == "") != (known == kv.Exact) {
			t.Errorf("the cache of worker %d is known as %+v", i, c)
		}
	}
	asks := func(worker uint64, size int, word string) {
		t.Helper()
		body := map[string]any{"messages": []map[string]string{{"role": "user", "content": strings.Repeat(word+" ", 1500)}}, "max_tokens": 4}
		for n := range 3 {
			var e exchange
			testkit.Eventually(t, 10*time.Second, fmt.Sprintf("worker %d finds what is predicted", worker), func() bool {
				e = r.pinned(kv.WorkerKey{Worker: worker}, body) // its events come after its answer
				return e.Predicted == e.Cached
			})
			if want := (e.Prompt - 1) / size * size; n > 0 && e.Cached != want {
				t.Errorf("worker %d found %d of %d tokens, want %d", worker, e.Cached, e.Prompt, want)
			}
		}
	}
	for i, size := range []int{16, 48, 640, 1} {
		asks(uint64(i), size, "word")
	}
	stock.Kill()
	start(ports[0], "--block-size=32")
	testkit.Eventually(t, 30*time.Second, "it is exact", func() bool {
		c := r.Workers()[0].Cache
		return c.Known == kv.Exact && c.BlockSize == 32
	})
	asks(0, 32, "other")
}
