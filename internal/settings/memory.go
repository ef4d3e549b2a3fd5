package settings

import (
	"log/slog"
	"math"
	"os"
	"path"
	"runtime/debug"
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

// LimitMemory sets what the Go runtime may use where the environment (GOMEMLIMIT,
// GOGC) does not: 80 % of what the container allows, and a collection for each
// half of the live heap. Most of the heap are tokens and index nodes without
// pointers, which cost the collector little: collecting twice as often as usual
// saves memory cheaply.
func LimitMemory(getenv func(string) string, log *slog.Logger) {
	if getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
	limit := cgroupMemory(os.ReadFile)
	if getenv("GOMEMLIMIT") != "" || limit == 0 {
		return
	}
	debug.SetMemoryLimit(int64(float64(limit) * goShare))
	log.Info("memory is limited by the container", "bytes", limit, "go_limit", int64(float64(limit)*goShare))
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
			if n, bad := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && bad == nil && n > 0 && n < noLimit && (lowest == 0 || n < lowest) {
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
