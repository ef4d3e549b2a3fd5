package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"

	"github.com/tidwall/gjson"
)

// attachTo starts a second router over a site's workers and waits until it
// follows all their ranks.
func attachTo(t *testing.T, s *mockSite, args ...string) *mockSite {
	t.Helper()
	second := startBeside(t, s, "", args...)
	testkit.Eventually(t, 20*time.Second, "all ranks followed", func() bool {
		followed := 0
		for _, stats := range second.rooms.fleet.Streams() {
			if stats.Connected.Load() && !stats.Cold.Load() {
				followed++
			}
		}
		want := s.rooms.config.NumWorkers * s.rooms.config.Ranks()
		return followed == want && len(second.rooms.router.Targets()) == want
	})
	return second
}

// startBeside starts a second router over a site's workers; worker is more to
// say of each of them.
func startBeside(t *testing.T, s *mockSite, worker string, args ...string) *mockSite {
	t.Helper()
	port := testkit.FreePorts(t, 2)
	all := []string{"--engine=none", "--seed=1", fmt.Sprintf("--http-port=%d", port), fmt.Sprintf("--router-port=%d", port+1)}
	for i := range s.rooms.config.NumWorkers {
		all = append(all, fmt.Sprintf("--worker=url=%s,id=%d%s", s.workerURL(i), i, worker))
	}
	second := &mockSite{t: t, site: &site{
		openAI: fmt.Sprintf("http://127.0.0.1:%d", port), selection: fmt.Sprintf("http://127.0.0.1:%d", port+1), log: &testkit.LogBuffer{},
	}}
	second.rooms, second.end = runApp(t, second.log, append(all, args...)...)
	t.Cleanup(func() {
		if err := second.end(); err != nil {
			t.Error(err)
		}
	})
	return second
}

// pinned sends a chat to one rank and returns its answer.
func (s *mockSite) pinned(t *testing.T, key kv.WorkerKey, body map[string]any) (answer gjson.Result, predicted int64) {
	t.Helper()
	body["nvext"] = map[string]any{"backend_instance_id": key.Worker, "dp_rank": key.Rank}
	return s.ask(t, mocker.MustJSON(body))
}

func TestAttachedRanksAreWorkersOfTheirOwn(t *testing.T) {
	farm := startMockSite(t, 2, "--mock-data-parallel-size=2", "--mock-lora=sql")
	s := attachTo(t, farm, "--policy=kv")
	computed := func(key kv.WorkerKey) int64 { return farm.rank(key).Counts.PromptTokens.Load() }
	text := strings.Repeat("keep the ranks apart ", 20)
	settle := func(want kv.WorkerKey, blocks int) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d blocks on %v", blocks, want), func() bool { return s.rooms.index.Blocks(want) == blocks })
	}

	// The chosen rank reaches the worker, and its events are its own.
	key := kv.WorkerKey{Worker: 1, Rank: 1}
	first, predicted := s.pinned(t, key, map[string]any{"messages": say(text), "max_tokens": 1})
	if predicted != 0 || first.Get("usage.prompt_tokens_details.cached_tokens").Int() != 0 {
		t.Errorf("cached before anything was: %s", first.Raw)
	}
	prompt := int(first.Get("usage.prompt_tokens").Int())
	settle(key, prompt/64)
	for _, target := range s.rooms.router.Targets() {
		if own := target.Key == key; own != (computed(target.Key) > 0) || own != (s.rooms.index.Blocks(target.Key) > 0) {
			t.Errorf("%v computed %d tokens and holds %d blocks", target.Key, computed(target.Key), s.rooms.index.Blocks(target.Key))
		}
	}

	// A conversation that grows stays where its prefix is.
	messages := say(text)
	for turn := range 4 {
		messages = append(messages, map[string]string{"role": "assistant", "content": "And then?"}, map[string]string{"role": "user", "content": strings.Repeat(fmt.Sprint("turn ", turn, " "), 20)})
		answer, predicted := s.ask(t, mocker.MustJSON(map[string]any{"messages": messages, "max_tokens": 1}))
		cached, prompt := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(), int(answer.Get("usage.prompt_tokens").Int())
		if predicted != cached || cached == 0 {
			t.Errorf("turn %d: %d cached, %d predicted", turn, cached, predicted)
		}
		settle(key, prompt/64)
	}
	if n := computed(kv.WorkerKey{Worker: 1, Rank: 0}) + computed(kv.WorkerKey{Worker: 0, Rank: 0}) + computed(kv.WorkerKey{Worker: 0, Rank: 1}); n != 0 {
		t.Errorf("%d tokens were computed elsewhere", n)
	}

	// Neither an adapter nor a salt finds the base model's blocks, on the same rank.
	held := s.rooms.index.Blocks(key)
	for _, other := range []map[string]any{{"model": "sql"}, {"cache_salt": "a"}, {"model": "sql", "cache_salt": "a"}} {
		for again := range 2 {
			other["messages"], other["max_tokens"] = say(text), 1
			answer, predicted := s.pinned(t, key, other)
			if cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(); predicted != cached || (cached > 0) != (again > 0) {
				t.Errorf("%v: %d cached, %d predicted", other, cached, predicted)
			}
			if again == 0 {
				held += int(answer.Get("usage.prompt_tokens").Int()) / 64
			}
			settle(key, held)
		}
	}
	_, list := testkit.Get(t, s.openAI+"/v1/models")
	if got := gjson.GetBytes(list, "data.#.id").Raw; got != `["mock","sql"]` {
		t.Errorf("models %s", got)
	}

	// Every rank's load is its own: here from /metrics, which has them all.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body, err := json.Marshal(map[string]any{"messages": say("Go on for long."), "max_tokens": 15000, "ignore_eos": true, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+testkit.ChatPath, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(hints.HeaderPinnedWorker, "0")
	request.Header.Set(hints.HeaderPinnedRank, "1")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	testkit.Eventually(t, 20*time.Second, "a running request on the one rank", func() bool { return s.rooms.router.Load(kv.WorkerKey{Worker: 0, Rank: 1}).Running == 1 })
	if load := s.rooms.router.Load(kv.WorkerKey{Worker: 0, Rank: 0}); load.Running != 0 || load.InFlight != 0 || load.At.IsZero() {
		t.Errorf("the other rank shows %+v", load)
	}
	_, page := testkit.Get(t, s.openAI+"/metrics")
	for _, want := range []string{
		`kvrouter_worker_running_requests{dp_rank="1",worker_id="0"} 1`, `kvrouter_worker_in_flight{dp_rank="0",worker_id="0"} 0`,
		`dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="0",worker_type="decode"} 0`,
		`dynamo_component_kv_cache_events_applied{dp_rank="1",event_type="stored",status="ok",worker_id="1"}`,
	} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s", want)
		}
	}
	cancel()
	testkit.Eventually(t, 20*time.Second, "nothing in flight", func() bool { return s.rooms.router.Load(kv.WorkerKey{Worker: 0, Rank: 1}).InFlight == 0 })
}
