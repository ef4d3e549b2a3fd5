package models_test

import (
	"maps"
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit/routertest"
)

func TestBusiestShowsWorkersThatAreDownFirst(t *testing.T) {
	rt := routertest.New(t, "kv", 6)
	for _, worker := range []uint64{4, 4, 2, 5, 5, 5} {
		if _, err := rt.Book(router.Request{Tokens: []uint32{1, 2, 3}}, kv.WorkerKey{Worker: worker}); err != nil {
			t.Fatal(err)
		}
	}
	rt.Down(kv.WorkerKey{Worker: 3})
	set, ids := routertest.Models(rt), []uint64{0, 1, 2, 3, 4, 5}
	for most, want := range map[int][]uint64{1: {3}, 3: {3, 4, 5}, 5: {0, 2, 3, 4, 5}} {
		if got := slices.Sorted(maps.Keys(set.Busiest(ids, most))); !slices.Equal(got, want) {
			t.Errorf("the %d busiest are %v, want %v", most, got, want)
		}
	}
	for _, most := range []int{0, 6, 7} {
		if got := set.Busiest(ids, most); got != nil {
			t.Errorf("with a limit of %d not all are shown: %v", most, got)
		}
	}
}
