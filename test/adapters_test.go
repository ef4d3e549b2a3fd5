package test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"kvrouter/internal/tools/engine"
)

// TestMockAdaptersGather sends chats with 8 adapters to 4 workers that have two of them
// loaded at a time, and compares policy work with one that does not know adapters.
func TestMockAdaptersGather(t *testing.T) {
	const adapters, clients, chats = 8, 8, 25
	run := func(policy string) (loads, spread float64) {
		s := StartMocks(t, 4, "--mock=lora=a0,a1,a2,a3,a4,a5,a6,a7", "--mock=max-loras=2", "--mock=lora-load=500ms", "--speedup-ratio=10", "--policy="+policy)
		var mu sync.Mutex // guards places
		places := map[string]bool{}
		var all sync.WaitGroup
		for client := range clients {
			all.Go(func() {
				random := rand.New(rand.NewPCG(1, uint64(client)))
				for i := range chats {
					adapter := fmt.Sprintf("a%d", random.IntN(adapters))
					a := s.ask(map[string]any{"model": adapter, "messages": Say(fmt.Sprint(client, " asks for the ", i, "th time")), "max_tokens": 8, "stream": true})
					mu.Lock()
					places[fmt.Sprint(adapter, " on ", a.Worker)] = true
					mu.Unlock()
				}
			})
		}
		all.Wait()
		n := 0
		for _, key := range s.Keys() {
			s.Rank(key).Ask(t.Context(), func(e *engine.Engine) { n += e.AdapterLoads })
		}
		return 1000 * float64(n) / (clients * chats), float64(len(places)) / adapters
	}
	loads, spread := run("work")
	loadsBefore, spreadBefore := run("kv")
	t.Logf("work: %.0f loads per 1,000 requests, each adapter on %.1f workers; kv: %.0f, %.1f", loads, spread, loadsBefore, spreadBefore)
	if loads > 0.5*loadsBefore || spread >= spreadBefore {
		t.Error("adapters do not gather")
	}
}
