package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// workersFile is the file of --discovery.
type workersFile struct {
	t    *testing.T
	path string
}

// write replaces the file as a whole.
func (f *workersFile) write(entries ...string) {
	f.t.Helper()
	text := "workers: []"
	if len(entries) > 0 {
		text = "workers:\n- " + strings.Join(entries, "\n- ") + "\n"
	}
	next := f.path + ".next"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Rename(next, f.path); err != nil {
		f.t.Fatal(err)
	}
}

// wantLifecycles waits until the router port shows these workers: name lifecycle reasons.
func (s *mockSite) wantLifecycles(want ...string) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, "workers "+strings.Join(want, ", "), func() bool {
		got := map[string]bool{}
		all := s.workers()
		for _, w := range all {
			text := w.Name + " " + w.Lifecycle
			if len(w.Reasons) > 0 {
				text += " " + w.Reasons[0]
			}
			got[text] = true
		}
		for _, one := range want {
			if !got[one] {
				return false
			}
		}
		return len(all) == len(want)
	})
}

// keepAsking has clients stream one answer after the other until stop is called; each
// must end whole. more waits, for a limited time, until so many more have ended.
func (s *mockSite) keepAsking(t *testing.T, clients int, answers int64, limit time.Duration) (more, stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var answered atomic.Int64
	for i := range clients {
		running.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				a, err := s.chat(t.Context(), say(fmt.Sprintf("client %d asks %d", i, n), strings.Repeat("and ", 50)+"so on"), true, 30)
				if err != nil || !a.finished || a.broken {
					t.Errorf("client %d, request %d: %+v, %v", i, n, a, err)
					return
				}
				answered.Add(1)
			}
		})
	}
	more = func() {
		before := answered.Load()
		testkit.Eventually(t, limit, "requests are answered", func() bool { return answered.Load() > before+answers })
	}
	return more, func() {
		cancel()
		running.Wait()
	}
}

// route starts a router beside the one of the mock workers, which starts none. startApp
// would take what that one does meanwhile for what this one has left over.
func (s *mockSite) route(args ...string) *mockSite {
	t, ports := s.t, testkit.FreePorts(s.t, 2)
	s = &mockSite{t: t, site: &site{
		openAI: fmt.Sprintf("http://127.0.0.1:%d", ports), selection: fmt.Sprintf("http://127.0.0.1:%d", ports+1), log: &testkit.LogBuffer{},
	}}
	args = append([]string{fmt.Sprintf("--http-port=%d", ports), fmt.Sprintf("--router-port=%d", ports+1), "--engine=none"}, args...)
	s.app, s.end = runApp(t, s.log, args...)
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("end of the log:\n%s", s.log.Tail())
		}
	})
	testkit.Eventually(t, 20*time.Second, "the router port is open", func() bool {
		response, err := http.Get(s.selection + "/health")
		if err == nil {
			response.Body.Close()
		}
		return err == nil
	})
	return s
}
