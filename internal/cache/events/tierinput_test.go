package events

import (
	"bytes"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// in returns an event with a field more, or changed.
func in(e testkit.Event, key string, value any) testkit.Event {
	e[key] = value
	return e
}

// hashOnly is a store event as vLLM sends it by default.
func hashOnly(medium string, hashes []uint64) testkit.Event {
	return testkit.Event{"stored": hashes, "tokens": []int{}, "block_size": 0, "medium": medium}
}

// chunk is a store event of the host, of blocks that vLLM has in one chunk.
func chunk(number, from, to int) testkit.Event {
	return in(testkit.StoredEvent(number, from, to), "medium", "CPU")
}

// Tier events in every order and shape: what the prompt 1 of 6 blocks matches, and what is
// counted.
func TestTierEvents(t *testing.T) {
	device, off := testkit.StoredEvent, testkit.RemovedEvent
	cpuOff := func(number, from, to int) testkit.Event { return in(off(number, from, to), "medium", "CPU") }
	cleared := testkit.Event{"cleared": true}
	// many also takes ranges of blocks that are stored on the host, each in an event.
	type cpu [3]int
	many := func(events ...any) (all []testkit.Event) {
		for _, e := range events {
			if blocks, ok := e.(cpu); ok {
				for i := blocks[1]; i < blocks[2]; i++ {
					all = append(all, chunk(blocks[0], i, i+1))
				}
				continue
			}
			all = append(all, e.(testkit.Event))
		}
		return all
	}
	for _, c := range []struct {
		name    string
		events  []testkit.Event
		want    string // device blocks, lower ones
		waiting int
		counts  map[string]uint64
	}{
		{"on both", many(device(1, 0, 6), cpu{1, 0, 6}), "6 {0 0 0}", 0, nil},
		{"evicted from the device", many(device(1, 0, 6), cpu{1, 0, 6}, off(1, 2, 6)), "2 {4 0 0}", 0, nil},
		{"in lower case", many(device(1, 0, 6), in(chunk(1, 0, 6), "medium", "cpu"), off(1, 0, 6)), "0 {6 0 0}", 0, nil},
		{"the device by another name", many(in(device(1, 0, 2), "medium", "device"), in(device(1, 2, 4), "medium", "gpu")), "4 {0 0 0}", 0, nil},
		{"media unknown", many(device(1, 0, 2), in(chunk(1, 2, 6), "medium", "TAPE")), "2 {0 0 0}", 0, map[string]uint64{"unknown_media": 1, "ignored": 1}},
		{"the device of another process", many(device(1, 0, 2), in(device(1, 2, 6), "locality", "REMOTE")), "2 {0 0 0}", 0, map[string]uint64{"unknown_media": 1}},
		{"children before parents", many(cpu{1, 5, 6}, cpu{1, 3, 4}, cpu{1, 4, 5}, cpu{1, 2, 3}, cpu{1, 1, 2}, device(1, 0, 1)), "1 {5 0 0}", 0, nil},
		{"the first block waits for its hash", many(cpu{1, 1, 6}, cpu{1, 0, 1}), "0 {0 0 0}", 6, nil},
		{"and gets it", many(cpu{1, 1, 6}, cpu{1, 0, 1}, device(1, 0, 1), off(1, 0, 1)), "0 {6 0 0}", 0, nil},
		{"hashes before the device", many(hashOnly("CPU", testkit.BlockIDs(1, 0, 6)), device(1, 0, 6), off(1, 0, 6)), "0 {6 0 0}", 0, nil},
		{"hashes after it", many(device(1, 0, 6), hashOnly("STORAGE", testkit.BlockIDs(1, 0, 6)), off(1, 0, 6)), "0 {0 6 0} doubtful", 0, nil},
		{"hashes from tier to tier", many(device(1, 0, 6), hashOnly("CPU", testkit.BlockIDs(1, 0, 6)), off(1, 0, 6), hashOnly("STORAGE", testkit.BlockIDs(1, 0, 6)), cpuOff(1, 1, 3)), "0 {4 2 0} doubtful", 0, nil},
		{"hashes after the last tier has gone", many(device(1, 0, 6), off(1, 0, 6), hashOnly("CPU", testkit.BlockIDs(1, 0, 6))), "0 {0 0 0}", 6, nil},
		{"a hole on the device", many(device(1, 0, 6), cpu{1, 2, 4}, off(1, 1, 4)), "1 {0 0 0}", 0, nil},
		{"never back to the device", many(device(1, 0, 6), cpu{1, 1, 4}, off(1, 1, 4)), "1 {3 0 0}", 0, nil},
		{"unknown removed", many(device(1, 0, 2), cpuOff(1, 0, 2)), "2 {0 0 0}", 0, map[string]uint64{"cold": 0, "unknown_removed": 0}},
		{"removed twice", many(device(1, 0, 6), cpu{1, 0, 6}, off(1, 0, 6), cpuOff(1, 5, 6), cpuOff(1, 5, 6)), "0 {5 0 0}", 0, nil},
		{"removed while it waits", many(cpu{1, 1, 6}, cpuOff(1, 5, 6), device(1, 0, 1)), "1 {4 0 0}", 0, nil},
		{"stored twice, removed once", many(device(1, 0, 6), cpu{1, 0, 6}, cpu{1, 0, 6}, off(1, 0, 6), cpuOff(1, 0, 6)), "0 {6 0 0}", 0, nil},
		{"a chunk of three", many(device(1, 0, 6), chunk(1, 0, 3), chunk(1, 3, 6), off(1, 0, 6)), "0 {6 0 0}", 0, nil},
		{"a chunk half gone", many(device(1, 0, 6), chunk(1, 0, 3), chunk(1, 3, 6), off(1, 0, 6), cpuOff(1, 4, 5)), "0 {3 0 0}", 0, nil},
		{"the device ends in a chunk", many(device(1, 0, 6), chunk(1, 0, 3), chunk(1, 3, 6), off(1, 2, 6)), "2 {4 0 0}", 0, nil},
		{"less than a chunk", many(device(1, 0, 6), chunk(1, 0, 3), off(1, 1, 6)), "1 {0 0 0}", 0, nil},
		{"tokens do not fit", many(device(1, 0, 2), in(chunk(1, 2, 6), "block_size", 2*testkit.BlockSize)), "2 {0 0 0}", 0, map[string]uint64{"invalid_stored": 1, "cold": 0}},
		{"no block size", many(device(1, 0, 2), in(chunk(1, 2, 6), "block_size", 0)), "2 {0 0 0}", 0, map[string]uint64{"invalid_stored": 1, "cold": 0}},
		{"a block size below zero", many(device(1, 0, 2), in(chunk(1, 2, 6), "block_size", -testkit.BlockSize)), "2 {0 0 0}", 0, map[string]uint64{"invalid_stored": 1}},
		{"no multiple", many(device(1, 0, 2), in(chunk(1, 2, 6), "block_size", testkit.BlockSize+1)), "2 {0 0 0}", 0, map[string]uint64{"invalid_stored": 1}},
		{"its own parent", many(device(1, 0, 2), in(chunk(1, 2, 3), "parent", testkit.BlockIDs(1, 2, 3)[0])), "2 {0 0 0}", 0, map[string]uint64{"cold": 0}},
		{"blocks of two, chunks of another engine's hashes", many(in(in(testkit.StoredEvent(1, 0, 6), "medium", "CPU"), "block_size", 2*testkit.BlockSize), device(2, 0, 1)), "0 {0 0 0}", 0, map[string]uint64{"invalid_stored": 1}},
		{"a reset in the middle", many(device(1, 0, 6), cpu{1, 0, 6}, cleared, device(1, 0, 2)), "2 {4 0 0} doubtful", 0, nil},
		{"stored again after a reset", many(device(1, 0, 6), cpu{1, 0, 6}, cleared, cpu{1, 0, 6}, cpuOff(1, 0, 6)), "0 {0 0 0}", 0, nil},
		{"a reset of SGLang", many(device(1, 0, 6), in(chunk(1, 0, 6), "medium", "CPU_PINNED"), in(chunk(1, 0, 4), "medium", "DISK"), cleared), "0 {0 4 0} doubtful", 0, nil},
		{"a reset with nothing below", many(device(1, 0, 6), cleared), "0 {0 0 0}", 0, map[string]uint64{"cold": 0}},
		{"something broken on the device", many(device(1, 0, 6), cpu{1, 0, 6}, testkit.Event{}), "0 {0 0 0}", 0, map[string]uint64{"cold": 1}},
		{"another group", many(device(1, 0, 2), in(chunk(1, 2, 6), "group_idx", 1)), "2 {0 0 0}", 0, nil},
		{"several groups", many(in(in(device(1, 0, 6), "group_idx", 0), "kv_cache_spec_kind", "full_attention"), in(in(in(device(1, 0, 6), "group_idx", 1), "kv_cache_spec_kind", "sliding_window"), "kv_cache_spec_sliding_window", 100),
			in(chunk(1, 0, 6), "group_idx", 0), off(1, 2, 6)), "2 {0 0 0}", 0, map[string]uint64{"ignored": 1}},
	} {
		for _, together := range []bool{true, false} {
			t.Run(fmt.Sprint(c.name, together), func(t *testing.T) {
				var payloads [][]byte
				if together {
					payloads = append(payloads, testkit.Payload(t, 1, clones(c.events)...))
				} else {
					for _, e := range c.events {
						payloads = append(payloads, testkit.Payload(t, 1, clones([]testkit.Event{e})...))
					}
				}
				s, index, log := streamWith(payloads...)
				if err := index.Check(); err != nil {
					t.Fatal(err)
				}
				local := kv.HashBlocks(nil, testkit.PromptTokens(1, 6), testkit.BlockSize, "", "")
				got := "0 {0 0 0}"
				for _, m := range index.Match(local, len(local), kv.AllParts, nil) {
					if got = fmt.Sprint(m.Blocks, " ", m.Lower); m.Doubtful() {
						got += " doubtful"
					}
				}
				if got != c.want {
					t.Errorf("matches %s, want %s; log:\n%s", got, c.want, log)
				}
				if waiting := index.LowerOf(testkit.EventWorker).Waiting; waiting != c.waiting {
					t.Errorf("%d blocks wait, want %d", waiting, c.waiting)
				}
				counts := s.Stats().Counts()
				counts["cold"] = 0
				if s.Stats().Cold.Load() {
					counts["cold"] = 1
				}
				for name, want := range c.counts {
					if counts[name] != want {
						t.Errorf("%s is %d, want %d", name, counts[name], want)
					}
				}
				if lines := bytes.Count([]byte(log.String()), []byte("\n")); lines > 3 {
					t.Errorf("%d lines of log:\n%s", lines, log)
				}
			})
		}
	}
}

func clones(events []testkit.Event) []testkit.Event {
	all := slices.Clone(events)
	for i, e := range all {
		all[i] = testkit.Event{}
		for key, value := range e {
			all[i][key] = value
		}
	}
	return all
}

// vLLM's events of lower tiers lack the salt that is in the hash.
func TestTiersKeepSaltsApart(t *testing.T) {
	salted := in(testkit.StoredEvent(1, 0, 3), "extra_keys", []any{[]any{"pepper"}, nil, nil})
	for name, below := range map[string]testkit.Event{"self-describing": chunk(1, 0, 3), "hashes": hashOnly("CPU", testkit.BlockIDs(1, 0, 3))} {
		for _, first := range []bool{true, false} {
			events := []testkit.Event{salted, below}
			if first {
				slices.Reverse(events)
			}
			_, index, _ := streamWith(testkit.Payload(t, 1, clones(append(events, testkit.RemovedEvent(1, 0, 3)))...))
			for salt, want := range map[string]int{"": 0, "pepper": 3} {
				local := kv.HashBlocks(nil, testkit.PromptTokens(1, 3), testkit.BlockSize, "", salt)
				got := 0
				for _, m := range index.Match(local, len(local), kv.AllParts, nil) {
					got = m.Lower.Total()
				}
				if got != want {
					t.Errorf("%s, before the device %v: %d blocks with salt %q, want %d", name, first, got, salt, want)
				}
			}
		}
	}
}

// Nor do they name media: the device puts such a block to its place.
func TestTiersFollowTheDevice(t *testing.T) {
	media := in(testkit.StoredEvent(1, 1, 2), "extra_keys", []any{[]any{[]any{"photo", 0}}})
	_, index, _ := streamWith(testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 1), chunk(1, 1, 2), media, testkit.RemovedEvent(1, 1, 2)))
	if err := index.Check(); err != nil {
		t.Fatal(err)
	}
	words := [][]uint64{nil, kv.MediaWords(nil, []kv.Media{{Hash: kv.MediaHash("photo")}})}
	for name, local := range map[string][]uint64{
		"text":  kv.HashBlocks(nil, testkit.PromptTokens(1, 2), testkit.BlockSize, "", ""),
		"media": kv.HashMediaBlocks(nil, testkit.PromptTokens(1, 2), testkit.BlockSize, "", "", words),
	} {
		want := map[string]int{"text": 0, "media": 1}[name]
		if m := index.Match(local, 2, kv.AllParts, nil); len(m) != 1 || m[0].Blocks != 1 || m[0].Lower.Total() != want {
			t.Errorf("%s: %+v, want 1 block and %d lower", name, m, want)
		}
	}
}

