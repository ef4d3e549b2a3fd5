package router

import (
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// exclusion is why a worker does not get a request; 0: it may.
type exclusion uint8

// The exclusions, in the order in which they are looked for.
const (
	excludedCordoned  exclusion = 1 + iota // it gets no new requests until it is readmitted
	excludedSilent                         // registered, and its URL has never answered
	excludedLeg                            // its role excludes this leg
	excludedPinned                         // the request names another one
	excludedKind                           // its KV connector differs from that of the other leg's worker
	excludedModel                          // it does not serve the model
	excludedEngine                         // it does not run SGLang
	excludedUnlisted                       // it is not among the allowed workers of the request
	excludedRetry                          // this request has failed on it
	excludedBusy                           // beyond a busy threshold
	excludedPaused                         // a trainer has paused its engine, and others run
	excludedVersion                        // its weights are none that the request takes
	excludedEjected                        // for its failures
	excludedStill                          // it shows no sign of life
	excludedHeld                           // paused: it requested a pause, or is suspected
	excludedSession                        // the request's session stays with another one
	excludedTrial                          // an ejected one gets the request on trial
	excludedSlowStart                      // its share is still growing
	excludedFull                           // its engine runs as many requests as it can, and others could run this one
	excludedObjective                      // it is predicted to miss an objective of the request, and others are not
	excludedFailing                        // too many fail to eject it, and others fail less
)

var exclusionNames = [...]string{
	excludedCordoned: "cordoned", excludedSilent: "unanswered", excludedLeg: "leg", excludedPinned: "pinned", excludedKind: "kind",
	excludedModel: "model", excludedEngine: "engine", excludedUnlisted: "not_allowed", excludedRetry: "failed_this_request",
	excludedBusy: "busy", excludedPaused: "paused", excludedVersion: "version", excludedEjected: "ejected", excludedStill: "silent", excludedHeld: "held", excludedSession: "session",
	excludedTrial: "trial", excludedSlowStart: "slow_start", excludedFull: "no_seat", excludedObjective: "objective",
	excludedFailing: "failing",
}

// String returns the name of the exclusion; empty: there is none.
func (e exclusion) String() string { return exclusionNames[e] }

// excludes decides whether a worker may get the request, as far as that is the same whatever the
// workers' load and health: the exclusion of t, up to excludedRetry.
func (q *Request) excludes(t *kv.Target) exclusion {
	switch {
	case t.Cordoned:
		return excludedCordoned
	case t.Unanswered && !q.Unanswered:
		return excludedSilent
	case !t.Takes(q.Leg):
		return excludedLeg
	case q.Pinned != nil && *q.Pinned != t.Key:
		return excludedPinned
	case !q.Kinds.Allow(t.Kind):
		return excludedKind
	case !t.Serves(q.Model):
		return excludedModel
	case q.SGLang && !t.RunsSGLang():
		return excludedEngine
	case q.Allowed != nil && !slices.Contains(q.Allowed, t.Key.Worker):
		return excludedUnlisted
	case slices.Contains(q.Exclude, t.Key.Worker):
		return excludedRetry
	}
	return 0
}

// mayUse reports whether t may get the request.
func (q *Request) mayUse(t *kv.Target) bool { return q.excludes(t) == 0 }

// mightUse is mayUse before any worker has failed the request.
func (q *Request) mightUse(t *kv.Target) bool {
	why := q.excludes(t)
	return why == 0 || why == excludedRetry
}

// excludes decides whether the worker at that place may get p now: its exclusion, up to
// excludedHeld. Those from excludedEjected on get what no other worker can take.
func (r *Router) excludes(p *prompt, at int, now time.Time) exclusion {
	t := &r.fleet.targets[at]
	if why := p.Request.excludes(t); why != 0 {
		return why
	}
	if r.Admission.thresholds.Set() && r.Admission.busy(t.Key.Worker, now) {
		return excludedBusy
	}
	switch {
	case r.fleet.targetLoads[at].load.State.Rests():
		return excludedPaused
	case !r.fleet.takes(p.Versions, t.Key):
		return excludedVersion
	}
	return r.Health.excludes(t.Key, now)
}

// excludes is the part of Router.excludes that is the worker's health.
func (h *Health) excludes(w kv.WorkerKey, now time.Time) exclusion {
	switch {
	case h.outliers.Quiet():
		return 0
	case h.outliers.Ejected(w, now):
		return excludedEjected
	case h.outliers.IsSilent(w):
		return excludedStill
	case h.outliers.IsOut(w, now):
		return excludedHeld
	}
	return 0
}
