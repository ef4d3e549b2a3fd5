package events

import (
	"fmt"
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// fuzzKinds are the kinds of group that FuzzGroupEvents draws: with windows that are no
// windows, and kinds that no version has.
var fuzzKinds = []struct {
	kind   string
	window uint64
}{
	{"full_attention", 0}, {"sliding_window", 5}, {"sliding_window", 9}, {"mamba", 0}, {"chunked_local_attention", 0},
	{"sliding_window", 0}, {"sliding_window", 1 << 63}, {"sliding_window", 1 << 31}, {"odd", 3}, {"mla_attention", 1 << 63},
}

// engineGroups are what the groups of an engine hold: copies by group and hash.
type engineGroups map[int]map[uint64]int

// accepts reports whether a group lets a request find so many leading blocks of the prompt
// with these hashes, by vLLM's rule. Blocks have testkit.BlockSize tokens.
func (e engineGroups) accepts(g kv.CacheGroup, prompt []uint64, blocks int) bool {
	first := 0
	switch g.Attention {
	case kv.SlidingWindow:
		first = max(0, blocks-max(1, (g.Window-1+g.Block-1)/g.Block))
	case kv.State:
		first = blocks - 1
	}
	return !slices.ContainsFunc(prompt[first:blocks], func(hash uint64) bool { return e[g.Index][hash] == 0 })
}

// FuzzGroupEvents applies the events of an engine with several groups: stores that leave out
// blocks, removals, odd kinds and windows. Whatever the index then promises, each group that
// it follows accepts; groups that it does not follow are counted.
func FuzzGroupEvents(f *testing.F) {
	f.Add([]byte{0, 1, 0x03, 0x00, 0xff, 0x13, 0x00, 0xf0, 0x13, 0x80, 0x20})
	f.Add([]byte{1, 0, 0x03, 0x00, 0xff, 0x13, 0x00, 0x3f, 0x03, 0x80, 0x01, 0x07, 0x40, 0x0f})
	f.Add([]byte{3, 0, 2, 0x03, 0x00, 0xff, 0x13, 0x00, 0x3f, 0x23, 0x80, 0x01, 0x07, 0x40, 0x0f})
	f.Add([]byte{6, 0, 5, 0x23, 0x00, 0xff, 0x13, 0x40, 0x3f, 0x03, 0x00, 0x01})
	f.Add([]byte{8, 0, 4, 0x23, 0x00, 0xff, 0x13, 0xc0, 0x3f, 0x03, 0x00, 0x01})
	f.Add([]byte("\x00q4\x00\xaf\xfcE\xa7\xa4q]\x9f\xa7\xa4q]\x9f\x1c2\\\x05"))
	f.Fuzz(func(t *testing.T, script []byte) {
		const groups, blocks, prompts = 3, 8, 3
		if len(script) < groups || len(script) > 300 {
			return
		}
		kinds := script[:groups]
		engine := engineGroups{}
		ids := map[int][]uint64{}
		for p := range prompts {
			ids[p] = testkit.BlockIDs(p+1, 0, blocks)
		}
		var batches [][]byte
		// Each three bytes are an event: its group and prompt; whether it stores, removes or
		// ends the batch; and the blocks that it is about.
		var events []testkit.Event
		flush := func() {
			batches = append(batches, testkit.Payload(t, 1, events...))
			events = nil
		}
		odd := map[int]bool{}
		for at := script[groups:]; len(at) >= 3; at = at[3:] {
			group, prompt, mask := int(at[0]>>4)%groups, int(at[0])%prompts, at[2]
			kind := fuzzKinds[int(kinds[group])%len(fuzzKinds)]
			if engine[group] == nil {
				engine[group] = map[uint64]int{}
			}
			var kept []uint64
			if kind.kind == "full_attention" || kind.kind == "mla_attention" { // all, up to some block
				kept = slices.Clone(ids[prompt][:mask%(blocks+1)])
			} else {
				for i, id := range ids[prompt] {
					if mask>>i&1 != 0 {
						kept = append(kept, id)
					}
				}
			}
			switch at[1] >> 6 {
			case 0, 1:
				e := testkit.StoredEvent(prompt+1, 0, blocks)
				if kind.kind == "full_attention" || kind.kind == "mla_attention" {
					e = testkit.StoredEvent(prompt+1, 0, max(1, len(kept)))
				}
				e["stored"], e["group_idx"], e["kv_cache_spec_kind"] = kept, group, kind.kind
				if len(kept) == 0 {
					e["stored"] = []uint64{}
				}
				if kind.window > 0 {
					e["kv_cache_spec_sliding_window"] = kind.window
				}
				events = append(events, e)
				for _, id := range kept {
					engine[group][id]++
				}
				_, known := kv.AttentionOf(kind.kind)
				odd[group] = odd[group] || !known
			case 2:
				e := testkit.Event{"removed": kept, "group_idx": group}
				if len(kept) == 0 {
					e["removed"] = []uint64{}
				}
				events = append(events, e)
				for _, id := range kept {
					engine[group][id] = max(0, engine[group][id]-1)
				}
			case 3:
				flush()
			}
		}
		flush()
		s, index, log := streamWith(batches...)
		if err := index.Check(); err != nil {
			t.Fatal(err)
		}
		layout := index.LayoutOf(testkit.EventWorker)
		if len(layout.Groups) == 0 {
			layout = s.Stats().Layout()
		}
		for group := range odd {
			if odd[group] && s.Stats().UnknownGroups.Load() == 0 {
				t.Errorf("group %d is passed over, and no count says so", group)
			}
			if odd[group] && slices.ContainsFunc(layout.Groups, func(g kv.CacheGroup) bool { return g.Index == group }) {
				t.Errorf("%s has group %d of an odd kind", layout, group)
			}
		}
		if len(layout.Groups) == 0 || layout.Groups[0].Attention != kv.FullAttention {
			return // hashes without tokens of their own: their places are tested with keptBlocks
		}
		for p := range prompts {
			local := kv.HashBlocks(nil, testkit.PromptTokens(p+1, blocks), testkit.BlockSize, "", "")
			for _, m := range index.Match(local, blocks, kv.AllParts, nil) {
				for _, g := range layout.Groups {
					if m.Blocks > 0 && !engine.accepts(g, ids[p], m.Blocks) {
						t.Fatalf("%s: prompt %d: %+v, which group %d does not accept; it holds %s; log:\n%s", layout, p, m, g.Index, fmt.Sprint(engine[g.Index]), log)
					}
				}
			}
		}
	})
}
