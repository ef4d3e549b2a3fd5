package health

import (
	"time"
)

// Missed records that a worker has not answered its health checks, the last of them sent at that
// time. Its HTTP server may be busy, which is no failure: new requests avoid it until a byte of an
// answer comes, or AnswersChecks. It returns when the worker last showed life, and until when its
// requests, or a pause, explain that its server does not answer; zero: never.
func (d *Detector) Missed(worker uint64, generation int, sent time.Time) (lived, busy time.Time) {
	changed, rests := false, false
	for key, w := range d.workers {
		if key.Worker != worker || w.gone || w.generation != generation {
			continue
		}
		if w.lived.After(lived) {
			lived = w.lived
		}
		if w.rests { // weights may be replaced in the process that serves HTTP
			rests = true
			continue
		}
		if w.missed.IsZero() && !w.answered.After(sent) {
			w.missed, changed = sent, true
		}
	}
	if changed {
		d.recount()
	}
	if busy = d.busyUntil(worker); rests && busy.Before(sent) {
		busy = sent
	}
	return lived, busy
}

// AnswersChecks ends what Missed began.
func (d *Detector) AnswersChecks(worker uint64, generation int) {
	for key, w := range d.workers {
		if key.Worker == worker && w.generation == generation && !w.missed.IsZero() {
			w.missed = time.Time{}
			d.recount()
		}
	}
}
