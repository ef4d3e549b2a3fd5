package simulate

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/alecthomas/kong"
	"github.com/goccy/go-yaml"

	"kvrouter/internal/health"
	"kvrouter/internal/policies"
	"kvrouter/internal/router"
)

// GridSettings are the flags of a grid: many loads times many policies in one run.
type GridSettings struct {
	Grid      string `group:"Grids" placeholder:"FILE" help:"YAML file of loads and policies; runs each load with each policy instead of --trace or --synthetic. --policy is ignored. Example: testdata/grids/grid.yaml."`
	GridOf    string `group:"Grids" default:"work" placeholder:"NAME" help:"Policy of the grid to compare with the best of the others."`
	GridOnly  string `group:"Grids" placeholder:"TEXT" help:"Run only loads whose name or set name contains this text."`
	GridKnown string `group:"Grids" placeholder:"FILE" help:"Earlier --csv file; its results of the other policies are reused instead of run again."`
	CSV       string `group:"Grids" name:"csv" placeholder:"FILE" help:"File for the figures of each load and policy."`
	Jobs      int    `group:"Grids" placeholder:"N" help:"Number of concurrent runs. Default: number of cores."`
}

// validateGrid checks the settings of a grid; its errors name the flag.
func (s Settings) validateGrid() error {
	switch {
	case s.Trace != "" || s.Synthetic != "" || s.Concurrency != 0 || s.Speedup != 0 || s.Plot != "" || s.JSON || len(s.Tenants) > 0:
		return errors.New("--grid FILE defines the requests: leave out --trace, --synthetic, --concurrency, --speedup, --tenants, --plot and " +
			"--json")
	case s.Jobs < 0:
		return fmt.Errorf("--jobs %d: give at least 1", s.Jobs)
	}
	return nil
}

// grid is the content of a file of --grid.
type grid struct {
	traces   map[string]func() ([]TraceRequest, error) // each is read once
	policies []gridPolicy
	rows     []*gridRow
	limits   gridLimits
}

// gridLimits are the ratios to the best of the other policies from which on a row is
// reported as beyond. They stop nothing.
type gridLimits struct {
	TTFT     float64 `yaml:"ttft"`
	EndToEnd float64 `yaml:"end-to-end"`
}

// gridPolicy is a policy with settings, under a name of its own.
type gridPolicy struct {
	Label          string               `kong:"-"`
	Name           string               `arg:""`
	Scoring        policies.Settings    `embed:""`
	Index          router.IndexSettings `embed:""`
	Routing        router.Settings      `embed:""`
	Retry          health.RetrySettings `embed:""`
	SyntheticHints bool                 `default:"true" negatable:""`
	TierEvents     bool                 `default:"true" negatable:""`
	Pulls          bool                 `default:"true" negatable:""`
	TenantCost     string               `default:"work" enum:"work,prompt,request"`
}

// gridRow is one load with what comes of it.
type gridRow struct {
	set     string
	load    gridLoad
	figures [][]gridFigures // by policy and seed
	left    atomic.Int32    // runs that have not ended
	done    chan struct{}   // closed when none is left
}

// Bounds of a file of --grid: bytes, and runs.
const (
	maxGridBytes = 1 << 20
	maxGridRuns  = 100_000
)

// gridFile is the file of --grid as YAML has it.
type gridFile struct {
	Traces   map[string]string `yaml:"traces"`   // name to file, from the grid's own folder
	Tenants  map[string]string `yaml:"tenants"`  // name to what --tenants takes
	Policies yaml.MapSlice     `yaml:"policies"` // name to a policy and its flags
	Loads    yaml.MapSlice     `yaml:"loads"`    // name of a set to a list of loads
	Limits   gridLimits        `yaml:"limits"`
}

// readGrid reads a file of --grid.
func readGrid(name string) (*grid, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("--grid: %w", err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxGridBytes+1))
	if err == nil && len(text) > maxGridBytes {
		err = fmt.Errorf("more than %d bytes", maxGridBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("--grid %s: %w", name, err)
	}
	g, err := parseGrid(text, filepath.Dir(name))
	if err != nil {
		return nil, fmt.Errorf("--grid %s: %w", name, err)
	}
	return g, nil
}

