package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit/kubernetes"
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
	const pods, measured, most = 200, 30 * time.Second, 0.03
	k := startKube(t)
	k.nodes(kubernetes.Inside(t))
	k.route("kvrouter")
	pid := k.command.Process.Pid
	empty := usedBy(t, pid)
	began := time.Now()
	k.deploy("mock", pods, 0)
	k.schedulable(pods)
	t.Logf("%d Pods are known after %.1f s, for %.1f s of CPU", pods, time.Since(began).Seconds(), (usedBy(t, pid).cpu - empty.cpu).Seconds())
	settle := time.NewTimer(5 * time.Second) // what comes with the start of workers is over
	<-settle.C
	before := usedBy(t, pid)
	began = time.Now()
	end := time.NewTimer(measured)
	<-end.C
	after := usedBy(t, pid)
	share := (after.cpu - before.cpu).Seconds() / time.Since(began).Seconds()
	t.Logf("%d Pods at rest: %.2f %% of a core over %s, %.0f MB (%.0f MB without Pods)", pods, 100*share, measured, float64(after.memory)/1e6, float64(empty.memory)/1e6)
	if share >= most {
		t.Errorf("%.2f %% of a core, want less than %.0f %%", 100*share, 100*most)
	}
	k.schedulable(pods)
	if a, err := k.chat(t.Context(), say("Hi"), true, 3); err != nil || !a.finished {
		t.Errorf("%+v, %v", a, err)
	}
	if strings.Contains(k.log.String(), "level=WARN") {
		t.Errorf("warnings:\n%s", k.log.Tail())
	}
}
