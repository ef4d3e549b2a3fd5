package deploy

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"kvrouter/internal/testkit"
)

// TestComposeRunsWorkersAsTheRouterWantsThem holds the flags of deploy/compose.yaml
// against each other.
func TestComposeRunsWorkersAsTheRouterWantsThem(t *testing.T) {
	var compose struct {
		Services map[string]struct {
			Command, Expose []string
			Environment     map[string]string
			ReadOnly        bool   `yaml:"read_only"`
			Grace           string `yaml:"stop_grace_period"`
		}
	}
	if err := yaml.Unmarshal([]byte(Read(t, "compose.yaml")), &compose); err != nil {
		t.Fatal(err)
	}
	router := compose.Services["router"]
	if router.Environment["KVROUTER_API_KEY"] == "" || !router.ReadOnly {
		t.Errorf("the router: %+v", router)
	}
	t.Setenv("KVROUTER_API_KEY", "k")
	t.Setenv("KVROUTER_ENGINE", "none") // as in the image
	args := slices.Clone(router.Command)
	for i, arg := range args {
		args[i] = strings.Replace(arg, "/var/lib/kvrouter", t.TempDir(), 1)
	}
	cfg := Accept(t, args...)
	workers := cfg.Values("worker")
	grace, err := strconv.Atoi(strings.TrimSuffix(router.Grace, "s"))
	if err != nil || float64(grace) <= cfg.Drain().Seconds() {
		t.Errorf("stop_grace_period %s: a drain may take %v", router.Grace, cfg.Drain())
	}
	if len(workers) != len(compose.Services)-1 || len(workers) < 2 {
		t.Fatalf("%d workers are named of %d services", len(workers), len(compose.Services))
	}
	for _, worker := range workers {
		name, port, _ := strings.Cut(strings.TrimPrefix(worker, "url=http://"), ":")
		service, found := compose.Services[name]
		if !found {
			t.Errorf("%s is no service", worker)
			continue
		}
		value := func(flag string) string {
			if i := slices.Index(service.Command, flag); i >= 0 && i+1 < len(service.Command) {
				return service.Command[i+1]
			}
			return ""
		}
		if value("--port") != port || value("--host") != "0.0.0.0" || value("--block-size") != cfg.Value("block-size") {
			t.Errorf("%s: %q for %s and blocks of %d", name, service.Command, worker, cfg.Int("block-size"))
		}
		for _, flag := range []string{"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"} {
			if !slices.Contains(service.Command, flag) {
				t.Errorf("%s has no %s", name, flag)
			}
		}
		var events struct {
			Enable    bool `json:"enable_kv_cache_events"`
			Publisher string
			Endpoint  string
			Replay    string `json:"replay_endpoint"`
			Topic     string
		}
		if err := json.Unmarshal([]byte(value("--kv-events-config")), &events); err != nil || !events.Enable || events.Publisher != "zmq" || events.Topic == "" {
			t.Errorf("%s: events %+v, %v", name, events, err)
		}
		for _, endpoint := range []string{events.Endpoint, events.Replay} {
			if port, ok := strings.CutPrefix(endpoint, "tcp://*:"); !ok || !slices.Contains(service.Expose, port) {
				t.Errorf("%s: %s is not among %v", name, endpoint, service.Expose)
			}
		}
		for _, page := range []string{"README.md", "docs/workers.md"} {
			if !strings.Contains(Read(t, "../"+page), "--enable-prompt-tokens-details --kv-events-config '"+value("--kv-events-config")+"'") {
				t.Errorf("%s publishes in another way than %s says", name, page)
			}
		}
	}
}

// TestTheUnitStartsWithItsFlagsAndLittleElse holds deploy/systemd/kvrouter.service
// against the flags and, where systemd is at hand, against its judgement.
func TestTheUnitStartsWithItsFlagsAndLittleElse(t *testing.T) {
	unit := Read(t, "systemd/kvrouter.service")
	start := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/kvrouter (.*)$`).FindStringSubmatch(unit)
	if start == nil {
		t.Fatal("no ExecStart")
	}
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "kvrouter.yaml"), "worker: [\"url=http://gpu-1:8100\"]\n")
	args := strings.Fields(strings.NewReplacer("/etc/kvrouter", dir, "/var/lib/kvrouter", dir).Replace(start[1]))
	cfg := Accept(t, args...)
	if workers := cfg.Values("worker"); len(workers) != 1 {
		t.Fatal(workers)
	}
	stop := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)s$`).FindStringSubmatch(unit)
	if stop == nil {
		t.Fatal("no TimeoutStopSec")
	}
	if seconds, err := strconv.Atoi(stop[1]); err != nil || float64(seconds) <= cfg.Drain().Seconds() {
		t.Errorf("TimeoutStopSec %s: a drain may take %v", stop[1], cfg.Drain())
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	file := filepath.Join(dir, "kvrouter.service")
	testkit.WriteFile(t, file, strings.Replace(unit, "/usr/local/bin/kvrouter", "/bin/true", 1))
	var version int
	if _, err := fmt.Sscanf(run(t, analyze, "--version"), "systemd %d", &version); err != nil || version < 247 {
		t.Skipf("systemd %d does not know all that the unit says (%v)", version, err)
	}
	// It judges the units of this machine as well, and by its exit code all of them.
	judged, _ := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", file).CombinedOutput()
	for line := range strings.Lines(string(judged)) {
		if strings.Contains(line, "kvrouter.service") {
			t.Errorf("systemd-analyze verify: %s", line)
		}
	}
	if !strings.Contains(run(t, analyze, "--help"), "--offline") {
		t.Skip("this systemd cannot judge a unit that is not installed")
	}
	out, err := exec.CommandContext(t.Context(), analyze, "security", "--offline=true", "--no-pager", "--threshold=20", file).CombinedOutput()
	if err != nil {
		t.Errorf("systemd-analyze security: %v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	t.Log(lines[len(lines)-1])
}

// run runs a program and returns its standard output.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).Output()
	if err != nil {
		t.Fatalf("%s %q: %v", name, args, err)
	}
	return string(out)
}