// What a log keeps of tiers is bounded, and hashes that come one by one are together.
func TestLogOfTiersIsBounded(t *testing.T) {
	s, _, _ := streamWith(testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 6)))
	off := make([]testkit.Event, 1000)
	for i := range off {
		off[i] = in(testkit.Event{"removed": []uint64{uint64(i)}}, "medium", "CPU")
	}
	s.Apply(1, testkit.Payload(t, 1, off...), true)
	if n := len(s.History().newest().changes); n != 1 {
		t.Errorf("%d events for removals in one tier", n)
	}
	stores := make([]testkit.Event, 5000)
	for i := range stores {
		stores[i] = in(testkit.Event{"stored": []uint64{uint64(i) + 1}, "parent": uint64(i) + 2, "tokens": []int{1, 2, 3, 4}, "block_size": 4}, "medium", "CPU")
	}
	kept := 0
	for seq := range uint64(20) {
		s.Apply(2+seq, testkit.Payload(t, 1, clones(stores)...), true)
	}
	for _, b := range s.History().batches {
		kept += len(b.changes)
	}
	if blocks := s.History().blocks; blocks > loggedBlocks || kept > loggedBlocks/loggedLower || kept < 5000 {
		t.Errorf("%d events with %d blocks are kept", kept, blocks)
	}
}

