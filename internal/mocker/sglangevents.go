package mocker

import (
	"bytes"

	"github.com/vmihailenco/msgpack/v5"
)

// loadTopic is the topic of SGLang's load messages.
const loadTopic = "load"

// encodeSGLang writes one event as SGLang's scheduler does: a map without the
// fields that have no value. Hashes are signed.
func (e *Events) encodeSGLang(event *Event) {
	p := e.packer
	switch {
	case event.Cleared:
		e.open("AllBlocksCleared", 0)
	case event.Removed != nil:
		e.open("BlockRemoved", 2)
		e.signedHashes(len(event.Removed), func(i int) uint64 { return event.Removed[i] })
		e.text("medium", "GPU")
	default:
		fields := 6
		for _, value := range []string{event.Salt, event.Adapter.Name} {
			if value != "" {
				fields++
			}
		}
		e.open("BlockStored", fields)
		e.signedHashes(len(event.Stored), func(i int) uint64 { return event.Stored[i].Engine })
		e.name("parent_block_hash")
		if event.HasParent {
			_ = p.EncodeInt(int64(event.Parent))
		} else {
			_ = p.EncodeNil()
		}
		e.tokens(event.Tokens)
		e.name("block_size")
		_ = p.EncodeUint(uint64(e.blockSize))
		e.name("lora_id")
		_ = p.EncodeNil()
		e.text("medium", "GPU")
		if event.Salt != "" {
			e.text("cache_salt", event.Salt)
		}
		if event.Adapter.Name != "" {
			e.text("lora_name", event.Adapter.Name)
		}
	}
}

func (e *Events) signedHashes(n int, hash func(i int) uint64) {
	e.name("block_hashes")
	_ = e.packer.EncodeArrayLen(n)
	for i := range n {
		_ = e.packer.EncodeInt(int64(hash(i)))
	}
}

// loadStat is a load in the form of SGLang's load messages. Writing to a buffer
// cannot fail.
func (r *Rank) loadStat(load *Load) []byte {
	w := r.w
	var out bytes.Buffer
	p := msgpack.NewEncoder(&out)
	p.UseCompactInts(true)
	_ = p.EncodeArrayLen(11)
	_ = p.EncodeString("LoadStat")
	for _, n := range []int64{
		int64(load.Running), int64(load.Waiting), int64(load.Used), int64(w.capacity()), int64(r.number), int64(load.Uncached),
		int64(load.Used + load.Queued), int64(w.cfg.MockMaxNumSeqs), r.Counts.prefilled.Load(), r.Counts.prefillMicros.Load(),
	} {
		_ = p.EncodeInt(n)
	}
	return out.Bytes()
}

// capacity is the number of tokens that the KV cache of a rank holds.
func (w *Worker) capacity() int { return w.cfg.MockNumGPUBlocks * w.cfg.BlockSize }
