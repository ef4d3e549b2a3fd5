package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/selection"
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

// TestAFileOfWorkersIsFollowedAndNoRequestIsLost: workers drain, go and come back
// while answers stream; what drains ends what it has begun, and gets nothing new.
func TestAFileOfWorkersIsFollowedAndNoRequestIsLost(t *testing.T) {
	mocks := startMockSite(t, 3, "--speedup-ratio=2")
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	entry := func(i int, more string) string {
		return fmt.Sprintf("{name: w%d, url: %q%s}", i, mocks.workerURL(i), more)
	}
	file.write(entry(0, ""), entry(1, ""))
	s := mocks.route("--policy=least-loaded", "--discovery=file:"+file.path)
	s.wantLifecycles("w0 "+selection.LifecycleSchedulable, "w1 "+selection.LifecycleSchedulable)
	id := map[string]uint64{}
	for _, w := range s.workers() {
		id[w.Name] = w.WorkerID
	}

	more, stop := s.keepAsking(t, 8, 20, 20*time.Second)
	more()

	file.write(entry(0, ", draining: true"), entry(1, ""), entry(2, ""))
	drained := "w0 " + selection.LifecycleUnschedulable + " draining"
	s.wantLifecycles(drained, "w1 "+selection.LifecycleSchedulable, "w2 "+selection.LifecycleSchedulable)
	testkit.Eventually(t, 20*time.Second, "its requests have ended", func() bool { return !s.app.router.Working(id["w0"]) })
	before := mocks.rank(kv.WorkerKey{}).Counts.PromptTokens.Load()
	more()
	if after := mocks.rank(kv.WorkerKey{}).Counts.PromptTokens.Load(); after != before {
		t.Error("it got a new request")
	}
	if s.app.index.Blocks(kv.WorkerKey{Worker: id["w0"]}) == 0 {
		t.Error("its index is forgotten while it is there")
	}

	file.write(entry(0, ""), entry(2, "")) // back; another one goes at once, with all that it does
	s.wantLifecycles("w0 "+selection.LifecycleSchedulable, "w2 "+selection.LifecycleSchedulable)
	if n := s.app.index.Blocks(kv.WorkerKey{Worker: id["w1"]}); n != 0 {
		t.Errorf("%d blocks are left of who has gone", n)
	}
	more()
	file.write("http://h:0")
	testkit.Eventually(t, 20*time.Second, "the mistake is told", func() bool {
		return strings.Contains(s.log.String(), "line 2: worker 1 of the list: url: http://h:0 is no URL")
	})
	more()
	stop()
	s.wantLifecycles("w0 "+selection.LifecycleSchedulable, "w2 "+selection.LifecycleSchedulable)
}

func TestAFileThatCannotBeReadStopsTheStart(t *testing.T) {
	config, _, err := ParseConfig([]string{"--engine=none", "--discovery=file:/nowhere/workers.yaml"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := build(t.Context(), config, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "--discovery file:/nowhere/workers.yaml: cannot read it: no such file") {
		t.Error(err)
	}
	if _, _, err := ParseConfig([]string{"--engine=none", "--discovery=zookeeper://h"}); err == nil || !strings.Contains(err.Error(), "--discovery zookeeper://h: no such source") {
		t.Error(err)
	}
}
