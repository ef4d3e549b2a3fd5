package relay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"kvrouter/internal/base/cuckoo"
)

// Filter is the set of blocks of a pool, as the relay last reported. Its methods are safe for
// concurrent use. A look-up beside a delta sees each bucket before or after it.
type Filter struct {
	format Format
	words  atomic.Pointer[[]uint64] // of all buckets, each read and written atomically; nil: not known
	taken  atomic.Int64             // slots
}

// Known reports whether the filter has a complete snapshot and all deltas since.
func (f *Filter) Known() bool { return f.words.Load() != nil }

// Held returns the number of fingerprints.
func (f *Filter) Held() int { return int(f.taken.Load()) }

// Prefix returns how many of the blocks are held, from the first one on. sequence are their
// sequence hashes. It ends at the first block that is not held: a later one is of no use to
// a worker. Each block takes one or two random reads, 20 to 150 ns.
func (f *Filter) Prefix(sequence []uint64) int {
	words := f.words.Load()
	if words == nil {
		return 0
	}
	for i, hash := range sequence {
		if !f.has(*words, hash) {
			return i
		}
	}
	return len(sequence)
}

func (f *Filter) has(words []uint64, hash uint64) bool {
	fingerprint, bucket := f.format.place(hash)
	return cuckoo.Has(atomic.LoadUint64(&words[bucket]), fingerprint) ||
		cuckoo.Has(atomic.LoadUint64(&words[f.format.other(bucket, fingerprint)]), fingerprint)
}

// empty forgets all blocks.
func (f *Filter) empty() {
	f.words.Store(nil)
	f.taken.Store(0)
}

// Stream applies the messages of one pool's stream to a filter. One goroutine at a time may
// use it.
type Stream struct {
	producer Producer
	filter   *Filter
	budget   *atomic.Int64 // bytes that filters may still take
	took     int64

	relay    Identity
	heard    bool // relay is set
	sequence uint64

	parts  []uint64 // of a snapshot that is not complete
	next   uint32   // part; 0: none has begun
	chunks uint32
	at     uint64 // sequence of parts

	seen   []uint64 // bitmap of the buckets of one delta
	failed error
}

// NewStream returns the start of a stream for one producer, which was checked. The filter is
// empty until the first snapshot is complete. budget is the bytes that filters may still take.
func NewStream(p Producer, budget *atomic.Int64) *Stream {
	return &Stream{producer: p, filter: &Filter{format: p.Format}, budget: budget}
}

// Filter returns the filter that the stream's messages change.
func (s *Stream) Filter() *Filter { return s.filter }

// Apply applies a message. After an error the filter is empty, and the stream must be
// reopened: a missing message cannot be recovered.
func (s *Stream) Apply(u *Update) error {
	if s.failed == nil {
		s.failed = s.apply(u)
	}
	if s.failed != nil {
		s.Close()
	}
	return s.failed
}

// Close empties the filter for good.
func (s *Stream) Close() {
	s.filter.empty()
	s.parts, s.seen = nil, nil
	s.budget.Add(s.took)
	s.took = 0
	if s.failed == nil {
		s.failed = errors.New("the stream is closed")
	}
}

func (s *Stream) apply(u *Update) error {
	switch {
	case u.Producer != s.producer:
		return errors.New("a message of another producer")
	case s.heard && u.Relay != s.relay:
		return errors.New("a message of another relay")
	}
	s.relay, s.heard = u.Relay, true
	switch u.Kind {
	case Heartbeat:
		if len(u.Payload) > 0 || u.Base != u.Sequence || !s.filter.Known() || u.Sequence != s.sequence {
			return fmt.Errorf("a heartbeat of sequence %d after %d", u.Sequence, s.sequence)
		}
		return nil
	case Snapshot, Delta:
	default:
		return fmt.Errorf("a message of kind %d", u.Kind)
	}
	f, err := parseFrame(&s.producer, u.Payload)
	switch {
	case err != nil:
		return err
	case f.delta != (u.Kind == Delta):
		return errors.New("a frame of another kind than its message")
	case f.sequence != u.Sequence:
		return fmt.Errorf("a frame of sequence %d in a message of %d", f.sequence, u.Sequence)
	case f.delta:
		return s.delta(u, &f)
	}
	return s.part(u, &f)
}

