// Package health ejects failing workers. It compares the results of each worker's last
// requests with those of the others, and decides which workers may get new requests. A
// failing one is ejected for a time, then gets one request on trial, then a growing
// share. While all fail (alike.go), only one that is clearly worse is ejected. One that is
// silent (silence.go) is avoided at once and ejected late. The method follows Envoy's outlier
// detection and slow start.
package health

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"kvrouter/internal/base/kv"
)

// Settings are the conditions and the duration of an ejection.
type Settings struct {
	EjectAfter         int           `group:"Failing workers" default:"3" help:"Consecutive failures after which a worker is ejected; an interrupted answer counts twice. 0 disables ejection."`
	EjectionTime       time.Duration `group:"Failing workers" default:"5s" help:"Base ejection time, followed by one trial request; doubled at each further ejection."`
	MaxEjectionTime    time.Duration `group:"Failing workers" default:"20s" help:"Maximum ejection time."`
	MaxEjectionPercent int           `group:"Failing workers" default:"50" help:"Maximum share of workers that are ejected at a time, percent; of two or more at least one may be. 0 ejects none."`
	SilenceTimeout     time.Duration `group:"Failing workers" default:"60s" help:"Maximum time without a sign of life of a worker, in addition to the time that its requests explain, before these are ended and it is ejected. New requests avoid it within seconds. 0 disables it."`
	SlowStart          time.Duration `group:"Failing workers" default:"5s" help:"Time over which the share of requests of a returning worker grows to its full size."`
}

// Validate checks the settings; its errors name the flag.
func (s Settings) Validate() error {
	switch {
	case s.EjectAfter < 0:
		return errors.New("--eject-after cannot be negative; 0 disables ejection")
	case s.EjectAfter > 0 && s.EjectionTime <= 0:
		return fmt.Errorf("--ejection-time %s: give more than 0, or --eject-after 0", s.EjectionTime)
	case s.EjectAfter > 0 && s.MaxEjectionTime < s.EjectionTime:
		return fmt.Errorf("--max-ejection-time %s: give at least --ejection-time (%s)", s.MaxEjectionTime, s.EjectionTime)
	case s.MaxEjectionPercent < 0 || s.MaxEjectionPercent > 100:
		return fmt.Errorf("--max-ejection-percent %d: give 0 to 100", s.MaxEjectionPercent)
	case s.SilenceTimeout < 0:
		return errors.New("--silence-timeout cannot be negative; 0 disables it")
	case s.SlowStart < 0:
		return errors.New("--slow-start cannot be negative; 0 disables it")
	}
	return nil
}

const (
	// wellFor is the time in service after which the next ejection of a worker is one step
	// shorter.
	wellFor = 30 * time.Second
	// trialLimit is the time after which a trial without a result no longer prevents
	// another one.
	trialLimit = 30 * time.Second
	// trialFlows is the time of streaming after which the worker is returned to service
	// before the end of a trial's answer.
	trialFlows = 2 * time.Second
	// leastShare is the share of requests at the start of slow start.
	leastShare = 0.1
	// suspectFor is the maximum time for which a worker is paused while the request is
	// tried on another one.
	suspectFor = 5 * time.Second
	// agreedFor is the time for which a status that two workers returned for one request
	// counts as caused by clients.
	agreedFor = time.Second
	// LongestPause is the maximum pause that a worker can request.
	LongestPause = time.Minute
	// firstGuess and longestGuess are the minimum and maximum pause of a worker that does
	// not state a time.
	firstGuess, longestGuess = time.Second, 8 * time.Second
	// askedFor is the time for which a worker that failed a request for prompt tokens gets no
	// further ones, where others can. One that was not answered for askedSlowly was not refused.
	askedFor, askedSlowly = 10 * time.Second, time.Second

	// windowSeconds is the span over which success rates are compared.
	windowSeconds = 10
	// rateLeast is the minimum number of requests in that span, of the worker and of the
	// others together. failuresLeast is the minimum number of its failures.
	rateLeast, failuresLeast = 10, 3
	// rateBelow is the minimum difference between the others' success rate and its own, and
	// rateDeviations the same in standard deviations.
	rateBelow, rateDeviations = 0.2, 3
)

// phase is a worker's state of ejection.
type phase uint8

