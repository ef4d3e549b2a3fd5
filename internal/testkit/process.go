package testkit

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// ProcessLives tells whether a process runs. A zombie does not.
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

// CPUTime returns the CPU time that this process has used so far. Unlike the time of
// the clock, it does not depend on what else the machine does.
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
