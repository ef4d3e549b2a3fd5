package simulate

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
)

// Kinds of faults.
const (
	faultError  = "error"  // answers an HTTP status of a server's fault
	faultRefuse = "refuse" // takes no connection; running requests are answered
	faultHang   = "hang"   // takes requests and sends nothing
	faultSlow   = "slow"   // computes slowly
	// A trainer pauses the engine, as vLLM's mode keep does, and with faultUpdate empties its cache: no fault, but known to
	// the routers.
	faultPause  = "pause"
	faultUpdate = "update"
)

// fault is what goes wrong with a worker for a while.
type fault struct {
	worker    int
	at, until time.Duration // since the run began
	kind      string
	rate      float64 // share of the requests, or with faultSlow of the speed that is left

	held   []*flight     // that get no answer
	first  int           // requests whose first attempt it met
	met    int           // attempts that it met
	lost   int           // requests that it met first, and that were lost
	known  time.Duration // from its beginning until all routers had taken the worker out
	back   time.Duration // from its end until they had it back
	out    bool          // known is set
	ranOff bool          // back is set
}

// parseFault reads a fault, such as worker=2 at=60s for=30s kind=error rate=0.3.
func parseFault(text string, workers int) (*fault, error) {
	const example = "worker=2 at=60s for=30s kind=error|refuse|hang|slow|pause|update rate=0.3"
	f := &fault{worker: -1, at: -1, rate: 1}
	long := time.Duration(-1)
	for _, field := range strings.Fields(text) {
		key, value, _ := strings.Cut(field, "=")
		var err error
		switch key {
		case "worker":
			f.worker, err = strconv.Atoi(value)
		case "at":
			f.at, err = span(value)
		case "for":
			long, err = span(value)
		case "kind":
			f.kind = value
		case "rate":
			if f.rate, err = strconv.ParseFloat(value, 64); err != nil || !(f.rate >= 1e-3 && f.rate <= 1) {
				err = errors.New("give a number from 0.001 to 1")
			}
		default:
			err = errors.New("it is not known")
		}
		if err != nil {
			return nil, fmt.Errorf("--faults %q: %s: %w; give %s", text, field, err, example)
		}
	}
	f.until = f.at + long
	switch {
	case f.worker < 0 || f.worker >= workers:
		return nil, fmt.Errorf("--faults %q: give worker=N, from 0 to %d", text, workers-1)
	case f.at < 0 || long <= 0 || !slices.Contains([]string{faultError, faultRefuse, faultHang, faultSlow, faultPause, faultUpdate}, f.kind):
		return nil, fmt.Errorf("--faults %q: give %s", text, example)
	}
	return f, nil
}

// parseFaults reads the faults of a run. Two of one worker cannot be at one time.
func parseFaults(texts []string, workers int) (faults []*fault, err error) {
	for _, text := range texts {
		f, err := parseFault(text, workers)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(faults, func(o *fault) bool { return o.worker == f.worker && o.at < f.until && f.at < o.until }) {
			return nil, fmt.Errorf("--faults %q: worker %d has another fault in that time", text, f.worker)
		}
		faults = append(faults, f)
	}
	return faults, nil
}

// planFaults has the faults begin and end in their time.
func (s *simulator) planFaults() {
	s.drawFault = rand.New(rand.NewPCG(s.Seed, 5))
	for _, f := range s.faults {
		begin := func() {
			s.workers[f.worker].fault = f
			if f.pauses() {
				s.control(f.worker, kv.EngineChange{Set: kv.Paused})
			}
		}
		if f.at == 0 {
			begin() // before anything is sent
		} else {
			s.after(f.at, begin)
		}
		var end func()
		end = func() {
			if f.pauses() && s.workers[f.worker].inPass { // the pause is shorter than the pass that it waits for
				s.after(time.Millisecond, end)
				return
			}
			s.workers[f.worker].fault = nil
			for _, flight := range f.held {
				if flight.booking != nil && !flight.booking.Ended() {
					s.submit(flight)
				}
			}
			f.held = nil
			if f.pauses() {
				s.control(f.worker, kv.EngineChange{Clear: kv.Paused, Resets: f.kind == faultUpdate})
			}
			s.wake(f.worker)
			s.noteHealth(f.worker)
		}
		s.after(f.until, end)
	}
}

