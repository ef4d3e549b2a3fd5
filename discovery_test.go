package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/page"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/collector"
	"kvrouter/internal/web"
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
		return strings.Contains(s.log.String(), "line 2: worker 1 of the list: url: http://h:0 is not a URL")
	})
	more()
	stop()
	s.wantLifecycles("w0 "+selection.LifecycleSchedulable, "w2 "+selection.LifecycleSchedulable)
}

// called sends a chat to the worker of that name or id, and returns the status, what the
// header calls the worker that answered, and the error's message.
func (s *mockSite) called(t *testing.T, worker string) (status int, name, message string) {
	t.Helper()
	request, _ := http.NewRequest(http.MethodPost, s.openAI+testkit.ChatPath, bytes.NewReader(mocker.MustJSON(map[string]any{"messages": say("hi"), "max_tokens": 1})))
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("traceparent", clientParent)
	request.Header.Set(hints.HeaderPinnedWorker, worker)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	answer := readAll(t, response.Body)
	return response.StatusCode, response.Header.Get(web.HeaderWorker), gjson.Get(answer, "error.message").Str
}

// TestDiscoveredWorkersAreCalledByTheirNames: in headers, which pin as well, on the
// metrics page, in errors, traces and on the live page. With a worker its name goes.
func TestDiscoveredWorkersAreCalledByTheirNames(t *testing.T) {
	const first, second, broken = "vllm-7d9f8c6b5-x2x9q", "vllm-7d9f8c6b5-4mmtl", "rack 3 gpu 1"
	mocks := startMockSite(t, 2)
	breaks := fakeWorker(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	entry := func(name, url, more string) string { return fmt.Sprintf("{name: %s, url: %q%s}", name, url, more) }
	file.write(entry(first, mocks.workerURL(0), ""), entry(second, mocks.workerURL(1), ""), entry(broken, breaks, ""))
	spans := collector.Start(t)
	traceTo(t, spans.HTTP)
	s := mocks.route("--discovery=file:"+file.path, "--router-api-key="+pageKey, "--retries=0", "--eject-after=0")
	testkit.Eventually(t, 20*time.Second, "three workers are up", func() bool { return len(s.app.router.Targets()) == 3 })
	for _, name := range []string{first, second} {
		id, _ := s.app.router.Names().ID(name)
		for _, by := range []string{name, fmt.Sprint(id)} {
			if status, got, message := s.called(t, by); status != http.StatusOK || got != name {
				t.Errorf("asked for %s: %d %s from %q", by, status, message, got)
			}
		}
	}
	if status, _, message := s.called(t, broken); status != http.StatusBadGateway || message != "worker "+broken+" failed before it answered" {
		t.Errorf("%d %s", status, message)
	}
	if status, _, message := s.called(t, "vllm-0"); status != http.StatusBadRequest || !strings.Contains(message, "is vllm-0: it must be the name of a worker that is known") {
		t.Errorf("%d %s", status, message)
	}
	s.wantCalled(first, second, broken)
	testkit.Eventually(t, 20*time.Second, "a trace that names the worker", func() bool {
		for _, span := range spans.Spans(clientTrace) {
			if span.Name == "attempt" && span.Attributes["kvrouter.worker.name"] == first {
				return true
			}
		}
		return false
	})

	v := look(t, s.selection)
	v.until("workers by name", func(state *page.State) bool {
		return len(state.Workers) == 3 && state.Workers[0].Name == broken && state.Workers[1].Name == second && state.Workers[2].Name == first && state.Workers[2].Requests == 2
	})
	s.called(t, first)
	v.until("a request by its worker's name", func(state *page.State) bool { return state.Requests[0].WorkerName == first })
	if response, answer := v.send("GET", "/ui/requests/"+v.latest.Requests[0].Key, ""); response.StatusCode != http.StatusOK || !strings.Contains(answer, `"worker_name":"`+first+`"`) {
		t.Errorf("its receipt: %s %.300s", response.Status, answer)
	}
	file.write(entry(first, mocks.workerURL(0), ", draining: true"), entry(second, mocks.workerURL(1), ""))
	v.until("one drains, and one is gone", func(state *page.State) bool {
		return len(state.Workers) == 2 && state.Workers[1].State == page.StateDraining && strings.Contains(state.Workers[1].Why, "leaving")
	})
	if status, _, message := s.called(t, first); status != http.StatusServiceUnavailable || !strings.HasPrefix(message, "worker "+first+" rank 0, which the request pins, cannot serve it") {
		t.Errorf("%d %s", status, message)
	}
	s.wantCalled(first, second)
}

// wantCalled wants the metrics page to call workers so, and none otherwise.
func (s *mockSite) wantCalled(names ...string) {
	s.t.Helper()
	_, text := testkit.HTTPGet(s.t, s.openAI+"/metrics")
	found := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if _, label, has := strings.Cut(line, `worker_id="`); has {
			name, _, _ := strings.Cut(label, `"`)
			found[name] = true
			if name != kv.NoWorker && !slices.Contains(names, name) {
				s.t.Errorf("metrics of %q: %s", name, line)
			}
		}
	}
	for _, name := range names {
		if !found[name] {
			s.t.Errorf("no metrics of %q", name)
		}
	}
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
