package cuckoo

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// plain is a placement without mixing, for random hashes.
type plain uint32

func (p plain) Place(hash uint64) (fingerprint uint64, bucket uint32) {
	return max(1, hash&0xffff), uint32(hash>>16) & uint32(p)
}

func (p plain) Other(bucket uint32, fingerprint uint64) uint32 {
	return (bucket ^ uint32(fingerprint)*0x5bd1e995) & uint32(p)
}

// TestAFullFilterRefusesHashesAndLosesNone fills a filter, and empties it again.
func TestAFullFilterRefusesHashesAndLosesNone(t *testing.T) {
	const buckets = 64
	random, place := rand.New(rand.NewPCG(1, 2)), plain(buckets-1)
	f, marked := New(buckets, place), map[uint32]bool{}
	f.Changed = func(bucket uint32) { marked[bucket] = true }
	var added []uint64
	for range 2 * buckets * Lanes {
		before, hash := slices.Clone(f.Buckets), random.Uint64()
		clear(marked)
		if f.Add(hash) {
			added = append(added, hash)
		} else if !slices.Equal(f.Buckets, before) {
			t.Fatal("a hash that is refused changes the filter")
		}
		for i, word := range f.Buckets {
			if word != before[i] && !marked[uint32(i)] {
				t.Fatalf("a change of bucket %d is not reported", i)
			}
		}
	}
	if len(added) < buckets*Lanes*9/10 || f.Used != len(added) {
		t.Errorf("%d hashes in %d lanes, %d counted", len(added), buckets*Lanes, f.Used)
	}
	for i, hash := range added {
		fingerprint, bucket := place.Place(hash)
		if !Has(f.Buckets[bucket], fingerprint) && !Has(f.Buckets[place.Other(bucket, fingerprint)], fingerprint) {
			t.Fatalf("hash %d is not found", i)
		}
	}
	for _, hash := range added {
		f.Remove(hash)
	}
	if f.Used != 0 || slices.Max(f.Buckets) != 0 {
		t.Errorf("%d lanes are left", f.Used)
	}
}

// TestALaneIsFoundAsOneByOne compares the search of a word with a plain one.
func TestALaneIsFoundAsOneByOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b [8]byte
		few := rapid.SampledFrom([]uint16{0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF})
		for i := range Lanes {
			binary.LittleEndian.PutUint16(b[2*i:], few.Draw(t, "lane"))
		}
		word, fingerprint := binary.LittleEndian.Uint64(b[:]), few.Draw(t, "fingerprint")
		want, taken := Lanes, 0
		for i := range Lanes {
			v := binary.LittleEndian.Uint16(b[2*i:])
			if v == fingerprint && want == Lanes {
				want = i
			}
			if v != 0 {
				taken++
			}
		}
		if got := lane(word, uint64(fingerprint)); got != want || Used(word) != taken || Has(word, uint64(fingerprint)) != (want < Lanes) {
			t.Fatalf("%#x has %#x in lane %d and %d taken: want %d, %d", word, fingerprint, got, Used(word), want, taken)
		}
	})
}
