package testkit

import (
	"runtime"
)

// liveHeap returns the bytes of reachable heap objects.
func LiveHeap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
