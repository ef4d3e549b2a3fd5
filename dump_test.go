package main

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
	"testing"
	"time"
)

func TestRouterStartsFromAPeersIndex(t *testing.T) {
	first := startSelection(t)
	first.two()
	second := startSelection(t, "--indexer-peers="+first.selection)
	testkit.Eventually(t, 10*time.Second, "the peer's index is there", func() bool { return second.rooms.index.Blocks(kv.WorkerKey{Worker: 1}) == 2 })
	text := func(s *selectionSite) string { return ask(t, s.selection, "GET", "/dump", nil).Raw }
	if a, b := text(first), text(second); a != b {
		t.Errorf("dumps differ:\n%s\n%s", a, b)
	}
	second.register(1)
	second.want("POST", "/select", prompt12(nil), 200, "worker_id 1", "overlap.longest_matched 8")
}
