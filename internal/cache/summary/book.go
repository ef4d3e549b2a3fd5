package summary

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"

	"kvrouter/internal/base/table"
)

const (
	// maxPending bounds the operations that wait for Publish, of 16 bytes. More are applied at
	// once by the one who brings them.
	maxPending = 1 << 18
	// minLog is how much is kept at least of the deltas, bytes; logEach is what each takes beside
	// its own.
	minLog  = 4 << 20
	logEach = 64
)

// Book is the exact set of held prefixes, with the filter that is sent of it. Hold and Drop may
// be called under another lock: they seldom do more than append to a list. It is safe for
// concurrent use.
type Book struct {
	mu      sync.Mutex // guards pending
	pending []operation

	// books guards the rest; it is taken before mu.
	books  sync.Mutex
	random func() uint64 // of filters and their epochs
	spare  []operation   // memory for pending
	held   table.Table   // hash -> 2·count, and 1 more if it is in the filter
	filter filter
	left   int      // hashes that are not in the filter: it is as large as it may be
	sent   []uint64 // buckets as of the last message
	dirty  []uint64 // bitset of the buckets that may differ from those
	marked []uint32 // the same, as a list
	cursor uint32   // of the next bucket to be sent
	at     Position
	log    [][]byte // the last deltas
	logged int      // bytes of them
}

// operation is a hash that is held once more, or once less.
type operation struct {
	hash uint64
	less bool
}

// NewBook returns an empty book.
func NewBook() *Book { return NewBookFrom(rand.Uint64) }

// NewBookFrom is NewBook with the source of its random numbers, for runs that are repeated. Who
// can guess them can choose hashes that collide.
func NewBookFrom(random func() uint64) *Book {
	b := &Book{random: random, held: table.Table{Seed: random()}}
	b.use(newFilter(random(), minBits))
	return b
}

// Hold counts one more holder of the prefix with that sequence hash.
func (b *Book) Hold(hash uint64) { b.note(operation{hash, false}) }

// Drop undoes a Hold.
func (b *Book) Drop(hash uint64) { b.note(operation{hash, true}) }

func (b *Book) note(o operation) {
	b.mu.Lock()
	b.pending = append(b.pending, o)
	full := len(b.pending) >= maxPending
	b.mu.Unlock()
	if full {
		b.books.Lock()
		b.catchUp()
		b.books.Unlock()
	}
}

// catchUp applies the pending operations. b.books is locked.
func (b *Book) catchUp() {
	b.mu.Lock()
	pending := b.pending
	b.pending = b.spare[:0]
	b.mu.Unlock()
	for _, o := range pending {
		if o.less {
			b.drop(o.hash)
		} else {
			b.hold(o.hash)
		}
	}
	b.spare = pending
}

const mostHolders = 1 << 30 // of one prefix

func (b *Book) hold(hash uint64) {
	state := b.held.Get(hash, 0)
	if state >= 2*mostHolders {
		return
	}
	if state == 0 {
		if b.filter.full() {
			b.grow()
		}
		for !b.filter.Add(hash) {
			if !b.grow() {
				b.left++
				b.held.Put(hash, 0, 2)
				return
			}
		}
		state = 1
	}
	b.held.Put(hash, 0, state+2)
}

func (b *Book) drop(hash uint64) {
	state := b.held.Get(hash, 0)
	switch {
	case state < 2: // never held
	case state >= 4:
		b.held.Put(hash, 0, state-2)
	default:
		if b.held.Delete(hash, 0); state&1 == 1 {
			b.filter.Remove(hash)
		} else {
			b.left--
		}
	}
}

// grow doubles the filter, which readers get as a new snapshot. Not ok: it is as large as it may
// be.
func (b *Book) grow() (ok bool) {
	for size := bitsOf(len(b.filter.Buckets)) + 1; size <= MaxBits; size++ {
		larger := newFilter(b.random(), size)
		var outside []uint64
		fits := true
		b.held.Each(func(hash uint64, _, state uint32) bool {
			if state&1 == 0 {
				outside = append(outside, hash)
			}
			fits = larger.Add(hash)
			return fits
		})
		if !fits {
			continue
		}
		for _, hash := range outside {
			b.held.Put(hash, 0, b.held.Get(hash, 0)|1)
		}
		b.left = 0
		b.use(larger)
		return true
	}
	return false
}

// bitsOf returns the exponent of a power of two.
func bitsOf(buckets int) int { return bits.TrailingZeros(uint(buckets)) }

// use begins an epoch with that filter, all of which counts as sent.
func (b *Book) use(f filter) {
	b.filter, b.sent = f, slices.Clone(f.Buckets)
	b.dirty, b.marked, b.cursor = make([]uint64, len(f.Buckets)/64), nil, 0
	b.at = Position{Epoch: b.random()}
	b.log, b.logged = nil, 0
	f.Changed = b.mark
}

// mark notes a change of a bucket.
func (b *Book) mark(bucket uint32) {
	if word, bit := &b.dirty[bucket/64], uint64(1)<<(bucket%64); *word&bit == 0 {
		*word |= bit
		b.marked = append(b.marked, bucket)
	}
}

