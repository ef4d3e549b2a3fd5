package kv

import (
	"encoding/binary"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// HashSeed is the XXH3 seed that Dynamo's KV router uses for block hashes and
// for their chain, so that hashes computed by its clients match ours.
const HashSeed = 1337

// Seeds of the names that keep blocks of different owners apart. A LoRA
// adapter's name enters every block; a cache salt enters the first block only,
// as in vLLM, and reaches the others through the path in the index.
const (
	loraSeed = 0
	saltSeed = 1
)

// BlockSeed returns the seed for the local hashes of a block that belongs to
// the LoRA adapter lora and carries the cache salt; empty means none. The sum
// wraps.
func BlockSeed(lora, salt string) uint64 {
	seed := uint64(HashSeed)
	if lora != "" {
		seed += xxh3.HashStringSeed(lora, loraSeed)
	}
	if salt != "" {
		seed += xxh3.HashStringSeed(salt, saltSeed)
	}
	return seed
}

// HashBlock returns the local hash of one block: XXH3-64 over its token ids as
// little-endian 32-bit words.
func HashBlock(tokens []uint32, seed uint64) uint64 {
	return xxh3.HashSeed(TokenBytes(tokens), seed)
}

// HashBlocks appends to dst the local hash of every full block of tokens; a
// partial last block has none. blockSize must be positive.
func HashBlocks(dst []uint64, tokens []uint32, blockSize int, lora, salt string) []uint64 {
	return HashMediaBlocks(dst, tokens, blockSize, lora, salt, nil)
}

// HashMediaBlocks is HashBlocks for a prompt with media: media has the words of
// each block, as MediaWords makes them. Blocks beyond its end have none.
func HashMediaBlocks(dst []uint64, tokens []uint32, blockSize int, lora, salt string, media [][]uint64) []uint64 {
	return hashBlocks(dst, tokens, blockSize, 0, lora, salt, media)
}

// Lookahead is how an engine's blocks depend on the tokens behind them, as they do with
// the drafters of speculative decoding.
type Lookahead struct {
	Tokens int // behind each block, hashed as its last ones; 1 to MaxLookahead
	Cut    int // at a prompt's end that the engine does not look up
}

// MaxLookahead bounds Lookahead.Tokens, and MaxLookaheads the different ones of an index.
const (
	MaxLookahead  = 16
	MaxLookaheads = 4
)

// HashLookaheadBlocks is HashMediaBlocks for engines whose blocks depend on that many
// tokens behind them, too: they are hashed as the block's last ones, and a block without
// them has no hash.
func HashLookaheadBlocks(dst []uint64, tokens []uint32, blockSize, behind int, lora, salt string, media [][]uint64) []uint64 {
	return hashBlocks(dst, tokens, blockSize, behind, lora, salt, media)
}

// hashBlocks hashes blocks together with that many tokens behind them.
func hashBlocks(dst []uint64, tokens []uint32, blockSize, behind int, lora, salt string, media [][]uint64) []uint64 {
	seed := BlockSeed(lora, salt)
	rest := seed
	if salt != "" {
		rest = BlockSeed(lora, "")
	}
	for ; len(tokens) >= blockSize+behind; tokens = tokens[blockSize:] {
		if len(media) == 0 {
			dst = append(dst, HashBlock(tokens[:blockSize+behind], seed))
		} else {
			dst = append(dst, HashMediaBlock(tokens[:blockSize+behind], media[0], seed))
			media = media[1:]
		}
		seed = rest
	}
	return dst
}

// SequenceHashes appends to dst the chained hash of every block: the first is
// its local hash, each later one hashes its predecessor's and its own. Equal
// sequence hashes mean equal prompts up to and including that block.
func SequenceHashes(dst, local []uint64) []uint64 {
	var previous uint64
	for i, h := range local {
		if i > 0 {
			h = NextSequenceHash(previous, h)
		}
		dst = append(dst, h)
		previous = h
	}
	return dst
}

// NextSequenceHash returns the sequence hash of a block that follows another one.
func NextSequenceHash(previous, local uint64) uint64 {
	var pair [16]byte
	binary.LittleEndian.PutUint64(pair[:8], previous)
	binary.LittleEndian.PutUint64(pair[8:], local)
	return xxh3.HashSeed(pair[:], HashSeed)
}

// littleEndian reports whether this machine stores integers as the wire does.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// TokenBytes views tokens as little-endian bytes, without a copy where the
// machine is little-endian itself.
func TokenBytes(tokens []uint32) []byte {
	if len(tokens) == 0 {
		return nil
	}
	if littleEndian {
		return unsafe.Slice((*byte)(unsafe.Pointer(&tokens[0])), len(tokens)*4)
	}
	b := make([]byte, 0, len(tokens)*4)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}