const (
	phaseIn   phase = iota
	phaseOut        // gets no requests, except a trial when its time is over
	phaseBack       // its share grows
)

// worker is the state of one worker rank.
type worker struct {
	generation int
	role       kv.Role
	gone       bool // not up
	phase      phase
	since      time.Time // of phaseOut, or when it came or came back
	back       time.Time // when it last came back; zero: never
	until      time.Time // phaseOut: when a trial is due
	times      int       // ejections that determine the length of the next one
	reason     Kind      // of the last ejection
	why        string    // the same, as text
	byRate     bool      // it was ejected because its success rate is worse than that of the others
	outBy      string    // the client that alone caused phaseOut, or empty
	row        int       // failures in a row
	broken     int       // of those, answers that broke off

	trial      time.Time // when a request on trial was sent; zero: none is under way
	trialHeard time.Time // when its answer began

	spared  time.Time // when the cap last prevented its ejection; zero: never
	held    time.Time // paused until then; zero: not paused
	heldBy  string    // the client that alone caused the pause, or empty
	suspect bool      // paused because of a status that the client may have caused
	asked   time.Time // when the pause began, if it requested it; zero: it did not
	pressed time.Time // when it last requested a pause
	presses int       // pauses requested since its last answer

	rests  bool      // its engine computes nothing, and its silence means nothing
	missed time.Time // since when it does not answer its health checks; zero: it does
	busy   time.Time // until when log probabilities explain that its server does not answer; zero: none do

	lived  time.Time // its last sign of life
	shows  bool      // it has shown life otherwise than by answers
	silent time.Time // since when it is avoided for its silence; zero: it is not
	probe  time.Time // silent: when it gets a request nevertheless
	probes int       // times that determine the next probe
	own    own       // how fast it is

	answered  time.Time // when it last answered well
	askFailed time.Time // when it last failed to answer a request for prompt tokens
	window    [windowSeconds]second
	seen      tally    // requests of clients that are not discredited
	blames    [2]blame // the last failures of two clients, the latest first
	ejections [kinds]uint64
}

// Detector evaluates workers. It has no lock: its owner, the Router, guards it.
type Detector struct {
	settings Settings
	workers  map[kv.WorkerKey]*worker
	odd      int // workers with a state other than in
	spared   int // of those, workers that the cap keeps in
	agreed   map[int]time.Time
	refuted  map[kv.Role]time.Time // when pauses of a role last turned out to be not needed
	news     []News
	baseline baseline
	clients  map[string]*client // with recently failed requests
	tidied   time.Time          // when clients was last tidied
}

// New returns a detector without workers.
func New(settings Settings) *Detector {
	return &Detector{settings: settings, workers: map[kv.WorkerKey]*worker{}, agreed: map[int]time.Time{}, refuted: map[kv.Role]time.Time{},
		clients: map[string]*client{}}
}

// Attempt is a request that was sent to a worker.
type Attempt struct {
	Worker     kv.WorkerKey
	Generation int // of the worker
	Sent       time.Time
	Trial      bool   // Begin said so
	Client     string // whose request it is; empty: unknown
}

// Join adds a worker of that role. A new incarnation starts with an empty record.
func (d *Detector) Join(key kv.WorkerKey, generation int, role kv.Role, now time.Time) {
	w := d.workers[key]
	if w == nil { // which is in: thousands that join are not counted anew each time
		d.workers[key] = &worker{generation: generation, since: now, role: role}
		return
	}
	if w.since.IsZero() || w.gone || w.generation != generation {
		d.workers[key] = &worker{generation: generation, since: now, ejections: w.ejections}
	}
	d.workers[key].role = role
	d.recount()
}

// keptGone is the maximum number of removed workers whose count of ejections is kept.
const keptGone = 1024

// Leave removes the results of a worker that is down, but keeps its number of ejections. If
// more of the others are out than the cap then allows, those with the earliest trial
// return.
func (d *Detector) Leave(key kv.WorkerKey, now time.Time) {
	w := d.workers[key]
	if w == nil {
		return
	}
	d.workers[key] = &worker{generation: w.generation, gone: true, ejections: w.ejections}
	if w.ejections == [kinds]uint64{} {
		delete(d.workers, key)
	}
	gone := 0
	for _, other := range d.workers {
		if other.gone {
			gone++
		}
	}
	if gone > keptGone {
		delete(d.workers, key)
	}
	d.keepCap(w.role, now)
	d.recount()
}

