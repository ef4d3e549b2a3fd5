package summary

import (
	"math/bits"
)

// laneCount is the fingerprints of a bucket: 16 bits each, in one word.
const laneCount = 4

// FalsePositive bounds the probability with which a filter seems to hold a hash that it does
// not hold: two buckets are looked at, and there are 65,535 fingerprints.
const FalsePositive = 2.0 * laneCount / 65535

const (
	// minBits and MaxBits bound the buckets of a filter, as powers of two: 2^MaxBits are
	// 32 MB, for 14 M hashes.
	minBits = 8
	MaxBits = 22
	// maxKicks is how many fingerprints make room for one before the filter counts as full.
	maxKicks = 64
	// fullAt is the load, of 100, at which a filter gets twice the buckets. Below it nearly
	// every hash finds a place at once, so that one operation changes one bucket.
	fullAt = 85
)

// filter is a cuckoo filter (Fan et al., CoNEXT 2014): each hash has a fingerprint, which is in
// one of two buckets. Removing a hash that was added never removes another one.
type filter struct {
	seed    uint64   // keeps others from choosing hashes that collide
	buckets []uint64 // laneCount fingerprints each; 0 is an empty lane
	used    int
	turn    uint32 // of the lane to be kicked out
	changed func(bucket uint32)
}

// newFilter returns an empty filter of 2^bits buckets; changed is told of each change.
func newFilter(seed uint64, bits int, changed func(bucket uint32)) *filter {
	return &filter{seed: seed, buckets: make([]uint64, 1<<bits), changed: changed}
}

// places returns the fingerprint of a hash, from 1, and its buckets.
func places(hash, seed uint64, buckets int) (fingerprint uint64, first, second uint32) {
	// The finalizer of MurmurHash3 on both halves of what the seed makes of the hash.
	high, low := bits.Mul64(hash^seed, 0x9e3779b97f4a7c15)
	h := high ^ low
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	fingerprint = 1 + (h>>32*65535)>>32
	first = uint32(h) & uint32(buckets-1)
	return fingerprint, first, other(first, fingerprint, buckets)
}

// other returns the second bucket of a fingerprint in one of its buckets.
func other(bucket uint32, fingerprint uint64, buckets int) uint32 {
	return (bucket ^ uint32(fingerprint)*0x5bd1e995) & uint32(buckets-1)
}

const (
	lowBits  = 0x0001_0001_0001_0001
	highBits = 0x8000_8000_8000_8000
)

// has reports whether a bucket holds a fingerprint; 0 asks for an empty lane.
func has(bucket, fingerprint uint64) bool {
	x := bucket ^ fingerprint*lowBits
	return (x-lowBits)&^x&highBits != 0
}

// lane returns the first lane of a bucket with that fingerprint; laneCount: there is none.
func lane(bucket, fingerprint uint64) int {
	for i := range laneCount {
		if bucket>>(16*i)&0xffff == fingerprint {
			return i
		}
	}
	return laneCount
}

// set changes one lane.
func (f *filter) set(bucket uint32, at int, fingerprint uint64) {
	word := &f.buckets[bucket]
	*word = *word&^(0xffff<<(16*at)) | fingerprint<<(16*at)
	f.changed(bucket)
}

// contains reports whether the buckets seem to hold a hash.
func contains(buckets []uint64, seed, hash uint64) bool {
	fingerprint, first, second := places(hash, seed, len(buckets))
	return has(buckets[first], fingerprint) || has(buckets[second], fingerprint)
}

// add adds a hash. Not ok: there is no place for it, and nothing has changed.
func (f *filter) add(hash uint64) (ok bool) {
	fingerprint, first, second := places(hash, f.seed, len(f.buckets))
	for _, b := range []uint32{first, second} {
		if at := lane(f.buckets[b], 0); at < laneCount {
			f.set(b, at, fingerprint)
			f.used++
			return true
		}
	}
	var path [maxKicks]struct {
		bucket uint32
		lane   int
	}
	b := first
	for i := range path {
		f.turn = f.turn*1664525 + 1013904223
		at := int(f.turn >> 30)
		path[i].bucket, path[i].lane = b, at
		kicked := f.buckets[b] >> (16 * at) & 0xffff
		f.set(b, at, fingerprint)
		fingerprint = kicked
		b = other(b, fingerprint, len(f.buckets))
		if at := lane(f.buckets[b], 0); at < laneCount {
			f.set(b, at, fingerprint)
			f.used++
			return true
		}
	}
	for i := maxKicks - 1; i >= 0; i-- {
		p := path[i]
		before := f.buckets[p.bucket] >> (16 * p.lane) & 0xffff
		f.set(p.bucket, p.lane, fingerprint)
		fingerprint = before
	}
	return false
}

// remove removes a hash that was added.
func (f *filter) remove(hash uint64) {
	fingerprint, first, second := places(hash, f.seed, len(f.buckets))
	for _, b := range []uint32{first, second} {
		if at := lane(f.buckets[b], fingerprint); at < laneCount {
			f.set(b, at, 0)
			f.used--
			return
		}
	}
}

// full reports whether the filter should have more buckets.
func (f *filter) full() bool { return f.used*100 >= len(f.buckets)*laneCount*fullAt }
