package process

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"kvrouter/internal/testkit"
)

func TestOutputIsCutIntoLines(t *testing.T) {
	long := strings.Repeat("x", maxLogLine)
	input := "one\r\n\n  \nloading 10%\rloading 20%\n" + long + "tail\nbad \xff byte\nno newline"
	want := []string{"one", "loading 10%", "loading 20%", long, "tail", "bad � byte", "no newline"}
	var got []string
	readLines(strings.NewReader(input), func(text string) { got = append(got, text) })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestProcessOutputIsReadToItsEnd(t *testing.T) {
	defer goleak.VerifyNone(t)
	lines := make(chan string, 10)
	pid := 0
	err := Run(Spec{Argv: []string{"/bin/sh", "-c", `echo out $A; echo err >&2; exit 7`}, Env: []string{"A=1"}},
		func(p int) { pid = p },
		func(stream, text string) { lines <- stream + " " + text })
	close(lines)
	var got []string
	for line := range lines {
		got = append(got, line)
	}
	slices.Sort(got)
	if err == nil || err.Error() != "exit status 7" || pid == 0 || !slices.Equal(got, []string{"stderr err", "stdout out 1"}) {
		t.Errorf("pid %d, lines %q, %v", pid, got, err)
	}
}

func TestProcessThatCannotStartSaysWhich(t *testing.T) {
	defer goleak.VerifyNone(t)
	err := Run(Spec{Argv: []string{"/nonexistent/python"}}, func(int) { t.Error("started") }, func(string, string) {})
	if err == nil || !strings.Contains(err.Error(), "/nonexistent/python") {
		t.Errorf("runProcess: %v", err)
	}
}

func TestProcessEndsThoughAnotherHoldsItsOutput(t *testing.T) {
	defer goleak.VerifyNone(t)
	file := filepath.Join(t.TempDir(), "pid")
	script := `setsid sh -c 'echo $$ >"` + file + `"; exec sleep 60' & while [ ! -s "` + file + `" ]; do sleep 0.01; done`
	if err := Run(Spec{Argv: []string{"/bin/sh", "-c", script}, Env: os.Environ()}, func(int) {}, func(string, string) {}); err != nil {
		t.Error(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(data), &pid); err != nil {
		t.Fatal(err)
	}
	if process, err := os.FindProcess(pid); err != nil || process.Kill() != nil {
		t.Errorf("the process that left the group is gone already: %v", err)
	}
}

func TestReaperEndsWhatItAnswersForOnly(t *testing.T) {
	defer goleak.VerifyNone(t)
	folder := filepath.Join(t.TempDir(), "with a space")
	testkit.WriteFile(t, filepath.Join(folder, "file"), "")
	guard, err := startReaper(folder)
	if err != nil {
		t.Fatal(err)
	}
	const n = 4
	type running struct {
		pid   int
		ended chan error
	}
	var processes []running
	for range n {
		started, ended := make(chan int, 1), make(chan error, 1)
		go func() {
			ended <- Run(Spec{Argv: []string{"sleep", "60"}, Env: os.Environ()}, func(pid int) { started <- pid }, func(string, string) {})
		}()
		p := running{<-started, ended}
		processes = append(processes, p)
		if err := guard.add(p.pid); err != nil {
			t.Fatal(err)
		}
	}
	for _, kept := range []int{2, 0} {
		if err := guard.remove(processes[kept].pid); err != nil {
			t.Fatal(err)
		}
	}
	if err := guard.close(); err != nil {
		t.Error(err)
	}
	for _, killed := range []int{1, 3} {
		if err := <-processes[killed].ended; err == nil || err.Error() != "signal: killed" {
			t.Errorf("process %d: %v", killed, err)
		}
	}
	for _, kept := range []int{0, 2} {
		if !testkit.ProcessLives(processes[kept].pid) {
			t.Errorf("process %d was ended", kept)
		}
		if err := SignalGroup(processes[kept].pid, 9); err != nil {
			t.Error(err)
		}
		<-processes[kept].ended
	}
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}

func TestTailKeepsTheLastLines(t *testing.T) {
	log := NewStartLog(Signs{})
	for i := range 3 * tailLines {
		log.Line(fmt.Sprint("line ", i))
	}
	tail := log.Tail()
	if len(tail) != tailLines || tail[0] != "line 40" || tail[tailLines-1] != "line 59" {
		t.Errorf("%q", tail)
	}
}

func TestPluginFolderIsPrivate(t *testing.T) {
	dir, err := writePlugin(fstest.MapFS{"plugin/a/b.py": {Data: []byte("x")}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder %v, %v: not private", info, err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "a", "b.py")); err != nil || string(data) != "x" {
		t.Errorf("%q, %v", data, err)
	}
}
