package kv

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"slices"

	"github.com/zeebo/xxh3"
)

// mediaSeed hashes identifiers of media that are no digests.
const mediaSeed = 4

// mediaDigest is the length of vLLM's own identifiers, hex digits.
const mediaDigest = 64

// Media is one image or other item in a prompt: the engine's identifier as a hash,
// and the tokens from Start up to End that stand for it. Start counts from the
// beginning of the prompt or of a block; it is negative for an item that began
// before it.
type Media struct {
	Hash       uint64
	Start, End int
}

// MediaHash returns the hash of an engine's identifier of an item: the first 16 of
// 64 hex digits, as in Dynamo. Any other text, such as a client's uuid, is hashed.
func MediaHash(identifier string) uint64 {
	var digest [mediaDigest / 2]byte
	if len(identifier) == mediaDigest {
		if _, err := hex.Decode(digest[:], []byte(identifier)); err == nil {
			return binary.BigEndian.Uint64(digest[:])
		}
	}
	return xxh3.HashStringSeed(identifier, mediaSeed)
}

// MediaWords appends to dst the words that a block's media add to its bytes: their hashes in
// ascending order, as in Dynamo. That order cannot distinguish two items that both begin
// in the block from the same two exchanged, so where the order of those that begin
// in it (Start at least 0) is not ascending, it follows. Media must be in the order
// of their Start, at most one of them below 0.
func MediaWords(dst []uint64, media []Media) []uint64 {
	first := len(dst)
	for _, m := range media {
		dst = append(dst, m.Hash)
	}
	slices.Sort(dst[first:]) // all that Dynamo does
	if len(media) > 0 && media[0].Start < 0 {
		media = media[1:]
	}
	if !slices.IsSortedFunc(media, func(a, b Media) int { return cmp.Compare(a.Hash, b.Hash) }) {
		for _, m := range media {
			dst = append(dst, m.Hash)
		}
	}
	return dst
}

// MediaBlocks returns the words of a prompt's blocks up to the last one with media;
// nil if there is none. Media must be in the order of their Start, none inside
// another, as in a render answer.
func MediaBlocks(media []Media, blockSize int) (words [][]uint64) {
	if len(media) == 0 {
		return nil
	}
	words = make([][]uint64, (media[len(media)-1].End+blockSize-1)/blockSize)
	var inside []Media
	for i, next := 0, 0; i < len(words); i++ {
		begin, end := i*blockSize, (i+1)*blockSize
		for next < len(media) && media[next].End <= begin {
			next++
		}
		inside = inside[:0]
		for _, m := range media[next:] {
			if m.Start >= end {
				break
			}
			inside = append(inside, Media{m.Hash, m.Start - begin, m.End - begin})
		}
		words[i] = MediaWords(nil, inside)
	}
	return words
}

// HashMediaBlock is HashBlock for a block with media: the words follow the tokens,
// 8 bytes each, little-endian.
func HashMediaBlock(tokens []uint32, words []uint64, seed uint64) uint64 {
	if len(words) == 0 {
		return HashBlock(tokens, seed)
	}
	var room [1024]byte // enough for 128 tokens and 64 items
	b := append(room[:0], TokenBytes(tokens)...)
	for _, w := range words {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return xxh3.HashSeed(b, seed)
}
