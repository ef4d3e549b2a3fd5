package mocker

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/engine"
)

// tokensOf is a prompt of n tokens that begins with the one of first.
func tokensOf(first string, n int) string { return first + strings.Repeat("x", n-1) }

// complete asks a vLLM worker for one token and returns the cached tokens.
func complete(t *testing.T, w *Worker, prompt string) int64 {
	t.Helper()
	status, answer := w.ask(t, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1}`, prompt))
	if status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	return gjson.Get(answer, "usage.prompt_tokens_details.cached_tokens").Int()
}

// media are the blocks stored and removed in each medium by the replayed events.
func media(events []map[string]any) (stored, removed map[string]int) {
	stored, removed = map[string]int{}, map[string]int{}
	for _, e := range events {
		hashes, _ := e["block_hashes"].([]any)
		medium, _ := e["medium"].(string)
		switch e["type"] {
		case "BlockStored":
			stored[medium] += len(hashes)
		case "BlockRemoved":
			removed[medium] += len(hashes)
		}
	}
	return stored, removed
}

// settledEvents returns the replayed events once as many blocks are stored in the medium.
func settledEvents(t *testing.T, w *Worker, medium string, blocks int) (events []map[string]any) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, fmt.Sprint(blocks, " blocks in ", medium), func() bool {
		events = eventsOf(t, replayed(t, w, 0, 0))
		stored, _ := media(events)
		return stored[medium] >= blocks
	})
	return events
}

// small is a worker of 12 blocks with 100 in the host.
func small(s *Settings) {
	s.NumGPUBlocks, s.HostBlocks, s.SpeedupRatio = 12, 100, 0
}

func TestVLLMTierEventsAreAsTheEngines(t *testing.T) {
	for _, form := range []string{"described", "placeholder", "none"} {
		t.Run(form, func(t *testing.T) {
			w := vllmWorker(t, func(s *Settings) {
				small(s)
				s.DiskBlocks, s.DiskShared, s.TierEvents = 100, true, form
			})
			complete(t, w, tokensOf("a", 641))
			if form == tierNone {
				complete(t, w, tokensOf("b", 641))
				if stored, _ := media(settledEvents(t, w, "GPU", 20)); len(stored) != 1 {
					t.Errorf("stored %v", stored)
				}
				return
			}
			events := settledEvents(t, w, "STORAGE", 10)
			stored, _ := media(events)
			if stored["GPU"] != 10 || stored["CPU"] != 10 || stored["STORAGE"] != 10 {
				t.Errorf("stored %v", stored)
			}
			var order []any
			for _, e := range events {
				medium := e["medium"]
				if medium == "GPU" {
					continue
				}
				_, kind := e["kv_cache_spec_kind"]
				_, extra := e["extra_keys"]
				tokens, size, locality := e["token_ids"].([]any), e["block_size"], e["locality"]
				described := len(tokens) == 64 && size == int64(64) && kind
				placeholder := len(tokens) == 0 && size == int64(0) && !kind && e["parent_block_hash"] == nil
				if form == "described" && !described || form == tierPlaceholder && !placeholder || extra || len(e["block_hashes"].([]any)) != 1 {
					t.Errorf("%v", e)
				}
				if (locality == "REMOTE") != (medium == "STORAGE") {
					t.Errorf("locality %v of %v", locality, medium)
				}
				if medium == "CPU" {
					order = append(order, e["block_hashes"].([]any)[0])
				}
			}
			var first []any
			for _, e := range events {
				if e["medium"] == "GPU" {
					first = append(first, e["block_hashes"].([]any)...)
				}
			}
			if slices.Equal(order, first) {
				t.Error("the host's blocks come in order")
			}
		})
	}
}

func TestVLLMLoadsEvictedBlocksAndCountsThem(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) {
		small(s)
		s.DiskBlocks, s.HostBlocks = 1000, 11
	})
	for i, step := range []struct {
		prompt string
		cached int64
	}{
		{"a", 0}, {"b", 0}, {"b", 640}, {"a", 640}, {"b", 640}, // 10 blocks each: one fits into the host
	} {
		if got := complete(t, w, tokensOf(step.prompt, 641)); got != step.cached {
			t.Errorf("request %d: %d cached, want %d", i, got, step.cached)
		}
	}
	_, removed := media(settledEvents(t, w, "CPU", 30))
	if removed["CPU"] == 0 || removed["STORAGE"] != 0 {
		t.Errorf("removed %v", removed)
	}
	_, page := w.ask(t, "/metrics", "")
	value := func(name, label string) float64 {
		for line := range strings.SplitSeq(page, "\n") {
			if strings.HasPrefix(line, name+"{") && strings.Contains(line, label) {
				var v float64
				if _, err := fmt.Sscan(line[strings.LastIndex(line, " "):], &v); err != nil {
					t.Fatal(err)
				}
				return v
			}
		}
		t.Errorf("no %s", name)
		return 0
	}
	host, disk, device := value("vllm:prompt_tokens_cached_by_source_total", `"host"`), value("vllm:prompt_tokens_cached_by_source_total", `"disk"`), value("vllm:prompt_tokens_cached_by_source_total", `"device"`)
	if host+disk+device != 3*640 || disk < 640 || value("vllm:external_prefix_cache_hits_total", "") != host+disk {
		t.Errorf("%v from the host, %v from files, %v from the device", host, disk, device)
	}
	bytes, seconds := value("vllm:kv_offload_load_bytes_total", ""), value("vllm:kv_offload_load_time_total", "")
	if want := (host + disk) * 131072; bytes != want || bytes/seconds < 24e9 || bytes/seconds > 26e9 {
		t.Errorf("%v bytes in %v s, want %v at 25 GB/s", bytes, seconds, want)
	}
	if read, took := value("vllm:kv_offload_tiering_read_bytes_total", "1:fs"), value("vllm:kv_offload_tiering_read_time_total", "1:fs"); read != disk*131072 || read/took < 1.9e9 || read/took > 2.1e9 {
		t.Errorf("%v bytes read in %v s", read, took)
	}
}

func TestVLLMResetLeavesTheTiersUnlessAsked(t *testing.T) {
	w := vllmWorker(t, small)
	prompt := tokensOf("a", 641)
	complete(t, w, prompt)
	for i, want := range []int64{640, 0} {
		path := []string{"/reset_prefix_cache", "/reset_prefix_cache?reset_external=true"}[i]
		testkit.Eventually(t, 10*time.Second, "a reset", func() bool {
			_, answer := w.ask(t, path, "{}")
			return gjson.Get(answer, "success").Bool()
		})
		if got := complete(t, w, prompt); got != want {
			t.Errorf("%s: %d cached, want %d", path, got, want)
		}
	}
}

func TestLoadsOfAWorkerWaitForEachOther(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) {
		s.NumGPUBlocks, s.HostBlocks, s.SpeedupRatio, s.HostLatency = 64, 100, 1, 150*time.Millisecond
		s.PrefillMS, s.DecodeMS = []float64{0, 0, 0}, []float64{0, 0, 0}
	})
	for _, first := range []string{"a", "b"} {
		complete(t, w, tokensOf(first, 641))
	}
	w.Ranks[0].Ask(t.Context(), func(e *engine.Engine) { e.Reset() })
	began := time.Now()
	took := make(chan time.Duration, 2)
	for _, first := range []string{"a", "b"} {
		go func() {
			_, _ = w.ask(t, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1}`, tokensOf(first, 641)))
			took <- time.Since(began)
		}()
	}
	if first, second := <-took, <-took; first < 150*time.Millisecond || second < 300*time.Millisecond {
		t.Errorf("the first took %v, the second %v", first, second)
	}
}

