package test

import (
	"bytes"
	"context"
	"fmt"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/collector"
	"kvrouter/internal/tools/mocker"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
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
func (r *Router) wantLifecycles(want ...string) {
	r.T.Helper()
	testkit.Eventually(r.T, 20*time.Second, "workers "+strings.Join(want, ", "), func() bool {
		got := map[string]bool{}
		all := r.Workers()
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
func (r *Router) keepAsking(t *testing.T, clients int, answers int64, limit time.Duration) (more, stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var answered atomic.Int64
	for i := range clients {
		running.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				a, err := r.Chat(t.Context(), Say(fmt.Sprintf("client %d asks %d", i, n), strings.Repeat("and ", 50)+"so on"), true, 30)
				if err != nil || !a.Finished || a.Broken {
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

// TestAFileOfWorkersIsFollowedAndNoRequestIsLost: workers drain, go and come back
// while answers stream; what drains ends what it has begun, and gets nothing new.
func TestAFileOfWorkersIsFollowedAndNoRequestIsLost(t *testing.T) {
	t.Parallel()
	mocks := StartWorkers(t, 3, "--speedup-ratio=2")
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	entry := func(i int, more string) string {
		return fmt.Sprintf("{name: w%d, url: %q%s}", i, mocks.URL(i), more)
	}
	file.write(entry(0, ""), entry(1, ""))
	s := Start(t, "--engine=none", "--policy=least-loaded", "--send-tokens=never", "--discovery=file:"+file.path)
	s.wantLifecycles("w0 "+selection.LifecycleSchedulable, "w1 "+selection.LifecycleSchedulable)
	id := map[string]uint64{}
	for _, w := range s.Workers() {
		id[w.Name] = w.WorkerID
	}

	more, stop := s.keepAsking(t, 8, 20, 20*time.Second)
	more()

	file.write(entry(0, ", draining: true"), entry(1, ""), entry(2, ""))
	drained := "w0 " + selection.LifecycleUnschedulable + " draining"
	s.wantLifecycles(drained, "w1 "+selection.LifecycleSchedulable, "w2 "+selection.LifecycleSchedulable)
	testkit.Eventually(t, 20*time.Second, "its requests have ended", func() bool { w, _ := s.Record(id["w0"]); return w.InFlight == 0 })
	before := mocks.Rank(kv.WorkerKey{}).Counts.PromptTokens.Load()
	more()
	if after := mocks.Rank(kv.WorkerKey{}).Counts.PromptTokens.Load(); after != before {
		t.Error("it got a new request")
	}
	if s.blocksOf("w0") == 0 {
		t.Error("its index is forgotten while it is there")
	}

	file.write(entry(0, ""), entry(2, "")) // back; another one goes at once, with all that it does
	s.wantLifecycles("w0 "+selection.LifecycleSchedulable, "w2 "+selection.LifecycleSchedulable)
	if n := s.blocksOf("w1"); n != 0 {
		t.Errorf("%d blocks are left of who has gone", n)
	}
	more()
	file.write("http://h:0")
	testkit.Eventually(t, 20*time.Second, "the mistake is told", func() bool {
		return strings.Contains(s.Log.String(), "line 2: worker 1 of the list: url: http://h:0 is not a URL")
	})
	more()
	stop()
	s.wantLifecycles("w0 "+selection.LifecycleSchedulable, "w2 "+selection.LifecycleSchedulable)
}

// blocksOf returns how many blocks the index knows a worker of that name to hold.
func (r *Router) blocksOf(name string) (n int) {
	for _, w := range r.Workers() {
		if w.Name == name {
			n += w.Blocks
		}
	}
	return n
}

// called sends a chat to the worker of that name or id.
func (r *Router) called(worker string) (e exchange, problem string) {
	r.T.Helper()
	e = r.ask(map[string]any{"messages": Say("hi"), "max_tokens": 1}, "traceparent", clientParent, hints.HeaderPinnedWorker, worker)
	return e, e.json().Get("error.message").Str
}

// TestDiscoveredWorkersAreCalledByTheirNames: in headers, which pin as well, on the
// metrics page, in errors, traces and on the live page. With a worker its name goes.
func TestDiscoveredWorkersAreCalledByTheirNames(t *testing.T) {
	t.Parallel()
	const first, second, broken = "vllm-7d9f8c6b5-x2x9q", "vllm-7d9f8c6b5-4mmtl", "rack 3 gpu 1"
	mocks := StartWorkers(t, 2)
	breaks := fakeWorker(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	entry := func(name, url, more string) string { return fmt.Sprintf("{name: %s, url: %q%s}", name, url, more) }
	file.write(entry(first, mocks.URL(0), ""), entry(second, mocks.URL(1), ""), entry(broken, breaks, ""))
	spans := collector.Start(t)
	s := StartAt(t, Program, testkit.FreePorts(t, 2), traceTo(spans.HTTP), "--engine=none", "--discovery=file:"+file.path, "--router-api-key="+pageKey, "--retries=0", "--eject-after=0")
	testkit.Eventually(t, 20*time.Second, "three workers are up", func() bool { return len(s.Ranks()) == 3 })
	id := map[string]uint64{}
	for _, w := range s.Workers() {
		id[w.Name] = w.WorkerID
	}
	for _, name := range []string{first, second} {
		for _, by := range []string{name, fmt.Sprint(id[name])} {
			if e, problem := s.called(by); e.StatusCode != http.StatusOK || e.Worker != name {
				t.Errorf("asked for %s: %d %s from %q", by, e.StatusCode, problem, e.Worker)
			}
		}
	}
	if e, problem := s.called(broken); e.StatusCode != http.StatusBadGateway || problem != "worker "+broken+" failed before it answered" {
		t.Errorf("%d %s", e.StatusCode, problem)
	}
	if e, problem := s.called("vllm-0"); e.StatusCode != http.StatusBadRequest || !strings.Contains(problem, "is vllm-0: it must be the name of a known worker") {
		t.Errorf("%d %s", e.StatusCode, problem)
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

	v := look(t, s.Port)
	v.until("workers by name", func(state *page.State) bool {
		return len(state.Workers) == 3 && state.Workers[0].Name == broken && state.Workers[1].Name == second && state.Workers[2].Name == first && state.Workers[2].Requests == 2
	})
	s.called(first)
	v.until("a request by its worker's name", func(state *page.State) bool { return state.Requests[0].WorkerName == first })
	if response, answer := v.send("GET", "/ui/requests/"+v.latest.Requests[0].Key, ""); response.StatusCode != http.StatusOK || !strings.Contains(answer, `"worker_name":"`+first+`"`) {
		t.Errorf("its receipt: %s %.300s", response.Status, answer)
	}
	file.write(entry(first, mocks.URL(0), ", draining: true"), entry(second, mocks.URL(1), ""))
	v.until("one drains, and one is gone", func(state *page.State) bool {
		return len(state.Workers) == 2 && state.Workers[1].State == page.StateDraining && strings.Contains(state.Workers[1].Why, "draining")
	})
	if e, problem := s.called(first); e.StatusCode != http.StatusServiceUnavailable || !strings.HasPrefix(problem, "worker "+first+" rank 0, which the request pins, cannot serve it") {
		t.Errorf("%d %s", e.StatusCode, problem)
	}
	s.wantCalled(first, second)
}

// wantCalled wants the metrics page to call workers so, and none otherwise.
func (r *Router) wantCalled(names ...string) {
	r.T.Helper()
	_, text := testkit.HTTPGet(r.T, r.OpenAI+"/metrics")
	found := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if _, label, has := strings.Cut(line, `worker_id="`); has {
			name, _, _ := strings.Cut(label, `"`)
			found[name] = true
			if name != kv.NoWorker && !slices.Contains(names, name) {
				r.T.Errorf("metrics of %q: %s", name, line)
			}
		}
	}
	for _, name := range names {
		if !found[name] {
			r.T.Errorf("no metrics of %q", name)
		}
	}
}

func TestAFileThatCannotBeReadStopsTheStart(t *testing.T) {
	t.Parallel()
	if text, err := Output(t, "--engine=none", "--discovery=file:/nowhere/workers.yaml"); err == nil || !strings.Contains(text, "--discovery file:/nowhere/workers.yaml: cannot read it: no such file") {
		t.Error(text, err)
	}
	if text, err := Output(t, "--engine=none", "--discovery=zookeeper://h"); err == nil || !strings.Contains(text, "--discovery zookeeper://h: unknown source") {
		t.Error(text, err)
	}
}

// TestAStreamThatBeganOnTheOnlyWorkerGoesOn: the other worker is away when it begins, and back
// when its own dies.
func TestAStreamThatBeganOnTheOnlyWorkerGoesOn(t *testing.T) {
	t.Parallel()
	mocks := StartWorkers(t, 2, "--speedup-ratio=1")
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	entry := func(i int) string { return fmt.Sprintf("{name: w%d, url: %q}", i, mocks.URL(i)) }
	file.write(entry(0), entry(1))
	s := Start(t, "--engine=none", "--model="+BuiltinModel(t), "--served-model-name="+mocks.Settings.ServedModelName, "--send-tokens=never", "--discovery=file:"+file.path)
	up := "w0 " + selection.LifecycleSchedulable
	s.wantLifecycles(up, "w1 "+selection.LifecycleSchedulable)
	file.write(entry(0))
	s.wantLifecycles(up)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body := mocker.MustJSON(map[string]any{"messages": Say("Tell me all of it"), "max_tokens": 15000, "ignore_eos": true, "stream": true})
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(body))
	response, err := http.DefaultClient.Do(request)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatal(response, err)
	}
	defer response.Body.Close()
	file.write(entry(0), entry(1))
	s.wantLifecycles(up, "w1 "+selection.LifecycleSchedulable)
	mocks.Mocker.Worker(0).End(mocker.ErrMockCrash)
	next := mocks.Rank(kv.WorkerKey{Worker: 1})
	testkit.Eventually(t, 20*time.Second, "the other worker continues it", func() bool { return next.Counts.GenerationTokens.Load() > 20 })
}
