package health

import (
	"time"

	"kvrouter/internal/base/kv"
)

// refutedFor is the time for which workers get no pauses after these have turned out to be not
// needed.
const refutedFor = 10 * time.Second

const (
	// alikeFor is the span over which workers fail alike.
	alikeFor = 5 * time.Second
	// alikeShare is the share of the others' success rate below which a worker is worse than
	// they are meanwhile, and alikeDeviations the minimum difference in standard deviations.
	alikeShare, alikeDeviations = 0.7, 4
)

// failAlike reports whether the other workers of w's role that are in service fail, too: most of
// them have enough requests to judge by, and none of these serves nearly all of them. Then the
// requests rather than one worker may be the cause.
func (d *Detector) failAlike(at kv.WorkerKey, w *worker, now time.Time) bool {
	known, unknown := 0, 0
	for key, other := range d.workers {
		if !other.besides(w) || key.Worker == at.Worker {
			continue
		}
		good, bad := other.countsSince(now.Add(-alikeFor), now)
		switch n := good + bad; {
		case n >= rateLeast && float64(good) >= (1-rateBelow)*float64(n):
			return false
		case n >= rateLeast:
			known++
		case now.Sub(other.back) >= alikeFor: // one that has just come back has had few
			unknown++
		}
	}
	return known > unknown
}

// besides reports whether a worker is in service in the role of another one.
func (w *worker) besides(other *worker) bool {
	return !w.gone && w.role == other.role && w.phase != phaseOut
}

// judge ejects w, whose failures the others share, only if it serves clearly fewer of its
// requests than they do since it came or returned.
func (d *Detector) judge(a Attempt, w *worker, kind Kind, why string, now time.Time) {
	well, failed := 0, 0
	for key, other := range d.workers {
		if other.besides(w) && key.Worker != a.Worker.Worker {
			good, bad := other.countsSince(w.back, now)
			well, failed = well+good, failed+bad
		}
	}
	own, all := rateOf(w.countsSince(w.back, now)), rateOf(well, failed)
	if own.Share < alikeShare*all.Share && own.below(all, alikeDeviations) {
		d.ejectByRate(a, w, kind, why, own.Share, all.Share, now)
	}
}

// returnAlike returns the ejected workers that no comparison has found worse, once the
// others fail, too. They have no slow start: with fewer of the good requests they would look
// worse.
func (d *Detector) returnAlike(now time.Time) {
	if d.odd == 0 {
		return
	}
	changed := false
	for key, w := range d.workers {
		if w.gone || w.phase != phaseOut || w.byRate || !w.reason.dependsOnRequest() || w.reason.atOnce() {
			continue
		}
		if d.failAlike(key, w, now) {
			d.bringBack(key, w, now)
			w.phase, w.times, changed = phaseIn, max(0, w.times-1), true
		}
	}
	if changed {
		d.recount()
	}
}

// refute records that a worker of a role answered a request that was sent during the pause it
// had requested. If all workers of the role are paused or ejected, the pauses avoid nothing, and
// it has shown that they are not needed: all that workers requested end, and for a time no
// further ones begin.
func (d *Detector) refute(role kv.Role, now time.Time) {
	for key, w := range d.workers {
		if !w.gone && w.role == role && !d.IsOut(key, now) {
			return
		}
	}
	for _, w := range d.workers {
		if !w.gone && w.role == role && !w.asked.IsZero() {
			w.unhold()
		}
	}
	d.refuted[role] = now
	d.recount()
}

// unhold ends a pause.
func (w *worker) unhold() {
	w.held, w.heldBy, w.suspect, w.asked = time.Time{}, "", false, time.Time{}
}
