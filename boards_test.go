package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"

	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tokens"
)

// The files that people load into Grafana and Prometheus.
const (
	boardFile  = "deploy/grafana/kvrouter.json"
	alertsFile = "deploy/prometheus/alerts.yaml"
)

// boardPanel is what these tests read of a panel.
type boardPanel struct {
	ID          int
	Type, Title string
	Description string
	GridPos     struct{ X, Y, W, H int }
	Datasource  struct{ UID string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct{ Expr, LegendFormat, RefID string }
}

// board is a Grafana dashboard.
type board struct {
	Panels     []boardPanel
	Templating struct {
		List []struct{ Name, Definition string }
	}
}

func readBoard(t *testing.T) (b board) {
	t.Helper()
	text, err := os.ReadFile(boardFile)
	if err == nil {
		err = json.Unmarshal(text, &b)
	}
	if err != nil || len(b.Panels) == 0 {
		t.Fatalf("%s: %d panels, %v", boardFile, len(b.Panels), err)
	}
	return b
}

// alert is a rule of Prometheus.
type alert struct {
	Alert, Expr, For string
	Labels           map[string]string
	Annotations      map[string]string
}

func readAlerts(t *testing.T) (alerts []alert) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []alert } }
	text, err := os.ReadFile(alertsFile)
	if err == nil {
		err = yaml.Unmarshal(text, &file)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range file.Groups {
		alerts = append(alerts, group.Rules...)
	}
	return alerts
}

// substitute puts values in the place of Grafana's variables.
func substitute(expr, rates string) string {
	return strings.NewReplacer("$__rate_interval", rates, "$router", ".*", "$model", ".*", "$worker|none", ".*", "$worker", ".*").Replace(expr)
}

// expressions returns every expression of the board and of the alerts, by where it
// stands. Legends are those of the board.
func expressions(t *testing.T) (exprs, legends map[string]string) {
	t.Helper()
	exprs, legends = map[string]string{}, map[string]string{}
	for _, panel := range readBoard(t).Panels {
		for _, target := range panel.Targets {
			where := panel.Title + " " + target.RefID
			exprs[where], legends[where] = substitute(target.Expr, "1m"), target.LegendFormat
		}
	}
	for _, v := range readBoard(t).Templating.List {
		if inner, ok := strings.CutPrefix(v.Definition, "label_values("); ok {
			expr, _, _ := strings.Cut(strings.TrimSuffix(inner, ")"), ", ")
			if at := strings.LastIndex(inner, ", "); at >= 0 {
				expr, legends["variable "+v.Name] = inner[:at], "{{"+strings.TrimSuffix(inner[at+2:], ")")+"}}"
			}
			exprs["variable "+v.Name] = substitute(expr, "1m")
		}
	}
	for _, a := range readAlerts(t) {
		exprs[a.Alert] = a.Expr
	}
	return exprs, legends
}

// addSeries adds the names of the series of a router's page, each with its labels.
func addSeries(t *testing.T, s *mockSite, series map[string][]string) {
	t.Helper()
	for name, family := range familiesOf(t, s) {
		names := []string{}
		for _, label := range family.Metric[0].Label {
			names = append(names, label.GetName())
		}
		series[name] = names
		if family.Metric[0].Histogram != nil {
			delete(series, name)
			series[name+"_bucket"], series[name+"_count"], series[name+"_sum"] = append([]string{"le"}, names...), names, names
		}
	}
}

