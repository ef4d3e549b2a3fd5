package main

import (
	"fmt"
	"io"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestTwoRoutersHoldTheSameIndex has a second router join while the first is at
// work: it learns what was before through replay.
func TestTwoRoutersHoldTheSameIndex(t *testing.T) {
	first := startMockSite(t, 2, "--mock-num-gpu-blocks=40", "--block-size=16", "--mock-data-parallel-size=2")
	load := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := first.chat(t.Context(), say(strings.Repeat(fmt.Sprintf("words of chat %d ", i), 12)), i%2 == 0, 4); err != nil {
				t.Fatal(err)
			}
		}
	}
	load(0, 20)
	port := testkit.FreePorts(t, 2)
	args := []string{"--engine=none", "--block-size=16", fmt.Sprintf("--http-port=%d", port), fmt.Sprintf("--router-port=%d", port+1)}
	for i := range 2 {
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", first.workerURL(i), i))
	}
	second, end := runApp(t, io.Discard, args...)
	testkit.Eventually(t, 20*time.Second, "the second router follows all ranks", func() bool {
		n := 0
		for _, stats := range second.fleet.Streams() {
			if stats.Connected.Load() {
				n++
			}
		}
		return n == 4
	})
	load(20, 40)
	first.settle()
	want := routertest.DumpLines(first.rooms.index)
	if len(want) == 0 {
		t.Fatal("the first index is empty")
	}
	testkit.Eventually(t, 20*time.Second, "both indexes are equal", func() bool { return slices.Equal(routertest.DumpLines(second.index), want) })
	if err := end(); err != nil {
		t.Error(err)
	}
	second.proxy.Client.CloseIdleConnections()
}

// TestGrowingPrefixesStayOnOneWorker continues chats turn by turn.
func TestGrowingPrefixesStayOnOneWorker(t *testing.T) {
	for _, flags := range [][]string{{"--policy=kv"}, {"--policy=work"}, {"--policy=kv", "--no-kv-events"}, {"--policy=kv", "--mock-data-parallel-size=2"}} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			s := startMockSite(t, 2, append(flags, "--block-size=16")...)
			for c := range 4 {
				parts := []string{strings.Repeat(fmt.Sprintf("chat %d begins at length ", c), 10)}
				var home uint64
				for turn := range 4 {
					a, err := s.chat(t.Context(), say(parts...), false, 8)
					if err != nil {
						t.Fatal(err)
					}
					if turn == 0 {
						home = a.worker
					} else if a.worker != home || a.cached == 0 {
						t.Errorf("turn %d of chat %d went to worker %d and found %d tokens; want worker %d and some", turn, c, a.worker, a.cached, home)
					}
					if s.rooms.config.KVEvents() {
						s.settle()
					}
					parts = append(parts, a.text, strings.Repeat("and goes on ", 5))
				}
			}
		})
	}
}
