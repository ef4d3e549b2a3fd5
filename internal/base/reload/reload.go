// Package reload reads files again on a signal, in bounded time. Either all of them take
// effect, or none.
package reload

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"kvrouter/internal/base/textfile"
)

const (
	// limit is the time limit of a reload.
	limit = 30 * time.Second
	// maxHung is the maximum number of hanging reloads, such as on a file system that does
	// not answer.
	maxHung = 8
)

// Source is settings that can be read again.
type Source struct {
	File  string   // name of the file in metrics
	Flags string   // the flags that name Paths, for errors
	Paths []string // must be regular files, because reading a pipe may never end; empty ones are ignored
	// Read reads them. use applies them and returns arguments of slog for the log line. It
	// is called only if every source could be read.
	Read func() (use func() []any, err error)
}

// Reloader reloads sources. Its Run is the only goroutine that uses it.
type Reloader struct {
	sources []Source
	note    func(file string, failed bool)
	log     *slog.Logger
	limit   time.Duration
	reading chan struct{} // has an entry for each read in progress
}

// New returns a reloader of sources, which are read and applied in order. note gets the
// result of each reload for each file.
func New(note func(file string, failed bool), log *slog.Logger, sources ...Source) *Reloader {
	return &Reloader{sources: sources, note: note, log: log, limit: limit, reading: make(chan struct{}, maxHung)}
}

// Run reloads on every signal until ctx is done. A signal during a reload is handled after
// it.
func (r *Reloader) Run(ctx context.Context, signals <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-signals:
			r.reload(ctx)
		}
	}
}

// failure is a file that a reload cannot use, with the reason.
type failure struct {
	file string
	err  error
}

// reload applies what the sources read. If one of them fails, or reading takes too long, it
// changes nothing.
func (r *Reloader) reload(ctx context.Context) {
	file := r.sources[0].File
	select {
	case r.reading <- struct{}{}:
	default:
		r.refuse(failure{file, fmt.Errorf("%d earlier reloads still wait for their files", maxHung)})
		return
	}
	type result struct {
		uses     []func() []any
		failures []failure
	}
	at, read := make(chan string, len(r.sources)), make(chan result, 1)
	go func() { // until the file system answers: maxHung at most
		defer func() { <-r.reading }()
		uses, failures := r.read(at)
		read <- result{uses, failures}
	}()
	timer := time.NewTimer(r.limit)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case file = <-at:
		case <-timer.C:
			r.refuse(failure{file, fmt.Errorf("its files were not read within %s", r.limit)})
			return
		case done := <-read:
			if len(done.failures) > 0 {
				r.refuse(done.failures...)
				return
			}
			r.use(done.uses)
			return
		}
	}
}

// read reads every source, even after one that cannot be used. Before each it sends its
// number to at.
func (r *Reloader) read(at chan<- string) (uses []func() []any, failures []failure) {
	for _, s := range r.sources {
		at <- s.File
		use, err := s.read()
		if err != nil {
			failures = append(failures, failure{s.File, err})
			continue
		}
		uses = append(uses, use)
	}
	return uses, failures
}

func (s *Source) read() (use func() []any, err error) {
	for _, path := range s.Paths {
		if path == "" {
			continue
		}
		if err := textfile.CheckRegular(path); err != nil {
			return nil, fmt.Errorf("%s %s: %w", s.Flags, path, err)
		}
	}
	return s.Read()
}

// refuse reports a refused reload.
func (r *Reloader) refuse(failures ...failure) {
	var reasons []string
	for _, f := range failures {
		reasons = append(reasons, f.err.Error())
	}
	r.noteAll(failures)
	r.log.Error("SIGHUP: reload failed, keeping the current settings", "error", errors.New(strings.Join(reasons, "; ")))
}

// noteAll notes the result of a reload for each file.
func (r *Reloader) noteAll(failures []failure) {
	for _, s := range r.sources {
		failed := false
		for _, f := range failures {
			failed = failed || f.file == s.File
		}
		r.note(s.File, failed)
	}
}

// use applies what was read.
func (r *Reloader) use(uses []func() []any) {
	var said []any
	for _, use := range uses {
		said = append(said, use()...)
	}
	r.noteAll(nil)
	r.log.Info("SIGHUP: reloaded keys, TLS files, log level and busy thresholds; other settings require a restart", said...)
}
