// Package logs provides the router's structured log, which rate-limits each call site.
package logs

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	// burst is the number of lines that one call site may write at once, and perSecond how
	// many it may write in the long run.
	burst     = 100
	perSecond = 10
	// sitesKept bounds the call sites that are tracked; a program has fewer.
	sitesKept = 4096
	// reportAfter is the time that a call site must be quiet before the number of its
	// suppressed lines is logged.
	reportAfter = 10 * time.Second
)

// New returns a log to out, in JSON for the format "json" and as text for any other. It
// writes lines of at least level, which may change later. Each call site is limited to a
// burst of 100 lines and 10 lines a second; its next line, or a separate line after 10 s,
// has the number of suppressed lines in "suppressed". Debug lines are never suppressed.
func New(out io.Writer, level *slog.LevelVar, format string) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	var next slog.Handler = slog.NewTextHandler(out, options)
	if format == "json" {
		next = slog.NewJSONHandler(out, options)
	}
	return slog.New(&handler{next: next, limits: &limits{plain: next, sites: map[uintptr]*site{}}})
}

// Level returns the level of that name; info for an unknown name.
func Level(name string) (level slog.Level) {
	_ = level.UnmarshalText([]byte(name))
	return level
}

// suppressed returns the number of lines that a log of New has suppressed; 0 for any
// other log.
func suppressed(log *slog.Logger) uint64 {
	h, ok := log.Handler().(*handler)
	if !ok {
		return 0
	}
	h.limits.mu.Lock()
	defer h.limits.mu.Unlock()
	return h.limits.suppressed
}

// handler hands to next what limits let pass.
type handler struct {
	next   slog.Handler
	limits *limits // shared by all handlers of one log
}

// Enabled implements slog.Handler.
func (h *handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.next.Enabled(ctx, level)
}

// WithAttrs implements slog.Handler.
func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{next: h.next.WithAttrs(attrs), limits: h.limits}
}

// WithGroup implements slog.Handler.
func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{next: h.next.WithGroup(name), limits: h.limits}
}

// Handle implements slog.Handler.
func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelInfo {
		return h.next.Handle(ctx, r)
	}
	now := r.Time
	if now.IsZero() {
		now = time.Now()
	}
	pass, left, quiet := h.limits.take(r.PC, r.Message, now)
	for _, s := range quiet {
		report := slog.NewRecord(now, slog.LevelWarn, "log lines were suppressed", 0)
		report.AddAttrs(slog.String("line", s.message), slog.Uint64("suppressed", s.left))
		if err := h.limits.plain.Handle(ctx, report); err != nil {
			return err
		}
	}
	if !pass {
		return nil
	}
	if left > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Uint64("suppressed", left))
	}
	return h.next.Handle(ctx, r)
}

// limits has what each call site may still write.
type limits struct {
	plain slog.Handler // without the attributes and groups of any logger

	mu         sync.Mutex // guards all below
	sites      map[uintptr]*site
	suppressed uint64
	looked     time.Time // when quiet sites were last looked for
}

// site is one call site.
type site struct {
	lines   *rate.Limiter
	message string    // of its last line
	last    time.Time // of its last line, left out or not
	left    uint64    // suppressed lines not yet reported
}

// take reports whether the call site at pc may write a line now, and how many of
// its lines were left out since its last one. quiet are copies of sites that have
// written nothing for a while and are still owed a report.
func (l *limits) take(pc uintptr, message string, now time.Time) (pass bool, left uint64, quiet []site) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.sites[pc]
	if s == nil && len(l.sites) >= sitesKept {
		pc = 0 // what comes too late shares one bucket
		s = l.sites[pc]
	}
	if s == nil {
		s = &site{lines: rate.NewLimiter(perSecond, burst)}
		l.sites[pc] = s
	}
	s.message, s.last = message, now
	if pass = s.lines.AllowN(now, 1); pass {
		left, s.left = s.left, 0
	} else {
		s.left++
		l.suppressed++
	}
	if now.Sub(l.looked) < reportAfter {
		return pass, left, nil
	}
	l.looked = now
	for _, other := range l.sites {
		if other.left > 0 && now.Sub(other.last) >= reportAfter {
			quiet = append(quiet, *other)
			other.left = 0
		}
	}
	return pass, left, quiet
}
