// Package kv defines the types that all packages share: worker keys, targets, roles,
// matches and block hashes.
package kv

import "cmp"

// WorkerKey identifies one KV cache: a worker, or one data-parallel rank of it.
type WorkerKey struct {
	Worker uint64
	Rank   uint32
}

// Compare orders keys by worker, then by rank.
func (w WorkerKey) Compare(other WorkerKey) int {
	if c := cmp.Compare(w.Worker, other.Worker); c != 0 {
		return c
	}
	return cmp.Compare(w.Rank, other.Rank)
}

// Limits on numbers from outside: far above real values, and far below those whose
// sums overflow.
const (
	MaxTokens = 1 << 31 // of a prompt, or of an answer
	MaxRanks  = 1024    // data-parallel ranks of one worker
)

// StoredBlock is one block of a store event: the engine's own id for it
// (opaque) and the local hash of its tokens.
type StoredBlock struct {
	Engine uint64
	Local  uint64
}

// Match is the part of a prompt that a request finds in a worker's cache.
type Match struct {
	Worker WorkerKey
	Blocks int // leading blocks, as many as all KV-cache groups accept
	// Held is the number of leading blocks in the first group if another group accepts
	// fewer, otherwise 0. That other group is Limit, by the engine's number.
	Held, Limit int32
	// Lower counts the blocks that continue Blocks in the tiers below the device, each in
	// the fastest tier that has it. The run ends at the first block that no tier has.
	Lower LowerBlocks
	// Staged counts the same as Dynamo does: first a run in host memory, from its end on a
	// run on disk, then one in external stores, all of the worker itself, the prompt's last
	// block included. It ends where a run goes back to a faster tier, which an engine takes as
	// it comes, and counts none that may have been emptied. It is 0 without StagedPart.
	Staged LowerBlocks
	// Sure is the number of leading blocks of Lower, all in host memory, whose removal would
	// have been announced. The others may be gone.
	Sure int32
	// Hosted is the number of leading blocks in the worker's own host memory, without those
	// that may be gone: what others can pull. It is 0 without HostedPart.
	Hosted int32
}

// Scale counts the match in blocks of which times are one of before.
func (m *Match) Scale(times int) {
	n := int32(times)
	m.Blocks *= times
	m.Held, m.Sure, m.Hosted = m.Held*n, m.Sure*n, m.Hosted*n
	m.Lower = LowerBlocks{m.Lower.Host * n, m.Lower.Disk * n, m.Lower.External * n}
	m.Staged = LowerBlocks{m.Staged.Host * n, m.Staged.Disk * n, m.Staged.External * n}
}

// MatchParts are the parts of a Match that only some callers need, as they take time.
type MatchParts uint8

// The parts.
const (
	StagedPart MatchParts = 1 << iota // Match.Staged
	HostedPart                        // Match.Hosted
	AllParts   = StagedPart | HostedPart
)

// Doubtful reports whether some of m.Lower may be gone without an event.
func (m *Match) Doubtful() bool { return int(m.Sure) < m.Lower.Total() }
