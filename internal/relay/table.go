package relay

import "math/bits"

const (
	// defaultSeed is the seed of the filters of Dynamo's relay.
	defaultSeed = 0x5DEECE66D1B54A33
	// maxKicks is the maximum number of fingerprints that move for a new one.
	maxKicks = 500
	// expectedShare is the share of slots taken by as many blocks as are expected: half, as
	// in Dynamo's relay.
	expectedShare = 2
)

// FormatFor returns the format of a filter for that many blocks. It can take almost twice as
// many. A filter takes 4 to 8 bytes a block expected, 4 MiB for 1,048,576.
func FormatFor(blocks int) Format {
	buckets := 2
	for buckets < MaxBuckets && buckets*slotsPerBucket < blocks*expectedShare {
		buckets *= 2
	}
	return Format{Seed: defaultSeed, Buckets: buckets}
}

// table is a filter on the side that knows the blocks. A sequence hash with several owners
// takes one slot. It is not safe for concurrent use.
type table struct {
	format  Format
	words   []uint64
	owners  map[uint64]uint32 // of the sequence hashes that have a slot
	omitted uint64            // owners that got no slot, as there was none
	kicks   uint64            // draws the slots of fingerprints that move
	dirty   []uint64          // bitmap of changed
	changed []uint32          // buckets, in the order of their first change
	moved   []change          // by the block that is being added
}

// change is a bucket's word before it changed.
type change struct {
	bucket uint32
	word   uint64
}

func newTable(f Format) *table {
	return &table{format: f, words: make([]uint64, f.Buckets), owners: map[uint64]uint32{}, dirty: make([]uint64, (f.Buckets+63)/64)}
}

// add counts one more owner. It is false if no slot could be freed: then nothing has
// changed, and drop must not be called for this owner.
func (t *table) add(sequence uint64) bool {
	if n := t.owners[sequence]; n > 0 {
		t.owners[sequence] = n + 1
		return true
	}
	if !t.insert(sequence) {
		t.omitted++
		return false
	}
	t.owners[sequence] = 1
	return true
}

// drop counts one owner less. The last one frees the slot.
func (t *table) drop(sequence uint64) {
	switch n := t.owners[sequence]; n {
	case 0:
	case 1:
		delete(t.owners, sequence)
		fingerprint, bucket := t.format.place(sequence)
		if !t.replace(bucket, fingerprint, 0) {
			t.replace(t.format.other(bucket, fingerprint), fingerprint, 0)
		}
	default:
		t.owners[sequence] = n - 1
	}
}

// insert takes a slot for a fingerprint. If both buckets are full, fingerprints move to
// their other bucket, one by one, until one finds a slot; if none does, all move back.
func (t *table) insert(sequence uint64) bool {
	fingerprint, bucket := t.format.place(sequence)
	if t.replace(bucket, 0, fingerprint) || t.replace(t.format.other(bucket, fingerprint), 0, fingerprint) {
		return true
	}
	t.moved = t.moved[:0]
	for range maxKicks {
		t.kicks = t.kicks*6364136223846793005 + 1442695040888963407 // Knuth's MMIX
		at := int(t.kicks>>62) * fingerprintBits
		word := t.words[bucket]
		t.moved = append(t.moved, change{bucket, word})
		t.words[bucket] = word&^(0xFFFF<<at) | uint64(fingerprint)<<at
		fingerprint = uint16(word >> at)
		bucket = t.format.other(bucket, fingerprint)
		if t.replace(bucket, 0, fingerprint) {
			for _, m := range t.moved {
				t.mark(m.bucket)
			}
			return true
		}
	}
	for i := len(t.moved) - 1; i >= 0; i-- {
		t.words[t.moved[i].bucket] = t.moved[i].word
	}
	return false
}

// replace puts a fingerprint into the first slot of a bucket that has another; 0: free.
func (t *table) replace(bucket uint32, old, fingerprint uint16) bool {
	word := t.words[bucket]
	at := slot(word, old)
	if at == slotsPerBucket {
		return false
	}
	t.words[bucket] = word&^(0xFFFF<<(at*fingerprintBits)) | uint64(fingerprint)<<(at*fingerprintBits)
	t.mark(bucket)
	return true
}

func (t *table) mark(bucket uint32) {
	if word, bit := &t.dirty[bucket/64], uint64(1)<<(bucket%64); *word&bit == 0 {
		*word |= bit
		t.changed = append(t.changed, bucket)
	}
}

// settle forgets which buckets have changed.
func (t *table) settle() {
	for _, bucket := range t.changed {
		t.dirty[bucket/64] = 0
	}
	t.changed = t.changed[:0]
}

// check reports whether the slots that are taken are as many as the hashes.
func (t *table) check() bool {
	taken := 0
	for _, word := range t.words {
		taken += used(word)
	}
	marked := 0
	for _, word := range t.dirty {
		marked += bits.OnesCount64(word)
	}
	return taken == len(t.owners) && marked == len(t.changed)
}
