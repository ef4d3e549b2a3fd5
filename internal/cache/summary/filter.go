package summary

import (
	"math/bits"

	"kvrouter/internal/base/cuckoo"
)

// FalsePositive bounds the probability with which a filter seems to hold a hash that it does
// not hold.
const FalsePositive = cuckoo.FalsePositive

const (
	// minBits and MaxBits bound the buckets of a filter, as powers of two: 2^MaxBits are
	// 32 MB, for 14 M hashes.
	minBits = 8
	MaxBits = 22
	// fullAt is the load, of 100, at which a filter gets twice the buckets. Below it nearly
	// every hash finds a place at once, so that one operation changes one bucket.
	fullAt = 85
)

// placement is where hashes may be in a filter.
type placement struct {
	seed uint64 // keeps others from choosing hashes that collide
	mask uint32 // of the buckets, a power of two
}

// Place returns the fingerprint of a hash and the first of its buckets.
func (p placement) Place(hash uint64) (fingerprint uint64, bucket uint32) {
	// The finalizer of MurmurHash3 on both halves of what the seed makes of the hash.
	high, low := bits.Mul64(hash^p.seed, 0x9e3779b97f4a7c15)
	h := high ^ low
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return 1 + (h>>32*65535)>>32, uint32(h) & p.mask
}

// Other returns the other bucket of a fingerprint.
func (p placement) Other(bucket uint32, fingerprint uint64) uint32 {
	return (bucket ^ uint32(fingerprint)*0x5bd1e995) & p.mask
}

// in reports whether the buckets seem to hold a hash.
func (p placement) in(buckets []uint64, hash uint64) bool {
	fingerprint, first := p.Place(hash)
	return cuckoo.Has(buckets[first], fingerprint) || cuckoo.Has(buckets[p.Other(first, fingerprint)], fingerprint)
}

// filter is a filter with its placement.
type filter struct {
	*cuckoo.Filter
	placement placement
}

// newFilter returns an empty filter of 2^size buckets.
func newFilter(seed uint64, size int) filter {
	p := placement{seed, 1<<size - 1}
	return filter{cuckoo.New(1<<size, p), p}
}

// full reports whether the filter should have more buckets.
func (f filter) full() bool { return f.Used*100 >= len(f.Buckets)*cuckoo.Lanes*fullAt }
