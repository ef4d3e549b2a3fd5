package router

import (
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
)

// fault is how a worker failed a request.
type fault struct {
	kind    health.Kind
	why     string
	counted bool // the worker is known to be down: it counts no more
}

// trialOverdue is the time that a worker's trial waits for a request that its sender
// repeats elsewhere. Then it may be one of a client of the router port.
const trialOverdue = 5 * time.Second

// filter leaves of the candidates those that take p best: workers that are in, else
// those that are just back, else those that are silent, else those that are held, else those
// that are out. If more of
// the workers that could serve p fail than may be out, those that are out count as in, and of all
// that are in those with the best success rate are left. A worker whose trial is due gets p.
func (d *decider) filter(p *prompt, now time.Time) error {
	r := d.router
	if d.onTrial(p, now) {
		return nil
	}
	fail, all := 0, 0
	for i := range r.fleet.targets {
		if t := &r.fleet.targets[i]; p.mightUse(t) {
			all++
			if r.Health.outliers.Ejected(t.Key, now) || r.Health.outliers.Spared(t.Key, now) {
				fail++
			}
		}
	}
	panicking := r.Health.outliers.TooMany(fail, all)
	best, kept := health.Out+1, d.candidates[:0]
	for _, c := range d.candidates { // kept is behind it
		level := r.Health.outliers.Level(c.Target.Key, now, d.random)
		if level == health.Out && panicking {
			level = health.In
		}
		if level < best {
			best, kept = level, kept[:0]
		}
		if level == best {
			kept = append(kept, c)
		}
	}
	d.candidates = kept
	if panicking {
		d.preferWell(now)
	}
	if best == health.Held && len(p.Exclude) > 0 || best >= health.Silent && p.Beside {
		return ErrNoWorker // the answer that is there, or may come, is as good
	}
	return nil
}

// preferWell leaves the candidates of which the success rate is about that of the best.
func (d *decider) preferWell(now time.Time) {
	var best health.Rate
	for i := range d.candidates {
		if rate := d.router.Health.outliers.SuccessRate(d.candidates[i].Target.Key, now); i == 0 || rate.Share > best.Share {
			best = rate
		}
	}
	d.prefer(func(c *policy.Candidate) bool {
		return !d.router.Health.outliers.SuccessRate(c.Target.Key, now).Worse(best)
	})
}

// onTrial leaves one candidate with a trial due, if p may be it: the one that
// has waited for longest.
func (d *decider) onTrial(p *prompt, now time.Time) bool {
	r := d.router
	if len(p.Exclude) > 0 || p.QueryOnly || p.ChooseOnly || len(d.candidates) == 1 || r.Health.outliers.Discredited(p.Client, now) {
		return false
	}
	longest, first := -1, time.Time{}
	for i := range d.candidates {
		c := &d.candidates[i]
		since, due := r.Health.outliers.TrialDue(c.Target.Key, now)
		if !due || p.ID != "" && now.Sub(since) < trialOverdue || !r.Admission.hasCapacity(c.Target, c.Load, now) {
			continue
		}
		if longest < 0 || since.Before(first) {
			longest, first = i, since
		}
	}
	if longest < 0 {
		return false
	}
	d.candidates[0] = d.candidates[longest]
	d.candidates = d.candidates[:1]
	return true
}

// unlock ends the hold of the lock and logs what happened to workers meanwhile.
func (r *Router) unlock() {
	news, with := r.Health.outliers.TakeNews(), r.sharing
	r.mu.Unlock()
	for _, n := range news {
		if n.Out && with != nil {
			with.Ejection(n.Worker, n.For)
		}
		if r.log != nil {
			n.Log(r.log, r.names.Label(n.Worker.Worker))
		}
	}
}

// attempt is the booking as the detector sees it.
func (b *Booking) attempt() health.Attempt {
	return health.Attempt{Worker: b.worker, Generation: b.generation, Sent: b.sent, Trial: b.trial, Client: b.client}
}

// class is the kind of wait for the request's first byte.
func (b *Booking) class() health.Class {
	return health.ClassOf(b.leg, b.answeredWhole, b.asks.Output, b.asks.Task)
}

// answerBegins notes that the answer's first byte has come. The caller holds the
// lock.
func (b *Booking) answerBegins(now time.Time) {
	if b.remote || b.ended.Load() {
		return
	}
	if !b.answeredWhole { // of a whole answer, its length matters
		b.router.Health.outliers.Waited(b.attempt(), b.class(), now.Sub(b.sent), b.queued, 0)
	}
	b.router.Health.outliers.Heard(b.attempt(), now)
}

// judge reports to the detector how a booking ended, with an answer of that many tokens
// (0: unknown). The caller holds the lock.
func (b *Booking) judge(how policy.Ending, output int, now time.Time) {
	watch := b.router.Health.outliers
	switch {
	case b.remote:
	case how == policy.Finished:
		if waited := now.Sub(b.sent); b.answeredWhole || !b.computed {
			if b.computed {
				waited = b.first.Sub(b.sent)
			}
			watch.Waited(b.attempt(), b.class(), waited-health.LogprobTime(b.asks.Logprobs), b.queued, output)
		}
		watch.Succeeded(b.attempt(), now)
	case how == policy.Failed && b.fault == nil:
		watch.Failed(b.attempt(), health.Reported, "as its client reports", now)
	case how == policy.Failed && !b.fault.counted:
		watch.Failed(b.attempt(), b.fault.kind, b.fault.why, now)
	default:
		watch.Ended(b.attempt())
	}
}

