package extproc

import (
	"io"
	"testing"
)

// TestPiecesAfterTheEndAreDropped: the last piece comes twice, before the body is read.
func TestPiecesAfterTheEndAreDropped(t *testing.T) {
	for range 100 { // what is ready at the same time is taken at random
		b := newPieces()
		b.put(t.Context(), []byte("one "), false)
		b.put(t.Context(), []byte("two"), true)
		b.put(t.Context(), []byte("two"), true)
		if text, err := io.ReadAll(b); err != nil || string(text) != "one two" {
			t.Fatalf("%q, %v", text, err)
		}
	}
}
