package relaytest

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
	"google.golang.org/protobuf/encoding/protowire"
)

// Identity is a relay's process and its run within that.
type Identity struct{ Instance, Incarnation uint64 }

// Model is a model of a pool. Without a base its target is of an unknown kind.
type Model struct {
	Name, Base, Adapter string
	Aliases             []string
}

// Pool is a pool of workers of one namespace. Its messages have the values as they are, also
// those that the contract forbids.
type Pool struct {
	DataCenter, Incarnation uint64
	Buckets                 int // of its filter
	Models                  []Model
	BlockSize, Format       uint64
	Roles                   []byte
}

// seed is that of the filters of Dynamo's relay.
const seed = 0x5DEECE66D1B54A33

// NewPool returns a pool of model m, with blocks of 4 tokens.
func NewPool(buckets int) Pool {
	return Pool{
		DataCenter: 3, Incarnation: 9, Buckets: buckets, Models: []Model{{Name: "m", Base: "m"}}, BlockSize: 4, Format: 1, Roles: []byte{4},
	}
}

// Kinds of updates.
const (
	Snapshot  = 1
	Delta     = 2
	Heartbeat = 3
)

// Message is a protobuf message. Its methods append a field.
type Message []byte

// Text appends a text.
func (m Message) Text(number protowire.Number, text string) Message {
	return protowire.AppendString(protowire.AppendTag(m, number, protowire.BytesType), text)
}

// Number appends a number.
func (m Message) Number(number protowire.Number, v uint64) Message {
	return protowire.AppendVarint(protowire.AppendTag(m, number, protowire.VarintType), v)
}

// Fixed appends a number of 8 bytes.
func (m Message) Fixed(number protowire.Number, v uint64) Message {
	return protowire.AppendFixed64(protowire.AppendTag(m, number, protowire.Fixed64Type), v)
}

// Sealed appends the contract's marker, the end of every message.
func (m Message) Sealed() []byte {
	return protowire.AppendFixed32(protowire.AppendTag(m, 127, protowire.Fixed32Type), 0x4B565231)
}

// with appends a message as a field.
func (m Message) with(number protowire.Number, inner Message) Message {
	return m.Text(number, string(inner))
}

func (id Identity) head() Message {
	return Message{}.Number(1, 1).with(2, Message{}.Fixed(1, id.Instance).Fixed(2, id.Incarnation))
}

// Info returns a RelayInfo.
func (id Identity) Info() []byte { return id.head().Sealed() }

func (p Pool) id() Message {
	digest := Message{}.Text(1, "0123456789abcdef").Number(2, 2)
	return Message{}.Number(1, 1).with(2, Message{}.with(1, digest).with(2, digest)).Fixed(3, p.DataCenter)
}

// Producer returns a ProducerIdentity.
func (p Pool) Producer() Message {
	format := Message{}.Number(1, 1).Fixed(2, seed).Number(3, uint64(p.Buckets)).Number(4, 16).Number(5, 4)
	return Message{}.with(1, p.id()).Fixed(2, p.Incarnation).Number(3, 1).with(4, format)
}

func endpoint() Message { return Message{}.Text(1, "prod").Text(2, "backend").Text(3, "generate") }

// Encode returns a pool of a catalog.
func (p Pool) Encode() Message {
	m := Message{}.with(1, p.Producer()).with(2, endpoint())
	for _, model := range p.Models {
		target := Message{}
		switch {
		case model.Adapter != "":
			target = target.with(2, Message{}.Text(1, model.Base).Text(2, model.Adapter))
		case model.Base != "":
			target = target.with(1, Message{}.Text(1, model.Base))
		}
		one := Message{}.Text(1, model.Name).with(2, target)
		for _, alias := range model.Aliases {
			one = one.Text(3, alias)
		}
		m = m.with(3, one)
	}
	return m.with(4, Message{}.Number(1, p.BlockSize).Number(2, p.Format)).with(5, p.Roles)
}

