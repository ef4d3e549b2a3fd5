package mocker

import (
	"bytes"

	"github.com/vmihailenco/msgpack/v5"
)

// loadTopic is the topic of SGLang's load messages.
const loadTopic = "load"

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
		int64(load.Used + load.Queued), int64(w.cfg.MaxNumSeqs), r.Counts.prefilled.Load(), r.Counts.prefillMicros.Load(),
	} {
		_ = p.EncodeInt(n)
	}
	return out.Bytes()
}

// capacity is the number of tokens that the KV cache of a rank holds.
func (w *Worker) capacity() int { return w.cfg.NumGPUBlocks * w.cfg.BlockSize }
