package summary

import (
	"runtime"
	"testing"
)

// TestMemoryOfABook logs the memory of a book and its view for each prefix.
func TestMemoryOfABook(t *testing.T) {
	if testing.Short() {
		t.Skip("collects garbage")
	}
	const held = 1_000_000
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	book := NewBook()
	for hash := range uint64(held) {
		book.Hold(hash)
	}
	publish(book)
	after := heap()
	view := &View{}
	follow(t, view, book)
	each := float64(after-before) / held
	t.Logf("%.1f bytes a prefix in the book, %.1f in a view", each, float64(view.Bytes())/held)
	if each > 80 {
		t.Errorf("%.1f bytes a prefix", each)
	}
	runtime.KeepAlive(book)
}
