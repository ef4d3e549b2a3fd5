package kubernetes

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit/kubernetes"
	"kvrouter/test"
)

// used is what a process has used so far.
type used struct {
	cpu    time.Duration
	memory int64 // bytes that it has in memory
}

// usedBy reads what a process has used.
func usedBy(t *testing.T, pid int) (u used) {
	t.Helper()
	const ticks = 100 // a second, on every Linux
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest) // from the third on
	for _, at := range []int{11, 12} {
		n, err := strconv.ParseInt(fields[at], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		u.cpu += time.Duration(n) * time.Second / ticks
	}
	pages, err := strconv.ParseInt(fields[21], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	u.memory = pages * int64(os.Getpagesize())
	return u
}

// TestKubernetesWith200PodsAtRest measures what the router takes while nobody asks.
func TestKubernetesWith200PodsAtRest(t *testing.T) {
	const (
		pods   = 200
		window = 10 * time.Second
		// most is the share of a core in the best window. The aim is 3 %; beside other work
		// of the machine the same takes more, so that this only holds it against growing.
		most    = 0.15
		windows = 4
	)
	k := startKube(t)
	k.nodes(kubernetes.Inside(t))
	k.route("kvrouter")
	k.says("msg=listening")
	pid := k.Command.Process.Pid
	empty := usedBy(t, pid)
	began := time.Now()
	k.deploy("mock", pods, 0)
	k.schedulable(pods)
	t.Logf("%d Pods are known after %.1f s, for %.1f s of CPU", pods, time.Since(began).Seconds(), (usedBy(t, pid).cpu - empty.cpu).Seconds())
	settle := time.NewTimer(10 * time.Second) // what comes with the start of workers is over
	<-settle.C
	least, memory := 1.0, int64(0)
	for range windows {
		before, began := usedBy(t, pid), time.Now()
		end := time.NewTimer(window)
		<-end.C
		after := usedBy(t, pid)
		share := (after.cpu - before.cpu).Seconds() / time.Since(began).Seconds()
		t.Logf("%d Pods at rest: %.2f %% of a core over %s", pods, 100*share, window)
		least, memory = min(least, share), max(memory, after.memory)
	}
	t.Logf("memory: %.0f MB, %.0f MB without Pods", float64(memory)/1e6, float64(empty.memory)/1e6)
	if least >= most {
		t.Errorf("%.2f %% of a core at the least, want less than %.0f %%", 100*least, 100*most)
	}
	k.schedulable(pods)
	if a, err := k.Chat(t.Context(), test.Say("Hi"), true, 3); err != nil || !a.Finished {
		t.Errorf("%+v, %v", a, err)
	}
	if strings.Contains(k.Log.String(), "level=WARN") {
		t.Errorf("warnings:\n%s", k.Log.Tail())
	}
}
