package vllm

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
)

// Engine is one started worker: a process, or a simulated one in this process.
type Engine struct {
	PID   int          // 0: in this process
	Ended <-chan error // gets one value, why it ended, once nothing of it is left
	Stop  func()       // tells it to end; it may take its time
	Kill  func()       // ends it
}

// Launcher starts vLLM workers as processes of this machine. It is safe for
// concurrent use between Open and Close.
type Launcher struct {
	log       *slog.Logger
	Command   func(i int, pluginDir string) (ProcessSpec, error) // tests replace it
	pluginDir string
	guard     *reaper
}

// NewLauncher returns a launcher; an error means that no worker could be started.
func NewLauncher(settings Settings, log *slog.Logger) (*Launcher, error) {
	if _, err := exec.LookPath(settings.Python); err != nil {
		return nil, fmt.Errorf("--python %s cannot be run (%w); run `make setup`, or give a Python that has vLLM", settings.Python, errors.Unwrap(err))
	}
	if settings.PrefillWorkers > 0 {
		if err := checkNIXL(settings.Python); err != nil {
			return nil, err
		}
	}
	return &Launcher{log: log, Command: func(i int, pluginDir string) (ProcessSpec, error) {
		return Command(settings, i, pluginDir, os.Environ())
	}}, nil
}

// Open prepares what all workers need. Close must follow once they have ended.
func (l *Launcher) Open() (err error) {
	if l.pluginDir, err = writePlugin(); err != nil {
		return err
	}
	if l.guard, err = startReaper(l.pluginDir); err != nil {
		return errors.Join(err, os.RemoveAll(l.pluginDir))
	}
	return nil
}

// Close removes what Open prepared, and ends what is left of workers.
func (l *Launcher) Close() error { return l.guard.close() }

// Start starts the process of worker i. line is called with each line that it
// prints, from two goroutines, and the name of the stream.
func (l *Launcher) Start(i int, line func(stream, text string)) (Engine, error) {
	spec, err := l.Command(i, l.pluginDir)
	if err != nil {
		return Engine{}, err
	}
	started, ended := make(chan int, 1), make(chan error, 1)
	go func() { // ends with the process
		pid := 0
		err := RunProcess(spec, func(p int) {
			pid = p
			if err := l.guard.add(pid); err != nil {
				l.log.Warn("workers would outlive a killed router", "error", err)
			}
			started <- pid
		}, line)
		if pid != 0 {
			_ = l.guard.remove(pid)
		}
		ended <- err
	}()
	var pid int
	select {
	case pid = <-started:
	case err := <-ended:
		return Engine{}, err
	}
	return Engine{
		PID: pid, Ended: ended,
		Stop: func() {
			if err := SignalGroup(pid, syscall.SIGTERM); err != nil {
				l.log.Warn(fmt.Sprintf("worker %d: %v", i, err))
			}
		},
		Kill: func() { _ = SignalGroup(pid, syscall.SIGKILL) },
	}, nil
}