// recount counts the workers with a state other than in.
func (d *Detector) recount() {
	d.odd, d.spared = 0, 0
	for _, w := range d.workers {
		if w.phase != phaseIn || !w.held.IsZero() || !w.spared.IsZero() || w.avoided() {
			d.odd++
		}
		if !w.spared.IsZero() {
			d.spared++
		}
	}
}

// Quiet reports whether no worker is ejected, paused, silent or in slow start.
func (d *Detector) Quiet() bool { return d.odd == 0 }

// Level ranks workers for a request; lower is better.
type Level uint8

// The levels.
const (
	In     Level = iota // takes it
	Slow                // takes requests again, but not this one: its share is still growing
	Silent              // shows no life, and its work does not explain that
	Held                // has requested a pause, or is suspected
	Out                 // ejected
)

// Level returns a worker's level for a request now. random decides whether the
// request belongs to the share of a worker in slow start.
func (d *Detector) Level(key kv.WorkerKey, now time.Time, random *rand.Rand) Level {
	w := d.workers[key]
	if w == nil {
		return In
	}
	d.bringUpToDate(key, w, now)
	switch {
	case w.phase == phaseOut:
		return Out
	case !w.held.IsZero():
		return Held
	case w.avoided():
		return Silent
	case w.phase == phaseBack && random.Float64() >= max(leastShare, float64(now.Sub(w.since))/float64(d.settings.SlowStart)):
		return Slow
	}
	return In
}

// IsOut reports whether a worker gets only requests that no other worker can serve.
func (d *Detector) IsOut(key kv.WorkerKey, now time.Time) bool {
	if d.odd == 0 {
		return false
	}
	w := d.workers[key]
	if w == nil {
		return false
	}
	d.bringUpToDate(key, w, now)
	return w.phase == phaseOut || !w.held.IsZero() || w.avoided()
}

// Ejected reports whether a worker is ejected for its failures.
func (d *Detector) Ejected(key kv.WorkerKey, now time.Time) bool {
	w := d.workers[key]
	if w == nil || w.phase != phaseOut {
		return false
	}
	d.bringUpToDate(key, w, now)
	return w.phase == phaseOut
}

// IsBack reports whether a worker's share of requests is still growing.
func (d *Detector) IsBack(key kv.WorkerKey, now time.Time) bool {
	w := d.workers[key]
	if w == nil {
		return false
	}
	d.bringUpToDate(key, w, now)
	return w.phase == phaseBack
}

// AskedInVain reports whether a worker recently failed to answer a tokenization
// request.
func (d *Detector) AskedInVain(key kv.WorkerKey, now time.Time) bool {
	w := d.workers[key]
	return w != nil && !w.askFailed.IsZero() && now.Sub(w.askFailed) < askedFor
}

// TrialDue reports whether an ejected or silent worker may get a trial request, and since
// when.
func (d *Detector) TrialDue(key kv.WorkerKey, now time.Time) (since time.Time, due bool) {
	w := d.workers[key]
	if w == nil || w.phase != phaseOut && w.silent.IsZero() {
		return since, false
	}
	d.bringUpToDate(key, w, now)
	if w.phase != phaseOut && !w.silent.IsZero() {
		return w.probe, w.held.IsZero() && !now.Before(w.probe)
	}
	return w.until, w.phase == phaseOut && w.held.IsZero() && !now.Before(w.until) && (w.trial.IsZero() || now.Sub(w.trial) >= trialLimit)
}

// Begin records that a request is sent to a worker, with so many log probabilities in its answer,
// and reports whether it is the trial request.
func (d *Detector) Begin(key kv.WorkerKey, logprobs int, now time.Time) (trial bool) {
	if w := d.workers[key]; w != nil && logprobs > 0 {
		w.busy = now.Add(min(max(0, w.busy.Sub(now))+LogprobTime(logprobs), LogprobTime(maxLogprobs)))
	}
	if d.odd == 0 {
		return false
	}
	if _, due := d.TrialDue(key, now); due {
		w := d.workers[key]
		if w.phase != phaseOut {
			w.probe = now.Add(d.lengthen(&w.probes))
			return true
		}
		w.trial, w.trialHeard = now, time.Time{}
		return true
	}
	return false
}

