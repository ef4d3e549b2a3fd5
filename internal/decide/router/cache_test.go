package router

import (
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// cacheRouter is a router with workers, a prefix source and a clock.
func cacheRouter(t testing.TB, rule, source string, workers int) (*Router, *testkit.StandingClock) {
	t.Helper()
	clock := new(testkit.StandingClock)
	config := testkit.Defaults[IndexSettings]()
	config.PrefixSource = source
	index, assumer := NewIndex(config, rule, testkit.Defaults[policy.Settings](), testkit.BlockSize, clock.Now)
	r := New(testkit.Defaults[Settings](), Deps{Index: index, Assumer: assumer, Policy: policytest.MustPolicy(t, rule), BlockSize: testkit.BlockSize, Seed: 1})
	r.now = clock.Now
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}})
	}
	return r, clock
}
