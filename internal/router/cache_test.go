package router

import (
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// cacheRouter is a router with workers, a prefix source and a clock.
func cacheRouter(t testing.TB, rule, source string, workers int) (*Router, *testkit.StandingClock) {
	t.Helper()
	clock := new(testkit.StandingClock)
	config := DefaultIndexSettings()
	config.PrefixSource = source
	r := NewRouter(NewIndex(config, rule, policy.DefaultSettings(), testkit.BlockSize, clock.Now), policytest.MustPolicy(t, rule), testkit.BlockSize, 1)
	r.Now = clock.Now
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}})
	}
	return r, clock
}
