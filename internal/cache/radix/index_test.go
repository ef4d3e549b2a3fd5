package radix

import (
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
)

func matches(t testing.TB, x Index, local []uint64, want ...kv.Match) {
	t.Helper()
	if got := x.Match(local, len(local), kv.AllParts, nil); !slices.Equal(got, want) {
		t.Fatalf("match of %d blocks: %v, want %v", len(local), got, want)
	}
}
