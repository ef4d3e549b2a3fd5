package radix_test

import (
	"testing"
	"time"

	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
)

func TestWithoutCorrectionNothingIsTakenBack(t *testing.T) {
	config := testkit.Defaults[router.IndexSettings]()
	config.PrefixSource, config.CacheCorrection = router.PrefixApprox, false
	for _, noEvents := range []bool{false, true} {
		config.NoKVEvents = noEvents
		for _, rule := range []string{"variance", "work"} {
			index, assumer := router.NewIndex(config, rule, testkit.Defaults[policy.Settings](), testkit.BlockSize, time.Now)
			assumer.Assume(testkit.W0, true)
			for range 2 {
				assumer.Routed(testkit.W0, testkit.Prompt(1, 10)).End(0, 0)
			}
			assumer.Routed(testkit.W0, testkit.Prompt(2, 10)).End(0, 0)
			if n := index.Blocks(testkit.W0); n != 20 {
				t.Errorf("policy %s: %d blocks are left of 20", rule, n)
			}
		}
	}
}