// startShownSites starts the routers whose metrics the boards are held against:
// one over prefill and decode workers with other routers, one with keys. Requests
// have been served by the former.
func startShownSites(t *testing.T) []*mockSite {
	t.Helper()
	pairs := startMockPairs(t, kv.KindNIXL, 1, 2, "--replica-sync", "--replica-sync-port=0")
	for i := range 4 {
		if a, err := pairs.chat(t.Context(), longPrompt(i%2), i > 0, 8); err != nil || !a.finished {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	keyed := startMockSite(t, 2, keysFile(t, "- {name: a, key: key-a, limits: {requests-per-second: 1}}"))
	keyed.as(t, "key-a", map[string]any{"messages": []any{map[string]any{"role": "user", "content": []any{map[string]any{"type": "image_url", "image_url": map[string]string{"url": "data:,"}}}}}}) // cannot be rendered here
	// What no mock worker does on its own: fail until it is ejected, refuse, count
	// tokens wrong, send them one by one for sure.
	fail(t, keyed, 1)
	keyed.app.telemetry.Finished(&proxy.Exchange{Worker: kv.NoWorker, Route: testkit.ChatPath, Served: "m", Refused: router.ErrBusy}, time.Now())
	keyed.app.telemetry.Finished(&proxy.Exchange{Worker: kv.NoWorker, Route: testkit.ChatPath, Served: "m", Refused: router.ErrQueueFull}, time.Now())
	keyed.app.telemetry.Retried(1)
	keyed.app.telemetry.InterToken("0", time.Millisecond, 1)
	keyed.app.telemetry.Finished(&proxy.Exchange{
		Worker: "0", Route: testkit.ChatPath, Status: http.StatusOK, Source: tokens.SourceLocal,
		Decision: router.Decision{Tokens: 1}, Usage: proxy.Usage{Known: true, PromptTokens: 2},
	}, time.Now())
	return []*mockSite{pairs, keyed}
}

// fail has a worker fail until it is ejected.
func fail(t *testing.T, s *mockSite, worker uint64) {
	t.Helper()
	for range 3 {
		d, err := s.app.router.Route(t.Context(), router.Request{Pinned: &kv.WorkerKey{Worker: worker}})
		if err != nil {
			t.Fatal(err)
		}
		d.Booking.Fail()
	}
}

// targetLabels are given by Prometheus to all that it scrapes; target metrics, too.
var (
	targetLabels  = []string{"instance", "job"}
	targetMetrics = []string{"up"}
)

// checkExpression parses an expression and finds its metrics and labels among
// series. It returns all labels that its selectors know.
func checkExpression(expr string, series map[string][]string, document string) (known []string, problems []string) {
	fail := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	tree, err := parser.ParseExpr(expr)
	if err != nil {
		return nil, []string{err.Error()}
	}
	known = slices.Clone(targetLabels)
	var used []string
	selectors := 0
	parser.Inspect(tree, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.VectorSelector:
			selectors++
			has, there := series[n.Name]
			if !there && !slices.Contains(targetMetrics, n.Name) {
				fail("no router shows %s", n.Name)
			}
			known = append(known, has...)
			for _, m := range n.LabelMatchers {
				if m.Name == model.MetricNameLabel {
					continue
				}
				if !slices.Contains(append(slices.Clone(has), targetLabels...), m.Name) {
					fail("%s has no label %s", n.Name, m.Name)
				}
				for value := range strings.SplitSeq(m.Value, "|") {
					if m.Name != "job" && m.Name != "status" && value != ".*" && !regexp.MustCompile(`\b`+regexp.QuoteMeta(value)+`\b`).MatchString(document) {
						fail("docs/metrics.md does not tell of the %s %q of %s", m.Name, value, n.Name)
					}
				}
			}
		case *parser.AggregateExpr:
			used = append(used, n.Grouping...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				used = append(append(used, n.VectorMatching.MatchingLabels...), n.VectorMatching.Include...)
			}
		}
		return nil
	})
	for _, name := range used {
		if !slices.Contains(known, name) {
			fail("no metric here has the label %s", name)
		}
	}
	if selectors == 0 {
		fail("no metric is asked for")
	}
	return known, problems
}

