package settings

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

func TestSmallHeapGrowsByMoreThanHalf(t *testing.T) {
	for _, test := range []struct {
		live, percent uint64
	}{{0, 200}, {3 << 20, 200}, {8 << 20, 100}, {16 << 20, 50}, {32 << 20, 50}, {1 << 30, 50}} {
		if got := growthPercent(test.live); got != int(test.percent) {
			t.Errorf("%d live bytes: %d %%, want %d %%", test.live, got, test.percent)
		}
	}
}

func TestEveryCollectionIsSeen(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	watchHeap()
	gogc := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	grows := func(percent uint64) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("a heap that may grow by %d %%", percent), func() bool {
			runtime.GC()
			metrics.Read(gogc)
			return gogc[0].Value.Uint64() == percent
		})
	}
	for range 3 {
		large := make([]byte, 64<<20)
		grows(largeHeapPercent)
		runtime.KeepAlive(large)
		large = nil
		grows(200)
	}
}

func TestMemoryOfThisProcess(t *testing.T) {
	for _, test := range []struct {
		name  string
		files map[string]string
		group int64 // limit of the control group
		all   int64
	}{
		{"version 2", map[string]string{"/proc/self/cgroup": "0::/kubepods/pod1/c1\n", "/sys/fs/cgroup/kubepods/pod1/c1/memory.max": "1073741824\n"}, 1 << 30, 1 << 30},
		{"version 2, a limit around it", map[string]string{"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max": "max\n", "/sys/fs/cgroup/a/memory.max": "2048\n", "/sys/fs/cgroup/memory.max": "4096\n"}, 2048, 2048},
		{"version 2, seen from inside a container", map[string]string{"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "4096\n"}, 4096, 4096},
		{"version 2, the name is the host's", map[string]string{"/proc/self/cgroup": "0::/../../x\n", "/sys/fs/cgroup/memory.max": "4096\n"}, 4096, 4096},
		{"version 1", map[string]string{"/proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/docker/c\n0::/\n", "/sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes": "5000\n"}, 5000, 5000},
		{"version 1 without a limit", map[string]string{"/proc/self/cgroup": "4:memory:/\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "/proc/meminfo": "MemTotal:       1024 kB\nMemFree: 1 kB\n"}, 0, 1 << 20},
		{"no limit", map[string]string{"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"}, 0, 0},
		{"nonsense", map[string]string{"/proc/self/cgroup": "x\n:::\n0::/\n", "/sys/fs/cgroup/memory.max": "-5\n", "/proc/meminfo": "MemTotal: x"}, 0, 0},
		{"no files", nil, 0, 0},
	} {
		read := func(name string) ([]byte, error) {
			text, ok := test.files[name]
			if !ok {
				return nil, os.ErrNotExist
			}
			return []byte(text), nil
		}
		if got := cgroupMemory(read); got != test.group {
			t.Errorf("%s: limit %d, want %d", test.name, got, test.group)
		}
		if got := thisMemory(read); got != test.all {
			t.Errorf("%s: memory %d, want %d", test.name, got, test.all)
		}
	}
}
