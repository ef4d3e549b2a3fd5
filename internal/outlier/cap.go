package outlier

import (
	"math"
	"slices"
	"time"

	"kvrouter/internal/kv"
)

// sparedFor is the time for which a worker that is spared is told from others, from its
// last failure on. Its success rate is of that time.
const sparedFor = windowSeconds * time.Second

// TooMany reports whether more of all workers are out than MaxEjectionPercent allows: that
// share of them, but of two or more at least one, unless it is 0.
func (d *Detector) TooMany(out, all int) bool { return out > d.mostOut(all) }

// mostOut is how many of all workers may be out at a time.
func (d *Detector) mostOut(all int) int {
	most := d.settings.MaxEjectionPercent * all / 100
	if most == 0 && all > 1 && d.settings.MaxEjectionPercent > 0 {
		return 1
	}
	return most
}

// out counts the workers of a role that are ejected, and those of which the cap is a
// share. Each role has a cap of its own, because a leg can be served by workers of its role
// alone. That of prefill workers is a share of all workers: without a prefill worker,
// requests are aggregated.
func (d *Detector) out(role kv.Role) (out, all int) {
	for _, w := range d.workers {
		if w.gone || w.role != role && role != kv.RolePrefill {
			continue
		}
		all++
		if w.phase == phaseOut && w.role == role {
			out++
		}
	}
	return out, all
}

// mayEject reports whether one more worker of a role may be out.
func (d *Detector) mayEject(role kv.Role) bool {
	out, all := d.out(role)
	return !d.TooMany(out+1, all)
}

// spare notes that w would be out, but for the others that are. It keeps its place; its
// success rate says how it does beside them.
func (d *Detector) spare(key kv.WorkerKey, w *worker, kind Kind, why string, now time.Time) {
	first := w.spared.IsZero()
	if w.spared = now; first {
		d.tell(News{Worker: key, Kind: kind, Spared: true, Why: why})
		d.recount()
	}
}

// unspare ends that.
func (d *Detector) unspare(w *worker) {
	if !w.spared.IsZero() {
		w.spared = time.Time{}
		d.recount()
	}
}

// keepCap brings workers of a role back until no more are out than may be, the one whose
// trial is due next first.
func (d *Detector) keepCap(role kv.Role, now time.Time) {
	for {
		out, all := d.out(role)
		if !d.TooMany(out, all) {
			return
		}
		var next *worker
		var at kv.WorkerKey
		for key, w := range d.workers {
			if w.phase == phaseOut && w.role == role && (next == nil || w.until.Before(next.until) || w.until.Equal(next.until) && key.Compare(at) < 0) {
				next, at = w, key
			}
		}
		d.bringBack(at, next, now)
	}
}

// Spared reports whether a worker fails so that it would be out, but for the others that
// are.
func (d *Detector) Spared(key kv.WorkerKey, now time.Time) bool {
	if d.spared == 0 {
		return false
	}
	w := d.workers[key]
	if w == nil {
		return false
	}
	d.bringUpToDate(key, w, now)
	return !w.spared.IsZero()
}

// Rate is how a worker answered its requests of the last 10 s.
type Rate struct {
	Share float64 // of good answers, 0 to 1
	n     int     // requests
}

// SuccessRate returns how a worker answered its requests of the last 10 s. Where there were
// none the share is 1, or 0 while the worker is out.
func (d *Detector) SuccessRate(key kv.WorkerKey, now time.Time) Rate {
	w := d.workers[key]
	if w == nil {
		return Rate{Share: 1}
	}
	well, failed := w.counts(now)
	switch n := well + failed; {
	case n > 0:
		return Rate{float64(well) / float64(n), n}
	case w.phase == phaseOut:
		return Rate{}
	}
	return Rate{Share: 1}
}

// Worse reports whether a worker with that rate is to be avoided where one with the rate best
// can be had: its share is rateBelow less, or less by the test of two proportions.
func (r Rate) Worse(best Rate) bool {
	switch {
	case r.Share < best.Share-rateBelow:
		return true
	case r.n < rateLeast || best.n < rateLeast:
		return false
	}
	n, m := float64(r.n), float64(best.n)
	pooled := (r.Share*n + best.Share*m + 1) / (n + m + 2)
	return r.Share < best.Share-rateDeviations*math.Sqrt(pooled*(1-pooled)*(1/n+1/m))
}

// Panic reports whether more workers fail than may be out: those with the better success
// rate are used first then.
func (d *Detector) Panic() bool {
	return d.spared > 0 || slices.ContainsFunc([]kv.Role{kv.RoleBoth, kv.RolePrefill, kv.RoleDecode}, func(role kv.Role) bool { return d.TooMany(d.out(role)) })
}
