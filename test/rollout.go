package test

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

const (
	// readyPoll is how often clients look whether a router is ready.
	readyPoll = 200 * time.Millisecond
	// readyLimit is how long a router may take until it is ready.
	readyLimit = 30 * time.Second
)

// startPlain starts the program without the race detector, at two ports from port
// on.
func startPlain(t *testing.T, port int, args ...string) *Router {
	t.Helper()
	return StartAt(t, PlainProgram, port, nil, append([]string{"--log-level=info", "--drain-delay=5s"}, args...)...)
}

// rollout is several router processes, of which clients use those that are ready.
type rollout struct {
	t      *testing.T
	args   func(i int) []string // of router i
	client *http.Client         // asks whether they are ready

	mu       sync.Mutex // guards what follows
	sites    []*Router
	ready    []bool
	restarts []int
	next     int
	watched  *regexp.Regexp // lines of the logs; nil: none
	said     []string       // such lines of the routers that have ended
}

// startRollout starts n routers and waits until each is ready. They end with the
// test.
func startRollout(t *testing.T, n int, args ...string) *rollout {
	t.Helper()
	return startRolloutOf(t, n, func(int) []string { return args })
}

// startRolloutOf is startRollout with flags that differ between routers.
func startRolloutOf(t *testing.T, n int, args func(i int) []string) *rollout {
	t.Helper()
	r := &rollout{t: t, args: func(i int) []string { return append([]string{"--engine=none"}, args(i)...) }, ready: make([]bool, n),
		restarts: make([]int, n)}
	// A probe opens a connection of its own, as Kubernetes does.
	r.client = &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	ports := testkit.FreePorts(t, 2*n)
	for i := range n {
		r.sites = append(r.sites, startPlain(t, ports+2*i, r.args(i)...))
	}
	ctx, cancel := context.WithCancel(context.Background())
	var polling sync.WaitGroup
	polling.Go(func() { r.poll(ctx) })
	t.Cleanup(func() {
		cancel()
		polling.Wait()
	})
	for i := range n {
		r.waitReady(i)
	}
	return r
}

// poll keeps in mind which routers are ready, until ctx ends.
func (r *rollout) poll(ctx context.Context) {
	ticker := time.NewTicker(readyPoll)
	defer ticker.Stop()
	for {
		for i := range r.ready {
			response, err := r.client.Get(r.router(i).OpenAI + "/ready")
			if err == nil {
				response.Body.Close()
			}
			r.mu.Lock()
			r.ready[i] = err == nil && response.StatusCode == http.StatusOK
			r.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (r *rollout) router(i int) *Router {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sites[i]
}

func (r *rollout) waitReady(i int) {
	r.t.Helper()
	testkit.Eventually(r.t, readyLimit, fmt.Sprintf("router %d is ready", i), func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.ready[i]
	})
}

// where returns the URL of the next ready router in turn; without one it waits.
func (r *rollout) where() string {
	for deadline := time.Now().Add(readyLimit); ; {
		r.mu.Lock()
		r.next++
		for i := range r.sites {
			if at := (r.next + i) % len(r.sites); r.ready[at] || time.Now().After(deadline) {
				defer r.mu.Unlock()
				return r.sites[at].OpenAI
			}
		}
		r.mu.Unlock()
		<-time.After(readyPoll)
	}
}

// restart ends router i by SIGTERM and starts it again at the same ports.
func (r *rollout) restart(i int) {
	r.t.Helper()
	r.replace(i, restart(r.t, r.router(i), r.args(i)...))
}

// kill ends router i by SIGKILL and starts it again at the same ports, with further
// flags.
func (r *rollout) kill(i int, args ...string) {
	r.t.Helper()
	old := r.router(i)
	old.Kill()
	r.replace(i, startPlain(r.t, portOf(old), append(r.args(i), args...)...))
}

// replace has router i be another process, and waits until that is ready.
func (r *rollout) replace(i int, with *Router) {
	r.t.Helper()
	r.mu.Lock()
	r.said = append(r.said, r.lines(i)...)
	r.sites[i], r.ready[i] = with, false
	r.restarts[i]++
	r.mu.Unlock()
	r.waitReady(i)
}

// watch returns the lines of all routers' logs, those that have ended included, that
// match what is watched.
func (r *rollout) watch() (said []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	said = slices.Clone(r.said)
	for i := range r.sites {
		said = append(said, r.lines(i)...)
	}
	return said
}

// lines is watch for the router i that runs; it needs mu.
func (r *rollout) lines(i int) []string {
	if r.watched == nil {
		return nil
	}
	return r.watched.FindAllString(r.sites[i].Log.String(), -1)
}

// restart ends a router by SIGTERM, which must go well, and starts it again at
// the same ports.
func restart(t *testing.T, s *Router, args ...string) *Router {
	t.Helper()
	s.Stop()
	if state := s.Command.ProcessState; !state.Success() {
		t.Errorf("after SIGTERM: %s", state)
	}
	return startPlain(t, portOf(s), args...)
}

// portOf is the number of the OpenAI port.
func portOf(s *Router) int {
	port, _ := strconv.Atoi(s.OpenAI[strings.LastIndexByte(s.OpenAI, ':')+1:])
	return port
}

// size is what a process uses.
type size struct {
	memory      float64 // MB, resident
	goroutines  float64
	descriptors float64
}

// sizeOf asks the kernel and the program itself; not ok: it is just not there.
func sizeOf(s *Router) (now size, ok bool) {
	dir := fmt.Sprintf("/proc/%d", s.Command.Process.Pid)
	open, err := os.ReadDir(dir + "/fd")
	response, failed := http.Get(s.OpenAI + "/metrics")
	if failed != nil {
		return now, false
	}
	defer response.Body.Close()
	page, failed := io.ReadAll(response.Body)
	resident, known := memoryOf(s.Command.Process.Pid, "VmRSS")
	if err != nil || failed != nil || !known {
		return now, false
	}
	return size{resident, testkit.ReadMetricsPage(string(page))["go_goroutines"], float64(len(open))}, true
}

// memoryOf reads a size of a process in MB: VmRSS, or VmHWM, its peak.
func memoryOf(pid int, name string) (megabytes float64, ok bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, found := strings.Cut(string(status), name+":")
	if err != nil || !found {
		return 0, false
	}
	kilobytes, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	return kilobytes / 1024, err == nil
}

// middle returns the median of what of gives of each.
func middle[T any](all []T, of func(T) float64) float64 {
	if len(all) == 0 {
		return math.NaN()
	}
	values := make([]float64, 0, len(all))
	for _, one := range all {
		values = append(values, of(one))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// quantile is percentile in whole milliseconds.
func quantile(all []time.Duration, q float64) time.Duration {
	return percentile(all, q).Round(time.Millisecond)
}

// percentile returns the value below which the share q of all lie.
func percentile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[int(q*float64(len(all)-1))]
}
