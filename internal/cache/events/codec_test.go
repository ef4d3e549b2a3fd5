package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// goldenBatch is what a reader must find in one golden payload; see
// testdata/generate.py.
type goldenBatch struct {
	File   string        `json:"file"`
	Rank   *int          `json:"rank"`
	Events []goldenEvent `json:"events"`
}

type goldenEvent struct {
	Type      string   `json:"type"`
	Hashes    []string `json:"hashes"`
	Parent    string   `json:"parent"`
	Tokens    []uint32 `json:"tokens"`
	BlockSize int      `json:"block_size"`
	LoRA      string   `json:"lora"`
	Medium    string   `json:"medium"`
	Kind      string   `json:"kind"`
}

func TestEventDecoderReadsWhatVLLMWrites(t *testing.T) {
	var golden []goldenBatch
	raw, err := os.ReadFile("testdata/golden.json")
	if err == nil {
		err = json.Unmarshal(raw, &golden)
	}
	if err != nil {
		t.Fatal(err)
	}
	d := newBatchDecoder()
	for _, g := range golden {
		t.Run(strings.TrimSuffix(g.File, ".bin"), func(t *testing.T) {
			ts, err := d.start(goldenPayload(t, g.File))
			if err != nil {
				t.Fatal(err)
			}
			if ts != 1700000000.5 {
				t.Errorf("time stamp %v", ts)
			}
			got := []goldenEvent{}
			for d.more() {
				e, err := d.next()
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, asGolden(e))
			}
			if diff := cmp.Diff(g.Events, got); diff != "" {
				t.Errorf("events differ (-want +got):\n%s", diff)
			}
			rank, ok := d.rank()
			if ok != (g.Rank != nil) || ok && rank != *g.Rank {
				t.Errorf("rank %d, %v", rank, ok)
			}
		})
	}
}

func asGolden(e *kvEvent) goldenEvent {
	g := goldenEvent{
		Type: string(e.tag), BlockSize: e.blockSize, LoRA: string(e.lora),
		Medium: string(e.medium), Kind: string(e.specKind), Tokens: append([]uint32(nil), e.tokens...),
	}
	for _, h := range e.hashes {
		g.Hashes = append(g.Hashes, strconv.FormatUint(h, 10))
	}
	if e.hasParent {
		g.Parent = strconv.FormatUint(e.parent, 10)
	}
	return g
}

// The hashes that a lookup computes must be those of the stored blocks, and
// only for the same adapter, salt and plain text.
func TestExtraKeysKeepBlocksOfDifferentOwnersApart(t *testing.T) {
	two, one := []uint32{0, 1, 2, 3, 4, 5, 6, 7}, []uint32{0, 1, 2, 3}
	for _, shape := range []string{"map", "array"} {
		d := newBatchDecoder()
		if _, err := d.start(goldenPayload(t, shape+"_extra_keys.bin")); err != nil {
			t.Fatal(err)
		}
		var got [][]uint64
		for d.more() {
			e, err := d.next()
			if err != nil {
				t.Fatal(err)
			}
			blocks, err := d.blocks(nil, e, 1)
			if err != nil {
				t.Fatal(err)
			}
			var local []uint64
			for _, b := range blocks {
				local = append(local, b.Local)
			}
			got = append(got, local)
		}
		plain := kv.HashBlocks(nil, two, 4, "", "")
		testkit.WantEqual(t, shape+": salted", got[0], kv.HashBlocks(nil, two, 4, "", "s0"))
		testkit.WantEqual(t, shape+": adapter and salt", got[1], kv.HashBlocks(nil, two, 4, "sql", "s0"))
		testkit.WantEqual(t, shape+": before the image", got[2][0], plain[0])
		distinct := map[uint64]string{plain[0]: "plain", plain[1]: "plain"}
		for _, c := range []struct {
			name string
			hash uint64
		}{
			{"image, as a pair", got[2][1]}, {"image, as a string", got[3][0]}, {"embeddings", got[4][0]}, {"numbered adapter", got[5][0]},
			{"salt alone", kv.HashBlocks(nil, one, 4, "", "s0")[0]}, {"adapter of that number as name", kv.HashBlocks(nil, one, 4, "3", "")[0]},
		} {
			if other, taken := distinct[c.hash]; taken {
				t.Errorf("%s: %s has the hash of %s", shape, c.name, other)
			}
			distinct[c.hash] = c.name
		}
	}
}