func TestWorkersShareFiles(t *testing.T) {
	workers := vllmWorkers(t, 2, func(s *Settings) {
		small(s)
		s.DiskBlocks, s.DiskShared = 100, true
	})
	prompt := tokensOf("a", 641)
	complete(t, workers[0], prompt)
	testkit.Eventually(t, 10*time.Second, "the prompt in the other's files", func() bool { return complete(t, workers[1], prompt) == 640 })
}

func TestASilentTierIsPublishedAndNeverFound(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) {
		small(s)
		s.SilentTiers = []uint64{0}
	})
	for _, first := range []string{"a", "b"} {
		complete(t, w, tokensOf(first, 641))
	}
	settledEvents(t, w, "CPU", 20)
	if got := complete(t, w, tokensOf("a", 641)); got >= 640 {
		t.Errorf("%d cached", got)
	}
}

func TestSGLangTiersAreAsTheEngines(t *testing.T) {
	w := testWorker(t, func(s *Settings) {
		s.NumGPUBlocks, s.HostBlocks, s.DiskBlocks = 8, 12, 100
	})
	ask := func(first string) string {
		t.Helper()
		_, answer := w.ask(t, "/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":1}}`, tokensOf(first, 97)))
		return gjson.Get(answer, "meta_info.cached_tokens_details").Raw
	}
	for i, step := range []struct{ first, want string }{
		{"a", "null"},
		{"b", "null"}, // of 12 blocks in the host, 6 are a's
		{"b", `{"device":96,"host":0,"storage":0,"storage_backend":"HiCacheFile"}`},
		{"a", `{"device":16,"host":80,"storage":0,"storage_backend":"HiCacheFile"}`},
		{"c", "null"},
		{"d", "null"},
		{"a", `{"device":0,"host":0,"storage":96,"storage_backend":"HiCacheFile"}`},
	} {
		if got := ask(step.first); got != step.want {
			t.Errorf("request %d: %s, want %s", i, got, step.want)
		}
	}
	events := settledEvents(t, w, "CPU_PINNED", 24)
	for _, e := range events {
		tokens, _ := e["token_ids"].([]any)
		if hashes, _ := e["block_hashes"].([]any); e["type"] == "BlockStored" && len(tokens) != testPage*len(hashes) {
			t.Errorf("%v", e)
		}
	}
	stored, removed := media(events)
	if len(stored) != 2 || removed["CPU_PINNED"] == 0 {
		t.Errorf("stored %v, removed %v", stored, removed)
	}
	_, answer := w.ask(t, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"return_cached_tokens_details":true}`, tokensOf("a", 97)))
	if got := gjson.Get(answer, "sglext.cached_tokens_details.device").Int(); got != 96 {
		t.Errorf("%s", answer)
	}
	// A flush leaves the files alone.
	testkit.Eventually(t, 10*time.Second, "a flush", func() bool { status, _ := w.ask(t, "/flush_cache", "{}"); return status == 200 })
	if got := ask("a"); !strings.Contains(got, `"host":0,"storage":96`) {
		t.Errorf("after the flush: %s", got)
	}
}
