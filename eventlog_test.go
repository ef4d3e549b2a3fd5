package main

import (
	"fmt"
	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
	"strings"
	"testing"
	"time"
)

func TestRouterTakesFromItsPeerWhatAWorkerCannotReplay(t *testing.T) {
	farm := startMockSite(t, 1)
	key := kv.WorkerKey{}
	chat := func(i int) {
		t.Helper()
		if _, err := farm.chat(t.Context(), say(strings.Repeat(fmt.Sprint("chat ", i, " "), 60)), false, 1); err != nil {
			t.Fatal(err)
		}
	}
	chat(1)
	farm.settle()
	before := farm.rooms.index.Blocks(key)
	second := startBeside(t, farm, ",replay=tcp"+deadURL(t)[len("http"):], "--indexer-peers="+farm.selection)
	testkit.Eventually(t, 20*time.Second, "events followed", func() bool {
		stats := second.rooms.fleet.Streams()[key]
		return stats != nil && stats.Connected.Load() && farm.rank(key).Events.Pub.Subscribers() == 2
	})
	chat(2)
	farm.settle()
	all := farm.rooms.index.Blocks(key)
	testkit.Eventually(t, 20*time.Second, "all blocks taken over", func() bool { return second.rooms.index.Blocks(key) == all })
	stats := second.rooms.fleet.Streams()[key]
	if before == 0 || all <= before || stats.PeerDumps.Load() == 0 || stats.Cold.Load() {
		t.Errorf("%d blocks, then %d; %v", before, all, stats.Counts())
	}
}