// pauses reports whether a trainer pauses the engine.
func (f *fault) pauses() bool { return f.kind == faultPause || f.kind == faultUpdate }

// control does what a trainer's call does to a worker, and has the routers know.
func (s *simulator) control(worker int, change kv.EngineChange) {
	if change.Resets { // those that run lose their blocks
		simulated := s.workers[worker].engine
		simulated.Retract()
		simulated.Reset()
		s.workers[worker].reset = true
	}
	for _, r := range s.routers {
		r.Health.Control(uint64(worker), change)(true)
	}
}

// tellOfReset publishes that a worker's cache was emptied before its next pass begins, as vLLM does.
func (s *simulator) tellOfReset(w int) {
	worker := &s.workers[w]
	if running, waiting, _ := worker.engine.Load(); !worker.reset || running+waiting == 0 {
		return
	}
	worker.reset = false
	if !s.follows {
		return
	}
	s.lagging = append(s.lagging, lateEvent{due: s.now + s.EventLag, worker: w, cleared: true})
	if s.EventLag == 0 {
		s.catchUp()
	}
}

// deliver brings a flight to its worker, in any state.
func (s *simulator) deliver(flight *flight) {
	if len(s.faults) == 0 {
		s.submit(flight)
		return
	}
	worker := &s.workers[flight.worker]
	worker.flights = append(worker.flights, flight)
	f := worker.fault
	if f == nil || f.kind == faultSlow || f.pauses() || f.rate < 1 && s.drawFault.Float64() >= f.rate {
		s.submit(flight)
		s.watch(flight)
		return
	}
	f.met++
	if len(flight.simulated.exclude) == 0 {
		f.first++
		flight.simulated.hit = f
	}
	switch f.kind {
	case faultError:
		s.failed(flight, health.Status, "answered 500 Internal Server Error")
	case faultRefuse:
		s.failed(flight, health.Refused, "connection refused")
	default:
		f.held = append(f.held, flight)
		s.watch(flight)
	}
}

// stopped reports whether a worker begins no pass now.
func (w *worker) stopped() bool {
	return w.fault != nil && (w.fault.kind == faultHang && w.fault.rate == 1 || w.fault.pauses())
}

// passTime is the time that a pass takes that a healthy worker does in d.
func (w *worker) passTime(d time.Duration) time.Duration {
	if w.fault != nil && w.fault.kind == faultSlow {
		return time.Duration(float64(d) / w.fault.rate)
	}
	return d
}

// watch has a worker's flights judged, as the proxy does.
func (s *simulator) watch(f *flight) {
	if w := &s.workers[f.worker]; !w.watched {
		w.watched = true
		s.after(health.LookEvery, func() { s.look(f.worker) })
	}
}

// flies reports whether a flight is under way.
func (f *flight) flies() bool { return f.booking != nil && !f.booking.Ended() }

// look judges the silence of a worker. What waits there in doubt is sent elsewhere: unlike the
// proxy, the simulator does not leave it there, too, as a hung worker never answers first. What
// is on a worker that is stuck ends.
func (s *simulator) look(worker int) {
	w := &s.workers[worker]
	flights := slices.DeleteFunc(slices.Clone(w.flights), func(f *flight) bool { return !f.flies() })
	slices.SortStableFunc(flights, func(a, b *flight) int { return cmp.Compare(a.simulated.router, b.simulated.router) })
	if w.watched = len(flights) > 0; !w.watched {
		return
	}
	s.after(health.LookEvery, func() { s.look(worker) })
	all := make([]router.InFlight, len(flights))
	at := func(since time.Duration) time.Time { return s.clock().Add(since - s.now) }
	for i, f := range flights {
		all[i] = router.InFlight{Booking: f.booking, Since: at(max(f.sent, f.heard)), Begun: f.first > 0}
	}
	router.Look(all, at(w.heard))
	s.noteHealth(worker)
	for i, f := range flights {
		switch {
		case !f.flies():
		case all[i].Verdict == health.GiveUp:
			s.letGo(f, true)
		case all[i].Verdict == health.Hedge && f.first == 0 && f.simulated.tries.Left(s.Retry.Retries):
			s.letGo(f, false)
		}
	}
}

