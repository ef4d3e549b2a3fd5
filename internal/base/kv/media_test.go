package kv

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// media.json is of Dynamo's own bindings: see media.py.
func TestMediaEnterBlockHashesAsInDynamo(t *testing.T) {
	var cases []struct {
		BlockSize int `json:"block_size"`
		Tokens    uint32
		Media     [][]uint64
		LoRA      string
		Hashes    []uint64
	}
	text, err := os.ReadFile("testdata/media.json")
	if err == nil {
		err = json.Unmarshal(text, &cases)
	}
	if err != nil || len(cases) < 20 {
		t.Fatalf("%d cases: %v", len(cases), err)
	}
	for _, c := range cases {
		for i := range c.Media {
			slices.Sort(c.Media[i])
		}
		if got := HashMediaBlocks(nil, sequence(1, c.Tokens), c.BlockSize, c.LoRA, "", c.Media); !slices.Equal(got, c.Hashes) {
			t.Errorf("%d tokens in blocks of %d with %v: %v, want %v", c.Tokens, c.BlockSize, c.Media, got, c.Hashes)
		}
	}
}

func TestMediaHashIsTheDigestsBegin(t *testing.T) {
	digest := "0123456789abcdef" + strings.Repeat("f", 48)
	if got := MediaHash(digest); got != 0x0123456789abcdef {
		t.Errorf("%x", got)
	}
	seen := map[uint64]string{}
	for _, identifier := range []string{digest, digest + "00", digest[:63], digest[:63] + "g", "", "photo-1", "photo-2"} {
		h := MediaHash(identifier)
		if other, taken := seen[h]; taken {
			t.Errorf("%q has the hash of %q", identifier, other)
		}
		seen[h] = identifier
	}
}

// One block's words are the same only for the same items in the same order, as far
// as the path before the block leaves that open: what began before it is known.
func TestWordsTellTheItemsOfABlockApart(t *testing.T) {
	seen := map[string][2][]uint64{}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var media []Media
		var before, begun []uint64
		if rng.IntN(2) == 0 {
			before = []uint64{rng.Uint64N(4)}
			media = append(media, Media{before[0], -1, 1})
		}
		for i := range rng.IntN(5) {
			begun = append(begun, rng.Uint64N(4))
			media = append(media, Media{begun[i], 2 * i, 2*i + 1})
		}
		words := MediaWords(nil, media)
		text, _ := json.Marshal([]any{before, words})
		other, taken := seen[string(text)]
		if taken && !slices.Equal(other[1], begun) {
			t.Fatalf("after %v, %v and %v have the words %v", before, begun, other[1], words)
		}
		seen[string(text)] = [2][]uint64{before, begun}
	}
}

func TestMediaBlocksHaveTheItemsOfEachBlock(t *testing.T) {
	const a, b, c = 7, 5, 9
	for name, test := range map[string]struct {
		media []Media
		want  [][]uint64
	}{
		"none":           {nil, nil},
		"one":            {[]Media{{a, 5, 6}}, [][]uint64{nil, {a}}},
		"over blocks":    {[]Media{{a, 3, 9}}, [][]uint64{{a}, {a}, {a}}},
		"to a border":    {[]Media{{a, 0, 4}, {b, 8, 12}}, [][]uint64{{a}, nil, {b}}},
		"one after one":  {[]Media{{a, 2, 5}, {b, 5, 9}}, [][]uint64{{a}, {b, a}, {b}}},
		"order matters":  {[]Media{{a, 0, 1}, {b, 2, 3}}, [][]uint64{{b, a, a, b}}},
		"order is known": {[]Media{{b, 0, 1}, {a, 2, 3}, {c, 3, 4}}, [][]uint64{{b, a, c}}},
	} {
		if got := MediaBlocks(test.media, 4); !slices.EqualFunc(got, test.want, slices.Equal) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