// FailAs ends the booking of a request that failed on its worker; why describes the
// failure. It reports whether the worker is now ejected, also for this request's client.
func (b *Booking) FailAs(kind health.Kind, why string) (out bool) {
	b.locked(func(r *Router, now time.Time) {
		b.fault = &fault{kind: kind, why: why}
		b.finish(policy.Failed, 0, now)
		out = r.Health.outliers.IsOut(b.worker, now) && !r.Health.outliers.Panic() && !r.Health.outliers.Discredited(b.client, now)
	})
	return out
}

// Abort ends the booking of a request whose worker is known to be down or stuck; it
// does not count as a further failure.
func (b *Booking) Abort() {
	b.locked(func(r *Router, now time.Time) {
		b.fault = &fault{counted: true}
		b.finish(policy.Failed, 0, now)
	})
}

// Press ends the booking of a request after its worker requested a pause of that
// length; 0: of unknown length. It reports whether the worker has the pause.
func (b *Booking) Press(pause time.Duration) (out bool) {
	b.locked(func(r *Router, now time.Time) {
		b.finish(policy.Abandoned, 0, now)
		out = r.Health.outliers.Pressed(b.attempt(), pause, now)
	})
	return out
}

// Suspect ends the booking of a request that its worker refused with a status that
// either the client or the worker may have caused. It reports whether to ask
// another worker; then the caller must call Convict or Acquit.
func (b *Booking) Suspect(status int) (ask bool) {
	b.locked(func(r *Router, now time.Time) {
		b.finish(policy.Abandoned, 0, now)
		ask = r.Health.outliers.Suspect(b.attempt(), status, now)
	})
	return ask
}

// Convict records that another worker accepted the request that this one refused.
func (b *Booking) Convict(status int) {
	b.locked(func(r *Router, now time.Time) { r.Health.outliers.Convict(b.attempt(), status, now) })
}

// Acquit records that no other worker accepted it. agreed means that another one
// refused it with the same status.
func (b *Booking) Acquit(status int, agreed bool) {
	b.locked(func(r *Router, now time.Time) { r.Health.outliers.Acquit(b.attempt(), status, agreed, now) })
}

// Forgive withdraws the worker's failure of the request: others failed it in the
// same way.
func (b *Booking) Forgive() {
	b.locked(func(r *Router, now time.Time) { r.Health.outliers.Forgive(b.attempt(), now) })
}

// InFlight is a request at a worker as its sender sees it.
type InFlight struct {
	Booking *Booking
	Since   time.Time      // when it began to wait for its worker's next byte
	Begun   bool           // a byte of its answer has come
	Verdict health.Verdict // set by Look
}

// Look judges how long one worker has been silent: all are its requests in flight, and last is
// when a byte of any of its answers came.
func Look(all []InFlight, last time.Time) {
	for n := 0; len(all) > 0; all = all[n:] {
		r := all[0].Booking.router
		for n = 1; n < len(all) && all[n].Booking.router == r; n++ {
		}
		r.look(all[:n], last)
	}
}

// look is Look for the requests of this router.
func (r *Router) look(all []InFlight, last time.Time) {
	r.mu.Lock()
	defer r.unlock()
	now, waits := r.now(), false
	for i := range all {
		q := &all[i]
		r.Health.outliers.Answers(q.Booking.worker, q.Booking.generation, last)
		waits = waits || now.Sub(q.Since) >= health.LeastSilence
	}
	if !waits {
		return
	}
	list := make([]health.Waiting, 0, len(all))
	for i := range all {
		list = append(list, all[i].Booking.waiting(&all[i]))
	}
	r.Health.outliers.Silence(list, now)
	for i := range all {
		all[i].Verdict = list[i].Verdict
	}
}

// waiting is the booking as the detector sees it. The caller holds the lock.
func (b *Booking) waiting(q *InFlight) health.Waiting {
	w := health.Waiting{
		Attempt: b.attempt(), Class: b.class(), Task: b.asks.Task, Tokens: b.queued + b.asks.Unseen,
		Whole: b.answeredWhole && b.leg != kv.LegPrefill, Output: b.asks.Output, Logprobs: b.asks.Logprobs, Since: q.Since, Begun: q.Begun,
	}
	if b.leg == kv.LegDecode { // its prompt is computed elsewhere meanwhile
		w.Tokens += b.prompt
		r := b.router
		if at, up := r.fleet.target(b.worker); up && r.fleet.targets[at].Kind == kv.KindSGLang && !q.Begun {
			w.Since = r.now() // of the prefill worker: this one waits for it
		}
	}
	return w
}

// WorkerIsCordoned reports whether the worker gets no new requests.
func (b *Booking) WorkerIsCordoned() (cordoned bool) {
	b.locked(func(r *Router, _ time.Time) { cordoned = r.Health.isCordoned(b.worker.Worker) })
	return cordoned
}

// OthersTakeOver reports whether another worker that generates tokens gets new requests.
func (b *Booking) OthersTakeOver() (ready bool) {
	b.locked(func(r *Router, _ time.Time) {
		ready = r.fleet.has(func(t *kv.Target) bool {
			return t.Key.Worker != b.worker.Worker && t.Role != kv.RolePrefill && !r.Health.isCordoned(t.Key.Worker)
		})
	})
	return ready
}

// WorkerIsUp reports whether the incarnation that the request is booked on is up.
func (b *Booking) WorkerIsUp() bool {
	return b.router.IsUp(kv.Target{Key: b.worker, Generation: b.generation})
}

// WorkerRests reports whether the engine that the request is booked on computes nothing, as a trainer has paused it.
// Without a booking it is not known.
func (b *Booking) WorkerRests() bool {
	if b == nil {
		return false
	}
	state, _ := b.router.Engine(b.worker)
	return state.Rests() && b.WorkerIsUp()
}
