package health

import (
	"slices"
	"time"

	"kvrouter/internal/kv"
)

const (
	// baselineSize is the number of first bytes from which the baseline is computed.
	baselineSize = 128
	// slowFactor and longestFactor bound a wait far above the baseline: multiples
	// of the 95th percentile of the waits, and of the longest.
	slowFactor, longestFactor = 8, 2
	// silentFloor is the lower bound of a wait that counts as too long, and trialFloor the
	// same during a worker's trial.
	silentFloor, trialFloor = 3 * time.Second, time.Second
	// waitsLeast is the number of known waits from which one can be too long: after the
	// client gave up, and while it still waits.
	waitsLeast, waitsLeastStuck = 3, 5
	// paceFactor is the allowed multiple of the baseline time of a prompt token, for each
	// token to be computed first. paceDefault is that time while fewer than paceLeast are
	// known: a slow engine on a CPU.
	paceFactor  = 4
	paceDefault = 2 * time.Millisecond
	paceLeast   = 8
	// paceTokens is the minimum number of tokens from which a time per token is computed.
	paceTokens = 256
	// stalledFloor is the lower bound of the silence of running answers that counts as too
	// long, and stalledFactor the multiple of the longest one after which a worker went on.
	stalledFloor  = 10 * time.Second
	stalledFactor = 4
	// othersWithin is the time within which another worker must have answered for a silent
	// one to be at fault.
	othersWithin = time.Minute
)

// Class groups requests by the work that precedes their first byte.
type Class uint8

// ClassOf returns the class of a leg with a streamed or a non-streamed answer.
func ClassOf(leg kv.Leg, whole bool) Class {
	c := Class(leg) * 2
	if whole {
		c++
	}
	return c
}

const classes = 2 * (int(kv.LegDecode) + 1)

// baseline is the recent waits of requests for their first byte, on all workers.
type baseline struct {
	waits [classes]ring
	pace  ring // of a prompt token, where known
}

// ring holds the last values.
type ring struct {
	values [baselineSize]time.Duration
	count  int // values added so far
}

func (r *ring) add(d time.Duration) {
	r.values[r.count%baselineSize] = d
	r.count++
}

// high returns the 95th percentile of the values, and the highest.
func (r *ring) high() (most, all time.Duration) {
	n := min(r.count, baselineSize)
	if n == 0 {
		return 0, 0
	}
	sorted := slices.Sorted(slices.Values(r.values[:n]))
	return sorted[(n-1)*95/100], sorted[n-1]
}

// Waited records the time to the first byte of a request of that class, with the
// uncached prompt tokens on its worker when it was sent, including its own.
func (d *Detector) Waited(c Class, wait time.Duration, tokens int) {
	d.baseline.waits[c].add(wait)
	if c%2 == 0 && tokens >= paceTokens {
		d.baseline.pace.add(wait / time.Duration(tokens))
	}
}

// allowed returns the longest wait within the baseline. not ok: fewer than least
// waits are known.
func (u *baseline) allowed(c Class, tokens int, floor time.Duration, least int) (wait time.Duration, ok bool) {
	r := &u.waits[c]
	if r.count < least {
		return 0, false
	}
	most, all := r.high()
	return max(floor, slowFactor*most, longestFactor*all) + paceFactor*u.paceOf(tokens), true
}

// paceOf returns the 95th percentile of the time for so many prompt tokens.
func (u *baseline) paceOf(tokens int) time.Duration {
	pace := paceDefault
	if u.pace.count >= paceLeast {
		pace, _ = u.pace.high()
	}
	return pace * time.Duration(max(0, tokens))
}

// othersAnswer reports whether another worker has answered within othersWithin.
func (d *Detector) othersAnswer(key kv.WorkerKey, now time.Time) bool {
	for other, w := range d.workers {
		if other.Worker != key.Worker && !w.answered.IsZero() && now.Sub(w.answered) <= othersWithin {
			return true
		}
	}
	return false
}

// LeftInVain reports whether a client disconnected after a wait for the first byte
// that is far above the baseline, and clients have not just left most other workers so.
func (d *Detector) LeftInVain(a Attempt, c Class, tokens int, wait time.Duration, now time.Time) bool {
	allowed, known := d.baseline.allowed(c, tokens, silentFloor, waitsLeast)
	w := d.of(a)
	if w == nil || !known || wait < allowed || !d.othersAnswer(a.Worker, now) {
		return false
	}
	w.left = now
	return !d.leftAlike(a.Worker, w, now)
}

// Silent judges a worker that has sent no byte of any answer for that time, counted from an
// attempt of that class at the earliest. If the time is far above the baseline, the worker
// is stuck: it is ejected, or spared. Otherwise it must be checked again after the returned
// time.
func (d *Detector) Silent(a Attempt, c Class, tokens int, silent time.Duration, now time.Time) (stuck bool, again time.Duration) {
	const lookAgain = time.Second
	w := d.of(a)
	if w == nil || d.settings.EjectAfter == 0 {
		return false, lookAgain
	}
	if d.Discredited(a.Client, now) {
		return false, lookAgain
	}
	floor := silentFloor
	if a.Trial {
		floor = trialFloor
	}
	allowed, known := d.baseline.allowed(c, tokens, floor, waitsLeastStuck)
	switch {
	case !known, !d.othersAnswer(a.Worker, now):
		return false, lookAgain
	case silent < allowed:
		return false, max(allowed-silent, lookAgain/10)
	}
	return d.stuck(a, w, silent, now), lookAgain
}

// Stalled judges a worker whose running answers have all been silent for that time, while
// others went on. gap is the longest silence of lately after which a worker went on, and
// tokens are the prompt tokens that it may be computing meanwhile. If the silence is far
// above these, the worker is stuck: it is ejected, or spared.
func (d *Detector) Stalled(a Attempt, silent, gap time.Duration, tokens int, now time.Time) (stuck bool) {
	w := d.of(a)
	if w == nil || d.settings.EjectAfter == 0 || d.Discredited(a.Client, now) {
		return false
	}
	if silent < max(stalledFloor, stalledFactor*gap)+d.baseline.paceOf(tokens) {
		return false
	}
	return d.stuck(a, w, silent, now)
}

// stuck records that w is stuck. It reports whether its requests must end.
func (d *Detector) stuck(a Attempt, w *worker, silent time.Duration, now time.Time) bool {
	d.Failed(a, Stuck, "no data received for "+silent.Round(time.Millisecond).String()+" while other workers answered", now)
	return w.phase == phaseOut || w.spared.Equal(now)
}

// FirstLook returns the time from sending a request to the first check for silence.
func FirstLook(trial bool) time.Duration {
	if trial {
		return trialFloor
	}
	return silentFloor
}
