package testkit

import (
	"kvrouter/internal/kv"
	"math/rand/v2"
	"slices"
)

var (
	W0 = kv.WorkerKey{Worker: 0}
	W1 = kv.WorkerKey{Worker: 1}
	W2 = kv.WorkerKey{Worker: 2}
)

// engineHashes are what a vLLM-like engine calls these blocks: hashes of whole
// prefixes.
func EngineHashes(local []uint64) []uint64 {
	hashes := kv.SequenceHashes(nil, local)
	for i := range hashes {
		hashes[i] ^= 0xfeed
	}
	return hashes
}

// chain is the store event for a whole prompt.
func Chain(local []uint64) []kv.StoredBlock {
	blocks := make([]kv.StoredBlock, len(local))
	for i, e := range EngineHashes(local) {
		blocks[i] = kv.StoredBlock{Engine: e, Local: local[i]}
	}
	return blocks
}

// prompt returns n local hashes that differ from those of other seeds.
func Prompt(seed uint64, n int) []uint64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	local := make([]uint64, n)
	for i := range local {
		local[i] = rng.Uint64()
	}
	return local
}

// diverging returns p with all blocks from position at on replaced.
func Diverging(p []uint64, at int, seed uint64) []uint64 {
	return append(slices.Clone(p[:at]), Prompt(seed, len(p)-at)...)
}

// dumpEntry is what Dump yields at once.
type DumpEntry struct {
	Worker    kv.WorkerKey
	Parent    uint64
	HasParent bool
	Block     kv.StoredBlock
}
