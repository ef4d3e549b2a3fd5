package routertest

import (
	"kvrouter/internal/policy"
	"kvrouter/internal/router"
	"testing"
)

// thompsonStats asks the policy of a router how it stands.
func ThompsonStats(t *testing.T, router *router.Router) (stats policy.ThompsonStats) {
	t.Helper()
	if !router.WithThompson(func(p *policy.Thompson) { stats = p.Stats() }) {
		t.Fatal("another policy")
	}
	return stats
}
