package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"reflect"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/base/logs"
	"kvrouter/internal/base/reload"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/prompt/native"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/tools/demo"
)

func main() {
	command, err := parse(os.Args[1:], settings.ThisMachine())
	if err == nil && command != nil {
		err = command.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvrouter:", err)
		os.Exit(1)
	}
}

// Run runs the router until it is asked to stop, and returns when all it started has
// ended.
func (c *Config) Run() error {
	config := *c
	level := new(slog.LevelVar)
	level.Set(logs.Level(config.LogLevel))
	log := logs.New(os.Stderr, level, config.LogFormat)
	slog.SetDefault(log)
	settings.LimitMemory(os.Getenv, log)
	variables, err := misspelt(os.Environ())
	if err != nil {
		return err
	}
	for name, nearest := range variables {
		log.Warn("environment variable is not that of a flag", "variable", name, "did_you_mean", nearest)
	}
	if err := settings.CheckPortsFree(config.ports()); err != nil {
		return err
	}
	ctx := untilSignal()
	reloads := make(chan os.Signal, 1)
	signal.Notify(reloads, syscall.SIGHUP)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a closed log is no reason to end
	app, err := build(ctx, config, log)
	if err != nil {
		return err
	}
	reread := func() (*Config, error) { return parseServe(os.Args[1:]) }
	go reload.New(app.noteReload, log, app.reloaded(level, reread)...).Run(ctx, reloads)
	return app.run(ctx)
}

// reloaded returns what SIGHUP reloads: the log level and the busy thresholds of the
// settings, which reread reads again, keys and certificates.
func (r *app) reloaded(level *slog.LevelVar, reread func() (*Config, error)) []reload.Source {
	config, thresholds := &r.config, r.config.Routing.BusyThresholds
	return []reload.Source{
		{File: telemetry.FileConfig, Flags: "--config", Paths: []string{config.ConfigFile}, Read: func() (func() []any, error) {
			fresh, err := reread()
			if err != nil {
				return nil, err
			}
			return func() []any {
				if now := fresh.Routing.BusyThresholds; !reflect.DeepEqual(now, thresholds) {
					r.models.SetBusyThresholds(now)
					thresholds = now
				}
				level.Set(logs.Level(fresh.LogLevel))
				return []any{"log_level", fresh.LogLevel, "busy_thresholds", fresh.Routing.BusyThresholds.Set()}
			}, nil
		}},
		{File: telemetry.FileKeys, Read: func() (func() []any, error) {
			use, err := r.keys.Read()
			return func() []any { return []any{"api_keys", use()} }, err
		}},
		{File: telemetry.FileTLS, Flags: "--tls-cert, --tls-key, --tls-client-ca:", Paths: []string{config.Web.TLS.TLSCert, config.Web.TLS.TLSKey, config.Web.TLS.TLSClientCA}, Read: func() (func() []any, error) {
			use, err := r.certificates.Read()
			return func() []any {
				use()
				return []any{"tls", r.certificates != nil}
			}, err
		}},
	}
}

// noteReload shows the result of reading a file again, if it is in use.
func (r *app) noteReload(file string, failed bool) {
	if slices.Contains(r.config.reloadedFiles(), file) {
		r.reloads.Note(file, failed)
	}
}

