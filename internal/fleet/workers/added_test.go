package workers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

func TestAddedWorkerIsFollowedAsAttachedOnesAre(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, twoRanks)
	f := registeredFleet(t, nil)
	f.register(Registration{ID: 0, URL: "http://127.0.0.1:1", Model: "m", Ranks: []uint32{0}})
	url := "http://" + a.address
	type result struct {
		id  uint64
		err error
	}
	done := make(chan result, 1)
	go func() {
		id, err := f.Add(t.Context(), url, "sesame")
		done <- result{id, err}
	}()
	testkit.Settles(t, func() error {
		if !strings.Contains(f.out.String(), "worker 1: not reachable yet") {
			return fmt.Errorf("log: %s", f.out.String())
		}
		return nil
	})
	a.start()
	if r := <-done; r.err != nil || r.id != 1 {
		t.Fatalf("%+v", r)
	}
	w := f.all()[1]
	if status := f.Workers()[1]; !status.Attached || len(status.Ranks) != 2 || w.bearer() != "sesame" {
		t.Errorf("%+v, key %q", status, w.bearer())
	}
	if _, err := f.Add(t.Context(), url, ""); !errors.Is(err, ErrKnown) {
		t.Errorf("added twice: %v", err)
	}
	if err := f.Register(t.Context(), Registration{ID: 1, URL: url}); !errors.Is(err, ErrWorkerTaken) {
		t.Errorf("registered under its id: %v", err)
	}
	if err := radixtest.Store(f.index, kv.WorkerKey{Worker: 1}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		t.Fatal(err)
	}
	if f.Unregister(1) {
		t.Error("it counts as registered")
	}
	if id, found := f.Remove(url); id != 1 || !found || f.index.Blocks(kv.WorkerKey{Worker: 1}) != 0 || len(f.Workers()) != 1 {
		t.Errorf("removed %d, %v: %+v", id, found, f.Workers())
	}
	if _, found := f.Remove(url); found {
		t.Error("removed twice")
	}
	if id, err := f.Add(t.Context(), url, ""); err != nil || id != 2 {
		t.Errorf("added again as %d: %v", id, err)
	}
	f.Unregister(0)
	a.server.Close()
	f.cancel()
	f.wantDone(func(err error) bool { return err == nil })
}

func TestAddedWorkerThatDoesNotComeIsTakenOut(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := registeredFleet(t, func(f *fakeFleet) { f.cfg.StartupTimeout = 100 * time.Millisecond })
	url := fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePorts(t, 1))
	var late *NotReadyError
	if _, err := f.Add(t.Context(), url, ""); !errors.As(err, &late) || late.Limit != f.cfg.StartupTimeout || !strings.Contains(late.Why, "refused") || len(f.Workers()) != 0 {
		t.Errorf("%v; %+v", err, f.Workers())
	}
	f.cfg.StartupTimeout = time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := f.Add(ctx, url, ""); !errors.Is(err, context.DeadlineExceeded) || len(f.Workers()) != 0 {
		t.Errorf("%v; %+v", err, f.Workers())
	}
	ended := make(chan error, 1)
	add := func() {
		go func() {
			_, err := f.Add(t.Context(), url, "")
			ended <- err
		}()
		testkit.Eventually(t, 10*time.Second, "it is looked for", func() bool { return len(f.Workers()) == 1 })
	}
	add()
	if _, found := f.Remove(url); !found {
		t.Error("not found")
	}
	if err := <-ended; !errors.Is(err, ErrRemoved) {
		t.Errorf("removed: %v", err)
	}
	add()
	f.stop()
	if err := <-ended; !errors.Is(err, ErrFleetEnding) {
		t.Errorf("at the end: %v", err)
	}
	if _, err := f.Add(t.Context(), url, ""); !errors.Is(err, ErrFleetEnding) {
		t.Errorf("after the end: %v", err)
	}
}

// TestNoOtherKeyGoesToAddedWorkers: the router's are for those that its flags name.
func TestNoOtherKeyGoesToAddedWorkers(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.start()
	f := registeredFleet(t, func(f *fakeFleet) { f.cfg.WorkerKey, f.cfg.Key, f.cfg.PassKey = "secret", "secret", true })
	if _, err := f.Add(t.Context(), "http://"+a.address, ""); err != nil {
		t.Fatal(err)
	}
	if w := f.all()[0]; w.bearer() != "" || w.spec.Key != "" {
		t.Errorf("keys %q and %q", w.bearer(), w.spec.Key)
	}
	a.server.Close()
	f.cancel()
	f.wantDone(func(err error) bool { return err == nil })
}

func TestAddedWorkersNameNoSocketsOfThisMachine(t *testing.T) {
	for _, test := range []struct {
		source events.Source
		added  bool
		want   bool
	}{
		{events.Source{Endpoint: "tcp://h:1", Replay: "tcp://h:2"}, true, true},
		{events.Source{Endpoint: "ipc:///run/x"}, true, false},
		{events.Source{Endpoint: "tcp://h:1", Replay: "ipc:///run/x"}, true, false},
		{events.Source{Endpoint: "ipc:///run/x"}, false, true},
	} {
		w := &worker{}
		if test.added {
			w.follower = &follower{}
		}
		if got := w.mayFollow(test.source); got != test.want {
			t.Errorf("added %v, %+v: %v", test.added, test.source, got)
		}
	}
}

func TestLargeFleetsAreLookedAtLessOften(t *testing.T) {
	for workers, times := range map[int]int{0: 1, 4: 1, 50: 1, 99: 1, 100: 2, 200: 4, 512: 4, 1024: 8, 4096: 16} {
		if got := rarer(workers); got != times {
			t.Errorf("%d workers: pauses are %d times as long, want %d", workers, got, times)
		}
	}
}
