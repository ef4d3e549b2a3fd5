package testkit

import (
	"math/rand/v2"
	"slices"

	"kvrouter/internal/base/kv"
)

// Tokens returns n tokens: from, from+1, ...
func Tokens(from uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = from + uint32(i)
	}
	return tokens
}

// Prompt returns n local block hashes that differ from those of other seeds.
func Prompt(seed uint64, n int) []uint64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	local := make([]uint64, n)
	for i := range local {
		local[i] = rng.Uint64()
	}
	return local
}

// Diverging returns p with all blocks from position at on replaced.
func Diverging(p []uint64, at int, seed uint64) []uint64 {
	return append(slices.Clone(p[:at]), Prompt(seed, len(p)-at)...)
}

// EngineHashes returns the block hashes of a vLLM-like engine: hashes of whole prefixes.
func EngineHashes(local []uint64) []uint64 {
	hashes := kv.SequenceHashes(nil, local)
	for i := range hashes {
		hashes[i] ^= 0xfeed
	}
	return hashes
}

// Chain returns the blocks of a store event for a whole prompt.
func Chain(local []uint64) []kv.StoredBlock {
	blocks := make([]kv.StoredBlock, len(local))
	for i, e := range EngineHashes(local) {
		blocks[i] = kv.StoredBlock{Engine: e, Local: local[i]}
	}
	return blocks
}
