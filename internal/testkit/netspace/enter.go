package netspace

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// variable names the test that runs in a process of its own.
const variable = "KVROUTER_TEST_NETSPACE"

// spare is how long before the test's deadline that of its process is.
const spare = 5 * time.Second

// Enter runs the calling test again, in a process with a user and a network namespace of its own,
// and reports whether this is that process. If it is not, the test has run: it must return. The
// test is skipped where namespaces are refused. It must be no subtest.
func Enter(t *testing.T) (inside bool) {
	t.Helper()
	if os.Getenv(variable) == t.Name() {
		return true
	}
	if strings.Contains(t.Name(), "/") {
		t.Fatal("netspace: a subtest cannot run in a process of its own")
	}
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The kernel ends the process with the thread that has started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	command := exec.CommandContext(t.Context(), path, "-test.run=^"+t.Name()+"$", "-test.v")
	if deadline, ok := t.Deadline(); ok {
		command.Args = append(command.Args, "-test.timeout="+max(time.Until(deadline)-spare, time.Second).String())
	}
	command.Env = append(os.Environ(), variable+"="+t.Name())
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	command.WaitDelay = spare
	out := &output{t: t}
	command.Stdout, command.Stderr = out, out
	err = command.Run()
	var status *exec.ExitError
	switch {
	case err != nil && !errors.As(err, &status):
		if err = refused("a user and a network namespace", err); errors.Is(err, errRefused) {
			t.Skip(err)
		}
		t.Fatal(err)
	case err != nil:
		t.Fatal("in a process of its own: ", err)
	case out.skipped:
		t.Skip("in a process of its own")
	}
	return false
}

// output logs what the process writes, line by line.
type output struct {
	t       *testing.T
	rest    []byte // of a line that has not ended
	skipped bool   // the test has skipped itself
}

// Write logs the lines that end in p.
func (o *output) Write(p []byte) (int, error) {
	o.rest = append(o.rest, p...)
	for {
		line, rest, whole := bytes.Cut(o.rest, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		o.t.Logf("| %s", line)
		o.skipped = o.skipped || bytes.HasPrefix(line, []byte("--- SKIP: "+o.t.Name()+" "))
		o.rest = rest
	}
}
