package workers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/process"
)

// superviseStarted starts a worker, again and again, until ctx is done.
func (f *Fleet) superviseStarted(ctx context.Context, w *worker) error {
	pause, failures := f.timing.backoffFirst, 0
	for {
		readyFor, err := f.runStarted(ctx, w)
		if ctx.Err() != nil {
			f.update(w, func(s *Status) { s.State, s.PID = StateStopped, 0 })
			return nil
		}
		if failures++; readyFor > 0 {
			failures = 0
		}
		var end *process.EndError
		if hopeless := failures >= startAttempts || (errors.As(err, &end) && end.Lasting); hopeless && !f.everReady.Load() {
			return fmt.Errorf("%s cannot be started: %w", w, err)
		}
		if readyFor >= f.timing.backoffReset {
			pause = f.timing.backoffFirst
		}
		f.log.Error(fmt.Sprintf("%s: %v; restarting it in %s", w, err, pause), "ready_for", readyFor.Round(time.Second))
		f.update(w, func(s *Status) { s.State, s.PID, s.LastError = StateRestarting, 0, err.Error() })
		if f.sleep(ctx, pause, nil) {
			f.update(w, func(s *Status) { s.Restarts++ })
		}
		pause = min(2*pause, max(f.cfg.RestartBackoffMax, f.timing.backoffFirst))
	}
}

// lastStart returns the attribute of a log line that says how long the last start of a process took, if that is known.
func (f *Fleet) lastStart() []any {
	text, err := os.ReadFile(f.cfg.LastStart)
	if err != nil {
		return nil
	}
	took, err := time.ParseDuration(string(text))
	if err != nil {
		return nil
	}
	return []any{"ready_last_time_after", took}
}

// noteStart writes how long a start took, for the next one. Failing to is no fault of the worker.
func (f *Fleet) noteStart(took time.Duration) {
	if f.cfg.LastStart == "" {
		return
	}
	if err := os.WriteFile(f.cfg.LastStart, []byte(took.Round(time.Second).String()), 0o600); err != nil {
		f.log.Debug("the time of this start is not kept", "error", err)
	}
}

// runStarted runs one started worker from its start to its end. It returns how long it
// was ready, and why it ended.
func (f *Fleet) runStarted(ctx context.Context, w *worker) (readyFor time.Duration, err error) {
	output := process.NewStartLog(f.cfg.Signs)
	f.update(w, func(s *Status) { s.State, s.Stage = StateStarting, process.StageProcess })
	in := f.begin(ctx, w)
	downReason := "the router is shutting down"
	defer func() { in.end(downReason) }()
	engine, err := f.deps.Start(int(w.id), func(stream, text string) { f.workerLine(w, output, stream, text) })
	if err != nil {
		return 0, err
	}
	in.followStarted() // a process listens seconds later: the stream has the engine's first event
	f.update(w, func(s *Status) { s.PID = engine.PID })
	if engine.PID != 0 {
		f.log.Info(fmt.Sprintf("%s: %s", w, process.StageProcess), append(f.lastStart(), "pid", engine.PID, "url", w.spec.URL)...)
	}

	var readySince, downSince time.Time
	lastProgress := in.began
	for poll := f.timing.readyPoll; ; {
		select {
		case <-ctx.Done():
			in.markDown(downReason)
			f.stopStarted(engine, output)
			return 0, ctx.Err()
		case err := <-engine.Ended:
			downReason = "its process ended: " + endReason(err)
			in.markDown(downReason)
			if engine.PID == 0 {
				return since(readySince), err
			}
			return since(readySince), f.explainEnd(w, output, err)
		case looked := <-w.look:
			in.lookAtModels()
			close(looked)
		case <-w.wake:
		case <-time.After(poll):
		}

		if readySince.IsZero() {
			waited := time.Since(in.began)
			if f.becomeReady(in) {
				readySince = time.Now()
				output.SetReady()
				poll = in.pause()
				f.log.Info(fmt.Sprintf("%s: ready after %s", w, waited.Round(time.Second)), "url", w.spec.URL)
				if engine.PID != 0 {
					f.noteStart(waited)
				}
			} else if waited > f.cfg.StartupTimeout {
				f.stopStarted(engine, output)
				downReason = fmt.Sprintf("not ready after %s (--startup-timeout)", f.cfg.StartupTimeout)
				return 0, f.explainEnd(w, output, errors.New(downReason))
			} else if time.Since(lastProgress) >= f.timing.progressEvery {
				lastProgress = time.Now()
				f.log.Info(fmt.Sprintf("%s: still %s (%s)", w, w.current().Stage, waited.Round(time.Second)))
			}
			continue
		}

		in.checkHealth()
		if in.resized() { // a model with states sets its own
			in.restart(ctx)
			in.sizeBlocks(0)
			in.setTargets(in.served, in.followStarted())
			in.followLoads()
			in.announceAnew()
		}
		in.review()
		poll = in.pause()
		switch {
		case in.up:
			downSince = time.Time{}
		case downSince.IsZero():
			if downSince = time.Now(); in.misses.Count > 0 {
				downSince = in.misses.Since
			}
		case time.Since(downSince) > f.timing.hangLimit:
			engine.Kill() // a hung process ignores SIGTERM
			<-engine.Ended
			downReason = fmt.Sprintf("killed because it did not answer for %s", f.timing.hangLimit)
			return since(readySince), errors.New(downReason)
		}
	}
}

