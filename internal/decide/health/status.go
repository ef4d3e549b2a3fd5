package health

import (
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// States of a worker in a Record.
const (
	StateIn     = "in"
	StateBack   = "slow_start"
	StateSilent = "silent"
	StateHeld   = "held"
	StateOut    = "ejected"
)

// Record is the state of one worker rank that is up.
type Record struct {
	Worker      kv.WorkerKey
	State       string
	Since       time.Time // StateIn, StateBack, StateOut: of the state
	Until       time.Time // StateOut: of the trial; StateHeld: of the pause
	Reason      Kind      // StateOut: why
	Why         string    // the same, as text
	Row         int       // failures in a row
	Requests    int       // that ended in the last 10 s
	SuccessRate float64   // of those, 0 to 1; 1 without requests
	Ejections   map[Kind]uint64
}

// Records returns the state of every worker that is up, by key.
func (d *Detector) Records(now time.Time) []Record {
	keys := make([]kv.WorkerKey, 0, len(d.workers)) // smaller to sort
	for key, w := range d.workers {
		if !w.gone {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, kv.WorkerKey.Compare)
	list := make([]Record, len(keys))
	for i, key := range keys {
		list[i] = d.record(key, d.workers[key], now)
	}
	return list
}

// Shunned returns the workers that are ejected, held or silent.
func (d *Detector) Shunned(now time.Time) (keys []kv.WorkerKey) {
	if d.odd == 0 {
		return nil
	}
	for key, w := range d.workers {
		if !w.gone && d.IsOut(key, now) {
			keys = append(keys, key)
		}
	}
	return keys
}

// Record returns the state of one worker; not ok: it is not there.
func (d *Detector) Record(key kv.WorkerKey, now time.Time) (r Record, ok bool) {
	if w := d.workers[key]; w != nil && !w.gone {
		return d.record(key, w, now), true
	}
	return r, false
}

func (d *Detector) record(key kv.WorkerKey, w *worker, now time.Time) Record {
	d.bringUpToDate(key, w, now)
	s := Record{Worker: key, State: StateIn, Since: w.since, Row: w.row, SuccessRate: 1, Ejections: map[Kind]uint64{}}
	switch {
	case w.phase == phaseOut:
		s.State, s.Until, s.Reason, s.Why = StateOut, w.until, w.reason, w.why
	case !w.held.IsZero():
		s.State, s.Until = StateHeld, w.held
	case !w.silent.IsZero():
		s.State, s.Since = StateSilent, w.silent
	case !w.missed.IsZero():
		s.State, s.Since = StateSilent, w.missed
	case w.phase == phaseBack:
		s.State = StateBack
	}
	well, failed := w.counts(now)
	if s.Requests = well + failed; s.Requests > 0 {
		s.SuccessRate = float64(well) / float64(s.Requests)
	}
	for kind, n := range w.ejections {
		if n > 0 {
			s.Ejections[Kind(kind)] = n
		}
	}
	return s
}
