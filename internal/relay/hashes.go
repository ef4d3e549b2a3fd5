package relay

import "kvrouter/internal/kv"

// Prompt is a prompt that is looked up.
type Prompt struct {
	Model  string // as the request names it
	Tokens []uint32
	Salt   string     // cache salt; empty: none
	Media  [][]uint64 // words of each block, as kv.MediaWords makes them; shorter: none beyond
}

// Hashes returns the sequence hash of each full block of a prompt in a pool. They are those
// of the selection API but for a salt, which enters every block here, and the first there.
func (p *Pool) Hashes(prompt *Prompt, adapter string) []uint64 {
	return sequenceHashes(p.BlockSize, p.Format, prompt, adapter)
}

func sequenceHashes(size int, format HashFormat, prompt *Prompt, adapter string) []uint64 {
	behind := 0
	if format == Eagle {
		behind = 1
	}
	seed, tokens, media := kv.BlockSeed(adapter, prompt.Salt), prompt.Tokens, prompt.Media
	local := make([]uint64, 0, len(tokens)/size)
	for ; len(tokens) >= size+behind; tokens = tokens[size:] {
		if len(media) == 0 {
			local = append(local, kv.HashBlock(tokens[:size+behind], seed))
			continue
		}
		local = append(local, kv.HashMediaBlock(tokens[:size+behind], media[0], seed))
		media = media[1:]
	}
	return kv.SequenceHashes(make([]uint64, 0, len(local)), local)
}
