package health

import (
	"time"
)

// Missed records that a worker has not answered its health checks since a time. Its HTTP server may
// be busy, which is no failure: new requests avoid it until a byte of an answer comes, or
// AnswersChecks. It returns when the worker last showed life; zero: never.
func (d *Detector) Missed(worker uint64, generation int, since time.Time) (lived time.Time) {
	changed := false
	for key, w := range d.workers {
		if key.Worker != worker || w.gone || w.generation != generation {
			continue
		}
		if w.lived.After(lived) {
			lived = w.lived
		}
		if !w.missed && !w.answered.After(since) {
			w.missed, changed = true, true
		}
	}
	if changed {
		d.recount()
	}
	return lived
}

// AnswersChecks ends what Missed began.
func (d *Detector) AnswersChecks(worker uint64, generation int) {
	for key, w := range d.workers {
		if key.Worker == worker && w.generation == generation && w.missed {
			w.missed = false
			d.recount()
		}
	}
}
