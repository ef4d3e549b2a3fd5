// Package simulatetest runs simulations for the tests of several packages; only tests
// import it.
package simulatetest

import (
	"testing"

	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/simulate"
)

// New returns a run with 8 workers of the default engine. A load from 64 on is a number
// of requests in flight, a smaller one a speedup.
func New(requests []simulate.TraceRequest, rule string, load float64) simulate.Simulation {
	s := simulate.Simulation{Requests: requests, Policy: rule, Scoring: testkit.Defaults[policies.Settings](),
		Index: testkit.Defaults[router.IndexSettings](), Routing: testkit.Defaults[router.Settings](),
		Retry: testkit.Defaults[health.RetrySettings](), Workers: 8, Engine: testkit.Engine(), Seed: 1}
	if load >= 64 {
		s.Concurrency = int(load)
	} else {
		s.Speedup = load
	}
	return s
}

// MustRun runs the simulation and returns its report.
func MustRun(t testing.TB, s simulate.Simulation) *simulate.Report {
	t.Helper()
	report, err := s.Run()
	if err != nil {
		t.Fatal(err)
	}
	return report
}