func TestBoardsAskForWhatRoutersShow(t *testing.T) {
	document, err := os.ReadFile("docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	sites := startShownSites(t)
	exprs, legends := expressions(t)
	var problems map[string][]string
	testkit.Eventually(t, 20*time.Second, "the loads of the workers are published", func() bool {
		series := map[string][]string{}
		for _, s := range sites {
			addSeries(t, s, series)
		}
		problems = map[string][]string{}
		for where, expr := range exprs {
			known, found := checkExpression(expr, series, string(document))
			for _, label := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(legends[where], -1) {
				if !slices.Contains(known, label[1]) {
					found = append(found, "the legend has "+label[0])
				}
			}
			if len(found) > 0 {
				problems[where] = found
			}
		}
		return series["kvrouter_worker_running_requests"] != nil && series["kvrouter_kv_event_lag_seconds_bucket"] != nil
	})
	if len(exprs) < 80 {
		t.Errorf("only %d expressions were found", len(exprs))
	}
	for _, where := range slices.Sorted(maps.Keys(problems)) {
		t.Errorf("%s: %s\n%s", where, strings.Join(problems[where], "; "), exprs[where])
	}
}

func TestWrongExpressionsAreFound(t *testing.T) {
	series := map[string][]string{"a_total": {"kind"}, "b": {"worker_id"}}
	for expr, problem := range map[string]string{
		`sum by (kind) (rate(a_total{kind="ok"}[5m]))`:     "",
		`a_total * on (instance) group_left (worker_id) b`: "",
		`sum(rate(a_total[5m])`:                            "unclosed left parenthesis",
		`rate(c_total[5m])`:                                "no router shows c_total",
		`b{kind="ok"}`:                                     "b has no label kind",
		`sum by (reason) (b)`:                              "no metric here has the label reason",
		`b * on (rank) b`:                                  "no metric here has the label rank",
		`a_total{kind=~"ok|odd"}`:                          `does not tell of the kind "odd"`,
		`1 + 1`:                                            "no metric is asked for",
	} {
		_, problems := checkExpression(expr, series, "kinds: ok; a_total, b")
		if got := strings.Join(problems, "; "); problem == "" && got != "" || !strings.Contains(got, problem) {
			t.Errorf("%s: %q, want %q", expr, got, problem)
		}
	}
}

func TestBoardIsLaidOut(t *testing.T) {
	b := readBoard(t)
	var rows []string
	seen, taken := map[int]string{}, map[[2]int]string{}
	top := 0 // of the row that the panel lies under
	for _, p := range b.Panels {
		if other, twice := seen[p.ID]; twice {
			t.Errorf("%s and %s have the same id", p.Title, other)
		}
		seen[p.ID] = p.Title
		g := p.GridPos
		if g.X < 0 || g.Y < 0 || g.W < 1 || g.H < 1 || g.X+g.W > 24 {
			t.Errorf("%s lies outside the 24 columns: %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, lies := taken[[2]int{x, y}]; lies {
					t.Fatalf("%s lies over %s", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			rows, top = append(rows, p.Title), g.Y
			continue
		}
		if g.Y <= top {
			t.Errorf("%s lies above its row", p.Title)
		}
		if p.Title == "" || p.Description == "" || p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
			t.Errorf("panel %d, %q, wants title, description, data source and query", p.ID, p.Title)
		}
		if p.Type != "table" && p.FieldConfig.Defaults.Unit == "" {
			t.Errorf("%s has no unit", p.Title)
		}
	}
	for _, row := range []string{"Fleet", "Requests", "Caches", "Decisions", "Disaggregation", "Router"} {
		if !slices.Contains(rows, row) {
			t.Errorf("there is no row %s", row)
		}
	}
	bottom := 0
	for at := range taken {
		bottom = max(bottom, at[1]+1)
	}
	if holes := 24*bottom - len(taken); holes != 0 {
		t.Errorf("%d cells of the grid are empty", holes)
	}

	text, err := os.ReadFile(boardFile)
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for _, match := range regexp.MustCompile(`\$\{?(\w+)`).FindAllStringSubmatch(string(text), -1) {
		used[match[1]] = true
	}
	names := []string{"__rate_interval", "__all"}
	for _, v := range b.Templating.List {
		names = append(names, v.Name)
		if !used[v.Name] {
			t.Errorf("nothing uses the variable %s", v.Name)
		}
	}
	for name := range used {
		if !slices.Contains(names, name) {
			t.Errorf("there is no variable %s", name)
		}
	}
}

func TestEveryAlertIsExplainedAndTested(t *testing.T) {
	runbook, err := os.ReadFile("docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile("deploy/prometheus/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var sections []string
	for _, match := range regexp.MustCompile(`(?m)^## (KVRouter\w+)$`).FindAllStringSubmatch(string(runbook), -1) {
		sections = append(sections, match[1])
	}
	alerts := readAlerts(t)
	for _, a := range alerts {
		if a.Annotations["summary"] == "" || a.Annotations["description"] == "" || a.Annotations["runbook_url"] != "docs/runbook.md#"+strings.ToLower(a.Alert) {
			t.Errorf("%s wants a summary, a description and the address of its section: %v", a.Alert, a.Annotations)
		}
		if severity := a.Labels["severity"]; severity != "critical" && severity != "warning" {
			t.Errorf("%s has the severity %q", a.Alert, severity)
		}
		if !slices.Contains(sections, a.Alert) {
			t.Errorf("docs/runbook.md has no section %s", a.Alert)
		}
		quiet := strings.Contains(string(tests), "alertname: "+a.Alert+"}")
		fires := regexp.MustCompile("alertname: " + a.Alert + "\n +exp_alerts:").Match(tests)
		if !quiet || !fires {
			t.Errorf("%s: a test that it fires %t, that it does not %t", a.Alert, fires, quiet)
		}
	}
	if len(sections) != len(alerts) {
		t.Errorf("docs/runbook.md has %d sections for %d alerts", len(sections), len(alerts))
	}
}
