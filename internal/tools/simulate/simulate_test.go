package simulate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
)

// simRow is one row of published figures: what Dynamo 1.6.1's own simulator
// gives with 8 workers and its default engine.
type simRow struct {
	trace                        string
	load                         float64 // from 64 on requests in flight, below that speedup
	reuse, makespan, ttft, e2eMS float64
}

var roundRobinRows = []simRow{
	{"conversation", 64, 0.082, 1117.5, 326.7, 5907.4},
	{"conversation", 256, 0.081, 735.9, 649.5, 15443.4},
	{"conversation", 512, 0.084, 628.5, 2604.8, 26133.9},
	{"conversation", 1, 0.082, 3542.9, 321.1, 2913.4},
	{"conversation", 2, 0.082, 1777.2, 346.8, 3860.8},
	{"synthetic", 64, 0.110, 243.3, 633.5, 3859.9},
	{"synthetic", 256, 0.101, 192.0, 1805.2, 11908.4},
	{"synthetic", 512, 0.092, 181.4, 4403.2, 22116.6},
	{"synthetic", 1, 0.112, 1022.8, 301.5, 1296.7},
	{"synthetic", 2, 0.111, 512.4, 345.6, 1618.1},
}

var kvRows = []simRow{
	{"conversation", 64, 0.159, 1042.9, 265.8, 5522.8},
	{"conversation", 256, 0.171, 701.7, 424.3, 14698.7},
	{"conversation", 512, 0.179, 588.3, 809.3, 24351.8},
	{"conversation", 1, 0.201, 3541.1, 277.9, 2762.8},
	{"conversation", 2, 0.179, 1774.6, 330.4, 3540.7},
	{"synthetic", 64, 0.320, 197.2, 284.4, 3123.9},
	{"synthetic", 256, 0.298, 155.4, 725.4, 9699.2},
	{"synthetic", 512, 0.289, 146.9, 2034.4, 18142.3},
	{"synthetic", 1, 0.497, 1022.6, 173.1, 1123.1},
	{"synthetic", 2, 0.445, 511.6, 194.6, 1284.6},
}

// kvTunedRows are with --prefill-load-scale 8 --overlap-score-credit 2.
var kvTunedRows = []simRow{
	{"conversation", 64, 0.237, 1015.1, 226.1, 5366},
	{"conversation", 256, 0.234, 677.9, 358.9, 14228},
	{"conversation", 512, 0.226, 575.7, 727.3, 23642},
	{"conversation", 1, 0.253, 3541.0, 247.0, 2712},
	{"conversation", 2, 0.248, 1774.2, 267.1, 3385},
	{"synthetic", 64, 0.490, 170.6, 227.3, 2702},
	{"synthetic", 256, 0.450, 132.6, 616.9, 8221},
	{"synthetic", 512, 0.396, 130.6, 1855.2, 16036},
	{"synthetic", 1, 0.541, 1022.6, 162.5, 1109},
	{"synthetic", 2, 0.533, 511.6, 171.8, 1236},
}

// loadTraces reads the traces of testdata.
func loadTraces(t testing.TB) map[string][]TraceRequest {
	t.Helper()
	traces := map[string][]TraceRequest{}
	for _, name := range []string{"conversation", "synthetic"} {
		requests, err := ReadTrace("../../../testdata/traces/" + name + "_trace.jsonl.gz")
		if err != nil {
			t.Fatal(err)
		}
		traces[name] = requests
	}
	return traces
}

// simulation is a run with 8 workers of the default engine; a load from 64 on is
// a number of requests in flight, a smaller one a speedup.
func simulation(requests []TraceRequest, rule string, load float64) Simulation {
	s := Simulation{Requests: requests, Policy: rule, Scoring: testkit.Defaults[policies.Settings](), Index: testkit.Defaults[router.IndexSettings](), Routing: testkit.Defaults[router.Settings](), Retry: testkit.Defaults[health.RetrySettings](), Workers: 8, Engine: testkit.Engine(), Seed: 1}
	if load >= 64 {
		s.Concurrency = int(load)
	} else {
		s.Speedup = load
	}
	return s
}

