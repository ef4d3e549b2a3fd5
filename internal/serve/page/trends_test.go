package page

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"kvrouter/internal/base/metrics"
)

// after are totals that rise evenly: per step, ten requests of 100 tokens, half of
// which are cached.
func after(step uint64) metrics.Totals {
	n := 10 * step
	h := func(at int) metrics.Histogram {
		counts := []uint64{0, 0, 0}
		for i := at; i < 3; i++ {
			counts[i] = n
		}
		return metrics.Histogram{Bounds: []float64{1, 2}, Counts: counts}
	}
	return metrics.Totals{Requests: n, ComparedTokens: 100 * n, CachedTokens: 50 * n, Compared: n, Exact: n, FirstToken: h(0), InterToken: h(1)}
}

func TestTrendsAreOfTheirOwnStep(t *testing.T) {
	now := time.Unix(1000, 0)
	trends := newTrends(now)
	if all := trends.all(); len(all.Series.Queued) != 0 || all.Step != 10 {
		t.Errorf("before the first step: %+v", all)
	}
	now = now.Add(stepLength)
	trends.step(metrics.Totals{}, 3, map[string]int{"0": 2}, now)
	for step := range uint64(steps + 4) {
		now = now.Add(stepLength)
		trends.step(after(step+1), 0, map[string]int{"0": 2, "1": 4}, now)
	}
	all := trends.all()
	last := len(all.Series.Queued) - 1
	if last != steps-1 || all.From != unix(now.Add(-(steps-1)*stepLength)) {
		t.Errorf("%d values from %v", last+1, all.From)
	}
	for what, got := range map[string]*float64{"1 requests/s": all.Series.RequestsPerSecond[last], "0.5 hit rate": all.Series.HitRate[last], "1 exact": all.Series.Exact[last], "0.5 ttft": all.Series.TTFT50[last], "1.5 itl": all.Series.ITL50[last], "4 in flight": all.Series.InFlight["1"][last]} {
		var want float64
		json.Unmarshal([]byte(what[:1]), &want)
		if what[1] == '.' {
			json.Unmarshal([]byte(what[:3]), &want)
		}
		if got == nil || math.Abs(*got-want) > 1e-6 {
			t.Errorf("%s: %v", what, got)
		}
	}
	if text, err := json.Marshal(all); err != nil {
		t.Error(err, text)
	}
}

func TestAStepWithoutRequestsHasNoLatency(t *testing.T) {
	now := time.Unix(1000, 0)
	trends := newTrends(now)
	trends.step(after(1), 0, nil, now.Add(stepLength))
	trends.step(after(1), 0, map[string]int{"9": 1}, now.Add(2*stepLength))
	s := trends.all().Series
	if s.TTFT50[1] != nil || s.HitRate[1] != nil || s.Exact[1] != nil || *s.RequestsPerSecond[1] != 0 || s.TTFT50[0] == nil {
		t.Errorf("%+v", s)
	}
	if load := s.InFlight["9"]; load[0] != nil || *load[1] != 1 {
		t.Errorf("a worker that came later: %v", load)
	}
}

func TestRatesAreOfTheLastMinute(t *testing.T) {
	now := time.Unix(1000, 0)
	trends := newTrends(now)
	for step := range uint64(30) {
		now = now.Add(stepLength)
		trends.step(after(step+1), 0, nil, now)
	}
	for range lately - 1 { // a quiet minute
		now = now.Add(stepLength)
		trends.step(after(30), 0, nil, now)
	}
	if r := trends.lately(after(30), now.Add(9*time.Second)); r.RequestsPerSecond != 0 || r.TTFT50 != nil {
		t.Errorf("nothing came for a minute: %+v", r)
	}
	if r := trends.lately(after(36), now.Add(10*time.Second)); r.RequestsPerSecond != 1 || *r.HitRate != 0.5 || *r.TTFT50 != 0.5 {
		t.Errorf("60 requests in a minute: %+v", r)
	}
}
