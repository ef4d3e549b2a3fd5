package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/logs"
	"kvrouter/internal/settings"
	"kvrouter/internal/web"
)

func main() {
	config, command, err := ParseConfig(os.Args[1:])
	if err == nil {
		switch command {
		case CommandVersion:
			fmt.Println("kvrouter", version())
		case CommandServe:
			err = serve(config)
		case CommandSimulate:
			err = config.Simulate.Run(config.simulation(), strings.Split(config.Policy, ","), os.Stdout, os.Stderr)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvrouter:", err)
		os.Exit(1)
	}
}

// version is what the build knows of itself.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}

// serve runs the router until it is told to stop, and returns when all it
// started has ended.
func serve(config Config) error {
	var level slog.LevelVar
	_ = level.UnmarshalText([]byte(config.LogLevel)) // an enum
	log := logs.New(os.Stderr, &level, config.LogFormat)
	slog.SetDefault(log)
	settings.LimitMemory(os.Getenv, log)
	if err := settings.CheckPortsFree(config.ports()); err != nil {
		return err
	}
	signals, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	app, err := build(signals, config, log)
	if err != nil {
		return err
	}
	return app.run(signals)
}

// run serves both ports and the fleet until ctx is done, then drains: no new
// request is taken, those that run may finish for --drain-timeout, then the
// workers end.
func (r *app) run(ctx context.Context) error {
	if r.replicas != nil {
		defer r.replicas.Close() // where Run below is not reached
	}
	openAI := web.NewServer(r.api.Handler())
	selection := web.NewServer(r.selection.Handler())
	openAIPort, err := listen(r.config.Host, r.config.HTTPPort, "--http-port")
	if err != nil {
		return err
	}
	selectionPort, err := listen(r.config.Host, r.config.RouterPort, "--router-port")
	if err != nil {
		openAIPort.Close()
		return err
	}
	fleet, stopFleet := context.WithCancel(context.Background())
	defer stopFleet()
	group, failed := errgroup.WithContext(ctx)
	serveOn := func(server *http.Server, port net.Listener) {
		group.Go(func() error {
			if err := server.Serve(port); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		})
	}
	openAIShare, selectionShare := r.config.Shares()
	serveOn(openAI, web.Bound(openAI, openAIPort, openAIShare))
	serveOn(selection, web.Bound(selection, selectionPort, selectionShare))
	if r.replicas != nil {
		group.Go(func() error {
			r.replicas.Run(fleet)
			return nil
		})
	}
	if r.learned != nil {
		group.Go(func() error {
			r.learned.Run(fleet, r.log)
			return nil
		})
	}
	group.Go(func() error {
		r.recoverIndex(fleet) // before anything else writes to the index
		return r.runFleet(fleet)
	})
	group.Go(func() error {
		r.tokens.KeepComparing(failed, r.peers)
		return nil
	})
	r.log.Info("listening", "openai", "http://"+openAIPort.Addr().String()+"/v1", "router", "http://"+selectionPort.Addr().String(), "policy", r.config.Policy)
	group.Go(func() error {
		<-failed.Done()
		signal.Reset(syscall.SIGINT, syscall.SIGTERM) // a second signal ends at once
		r.api.Drain()
		r.log.Info("draining: running requests may finish; a second signal ends at once", "limit", r.config.DrainTimeout)
		limit, cancel := context.WithTimeout(context.Background(), r.config.DrainTimeout)
		defer cancel()
		if err := openAI.Shutdown(limit); err != nil {
			r.log.Warn("requests were still running at the end of --drain-timeout", "error", err)
			openAI.Close()
		}
		selection.Close()
		stopFleet()
		return nil
	})
	err = group.Wait()
	r.api.pairs.Close()
	r.api.recorder.Close()
	r.traces.Close()
	r.log.Info("stopped")
	return err
}

// listen opens a TCP port; flag names where its number came from.
func listen(host string, port int, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("%s %d: %w: free the port or choose another", flag, port, err)
	}
	return l, nil
}
