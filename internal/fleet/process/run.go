package process

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// maxLogLine is the longest line of a worker that is kept whole, bytes; a
// longer one is cut into pieces.
const maxLogLine = 64 << 10

// Names of a process's output streams, as given to Launcher.Start.
const (
	streamOut = "stdout"
	streamErr = "stderr"
)

// Run starts the leader of a new process group, calls started with its pid (which
// is also the group's id), calls line with every line of output (from two
// goroutines) and returns when the leader has ended and its output was read. Other
// processes of the group are killed before the return.
//
// The kernel kills the leader if the thread that started it ends, so the
// goroutine stays on one thread until then: the thread ends with the router.
func Run(spec Spec, started func(pid int), line func(stream, text string)) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd := exec.Command(spec.Argv[0], spec.Argv[1:]...)
	cmd.Env = spec.Env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	var readers sync.WaitGroup
	var outputs []*os.File
	defer func() {
		for _, r := range outputs {
			_ = r.Close()
		}
	}()
	pipe := func(stream string) (*os.File, error) {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		outputs = append(outputs, r)
		readers.Go(func() { readLines(r, func(text string) { line(stream, text) }) })
		return w, nil
	}
	stdout, err := pipe(streamOut)
	if err != nil {
		return fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	stderr, err := pipe(streamErr)
	if err != nil {
		_ = stdout.Close()
		readers.Wait()
		return fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	cmd.Stdout, cmd.Stderr = stdout, stderr

	err = cmd.Start()
	_, _ = stdout.Close(), stderr.Close()
	if err != nil {
		readers.Wait()
		return fmt.Errorf("start %s: %w", spec.Argv[0], err)
	}
	pid := cmd.Process.Pid
	started(pid)
	err = cmd.Wait()
	endGroup(pid)

	// Somebody outside the group may still hold the pipes: do not wait for them.
	unblock := time.AfterFunc(2*time.Second, func() {
		for _, r := range outputs {
			_ = r.SetReadDeadline(time.Now())
		}
	})
	readers.Wait()
	unblock.Stop()
	return err
}

// SignalGroup sends a signal to every process of a group.
func SignalGroup(pgid int, signal syscall.Signal) error {
	if err := syscall.Kill(-pgid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("send %s to process group %d: %w", signal, pgid, err)
	}
	return nil
}

// endGroup kills the rest of a dead leader's group and waits until it is
// gone, because it holds the ports that the next incarnation needs. A zombie
// that is not reaped keeps the group alive: hence the limit.
func endGroup(pgid int) {
	const limit, poll = 2 * time.Second, 5 * time.Millisecond
	for start := time.Now(); time.Since(start) < limit; time.Sleep(poll) {
		if syscall.Kill(-pgid, syscall.SIGKILL) != nil {
			return
		}
	}
}

// readLines calls line for every line until the stream ends. A progress bar's
// carriage return ends a line too; empty lines are left out.
func readLines(r io.Reader, line func(string)) {
	scanner := bufio.NewScanner(r)
	scanner.Buffer(make([]byte, 0, 4096), maxLogLine)
	scanner.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		for i, b := range data {
			if b == '\n' || b == '\r' {
				return i + 1, data[:i], nil
			}
		}
		if len(data) > 0 && (atEOF || len(data) >= maxLogLine) {
			return len(data), data, nil
		}
		return 0, nil, nil
	})
	for scanner.Scan() {
		if text := strings.ToValidUTF8(scanner.Text(), "�"); strings.TrimSpace(text) != "" {
			line(text)
		}
	}
}

// reaperScript reads "+ID" and "-ID" lines about process groups. When its input
// ends, because the router closed it or died, it kills the groups that are left
// and removes the folder $1.
const reaperScript = `
groups=' '
while read -r line; do
  case $line in
  +*) groups="$groups${line#+} " ;;
  -*) id=${line#-}; case $groups in *" $id "*) groups="${groups%%" $id "*} ${groups#*" $id "}" ;; esac ;;
  esac
done
for id in $groups; do kill -s KILL -- "-$id"; done
rm -rf -- "$1"
`

// reaper is a small process that outlives the router by a moment: it ends the
// workers that a killed router leaves behind. The parent-death signal reaches
// only the direct child, and engines have more processes than that. It is safe for
// concurrent use.
type reaper struct {
	cmd *exec.Cmd

	mu    sync.Mutex // guards input; held while the pipe is written
	input *os.File
}

// startReaper starts the process, in a session of its own so that no signal for
// the router's group or terminal ends it. At its end it removes folder.
func startReaper(folder string) (*reaper, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the workers' reaper: %w", err)
	}
	defer func() { _ = r.Close() }()
	cmd := exec.Command("/bin/sh", "-c", reaperScript, "kvrouter-reaper", folder)
	cmd.Dir = "/"
	cmd.Stdin = r
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("start the workers' reaper: %w", err)
	}
	return &reaper{cmd: cmd, input: w}, nil
}

// add makes the reaper answer for a process group, remove ends that.
func (r *reaper) add(pgid int) error    { return r.send("+", pgid) }
func (r *reaper) remove(pgid int) error { return r.send("-", pgid) }

func (r *reaper) send(what string, pgid int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := fmt.Fprintf(r.input, "%s%d\n", what, pgid); err != nil {
		return fmt.Errorf("notify the workers' reaper: %w", err)
	}
	return nil
}

// close ends the reaper and its remaining processes, and waits for it.
func (r *reaper) close() error {
	r.mu.Lock()
	err := r.input.Close()
	r.mu.Unlock()
	if err != nil {
		return fmt.Errorf("end the workers' reaper: %w", err)
	}
	if err := r.cmd.Wait(); err != nil {
		return fmt.Errorf("the workers' reaper: %w", err)
	}
	return nil
}
