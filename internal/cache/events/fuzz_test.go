package events

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
)

// streamWith returns a stream that has applied these batches.
func streamWith(batches ...[]byte) (*Stream, *radix.Tree, *testkit.LogBuffer) {
	log, index := new(testkit.LogBuffer), radix.NewTree()
	s := NewStream(Source{Worker: testkit.EventWorker, BlockSize: testkit.BlockSize}, index, Options{}, slog.New(slog.NewTextHandler(log, nil)))
	s.Begin(0)
	for i, payload := range batches {
		s.Apply(uint64(i), payload, true)
	}
	return s, index, log
}

// FuzzEventBatch applies a batch of whatever bytes: the index stays sound, the log
// short, and the next batch counts.
func FuzzEventBatch(f *testing.F) {
	good, next := testkit.Payload(f, 1, testkit.StoredEvent(1, 0, 3)), testkit.Payload(f, 2, testkit.StoredEvent(2, 0, 1))
	files, err := filepath.Glob("testdata/*.bin")
	if err != nil || len(files) == 0 {
		f.Fatalf("golden payloads: %v, %v", files, err)
	}
	for _, file := range files {
		f.Add(goldenPayload(f, filepath.Base(file)))
	}
	f.Add(testkit.Payload(f, 1, testkit.RemovedEvent(1, 1, 2), testkit.StoredEvent(1, 1, 3), testkit.StoredEvent(9, 4, 5), testkit.Event{"cleared": true}))
	f.Add(testkit.Payload(f, 1, testkit.Event{"as is": map[string]any{"type": "BlockStored", "block_hashes": []int64{-7}, "parent_block_hash": nil, "token_ids": []int{1, 2, 3, 4}, "block_size": 4, "lora_id": nil, "medium": "GPU", "cache_salt": "s", "session_id": "t", "lora_name": "l"}}))
	f.Add(testkit.Payload(f, 1, testkit.Event{"as is": []any{"BlockStored", []int64{-7}, nil, []int{1, 2, 3, 4}, 4, nil, "GPU", map[string]any{"cache_salt": "s", "more": 1}}}))
	f.Add(testkit.Payload(f, 1, testkit.Event{"as is": map[string]any{"type": "BlockStored", "block_hashes": []int64{-7}, "parent_block_hash": nil, "token_ids": []int{1, 2, 3, 4}, "block_size": 4, "medium": "GPU", "extra_keys": []any{[]any{[]any{"photo", -2}, []any{"sound", 1}, "salt"}}}}))
	f.Add(testkit.Payload(f, 1, testkit.Event{"as is": map[string]any{"type": "BlockStored", "block_hashes": []int64{-7}, "parent_block_hash": nil, "token_ids": [][]int{{1, 2}, {2, 3}, {3, 4}, {4, 5}}, "block_size": 4, "medium": "GPU"}}))
	group := func(kind string, index, window, size int, hashes ...uint64) testkit.Event {
		return testkit.Event{"as is": map[string]any{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": nil, "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8}, "block_size": size, "group_idx": index, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}}
	}
	f.Add(testkit.Payload(f, 1, group("sliding_window", 0, 5, 4, 12), group("full_attention", 1, 0, 4, 11, 12), group("mamba", 2, 0, 8), group("mamba", 2, 0, 4, 11)))
	f.Add(testkit.Payload(f, 1, group("sliding_window", 0, 5, 4, 12), group("sliding_window", 0, 1<<62, 4, 12), group("odd", 63, 0, 4, 11), group("full_attention", -1, 0, 1<<40, 11)))
	f.Add(testkit.Payload(f, 1, group("chunked_local_attention", 7, 8, 4, 11, 12), group("full_attention", 1, 0, 8, 12)))
	tier := func(medium string, e map[string]any) testkit.Event {
		e["type"], e["medium"] = "BlockStored", medium
		return testkit.Event{"as is": e}
	}
	f.Add(testkit.Payload(f, 1,
		tier("CPU", map[string]any{"block_hashes": testkit.BlockIDs(1, 1, 2), "parent_block_hash": testkit.BlockIDs(1, 0, 1)[0], "token_ids": testkit.PromptTokens(1, 2)[testkit.BlockSize:], "block_size": testkit.BlockSize}),
		tier("cpu", map[string]any{"block_hashes": []uint64{77}, "parent_block_hash": nil, "token_ids": []int{}, "block_size": 0}),
		tier("STORAGE", map[string]any{"block_hashes": []uint64{77, 77}, "parent_block_hash": 77, "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8}, "block_size": 4, "locality": "REMOTE", "ownership": "store"}),
		testkit.Event{"as is": map[string]any{"type": "BlockRemoved", "block_hashes": []uint64{77, 78}, "medium": "CPU"}}, testkit.Event{"cleared": true}))
	f.Add(testkit.Payload(f, 1, tier("CPU_PINNED", map[string]any{"block_hashes": []uint64{1, 2}, "parent_block_hash": 3, "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8}, "block_size": 4}), testkit.Event{"cleared": true},
		tier("EXTERNAL", map[string]any{"block_hashes": []uint64{5}, "parent_block_hash": nil, "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8}, "block_size": 8}), tier("TAPE", map[string]any{"block_hashes": []uint64{5}})))
	f.Add(append([]byte("\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xdc\x00\x40"), bytes.Repeat([]byte{0xc0}, 64)...))
	f.Add([]byte("\x92\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x91\x91\xb0AllBlocksCleared"))
	f.Fuzz(func(t *testing.T, payload []byte) {
		s, index, log := streamWith(good, payload, next)
		if err := index.Check(); err != nil {
			t.Fatal(err)
		}
		if n := index.LowerOf(testkit.EventWorker).Waiting; n > len(payload) {
			t.Errorf("%d blocks wait for their place, of a batch of %d bytes", n, len(payload))
		}
		if at, _, _, _, _, lower := s.History().held(); at.next > 0 && !lower.Empty() {
			another := radix.NewTree()
			for change := range lowerChanges(lower) {
				if _, err := another.Apply(testkit.EventWorker, change); err != nil {
					t.Error(err)
				}
			}
			if err := another.Check(); err != nil {
				t.Error(err)
			}
		}
		if n := bytes.Count([]byte(log.String()), []byte("\n")); n > 8 {
			t.Errorf("%d lines of log", n)
		}
		local := kv.HashBlocks(nil, testkit.PromptTokens(2, 1), testkit.BlockSize, "", "")
		// Groups that the batch has named may accept less than the first one holds.
		matches := index.Match(local, len(local), kv.AllParts, nil)
		held := slices.ContainsFunc(matches, func(m kv.Match) bool { return max(m.Blocks, int(m.Held)) == 1 })
		if layout := index.LayoutOf(testkit.EventWorker); !held && len(layout.Groups) == 0 && !layout.DropsLast {
			t.Errorf("the next batch is not in the index; log:\n%s", log)
		}
		if kept := s.History().blocks; kept > loggedBlocks {
			t.Errorf("%d blocks are kept", kept)
		}
	})
}

// FuzzEventsAnswer takes over whatever another router answers.
func FuzzEventsAnswer(f *testing.F) {
	s, _, _ := streamWith(testkit.Payload(f, 1, testkit.StoredEvent(1, 0, 3), testkit.StoredEvent(2, 0, 2)), testkit.Payload(f, 1, testkit.RemovedEvent(2, 1, 2), testkit.Event{"cleared": true}, testkit.StoredEvent(3, 0, 1)))
	zero := uint64(0)
	for _, start := range []*uint64{nil, &zero} {
		answer := s.History().Query(start, nil, &zero)
		var text bytes.Buffer
		if err := answer.Write(&text); err != nil {
			f.Fatal(err)
		}
		f.Add(text.Bytes())
	}
	for _, text := range []string{
		`{"kind":"tree_dump","last_event_id":18446744073709551615,"last_digest":1,"events":[{"data":{"stored":{"parent_hash":5,"blocks":[{"block_hash":5}]}}}]}`,
		`{"kind":"events","last_event_id":1,"last_digest":1,"events":[{},{},{"data":{"removed":[1,2]}},{"data":{"cleared":true}}]}`,
		`{"kind":"events","last_event_id":1,"last_digest":1,"events":[{"data":{"lower":{"tier":"host","stored":{"parent_hash":7,"blocks":[{"block_hash":5,"tokens_hash":6}]}}}},{"data":{"cleared":true,"kept":"lower"}},{"data":{"lower":{"tier":"disk","shared":true,"store":"s","held":[5,7]}}},{"data":{"lower":{"tier":"disk","removed":[5]}}},{"data":{"lower":{"set_chunk":4}}},{"data":{"lower":{"chunk":-1,"doubtful":true,"stores":["s","t"]}}},{"data":{"lower":{"settled":false}}}]}`,
		`{"events":null}`, `{"events":{}}`, `[]`, `{"kind":"events","x":{"y":[1]},"events":[`, ``,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		answer, err := readAnswer(bytes.NewReader(text))
		if err != nil || answer.Last == nil || answer.LastDigest == nil {
			return // askPeers does not take it
		}
		s, index, _ := streamWith(testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 3)))
		if !s.take(answer) {
			s.forget("it does not fit")
		}
		if err := index.Check(); err != nil {
			t.Fatal(err)
		}
	})
}
