package simulate

import (
	"bytes"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/health"
	"kvrouter/internal/policies"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
)

func TestALoadIsWhatItsWordsSay(t *testing.T) {
	base := simulation(nil, "", 64)
	for text, check := range map[string]func(gridLoad, Simulation) bool{
		"conv c32": func(l gridLoad, s Simulation) bool {
			return l.trace == "conv" && s.Concurrency == 32 && s.Workers == 8 && s.Seed == 5
		},
		"synt x2 w3 lag50ms": func(l gridLoad, s Simulation) bool {
			return l.trace == "synt" && s.Concurrency == 0 && s.Speedup == 2 && s.Workers == 3 && s.EventLag == 50*time.Millisecond
		},
		"g20 s1.2 p6000 u400 o300 w16 c200 th1s t1 n77 #7,8": func(l gridLoad, s Simulation) bool {
			return l.shape == SyntheticSettings{Conversations: 77, Turns: 1, ThinkTime: time.Second, Groups: 20, Skew: 1.2, PrefixTokens: 6000, UserTokens: 400, OutputTokens: 300} &&
				s.Workers == 16 && s.Concurrency == 200 && slices.Equal(l.seeds, []uint64{7, 8})
		},
		"g3 r0.44 burst5 shifts2": func(l gridLoad, s Simulation) bool {
			return l.shape.Rate == 0.44 && l.shape.Burst == 5 && l.shape.Shifts == 2 && s.Concurrency == 0 && l.shape.Conversations == 2000
		},
		"agents c256 pd2+6": func(l gridLoad, s Simulation) bool {
			return l.agents && l.wants.Workflows == 1280 && s.Workers == 8 && s.Prefills == 2
		},
		"agents g4 r1 routers3 untold kv99": func(l gridLoad, s Simulation) bool {
			return l.wants.Kinds == 4 && l.wants.Rate == 1 && s.Routers == 3 && s.UntoldCache && s.Engine.Blocks == 99
		},
	} {
		l, err := parseGridLoad(text, []string{"conv", "synt"}, nil)
		if err != nil {
			t.Error(err)
		} else if run := l.on(base, 5); !check(l, run) {
			t.Errorf("%s is %+v", text, l)
		}
	}
}

