package cluster

import (
	"encoding/binary"
	"errors"
	"sync"
	"time"
)

// Messages are sent in batches: each NATS message costs several times what one of a router does. A
// batch is a sequence of messages, each a byte with the length of its topic, four with that of its text
// (little-endian), the topic, and the text.
const (
	// batchWait is how long a message waits for others.
	batchWait = time.Millisecond
	// batchBytes is the size from which on a batch is sent at once.
	batchBytes = 32 << 10
	headSize   = 5
)

// batch collects messages until they are sent.
type batch struct {
	limit func() int // bytes of a batch
	send  func(text []byte)

	mu    sync.Mutex // guards the rest
	text  []byte
	timer *time.Timer // nil: nothing waits
}

// add adds a message. It returns false if the message is too large.
func (b *batch) add(topic string, text []byte) (ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	size, limit := headSize+len(topic)+len(text), b.limit()
	if len(topic) > 255 || size > limit {
		return false
	}
	if len(b.text)+size > limit {
		b.flush()
	}
	b.text = append(b.text, byte(len(topic)))
	b.text = binary.LittleEndian.AppendUint32(b.text, uint32(len(text)))
	b.text = append(append(b.text, topic...), text...)
	switch {
	case len(b.text) >= batchBytes:
		b.flush()
	case b.timer == nil:
		b.timer = time.AfterFunc(batchWait, b.sendNow)
	}
	return true
}

// sendNow sends what waits.
func (b *batch) sendNow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.flush()
}

// flush sends what waits; b.mu is held.
func (b *batch) flush() {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	if len(b.text) > 0 {
		b.send(b.text)
		b.text = b.text[:0]
	}
	if cap(b.text) > 2*batchBytes {
		b.text = nil
	}
}

// errBatch means that a batch does not have its form.
var errBatch = errors.New("malformed batch")

// split calls take for each message of a batch. Its error is the first one.
func split(text []byte, take func(topic string, text []byte) error) (err error) {
	for len(text) > 0 {
		if len(text) < headSize {
			return errBatch
		}
		topic, size := int(text[0]), uint64(binary.LittleEndian.Uint32(text[1:]))
		if text = text[headSize:]; uint64(len(text)) < uint64(topic)+size {
			return errBatch
		}
		if failed := take(string(text[:topic]), text[topic:topic+int(size)]); err == nil {
			err = failed
		}
		text = text[topic+int(size):]
	}
	return err
}
