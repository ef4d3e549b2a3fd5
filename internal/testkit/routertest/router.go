package routertest

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"testing"
)

// newTestRouter returns a router over that many workers, all up and idle.
func NewTestRouter(t testing.TB, rule string, workers int) *router.Router {
	t.Helper()
	p, err := policy.NewPolicy(rule)
	if err != nil {
		t.Fatal(err)
	}
	r := router.NewRouter(radix.NewTree(), p, testkit.TestBlock, 1)
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: "http://worker", Models: []string{"m"}})
	}
	return r
}

// hold puts the prompt's full blocks into worker w's cache.
func Hold(r *router.Router, w uint64, tokens []uint32) {
	local := kv.HashBlocks(nil, tokens, r.BlockSize(), "", "")
	blocks := make([]kv.StoredBlock, len(local))
	for i, engine := range kv.SequenceHashes(nil, local) {
		blocks[i] = kv.StoredBlock{Engine: engine, Local: local[i]}
	}
	r.Index().Store(kv.WorkerKey{Worker: w}, 0, false, blocks)
}
