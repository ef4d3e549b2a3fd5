// Package cuckoo implements cuckoo filters (Fan et al., CoNEXT 2014) of 64-bit hashes, with
// buckets of four fingerprints of 16 bits in one word. Each hash has a fingerprint, which is in
// one of two buckets. A hash that was added is found, and removing it never removes another one.
package cuckoo

import "math/bits"

// Lanes is the number of fingerprints of a bucket, the first in the lowest bits. 0 is a free
// lane.
const Lanes = 4

// FalsePositive is the maximum probability with which a filter seems to have a hash that it
// does not have, whatever its words: two buckets are looked at, and there are 65,535
// fingerprints.
const FalsePositive = 2.0 * Lanes / 65535

// maxKicks is the number of fingerprints that make room for one before the filter counts as
// full.
const maxKicks = 64

// Placement is where hashes may be in a filter.
type Placement interface {
	// Place returns the fingerprint of a hash, 1 to 65,535, and the first of its buckets.
	Place(hash uint64) (fingerprint uint64, bucket uint32)
	// Other returns the second bucket of a fingerprint that may be in the first, and back.
	Other(bucket uint32, fingerprint uint64) uint32
}

const (
	lowBits  = 0x0001_0001_0001_0001
	highBits = 0x8000_8000_8000_8000
)

// lane returns the first lane of a bucket with that fingerprint, or that is free for 0; Lanes:
// there is none.
func lane(bucket, fingerprint uint64) int {
	// The lowest zero lane of different is where the fingerprint is: bits above it may be set by
	// the borrow, those below it are not.
	different := bucket ^ fingerprint*lowBits
	return bits.TrailingZeros64((different-lowBits)&^different&highBits) / 16
}

// Used returns the number of lanes of a bucket that are taken.
func Used(bucket uint64) (n int) {
	for ; bucket != 0; bucket >>= 16 {
		if bucket&0xffff != 0 {
			n++
		}
	}
	return n
}

// Has reports whether a bucket has a fingerprint.
func Has(bucket, fingerprint uint64) bool {
	different := bucket ^ fingerprint*lowBits
	return (different-lowBits)&^different&highBits != 0
}

// Filter is a filter that changes. It is not safe for concurrent use.
type Filter struct {
	Buckets []uint64
	Used    int                 // lanes
	Changed func(bucket uint32) // called at each change of a bucket; nil: no call
	place   Placement
	turn    uint32 // of the lane to be kicked out
}

// New returns an empty filter.
func New(buckets int, place Placement) *Filter {
	return &Filter{Buckets: make([]uint64, buckets), place: place}
}

// set changes one lane.
func (f *Filter) set(bucket uint32, at int, fingerprint uint64) {
	word := &f.Buckets[bucket]
	*word = *word&^(0xffff<<(16*at)) | fingerprint<<(16*at)
	if f.Changed != nil {
		f.Changed(bucket)
	}
}

// replace puts a fingerprint into the first lane of a bucket that has another one, or that is
// free for 0.
func (f *Filter) replace(bucket uint32, old, fingerprint uint64) (ok bool) {
	at := lane(f.Buckets[bucket], old)
	if at < Lanes {
		f.set(bucket, at, fingerprint)
	}
	return at < Lanes
}

// Add adds a hash. Not ok: there is no place for it, and nothing has changed.
func (f *Filter) Add(hash uint64) (ok bool) {
	fingerprint, b := f.place.Place(hash)
	if f.replace(b, 0, fingerprint) || f.replace(f.place.Other(b, fingerprint), 0, fingerprint) {
		f.Used++
		return true
	}
	var path [maxKicks]struct {
		bucket uint32
		lane   int
	}
	for i := range path {
		f.turn = f.turn*1664525 + 1013904223
		at := int(f.turn >> 30)
		path[i].bucket, path[i].lane = b, at
		kicked := f.Buckets[b] >> (16 * at) & 0xffff
		f.set(b, at, fingerprint)
		fingerprint = kicked
		b = f.place.Other(b, fingerprint)
		if f.replace(b, 0, fingerprint) {
			f.Used++
			return true
		}
	}
	for i := maxKicks - 1; i >= 0; i-- {
		p := path[i]
		before := f.Buckets[p.bucket] >> (16 * p.lane) & 0xffff
		f.set(p.bucket, p.lane, fingerprint)
		fingerprint = before
	}
	return false
}

// Remove removes a hash that was added.
func (f *Filter) Remove(hash uint64) {
	fingerprint, b := f.place.Place(hash)
	if f.replace(b, fingerprint, 0) || f.replace(f.place.Other(b, fingerprint), fingerprint, 0) {
		f.Used--
	}
}
