package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"time"

	"kvrouter/internal/logs"
	"kvrouter/internal/router"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/textfile"
)

const (
	// reloadLimit is the time that a reload may take: more than the question for the
	// machine's GPUs, which is a part of it.
	reloadLimit = 30 * time.Second
	// maxHung bounds the reloads that have not come back, such as from a file system
	// that is gone.
	maxHung = 8
)

// reloaded are the files that are read again while the router runs.
func (c *Config) reloaded() []string {
	files := []string{telemetry.FileConfig}
	if c.Keys.APIKeysFile != "" {
		files = append(files, telemetry.FileKeys)
	}
	if c.Web.TLS.TLSCert != "" {
		files = append(files, telemetry.FileTLS)
	}
	if c.Discovery.File() != "" {
		files = append(files, telemetry.FileWorkers)
	}
	return files
}

// reloader takes over settings that may change while the router runs. Its run is the
// only goroutine that uses it.
type reloader struct {
	app        *app
	level      *slog.LevelVar         // of the log
	reread     func() (Config, error) // reads the settings again
	thresholds router.BusyThresholds  // of the settings as last read
	limit      time.Duration          // reloadLimit
	reading    chan struct{}          // has an entry for each reading that has not come back
}

// newReloader returns the reloader of a router; reread reads its settings again.
func newReloader(app *app, level *slog.LevelVar, reread func() (Config, error)) *reloader {
	return &reloader{app: app, level: level, reread: reread, thresholds: app.config.Routing.BusyThresholds, limit: reloadLimit, reading: make(chan struct{}, maxHung)}
}

// run reloads with every signal until ctx is done. A signal during a reload is kept for
// after it.
func (r *reloader) run(ctx context.Context, signals <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-signals:
			r.reload(ctx)
		}
	}
}

// fresh is what a reload has read.
type fresh struct {
	config          Config
	useKeys         func() int
	useCertificates func()
}

// failure is a file that a reload cannot use.
type failure struct {
	file string // as the metric names it
	err  error
}

// reload takes over keys, certificates, the log level, and the busy thresholds if the
// settings changed them. If one file cannot be used, or reading them takes too long, it
// changes nothing.
func (r *reloader) reload(ctx context.Context) {
	select {
	case r.reading <- struct{}{}:
	default:
		r.refuse(failure{telemetry.FileConfig, fmt.Errorf("%d earlier reloads still wait for their files", maxHung)})
		return
	}
	type result struct {
		fresh    fresh
		failures []failure
	}
	at, read := make(chan string, 3), make(chan result, 1)
	go func() { // until the file system answers: maxHung at most
		defer func() { <-r.reading }()
		now, failures := r.read(at)
		read <- result{now, failures}
	}()
	timer := time.NewTimer(r.limit)
	defer timer.Stop()
	for file := telemetry.FileConfig; ; {
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
			r.use(done.fresh)
			return
		}
	}
}

// read reads every file, also after one that cannot be used. It sends to at which one it
// begins.
func (r *reloader) read(at chan<- string) (now fresh, failures []failure) {
	step := func(file string, read func() error) {
		at <- file
		if err := read(); err != nil {
			failures = append(failures, failure{file, err})
		}
	}
	config := &r.app.config
	step(telemetry.FileConfig, func() (err error) {
		if config.ConfigFile != "" {
			if err := textfile.CheckRegular(config.ConfigFile); err != nil { // reading a pipe may never end
				return fmt.Errorf("--config %s: %w", config.ConfigFile, err)
			}
		}
		now.config, err = r.reread()
		return err
	})
	step(telemetry.FileKeys, func() (err error) {
		now.useKeys, err = r.app.keys.Read()
		return err
	})
	step(telemetry.FileTLS, func() (err error) {
		for _, name := range []string{config.Web.TLS.TLSCert, config.Web.TLS.TLSKey, config.Web.TLS.TLSClientCA} {
			if name == "" {
				continue
			}
			if err := textfile.CheckRegular(name); err != nil {
				return fmt.Errorf("--tls-cert, --tls-key, --tls-client-ca: %s: %w", name, err)
			}
		}
		now.useCertificates, err = r.app.certificates.Read()
		return err
	})
	return now, failures
}

// refuse reports a reload that has changed nothing.
func (r *reloader) refuse(failures ...failure) {
	var reasons []string
	for _, f := range failures {
		reasons = append(reasons, f.err.Error())
	}
	r.note(failures)
	r.app.log.Error("SIGHUP: reload failed, keeping the current settings", "error", errors.New(strings.Join(reasons, "; ")))
}

// note shows the result of a reload for each of its files.
func (r *reloader) note(failures []failure) {
	for _, file := range r.app.config.reloaded() {
		if file == telemetry.FileWorkers {
			continue // which is read by itself
		}
		failed := false
		for _, f := range failures {
			failed = failed || f.file == file
		}
		r.app.reloads.Note(file, failed)
	}
}

// use takes over what was read.
func (r *reloader) use(now fresh) {
	now.useCertificates()
	count := now.useKeys()
	if thresholds := now.config.Routing.BusyThresholds; !reflect.DeepEqual(thresholds, r.thresholds) {
		r.app.models.SetBusyThresholds(thresholds)
		r.thresholds = thresholds
	}
	r.level.Set(logs.Level(now.config.LogLevel))
	r.note(nil)
	r.app.log.Info("SIGHUP: reloaded keys, TLS files, log level and busy thresholds; other settings require a restart",
		"api_keys", count, "tls", r.app.certificates != nil, "log_level", now.config.LogLevel, "busy_thresholds", now.config.Routing.BusyThresholds.Set())
}