// SGLang reports a prompt's salt with each of its events, as maps without the fields
// that are not set, up to 0.5.19 as arrays that end with a map.
func TestSGLangTellsTheSaltWithEveryEvent(t *testing.T) {
	prompt := []uint32{0, 1, 2, 3, 4, 5, 6, 7}
	stored := func(parent any, hash int, tokens []uint32, more map[string]any) any {
		if metadata, older := more["metadata"]; older {
			return []any{"BlockStored", []int{hash}, parent, tokens, 4, nil, "GPU", metadata}
		}
		e := map[string]any{"type": "BlockStored", "block_hashes": []int{hash}, "parent_block_hash": parent, "token_ids": tokens, "block_size": 4, "lora_id": nil, "medium": "GPU"}
		for key, v := range more {
			e[key] = v
		}
		return e
	}
	for name, c := range map[string]struct {
		more       map[string]any
		lora, salt string
	}{
		"plain":            {nil, "", ""},
		"session":          {map[string]any{"session_id": "s0"}, "", ""},
		"salt":             {map[string]any{"cache_salt": "s0"}, "", "s0"},
		"empty salt":       {map[string]any{"cache_salt": ""}, "", ""},
		"adapter and salt": {map[string]any{"cache_salt": "s0", "lora_name": "sql"}, "sql", "s0"},
		"older, salt":      {map[string]any{"metadata": map[string]any{"more": 1, "cache_salt": "s0"}}, "", "s0"},
		"older, plain":     {map[string]any{"metadata": nil}, "", ""},
	} {
		payload, err := msgpack.Marshal([]any{1.5, []any{stored(nil, -7, prompt[:4], c.more), stored(-7, 8, prompt[4:8], c.more)}, 0})
		if err != nil {
			t.Fatal(err)
		}
		d := newBatchDecoder()
		if _, err := d.start(payload); err != nil {
			t.Fatal(err)
		}
		var local []uint64
		for d.more() {
			e, err := d.next()
			if err != nil {
				t.Fatal(name, err)
			}
			blocks, err := d.blocks(nil, e, 1)
			if err != nil {
				t.Fatal(name, err)
			}
			local = append(local, blocks[0].Local)
		}
		testkit.WantEqual(t, name, local, kv.HashBlocks(nil, prompt, 4, c.lora, c.salt))
	}
}

// With EAGLE, SGLang sends each token in a pair with the next one.
func TestSGLangBlocksWithPairsDependOnTheTokenBehindThem(t *testing.T) {
	prompt := []uint32{0, 1, 2, 3, 4, 5, 6, 7, 300000}
	pairs := func(from, to int) (list [][]uint32) {
		for i := from; i < to; i++ {
			list = append(list, prompt[i:i+2])
		}
		return list
	}
	want := kv.HashLookaheadBlocks(nil, prompt, 4, 1, "", "", nil)
	for name, c := range map[string]struct {
		hashes []int
		tokens any
		want   []uint64
		err    string
	}{
		"two blocks":        {[]int{7, 8}, pairs(0, 8), want, ""},
		"one block":         {[]int{7}, pairs(0, 4), want[:1], ""},
		"its token":         {[]int{7}, append(pairs(0, 3), []uint32{3, 9}), kv.HashLookaheadBlocks(nil, []uint32{0, 1, 2, 3, 9}, 4, 1, "", "", nil), ""},
		"none":              {[]int{}, []int{}, nil, ""},
		"a pair too few":    {[]int{7, 8}, pairs(0, 7), nil, "7 tokens for 2 blocks of 4"},
		"a gap":             {[]int{7}, append(pairs(0, 3), []uint32{4, 5}), nil, "begins with 4, the one before ends with 3"},
		"a triple":          {[]int{7}, append(pairs(0, 3), []uint32{3, 4, 5}), nil, "token 3 is not in a pair"},
		"a pair, then one":  {[]int{7}, []any{[]int{0, 1}, 1, 2, 3}, nil, "token 1 is not in a pair"},
		"one, then a pair":  {[]int{7}, []any{0, []int{1, 2}, 2, 3}, nil, "token_ids"},
		"a pair of nothing": {[]int{7}, []any{[]any{nil, 1}}, nil, "nil, want a token id"},
	} {
		t.Run(name, func(t *testing.T) {
			e := map[string]any{"type": "BlockStored", "block_hashes": c.hashes, "parent_block_hash": nil, "token_ids": c.tokens, "block_size": 4}
			payload, err := msgpack.Marshal([]any{1.5, []any{e}, 0})
			if err != nil {
				t.Fatal(err)
			}
			d := newBatchDecoder()
			if _, err := d.start(payload); err != nil {
				t.Fatal(err)
			}
			var local []uint64
			event, err := d.next()
			if err == nil {
				var blocks []kv.StoredBlock
				blocks, err = d.blocks(nil, event, 1)
				for _, b := range blocks {
					local = append(local, b.Local)
				}
			}
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			testkit.WantEqual(t, "local hashes", local, c.want)
		})
	}
}

