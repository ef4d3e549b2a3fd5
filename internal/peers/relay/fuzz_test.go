package relay

import (
	"bytes"
	"testing"

	"kvrouter/internal/base/cuckoo"
	"kvrouter/internal/testkit/relaytest"
)

// FuzzDecode decodes a message as each kind. What is decoded passes its checks.
func FuzzDecode(f *testing.F) {
	for _, name := range []string{"catalog", "readiness", "info", "snapshot", "stored", "heartbeat"} {
		f.Add(sample(f, name))
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		if c, err := decodeCatalog(message); err == nil {
			for i := range c.Pools {
				if err := c.Pools[i].check(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_, _ = decodeReadiness(message)
		if u, err := decodeUpdate(message); err == nil {
			if err := u.Producer.check(); err != nil {
				t.Fatal(err)
			}
			_ = streamOf(u.Producer).Apply(u)
		}
		_, _ = readAnswer(message, fields{})
	})
}

// FuzzStream applies two frames with valid checksums, behind a snapshot.
func FuzzStream(f *testing.F) {
	pool := relaytest.NewPool(32)
	words, p := make([]uint64, pool.Buckets), producerOf(pool)
	words[3] = 7
	f.Add(uint8(Delta), uint64(1), pool.Delta(0, 1, words, 3), pool.Delta(1, 2, words, 3))
	f.Add(uint8(Snapshot), uint64(5), pool.Snapshot(5, words, 0), []byte{})
	f.Fuzz(func(t *testing.T, kind uint8, sequence uint64, first, second []byte) {
		s := streamOf(p)
		apply := func(kind Kind, base, sequence uint64, payload []byte) error {
			if len(payload) >= headerSize {
				payload = relaytest.Seal(bytes.Clone(payload))
			}
			return s.Apply(&Update{Producer: p, Base: base, Sequence: sequence, Kind: kind, Payload: payload})
		}
		if err := apply(Snapshot, 0, 0, pool.Snapshot(0, words, 0)); err != nil {
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
				held += cuckoo.Used(word)
			}
		}
		if held != s.Filter().Held() || err != nil && held != 0 {
			t.Fatalf("%d slots are taken, %d counted, after %v", held, s.Filter().Held(), err)
		}
	})
}
