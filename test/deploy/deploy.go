// Package deploy compares the files of deploy/ with the built router: its flags, its
// metrics, the documents.
package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"kvrouter/test"
)

// The files that people load into Grafana and Prometheus.
const (
	BoardFile  = "deploy/grafana/kvrouter.json"
	AlertsFile = "deploy/prometheus/alerts.yaml"
)

// Panel is what these tests read of a panel.
type Panel struct {
	ID          int
	Type, Title string
	Description string
	GridPos     struct{ X, Y, W, H int }
	Datasource  struct{ UID string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct{ Expr, LegendFormat, RefID string }
}

// Board is a Grafana dashboard.
type Board struct {
	Panels     []Panel
	Templating struct {
		List []struct{ Name, Definition string }
	}
}

// ReadBoard reads BoardFile.
func ReadBoard(t *testing.T) (b Board) {
	t.Helper()
	text, err := os.ReadFile(BoardFile)
	if err == nil {
		err = json.Unmarshal(text, &b)
	}
	if err != nil || len(b.Panels) == 0 {
		t.Fatalf("%s: %d panels, %v", BoardFile, len(b.Panels), err)
	}
	return b
}

// Alert is a rule of Prometheus.
type Alert struct {
	Alert, Expr, For string
	Labels           map[string]string
	Annotations      map[string]string
}

// ReadAlerts reads AlertsFile.
func ReadAlerts(t *testing.T) (alerts []Alert) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []Alert } }
	text, err := os.ReadFile(AlertsFile)
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

// Expressions returns every expression of the board and of the alerts, by where it
// stands. Legends are those of the board.
func Expressions(t *testing.T) (exprs, legends map[string]string) {
	t.Helper()
	exprs, legends = map[string]string{}, map[string]string{}
	for _, panel := range ReadBoard(t).Panels {
		for _, target := range panel.Targets {
			where := panel.Title + " " + target.RefID
			exprs[where], legends[where] = substitute(target.Expr, "1m"), target.LegendFormat
		}
	}
	for _, v := range ReadBoard(t).Templating.List {
		if inner, ok := strings.CutPrefix(v.Definition, "label_values("); ok {
			expr, _, _ := strings.Cut(strings.TrimSuffix(inner, ")"), ", ")
			if at := strings.LastIndex(inner, ", "); at >= 0 {
				expr, legends["variable "+v.Name] = inner[:at], "{{"+strings.TrimSuffix(inner[at+2:], ")")+"}}"
			}
			exprs["variable "+v.Name] = substitute(expr, "1m")
		}
	}
	for _, a := range ReadAlerts(t) {
		exprs[a.Alert] = a.Expr
	}
	return exprs, legends
}

// Read returns the text of a file of deploy/.
func Read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("deploy", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Flag is what docs/flags.md, which is made from the flags, says of one of `serve`.
type Flag struct {
	Default string // on or off of a switch; empty: none
	Env     string
}

// Flags returns the flags that a serving router reads, by their names.
func Flags(t *testing.T) map[string]Flag {
	t.Helper()
	page, err := os.ReadFile("docs/flags.md")
	if err != nil {
		t.Fatal(err)
	}
	flags := map[string]Flag{}
	_, serve, _ := strings.Cut(string(page), "\n## serve\n")
	serve, _, _ = strings.Cut(serve, "\n## ")
	row := regexp.MustCompile("(?m)^(?:\\||-) `--(?:\\[no-\\])?([a-z0-9.-]+)[^`]*`(?: \\||, default) ([^|]*?)(?: \\| .+ \\||: \\[.+)$")
	for _, match := range row.FindAllStringSubmatch(serve, -1) {
		env := "KVROUTER_" + strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(match[1]))
		flags[match[1]] = Flag{Default: strings.Trim(strings.TrimPrefix(match[2], "—"), "`"), Env: env}
	}
	if len(flags) < 100 {
		t.Fatalf("only %d flags were found", len(flags))
	}
	return flags
}

// Settings are what a router starts with: arguments, a file of settings and the flags'
// defaults, in this order.
type Settings struct {
	t     *testing.T
	flags map[string]Flag
	args  map[string][]string
	file  map[string]any
}

// Accept has the built router read arguments, as it is started with, and the file that
// --config names, and returns what they say. The test fails if the router refuses them.
func Accept(t *testing.T, args ...string) *Settings {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	// It also looks for the workers, which are not there, but only once it has read all.
	if out, _ := test.Output(t, append([]string{"doctor", "--wait=100ms"}, args...)...); !strings.Contains(out, "set-up: ") {
		t.Fatalf("the router does not take %q: %s", args, out)
	}
	s := &Settings{t: t, flags: Flags(t), args: map[string][]string{}}
	for i := 0; i < len(args); i++ {
		name, value, whole := strings.Cut(strings.TrimPrefix(args[i], "--"), "=")
		flag, known := s.flags[name]
		switch {
		case !strings.HasPrefix(args[i], "--") || !known:
			t.Fatalf("%q is no flag", args[i])
		case whole:
		case flag.Default == "on" || flag.Default == "off":
			value = "true"
		default:
			i++
			value = args[i]
		}
		s.args[name] = append(s.args[name], value)
	}
	if path := s.Value("config"); path != "" {
		text, err := os.ReadFile(path)
		if err == nil {
			err = yaml.Unmarshal(text, &s.file)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// Values returns a setting's values as text; none: it is not set and has no default.
func (s *Settings) Values(name string) (values []string) {
	s.t.Helper()
	flag, known := s.flags[name]
	if !known {
		s.t.Fatalf("there is no flag --%s", name)
	}
	if given := s.args[name]; given != nil {
		return given
	}
	switch value := s.file[name].(type) {
	case nil:
	case []any:
		for _, one := range value {
			values = append(values, fmt.Sprint(one))
		}
		return values
	default:
		return []string{fmt.Sprint(value)}
	}
	if flag.Default != "" {
		values = []string{flag.Default}
	}
	return values
}

// Value returns a setting's only value; empty: it has none.
func (s *Settings) Value(name string) string {
	s.t.Helper()
	return strings.Join(s.Values(name), ",")
}

// Int is Value as a number; 0: it has none.
func (s *Settings) Int(name string) int {
	s.t.Helper()
	n, _ := strconv.Atoi(s.Value(name))
	return n
}

// Drain returns how long the router may take to end after SIGTERM.
func (s *Settings) Drain() (limit time.Duration) {
	s.t.Helper()
	for _, name := range []string{"drain-delay", "drain-timeout"} {
		d, err := time.ParseDuration(s.Value(name))
		if err != nil {
			s.t.Fatalf("--%s: %v", name, err)
		}
		limit += d
	}
	return limit
}
