package page

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/base/metrics"
)

const (
	// stepLength is the time between two values of the trends.
	stepLength = 10 * time.Second
	// steps is how many are kept: an hour.
	steps = 360
	// maxTrendWorkers bounds the workers whose load is kept; those with the lowest ids
	// are, or with the shortest names.
	maxTrendWorkers = 64
	// lately is the number of steps that the rates of the last minute go back.
	lately = 6
)

// trends keeps the values of the last hour.
type trends struct {
	mu       sync.Mutex // guards the rest
	began    time.Time
	last     time.Time                  // of the last step
	n        int                        // steps since the start; the place of the next is that modulo steps
	series   [8][steps]float32          // in the order of Series.lists
	inFlight map[string]*[steps]float32 // by name of the worker
	before   [lately]cut                // totals at the last steps, the oldest first; unset: none
}

// cut is the totals at one time.
type cut struct {
	at     time.Time
	totals metrics.Totals
}

// lists are those of the trends' series, in their order.
func (s *Series) lists() []*[]*float64 {
	return []*[]*float64{&s.RequestsPerSecond, &s.TTFT50, &s.TTFT99, &s.ITL50, &s.ITL99, &s.HitRate, &s.Exact, &s.Queued}
}

func newTrends(now time.Time) *trends {
	t := &trends{began: now, last: now, inFlight: map[string]*[steps]float32{}}
	for i := range t.before {
		t.before[i].at = now
	}
	return t
}

// step adds the values of the time since the last step.
func (t *trends) step(totals metrics.Totals, queued int, inFlight map[string]int, now time.Time) {
	totals.Workers = nil
	t.mu.Lock()
	defer t.mu.Unlock()
	rates, waiting := t.before[lately-1].rates(totals, now), float64(queued)
	at := t.n % steps
	for i, value := range []*float64{&rates.RequestsPerSecond, rates.TTFT50, rates.TTFT99, rates.ITL50, rates.ITL99, rates.HitRate,
		rates.Exact, &waiting} {
		t.series[i][at] = small(value)
	}
	for worker, series := range t.inFlight {
		series[at] = small(nil)
		if _, there := inFlight[worker]; !there && !slices.ContainsFunc(series[:], known) {
			delete(t.inFlight, worker) // gone for an hour
		}
	}
	called := slices.SortedFunc(maps.Keys(inFlight), func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	for _, worker := range called {
		series := t.inFlight[worker]
		if series == nil {
			if len(t.inFlight) >= maxTrendWorkers {
				continue
			}
			series = new([steps]float32)
			for i := range series {
				series[i] = small(nil)
			}
			t.inFlight[worker] = series
		}
		series[at] = float32(inFlight[worker])
	}
	t.n, t.last = t.n+1, now
	copy(t.before[:], t.before[1:])
	t.before[lately-1] = cut{now, totals}
}

// lately returns the rates of the last minute, up to now.
func (t *trends) lately(totals metrics.Totals, now time.Time) Rates {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.before[0].rates(totals, now)
}

// rates returns the rates since the cut.
func (c *cut) rates(totals metrics.Totals, now time.Time) Rates {
	less := func(after, before uint64) float64 { return float64(after - min(after, before)) }
	share := func(part, whole float64) *float64 {
		if whole <= 0 {
			return nil
		}
		s := min(part/whole, 1)
		return &s
	}
	first, inter := totals.FirstToken.Since(c.totals.FirstToken), totals.InterToken.Since(c.totals.InterToken)
	rates := Rates{
		HitRate: share(less(totals.CachedTokens, c.totals.CachedTokens), less(totals.ComparedTokens, c.totals.ComparedTokens)),
		TTFT50:  first.Quantile(0.5), TTFT99: first.Quantile(0.99), ITL50: inter.Quantile(0.5), ITL99: inter.Quantile(0.99),
		Exact: share(less(totals.Exact, c.totals.Exact), less(totals.Compared, c.totals.Compared)),
	}
	if span := now.Sub(c.at).Seconds(); span > 0 {
		rates.RequestsPerSecond = less(totals.Requests, c.totals.Requests) / span
	}
	return rates
}

// small is a value as it is kept; NaN stands for none.
func small(value *float64) float32 {
	if value == nil {
		return float32(math.NaN())
	}
	return float32(*value)
}

func known(value float32) bool { return value == value }

// all returns the trends, the oldest value first.
func (t *trends) all() Trends {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := min(t.n, steps)
	values := func(series *[steps]float32) []*float64 {
		list := make([]*float64, n)
		for i := range list {
			if value := series[(t.n-n+i)%steps]; known(value) {
				rounded := math.Round(float64(value)*1e6) / 1e6
				list[i] = &rounded
			}
		}
		return list
	}
	all := Trends{Step: int(stepLength.Seconds()), From: unix(t.last.Add(-time.Duration(max(0, n-1)) * stepLength)),
		Series: Series{InFlight: map[string][]*float64{}}}
	for i, list := range all.Series.lists() {
		*list = values(&t.series[i])
	}
	for worker, series := range t.inFlight {
		all.Series.InFlight[worker] = values(series)
	}
	return all
}
