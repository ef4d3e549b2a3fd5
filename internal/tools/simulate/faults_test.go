package simulate

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// faulty is a run with a fault of worker 1, of four.
func faulty(t *testing.T, faults ...string) Simulation {
	t.Helper()
	s := simulation(mustChat(t, syntheticSettings(), 1), "round-robin", 0)
	s.Workers, s.Concurrency, s.Faults = 4, 60, faults
	return s
}

// sentDuring counts the flights that were sent to a worker in that time.
func sentDuring(run *simulator, worker int, from, to time.Duration) (n int) {
	for _, f := range run.ledger {
		if f.worker == worker && f.sent >= from && f.sent < to {
			n++
		}
	}
	return n
}

func TestAWorkerThatFailsIsTakenOutAndComesBack(t *testing.T) {
	for _, kind := range []string{faultError, faultRefuse} {
		run := finishedRun(t, faulty(t, "worker=1 at=10s for=20s kind="+kind))
		expectAllOver(t, run)
		report := run.report()
		f := report.Faults[0]
		if f.KnownS == nil || *f.KnownS > 3 || f.BackS == nil || *f.BackS > 21 || len(run.lost) > 0 {
			t.Errorf("%s: %+v, lost %v", kind, f, run.lost)
		}
		// Three failures take it out, then every trial is one.
		if f.First < 3 || f.First > 8 || f.Attempts != f.First || report.Retries != f.Attempts {
			t.Errorf("%s: %+v, %d retries", kind, f, report.Retries)
		}
		if n := sentDuring(run, 1, 10*time.Second, 30*time.Second); n > 0 {
			t.Errorf("%s: %d were answered by it meanwhile", kind, n)
		}
		if n := sentDuring(run, 1, time.Minute, time.Hour); n == 0 {
			t.Errorf("%s: it got nothing any more", kind)
		}
	}
}

func TestWithoutRetriesOrEjectionAFaultCostsMore(t *testing.T) {
	first := map[string]int{}
	for _, c := range []string{"as usual", "no retries", "no ejection"} {
		s := faulty(t, "worker=1 at=10s for=20s kind=error")
		switch c {
		case "no retries":
			s.Retry.Retries = 0
		case "no ejection":
			s.Routing.EjectAfter, s.Retry.RetryBudget = 0, 1
		}
		run := finishedRun(t, s)
		expectAllOver(t, run)
		f := run.report().Faults[0]
		first[c] = f.First
		if lost := run.lost[lostFailed]; (lost > 0) != (c == "no retries") || f.Lost != lost || lost > 0 && lost != f.First {
			t.Errorf("%s: lost %v, %+v", c, run.lost, f)
		}
		if (f.KnownS == nil) != (c == "no ejection") {
			t.Errorf("%s: %+v", c, f)
		}
	}
	if first["no ejection"] < 5*first["as usual"] {
		t.Errorf("first attempts at it: %v", first)
	}
}

func TestAShareOfErrorsIsThatShare(t *testing.T) {
	s := faulty(t, "worker=1 at=1s for=1h kind=error rate=0.3")
	s.Routing.EjectAfter = 0
	run := finishedRun(t, s)
	met, well := run.report().Faults[0].Attempts, sentDuring(run, 1, time.Second, time.Hour)
	if share := float64(met) / float64(met+well); share < 0.2 || share > 0.4 {
		t.Errorf("%d of %d", met, met+well)
	}
}

// TestAHungWorkersRequestsAreMoved holds the rules of the proxy: what waits for a
// first byte goes elsewhere after 3 s of silence at the earliest; an answer that has begun
// ends after --silence-timeout.
func TestAHungWorkersRequestsAreMoved(t *testing.T) {
	s := faulty(t, "worker=1 at=10s for=90s kind=hang")
	run := finishedRun(t, s)
	expectAllOver(t, run)
	report := run.report()
	f := report.Faults[0]
	if f.KnownS == nil || *f.KnownS < 2.9 || *f.KnownS > 6 || f.BackS == nil {
		t.Errorf("%+v", f)
	}
	if cut := run.lost[lostCut]; cut == 0 || len(run.lost) != 1 {
		t.Errorf("lost %v, want answers that had begun", run.lost)
	}
	if f.First == 0 || f.Lost > 0 || report.Retries < f.First {
		t.Errorf("%d retries, %+v", report.Retries, f)
	}
	for _, flight := range run.ledger {
		if wait := flight.first - flight.simulated.asked; wait > 10*time.Second {
			t.Errorf("one waited %v for its first token", wait)
		}
	}

	s.Routing.EjectAfter = 0
	never := finishedRun(t, s)
	expectAllOver(t, never)
	if len(never.lost) > 0 || never.report().Faults[0].KnownS != nil || never.report().TTFT.Mean < 2*report.TTFT.Mean {
		t.Errorf("without ejection all wait for its end: lost %v, TTFT %v", never.lost, never.report().TTFT)
	}
}

