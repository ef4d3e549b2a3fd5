package cluster

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/peers/replica"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// stamped notes how long each booking, change and end takes from Publish at one router to the books of
// another. Messages end with the time of their Publish.
type stamped struct {
	*Link
	mu   sync.Mutex // guards took
	took []time.Duration
}

// Publish implements replica.Link.
func (l *stamped) Publish(topic string, text []byte) {
	l.Link.Publish(topic, binary.LittleEndian.AppendUint64(slices.Clone(text), uint64(time.Now().UnixNano())))
}

// Run implements replica.Link.
func (l *stamped) Run(ctx context.Context, ears replica.Ears) {
	l.Link.Run(ctx, stampedEars{ears, l})
}

type stampedEars struct {
	replica.Ears
	link *stamped
}

// Take implements replica.Ears.
func (e stampedEars) Take(from, topic string, text []byte) error {
	sent := int64(binary.LittleEndian.Uint64(text[len(text)-8:]))
	err := e.Ears.Take(from, topic, text[:len(text)-8])
	if topic == replica.SlotTopic {
		e.link.mu.Lock()
		e.link.took = append(e.link.took, time.Duration(time.Now().UnixNano()-sent))
		e.link.mu.Unlock()
	}
	return err
}

// BenchmarkRequests serves requests at a fixed rate over all routers, all in this process, with TLS. It
// reports the times from a change at one router to the books of another, and the CPU a request of
// the whole process: the decision, and the messages at all routers.
func BenchmarkRequests(b *testing.B) {
	for _, c := range []struct{ routers, rate int }{{1, 1000}, {3, 1000}, {3, 5000}, {16, 500}, {64, 50}} {
		b.Run(fmt.Sprintf("routers=%d/rate=%d", c.routers, c.rate), func(b *testing.B) { serve(b, c.routers, c.rate) })
	}
}

func serve(b *testing.B, count, rate int) {
	log := slog.New(slog.DiscardHandler)
	var routers []*router.Router
	var links []*stamped
	var meshes []*replica.Mesh
	settings, running := own(testKey), sync.WaitGroup{}
	ctx, cancel := context.WithCancel(context.Background())
	defer running.Wait()
	defer cancel()
	for range count {
		link, err := Open(settings, Deps{Edges: guard.New(), Log: log})
		if err != nil {
			b.Fatal(err)
		}
		if len(settings.ClusterPeers) == 0 {
			settings.ClusterPeers = []string{link.node.ClusterAddr().String()}
		}
		l, rt := &stamped{Link: link}, routertest.New(b, "kv", 8)
		mesh := replica.New(replica.Deps{Router: rt, Link: l, Log: log})
		running.Go(func() { mesh.Run(ctx) })
		routers, links, meshes = append(routers, rt), append(links, l), append(meshes, mesh)
	}
	testkit.Eventually(b, 60*time.Second, "all hear all", func() bool {
		return !slices.ContainsFunc(meshes, func(m *replica.Mesh) bool { return m.Counts().Peers != count-1 })
	})
	for _, l := range links {
		l.mu.Lock()
		l.took = nil
		l.mu.Unlock()
	}
	began, before := time.Now(), cpuTime()
	b.ResetTimer()
	var open []router.Decision
	for n := 0; n < b.N; {
		for due := min(b.N, int(time.Since(began).Seconds()*float64(rate))); n < due; n++ {
			d, err := routers[n%count].Route(b.Context(), router.Request{Tokens: testkit.PromptTokens(n%97, 20)})
			if err != nil {
				b.Fatal(err)
			}
			if open = append(open, d); n >= 50 {
				open[n-50].Booking.FirstToken()
			}
			if n >= 200 {
				open[n-200].Booking.Finish(10)
			}
		}
		time.Sleep(time.Millisecond)
	}
	b.StopTimer()
	for _, d := range open[max(0, b.N-200):] {
		d.Booking.End()
	}
	idle := func(m *replica.Mesh) bool { return m.Counts().Held == 0 }
	testkit.Eventually(b, 30*time.Second, "nothing in flight", func() bool { return !slices.ContainsFunc(meshes, func(m *replica.Mesh) bool { return !idle(m) }) })
	b.ReportMetric(float64((cpuTime()-before).Microseconds())/float64(b.N), "cpu-us/req")
	var took []time.Duration
	for _, l := range links {
		l.mu.Lock()
		took = append(took, l.took...)
		l.mu.Unlock()
	}
	if len(took) > 0 {
		slices.Sort(took)
		for _, percent := range []int{50, 99} {
			at := took[(len(took)-1)*percent/100]
			b.ReportMetric(float64(at.Microseconds())/1000, fmt.Sprintf("p%d-ms", percent))
		}
	}
}

// cpuTime is the CPU time of this process so far.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
