// Package reload reads files again on a signal, in bounded time: all of them are taken
// over, or none.
package reload

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"kvrouter/internal/textfile"
)

const (
	// limit is the time that a reload may take.
	limit = 30 * time.Second
	// maxHung bounds the reloads that have not come back, such as from a file system
	// that is gone.
	maxHung = 8
)

// Source is settings that are read again.
type Source struct {
	File  string   // name of the file in metrics
	Flags string   // the flags that name Paths, for errors
	Paths []string // which must be regular files, because reading a pipe may never end; empty ones are left out
	// Read reads them. use takes them over and returns what the log says of them, as
	// arguments of slog. It is called only if every source could be read.
	Read func() (use func() []any, err error)
}

// Reloader reloads sources. Its Run is the only goroutine that uses it.
type Reloader struct {
	sources []Source
	note    func(file string, failed bool)
	log     *slog.Logger
	limit   time.Duration
	reading chan struct{} // has an entry for each reading that has not come back
}

// New returns a reloader of sources, which are read and used in their order. note gets the
// result of each reload for each of their files.
func New(note func(file string, failed bool), log *slog.Logger, sources ...Source) *Reloader {
	return &Reloader{sources: sources, note: note, log: log, limit: limit, reading: make(chan struct{}, maxHung)}
}

// Run reloads with every signal until ctx is done. A signal during a reload is kept for
// after it.
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

// failure is a file that a reload cannot use.
type failure struct {
	file string
	err  error
}

// reload takes over what the sources read. If one of them fails, or reading takes too
// long, it changes nothing.
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

// read reads every source, also after one that cannot be used. It sends to at which one it
// begins.
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

// refuse reports a reload that has changed nothing.
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

// use takes over what was read.
func (r *Reloader) use(uses []func() []any) {
	var said []any
	for _, use := range uses {
		said = append(said, use()...)
	}
	r.noteAll(nil)
	r.log.Info("SIGHUP: reloaded keys, TLS files, log level and busy thresholds; other settings require a restart", said...)
}
