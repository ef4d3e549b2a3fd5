package settings

import (
	"log/slog"
	"math"
	"os"
	"path"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
)

const (
	// goShare is the part of a container's memory that Go may fill before it
	// collects without pause: the tokenizer and the chat templates have theirs
	// outside of it, and a limit that is reached ends the process.
	goShare = 0.8
	// noLimit is from how many bytes on a limit is none: version 1 of cgroups writes
	// the largest number of pages.
	noLimit = 1 << 60
)

// LimitMemory configures the Go runtime unless GOMEMLIMIT or GOGC is set: a memory
// limit of 80 % of the container's, and a collection whenever the heap has grown by
// half of the live heap, at least by heapRoom.
func LimitMemory(getenv func(string) string, log *slog.Logger) {
	if getenv("GOGC") == "" {
		watchHeap()
	}
	limit := cgroupMemory(os.ReadFile)
	if getenv("GOMEMLIMIT") != "" || limit == 0 {
		return
	}
	debug.SetMemoryLimit(int64(float64(limit) * goShare))
	log.Info("using the memory limit of the container", "bytes", limit, "go_limit", int64(float64(limit)*goShare))
}

const (
	// largeHeapPercent is how much a large heap may grow until it is collected, percent
	// of what is live. Most of it are tokens and index nodes without pointers, which
	// cost the collector little: collecting twice as often as by default saves memory cheaply.
	largeHeapPercent = 50
	// heapRoom is how much any heap may grow, bytes. A small one is collected often,
	// and each collection wakes all processors: with 2 MB of room they took a third of
	// the CPU of a router without load.
	heapRoom = 8 << 20
)

// growthPercent is GOGC for a heap of that many live bytes. The collector counts less
// than 4 MiB as 4 MiB.
func growthPercent(live uint64) int {
	return int(max(largeHeapPercent, heapRoom*100/max(live, 4<<20)))
}

// heapWatch sets GOGC again after each collection: the collector frees it, and its
// finalizer is the news of that.
type heapWatch struct {
	percent int // as it is set; 0: it is not
	live    []metrics.Sample
}

// watchHeap sets GOGC for this heap, now and as it grows.
func watchHeap() { (&heapWatch{live: []metrics.Sample{{Name: "/gc/heap/live:bytes"}}}).collected() }

// collected reads the live heap and waits for the next collection.
func (w *heapWatch) collected() {
	metrics.Read(w.live)
	percent := growthPercent(w.live[0].Value.Uint64())
	if w.percent == 0 || max(percent, w.percent)-min(percent, w.percent) > w.percent/8 {
		w.percent = percent
		debug.SetGCPercent(percent) // stops all goroutines for a moment
	}
	runtime.SetFinalizer(w, (*heapWatch).collected)
}

// thisMemory returns the memory that this process may use, bytes: the container's,
// or the machine's; 0: unknown.
func thisMemory(read func(string) ([]byte, error)) int64 {
	if limit := cgroupMemory(read); limit > 0 {
		return limit
	}
	info, _ := read("/proc/meminfo")
	for line := range strings.Lines(string(info)) {
		if total, found := strings.CutPrefix(line, "MemTotal:"); found {
			kib, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(total), "kB")), 10, 64)
			return max(0, min(kib, math.MaxInt64>>10)<<10)
		}
	}
	return 0
}

// cgroupMemory returns the lowest memory limit of this process's control group and
// those around it, bytes, of version 2 or 1; 0: there is none.
func cgroupMemory(read func(string) ([]byte, error)) int64 {
	groups, err := read("/proc/self/cgroup")
	if err != nil {
		return 0
	}
	lowest := int64(0)
	look := func(root, group, file string) {
		// In a container the group's name may be the host's: its folder is the root.
		for ; ; group = path.Dir(group) {
			text, err := read(path.Join(root, group, file))
			if n, bad := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && bad == nil && n > 0 && n < noLimit &&
				(lowest == 0 || n < lowest) {
				lowest = n
			}
			if group == "/" || group == "." {
				return
			}
		}
	}
	for line := range strings.Lines(string(groups)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		group := path.Clean("/" + parts[2])
		switch {
		case parts[0] == "0" && parts[1] == "":
			look("/sys/fs/cgroup", group, "memory.max")
		case strings.Contains(","+parts[1]+",", ",memory,"):
			look("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
		}
	}
	return lowest
}