func TestRequestsThatHangAloneAreMovedOrAnsweredLater(t *testing.T) {
	run := finishedRun(t, faulty(t, "worker=1 at=10s for=20s kind=hang rate=0.5"))
	expectAllOver(t, run)
	if f := run.report().Faults[0]; f.First == 0 || sentDuring(run, 1, 10*time.Second, 30*time.Second) == 0 {
		t.Errorf("%+v", f)
	}
}

func TestASlowWorkerComputesSlowly(t *testing.T) {
	run := finishedRun(t, faulty(t, "worker=1 at=0s for=1h kind=slow rate=0.25"))
	expectAllOver(t, run)
	token := func(worker int) (mean float64) {
		n := 0.0
		for _, f := range run.ledger {
			if f.worker == worker && f.Output > 10 {
				mean, n = mean+milliseconds(f.end-f.first)/float64(f.Output-1), n+1
			}
		}
		return mean / n
	}
	if slow, usual := token(1), token(2); slow < 3*usual || len(run.lost) > 0 {
		t.Errorf("%v ms a token, another worker %v; lost %v", slow, usual, run.lost)
	}
}

// TestWhereAllWorkersFailRetriesStayWithinTheirBudget has nobody to retry with.
func TestWhereAllWorkersFailRetriesStayWithinTheirBudget(t *testing.T) {
	var faults []string
	for _, w := range []string{"0", "1", "2", "3"} {
		faults = append(faults, "worker="+w+" at=10s for=20s kind=error")
	}
	s := faulty(t, faults...)
	s.Retry.Retries, s.Retry.RetryBudget, s.Routing.EjectAfter = 3, 0.1, 0
	run := finishedRun(t, s)
	expectAllOver(t, run)
	report := run.report()
	met := 0
	for _, f := range report.Faults {
		met += f.First
	}
	if report.Denied == 0 || run.lost[lostFailed] != met || report.Retries > 30+met/5 {
		t.Errorf("%d retries, %d denied, %d met it, lost %v", report.Retries, report.Denied, met, run.lost)
	}
	var text bytes.Buffer
	report.writeTroubles(&text)
	if !strings.Contains(text.String(), "denied") || !strings.Contains(text.String(), "lost (") {
		t.Error(text.String())
	}
	if _, err := json.Marshal(report); err != nil {
		t.Error(err)
	}
}

func TestARunOfWhichNothingIsAnsweredIsAnError(t *testing.T) {
	s := faulty(t, "worker=0 at=0s for=24h kind=refuse")
	s.Workers = 1
	if _, err := s.Run(); err == nil || !strings.Contains(err.Error(), "requests failed") {
		t.Error(err)
	}
}

func TestSeveralRoutersLearnOfAFaultEachByItself(t *testing.T) {
	s := faulty(t, "worker=1 at=10s for=30s kind=refuse")
	one := *finishedRun(t, s).report().Faults[0].KnownS
	s.Routers = 3
	run := finishedRun(t, s)
	expectAllOver(t, run)
	if f := run.report().Faults[0]; f.KnownS == nil || *f.KnownS <= one || f.First < 9 {
		t.Errorf("%+v; one router knew after %v s", f, one)
	}
	if again := finishedRun(t, s).report(); again.TTFT != run.report().TTFT {
		t.Error("two runs differ")
	}
}

func TestAFaultThatCannotBeReadIsRefused(t *testing.T) {
	for _, text := range []string{
		"", "worker=1", "worker=x at=1s for=1s kind=hang", "worker=4 at=1s for=1s kind=hang", "worker=-1 at=1s for=1s kind=hang", "worker=1 at=1 for=1s kind=hang",
		"worker=1 at=1s for=0s kind=hang", "worker=1 at=1s for=1s", "worker=1 at=1s for=1s kind=fire", "worker=1 at=1s for=1s kind=hang rate=0", "worker=1 at=1s for=1s kind=hang rate=NaN",
		"worker=1 at=1s for=1s kind=hang colour=red",
	} {
		if f, err := parseFault(text, 4); err == nil || !strings.Contains(err.Error(), "--faults") {
			t.Errorf("%q is %+v, %v", text, f, err)
		}
	}
	if _, err := parseFaults([]string{"worker=1 at=1s for=9s kind=hang", "worker=1 at=5s for=9s kind=slow"}, 4); err == nil {
		t.Error("two faults at once are taken")
	}
	if _, err := parseFaults([]string{"worker=1 at=1s for=9s kind=hang", "worker=1 at=10s for=9s kind=slow rate=0.5"}, 4); err != nil {
		t.Error(err)
	}
}

func FuzzFault(f *testing.F) {
	f.Add("worker=2 at=60s for=30s kind=error rate=0.3")
	f.Add("worker=0 at=0s for=24h kind=hang")
	f.Fuzz(func(t *testing.T, text string) {
		if f, err := parseFault(text, 4); err == nil && (f.worker < 0 || f.worker > 3 || f.at < 0 || f.until <= f.at || !(f.rate > 0 && f.rate <= 1)) {
			t.Errorf("%q is %+v", text, f)
		}
	})
}