func TestEventDecoderStepsOverBadEvents(t *testing.T) {
	good := map[string]any{"type": "BlockRemoved", "block_hashes": []int{7}, "medium": "GPU"}
	changed := func(change map[string]any) map[string]any {
		e := map[string]any{"type": "BlockStored", "block_hashes": []int{1}, "parent_block_hash": nil, "token_ids": []int{1, 2}, "block_size": 2}
		for k, v := range change {
			e[k] = v
		}
		return e
	}
	for name, c := range map[string]struct {
		event any
		kind  eventKind
	}{
		"number":             {3, eventUnknown},
		"nil":                {nil, eventUnknown},
		"empty array":        {[]int{}, eventUnknown},
		"no type":            {map[string]any{"block_hashes": []int{1}}, eventUnknown},
		"type is a number":   {map[string]any{"type": 3}, eventUnknown},
		"hashes nil":         {changed(map[string]any{"block_hashes": nil}), eventStored},
		"hash nil":           {changed(map[string]any{"block_hashes": []any{nil}}), eventStored},
		"hash is a float":    {changed(map[string]any{"block_hashes": []float64{1.5}}), eventStored},
		"hash of no bytes":   {changed(map[string]any{"block_hashes": []any{[]byte{}}}), eventStored},
		"token nil":          {changed(map[string]any{"token_ids": []any{1, nil}}), eventStored},
		"token negative":     {changed(map[string]any{"token_ids": []int{1, -2}}), eventStored},
		"tokens too few":     {changed(map[string]any{"token_ids": []int{1}}), eventStored},
		"block size nil":     {changed(map[string]any{"block_size": nil}), eventStored},
		"block size zero":    {changed(map[string]any{"block_size": 0}), eventStored},
		"block size huge":    {changed(map[string]any{"block_size": int64(1) << 62}), eventStored},
		"extra keys too few": {changed(map[string]any{"extra_keys": []any{}, "block_hashes": []int{1, 2}}), eventStored},
		"extra keys a map":   {changed(map[string]any{"extra_keys": []any{map[string]int{"a": 1}}}), eventStored},
		"removed nil":        {map[string]any{"type": "BlockRemoved", "block_hashes": nil}, eventRemoved},
		"field name a list":  {map[any]any{"type": "BlockStored", [1]int{1}: 2}, eventStored},
	} {
		t.Run(name, func(t *testing.T) {
			payload, err := msgpack.Marshal([]any{1.5, []any{good, c.event, good}, 0})
			if err != nil {
				t.Fatal(err)
			}
			d := newBatchDecoder()
			if _, err := d.start(payload); err != nil {
				t.Fatal(err)
			}
			for i := 0; d.more(); i++ {
				e, err := d.next()
				if err == nil && e.kind == eventStored {
					_, err = d.blocks(nil, e, 1)
				}
				switch {
				case i == 1 && (err == nil || errors.Is(err, errBrokenPayload)):
					t.Errorf("bad event: %v", err)
				case i == 1 && e.kind != c.kind && name != "field name a list":
					t.Errorf("bad event has kind %d, want %d", e.kind, c.kind)
				case i != 1 && (err != nil || len(e.hashes) != 1 || e.hashes[0] != 7):
					t.Errorf("good event %d: %v, %v", i, e.hashes, err)
				}
			}
			if rank, ok := d.rank(); !ok || rank != 0 {
				t.Errorf("rank %d, %v", rank, ok)
			}
		})
	}
}

