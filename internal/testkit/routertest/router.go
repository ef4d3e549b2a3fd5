// Package routertest has routers for the tests of several packages; only tests import
// it.
package routertest

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/models"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// NewTestRouter returns a router over that many workers, all up and idle.
func NewTestRouter(t testing.TB, rule string, workers int) *router.Router {
	t.Helper()
	p, err := policy.NewPolicy(rule)
	if err != nil {
		t.Fatal(err)
	}
	r := router.NewRouter(radix.NewTree(), p, testkit.BlockSize, 1)
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: "http://worker", Models: []string{"m"}})
	}
	return r
}

// NewClockedRouter is NewTestRouter for policy kv with a clock of its own.
func NewClockedRouter(t testing.TB, workers int, knobs router.Settings) (*router.Router, *testkit.StandingClock) {
	t.Helper()
	clock := new(testkit.StandingClock)
	r := router.New(radix.NewTree(), policytest.MustPolicy(t, "kv"), testkit.BlockSize, 1, knobs)
	r.Now = clock.Now
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Models: []string{"m"}})
	}
	return r, clock
}

// Hold puts the full blocks of a prompt into worker w's cache.
func Hold(r *router.Router, w uint64, tokens []uint32) {
	local := kv.HashBlocks(nil, tokens, r.BlockSize(), "", "")
	blocks := make([]kv.StoredBlock, len(local))
	for i, engine := range kv.SequenceHashes(nil, local) {
		blocks[i] = kv.StoredBlock{Engine: engine, Local: local[i]}
	}
	r.Index().Store(kv.WorkerKey{Worker: w}, 0, false, blocks)
}

// MustRoute routes a request and fails the test if no worker is found.
func MustRoute(t testing.TB, r *router.Router, request router.Request) router.Decision {
	t.Helper()
	d, err := r.Route(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// InFlight returns how many requests are booked.
func InFlight(r *router.Router) (n int) {
	for _, load := range r.Loads() {
		n += load.ActiveRequests
	}
	return n
}

// ExpectLoad compares the books of the only worker and checks the router.
func ExpectLoad(t testing.TB, r *router.Router, prefill, blocks, requests int) {
	t.Helper()
	want := router.WorkerLoad{PotentialPrefillTokens: prefill, PotentialDecodeBlocks: blocks, ActiveRequests: requests}
	if got := r.Loads(); len(got) != 1 || got[0] != want {
		t.Errorf("loads %+v, want %+v", got, want)
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

// ThompsonStats returns the state of a router's thompson policy.
func ThompsonStats(t *testing.T, router *router.Router) (stats policy.ThompsonStats) {
	t.Helper()
	if !router.WithThompson(func(p *policy.Thompson) { stats = p.Stats() }) {
		t.Fatal("another policy")
	}
	return stats
}

// DumpLines returns all that an index holds as sorted lines.
func DumpLines(index radix.Index) []string {
	var lines []string
	for _, entry := range testkit.Dumped(index) {
		lines = append(lines, fmt.Sprintf("%+v", entry))
	}
	slices.Sort(lines)
	return lines
}

// Models returns a set of one model, which r decides for.
func Models(r *router.Router) *models.Set {
	return models.New(models.Settings{}, models.Deps{Router: r, Index: r.Index(), Log: slog.New(slog.DiscardHandler)})
}
