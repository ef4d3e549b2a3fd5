package kv

import (
	"slices"
	"testing"
)

// sequence returns the tokens first, first+1, ..., last.
func sequence(first, last uint32) []uint32 {
	var tokens []uint32
	for t := first; t <= last; t++ {
		tokens = append(tokens, t)
	}
	return tokens
}

func TestBlockHashesAreDynamos(t *testing.T) {
	got := HashBlocks(nil, sequence(1, 8), 4, "", "")
	want := []uint64{14643705804678351452, 16777012769546811212}
	if !slices.Equal(got, want) {
		t.Errorf("hashes of tokens 1..8 in blocks of 4: %d, want %d", got, want)
	}
	if got := HashBlock(sequence(1, 4), HashSeed); got != want[0] {
		t.Errorf("hash of tokens 1..4: %d, want %d", got, want[0])
	}
}

func TestSequenceHashesAreDynamos(t *testing.T) {
	want := []int64{-3803038269031200164, 4945711292740353085, -5863151826378895484}
	got := SequenceHashes(nil, HashBlocks(nil, sequence(1, 12), 4, "", ""))
	if len(got) != len(want) {
		t.Fatalf("%d sequence hashes, want %d", len(got), len(want))
	}
	for i, h := range got {
		if int64(h) != want[i] {
			t.Errorf("sequence hash %d: %d, want %d", i, int64(h), want[i])
		}
	}
}

func TestSequenceHashesDependOnAllBlocksBefore(t *testing.T) {
	a := SequenceHashes(nil, []uint64{1, 2, 3})
	b := SequenceHashes(nil, []uint64{9, 2, 3})
	for i := range a {
		if a[i] == b[i] {
			t.Errorf("sequence hash %d is the same after different first blocks", i)
		}
	}
}

// TestLookaheadBlockDependsOnTheTokenBehindIt, and on no other one.
func TestLookaheadBlockDependsOnTheTokenBehindIt(t *testing.T) {
	prompt := sequence(1, 9)
	full := HashLookaheadBlocks(nil, prompt, 4, 1, "", "", nil)
	for n, want := range map[int]int{0: 0, 4: 0, 5: 1, 8: 1, 9: 2} {
		if got := HashLookaheadBlocks(nil, prompt[:n], 4, 1, "", "", nil); !slices.Equal(got, full[:want]) {
			t.Errorf("%d tokens in blocks of 4: hashes %d, want %d", n, got, full[:want])
		}
	}
	for at := range prompt {
		changed := slices.Clone(prompt)
		changed[at] = 1000
		got := HashLookaheadBlocks(nil, changed, 4, 1, "", "", nil)
		if first, second := got[0] != full[0], got[1] != full[1]; first != (at <= 4) || second != (at >= 4) {
			t.Errorf("token %d changes the first block: %v, the second: %v", at, first, second)
		}
	}
	if plain := HashBlocks(nil, prompt, 4, "", ""); plain[0] == full[0] || plain[1] == full[1] {
		t.Error("a block with the token behind it has the hash of one without")
	}
	if salted := HashLookaheadBlocks(nil, prompt, 4, 1, "", "s", nil); salted[0] == full[0] || salted[1] != full[1] {
		t.Error("a salt is not in the first block alone")
	}
}

func TestPartialBlockHasNoHash(t *testing.T) {
	full := HashBlocks(nil, sequence(1, 8), 4, "", "")
	for n, want := range map[uint32]int{0: 0, 1: 0, 3: 0, 4: 1, 5: 1, 7: 1, 8: 2} {
		got := HashBlocks(nil, sequence(1, n), 4, "", "")
		if !slices.Equal(got, full[:want]) {
			t.Errorf("%d tokens in blocks of 4: hashes %d, want %d", n, got, full[:want])
		}
	}
}

func TestHashesAreAppended(t *testing.T) {
	if got := HashBlocks([]uint64{7}, sequence(1, 4), 4, "", ""); len(got) != 2 || got[0] != 7 {
		t.Errorf("HashBlocks onto [7]: %d", got)
	}
	if got := SequenceHashes([]uint64{7}, []uint64{1}); !slices.Equal(got, []uint64{7, 1}) {
		t.Errorf("SequenceHashes of [1] onto [7]: %d, want [7 1]", got)
	}
}

func TestOwnersNeverShareBlocks(t *testing.T) {
	type owner struct{ lora, salt string }
	owners := []owner{{}, {lora: "a"}, {lora: "b"}, {salt: "a"}, {salt: "b"}, {"a", "a"}, {"a", "b"}, {"b", "a"}}
	paths := map[uint64]owner{}
	for _, o := range owners {
		path := SequenceHashes(nil, HashBlocks(nil, sequence(1, 12), 4, o.lora, o.salt))
		for i, h := range path {
			if other, taken := paths[h]; taken {
				t.Errorf("%+v and %+v share the prefix of block %d", o, other, i)
			}
			paths[h] = o
		}
	}
}

func TestLoraEntersEveryBlockAndSaltTheFirst(t *testing.T) {
	base := HashBlocks(nil, sequence(1, 12), 4, "", "")
	lora := HashBlocks(nil, sequence(1, 12), 4, "adapter", "")
	salt := HashBlocks(nil, sequence(1, 12), 4, "", "salt")
	for i := range base {
		if base[i] == lora[i] {
			t.Errorf("block %d of an adapter has the base model's hash", i)
		}
		if same := base[i] == salt[i]; same != (i > 0) {
			t.Errorf("block %d of a salted prompt: same hash as without salt: %v", i, same)
		}
	}
}

func TestTokenBytesAreLittleEndian(t *testing.T) {
	got := TokenBytes([]uint32{0x04030201, 0x08070605})
	if !slices.Equal(got, []byte{1, 2, 3, 4, 5, 6, 7, 8}) {
		t.Errorf("bytes %v", got)
	}
}
