// Package prometheus has a Prometheus scrape the built router and asks it every
// expression of deploy/: `make test-boards`.
package prometheus

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/test"
	"kvrouter/test/deploy"
)

func TestMain(m *testing.M) { test.Main(m) }

// emptyPanels are queries of the board that find nothing while all goes well, as
// nothing of the kind has happened, by what they begin with.
var emptyPanels = []string{"Missed or invalid KV events", "Losses and panics C", "Tokenization fallbacks", "Losses and panics D", "Waiting requests by tenant"}

// TestBoardsOnPrometheus has Prometheus scrape routers under load, and asks it every
// expression of the board and of the alerts. `make test-boards` names the program.
func TestBoardsOnPrometheus(t *testing.T) {
	program := os.Getenv("KVROUTER_PROMETHEUS")
	if program == "" {
		t.Skip("make test-boards runs this")
	}
	routers := deploy.StartShown(t)
	dir := t.TempDir()
	alerts, err := filepath.Abs(deploy.AlertsFile)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", testkit.FreePorts(t, 1))
	var targets []string
	for _, r := range routers {
		targets = append(targets, strconv.Quote(strings.TrimPrefix(r.Port, "http://")))
	}
	testkit.WriteFile(t, filepath.Join(dir, "prometheus.yml"), fmt.Sprintf(`
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs: [{job_name: kvrouter, static_configs: [{targets: [%s]}]}]
`, alerts, strings.Join(targets, ", ")))
	log := &testkit.LogBuffer{}
	command := exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	command.Stdout, command.Stderr = log, log
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		command.Process.Kill()
		command.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	get := func(path string) (gjson.Result, error) {
		response, err := http.Get("http://" + address + path)
		if err != nil {
			return gjson.Result{}, err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err == nil && !gjson.ValidBytes(text) { // as while it is starting
			err = fmt.Errorf("%s: %s", response.Status, text)
		}
		return gjson.ParseBytes(text), err
	}

	left, _ := deploy.Expressions(t)
	for i := 0; ; i++ {
		if a, err := routers[0].Chat(t.Context(), deploy.LongPrompt(i%3), true, 8); err != nil || !a.Finished {
			t.Fatalf("%+v, %v", a, err)
		}
		for where, expr := range left {
			answer, err := get("/api/v1/query?query=" + url.QueryEscape(expr))
			if err != nil {
				break // it is still starting
			}
			if answer.Get("status").Str != "success" {
				t.Errorf("%s: %s\n%s", where, answer.Get("error").Str, expr)
			}
			if answer.Get("status").Str != "success" || answer.Get("data.result.#").Int() > 0 || strings.HasPrefix(where, "KVRouter") {
				delete(left, where)
			}
		}
		for where := range left {
			for _, begin := range emptyPanels {
				if strings.HasPrefix(where, begin) && i > 20 {
					delete(left, where)
				}
			}
		}
		if len(left) == 0 {
			break
		}
		if i == 200 {
			t.Fatalf("nothing is found for %q", left)
		}
		<-time.After(200 * time.Millisecond)
	}

	// A worker that has been drained is down, also while it is out for its failures.
	failing := routers[deploy.Failing]
	failing.Act(deploy.FailingWorker, "drain")
	states, _ := deploy.Expressions(t)
	drained := fmt.Sprintf("(%s) and kvrouter_worker_ejected == 1 and kvrouter_worker_up == 0", states["States A"])
	var found gjson.Result
	testkit.Eventually(t, 20*time.Second, "a worker is shown as drained while it is out", func() bool {
		answer, err := get("/api/v1/query?query=" + url.QueryEscape(drained))
		found = answer.Get("data.result.0.value.1")
		return err == nil && found.Exists()
	})
	if found.Str != "0" {
		t.Errorf("a drained worker that was ejected has the state %s", found.Str)
	}

	rules, err := get("/api/v1/rules")
	if err != nil {
		t.Fatal(err)
	}
	list := rules.Get("data.groups.0.rules").Array()
	if len(list) != len(deploy.ReadAlerts(t)) {
		t.Errorf("%d rules: %s", len(list), rules.Raw)
	}
	for _, rule := range list {
		if rule.Get("health").Str != "ok" || rule.Get("state").Str == "firing" {
			t.Errorf("%s is %s, %s: %s", rule.Get("name").Str, rule.Get("health").Str, rule.Get("state").Str, rule.Get("lastError").Str)
		}
	}
}