// parseGrid reads the text of a grid whose traces lie in folder, or from there.
func parseGrid(text []byte, folder string) (*grid, error) {
	var file gridFile
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.New(yaml.FormatError(err, false, false))
	}
	g := &grid{traces: map[string]func() ([]TraceRequest, error){}, limits: file.Limits}
	g.limits.TTFT, g.limits.EndToEnd = cmp.Or(g.limits.TTFT, 1.06), cmp.Or(g.limits.EndToEnd, 1.01)
	var names []string
	for name, path := range file.Traces {
		if name == "" || name == gridAgents || strings.HasPrefix(name, "g") || len(strings.Fields(name)) != 1 {
			return nil, fmt.Errorf("trace %q: give it a name of one word that is not %s and does not begin with g", name, gridAgents)
		}
		names = append(names, name)
		if !filepath.IsAbs(path) {
			path = filepath.Join(folder, path)
		}
		g.traces[name] = sync.OnceValues(func() ([]TraceRequest, error) { return ReadTrace(path) })
	}
	slices.Sort(names)
	tenants := map[string][]*tenantGroup{}
	for name, text := range file.Tenants {
		if name == "" || strings.ContainsAny(name, " 0123456789.") {
			return nil, fmt.Errorf("tenants %q: give it a name of one word without digits", name)
		}
		groups, err := parseTenants(strings.Split(text, ","))
		if err != nil {
			return nil, fmt.Errorf("tenants %s: %w", name, err)
		}
		tenants[name] = groups
	}
	for _, entry := range file.Policies {
		p, err := parseGridPolicy(fmt.Sprint(entry.Key), fmt.Sprint(entry.Value))
		if err != nil {
			return nil, err
		}
		g.policies = append(g.policies, p)
	}
	runs := 0
	for _, entry := range file.Loads {
		loads, isList := entry.Value.([]any)
		if !isList {
			return nil, fmt.Errorf("loads: %v is not a list of loads, such as [c32 chats]", entry.Key)
		}
		for _, text := range loads {
			load, err := parseGridLoad(fmt.Sprint(text), names, tenants)
			if err != nil {
				return nil, err
			}
			runs += max(1, len(load.seeds)) * len(g.policies)
			g.rows = append(g.rows, &gridRow{set: fmt.Sprint(entry.Key), load: load})
		}
	}
	if len(g.policies) < 2 || len(g.rows) == 0 || runs > maxGridRuns {
		return nil, fmt.Errorf("%d policies, %d loads, %d runs: give at least two policies and one load, and at most %d runs", len(g.policies),
			len(g.rows), runs, maxGridRuns)
	}
	return g, nil
}

// parseGridPolicy reads a policy with its flags, as on the command line.
func parseGridPolicy(label, text string) (gridPolicy, error) {
	p := gridPolicy{Label: label}
	parser, err := kong.New(&p, kong.NoDefaultHelp())
	if err == nil {
		_, err = parser.Parse(strings.Fields(text))
	}
	if err == nil {
		_, err = chooser(p.Name, p.Scoring)
	}
	if err == nil {
		err = cmp.Or(p.Index.Validate(p.Name), p.Routing.Validate(), p.Retry.Validate())
	}
	if err != nil {
		return gridPolicy{}, fmt.Errorf("policy %s (%s): %w", label, text, err)
	}
	p.Routing.Charging = chargings[p.TenantCost]
	return p, nil
}

// keep drops the loads with neither name nor set containing text.
func (g *grid) keep(text string) error {
	g.rows = slices.DeleteFunc(g.rows, func(r *gridRow) bool {
		return !strings.Contains(r.set, text) && !strings.Contains(r.load.text, text)
	})
	if len(g.rows) == 0 {
		return fmt.Errorf("--grid-only %s: no name of a load or set contains it", text)
	}
	return nil
}

// policy is the place of a policy of that name.
func (g *grid) policy(label string) int {
	return slices.IndexFunc(g.policies, func(p gridPolicy) bool { return p.Label == label })
}

// runGrid runs the loads times the policies of --grid, several at a time, and
// writes a table of each load as soon as it and all before it have ended, then the
// sums. base is what runs have in common.
func (s Settings) runGrid(base Simulation, out, progress io.Writer) error {
	defaults, err := parseGridPolicy("", "random")
	if err != nil {
		return err
	}
	given := gridPolicy{Name: "random", Scoring: base.Scoring, Index: base.Index, Routing: base.Routing, Retry: base.Retry,
		SyntheticHints: true, TierEvents: true, Pulls: true, TenantCost: cmp.Or(s.TenantCost, "work")}
	if !reflect.DeepEqual(defaults, given) {
		return errors.New("--grid: set the flags of policies, the index, the queue and failing workers in the grid file, after each policy")
	}
	g, err := readGrid(s.Grid)
	if err != nil {
		return err
	}
	if err := g.keep(s.GridOnly); err != nil {
		return err
	}
	of := g.policy(s.GridOf)
	if of < 0 {
		return fmt.Errorf("--grid-of %s: the grid has no policy of that name", s.GridOf)
	}
	var known gridTable
	if s.GridKnown != "" {
		if known, err = readGridTable(s.GridKnown); err != nil {
			return fmt.Errorf("--grid-known %s: %w", s.GridKnown, err)
		}
	}
	if err := g.run(base, known, of, s.Jobs, out, progress); err != nil {
		return err
	}
	if s.CSV != "" {
		if err := g.writeTable(s.CSV); err != nil {
			return fmt.Errorf("--csv: %w", err)
		}
	}
	return nil
}