func mustRun(t testing.TB, s Simulation) *Report {
	t.Helper()
	report, err := s.Run()
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// finishedRun is a run of s to its end.
func finishedRun(t testing.TB, s Simulation) *simulator {
	t.Helper()
	run, err := s.start()
	if err != nil {
		t.Fatal(err)
	}
	if err := run.loop(); err != nil {
		t.Fatal(err)
	}
	return run
}

// TestSimulatorGivesDynamosRows is the calibration: the engine model with round
// robin, then policy kv with Dynamo's defaults and with its best knobs.
func TestSimulatorGivesDynamosRows(t *testing.T) {
	if testing.Short() {
		t.Skip("30 runs")
	}
	traces := loadTraces(t)
	compare := func(policy string, rows []simRow, scoring policies.Settings, reuse, share float64) {
		for _, row := range rows {
			t.Run(fmt.Sprintf("%s/%v/%s/%v", policy, scoring.PrefillLoadScale, row.trace, row.load), func(t *testing.T) {
				s := simulation(traces[row.trace], policy, row.load)
				s.Scoring = scoring
				got := mustRun(t, s)
				within := func(what string, got, want, bound float64) {
					if math.Abs(got-want) > bound {
						t.Errorf("%s %.4g, want %.4g ± %.4g", what, got, want, bound)
					}
				}
				within("reuse", got.Reuse, row.reuse, max(reuse, reuse*row.reuse/0.1))
				within("makespan", got.MakespanS, row.makespan, share*row.makespan)
				within("mean TTFT", got.TTFT.Mean, row.ttft, share*row.ttft)
				within("mean end to end", got.EndToEnd.Mean, row.e2eMS, share*row.e2eMS)
			})
		}
	}
	tuned := testkit.Defaults[policies.Settings]()
	tuned.PrefillLoadScale, tuned.OverlapScoreCredit = 8, 2
	compare("round-robin", roundRobinRows, testkit.Defaults[policies.Settings](), 0.005, 0.03)
	compare("kv", kvRows, testkit.Defaults[policies.Settings](), 0.005, 0.05)
	compare("kv", kvTunedRows, tuned, 0.005, 0.05)
}

// checkRunsAreEqual runs s twice and compares all that the reports tell.
func checkRunsAreEqual(t *testing.T, s Simulation) {
	t.Helper()
	var texts [2]bytes.Buffer
	for i := range texts {
		if err := writeReportsJSON(&texts[i], []*Report{mustRun(t, s)}); err != nil {
			t.Fatal(err)
		}
	}
	if texts[0].String() != texts[1].String() {
		t.Errorf("%s: two runs differ:\n%s%s", s.Policy, &texts[0], &texts[1])
	}
}

func TestTwoRunsOfOneSeedAreEqual(t *testing.T) {
	agents := agenticSettings(t)
	agents.Workflows = 10
	for _, requests := range [][]TraceRequest{loadTraces(t)["synthetic"][:400], mustAgents(t, agents, 1)} {
		for _, policy := range policies.Names {
			s := simulation(requests, policy, 64)
			s.EventLag = 20 * time.Millisecond
			checkRunsAreEqual(t, s)
		}
	}
}

func TestEveryBookingOfARunEnds(t *testing.T) {
	s := simulation(loadTraces(t)["synthetic"][:400], "kv", 64)
	run := finishedRun(t, s)
	run.checkNothingIsLeft(t)
}

// checkNothingIsLeft reports what a run that has ended left in the books, on a
// worker or wrong in the index.
func (s *simulator) checkNothingIsLeft(t *testing.T) {
	t.Helper()
	for i := range s.workers {
		engine := s.workers[i].engine
		if err := engine.Check(); err != nil || engine.Pool.Active() != 0 {
			t.Errorf("%s: worker %d: %d blocks in use at the end: %v", s.Policy, i, engine.Pool.Active(), err)
		}
		if l := s.routers[0].Load(kv.WorkerKey{Worker: uint64(i)}); l.InFlight != 0 || l.PrefillTokens != 0 || l.ContextTokens != 0 || l.AwaitedTokens != 0 || l.ActiveBlocks != 0 {
			t.Errorf("%s: worker %d: %d in flight, %d tokens to compute, %d decoding, %d awaited, %d blocks are left",
				s.Policy, i, l.InFlight, l.PrefillTokens, l.ContextTokens, l.AwaitedTokens, l.ActiveBlocks)
		}
	}
	if index, is := s.indexes[0].(*radix.Tree); is {
		if err := index.Check(); err != nil {
			t.Errorf("%s: %v", s.Policy, err)
		}
	}
}

func TestTheRouterPredictsWhatTheEngineFinds(t *testing.T) {
	// With a request at a time nothing comes between decision and admission.
	s := simulation(loadTraces(t)["synthetic"][:300], "kv", 64)
	s.Concurrency = 1
	if r := mustRun(t, s); r.Predicted != r.Reuse || r.Reuse == 0 {
		t.Errorf("predicted reuse %v, actual %v", r.Predicted, r.Reuse)
	}
}

// TestApproximateIndexFindsAsMuch holds the approximate index against the exact
// one: the share of prompt tokens found cached, and what the router expects.
func TestApproximateIndexFindsAsMuch(t *testing.T) {
	loads := []float64{64, 256, 1}
	if testing.Short() {
		loads = loads[:1]
	}
	for name, requests := range loadTraces(t) {
		if testing.Short() {
			requests = requests[:1000]
		}
		for _, policy := range []string{"kv", "work"} {
			for _, load := range loads {
				s := simulation(requests, policy, load)
				exact := mustRun(t, s)
				s.Index.NoKVEvents = true
				approximate := mustRun(t, s)
				t.Logf("%s, %s, load %g: reuse %.3f, exact %.3f; predicted %.3f", name, policy, load, approximate.Reuse, exact.Reuse, approximate.Predicted)
				if approximate.Reuse < exact.Reuse-0.03 || math.Abs(approximate.Predicted-approximate.Reuse) > 0.01 {
					t.Errorf("%s, %s, load %g: reuse %.3f, exact %.3f; predicted %.3f", name, policy, load, approximate.Reuse, exact.Reuse, approximate.Predicted)
				}
			}
		}
	}
}

func TestPredictionsBridgeALag(t *testing.T) {
	s := simulation(loadTraces(t)["synthetic"][:400], "kv", 64)
	s.EventLag = 5 * time.Second
	late := mustRun(t, s)
	s.Index.RouterPredictedTTLSecs = 5
	if r := mustRun(t, s); r.Reuse <= late.Reuse || math.Abs(r.Predicted-r.Reuse) >= math.Abs(late.Predicted-late.Reuse) {
		t.Errorf("with predictions %v reused, %v predicted; without %v, %v", r.Reuse, r.Predicted, late.Reuse, late.Predicted)
	}
}

func TestALaggingIndexPredictsLess(t *testing.T) {
	s := simulation(loadTraces(t)["synthetic"][:400], "kv", 64)
	s.EventLag = 5 * time.Second
	if r := mustRun(t, s); r.Predicted >= r.Reuse {
		t.Errorf("predicted reuse %v with events 5 s old, actual %v", r.Predicted, r.Reuse)
	}
}

func TestReportsAreReadable(t *testing.T) {
	s := simulation(loadTraces(t)["synthetic"][:100], "kv", 2)
	s.Source = "t.jsonl"
	reports := []*Report{mustRun(t, s)}
	var table, lines bytes.Buffer
	if err := writeReports(&table, reports); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"t.jsonl: 100 requests, 8 workers", "kv", "reuse", "busy"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, &table)
		}
	}
	if err := writeReportsJSON(&lines, reports); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(lines.Bytes(), &back); err != nil || back.TTFT != reports[0].TTFT || len(back.Balance) != 8 {
		t.Errorf("JSON %s: %v", &lines, err)
	}
}