// followStarted follows the event streams of a started worker.
func (in *incarnation) followStarted() []events.Source {
	sources := in.f.cfg.Ports.Sources(int(in.w.id), in.blockSize)
	for _, source := range sources {
		in.followEvents(source)
	}
	return sources
}

// stopStarted ends a started worker and returns once nothing of it is left.
func (f *Fleet) stopStarted(engine process.Started, output *process.StartLog) {
	output.SetEnding()
	engine.Stop()
	timer := time.AfterFunc(f.timing.stopLimit, engine.Kill)
	defer timer.Stop()
	<-engine.Ended
}

// becomeReady checks whether a starting worker answers, and if so makes it a target.
func (f *Fleet) becomeReady(in *incarnation) bool {
	w := in.w
	if err := f.probe.Health(in.ctx, w.spec, f.timing.healthLimit, in.answered); err != nil {
		return false
	}
	in.answered = true
	served, err := f.probe.Models(in.ctx, w.spec)
	if err != nil {
		return false
	}
	if served.Names == nil {
		served.Names = []string{f.cfg.ServedModelName}
	}
	in.began = time.Now() // its engine publishes only from now on
	in.setTargets(served, f.cfg.Ports.Sources(int(w.id), in.blockSize))
	in.followLoads()
	in.markUp()
	return true
}

// workerLine handles a line that a started worker printed. Errors of a starting worker
// are kept for explainEnd; those of a ready one are logged at once.
func (f *Fleet) workerLine(w *worker, output *process.StartLog, stream, text string) {
	stage, failure := output.Line(text)
	level := slog.LevelDebug
	if failure {
		level = slog.LevelWarn
	}
	f.log.Log(context.Background(), level, fmt.Sprintf("%s: %s", w, text), "stream", stream)
	if stage == "" {
		return
	}
	var after time.Duration
	f.update(w, func(s *Status) {
		s.Stage = stage
		after = time.Since(s.Since)
	})
	f.log.Info(fmt.Sprintf("%s: %s", w, stage), "after", after.Round(time.Second))
}

// explainEnd logs the last lines of a worker that ended by itself and returns an error
// with a remedy.
func (f *Fleet) explainEnd(w *worker, output *process.StartLog, err error) error {
	lines := output.Tail()
	for _, line := range lines {
		f.log.Error(fmt.Sprintf("%s | %s", w, line))
	}
	return f.cfg.Signs.Explain(endReason(err), lines)
}

func endReason(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}
