package health

import (
	"fmt"
	"time"
)

// Pressed records that a worker requested a pause: it gets no requests for that time, at
// most LongestPause. 0 means that it stated no time: the pause is then a second, doubled up
// to longestGuess each time without an answer in between. A pause is no failure. Pressed
// reports whether the worker is paused: it is not if pauses have just turned out to be not
// needed.
func (d *Detector) Pressed(a Attempt, pause time.Duration, now time.Time) (held bool) {
	if d.ownFault(a, now) {
		d.Ended(a)
		return false
	}
	if w := d.of(a); w != nil && now.Sub(d.refuted[w.role]) < refutedFor {
		d.Ended(a)
		return false
	}
	d.hold(a, func(w *worker) {
		if w.presses == 0 || a.Sent.After(w.pressed) { // it was sent after the last pause began
			w.pressed, w.presses = now, w.presses+1
		}
		until := now.Add(min(pause, LongestPause))
		if pause <= 0 {
			until = w.pressed.Add(min(firstGuess<<min(w.presses-1, 10), longestGuess))
		}
		if w.suspect {
			w.unhold()
		}
		if w.held.IsZero() {
			w.heldBy, w.asked = a.Client, now
		} else if w.heldBy != a.Client {
			w.heldBy = ""
		}
		if until.After(w.held) {
			w.held = until
		}
	})
	d.Ended(a)
	return true
}

// hold changes the state of all ranks of an attempt's worker: they share the
// server that answered.
func (d *Detector) hold(a Attempt, change func(*worker)) {
	for key, w := range d.workers {
		if key.Worker == a.Worker.Worker && !w.gone && w.generation == a.Generation {
			change(w)
		}
	}
	d.recount()
}

// Suspect records that a worker refused an attempt with a status that either the
// client or the worker may have caused. It reports whether to ask another worker;
// if so, the worker is paused until Acquit or Convict. It returns false while that
// status is known to be caused by clients.
func (d *Detector) Suspect(a Attempt, status int, now time.Time) (ask bool) {
	d.Ended(a)
	if at, known := d.agreed[status]; known && now.Sub(at) < agreedFor {
		return false
	}
	d.hold(a, func(w *worker) {
		if w.held.IsZero() {
			w.held, w.heldBy, w.suspect = now.Add(suspectFor), "", true
		}
	})
	return true
}

// Acquit ends a suspicion. agreed means that another worker returned the same
// status: the client caused it.
func (d *Detector) Acquit(a Attempt, status int, agreed bool, now time.Time) {
	if agreed {
		d.agreed[status] = now
	}
	d.hold(a, func(w *worker) {
		if w.suspect {
			w.unhold()
		}
	})
}

// Convict ends a suspicion: another worker accepted what this one refused.
func (d *Detector) Convict(a Attempt, status int, now time.Time) {
	d.Acquit(a, status, false, now)
	d.Failed(a, Misconfigured, fmt.Sprintf("it answers %d to requests that others accept", status), now)
}

// AskFailed records that a worker did not answer a request for prompt tokens that was sent
// at a.Sent, unless it has answered a request since. One that let it wait is silent, as its
// HTTP server may be busy; one that refused it has failed.
func (d *Detector) AskFailed(a Attempt, now time.Time) {
	w := d.of(a)
	if w == nil || !w.answered.Before(a.Sent) {
		return
	}
	if now.Sub(a.Sent) < askedSlowly {
		d.Failed(a, Asked, "it did not answer a tokenization request", now)
	}
	if d.Discredited(a.Client, now) {
		return
	}
	w.askFailed = now
	if now.Sub(a.Sent) >= askedSlowly && w.phase != phaseOut && d.settings.EjectAfter > 0 {
		for key, rank := range d.workers {
			if key.Worker == a.Worker.Worker && !rank.gone && rank.generation == a.Generation {
				d.avoid(Attempt{Worker: key}, rank, now)
			}
		}
	}
}