// Publish appends the changes since the last call as a delta of about most bytes, which is at least
// 1,024 and at most MaxMessage; the next calls publish what does not fit. It returns the position
// that readers then have.
func (b *Book) Publish(most int) Position {
	b.books.Lock()
	defer b.books.Unlock()
	b.catchUp()
	if len(b.marked) == 0 {
		return b.at
	}
	most = min(max(most, 1024), MaxMessage)
	slices.Sort(b.marked)
	start, _ := slices.BinarySearch(b.marked, b.cursor) // so that each has its turn
	message := binary.LittleEndian.AppendUint64([]byte{kindDelta}, b.at.Seq+1)
	empty, last, done := len(message), uint32(0), 0
	for ; done < len(b.marked) && len(message)+mostOfChange <= most; done++ {
		bucket := b.marked[(start+done)%len(b.marked)]
		b.dirty[bucket/64] &^= 1 << (bucket % 64)
		if sent, now := b.sent[bucket], b.filter.Buckets[bucket]; sent != now {
			message = appendChange(message, (bucket-last)&uint32(len(b.sent)-1), sent, now)
			b.sent[bucket], last = now, bucket
		}
	}
	if done == len(b.marked) {
		b.marked, b.cursor = b.marked[:0], 0
	} else {
		b.cursor = b.marked[(start+done)%len(b.marked)]
		b.marked = slices.DeleteFunc(b.marked, func(bucket uint32) bool { return b.dirty[bucket/64]>>(bucket%64)&1 == 0 })
	}
	if len(message) > empty {
		b.at.Seq++
		b.log, b.logged = append(b.log, message), b.logged+len(message)+logEach
		for b.logged > b.maxLog() {
			b.logged -= len(b.log[0]) + logEach
			b.log[0] = nil
			b.log = b.log[1:]
		}
	}
	return b.at
}

// maxLog bounds the deltas that are kept for readers that were cut off, or whose snapshot takes
// long, bytes: as many as the filter has, so that a connection which can carry the deltas is
// through with a snapshot before those behind it are gone.
func (b *Book) maxLog() int { return max(minLog, 8*len(b.sent)) }

// Position returns the position after all published messages.
func (b *Book) Position() Position {
	b.books.Lock()
	defer b.books.Unlock()
	return b.at
}

// Since returns the deltas after a position; not ok: they are not kept any more, or the filter
// is another one. They must not be changed.
func (b *Book) Since(at Position) (messages [][]byte, ok bool) {
	b.books.Lock()
	defer b.books.Unlock()
	missing := b.at.Seq - at.Seq
	if at.Epoch != b.at.Epoch || missing > uint64(len(b.log)) {
		return nil, false
	}
	return slices.Clone(b.log[len(b.log)-int(missing):]), true
}

// Begin returns the first message of a snapshot. The others come from Part, and behind them the
// deltas after this position. What changes meanwhile is in both: a delta sets the lanes it names.
func (b *Book) Begin() (message []byte, at Position) {
	b.books.Lock()
	defer b.books.Unlock()
	message = binary.LittleEndian.AppendUint64([]byte{kindReset}, b.at.Epoch)
	message = binary.LittleEndian.AppendUint64(message, b.filter.placement.seed)
	return binary.LittleEndian.AppendUint64(append(message, byte(bitsOf(len(b.sent)))), b.at.Seq), b.at
}

// Part returns the message of a snapshot that has the buckets from bucket on, which is 0 at first,
// and where the next one resumes; nil: all were returned. Not ok: the filter is another one by
// now, so that the snapshot must begin anew.
func (b *Book) Part(at Position, bucket int) (message []byte, next int, ok bool) {
	b.books.Lock()
	defer b.books.Unlock()
	switch {
	case at.Epoch != b.at.Epoch:
		return nil, 0, false
	case bucket > len(b.sent):
		return nil, 0, true
	case bucket == len(b.sent):
		return []byte{kindEnd}, bucket + 1, true
	}
	message, next = []byte{kindPart}, min(bucket+partBuckets, len(b.sent))
	for last := 0; bucket < next; bucket++ {
		if now := b.sent[bucket]; now != 0 {
			message = appendChange(message, uint32(bucket-last), 0, now)
			last = bucket
		}
	}
	return message, next, true
}

// Snapshot returns the messages of all that was published, and the position after them. It takes
// as much memory as they have: who sends them uses Begin and Part.
func (b *Book) Snapshot() (messages [][]byte, at Position) {
	for {
		message, at := b.Begin()
		messages = nil
		for bucket, same := 0, true; same; message, bucket, same = b.Part(at, bucket) {
			if message == nil {
				return messages, at
			}
			messages = append(messages, message)
		}
	}
}

// Holders returns how many hold a prefix.
func (b *Book) Holders(hash uint64) int {
	b.books.Lock()
	defer b.books.Unlock()
	b.catchUp()
	return int(b.held.Get(hash, 0) / 2)
}

// Size is what a book holds.
type Size struct {
	Held    int // prefixes
	Left    int // of them, those that are not listed: the filter is as large as it may be
	Buckets int // of the filter
}

// Size returns what the book holds, without pending operations.
func (b *Book) Size() Size {
	b.books.Lock()
	defer b.books.Unlock()
	return Size{b.held.Len(), b.left, len(b.filter.Buckets)}
}
