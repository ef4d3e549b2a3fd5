package radix_test

import (
	"slices"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
)

func TestPredictedRealEventsDoNotExpire(t *testing.T) {
	clock := time.Unix(1000, 0)
	config := testkit.Defaults[router.IndexSettings]()
	config.RouterPredictedTTLSecs = 5
	x := router.NewIndex(config, "standalone", testkit.Defaults[policy.Settings](), testkit.BlockSize, func() time.Time { return clock }).(radix.Assumer)
	p := testkit.Prompt(1, 6)
	wants := func(want ...kv.Match) {
		t.Helper()
		if got := x.Match(p, len(p), kv.AllParts, []kv.Match{{Worker: testkit.W2, Blocks: 99}}); !slices.Equal(got[1:], want) || got[0] != (kv.Match{Worker: testkit.W2, Blocks: 99}) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	for _, w := range []kv.WorkerKey{testkit.W0, testkit.W2} {
		if err := x.Store(w, 0, false, testkit.Chain(p[:3])); err != nil {
			t.Fatal(err)
		}
	}
	x.SetCapacity(testkit.W0, 1)
	wants(kv.Match{Worker: testkit.W0, Blocks: 3}, kv.Match{Worker: testkit.W2, Blocks: 3})
	x.Routed(testkit.W0, p).End(0, -1)
	x.Routed(testkit.W1, p[:2]).End(0, -1)
	x.Routed(testkit.W2, p[:1]).End(0, -1)
	wants(kv.Match{Worker: testkit.W0, Blocks: 6}, kv.Match{Worker: testkit.W1, Blocks: 2}, kv.Match{Worker: testkit.W2, Blocks: 3}) // the longer of both
	clock = clock.Add(5 * time.Second)
	wants(kv.Match{Worker: testkit.W0, Blocks: 3}, kv.Match{Worker: testkit.W2, Blocks: 3})
	x.Routed(testkit.W0, p)
	x.Clear(testkit.W0)
	x.Routed(testkit.W2, p)
	x.Forget(2)
	wants()
}