// letGo takes a flight off a worker, which may be or is known to be stuck. One without a first
// byte is sent elsewhere, in doubt if the retry budget allows it.
func (s *simulator) letGo(f *flight, stuck bool) {
	e, begun := f.simulated, f.first > 0
	if !stuck && !s.mayRetry(e, false) {
		return
	}
	s.workers[f.worker].engine.Abort(&f.Request)
	if stuck {
		f.booking.Abort()
	} else {
		f.booking.End()
	}
	s.land(f)
	s.wake(f.worker)
	if begun {
		s.lose(e, lostCut)
		return
	}
	e.exclude = append(e.exclude, uint64(f.worker))
	s.retryOr(e, !stuck || e.tries.LetGo(s.Retry.Retries) || s.mayRetry(e, false))
}

// land takes a flight from those on their way.
func (s *simulator) land(f *flight) {
	if len(s.faults) == 0 {
		return
	}
	w := &s.workers[f.worker]
	if i := slices.Index(w.flights, f); i >= 0 {
		w.flights = slices.Delete(w.flights, i, i+1)
	}
}

// noteHealth notes when a worker's fault became known to all routers, and when they
// forgot it after its end.
func (s *simulator) noteHealth(worker int) {
	for _, f := range s.faults {
		if f.worker != worker || s.now < f.at || f.ranOff || s.now > f.until && !f.out {
			continue
		}
		out, in := true, true
		for _, r := range s.routers {
			records, _ := r.Health.Records()
			state := records[worker].State
			out, in = out && (state == health.StateOut || state == health.StateSilent), in && (state == health.StateIn || state == health.StateBack)
		}
		switch {
		case out && !f.out && s.now <= f.until:
			f.out, f.known = true, s.now-f.at
		case in && f.out && s.now >= f.until:
			f.ranOff, f.back = true, s.now-f.until
		}
	}
}

// FaultReport is the effect of a fault on the requests.
type FaultReport struct {
	Worker   int      `json:"worker"`
	Kind     string   `json:"kind"`
	AtS      float64  `json:"at_s"`
	ForS     float64  `json:"for_s"`
	Rate     float64  `json:"rate"`
	First    int      `json:"first_attempts"`          // requests whose first attempt was affected
	Attempts int      `json:"attempts"`                // affected attempts
	Lost     int      `json:"lost"`                    // lost ones of the requests in First
	KnownS   *float64 `json:"known_after_s,omitempty"` // time until all routers had ejected or avoided the worker; nil: none did
	// time from its end until they had readmitted it; nil: not before the end of the run, or never ejected
	BackS *float64 `json:"back_after_s,omitempty"`
}

// faultReports are those of a run.
func (s *simulator) faultReports() (reports []FaultReport) {
	for _, f := range s.faults {
		report := FaultReport{Worker: f.worker, Kind: f.kind, AtS: f.at.Seconds(), ForS: (f.until - f.at).Seconds(), Rate: f.rate, First: f.first,
			Attempts: f.met, Lost: f.lost}
		if known := f.known.Seconds(); f.out {
			report.KnownS = &known
		}
		if back := f.back.Seconds(); f.ranOff {
			report.BackS = &back
		}
		reports = append(reports, report)
	}
	slices.SortStableFunc(reports, func(a, b FaultReport) int { return cmp.Compare(a.AtS, b.AtS) })
	return reports
}

// span reads a time of at most a day.
func span(value string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d < 0 || d > 24*time.Hour {
		return 0, errors.New("give a time such as 2s or 50ms")
	}
	return d, nil
}
