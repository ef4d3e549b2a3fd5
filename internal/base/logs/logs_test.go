package logs

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
)

// lines writes to a log at times of its own.
type lines struct {
	out strings.Builder
	log *slog.Logger
	now time.Time
}

func newLines(format string) *lines {
	l := &lines{now: time.Unix(1000, 0)}
	l.log = New(&l.out, new(slog.LevelVar), format)
	return l
}

// write writes a line as the call site pc would.
func (l *lines) write(level slog.Level, pc uintptr, message string) {
	if l.log.Enabled(context.Background(), level) {
		_ = l.log.Handler().Handle(context.Background(), slog.NewRecord(l.now, level, message, pc))
	}
}

func (l *lines) count() int { return strings.Count(l.out.String(), "\n") }

func TestACallSiteCannotFloodTheLog(t *testing.T) {
	l := newLines("text")
	for range 500_000 {
		l.write(slog.LevelWarn, 1, "bad event")
	}
	if n := l.count(); n != burst {
		t.Errorf("%d lines at once, want %d", n, burst)
	}
	if n := suppressed(l.log); n != 500_000-burst {
		t.Errorf("%d lines counted as left out", n)
	}
	l.write(slog.LevelWarn, 2, "another line")
	if n := l.count(); n != burst+1 {
		t.Errorf("another call site is held up: %d lines", n)
	}
	l.now = l.now.Add(time.Second)
	l.write(slog.LevelWarn, 1, "bad event")
	if want := fmt.Sprintf("suppressed=%d", 500_000-burst); !strings.Contains(l.out.String(), want) {
		t.Errorf("the next line does not say %s", want)
	}
	l.write(slog.LevelWarn, 1, "bad event")
	if strings.Count(l.out.String(), "suppressed=") != 1 {
		t.Error("lines left out are told twice")
	}
	for range 60 {
		l.now = l.now.Add(time.Second)
		for range 1000 {
			l.write(slog.LevelWarn, 1, "bad event")
		}
	}
	if n := l.count(); n > burst+3+60*(perSecond+1) {
		t.Errorf("%d lines in a minute", n)
	}
}

func TestWhatAQuietCallSiteLeftOutIsToldLater(t *testing.T) {
	l := newLines("json")
	for range burst + 7 {
		l.write(slog.LevelError, 1, "flood")
	}
	l.now = l.now.Add(reportAfter)
	l.write(slog.LevelInfo, 2, "something else")
	if !strings.Contains(l.out.String(), `"msg":"log lines were suppressed","line":"flood","suppressed":7`) {
		t.Error(l.out.String()[max(0, l.out.Len()-300):])
	}
}

func TestDebugLinesAreAllShown(t *testing.T) {
	var level slog.LevelVar
	var out strings.Builder
	log := New(&out, &level, "text")
	log.Debug("hidden")
	level.Set(slog.LevelDebug)
	for range 3 * burst {
		log.Debug("request")
	}
	if n := strings.Count(out.String(), "\n"); n != 3*burst || strings.Contains(out.String(), "hidden") {
		t.Errorf("%d lines", n)
	}
}

func TestLoggersOfOneLogShareTheLimits(t *testing.T) {
	var out strings.Builder
	log := New(&out, new(slog.LevelVar), "text")
	with := []*slog.Logger{log, log.With("worker", 1), log.WithGroup("g").With("a", 2)}
	for i := range 3 * burst {
		with[i%3].Info("line")
	}
	if n := strings.Count(out.String(), "\n"); n != burst {
		t.Errorf("%d lines, want %d", n, burst)
	}
	if suppressed(with[1]) != 2*burst || suppressed(slog.New(slog.DiscardHandler)) != 0 {
		t.Errorf("%d suppressed", suppressed(with[1]))
	}
}

func TestTheTableOfCallSitesIsBounded(t *testing.T) {
	l := newLines("text")
	for pc := range 3 * sitesKept {
		l.write(slog.LevelInfo, uintptr(pc+1), "line")
	}
	if n := len(l.log.Handler().(*handler).limits.sites); n > sitesKept+1 {
		t.Errorf("%d sites are kept", n)
	}
}

func TestManyGoroutinesMayLog(t *testing.T) {
	l := New(&lockedBuilder{}, new(slog.LevelVar), "text")
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 1000 {
				l.Info("line")
			}
		})
	}
	group.Wait()
	if n := suppressed(l); n < 7000 {
		t.Errorf("%d suppressed of 8000", n)
	}
}

// lockedBuilder takes lines from many goroutines.
type lockedBuilder struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

func (b *lockedBuilder) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func BenchmarkSuppressedLine(b *testing.B) {
	log := New(&strings.Builder{}, new(slog.LevelVar), "text")
	for b.Loop() {
		log.Info("line", "a", 1)
	}
}
