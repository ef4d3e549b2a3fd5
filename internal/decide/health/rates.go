package health

import (
	"math"
	"time"

	"kvrouter/internal/base/kv"
)

// second counts the requests that ended within one second.
type second struct {
	at           int64 // Unix time
	well, failed int
}

// count returns the counts of this second.
func (w *worker) count(now time.Time) *second {
	at := now.Unix()
	s := &w.window[uint64(at)%windowSeconds]
	if s.at != at {
		*s = second{at: at}
	}
	return s
}

// counts sums up the window.
func (w *worker) counts(now time.Time) (well, failed int) { return w.countsSince(time.Time{}, now) }

// countsSince sums up the seconds of the window that began after a time.
func (w *worker) countsSince(from, now time.Time) (well, failed int) {
	for _, s := range w.window {
		if age := now.Unix() - s.at; age >= 0 && age < windowSeconds && s.at > from.Unix() {
			well, failed = well+s.well, failed+s.failed
		}
	}
	return well, failed
}

// worse compares a worker's share of good answers since it last came back with the others' by
// the test of two proportions. The others' share is smoothed, so that it has a deviation even
// where none of their answers is bad.
func (d *Detector) worse(key kv.WorkerKey, now time.Time) (share, others float64, worse bool) {
	var well, all int
	from := d.workers[key].back
	for other, w := range d.workers {
		if other != key && w.phase == phaseIn {
			good, bad := w.countsSince(from, now)
			well, all = well+good, all+good+bad
		}
	}
	good, bad := d.workers[key].countsSince(from, now)
	n := good + bad
	if n < rateLeast || bad < failuresLeast || all < rateLeast {
		return 0, 0, false
	}
	share, others = float64(good)/float64(n), float64(well+1)/float64(all+2)
	deviation := math.Sqrt(others * (1 - others) * (1/float64(n) + 1/float64(all)))
	return share, others, share < others-rateBelow && share < others-rateDeviations*deviation
}
