package events

import (
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
	"log/slog"
	"testing"
)

// appliedStream returns a stream that has applied one batch of events after another
// from a complete history.
func appliedStream(t *testing.T, batches ...[]byte) *following {
	t.Helper()
	log := new(testkit.LogBuffer)
	index := radix.NewTree()
	s := NewStream(Source{Worker: testkit.TestWorker, BlockSize: testkit.TestBlockSize}, index, slog.New(slog.NewTextHandler(log, nil)))
	s.Begin(0)
	for i, b := range batches {
		s.Apply(uint64(i), b, true)
	}
	return &following{s, s.Src, index, log, nil}
}
