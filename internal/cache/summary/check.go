package summary

import (
	"fmt"

	"kvrouter/internal/base/cuckoo"
)

// Check reports the first violated invariant of the book. Its time is proportional to the size
// of the book.
func (b *Book) Check() error {
	b.books.Lock()
	defer b.books.Unlock()
	b.catchUp()
	inside, left := 0, 0
	var err error
	b.held.Each(func(hash uint64, _, state uint32) bool {
		switch {
		case state < 2:
			err = fmt.Errorf("hash %x has no holder", hash)
		case state&1 == 0:
			left++
		case !b.filter.placement.in(b.filter.Buckets, hash):
			err = fmt.Errorf("the filter lacks hash %x", hash)
		default:
			inside++
		}
		return err == nil
	})
	if err != nil {
		return err
	}
	logged := 0
	for _, delta := range b.log {
		logged += len(delta) + logEach
	}
	if logged != b.logged || logged > b.maxLog() {
		return fmt.Errorf("the deltas that are kept take %d bytes, %d are counted: at most %d", logged, b.logged, b.maxLog())
	}
	lanes := 0
	for bucket, word := range b.filter.Buckets {
		lanes += cuckoo.Used(word)
		if dirty := b.dirty[bucket/64]>>(bucket%64)&1 == 1; word != b.sent[bucket] && !dirty {
			return fmt.Errorf("bucket %d differs from what was sent, and is not marked", bucket)
		}
	}
	if lanes != b.filter.Used || lanes != inside || left != b.left {
		return fmt.Errorf("%d hashes are in the filter and %d are not, but %d lanes are in use, %d are counted, and %d are counted as outside",
			inside, left, lanes, b.filter.Used, b.left)
	}
	return nil
}