func TestDistribution(t *testing.T) {
	values := make([]float64, 101)
	for i := range values {
		values[i] = float64(100 - i)
	}
	if d := distribution(values); d != (Distribution{Mean: 50, P50: 50, P90: 90, P99: 99}) {
		t.Errorf("0..100: %+v", d)
	}
	if d := distribution(nil); d != (Distribution{}) {
		t.Errorf("nothing: %+v", d)
	}
}

// BenchmarkSimulate is the conversation trace at 256 requests in flight.
func BenchmarkSimulate(b *testing.B) {
	requests := loadTraces(b)["conversation"]
	for _, workers := range []int{8, 64} {
		for _, policy := range []string{"round-robin", "kv"} {
			b.Run(fmt.Sprintf("%s/workers=%d", policy, workers), func(b *testing.B) {
				s := simulation(requests, policy, float64(32*workers))
				s.Workers = workers
				b.ReportAllocs()
				for b.Loop() {
					mustRun(b, s)
				}
			})
		}
	}
}

// TestSeveralRoutersShareTheRequests holds that each of them sees all caches, and
// only its own requests: predictions are right, and balance is a little worse.
func TestSeveralRoutersShareTheRequests(t *testing.T) {
	s := simulation(mustChat(t, syntheticSettings(), 1), "work", 0)
	s.Workers, s.Concurrency, s.Routers = 4, 60, 3
	run := finishedRun(t, s)
	for i, router := range run.routers {
		for w := range run.workers {
			if l := router.Load(kv.WorkerKey{Worker: uint64(w)}); l.InFlight != 0 {
				t.Errorf("router %d has %d in flight on worker %d at the end", i, l.InFlight, w)
			}
		}
	}
	one := s
	one.Routers = 1
	several, alone := run.report(), mustRun(t, one)
	if several.Requests != alone.Requests || several.Reuse < 0.8*alone.Reuse {
		t.Errorf("reuse %v of three routers, %v of one", several.Reuse, alone.Reuse)
	}
	if again := finishedRun(t, s).report(); again.TTFT != several.TTFT {
		t.Error("two runs with the same seed differ")
	}
}

func TestACacheOfUntoldSizeIsNotKnownToTheRouter(t *testing.T) {
	for _, untold := range []bool{false, true} {
		s := simulation(mustChat(t, syntheticSettings(), 1), "work", 0)
		s.Workers, s.Concurrency, s.UntoldCache = 2, 10, untold
		run := finishedRun(t, s)
		if got := run.routers[0].Targets()[0].TotalBlocks == 0; got != untold {
			t.Errorf("untold %v: the router knows %d blocks", untold, run.routers[0].Targets()[0].TotalBlocks)
		}
	}
}