// bringUpToDate ends states whose time is over.
func (d *Detector) bringUpToDate(key kv.WorkerKey, w *worker, now time.Time) {
	changed := false
	if !w.held.IsZero() && !now.Before(w.held) {
		w.unhold()
		changed = true
	}
	if w.phase == phaseOut && !w.trialHeard.IsZero() && now.Sub(w.trialHeard) >= trialFlows {
		d.bringBack(key, w, now)
	}
	if w.phase == phaseBack && now.Sub(w.since) >= d.settings.SlowStart {
		w.phase, changed = phaseIn, true
	}
	if !w.spared.IsZero() && now.Sub(w.spared) >= sparedFor {
		w.spared, changed = time.Time{}, true
	}
	if changed {
		d.recount()
	}
}

// of returns the state of the incarnation that an attempt went to; nil: it is gone.
func (d *Detector) of(a Attempt) *worker {
	if w := d.workers[a.Worker]; w != nil && !w.gone && w.generation == a.Generation {
		return w
	}
	return nil
}

// answers records an answer of a worker.
func (d *Detector) answers(w *worker, now time.Time) {
	w.answered = now
	d.speaks(w, now)
}

// Heard records that an attempt's answer has begun.
func (d *Detector) Heard(a Attempt, now time.Time) {
	if w := d.of(a); w != nil {
		d.answers(w, now)
		if a.Trial && !w.trial.IsZero() {
			w.trialHeard = now
		}
	}
}

// Succeeded records a successful attempt.
func (d *Detector) Succeeded(a Attempt, now time.Time) {
	w := d.of(a)
	if w == nil {
		return
	}
	w.row, w.broken, w.presses = 0, 0, 0
	d.answers(w, now)
	w.count(now).well++
	d.servedWell(a, w, now)
	d.unspare(w)
	if !w.asked.IsZero() && a.Sent.After(w.asked) {
		d.refute(w.role, now)
	}
	if w.phase == phaseOut && (a.Trial || a.Sent.After(w.since)) {
		d.bringBack(a.Worker, w, now)
	}
}

// Ended records that an attempt ended with unknown result.
func (d *Detector) Ended(a Attempt) {
	if w := d.of(a); w != nil && a.Trial {
		w.trial, w.trialHeard = time.Time{}, time.Time{}
	}
}

// Failed records a failed attempt. why describes the failure.
func (d *Detector) Failed(a Attempt, kind Kind, why string, now time.Time) {
	if kind.dependsOnRequest() && d.ownFault(a, now) {
		d.Ended(a)
		return
	}
	if w := d.of(a); w != nil {
		d.strike(a, w, kind, why, now)
	}
	if kind.ofServer() {
		for key, w := range d.workers { // the other ranks share the server
			if key.Worker == a.Worker.Worker && key != a.Worker && !w.gone && w.generation == a.Generation {
				d.strike(Attempt{Worker: key, Generation: a.Generation, Sent: a.Sent, Client: a.Client}, w, kind, why, now)
			}
		}
	}
	if kind.dependsOnRequest() {
		d.returnAlike(now)
	}
}

// strike counts one failure of w.
func (d *Detector) strike(a Attempt, w *worker, kind Kind, why string, now time.Time) {
	w.blamed(a.Client, now)
	switch {
	case w.phase == phaseOut && !a.Trial: // it was sent before the ejection, or because no other worker was left
		if a.Sent.After(w.since) {
			w.count(now).failed++
		}
		return
	case w.phase == phaseOut:
		w.count(now).failed++
		d.eject(a, w, kind, "its trial failed: "+why, now)
		return
	case a.Sent.Before(w.since) && !a.Trial: // before it came back
		return
	}
	w.row++
	if kind == Broken { // it cannot be retried elsewhere: it counts twice
		w.broken++
	}
	w.count(now).failed++
	if d.settings.EjectAfter == 0 {
		return
	}
	switch {
	case kind.atOnce():
		d.eject(a, w, kind, why, now)
	case kind.dependsOnRequest() && d.failAlike(a.Worker, w, now):
		d.judge(a, w, kind, why, now)
	case w.phase == phaseBack:
		d.eject(a, w, kind, "it failed again: "+why, now)
	case w.row+w.broken >= d.settings.EjectAfter:
		d.eject(a, w, kind, fmt.Sprintf("%d consecutive failures, the last: %s", w.row, why), now)
	default:
		if share, others, worse := d.worse(a.Worker, now); worse {
			d.ejectByRate(a, w, kind, why, share, others, now)
		}
	}
}

