package events

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/vmihailenco/msgpack/v5/msgpcode"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
)

// Seeds that mix what is neither an adapter's name nor a cache salt into a
// block's hash, so that such a block never equals one of plain text.
const (
	extraKeySeed = 2
	loraIDSeed   = 3
)

// partSeed mixes an engine's hash and the number of a part of its block into the hash
// of that part.
const partSeed = 4

// partHash returns the hash of a part of an engine's block, other than the last,
// which has the engine's.
func partHash(engine uint64, part int) uint64 {
	var both [16]byte
	binary.LittleEndian.PutUint64(both[:8], engine)
	binary.LittleEndian.PutUint64(both[8:], uint64(part))
	return xxh3.HashSeed(both[:], partSeed)
}

// partHashes appends the hashes of all parts of the blocks with these engine hashes.
func partHashes(dst, engine []uint64, parts int) []uint64 {
	for _, e := range engine {
		for part := range parts - 1 {
			dst = append(dst, partHash(e, part))
		}
		dst = append(dst, e)
	}
	return dst
}

// blocks appends the blocks of a store event with their local hashes. It fails
// if the fields do not fit each other. An engine's block has as many parts as it has
// blocks of the index, and all parts come and go together.
//
// A block's extra keys are, in vLLM's order (generate_block_hash_extra_keys in
// vllm/v1/core/kv_cache_utils.py): the LoRA name again, multimodal items, the
// cache salt (a prompt's first block only), a digest of prompt embeddings. The
// name and the salt enter as HashBlocks does it, media as HashMediaBlocks; all
// else is mixed in as raw bytes, so that nothing matches it. SGLang has no extra keys: it sends the cache salt with every event, of
// whichever part of the prompt.
func (d *batchDecoder) blocks(dst []kv.StoredBlock, e *kvEvent, parts int) ([]kv.StoredBlock, error) {
	behind := e.lookahead().Tokens
	own := len(e.tokens)
	if e.pairs {
		own--
	}
	switch n := len(e.hashes); {
	case n == 0:
		return dst, nil
	case e.blockSize <= 0:
		return dst, fmt.Errorf("block_size is %d, want a positive number of tokens", e.blockSize)
	// Compared by division: the product could overflow.
	case own%e.blockSize != 0 || own/e.blockSize != n:
		return dst, fmt.Errorf("%d tokens for %d blocks of %d", own, n, e.blockSize)
	case !e.pairs && len(e.ahead) != n*behind:
		return dst, fmt.Errorf("%d lookahead tokens for %d blocks", len(e.ahead), n)
	case len(e.extra) != 0 && len(e.extra) != n:
		return dst, fmt.Errorf("extra keys for %d blocks of %d", len(e.extra), n)
	}
	defer d.seek(d.pos())
	base := kv.BlockSeed(string(e.lora), "")
	if len(e.lora) == 0 && e.loraID != nil {
		base += xxh3.HashSeed(e.loraID, loraIDSeed)
	}
	for i, engine := range e.hashes {
		seed := base
		d.media = d.media[:0]
		if len(e.extra) > 0 {
			mixed, err := d.extraSeed(e, i)
			if err != nil {
				return dst, fmt.Errorf("extra keys of block %d: %w", i, err)
			}
			seed += mixed
		} else if i == 0 && !e.hasParent && len(e.salt) > 0 {
			seed += kv.BlockSeed("", string(e.salt)) - kv.HashSeed
		}
		tokens := e.tokens[i*e.blockSize : (i+1)*e.blockSize]
		if e.pairs {
			tokens = e.tokens[i*e.blockSize : (i+1)*e.blockSize+behind]
		} else if behind > 0 {
			d.joined = append(append(d.joined[:0], tokens...), e.ahead[i*behind:(i+1)*behind]...)
			tokens = d.joined
		}
		d.words = kv.MediaWords(d.words[:0], d.media)
		size := e.blockSize / parts
		for part := range parts - 1 {
			// The words of media are those of the whole block: a prompt's parts have
			// others, so that such a block may be missed.
			local := kv.HashMediaBlock(tokens[part*size:(part+1)*size+behind], d.words, seed)
			dst = append(dst, kv.StoredBlock{Engine: partHash(engine, part), Local: local})
			if i == 0 && !e.hasParent {
				seed = base // without the salt
			}
		}
		dst = append(dst, kv.StoredBlock{Engine: engine, Local: kv.HashMediaBlock(tokens[(parts-1)*size:], d.words, seed)})
	}
	return dst, nil
}

// lookahead returns how the blocks of a store event depend on the tokens behind them;
// the zero value: they do not.
func (e *kvEvent) lookahead() kv.Lookahead {
	if e.pairs {
		return kv.Lookahead{Tokens: 1, Cut: 1}
	}
	return kv.Lookahead{Tokens: e.behind}
}

// extraSeed returns what block i's extra keys add to its seed, 0 for none, and
// leaves the block's media in d.media.
func (d *batchDecoder) extraSeed(e *kvEvent, i int) (uint64, error) {
	d.seek(e.extra[i])
	if d.isNil() {
		return 0, nil
	}
	n, err := d.arrayLen()
	if err != nil {
		return 0, err
	}
	var salt []byte
	mixed, others := uint64(extraKeySeed), false
	for j := range n {
		start := d.pos()
		code, err := d.dec.PeekCode()
		if err != nil {
			return 0, errBrokenPayload
		}
		if msgpcode.IsString(code) {
			s, err := d.text()
			if err != nil {
				return 0, err
			}
			if j == 0 && len(e.lora) > 0 && bytes.Equal(s, e.lora) {
				continue
			}
			// Older engines send a multimodal hash as a plain string too; it
			// comes before the salt, so the last string is the salt.
			if i == 0 && !e.hasParent {
				if salt != nil {
					mixed, others = xxh3.HashSeed(salt, mixed), true
				}
				salt = s
				continue
			}
		} else if err := d.skip(); err != nil {
			return 0, err
		} else if d.mediaItem(start, e.blockSize) {
			continue
		}
		mixed, others = xxh3.HashSeed(d.data[start:d.pos()], mixed), true
	}
	var add uint64
	if len(salt) > 0 {
		add = kv.BlockSeed("", string(salt)) - kv.HashSeed
	}
	if others {
		add += mixed
	}
	return add, nil
}

// mediaItem reads the value from start up to here into d.media if it is an item as
// vLLM sends it: a pair of an identifier and of the token in the block at which the
// item begins, below 0 if that was before the block. Items come in the order in
// which they begin, one at most before the block; what does not is not understood.
func (d *batchDecoder) mediaItem(start, blockSize int) bool {
	end := d.pos()
	defer d.seek(end)
	d.seek(start)
	if code, err := d.dec.PeekCode(); err != nil || !msgpcode.IsFixedArray(code) {
		return false
	}
	if n, err := d.arrayLen(); err != nil || n != 2 {
		return false
	}
	if code, err := d.dec.PeekCode(); err != nil || !msgpcode.IsString(code) {
		return false
	}
	identifier, err := d.text()
	if err != nil {
		return false
	}
	begin, err := d.int()
	if err != nil || d.pos() != end || begin >= blockSize {
		return false
	}
	if n := len(d.media); n > 0 && (begin < 0 || begin <= d.media[n-1].Start) {
		return false
	}
	d.media = append(d.media, kv.Media{Hash: kv.MediaHash(string(identifier)), Start: begin})
	return true
}
