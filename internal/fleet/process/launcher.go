package process

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"
)

// Started is one started worker: a process, or a simulated one in this process.
type Started struct {
	PID   int          // 0: in this process
	Ended <-chan error // receives one value, the cause, when all of its processes have ended
	Stop  func()       // requests its end, without waiting
	Kill  func()       // ends it
}

// Launcher starts workers as processes of this machine. It is safe for concurrent
// use between Open and Close.
type Launcher struct {
	log       *slog.Logger
	plugin    fs.FS
	Command   func(i int, pluginDir string) (Spec, error) // tests replace it
	pluginDir string
	guard     *reaper
}

// NewLauncher returns a launcher of an engine's workers. An error means that
// workers cannot be started.
func NewLauncher(engine Engine, settings Settings, log *slog.Logger) (*Launcher, error) {
	if _, err := exec.LookPath(settings.Python); err != nil {
		return nil, fmt.Errorf("--python %s cannot be run (%w); run `%s`, or use a Python that has %s", settings.Python, errors.Unwrap(err),
			engine.Setup, engine.Signs.Engine)
	}
	if err := engine.CheckPython(settings); err != nil {
		return nil, err
	}
	settings.Untaken = Untaken(settings.Python, engine.Kind.String(), slices.Sorted(maps.Keys(engine.Newer)))
	if engine.Examine != nil {
		engine.Examine(&settings)
	}
	for _, flag := range settings.Untaken {
		if lost := engine.Newer[flag]; lost != "" {
			log.Warn(fmt.Sprintf("%s of %s is started without --%s, for which it is too old", engine.Signs.Engine, settings.Python, flag),
				"lost", lost)
		}
	}
	return &Launcher{log: log, plugin: engine.Plugin, Command: func(i int, pluginDir string) (Spec, error) {
		return engine.Command(settings, i, pluginDir, os.Environ())
	}}, nil
}

// Open prepares the files that all workers need. The caller calls Close when they
// have ended.
func (l *Launcher) Open() (err error) {
	if l.pluginDir, err = writePlugin(l.plugin); err != nil {
		return err
	}
	if l.guard, err = startReaper(l.pluginDir); err != nil {
		return errors.Join(err, os.RemoveAll(l.pluginDir))
	}
	return nil
}

// Close removes the files of Open and ends the remaining processes of workers.
func (l *Launcher) Close() error { return l.guard.close() }

// Start starts the process of worker i. line is called, from two goroutines, with
// each line of its output and the name of the stream.
func (l *Launcher) Start(i int, line func(stream, text string)) (Started, error) {
	spec, err := l.Command(i, l.pluginDir)
	if err != nil {
		return Started{}, err
	}
	started, ended := make(chan int, 1), make(chan error, 1)
	go func() { // ends with the process
		pid := 0
		err := Run(spec, func(p int) {
			pid = p
			if err := l.guard.add(pid); err != nil {
				l.log.Warn("workers will outlive a killed router", "error", err)
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
		return Started{}, err
	}
	return Started{
		PID: pid, Ended: ended,
		Stop: func() {
			if err := SignalGroup(pid, syscall.SIGTERM); err != nil {
				l.log.Warn(fmt.Sprintf("worker %d: %v", i, err))
			}
		},
		Kill: func() { _ = SignalGroup(pid, syscall.SIGKILL) },
	}, nil
}

// writePlugin puts an engine's plugins into a new folder that only this user can
// read, and returns its name. The caller removes it.
func writePlugin(files fs.FS) (string, error) {
	dir, err := os.MkdirTemp("", "kvrouter-plugin-")
	if err != nil {
		return "", fmt.Errorf("folder for the engine's plugins: %w", err)
	}
	if files, err = fs.Sub(files, "plugin"); err == nil {
		err = os.CopyFS(dir, files)
	}
	if err != nil {
		_ = os.RemoveAll(dir)
		return "", fmt.Errorf("write the engine's plugins to %s: %w", dir, err)
	}
	return dir, nil
}

// askLimit bounds the question which modules a Python has.
const askLimit = 30 * time.Second

// Lacks reports whether a Python has none of the modules. It does not import them,
// which can take seconds. An error means that the Python cannot be run.
func Lacks(python string, modules ...string) (bool, error) {
	const look = "import importlib.util as u, sys; sys.exit(0 if any(map(u.find_spec, sys.argv[1:])) else 3)"
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	err := exec.CommandContext(ctx, python, append([]string{"-c", look}, modules...)...).Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 3 {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("--python %s cannot be checked for %s: %w", python, modules[0], err)
	}
	return false, nil
}