// reloadedFiles are the files in use that are read again while the router runs.
func (c *Config) reloadedFiles() []string {
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

// errInterrupted is the cause of an end by SIGINT: by a person, not by a balancer's
// rolling update.
var errInterrupted = errors.New("interrupted")

// untilSignal returns a context that ends with SIGTERM or SIGINT. From then on a
// second one ends the process at once.
func untilSignal() context.Context {
	ctx, end := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() { // until the first signal
		first := <-signals
		signal.Reset(syscall.SIGINT, syscall.SIGTERM)
		if first == syscall.SIGINT {
			end(errInterrupted)
		}
		end(nil)
	}()
	return ctx
}

// run serves the ports and the fleet until ctx is done, then drains.
func (r *app) run(ctx context.Context) error {
	fleet, stopFleet := context.WithCancel(context.Background())
	defer stopFleet()
	group, failed := errgroup.WithContext(ctx)
	for i, handler := range r.handlers() {
		group.Go(func() error { return r.ports[i].Serve(handler) })
	}
	if r.gateway != nil {
		group.Go(r.gateway.Serve)
		r.log.Info("ext_proc server listening", "ext_proc", r.gateway.Address())
	}
	background := func(ctx context.Context, run func(context.Context)) {
		group.Go(func() error {
			run(ctx)
			return nil
		})
	}
	background(fleet, r.page.Run)
	background(failed, r.models.Run)
	background(failed, r.reporter.Run)
	if r.config.Demo {
		background(failed, func(ctx context.Context) { demo.Run(ctx, r.demo()) })
	}
	if r.replicas != nil {
		background(fleet, r.replicas.Run)
	}
	if r.below != nil {
		background(fleet, r.below.Run)
	}
	if r.learned != nil {
		background(fleet, r.learned.Run)
	}
	if r.source != nil {
		background(fleet, func(ctx context.Context) { r.fleet.Follow(r.source.Watch(ctx)) })
	}
	group.Go(func() error {
		r.recoverIndex(fleet) // before anything else writes to the index
		return r.runFleet(fleet)
	})
	if library, err := native.Open(); err == nil {
		library.ReleaseStartup()
	}
	r.log.Info("listening", "openai", r.ports[0].URL()+"/v1", "router", r.ports[1].URL(), "page", page.URL(r.ports[1].URL()), "policy", r.config.Policy)
	group.Go(func() error {
		<-failed.Done()
		delay := r.config.DrainDelay
		if ctx.Err() == nil || errors.Is(context.Cause(ctx), errInterrupted) {
			delay = 0 // no load balancer needs time to notice
		}
		r.drain(delay)
		r.recording.Close() // the end of the workers is not recorded as lost blocks
		stopFleet()
		return nil
	})
	err := group.Wait()
	r.proxy.Close()
	r.recorder.Close()
	r.traces.Close()
	r.tracer.Close()
	r.log.Info("stopped")
	return err
}

// handlers are those of the ports.
func (r *app) handlers() []http.Handler {
	all := []http.Handler{r.api, r.page.Over(r.selection.Handler())}
	if r.config.Page.PagePort != 0 {
		all = append(all, r.page.Handler())
	}
	if r.config.Metrics.MetricsPort != 0 {
		all = append(all, r.telemetry.Port(r.config.Metrics.MetricsHost, r.log))
	}
	return all
}

// selectionEnd is the time that requests of the router port may take to finish after
// those of the OpenAI port have.
const selectionEnd = 2 * time.Second

// drain ends all ports, the OpenAI port, which comes first, before the others: they
// are not ready but serve for delay, then take no new connection, and requests may
// finish for --drain-timeout. Started workers live on.
func (r *app) drain(delay time.Duration) {
	r.api.Drain()
	r.reporter.Leave()
	r.selection.Drain()
	r.fleet.Drain(r.config.DrainTimeout)
	for _, port := range r.ports {
		port.Leave()
	}
	if delay > 0 {
		r.log.Info("not ready, still serving; a second signal stops the router at once", "drain_delay", delay)
		time.Sleep(delay)
	}
	r.log.Info("draining: waiting for in-flight requests; a second signal stops the router at once", "limit", r.config.DrainTimeout)
	var gateways sync.WaitGroup
	if r.gateway != nil {
		gateways.Go(func() { r.gateway.Drain(r.config.DrainTimeout) })
	}
	defer gateways.Wait()
	if !r.ports[0].Drain(r.config.DrainTimeout) {
		r.log.Warn("--drain-timeout reached: aborting the requests still in flight")
	}
	r.page.Close()
	for _, port := range r.ports[1:] {
		port.Drain(selectionEnd)
	}
}
