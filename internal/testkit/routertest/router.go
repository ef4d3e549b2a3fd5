// Package routertest has routers for the tests of several packages; only tests import
// it.
package routertest

import (
	"log/slog"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
)

// Option changes what a router is made of.
type Option func(*router.Settings, *router.Deps)

// WithPolicy gives the router that policy.
func WithPolicy(p policy.Policy) Option {
	return func(_ *router.Settings, d *router.Deps) { d.Policy = p }
}

// WithSettings changes the settings of the router.
func WithSettings(change func(*router.Settings)) Option {
	return func(s *router.Settings, _ *router.Deps) { change(s) }
}

// WithIndex gives the router that index.
func WithIndex(x radix.Index) Option { return func(_ *router.Settings, d *router.Deps) { d.Index = x } }

// WithBlockSize sets the tokens of a block.
func WithBlockSize(tokens int) Option {
	return func(_ *router.Settings, d *router.Deps) { d.BlockSize = tokens }
}

// WithSeed sets the seed of the router's random choices.
func WithSeed(seed uint64) Option { return func(_ *router.Settings, d *router.Deps) { d.Seed = seed } }

// WithNames gives the router names of its workers.
func WithNames(names *kv.Names) Option {
	return func(_ *router.Settings, d *router.Deps) { d.Names = names }
}

// WithNow gives the router that clock.
func WithNow(now func() time.Time) Option {
	return func(_ *router.Settings, d *router.Deps) { d.Now = now }
}

// New returns a router over that many workers, all up and idle. The defaults of its
// settings are those of the flags.
func New(t testing.TB, rule string, workers int, options ...Option) *router.Router {
	t.Helper()
	settings, deps := testkit.Defaults[router.Settings](), router.Deps{Index: radix.NewTree(), BlockSize: testkit.BlockSize, Seed: 1}
	for _, change := range options {
		change(&settings, &deps)
	}
	if deps.Policy == nil {
		deps.Policy = policytest.MustPolicy(t, rule)
	}
	r := router.New(settings, deps)
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: "http://worker", Models: []string{"m"}})
	}
	return r
}

// NewClocked is New for policy kv with a clock of its own.
func NewClocked(t testing.TB, workers int, options ...Option) (*router.Router, *testkit.StandingClock) {
	t.Helper()
	clock := new(testkit.StandingClock)
	return New(t, "kv", workers, append(options, WithNow(clock.Now))...), clock
}

// Hold puts the full blocks of a prompt into worker w's cache.
func Hold(r *router.Router, w uint64, tokens []uint32) {
	local := kv.HashBlocks(nil, tokens, r.Unit(), "", "")
	blocks := make([]kv.StoredBlock, len(local))
	for i, engine := range kv.SequenceHashes(nil, local) {
		blocks[i] = kv.StoredBlock{Engine: engine, Local: local[i]}
	}
	_ = radixtest.Store(r.Index(), kv.WorkerKey{Worker: w}, 0, false, blocks) // at a prompt's beginning it cannot fail
}

// Index returns all of a router's index.
func Index(r *router.Router) radix.Index { return r.Index().(radix.Index) }

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
func ThompsonStats(t *testing.T, router *router.Router) (stats thompson.Stats) {
	t.Helper()
	if !thompson.With(router.WithPolicy, func(p *thompson.Policy) { stats = p.Stats() }) {
		t.Fatal("another policy")
	}
	return stats
}

// Models returns a set of one model, which r decides for.
func Models(r *router.Router) *models.Set {
	return models.New(models.Settings{}, models.Deps{Router: r, Index: Index(r), Log: slog.New(slog.DiscardHandler)})
}
