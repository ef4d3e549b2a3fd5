package health

import (
	"math"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// sparedFor is the time after its last failure for which a spared worker is marked as such.
// Its success rate covers that time.
const sparedFor = windowSeconds * time.Second

// TooMany reports whether more workers are out than MaxEjectionPercent of all allows. Of
// two or more workers at least one may be out, unless the percentage is 0.
func (d *Detector) TooMany(out, all int) bool { return out > d.mostOut(all) }

// mostOut is the maximum number of workers that may be out at a time.
func (d *Detector) mostOut(all int) int {
	most := d.settings.MaxEjectionPercent * all / 100
	if most == 0 && all > 1 && d.settings.MaxEjectionPercent > 0 {
		return 1
	}
	return most
}

// out returns the number of ejected workers of a role, and the number of which the cap is a
// share. Each role has its own cap, because a leg can be served by workers of its role
// only. The cap of prefill workers is a share of all workers: without a prefill worker,
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

// spare marks w as failing but not ejected, because of the cap. It stays in service; its
// success rate is compared with the others'.
func (d *Detector) spare(key kv.WorkerKey, w *worker, kind Kind, why string, now time.Time) {
	first := w.spared.IsZero()
	if w.spared = now; first {
		d.announce(News{Worker: key, Kind: kind, Spared: true, Why: why})
		d.recount()
	}
}

// unspare removes the mark.
func (d *Detector) unspare(w *worker) {
	if !w.spared.IsZero() {
		w.spared = time.Time{}
		d.recount()
	}
}

// keepCap returns workers of a role to service until the cap holds, those with the earliest
// trial first.
func (d *Detector) keepCap(role kv.Role, now time.Time) {
	for {
		out, all := d.out(role)
		if !d.TooMany(out, all) {
			return
		}
		var next *worker
		var at kv.WorkerKey
		for key, w := range d.workers {
			if w.phase == phaseOut && w.role == role && (next == nil || w.until.Before(next.until) || w.until.Equal(next.until) &&
				key.Compare(at) < 0) {
				next, at = w, key
			}
		}
		d.bringBack(at, next, now)
	}
}

// Spared reports whether only the cap keeps a failing worker from being ejected.
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

// Rate is the success rate of a worker's requests of the last 10 s.
type Rate struct {
	Share float64 // of good answers, 0 to 1
	n     int     // requests
}

// SuccessRate returns the success rate of a worker's requests of the last 10 s. Without
// requests the share is 1, or 0 while the worker is out.
func (d *Detector) SuccessRate(key kv.WorkerKey, now time.Time) Rate {
	w := d.workers[key]
	if w == nil {
		return Rate{Share: 1}
	}
	well, failed := w.counts(now)
	if well+failed == 0 && w.phase != phaseOut {
		return Rate{Share: 1}
	}
	return rateOf(well, failed)
}

// rateOf returns the rate of these numbers of requests; without any, the share is 0.
func rateOf(well, failed int) Rate {
	n := well + failed
	return Rate{float64(well) / float64(max(1, n)), n}
}

// Worse reports whether a worker with that rate is avoided in favor of one with the rate
// best: its share is lower by rateBelow, or lower by the test of two proportions.
func (r Rate) Worse(best Rate) bool {
	return r.Share < best.Share-rateBelow || r.below(best, rateDeviations)
}

// below reports whether a share is lower than another one by that many standard deviations, by
// the test of two proportions.
func (r Rate) below(other Rate, deviations float64) bool {
	if r.n < rateLeast || other.n < rateLeast {
		return false
	}
	n, m := float64(r.n), float64(other.n)
	pooled := (r.Share*n + other.Share*m + 1) / (n + m + 2)
	return r.Share < other.Share-deviations*math.Sqrt(pooled*(1-pooled)*(1/n+1/m))
}

// Panic reports whether more workers fail than the cap allows to eject. Those with the
// better success rate are then used first.
func (d *Detector) Panic() bool {
	return d.spared > 0 || slices.ContainsFunc([]kv.Role{kv.RoleBoth, kv.RolePrefill, kv.RoleDecode},
		func(role kv.Role) bool { return d.TooMany(d.out(role)) })
}