// part adds a part of a snapshot. Memory grows with what has arrived, not with what is
// announced.
func (s *Stream) part(u *Update, f *frame) error {
	if u.Base != u.Sequence || s.filter.Known() && u.Sequence < s.sequence {
		return fmt.Errorf("a snapshot of sequences %d to %d after %d", u.Base, u.Sequence, s.sequence)
	}
	if f.chunk == 0 && s.next == 0 {
		s.chunks, s.at, s.parts = f.chunks, u.Sequence, nil
	}
	n := len(f.body) / 8
	if f.chunk != s.next || f.chunks != s.chunks || u.Sequence != s.at || f.first != uint64(len(s.parts)) || n == 0 ||
		f.chunks > uint32(chunksOf(maxBuckets)) {
		return fmt.Errorf("part %d of %d from bucket %d: want part %d of %d from bucket %d", f.chunk, f.chunks, f.first, s.next, s.chunks,
			len(s.parts))
	}
	size := int64(8 * n)
	if s.budget.Add(-size) < 0 {
		s.budget.Add(size)
		return fmt.Errorf("a filter of %d MiB exceeds the memory of all filters", s.producer.Format.Buckets>>17)
	}
	s.took += size
	for i := range n {
		s.parts = append(s.parts, binary.LittleEndian.Uint64(f.body[8*i:]))
	}
	if s.next++; s.next < s.chunks {
		return nil
	}
	if len(s.parts) != s.producer.Format.Buckets {
		return fmt.Errorf("a snapshot of %d buckets: want %d", len(s.parts), s.producer.Format.Buckets)
	}
	words, taken := s.parts, 0
	for _, word := range words {
		taken += cuckoo.Used(word)
	}
	old := s.filter.words.Swap(&words)
	s.filter.taken.Store(int64(taken))
	if old != nil { // replaced by the new one
		s.budget.Add(int64(8 * len(*old)))
		s.took -= int64(8 * len(*old))
	}
	s.parts, s.next, s.sequence = nil, 0, u.Sequence
	return nil
}

// delta applies the words of single buckets, all or none.
func (s *Stream) delta(u *Update, f *frame) error {
	words := s.filter.words.Load()
	if words == nil || s.next != 0 || f.base != u.Base || u.Base != s.sequence || u.Sequence != s.sequence+1 {
		return fmt.Errorf("a delta of sequences %d to %d after %d", u.Base, u.Sequence, s.sequence)
	}
	if s.seen == nil {
		s.seen = make([]uint64, (s.producer.Format.Buckets+63)/64)
	}
	n := len(f.body) / imageSize
	valid, checked := true, 0
	for ; checked < n && valid; checked++ {
		bucket, _ := f.image(checked)
		if int64(bucket) >= int64(len(*words)) || s.seen[bucket/64]&(1<<(bucket%64)) != 0 {
			valid = false
			break
		}
		s.seen[bucket/64] |= 1 << (bucket % 64)
	}
	for i := range checked {
		bucket, _ := f.image(i)
		s.seen[bucket/64] = 0
	}
	if !valid {
		return errors.New("a delta names a bucket twice or beyond the filter")
	}
	change := 0
	for i := range n {
		bucket, word := f.image(i)
		change += cuckoo.Used(word) - cuckoo.Used((*words)[bucket])
		atomic.StoreUint64(&(*words)[bucket], word)
	}
	s.filter.taken.Add(int64(change))
	s.sequence = u.Sequence
	return nil
}
