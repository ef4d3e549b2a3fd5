package policy_test

import (
	"kvrouter/internal/router"
	"testing"
)

// expectLoad compares worker 0's books.
func expectLoad(t testing.TB, r *router.Router, prefill, blocks, requests int) {
	t.Helper()
	want := router.WorkerLoad{PotentialPrefillTokens: prefill, PotentialDecodeBlocks: blocks, ActiveRequests: requests}
	if got := r.Loads(); len(got) != 1 || got[0] != want {
		t.Errorf("loads %+v, want %+v", got, want)
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}