// Catalog returns a KvPoolCatalogUpdate.
func (id Identity) Catalog(pools ...Pool) []byte {
	all := Message{}
	for _, p := range pools {
		all = all.with(1, p.Encode())
	}
	return id.head().Number(3, 1).with(4, all).Sealed()
}

// Readiness returns a ServingReadinessUpdate of the pool's first model.
func (id Identity) Readiness(p Pool, state uint64) []byte {
	member := Message{}.with(1, endpoint()).with(2, p.Roles).with(3, p.id())
	return id.head().Number(3, 1).with(4, Message{}.Text(1, "prod").Text(2, p.Models[0].Name).Number(3, state).with(6, member)).Sealed()
}

// Update returns a FilterUpdate with a frame, or with none.
func (id Identity) Update(p Pool, kind, base, sequence uint64, frame []byte) []byte {
	m := id.head().with(3, p.Producer()).Number(4, base).Number(5, sequence).Number(7, kind)
	if len(frame) > 0 {
		m = m.with(8, frame)
	}
	return m.Sealed()
}

// partBuckets is the number of buckets in all parts of a snapshot but the last.
const partBuckets = 512 << 10

// Parts returns the number of parts of a snapshot.
func (p Pool) Parts() int { return (p.Buckets + partBuckets - 1) / partBuckets }

// Snapshot returns the frame of a part of a snapshot. words are those of the whole filter.
func (p Pool) Snapshot(sequence uint64, words []uint64, part int) []byte {
	le, first := binary.LittleEndian, part*partBuckets
	dst := le.AppendUint32(p.header(1, sequence), uint32(part))
	dst = le.AppendUint64(le.AppendUint32(dst, uint32(p.Parts())), uint64(first))
	for _, word := range words[first:min(len(words), first+partBuckets)] {
		dst = le.AppendUint64(dst, word)
	}
	return Seal(dst)
}

// Delta returns the frame of the words of some buckets.
func (p Pool) Delta(base, sequence uint64, words []uint64, buckets ...uint32) []byte {
	le := binary.LittleEndian
	dst := le.AppendUint32(le.AppendUint64(p.header(2, sequence), base), uint32(len(buckets)))
	for _, bucket := range buckets {
		dst = le.AppendUint64(le.AppendUint32(dst, bucket), words[bucket])
	}
	return Seal(dst)
}

func (p Pool) header(kind uint16, sequence uint64) []byte {
	le := binary.LittleEndian
	dst := le.AppendUint16(le.AppendUint16([]byte("CBI1"), 1), kind)
	dst = le.AppendUint64(append(dst, 16, 4, 1, 0), seed)
	dst = le.AppendUint64(le.AppendUint64(dst, uint64(p.Buckets)), p.DataCenter)
	return le.AppendUint32(le.AppendUint64(dst, sequence), 0)
}

// Seal sets the checksum of a frame.
func Seal(frame []byte) []byte {
	binary.LittleEndian.PutUint32(frame[44:], uint32(xxh3.Hash(frame[48:])))
	return frame
}

// Words returns the filter's words with the blocks of those sequence hashes. It panics if both
// buckets of a block are full.
func (p Pool) Words(sequence ...uint64) []uint64 {
	words, mask := make([]uint64, p.Buckets), uint64(p.Buckets-1)
	for _, hash := range sequence {
		mixed := xxh3.HashSeed(binary.LittleEndian.AppendUint64(nil, hash), seed)
		fingerprint := max(1, mixed&0xffff)
		bucket := mixed >> 16 & mask
		other := bucket ^ max(1, xxh3.HashSeed(binary.LittleEndian.AppendUint16(nil, uint16(fingerprint)), seed^0x9E3779B97F4A7C15)&mask)
		if !put(&words[bucket], fingerprint) && !put(&words[other], fingerprint) {
			panic("the filter is full")
		}
	}
	return words
}

// put puts a fingerprint into the first free slot of a word.
func put(word *uint64, fingerprint uint64) bool {
	for at := 0; at < 64; at += 16 {
		if *word>>at&0xffff == 0 {
			*word |= fingerprint << at
			return true
		}
	}
	return false
}
