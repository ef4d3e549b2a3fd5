// Package envoy runs a real Envoy for tests: a gateway on loopback that asks an endpoint
// picker for the worker of each request by ext_proc.
package envoy

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// Program is the environment variable that names Envoy's binary. scripts/gateway.sh
// installs it.
const Program = "KVROUTER_ENVOY"

// SubsetHeader is the request header with the subset hint of a test: a base64-encoded
// google.protobuf.Value. Gateways pass the hint as metadata only.
const SubsetHeader = "X-Test-Subset"

// startLimit is the maximum time until Envoy is ready.
const startLimit = 30 * time.Second

// Options configure the gateway.
type Options struct {
	Picker  string   // host:port of the endpoint picker; empty: none is asked
	TLS     bool     // the picker is spoken to by TLS, and any certificate is taken
	Open    bool     // FailOpen: a request proceeds without the picker
	Workers []string // host:port of the cluster that tries the list of addresses; empty: the single address of the header is used
}

// Envoy is a running gateway. It ends with the test.
type Envoy struct {
	URL   string // of the gateway
	Admin string // URL of its admin port
	PID   int

	t       testing.TB
	command *exec.Cmd
	log     testkit.LogBuffer
	ended   chan struct{} // closed once it has
	web     *http.Client
}

// Start starts a gateway and waits until it is ready. The test is skipped
// unless the environment variable Program is set.
func Start(t testing.TB, o Options) *Envoy {
	t.Helper()
	ports := testkit.FreePorts(t, 2)
	var config bytes.Buffer
	if err := configuration.Execute(&config, settings{Options: o, Port: ports, AdminPort: ports + 1}); err != nil {
		t.Fatal(err)
	}
	return start(t, config.Bytes(), ports)
}

// StartDeployed starts a gateway at port, with its admin port after that, with a configuration
// file of deploy/gateway, in which only the addresses are replaced: of its listener, of the
// workers and of the pickers, which are given as host:port. It is Start otherwise.
func StartDeployed(t testing.TB, file string, port int, pickers, workers []string) *Envoy {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	config, err := readdress(text, port, pickers, workers)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return start(t, config, port)
}

// start starts a gateway at port, with its admin port after that.
func start(t testing.TB, config []byte, port int) *Envoy {
	t.Helper()
	program := os.Getenv(Program)
	if program == "" {
		t.Skip("make test-gateway runs it")
	}
	path := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(path, config, 0o600); err != nil {
		t.Fatal(err)
	}
	e := &Envoy{
		URL: fmt.Sprintf("http://127.0.0.1:%d", port), Admin: fmt.Sprintf("http://127.0.0.1:%d", port+1), t: t,
		command: exec.Command(program, "-c", path, "--disable-hot-restart", "--concurrency", "2", "--log-level", "warning"),
		ended:   make(chan struct{}), web: &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}},
	}
	e.command.Stdout, e.command.Stderr = &e.log, &e.log
	e.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := e.command.Start(); err != nil {
		t.Fatalf("%v; make test-gateway installs it", err)
	}
	e.PID = e.command.Process.Pid
	go func() { // ends with the process
		_ = e.command.Wait()
		close(e.ended)
	}()
	t.Cleanup(func() {
		_ = e.command.Process.Kill()
		<-e.ended
		if t.Failed() {
			t.Logf("end of Envoy's log:\n%s", e.log.Tail())
		}
	})
	testkit.Eventually(t, startLimit, "Envoy is ready", func() bool {
		select {
		case <-e.ended:
			t.Fatalf("Envoy has ended:\n%s", e.log.Tail())
		default:
		}
		status, _ := e.get("/ready")
		return status == http.StatusOK
	})
	return e
}

// WaitForPicker waits until Envoy's health check reports the picker as healthy, or not.
func (e *Envoy) WaitForPicker(well bool) {
	e.t.Helper()
	testkit.Eventually(e.t, startLimit, fmt.Sprintf("Envoy finds the picker well: %v", well), func() bool {
		_, page := e.get("/clusters")
		return strings.Contains(page, "\npicker::") && strings.Contains(page, "::health_flags::/failed_active_hc") != well
	})
}

// get returns the status and the text of a page of the admin port; 0: no response.
func (e *Envoy) get(path string) (status int, text string) {
	response, err := e.web.Get(e.Admin + path)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = response.Body.Close() }()
	var b bytes.Buffer
	_, _ = b.ReadFrom(response.Body)
	return response.StatusCode, "\n" + b.String()
}
