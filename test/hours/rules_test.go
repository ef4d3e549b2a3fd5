package hours

import (
	"context"
	"math/rand/v2"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
)

// lives passes a sign of life on.
func (w *world) lives(worker uint64, generation int) { w.router.Health.Lives(worker, generation) }

// supervisor checks the health of a worker as package workers does.
type supervisor struct {
	world      *world
	worker     *worker
	random     *rand.Rand
	generation int
	up         bool
	misses     health.Misses
	patience   time.Duration
	wake       chan struct{}
}

// Times of health checks, as in package workers.
const (
	checkEvery, missPause   = 2 * time.Second, 750 * time.Millisecond
	firstLimit, longestWait = 1500 * time.Millisecond, 6 * time.Second
	silenceTimeout          = time.Minute
)

func (w *worker) supervisor(s *supervisor) { w.supervised = s }

// checkSoon makes the next check due now.
func (s *supervisor) checkSoon() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run checks until ctx ends.
func (s *supervisor) run(ctx context.Context) {
	for ctx.Err() == nil {
		pause := checkEvery - time.Duration(s.random.Int64N(int64(checkEvery/5)))
		if s.up && s.misses.Count > 0 {
			pause = missPause
		}
		select {
		case <-time.After(pause):
		case <-s.wake:
		case <-ctx.Done():
			return
		}
		s.check()
	}
}

func (s *supervisor) check() {
	limit, began := max(s.patience, firstLimit), time.Now()
	err, late := s.worker.check(limit)
	now := time.Now()
	if late || err == nil {
		s.patience = health.NextLimit(limit, now.Sub(began), late, longestWait)
	}
	_, generation, _ := s.worker.is()
	w := s.world
	if err == nil {
		if s.up && generation != s.generation { // it was restarted between two checks
			s.down("restarted")
		}
		if !s.up {
			s.up, s.generation = true, generation
			w.up(s.worker, generation)
		} else if s.misses.Count > 0 {
			w.router.Health.Answers(s.worker.id, s.generation)
		}
		s.misses = health.Misses{}
		return
	}
	if s.misses.Add(began); !s.up {
		return
	}
	if err == errRefused {
		s.down("refused")
		return
	}
	var lived, busy time.Time
	if s.misses.Avoid(now) {
		lived, busy = w.router.Health.Missed(s.worker.id, s.generation, began)
	}
	if s.misses.Down(late, true, lived, busy, silenceTimeout, now) {
		s.down("silent")
	}
}

// down takes the worker out.
func (s *supervisor) down(why string) {
	w := s.world
	s.up = false
	w.router.Down(s.worker.key())
	w.proxy.Abort(s.worker.id, s.generation, why)
	faulty := s.worker.faultyNow(10 * time.Second)
	w.mu.Lock()
	defer w.mu.Unlock()
	if faulty {
		w.figures.Downs++
		return
	}
	w.figures.FalseDowns++
	w.bad("worker %d works, and is down: %s", s.worker.id, why)
}

// Route implements proxy.Chooser.
func (q *request) Route(exclude []uint64) (router.Decision, error) {
	return q.world.router.Route(q.ctx, q.asks(exclude))
}

// asks is the request as the router gets it.
func (q *request) asks(exclude []uint64) router.Request {
	return router.Request{NumTokens: q.prompt, Exclude: exclude, Client: "a", AnsweredWhole: !q.kind.streams, Work: q.work()}
}

// work is what explains that the engine is silent, as package openai estimates it.
func (q *request) work() router.Work {
	work := router.Work{Task: health.TaskOf(q.kind.route, true), Output: q.output}
	if q.kind.unbound {
		work.Output = 0
	}
	if q.kind.blocks {
		work.Logprobs = q.prompt << 17
	}
	return work
}

// Beside implements proxy.Chooser.
func (q *request) Beside(ctx context.Context, exclude []uint64) (router.Pair, error) {
	asks := q.asks(exclude)
	asks.Beside = true
	decision, err := q.world.router.Route(ctx, asks)
	return router.Pair{Decode: decision, Whole: router.WholeNoPair}, err
}

// Answers implements proxy.Chooser.
func (q *request) Answers(router.Pair) {}

// Continue implements proxy.Chooser.
func (q *request) Continue([]uint64, []uint32) (router.Decision, error) {
	return router.Decision{}, router.ErrNoWorker
}

// RoutePair implements proxy.Chooser.
func (q *request) RoutePair([]uint64, string) (router.Pair, error) {
	return router.Pair{}, router.ErrNoWorker
}

// Rebook implements proxy.Chooser.
func (q *request) Rebook(router.Decision, kv.WorkerKey) (router.Decision, error) {
	return router.Decision{}, router.ErrNoWorker
}

// IsUp implements proxy.Chooser.
func (q *request) IsUp(t kv.Target) bool { return q.world.router.IsUp(t) }
