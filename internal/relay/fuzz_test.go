package relay

import (
	"bytes"
	"testing"
)

// FuzzDecode decodes a message as each kind. What is decoded is encoded, and decoded again
// to the same.
func FuzzDecode(f *testing.F) {
	for _, name := range []string{"catalog", "readiness", "load", "info", "snapshot", "stored", "heartbeat"} {
		f.Add(sample(f, name))
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		again := func(first, second []byte) {
			if !bytes.Equal(first, second) {
				t.Fatalf("%x becomes %x", first, second)
			}
		}
		if c, err := DecodeCatalog(message); err == nil {
			again(c.Encode(), must[*Catalog](t)(DecodeCatalog(c.Encode())).Encode())
		}
		if r, err := DecodeReadiness(message); err == nil {
			again(r.Encode(), must[*Readiness](t)(DecodeReadiness(r.Encode())).Encode())
		}
		if l, err := DecodeLoad(message); err == nil {
			again(l.Encode(), must[*Load](t)(DecodeLoad(l.Encode())).Encode())
		}
		if u, err := DecodeUpdate(message); err == nil {
			again(u.Encode(), must[*Update](t)(DecodeUpdate(u.Encode())).Encode())
		}
		_, _ = decodeInfo(message)
		_, _, _ = decodeRequest(message, true)
	})
}

// FuzzStream applies two frames with valid checksums, behind a snapshot.
func FuzzStream(f *testing.F) {
	p := producerOf(64)
	words := make([]uint64, p.Format.Buckets)
	words[3] = 7
	f.Add(uint8(Delta), uint64(1), encodeDelta(&p, 0, 1, []uint32{3}, words), encodeDelta(&p, 1, 2, []uint32{3}, words))
	f.Add(uint8(Snapshot), uint64(5), encodeChunk(&p, 5, words, 0), []byte{})
	f.Fuzz(func(t *testing.T, kind uint8, sequence uint64, first, second []byte) {
		s := must[*Stream](t)(NewStream(p))
		apply := func(kind Kind, base, sequence uint64, payload []byte) error {
			if len(payload) >= headerSize {
				payload = seal(bytes.Clone(payload))
			}
			return s.Apply(&Update{Producer: p, Base: base, Sequence: sequence, Kind: kind, Payload: payload})
		}
		if err := apply(Snapshot, 0, 0, encodeChunk(&p, 0, words, 0)); err != nil {
			t.Fatal(err)
		}
		_ = apply(Kind(kind), 0, sequence, first)
		err := apply(Delta, sequence, sequence+1, second)
		held := 0
		if now := s.Filter().words.Load(); now != nil {
			if len(*now) != p.Format.Buckets {
				t.Fatalf("%d buckets", len(*now))
			}
			for _, word := range *now {
				held += used(word)
			}
		}
		if held != s.Filter().Held() || err != nil && held != 0 {
			t.Fatalf("%d slots are taken, %d counted, after %v", held, s.Filter().Held(), err)
		}
	})
}
