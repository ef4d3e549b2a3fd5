package vllm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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
	err := RunProcess(ProcessSpec{Argv: []string{"/bin/sh", "-c", `echo out $A; echo err >&2; exit 7`}, Env: []string{"A=1"}},
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
	err := RunProcess(ProcessSpec{Argv: []string{"/nonexistent/python"}}, func(int) { t.Error("started") }, func(string, string) {})
	if err == nil || !strings.Contains(err.Error(), "/nonexistent/python") {
		t.Errorf("runProcess: %v", err)
	}
}

func TestProcessEndsThoughAnotherHoldsItsOutput(t *testing.T) {
	defer goleak.VerifyNone(t)
	file := filepath.Join(t.TempDir(), "pid")
	script := `setsid sh -c 'echo $$ >"` + file + `"; exec sleep 60' & while [ ! -s "` + file + `" ]; do sleep 0.01; done`
	if err := RunProcess(ProcessSpec{Argv: []string{"/bin/sh", "-c", script}, Env: os.Environ()}, func(int) {}, func(string, string) {}); err != nil {
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
			ended <- RunProcess(ProcessSpec{Argv: []string{"sleep", "60"}, Env: os.Environ()}, func(pid int) { started <- pid }, func(string, string) {})
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

func TestStagesOfARealStart(t *testing.T) {
	// From vLLM 0.32 on a CPU.
	const output = `(APIServer pid=9290) INFO 11-21 07:30:20 [api_utils.py:286] non-default args: {'port': 18100}
(APIServer pid=9290) INFO 11-21 07:30:20 [model.py:733] Resolved architecture: LlamaForCausalLM
(APIServer pid=9290) WARNING 11-21 07:30:20 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.
(EngineCore pid=9494) INFO 11-21 07:30:38 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=9918) INFO 11-21 07:30:54 [cpu_model_runner.py:68] Starting to load model m...
(Worker pid=9918) INFO 11-21 07:30:54 [weight_utils.py:1108] Filesystem type for checkpoints: EXT4. Checkpoint size: 0.25 GiB. Available RAM: 18.03 GiB.
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:01<00:00,  1.29s/it]
(Worker pid=9918) INFO 11-21 07:30:56 [default_loader.py:501] Loading weights took 1.29 seconds
(EngineCore pid=9494) INFO 11-21 07:30:57 [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency for 8,192 tokens per request: 5.69x
(EngineCore pid=9494) INFO 11-21 07:31:01 [kv_events.py:379] Starting ZMQ publisher thread
(APIServer pid=9290) INFO 11-21 07:31:02 [entry.py:140] Starting vLLM server on http://127.0.0.1:18100
INFO:     Application startup complete.`
	var got []string
	log := NewStartLog()
	for line := range strings.SplitSeq(output, "\n") {
		if stage, _ := log.Line(line); stage != "" {
			got = append(got, stage)
		}
	}
	want := []string{"starting engine", "loading weights", "allocating KV cache", "warming up", "starting API server"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if tail := log.Tail(); len(tail) != 0 {
		t.Errorf("tail has routine lines: %q", tail)
	}
}

func TestErrorsOfAReadyWorkerAreToldOnce(t *testing.T) {
	const problem = "(EngineCore pid=1) ERROR 11-21 07:31:02 [core.py:1] broken"
	log := NewStartLog()
	if _, failure := log.Line(problem); failure || len(log.Tail()) != 1 {
		t.Error("while it starts, an error is kept for the end")
	}
	log.SetReady()
	if _, failure := log.Line(problem); !failure || len(log.Tail()) != 0 {
		t.Error("once it is ready, an error is told at once and not again")
	}
}

func TestAdviceFitsTheFailure(t *testing.T) {
	for _, test := range []struct {
		reason string
		lines  []string
		want   string
	}{
		{"exit status 1", []string{"x", "ModuleNotFoundError: No module named 'vllm'"}, "make setup"},
		{"exit status 2", []string{"api_server.py: error: unrecognized arguments: --x"}, "follows --"},
		{"signal: killed", nil, "dmesg"},
		{"exit status 0", nil, "--log-level debug"},
		{"exit status 1", []string{"strange"}, "above"},
	} {
		if got := Explain(test.reason, test.lines).Error(); !strings.Contains(got, test.want) {
			t.Errorf("explain(%q, %q) = %q, want %q in it", test.reason, test.lines, got, test.want)
		}
	}
}

func TestTailKeepsTheLastLines(t *testing.T) {
	log := NewStartLog()
	for i := range 3 * tailLines {
		log.Line(fmt.Sprint("line ", i))
	}
	tail := log.Tail()
	if len(tail) != tailLines || tail[0] != "line 40" || tail[tailLines-1] != "line 59" {
		t.Errorf("%q", tail)
	}
}