func TestEventDecoderReadsUnknownTypesAndFields(t *testing.T) {
	payload, err := msgpack.Marshal([]any{1, []any{
		map[string]any{"type": "BlockMoved", "block_hashes": "nonsense"},
		[]any{"BlockMoved", 1, 2},
		map[string]any{"type": "BlockRemoved", "later": map[string]any{"a": []any{1, nil}}, "block_hashes": []int{7}},
		append([]any{"BlockRemoved", []int{7}, "GPU"}, make([]any, 40)...),
	}})
	if err != nil {
		t.Fatal(err)
	}
	d := newBatchDecoder()
	if _, err := d.start(payload); err != nil {
		t.Fatal(err)
	}
	var got []string
	for d.more() {
		e, err := d.next()
		got = append(got, fmt.Sprint(string(e.tag), e.kind, e.hashes, err))
	}
	testkit.WantEqual(t, "events", got, []string{"BlockMoved0 [] <nil>", "BlockMoved0 [] <nil>", "BlockRemoved2 [7] <nil>", "BlockRemoved2 [7] <nil>"})
	if _, ok := d.rank(); ok {
		t.Error("found a rank that is not there")
	}
}

func TestEventDecoderNeverReadsPastAPayload(t *testing.T) {
	payload := goldenPayload(t, "map_extra_keys.bin")
	d := newBatchDecoder()
	for n := range payload {
		drainEvents(d, payload[:n])
	}
	for _, lie := range []string{
		"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xdd\xff\xff\xff\xff",                              // 4 G events
		"\x93\x01\x91\xdf\xff\xff\xff\xff",                                                          // a map of 4 G pairs
		"\x93\x01\x91\x81\xa4type\xc6\xff\xff\xff\xff",                                              // a name of 4 GB
		"\x93\x01\x91\x82\xa4type\xabBlockStored\xa9token_ids\xdd\xff\xff\xff\xff",                  // 4 G tokens
		"\x93\x01\x91" + strings.Repeat("\x91", 1<<20),                                              // a deep nest
		"\x93\x01\x91\x82\xa4type\xabBlockStored\xa1x" + strings.Repeat("\x81\x01", 1<<20) + "\xc0", // the same in a field to skip
	} {
		drainEvents(d, []byte(lie))
	}
}

func FuzzEventDecoder(f *testing.F) {
	files, err := filepath.Glob("testdata/*.bin")
	if err != nil || len(files) == 0 {
		f.Fatalf("golden payloads: %v, %v", files, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		d := newBatchDecoder()
		if n := drainEvents(d, payload); n > len(payload) {
			t.Errorf("%d values out of %d bytes", n, len(payload))
		}
	})
}

// drainEvents decodes all of a payload and returns how many values it was given.
func drainEvents(d *batchDecoder, payload []byte) (values int) {
	if _, err := d.start(payload); err != nil {
		return 0
	}
	var blocks []kv.StoredBlock
	for d.more() {
		e, err := d.next()
		values += len(e.hashes) + len(e.tokens) + len(e.extra)
		if err == nil && e.kind == eventStored {
			blocks, _ = d.blocks(blocks[:0], e, 1)
		}
	}
	d.rank()
	return values
}

func BenchmarkEventDecoder(b *testing.B) {
	for _, form := range []string{"map", "array"} {
		b.Run(form+"/8 blocks of 16", func(b *testing.B) {
			hashes, tokens := make([][]byte, 8), make([]int, 128)
			for i := range hashes {
				hashes[i] = []byte(strings.Repeat(string(rune('a'+i)), 32))
			}
			for i := range tokens {
				tokens[i] = i * 397
			}
			var event any = map[string]any{
				"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": hashes[0], "token_ids": tokens, "block_size": 16, "lora_id": nil,
				"medium": "GPU", "lora_name": nil, "extra_keys": make([]any, 8), "group_idx": 0, "kv_cache_spec_kind": "full_attention",
			}
			if form == "array" {
				event = []any{"BlockStored", hashes, hashes[0], tokens, 16, nil, "GPU", nil, make([]any, 8), 0, "full_attention"}
			}
			payload, err := msgpack.Marshal([]any{1.5, []any{event}, 0})
			if err != nil {
				b.Fatal(err)
			}
			d := newBatchDecoder()
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			for b.Loop() {
				if drainEvents(d, payload) != 8+8+128 {
					b.Fatal("not all decoded")
				}
			}
		})
	}
}

func goldenPayload(t testing.TB, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	return b
}
