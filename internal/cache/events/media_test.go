package events

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/tokenstest"
)

const mediaBlock = 16 // tokens; as generate.py has it

// mediaCase is a prompt as vLLM tells it: by its render route, and by its events.
type mediaCase struct {
	Name, Salt, LoRA string
	Blocks           []string // vLLM's block hashes
	Batch            []byte
	Answer           json.RawMessage
}

func mediaCases(t *testing.T) (cases []mediaCase) {
	t.Helper()
	text, err := os.ReadFile("testdata/media/cases.json")
	if err == nil {
		err = json.Unmarshal(text, &cases)
	}
	if err != nil || len(cases) < 20 {
		t.Fatalf("%d cases, want at least 20: %v", len(cases), err)
	}
	return cases
}

// local returns the block hashes of the prompt that the render answer reports.
func (c mediaCase) local(t *testing.T) []uint64 {
	t.Helper()
	ask := func(context.Context, string, []byte) ([]byte, error) { return c.Answer, nil }
	source := tokens.NewSource(nil, ask, time.Second, slog.New(slog.DiscardHandler))
	p := source.ChatBody(t.Context(), tokenstest.Body([]byte(`{"messages":[{"role":"user","content":"x"}]}`)))
	if p.Source != tokens.SourceWorker || p.Exact != len(p.Tokens) {
		t.Errorf("%s: from %s, exact are %d of %d tokens, want all", c.Name, p.Source, p.Exact, len(p.Tokens))
	}
	return kv.HashMediaBlocks(nil, p.Tokens[:p.Exact], mediaBlock, c.LoRA, c.Salt, kv.MediaBlocks(p.Media, mediaBlock))
}

// What a worker's render route reports of a prompt finds, in the index that another
// prompt's events made, exactly the blocks that vLLM would find.
func TestMediaMatchAsInVLLM(t *testing.T) {
	cases := mediaCases(t)
	several := 0
	for _, held := range cases {
		index := radix.NewTree()
		s := NewStream(Source{Worker: testkit.EventWorker, BlockSize: mediaBlock}, index, Options{}, slog.New(slog.DiscardHandler))
		s.Begin(0)
		s.Apply(0, held.Batch, true)
		for _, asked := range cases {
			want := 0
			for want < min(len(held.Blocks), len(asked.Blocks)) && held.Blocks[want] == asked.Blocks[want] {
				want++
			}
			got := 0
			local := asked.local(t)
			for _, m := range index.Match(local, len(local), kv.AllParts, nil) {
				got = m.Blocks
			}
			if got != want {
				t.Errorf("%q after %q: %d blocks match, want %d", asked.Name, held.Name, got, want)
			}
			if want > 0 && want < len(asked.Blocks) {
				several++
			}
		}
	}
	if several == 0 {
		t.Error("no case has a part of another's blocks")
	}
}

// Extra keys that are not those of an item, or of items in an order that vLLM does
// not have, match nothing that a request can ask for.
func TestOtherExtraKeysMatchNothing(t *testing.T) {
	digest := "a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3a3"
	prompt := []uint32{1, 2, 3, 4}
	for name, c := range map[string]struct {
		keys  []any
		media []kv.Media // what it must be taken for; nil: nothing
	}{
		"item":                     {[]any{[]any{digest, 0}}, []kv.Media{{Start: 0}}},
		"begun before":             {[]any{[]any{digest, -9}}, []kv.Media{{Start: -9}}},
		"twice":                    {[]any{[]any{digest, -9}, []any{digest, 3}}, []kv.Media{{Start: -9}, {Start: 3}}},
		"no place":                 {[]any{[]any{digest}}, nil},
		"three members":            {[]any{[]any{digest, 0, 0}}, nil},
		"exchanged":                {[]any{[]any{0, digest}}, nil},
		"place is a text":          {[]any{[]any{digest, "0"}}, nil},
		"place is nil":             {[]any{[]any{digest, nil}}, nil},
		"bytes":                    {[]any{[]any{[]byte(digest), 0}}, nil},
		"behind the block":         {[]any{[]any{digest, 4}}, nil},
		"at one place":             {[]any{[]any{digest, 1}, []any{digest, 1}}, nil},
		"two begun before":         {[]any{[]any{digest, -9}, []any{digest, -3}}, nil},
		"map":                      {[]any{map[string]any{digest: 0}}, nil},
		"item and something else":  {[]any{[]any{digest, 0}, []byte("embeddings")}, nil},
		"empty list and two items": {[]any{[]any{}, []any{digest, 0}, []any{digest, 1}}, nil},
	} {
		event := testkit.Event{"as is": map[string]any{
			"type": "BlockStored", "block_hashes": []int{1}, "parent_block_hash": nil, "token_ids": prompt, "block_size": 4,
			"medium": "GPU", "extra_keys": []any{c.keys},
		}}
		d := newBatchDecoder()
		if _, err := d.start(testkit.Payload(t, 1, event)); err != nil {
			t.Fatal(name, err)
		}
		e, err := d.next()
		if err != nil {
			t.Fatal(name, err)
		}
		blocks, err := d.blocks(nil, e, 1)
		if err != nil {
			t.Fatal(name, err)
		}
		one := kv.MediaHash(digest)
		possible := map[uint64]int{} // by number of items
		for n := range 4 {
			words := []uint64{one, one, one}[:n]
			possible[kv.HashMediaBlock(prompt, words, kv.HashSeed)] = n
		}
		got, found := possible[blocks[0].Local]
		if found != (c.media != nil) || got != len(c.media) {
			t.Errorf("%s: has the hash of a block with %d items: %v, want %d", name, got, found, len(c.media))
		}
	}
}