func TestALoadThatCannotBeReadIsRefused(t *testing.T) {
	for text, says := range map[string]string{
		"": "is empty", "c32": "first word", "conversation c32": "first word", "g c32": "first word", "g0 c32": "from 1",
		"conv": "either c (in flight) or x", "conv c1 x1": "either", "g3 s1": "or r (arrivals per second)", "g3 c5 r1": "either",
		"conv c32 g3": "is unknown", "conv c32 r3": "is unknown", "g3 x1": "is unknown", "g3 c5 c6": "given twice", "agents c5 t3": "is unknown",
		"g3 c5 s-1": "is unknown", "g3 c5 sNaN": "is unknown", "g3 c": "whole number", "g3 c5 w1001": "1 to 1000", "g3 c99999999999999999999": "whole number",
		"g3 c5 pd2": "pdP+D", "g3 c5 th": "a time", "g3 c5 th2": "a time", "g3 c5 th48h": "a time", "g3 c5 untold1": "no value", "g3 c5 #": "a seed", "g3 c5 #1,,2": "a seed",
		"g3 c5 n10 burst6": "at most half", "g3 c5 w4 pd1+3": "w or pd", "g3 c5 n1048576 t1000": "1048576 at most", "g3 c5 p1.5": "whole number", "g3 r1e400": "a number",
	} {
		if _, err := parseGridLoad(text, []string{"conv"}, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
}

func FuzzGridLoad(f *testing.F) {
	f.Add("g20 s1.2 p6000 u400 o300 w16 c200 th1s t1 n77 #7,8")
	f.Add("conv x2 pd2+6 lag50ms routers2 untold kv99")
	f.Add("agents r1 s0 burst1 shifts9")
	f.Fuzz(func(t *testing.T, text string) {
		if l, err := parseGridLoad(text, []string{"conv"}, nil); err == nil {
			run := l.on(Simulation{Workers: 8, Engine: testkit.Engine()}, 1)
			if run.Workers < 1 || run.Workers > 1000 || run.Prefills >= run.Workers || run.Concurrency < 0 || !(run.Speedup > 0) || l.n < 1 && l.trace == "" {
				t.Errorf("%q is %+v", text, run)
			}
		}
	})
}

func FuzzGrid(f *testing.F) {
	f.Add([]byte(smallGrid))
	f.Add([]byte("policies: [a]\nloads: {x: {y: 1}}"))
	f.Add([]byte("policies: {a: kv, b: kv --ties 3}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if g, err := parseGrid(text, "."); err == nil && (len(g.policies) < 2 || len(g.rows) < 1) {
			t.Errorf("%q is a grid of %d policies and %d rows", text, len(g.policies), len(g.rows))
		}
	})
}

func FuzzGridTable(f *testing.F) {
	f.Add([]byte("set,load,policy\na,b,c\n"))
	f.Add([]byte("set,load,policy,requests,reuse,ttft_mean_ms,ttft_p99_ms,itl_mean_ms,e2e_mean_ms,e2e_p99_ms,output_tokens_per_s,busiest_to_mean_worker,lost_share,seconds\nx,y,z,1,2,3,4,5,6,7,8,9,10,11\n"))
	f.Fuzz(func(_ *testing.T, text []byte) { _, _ = parseGridTable(bytes.NewReader(text)) })
}

const smallGrid = `
policies:
  work: work
  tuned: kv --prefill-load-scale 8 --overlap-score-credit 2
  by turns: round-robin
limits: {ttft: 1.5}
loads:
  busy:
    - "g3 c10 n40 w2 o20 #1"
    - "g9 c10 n40 w2 o20 #1,2"
  calm:
    - g3 r1 n30 w3 o20
`

func mustGrid(t *testing.T, text string) *grid {
	t.Helper()
	g, err := parseGrid([]byte(text), ".")
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestAGridThatCannotBeReadIsRefused(t *testing.T) {
	const policies = "policies: {a: kv, b: work}\n"
	for text, says := range map[string]string{
		"":                            "at least two policies",
		"policies: {a: kv}":           "at least two policies",
		policies:                      "one load",
		policies + "loads: {x: 3}":    "not a list",
		policies + "loads: {x: [g3]}": "either c",
		policies + "lods: {x: [g3]}":  "lods",
		"policies: {a: kv, b: nix}\nloads: {x: [g3 c1]}":             "nix",
		"policies: {a: kv, b: kv --nix 3}\nloads: {x: [g3 c1]}":      "nix",
		"policies: {a: kv, b: kv --retries 99}\nloads: {x: [g3 c1]}": "--retries",
		"policies: {a: kv, b: kv --ties 3}\nloads: {x: [g3 c1]}":     "ties",
		policies + "traces: {good: a}\nloads: {x: [g3 c1]}":          "one word",
		policies + "traces: {agents: a}\nloads: {x: [g3 c1]}":        "one word",
		policies + "loads: [": "",
	} {
		if _, err := parseGrid([]byte(text), "."); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
}

// runs returns what a grid reports of its rows, without how long they took.
func gridTableOf(t *testing.T, g *grid, known gridTable, jobs int) (gridTable, string) {
	t.Helper()
	var out bytes.Buffer
	base := simulation(nil, "", 64)
	if err := g.run(base, known, 0, jobs, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "grid.csv")
	if err := g.writeTable(file); err != nil {
		t.Fatal(err)
	}
	table, err := readGridTable(file)
	if err != nil {
		t.Fatal(err)
	}
	for key, figures := range table {
		figures.Seconds = 0
		table[key] = figures
	}
	return table, out.String()
}

func TestAGridTellsOfEachRunWhatItGivesAlone(t *testing.T) {
	table, out := gridTableOf(t, mustGrid(t, smallGrid), nil, 1)
	parallel, _ := gridTableOf(t, mustGrid(t, smallGrid), nil, 4)
	if !reflect.DeepEqual(table, parallel) || len(table) != 9 {
		t.Errorf("one at a time %v, four at a time %v", table, parallel)
	}
	tuned := testkit.Defaults[policies.Settings]()
	tuned.PrefillLoadScale, tuned.OverlapScoreCredit = 8, 2
	var want gridFigures
	for _, seed := range []uint64{1, 2} {
		shape := SyntheticSettings{Conversations: 40, Turns: 5, ThinkTime: 10 * time.Second, Groups: 9, Skew: 1, PrefixTokens: 2000, UserTokens: 200, OutputTokens: 20}
		requests, err := SyntheticChat(shape, seed, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		report := mustRun(t, Simulation{
			Requests: requests, Policy: "kv", Scoring: tuned, Index: testkit.Defaults[router.IndexSettings](), Routing: testkit.Defaults[router.Settings](), Retry: testkit.Defaults[health.RetrySettings](), Workers: 2, Engine: testkit.Engine(), Concurrency: 10, Speedup: 1, Seed: seed,
		})
		want.TTFT += report.TTFT.Mean / 2
		want.EndToEnd += report.EndToEnd.Mean / 2
		want.Reuse += report.Reuse / 2
	}
	got := table[gridKey{"g9 c10 n40 w2 o20 #1,2", "tuned"}]
	if math.Abs(got.TTFT-want.TTFT) > 1e-9 || math.Abs(got.EndToEnd-want.EndToEnd) > 1e-9 || math.Abs(got.Reuse-want.Reuse) > 1e-9 {
		t.Errorf("%+v, alone %+v", got, want)
	}
	for _, says := range []string{"busy: g9 c10 n40 w2 o20 #1,2 (", "work to the best of the others: TTFT", "by turns", "geometric means", "above 1.5", "above 1.01", "\nall"} {
		if !strings.Contains(out, says) {
			t.Errorf("nothing of %q in\n%s", says, out)
		}
	}
}

func TestKnownFiguresAreNotRunAgain(t *testing.T) {
	table, _ := gridTableOf(t, mustGrid(t, smallGrid), nil, 2)
	key, own := gridKey{"g3 r1 n30 w3 o20", "tuned"}, gridKey{"g3 r1 n30 w3 o20", "work"}
	changed := gridTable{}
	for k, figures := range table {
		figures.TTFT = 12345
		changed[k] = figures
	}
	again, _ := gridTableOf(t, mustGrid(t, smallGrid), changed, 2)
	if again[key].TTFT != 12345 || !reflect.DeepEqual(again[own], table[own]) {
		t.Errorf("tuned %+v, work %+v of %+v", again[key], again[own], table[own])
	}
}

// TestRatiosAreToTheBestOfTheOthersInEachColumn has figures of its own.
func TestRatiosAreToTheBestOfTheOthersInEachColumn(t *testing.T) {
	g := mustGrid(t, smallGrid)
	for i, row := range g.rows {
		at := float64(i)
		row.figures = [][]gridFigures{
			{{TTFT: 20 * (at + 1), EndToEnd: 90}, {TTFT: 20 * (at + 1), EndToEnd: 110}}, // work: the mean of two seeds
			{{TTFT: 20, EndToEnd: 200}},
			{{TTFT: 40, EndToEnd: 80}},
		}
	}
	p := gridReport{grid: g, out: io.Discard}
	if ttft, end := g.rows[1].toBest(g, 0, ttftOf), g.rows[1].toBest(g, 0, endToEndOf); ttft != (gridRatio{2, "tuned"}) || end != (gridRatio{1.25, "by turns"}) || p.beyond(ttft, end) != "TTFT, e2e" {
		t.Errorf("TTFT %v, end to end %v", ttft, end)
	}
	mean, worst, above := p.sumToBest(g.rows, ttftOf, 1.5)
	if math.Abs(mean-math.Cbrt(6)) > 1e-12 || worst != 3 || above != 2 {
		t.Errorf("1, 2, 3: mean %v, worst %v, %d above 1.5", mean, worst, above)
	}
	if to := p.sumTo(1, g.rows, endToEndOf); math.Abs(to-0.5) > 1e-12 {
		t.Errorf("100 to 200 is %v", to)
	}
	if sets := g.sets(); len(sets) != 3 || sets[0].name != "busy" || len(sets[2].rows) != 3 {
		t.Errorf("sets %v", sets)
	}
}

// TestStandardGridsCanBeRead holds the files of testdata, and that no load is in two.
func TestStandardGridsCanBeRead(t *testing.T) {
	seen := map[string]string{}
	for name, least := range map[string]int{"grid.yaml": 70, "holdout.yaml": 30, "tenants.yaml": 8} {
		g, err := readGrid("../../testdata/grids/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if len(g.rows) < least {
			t.Errorf("%s has %d loads", name, len(g.rows))
		}
		for _, row := range g.rows {
			if other, twice := seen[row.load.text]; twice {
				t.Errorf("%s is in %s and in %s", row.load.text, other, name)
			}
			seen[row.load.text] = name
		}
	}
}

func TestAGridSaysWhatIsWrongWithItsFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "grid.yaml")
	if err := os.WriteFile(file, []byte(smallGrid), 0o644); err != nil {
		t.Fatal(err)
	}
	base := simulation(nil, "", 64)
	for says, s := range map[string]Settings{
		"no policy of that name": {GridSettings: GridSettings{Grid: file, GridOf: "kv"}},
		"no name of a load":      {GridSettings: GridSettings{Grid: file, GridOf: "work", GridOnly: "conv"}},
		"--grid-known":           {GridSettings: GridSettings{Grid: file, GridOf: "work", GridKnown: file}},
		"no such file":           {GridSettings: GridSettings{Grid: file + "x", GridOf: "work"}},
	} {
		if err := s.Run(base, nil, nil, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
	base.Scoring.PrefillLoadScale = 3
	if err := (Settings{GridSettings: GridSettings{Grid: file, GridOf: "work"}}).Run(base, nil, nil, nil); err == nil || !strings.Contains(err.Error(), "in the grid file") {
		t.Error(err)
	}
	if err := (Settings{TenantCost: "prompt", GridSettings: GridSettings{Grid: file, GridOf: "work"}}).Run(simulation(nil, "", 64), nil, nil, nil); err == nil || !strings.Contains(err.Error(), "in the grid file") {
		t.Error(err)
	}
	for _, s := range []Settings{{Trace: "x"}, {Concurrency: 1}, {Tenants: []string{"a:1"}}, {GridSettings: GridSettings{Jobs: -1}}} {
		s.Grid = file
		if err := s.Validate(); err == nil {
			t.Errorf("%+v is taken", s)
		}
	}
}

// TestTenantsOfAGrid: a load names tenants of the file, and its runs report them.
func TestTenantsOfAGrid(t *testing.T) {
	const file = "tenants: {two: 'a:0.5,b:0.5'}\npolicies: {work: work, fair: work --router-queue-policy fair --tenant-cost request}\nloads: {chats: ['g5 c8 n20 w2 @two']}\n"
	g, err := parseGrid([]byte(file), "")
	if err != nil {
		t.Fatal(err)
	}
	if g.policies[1].Routing.Charging != router.ByRequest || len(g.rows[0].load.tenants) != 2 {
		t.Errorf("%+v, %+v", g.policies[1].Routing.QueueSettings, g.rows[0].load.tenants)
	}
	for text, want := range map[string]string{
		strings.Replace(file, "@two", "@three", 1):      "@three",
		strings.Replace(file, "two: 'a", "two2: 'a", 1): "without digits",
		strings.Replace(file, "b:0.5", "b:0.5:loud", 1): "loud",
	} {
		if _, err := parseGrid([]byte(text), ""); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	base := simulation(nil, "", 64)
	var out bytes.Buffer
	if err := g.run(base, nil, 0, 1, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	row := g.rows[0]
	for i, figures := range row.figures {
		a, b := figures[0].Tenants[0], figures[0].Tenants[1]
		if a.Tenant != "a" || b.Tenant != "b" || a.Requests == 0 || float64(a.Requests+b.Requests) != figures[0].Requests {
			t.Errorf("%s: %+v, %+v of %v requests", g.policies[i].Label, a, b, figures[0].Requests)
		}
	}
	for _, want := range []string{"policy  tenants     class  weight", "work      a*1  standard", "fair      b*1  standard"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("nothing of %q in\n%s", want, out.String())
		}
	}
}

// TestTenantCostsOfAGrid: each policy of a grid charges by its own --tenant-cost.
func TestTenantCostsOfAGrid(t *testing.T) {
	for text, want := range map[string]router.Charging{
		"work": router.ByWork, "work --tenant-cost work": router.ByWork, "work --tenant-cost prompt": router.ByPrompt, "work --tenant-cost request": router.ByRequest,
	} {
		if p, err := parseGridPolicy("x", text); err != nil || p.Routing.Charging != want {
			t.Errorf("%s: charges by %v, want %v; %v", text, p.Routing.Charging, want, err)
		}
	}
	if _, err := parseGridPolicy("x", "work --tenant-cost answers"); err == nil || !strings.Contains(err.Error(), "--tenant-cost") {
		t.Errorf("%v", err)
	}
}
