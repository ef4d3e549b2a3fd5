package deploy

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"

	"kvrouter/internal/testkit"
	"kvrouter/test"
)

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
						fail("docs/metrics*.md does not tell of the %s %q of %s", m.Name, value, n.Name)
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
	document := test.MetricsPages(t)
	routers := StartShown(t)
	exprs, legends := Expressions(t)
	var problems map[string][]string
	testkit.Eventually(t, 20*time.Second, "the loads of the workers are published", func() bool {
		series := map[string][]string{}
		for _, r := range routers {
			addSeries(t, r, series)
		}
		problems = map[string][]string{}
		for where, expr := range exprs {
			known, found := checkExpression(expr, series, document)
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
		t.Errorf("only %d Expressions were found", len(exprs))
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
	b := ReadBoard(t)
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

	text, err := os.ReadFile(BoardFile)
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
	alerts := ReadAlerts(t)
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

// addSeries adds the names of the series of a router's page, each with its labels.
func addSeries(t *testing.T, r *test.Router, series map[string][]string) {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(r.MetricsPage()))
	if err != nil {
		t.Fatal(err)
	}
	for name, family := range families {
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
