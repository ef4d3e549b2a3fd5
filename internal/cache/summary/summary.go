// Package summary implements compact sets of prompt prefixes, with which a router reports to
// another one the blocks that its workers have cached. A Book follows the exact set and publishes
// it as messages; a View at the other end is their sum.
//
// A prefix is named by the sequence hash of its last block. The set is a cuckoo filter with
// fingerprints of 16 bits: it never denies a listed hash, and matches an unlisted
// one with a probability of at most FalsePositive. Messages carry the lanes of the filter that
// have changed, so that a removal is sent like an addition.
//
// A View is empty until it has a whole snapshot, and again from a gap on. Whatever messages say,
// it takes at most 2^MaxBits buckets, and matches an unlisted hash only with that probability: a
// forged filter cannot claim all prefixes.
package summary

import (
	"encoding/binary"
	"errors"
	"fmt"

	"kvrouter/internal/base/cuckoo"
)

// Kinds of messages: the first byte.
const (
	kindReset = 'r' // epoch, seed, bits, seq: an empty filter, which is not usable yet
	kindPart  = 'p' // changes: a part of a snapshot
	kindEnd   = 'e' // the snapshot is complete
	kindDelta = 'd' // seq, changes
)

const (
	// resetSize is the bytes of a message of kindReset.
	resetSize = 1 + 8 + 8 + 1 + 8
	// partBuckets is how many buckets a part of a snapshot has, of up to mostOfChange bytes each.
	partBuckets = 1 << 14
	// MaxMessage bounds a message, bytes.
	MaxMessage = 1 << 20
	// mostOfChange is the longest change, bytes: gap, mask and four fingerprints.
	mostOfChange = binary.MaxVarintLen32 + 1 + 2*cuckoo.Lanes
)

// Errors of View.Apply. The view is empty from then on.
var (
	// ErrGap: a delta does not follow the last one.
	ErrGap = errors.New("summary: a message is missing")
	// ErrMessage: a message is none.
	ErrMessage = errors.New("summary: malformed message")
)

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMessage, fmt.Sprintf(format, args...))
}

// Begins reports whether a message begins a snapshot.
func Begins(message []byte) bool { return len(message) > 0 && message[0] == kindReset }

// Position is a place in a book's messages.
type Position struct {
	Epoch uint64 // of the filter: a random number
	Seq   uint64 // of the last delta
}

// appendChange appends the lanes in which a bucket differs from what was sent. gap is its
// distance from the bucket of the change before, or from bucket 0.
func appendChange(dst []byte, gap uint32, sent, now uint64) []byte {
	mask := uint64(0)
	for i := range cuckoo.Lanes {
		if (sent^now)>>(16*i)&0xffff != 0 {
			mask |= 1 << i
		}
	}
	dst = binary.AppendUvarint(dst, uint64(gap)<<cuckoo.Lanes|mask)
	for i := range cuckoo.Lanes {
		if mask>>i&1 != 0 {
			dst = binary.LittleEndian.AppendUint16(dst, uint16(now>>(16*i)))
		}
	}
	return dst
}

// applyChanges applies the changes of a message to buckets, whose number is a power of two.
func applyChanges(buckets []uint64, changes []byte) error {
	bucket := uint32(0)
	for len(changes) > 0 {
		head, n := binary.Uvarint(changes)
		if n <= 0 || head>>cuckoo.Lanes >= uint64(len(buckets)) || head&(1<<cuckoo.Lanes-1) == 0 {
			return malformed("a change is cut, names no lane, or a bucket beyond %d", len(buckets))
		}
		changes = changes[n:]
		bucket = (bucket + uint32(head>>cuckoo.Lanes)) & uint32(len(buckets)-1)
		for i := range cuckoo.Lanes {
			if head>>i&1 == 0 {
				continue
			}
			if len(changes) < 2 {
				return malformed("a change is cut")
			}
			buckets[bucket] = buckets[bucket]&^(0xffff<<(16*i)) | uint64(binary.LittleEndian.Uint16(changes))<<(16*i)
			changes = changes[2:]
		}
	}
	return nil
}
