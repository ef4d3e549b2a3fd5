// Package test runs the built program, as users do: over mock workers in the test's
// own process, over those that the program starts, or over real engines. Its helpers
// serve the packages of test/real as well.
package test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/leaks"
)

// Main runs a package's tests from the root of the checkout, where docs/, deploy/ and
// testdata/ are, and fails if a test leaves a goroutine behind. Call it from TestMain.
func Main(m *testing.M) {
	root, err := Root()
	if err == nil {
		err = os.Chdir(root)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	leaks.Main(m)
}

// Root returns the folder of go.mod.
func Root() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	return filepath.Dir(strings.TrimSpace(string(out))), err
}

// Program builds kvrouter with the race detector, and with coverage counters where
// GOCOVERDIR names a folder for them. PlainProgram builds it without either, for tests of
// memory and time. Both build once; their errors say why it does not build.
var (
	Program = sync.OnceValues(func() (string, error) {
		if os.Getenv("GOCOVERDIR") != "" {
			return build("cover", "-race", "-cover", "-covermode=atomic")
		}
		return build("race", "-race")
	})
	PlainProgram = sync.OnceValues(func() (string, error) { return build("plain") })
)

// build builds the program into out/test, unless it is there and up to date. Packages
// whose tests run at the same time wait for each other.
func build(name string, flags ...string) (path string, err error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, "out", "test")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close() // which unlocks it
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	path = filepath.Join(dir, "kvrouter-"+name)
	command := exec.Command("go", append(append([]string{"build"}, flags...), "-o", path, ".")...)
	command.Dir = root
	if out, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
}

// Process is a running kvrouter.
type Process struct {
	T       testing.TB
	Command *exec.Cmd
	Log     *testkit.LogBuffer // of its standard output and error
	Ended   chan struct{}      // closed when it has ended

	killed bool // by the test: its exit status says nothing
}

// Run starts a built program with args and with env beside the environment. It ends
// with the test, which fails if the program raced, panicked, left a process behind or
// ended with another status than 0.
func Run(t testing.TB, program func() (string, error), env []string, args ...string) *Process {
	t.Helper()
	return runBy(t, (*exec.Cmd).Start, program, env, args...)
}

// runBy is Run of a program that is started by start.
func runBy(t testing.TB, start func(*exec.Cmd) error, program func() (string, error), env []string, args ...string) *Process {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{T: t, Command: exec.Command(path, args...), Log: &testkit.LogBuffer{}, Ended: make(chan struct{})}
	p.Command.Env = append(os.Environ(), env...)
	p.Command.Stdout, p.Command.Stderr = p.Log, p.Log
	p.Command.WaitDelay = 5 * time.Second
	if err := start(p.Command); err != nil {
		t.Fatal(err)
	}
	go func() { // until the program ends
		p.Command.Wait()
		close(p.Ended)
	}()
	t.Cleanup(func() {
		p.Stop()
		p.check()
		if t.Failed() {
			t.Logf("end of the log:\n%s", p.Log.Tail())
		}
	})
	return p
}

// crash matches the lines by which Go's runtime says why it ends a program.
var crash = regexp.MustCompile(`(?m)^(panic: |fatal error: |WARNING: DATA RACE)`)

// check fails the test for what the ended program must not have done.
func (p *Process) check() {
	if line := crash.FindString(p.Log.String()); line != "" {
		at := crash.FindStringIndex(p.Log.String())[0]
		p.T.Errorf("the program's log has %q:\n%.4000s", line, p.Log.String()[at:])
	}
	if code := p.Command.ProcessState.ExitCode(); code != 0 && !p.killed {
		p.T.Errorf("the program ended with status %d", code)
	}
}

// endLimit is how long the program may take to end after SIGTERM.
const endLimit = 60 * time.Second

// Stop ends the program by SIGTERM, waits for its end and for that of the processes
// it has started. It may be called again.
func (p *Process) Stop() {
	select {
	case <-p.Ended:
		return
	default:
	}
	family := Descendants(p.Command.Process.Pid)
	p.Command.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.Ended:
	case <-time.After(endLimit):
		p.T.Errorf("kvrouter did not end within %s of SIGTERM", endLimit)
		p.Kill()
	}
	p.gone(family)
}

// Kill ends the program by SIGKILL and waits for its end.
func (p *Process) Kill() {
	p.killed = true
	p.Command.Process.Kill()
	<-p.Ended
}

// KillFamily ends the program by SIGKILL: its descendants, at least so many, must go
// too.
func (p *Process) KillFamily(least int) {
	p.T.Helper()
	family := Descendants(p.Command.Process.Pid)
	if len(family) < least {
		p.T.Fatalf("only %d descendants: %v", len(family), family)
	}
	p.Kill()
	p.gone(family)
}

// gone waits until none of the processes lives.
func (p *Process) gone(family []int) {
	p.T.Helper()
	testkit.Eventually(p.T, 30*time.Second, fmt.Sprintf("all processes of %v gone", family), func() bool {
		for _, pid := range family {
			if testkit.ProcessLives(pid) {
				return false
			}
		}
		return true
	})
}

// WaitEnd waits for the program to end by itself and returns its exit status.
func (p *Process) WaitEnd(limit time.Duration) int {
	p.T.Helper()
	p.killed = true // the test judges the status
	select {
	case <-p.Ended:
	case <-time.After(limit):
		p.T.Fatalf("the program has not ended within %s", limit)
	}
	return p.Command.ProcessState.ExitCode()
}

// alive fails the test if the program has ended.
func (p *Process) alive() {
	p.T.Helper()
	select {
	case <-p.Ended:
		p.T.Fatal("kvrouter ended")
	default:
	}
}

// Output runs the program with args to its end, which must come within a minute, and
// returns what it printed on both streams.
func Output(t testing.TB, args ...string) (string, error) {
	t.Helper()
	path, err := Program()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), path, args...)
	command.WaitDelay = time.Second
	limit := time.AfterFunc(time.Minute, func() { command.Process.Kill() })
	defer limit.Stop()
	out, err := command.CombinedOutput()
	if crash.Match(out) {
		err = errors.Join(err, errors.New("it raced or panicked"))
	}
	return string(out), err
}

// MetricsPages returns the pages of metrics. Call it from the root of the checkout.
func MetricsPages(t testing.TB) (text string) {
	t.Helper()
	for _, name := range []string{"docs/metrics.md", "docs/metrics-optional.md"} {
		page, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text += string(page)
	}
	return text
}
