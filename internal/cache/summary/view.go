package summary

import (
	"encoding/binary"
	"sync"
)

// View is the summary of another router. It is empty at first. It is safe for
// concurrent use.
type View struct {
	mu       sync.RWMutex // guards the rest
	buckets  []uint64     // nil: nothing was received
	seed     uint64
	position Position
	complete bool // the snapshot has come to its end
}

// Apply applies a message. After an error the view is empty, and takes the next snapshot.
func (v *View) Apply(message []byte) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := v.apply(message); err != nil {
		v.empty()
		return err
	}
	return nil
}

func (v *View) apply(message []byte) error {
	if len(message) == 0 || len(message) > MaxMessage {
		return malformed("%d bytes", len(message))
	}
	kind, rest := message[0], message[1:]
	switch kind {
	case kindReset:
		if len(message) != resetSize {
			return malformed("a snapshot begins with %d bytes, not %d", len(message), resetSize)
		}
		bits := rest[16]
		if bits < minBits || bits > MaxBits {
			return malformed("2^%d buckets: from 2^%d to 2^%d can be used", bits, minBits, MaxBits)
		}
		v.complete = false
		v.position = Position{binary.LittleEndian.Uint64(rest), binary.LittleEndian.Uint64(rest[17:])}
		v.seed = binary.LittleEndian.Uint64(rest[8:])
		if len(v.buckets) != 1<<bits {
			v.buckets = make([]uint64, 1<<bits)
		} else {
			clear(v.buckets)
		}
		return nil
	case kindPart:
		if v.buckets == nil || v.complete {
			return ErrGap
		}
		return applyChanges(v.buckets, rest)
	case kindEnd:
		if v.buckets == nil || v.complete || len(rest) > 0 {
			return ErrGap
		}
		v.complete = true
		return nil
	case kindDelta:
		if len(rest) < 8 {
			return malformed("a delta of %d bytes", len(message))
		}
		if seq := binary.LittleEndian.Uint64(rest); !v.complete || seq != v.position.Seq+1 {
			return ErrGap
		}
		v.position.Seq++
		return applyChanges(v.buckets, rest[8:])
	}
	return malformed("kind %d", kind)
}

// Empty empties the view.
func (v *View) Empty() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.empty()
}

func (v *View) empty() { v.buckets, v.complete, v.position = nil, false, Position{} }

// Position returns from where on the messages can be resumed; not ok: a snapshot is needed.
func (v *View) Position() (at Position, ok bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.position, v.complete
}

// Bytes returns the memory of the view.
func (v *View) Bytes() int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return 8 * len(v.buckets)
}

// Run returns how many leading hashes of a prompt the view holds. It looks at them in order and
// ends at the first that is missing: behind one, a false positive would count for a run.
func (v *View) Run(sequence []uint64) int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if !v.complete {
		return 0
	}
	place := placement{v.seed, uint32(len(v.buckets) - 1)}
	for i, hash := range sequence {
		if !place.in(v.buckets, hash) {
			return i
		}
	}
	return len(sequence)
}
