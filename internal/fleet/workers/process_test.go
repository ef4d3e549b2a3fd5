package workers

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/testkit"
)

// TestFakeWorkerProcess is no test: it is the engine that the other tests
// start, in a process of its own. FAKE_WORKER is its port; FAKE_CHILD makes it
// start a child of its own, as vLLM does, and print its pid.
func TestFakeWorkerProcess(t *testing.T) {
	port := os.Getenv("FAKE_WORKER")
	if port == "" {
		t.Skip("started by other tests")
	}
	fmt.Println("(EngineCore pid=1) INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine (v0)")
	switch os.Getenv("FAKE_MODE") {
	case "fails":
		fmt.Fprintln(os.Stderr, "ModuleNotFoundError: No module named 'vllm'")
		os.Exit(3)
	case "never ready":
		time.Sleep(time.Minute)
	case "ignores SIGTERM":
		signal.Ignore(syscall.SIGTERM)
	}
	if os.Getenv("FAKE_CHILD") != "" {
		child := exec.Command("sleep", "120")
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		fmt.Println("child", child.Process.Pid)
	}
	var mu sync.Mutex
	var hangUntil time.Time
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {
		mu.Lock()
		until := hangUntil
		mu.Unlock()
		time.Sleep(time.Until(until))
	})
	mux.HandleFunc("/hang", func(_ http.ResponseWriter, r *http.Request) {
		d, _ := time.ParseDuration(r.URL.Query().Get("for"))
		mu.Lock()
		hangUntil = time.Now().Add(d)
		mu.Unlock()
	})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"fake"}]}`)
	})
	fmt.Println("(Worker pid=2) INFO 01-01 00:00:00 [default_loader.py:1] Loading weights took 1.29 seconds")
	t.Log(http.ListenAndServe("127.0.0.1:"+port, mux))
}

func TestNoWorkerOutlivesAKilledRouter(t *testing.T) {
	defer goleak.VerifyNone(t)
	router := exec.Command(os.Args[0], "-test.run=^TestRouterProcess$")
	router.Env = append(os.Environ(), fmt.Sprintf("FAKE_ROUTER=%d", testkit.FreePorts(t, 2)))
	router.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := router.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := router.Start(); err != nil {
		t.Fatal(err)
	}
	var report testkit.KilledRouter
	err = json.NewDecoder(out).Decode(&report)
	// The whole group, as a terminal or a supervisor might.
	if killed := syscall.Kill(-router.Process.Pid, syscall.SIGKILL); killed != nil {
		t.Fatal(killed)
	}
	_ = router.Wait()
	if err != nil || len(report.PIDs) != 4 {
		t.Fatalf("report %+v: %v", report, err)
	}
	testkit.Settles(t, func() error {
		for _, pid := range report.PIDs {
			if testkit.ProcessLives(pid) {
				return fmt.Errorf("process %d outlives the router", pid)
			}
		}
		if _, err := os.Stat(report.Folder); !os.IsNotExist(err) {
			return fmt.Errorf("folder %s is left: %v", report.Folder, err)
		}
		return nil
	})
}