// ejectByRate ejects w because its share of good answers is worse than that of the others.
func (d *Detector) ejectByRate(a Attempt, w *worker, kind Kind, why string, share, others float64, now time.Time) {
	d.eject(a, w, kind, fmt.Sprintf("success rate %.0f %%, of the other workers %.0f %%; last failure: %s", 100*share, 100*others, why), now)
	w.byRate = w.phase == phaseOut
}

// eject ejects w because of that attempt's failure.
func (d *Detector) eject(a Attempt, w *worker, kind Kind, why string, now time.Time) {
	key := a.Worker
	if w.phase != phaseOut {
		if !d.mayEject(w.role) {
			d.spare(key, w, kind, why, now)
			return
		}
		w.byRate = false
		w.times = max(0, w.times-int(now.Sub(w.since)/wellFor))
	}
	long := d.lengthen(&w.times)
	first := w.phase != phaseOut
	if alone := kind.dependsOnRequest() && w.only(a.Client, now); first && alone {
		w.outBy = a.Client
	} else if first || w.outBy != a.Client {
		w.outBy = ""
	}
	w.phase, w.reason, w.why, w.until = phaseOut, kind, why, now.Add(long)
	if first {
		w.since = now
	}
	w.unhold()
	w.silent, w.probes = time.Time{}, 0
	w.row, w.broken = 0, 0
	w.trial, w.trialHeard, w.spared = time.Time{}, time.Time{}, time.Time{}
	w.ejections[kind]++
	d.recount()
	d.announce(News{Worker: key, Kind: kind, Out: true, For: long, Why: why})
}

// bringBack returns w to service.
func (d *Detector) bringBack(key kv.WorkerKey, w *worker, now time.Time) {
	d.announce(News{Worker: key, Kind: w.reason, For: now.Sub(w.since)})
	w.phase, w.since, w.back, w.row, w.broken = phaseBack, now, now, 0, 0
	w.trial, w.trialHeard = time.Time{}, time.Time{}
	w.window = [windowSeconds]second{}
	d.recount()
}

// Hint records that another router has ejected a worker for that time. The cause
// may be that router: the worker is paused for at most the base ejection time, and
// the panic threshold applies. It reports whether anything changed.
func (d *Detector) Hint(key kv.WorkerKey, long time.Duration, now time.Time) (took bool) {
	w := d.workers[key]
	if w == nil || w.gone || long <= 0 || d.settings.EjectAfter == 0 {
		return false
	}
	d.bringUpToDate(key, w, now)
	if w.phase != phaseIn || !w.held.IsZero() {
		return false
	}
	out, all := 1, 0
	for other, o := range d.workers {
		if o.gone {
			continue
		}
		if all++; d.IsOut(other, now) {
			out++
		}
	}
	if d.TooMany(out, all) {
		return false
	}
	w.held, w.heldBy = now.Add(min(long, d.settings.EjectionTime)), ""
	d.recount()
	return true
}

// Readmit ends a worker's ejection or pause without slow start, and clears its
// failures.
func (d *Detector) Readmit(key kv.WorkerKey, now time.Time) {
	w := d.workers[key]
	if w == nil || w.gone {
		return
	}
	if w.phase == phaseOut {
		d.bringBack(key, w, now)
	}
	*w = worker{generation: w.generation, role: w.role, rests: w.rests, since: now, answered: w.answered, lived: w.lived, shows: w.shows, own: w.own,
		seen: w.seen, ejections: w.ejections}
	d.recount()
}

// Forgive withdraws a failure: other workers failed the same request in the same
// way.
func (d *Detector) Forgive(a Attempt, now time.Time) {
	if w := d.of(a); w != nil && w.phase != phaseOut && w.row > 0 {
		if w.row--; w.row+w.broken < d.settings.EjectAfter {
			d.unspare(w)
		}
		if s := w.count(now); s.failed > 0 {
			s.failed--
		}
	}
}