// What is in a store is there for all that read it.
func TestStoresAreReadByAllThatNameThem(t *testing.T) {
	index := radix.NewTree()
	streams := map[uint64]*Stream{}
	for _, id := range []uint64{1, 2, 3} {
		streams[id] = NewStream(Source{Worker: kv.WorkerKey{Worker: id}, BlockSize: testkit.BlockSize}, index, Options{}, slog.New(slog.DiscardHandler))
		streams[id].Begin(0)
	}
	stored := func(locality, store string, number, from, to int) testkit.Event {
		e := in(in(testkit.StoredEvent(number, from, to), "medium", "STORAGE"), "locality", locality)
		if store != "" {
			e["ownership"] = store
		}
		return e
	}
	holds := func(when string, want map[uint64]int) {
		t.Helper()
		local := kv.HashBlocks(nil, testkit.PromptTokens(1, 6), testkit.BlockSize, "", "")
		got := map[uint64]int{}
		for _, m := range index.Match(local, len(local), kv.AllParts, nil) {
			got[m.Worker.Worker] = m.Blocks + m.Lower.Total()
		}
		testkit.WantEqual(t, when, got, want)
		if err := index.Check(); err != nil {
			t.Fatal(err)
		}
	}
	first := []testkit.Event{testkit.StoredEvent(1, 0, 6), stored("REMOTE", "", 1, 0, 6), testkit.RemovedEvent(1, 0, 6)}
	streams[1].Apply(0, testkit.Payload(t, 1, first...), true)
	holds("the first has stored", map[uint64]int{1: 6})
	streams[2].Apply(0, testkit.Payload(t, 1, testkit.StoredEvent(2, 0, 1), stored("REMOTE", "", 2, 0, 1)), true)
	streams[3].Apply(0, testkit.Payload(t, 1, testkit.StoredEvent(2, 0, 1), stored("REMOTE", "other", 2, 0, 1), stored("LOCAL", "", 2, 0, 1)), true)
	holds("the second has named it, the third another", map[uint64]int{1: 6, 2: 6})
	radixtest.Forget(index, 1)
	holds("the first is gone", map[uint64]int{2: 6})
	streams[2].Apply(1, testkit.Payload(t, 1, in(in(testkit.RemovedEvent(1, 4, 6), "medium", "STORAGE"), "locality", "REMOTE")), true)
	holds("the store has removed", map[uint64]int{2: 4})
	second := kv.WorkerKey{Worker: 2}
	radixtest.StoreLower(index, second, radix.LowerTier{Tier: kv.Host}, 0, false, []kv.StoredBlock{{Engine: 9, Local: 9}})
	radixtest.ClearDevice(index, second)
	holds("the device is cleared", map[uint64]int{2: 4})
	radixtest.Settle(index, second, index.LowerOf(second).Doubt, false)
	holds("an answer has found nothing", map[uint64]int{})
}
