package guard

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
)

func TestAPanicBecomesAnErrorIsCountedAndLogged(t *testing.T) {
	var out bytes.Buffer
	e, log := New(), slog.New(slog.NewTextHandler(&out, nil))
	err := e.Do(Replica, log, func() error { panic("unknown socket-type") })
	var caught *PanicError
	if !errors.As(err, &caught) || caught.Edge != Replica || !strings.Contains(err.Error(), "unknown socket-type") {
		t.Errorf("error %v", err)
	}
	var empty []int
	if err := e.Do(Replica, log, func() error { _ = empty[len(empty)]; return nil }); err == nil {
		t.Error("a runtime error is no error")
	}
	if panics := e.Panics(); panics[Replica] != 2 || panics[KVEvents] != 0 || len(panics) != 7 {
		t.Errorf("counted %v", panics)
	}
	if lines := strings.Count(out.String(), "\n"); lines != 2 || !strings.Contains(out.String(), "guard_test.go") {
		t.Errorf("%d log lines:\n%s", lines, &out)
	}
	for range 62 { // a worker's page may make its parser panic twice a second
		_ = e.Do(Replica, log, func() error { panic("again") })
	}
	if lines := strings.Count(out.String(), "\n"); lines != 7 || !strings.Contains(out.String(), "panics=64") {
		t.Errorf("%d log lines of 64 panics:\n%s", lines, &out)
	}
}

func TestWithoutAPanicTheErrorIsThatOfTheParser(t *testing.T) {
	e, want := New(), errors.New("cut short")
	if err := e.Do(KVEvents, nil, func() error { return want }); err != want {
		t.Errorf("got %v", err)
	}
	if err := e.Do(KVEvents, nil, func() error { return nil }); err != nil || e.Panics()[KVEvents] != 0 {
		t.Errorf("got %v, counted %v", err, e.Panics())
	}
}

func TestWithoutEdgesNothingIsCounted(t *testing.T) {
	var e *Edges
	if err := e.Do("any", nil, func() error { panic(1) }); err == nil || e.Panics() != nil {
		t.Errorf("got %v, counted %v", err, e.Panics())
	}
	zero := new(Edges)
	if err := zero.Do("any", nil, func() error { panic(1) }); err == nil || zero.Panics()["any"] != 1 {
		t.Errorf("got %v, counted %v", err, zero.Panics())
	}
}

func TestTheNumberOfEdgesIsBounded(t *testing.T) {
	e := New()
	var callers sync.WaitGroup
	for i := range 3 * maxEdges {
		callers.Go(func() { _ = e.Do(fmt.Sprint("edge ", i), nil, func() error { panic(i) }) })
	}
	callers.Wait()
	total := uint64(0)
	for _, n := range e.Panics() {
		total += n
	}
	if n := len(e.Panics()); n != maxEdges+1 || total != 3*maxEdges || e.Panics()[other] == 0 {
		t.Errorf("%d edges with %d panics", n, total)
	}
}
