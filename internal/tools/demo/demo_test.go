package demo

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

func TestTheDemoIsBoundedAndHasAllKindsOfTraffic(t *testing.T) {
	var mu sync.Mutex // guards the counts
	counts := map[string]int{}
	beginnings := map[string]int{}
	var inside, most, broken, crashed atomic.Int64
	served := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n := inside.Add(1); n > most.Load() {
			most.Store(n)
		}
		defer inside.Add(-1)
		body, _ := io.ReadAll(r.Body)
		text := gjson.GetBytes(body, "messages.0.content").String()
		mu.Lock()
		counts[r.URL.Path]++
		beginnings[text[:min(len(text), 400)]]++
		if len(gjson.GetBytes(body, "messages").Array()) > 3 {
			counts["later turns"]++
		}
		if strings.HasPrefix(text, "You are an agent.") {
			counts["agents"]++
		}
		mu.Unlock()
		select { // some clients leave before that
		case <-r.Context().Done():
			mu.Lock()
			counts["left"]++
			mu.Unlock()
			return
		case <-time.After(time.Millisecond):
		}
		for range 3 {
			fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"yes \"}}]}\n\n")
			w.(http.Flusher).Flush()
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		Run(ctx, Settings{
			OpenAI: served, Model: "m", Workers: 2, Seed: 1, Log: slog.New(slog.DiscardHandler), pace: time.Millisecond,
			Break: func(worker, status int) {
				if worker < 0 || worker > 1 {
					t.Errorf("worker %d fails", worker)
				}
				broken.Add(1)
			},
			Crash: func(int) { crashed.Add(1) },
		})
	})
	testkit.Eventually(t, 30*time.Second, "all kinds have come", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return counts["/v1/chat/completions"] > 100 && counts["/v1/completions"] > 5 && counts["later turns"] > 10 && counts["agents"] > 10 && counts["left"] > 0 && crashed.Load() > 0
	})
	cancel()
	running.Wait()
	shared := 0
	for beginning, n := range beginnings {
		if beginning != "" && n > 3 {
			shared++
		}
	}
	if most.Load() > 2*clientsPerWorker || shared < 4 || broken.Load()%2 != 0 {
		t.Errorf("%d requests at once, %d shared beginnings, %d changes of failing workers", most.Load(), shared, broken.Load())
	}
}

func TestAnAnswerThatIsTooLongIsCut(t *testing.T) {
	c := client{Settings: Settings{OpenAI: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := io.WriteString(w, strings.Repeat("a", 1<<16)); err != nil {
				return
			}
		}
	})}}
	if answer, _ := c.send(t.Context(), "/v1/completions", map[string]any{}); len(answer) > maxAnswer {
		t.Errorf("%d bytes are kept", len(answer))
	}
}
