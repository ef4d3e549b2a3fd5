package testkit

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// ProcessLives reports whether a process runs. A zombie does not run.
func ProcessLives(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

// KilledRouter is what a router process reports before it is killed.
type KilledRouter struct {
	PIDs   []int // of its workers and their children
	Folder string
}

// CPUTime returns the CPU time of this process so far. Unlike wall time, it does not
// depend on the load of the machine.
func CPUTime() time.Duration {
	var usage syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// LiveHeap returns the size of the reachable heap objects, in bytes.
func LiveHeap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
