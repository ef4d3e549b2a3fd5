package radix_test

import (
	"slices"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

func TestPredictedRealEventsDoNotExpire(t *testing.T) {
	clock := time.Unix(1000, 0)
	config := testkit.Defaults[router.IndexSettings]()
	config.RouterPredictedTTLSecs = 5
	x, routed := router.NewIndex(config, "standalone", testkit.Defaults[policy.Settings](), testkit.BlockSize, func() time.Time { return clock })
	p := testkit.Prompt(1, 6)
	wants := func(want ...kv.Match) {
		t.Helper()
		if got := x.Match(p, len(p), kv.AllParts, []kv.Match{{Worker: testkit.W2, Blocks: 99}}); !slices.Equal(got[1:], want) || got[0] != (kv.Match{Worker: testkit.W2, Blocks: 99}) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	for _, w := range []kv.WorkerKey{testkit.W0, testkit.W2} {
		if err := radixtest.Store(x, w, 0, false, testkit.Chain(p[:3])); err != nil {
			t.Fatal(err)
		}
	}
	routed.SetCapacity(testkit.W0, 1)
	wants(kv.Match{Worker: testkit.W0, Blocks: 3}, kv.Match{Worker: testkit.W2, Blocks: 3})
	routed.Routed(testkit.W0, p).End(0, -1)
	routed.Routed(testkit.W1, p[:2]).End(0, -1)
	routed.Routed(testkit.W2, p[:1]).End(0, -1)
	wants(kv.Match{Worker: testkit.W0, Blocks: 6}, kv.Match{Worker: testkit.W1, Blocks: 2}, kv.Match{Worker: testkit.W2, Blocks: 3}) // the longer of both
	clock = clock.Add(5 * time.Second)
	wants(kv.Match{Worker: testkit.W0, Blocks: 3}, kv.Match{Worker: testkit.W2, Blocks: 3})
	routed.Routed(testkit.W0, p)
	radixtest.Clear(x, testkit.W0)
	routed.Routed(testkit.W2, p)
	radixtest.Forget(x, 2)
	wants()
}
