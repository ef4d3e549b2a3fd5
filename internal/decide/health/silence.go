package health

import (
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// A worker that runs but makes no progress is found by its silence: the time since its last
// sign of life, which is a byte of any of its answers, or what Lives takes. Two decisions
// follow from it, each with a clock of its own:
//
//   - New requests avoid a worker after seconds of a silence that its work does not explain.
//     That is no failure and ends with the next sign of life, so that it may be wrong. What
//     runs there continues. A request without any answer yet begins at another worker, too,
//     and the first answer is used.
//   - What runs there is given up after SilenceTimeout beyond all that its work explains, and
//     the worker is ejected, while others show life.
const (
	// LookEvery is the interval at which the requests in flight on a worker are judged.
	LookEvery = 250 * time.Millisecond
	// LeastSilence is the shortest silence that may be too long.
	LeastSilence = trialFloor
	// silentFloor is the lower bound of an unexplained silence before the first byte, trialFloor
	// the same of a worker's trial, and stalledFloor within a running answer.
	silentFloor, trialFloor, stalledFloor = 3 * time.Second, time.Second, 10 * time.Second
	// writesAvoid bounds the time for writing an answer that comes whole for which its worker
	// is not avoided: clients often allow much more than is written.
	writesAvoid = 10 * time.Second
	// writesShown is the same for which the request is not sent elsewhere, if the worker's
	// engine shows life by itself: then writing is no silence, but its HTTP server may be busy.
	writesShown = 20 * time.Second
	// lateLeast is the number of late requests from which long answers no longer explain a
	// silence.
	lateLeast = 3
	// writesUnlimited and writesMost are the tokens of such an answer that its request does not
	// limit, and the most of one that it does.
	writesUnlimited, writesMost = 512, 4096
	// givenUpMost is the same where the worker would be given up.
	givenUpMost = 64 << 10
	// logprobTime is the time for a log probability of an answer, of which the process that serves
	// HTTP makes JSON while it answers nothing else; maxLogprobs is the number that explains a silence
	// at most: 5 minutes.
	logprobTime, maxLogprobs = 20 * time.Microsecond, 15_000_000
	// logprobsAlone is the shortest such time for which a request is not sent to a second worker,
	// which it would block, too.
	logprobsAlone = time.Second
	// othersWithin is the time within which another worker must have shown life for a silent
	// one to be at fault.
	othersWithin = time.Minute
)

// Verdict is what to do about a request that waits for its worker. Each includes those before
// it.
type Verdict uint8

// The verdicts.
const (
	Wait   Verdict = iota // the silence is explained
	Avoid                 // new requests go round the worker
	Hedge                 // begin the request elsewhere, too, if nothing of its answer has come
	GiveUp                // end what runs on the worker
)

// Waiting is a request that waits for its worker's next byte.
type Waiting struct {
	Attempt
	Class    Class
	Task     Task
	Tokens   int       // uncached prompt tokens on the worker when it was sent, its own included
	Whole    bool      // its answer does not stream
	Output   int       // maximum tokens of the answer; 0: no limit is known
	Logprobs int       // log probabilities in the answer
	Since    time.Time // when it began to wait
	Begun    bool      // a byte of the answer has come

	Verdict Verdict // set by Silence
	worker  *worker
}

// Lives records a sign of life of a worker's engine: it makes progress, whichever request
// or report shows that.
func (d *Detector) Lives(key kv.WorkerKey, generation int, at time.Time) {
	if w := d.of(Attempt{Worker: key, Generation: generation}); w != nil {
		w.shows = true
		d.alive(w, at)
	}
}

// Rest records that a worker's engine computes nothing, as a trainer has paused it, or that it goes on. The silence
// meanwhile counts as explained.
func (d *Detector) Rest(key kv.WorkerKey, rests bool, now time.Time) {
	if w := d.workers[key]; w != nil && w.rests != rests {
		w.rests = rests
		d.speaks(w, now)
	}
}

// Answers records that a byte of some answer of a worker came at that time.
func (d *Detector) Answers(key kv.WorkerKey, generation int, at time.Time) {
	if w := d.of(Attempt{Worker: key, Generation: generation}); w != nil {
		d.speaks(w, at)
	}
}

// speaks is alive by a byte of an answer: the worker's HTTP server is not busy either.
func (d *Detector) speaks(w *worker, at time.Time) {
	d.alive(w, at)
	if !w.missed.IsZero() && at.After(w.missed) {
		w.missed = time.Time{}
		d.recount()
	}
}

// alive ends the silence of w.
func (d *Detector) alive(w *worker, at time.Time) {
	if at.After(w.lived) {
		w.lived = at
	}
	if !w.silent.IsZero() && !at.Before(w.silent) {
		w.silent, w.probes = time.Time{}, 0
		d.recount()
	}
}

// IsSilent reports whether new requests avoid a worker because it shows no sign of life.
func (d *Detector) IsSilent(key kv.WorkerKey) bool {
	w := d.workers[key]
	return w != nil && w.avoided()
}

// avoided reports whether new requests go round w.
func (w *worker) avoided() bool { return !w.silent.IsZero() || !w.missed.IsZero() }

// silence is what a worker's requests are judged by.
type silence struct {
	*Detector
	now         time.Time
	all         []Waiting
	pace, write time.Duration // of most workers, for a token
	waits       [classes]struct {
		known bool
		wait  time.Duration // for the first byte, within the baseline
	}
	computes int // most prompt tokens of a request without a first byte
	late     int // requests that wait for the first byte for longer than allowed
}

// Silence judges the requests that wait on one worker, and sets their verdicts. It records that
// the worker is avoided, or stuck.
func (d *Detector) Silence(all []Waiting, now time.Time) {
	s := silence{Detector: d, now: now, all: all}
	s.pace, s.write = d.baseline.reads(), d.baseline.writes()
	for c := range s.waits {
		s.waits[c].wait, s.waits[c].known = d.baseline.allowed(Class(c))
	}
	for i := range all {
		q := &all[i]
		if q.worker = d.of(q.Attempt); q.worker != nil && q.worker.rests {
			q.worker = nil
		}
		if q.worker == nil || q.Begun {
			continue
		}
		s.computes = max(s.computes, q.Tokens)
	}
	for i := range all {
		q := &all[i]
		if q.worker == nil || q.Begun {
			continue
		}
		if allowed, known := s.allowed(q); known && q.silent(now) >= allowed+s.limited(q) {
			s.late++
		}
	}
	for i := range all {
		if q := &all[i]; q.worker != nil && d.settings.EjectAfter > 0 && q.silent(now) >= LeastSilence && !d.Discredited(q.Client, now) {
			q.Verdict = s.judge(q)
		}
	}
}

// judge returns the verdict on a request and records what follows from it.
func (s *silence) judge(q *Waiting) Verdict {
	silent, limit := q.silent(s.now), s.settings.SilenceTimeout
	verdict := s.doubts(q, silent)
	if LogprobTime(q.Logprobs) >= logprobsAlone {
		verdict = min(verdict, Avoid)
	}
	if verdict >= Avoid {
		s.avoid(q.Attempt, q.worker, s.now)
	}
	if limit > 0 && silent >= limit && s.unexplained(q.worker, silent-limit) && s.now.Sub(s.busyUntil(q.Worker.Worker)) >= limit &&
		s.othersLive(q.Worker, s.now) {
		a := q.Attempt
		a.Sent = s.now // it lasts until now, whenever the worker came back
		s.Failed(a, Stuck, "no sign of life for "+silent.Round(time.Millisecond).String()+" while other workers answered", s.now)
		return GiveUp
	}
	return verdict
}

// silent is how long q has waited without a sign of life of its worker.
func (q *Waiting) silent(now time.Time) time.Duration {
	return min(now.Sub(q.Since), now.Sub(q.worker.lived))
}

// reads returns the allowed time for so many prompt tokens on w: a multiple of what they take on
// most workers, and on that one.
func (s *silence) reads(w *worker, tokens int) time.Duration {
	return paceFactor * max(s.pace, slices.Max(w.own.pace[:])) * time.Duration(max(0, tokens))
}

// writes returns the time in which w has written so many tokens of an answer, if it is as slow
// as it ever was of late.
func (s *silence) writes(w *worker, tokens int) time.Duration {
	return max(writeFloor, s.write, slices.Max(w.own.write[:])) * time.Duration(tokens)
}

// busyUntil returns until when log probabilities explain that a worker's server does not answer. It
// continues them after their client has left. Zero: there were none.
func (d *Detector) busyUntil(worker uint64) (until time.Time) {
	for key, w := range d.workers {
		if key.Worker == worker && w.busy.After(until) {
			until = w.busy
		}
	}
	return until
}

// LogprobTime returns the allowed time for so many log probabilities of an answer.
func LogprobTime(n int) time.Duration {
	return logprobTime * time.Duration(min(n, maxLogprobs))
}

// allowed returns for how long q may wait for its first byte, but for the writing of an answer
// that comes whole and has a limit. While that is written, the engine may compute the prompts of
// later requests. not ok: the wait is not known.
func (s *silence) allowed(q *Waiting) (wait time.Duration, ok bool) {
	floor, usual := silentFloor, &s.waits[q.Class]
	if q.Trial || !q.Whole && !q.worker.silent.IsZero() { // the worker is in doubt already
		floor = trialFloor
	}
	tokens := q.Tokens
	if q.Class.is(limitedForm) {
		tokens = max(tokens, s.computes)
	}
	return max(floor, usual.wait) + s.reads(q.worker, tokens) + LogprobTime(q.Logprobs), usual.known
}

// doubts returns Avoid or Hedge where q has waited for longer than its worker's work explains.
func (s *silence) doubts(q *Waiting, silent time.Duration) Verdict {
	w := q.worker
	if q.Begun { // the engine may compute others' prompts meanwhile
		if silent < stalledFloor+s.reads(w, s.computes) {
			return Wait
		}
		return Avoid
	}
	if !w.missed.IsZero() && silent >= stalledFloor+s.reads(w, q.Tokens) { // its HTTP server does not answer either
		return Hedge
	}
	allowed, known := s.allowed(q)
	if !known || silent < allowed {
		return Wait
	}
	writes := s.limited(q)
	if q.Trial && writes == 0 || q.Task == Embed || q.Task == Generate && !q.Whole || s.late >= lateLeast {
		return Hedge
	}
	if silent < allowed+min(writes, writesAvoid) {
		return Wait
	}
	if writes == 0 {
		writes = s.shown(w, writesUnlimited)
	}
	if silent < allowed+writes {
		return Avoid
	}
	return Hedge
}

// limited returns the time for writing an answer that comes whole and has a limit; other answers
// have it in their baseline.
func (s *silence) limited(q *Waiting) time.Duration {
	if !q.Class.is(limitedForm) {
		return 0
	}
	return s.shown(q.worker, min(q.Output, writesMost))
}

// shown is writes, bounded where the worker's engine shows life by itself.
func (s *silence) shown(w *worker, tokens int) time.Duration {
	if writes := s.writes(w, tokens); !w.shows || writes < writesShown {
		return writes
	}
	return writesShown
}

// unexplained reports whether nothing that waits on w explains so long a silence.
func (s *silence) unexplained(w *worker, silent time.Duration) bool {
	for i := range s.all {
		q := &s.all[i]
		work := s.reads(w, q.Tokens)
		switch {
		case q.Begun && (w.shows || q.Output == 0):
		case q.Task > Embed && !w.shows: // nothing says how long it takes
			return false
		case (q.Whole || q.Begun) && q.Task == Generate: // a parser may hold the text back
			tokens := writesMost
			if q.Output > 0 {
				tokens = min(q.Output, givenUpMost)
			}
			work += s.writes(w, tokens)
		}
		if silent < work {
			return false
		}
	}
	return true
}

// avoid has new requests go round w, but for one at times. w is ejected already if a was its
// trial: then the next one is due later.
func (d *Detector) avoid(a Attempt, w *worker, now time.Time) {
	if a.Trial && w.phase == phaseOut && !w.trial.IsZero() {
		w.until, w.trial = now.Add(d.lengthen(&w.times)), time.Time{}
		return
	}
	if w.silent.IsZero() {
		w.silent = now
		w.probe = now.Add(d.lengthen(&w.probes))
		d.recount()
	}
}

// lengthen returns the length of an ejection after so many, and counts it.
func (d *Detector) lengthen(times *int) time.Duration {
	long := d.settings.EjectionTime
	for range *times {
		if long = min(2*long, d.settings.MaxEjectionTime); long == d.settings.MaxEjectionTime {
			break
		}
	}
	*times++
	return long
}

// othersLive reports whether another worker has shown life within othersWithin.
func (d *Detector) othersLive(key kv.WorkerKey, now time.Time) bool {
	for other, w := range d.workers {
		if other.Worker != key.Worker && !w.lived.IsZero() && now.Sub(w.lived) <= othersWithin {
			return true
		}
	}
	return false
}
