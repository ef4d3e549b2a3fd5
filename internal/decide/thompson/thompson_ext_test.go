package thompson_test

import (
	"context"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
	"kvrouter/internal/testkit"
)

// world are workers of given speeds in virtual time: a closed loop of
// requests, each to the first token and then so many tokens.
type world struct {
	now     time.Time
	router  *router.Router
	policy  *thompson.Policy
	slow    []float64 // by worker: how many times as long all takes
	sent    []int     // by worker
	flights []flight
}

type flight struct {
	at      time.Time
	first   bool // its first token comes then; else its end
	booking *router.Booking
	rest    time.Duration
}

func newWorld(t testing.TB, fixes string, seed uint64, slow ...float64) *world {
	settings := testkit.Defaults[thompson.Settings]()
	settings.ThompsonOverride = []string{"fixes=" + fixes}
	policy, err := thompson.New(settings)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{now: time.Unix(1_000_000_000, 0), policy: policy, slow: slow, sent: make([]int, len(slow))}
	w.router = router.New(testkit.Defaults[router.Settings](), router.Deps{Index: radix.NewTree(), Policy: policy, BlockSize: 16, Seed: seed, Now: func() time.Time { return w.now }})
	for i := range slow {
		w.router.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1})
	}
	return w
}

// run sends so many requests, some in flight at a time, and returns how many
// each worker got of them.
func (w *world) run(t testing.TB, requests, inFlight int) []int {
	before := append([]int(nil), w.sent...)
	for range requests {
		for len(w.flights) >= inFlight {
			w.step()
		}
		d, err := w.router.Route(context.Background(), router.Request{NumTokens: 400})
		if err != nil {
			t.Fatal(err)
		}
		i := d.Target.Key.Worker
		w.sent[i]++
		unit := time.Duration(w.slow[i] * float64(time.Millisecond))
		w.flights = append(w.flights, flight{at: w.now.Add(50 * unit), first: true, booking: d.Booking, rest: 20 * 10 * unit})
	}
	got := make([]int, len(w.sent))
	for i := range got {
		got[i] = w.sent[i] - before[i]
	}
	return got
}

// step lets happen what is next.
func (w *world) step() {
	next := 0
	for i, f := range w.flights {
		if f.at.Before(w.flights[next].at) {
			next = i
		}
	}
	f := &w.flights[next]
	w.now = f.at
	if f.first {
		f.booking.FirstToken()
		f.first, f.at = false, f.at.Add(f.rest)
		return
	}
	f.booking.Finish(21)
	w.flights = append(w.flights[:next], w.flights[next+1:]...)
}

// slowAndRecovered has one of three workers take 3 times as long for 1,000
// requests, and as long as the others from then on. It returns its shares of the
// last 500 of those, of the third hundred from then on and of the 300 after it.
func slowAndRecovered(t *testing.T, fixes string, inFlight int, seed uint64) (slow, recovered, later float64) {
	w := newWorld(t, fixes, seed, 1, 1, 3)
	w.run(t, 500, inFlight)
	slow = float64(w.run(t, 500, inFlight)[2]) / 500
	w.slow[2] = 1
	w.run(t, 200, inFlight)
	recovered = float64(w.run(t, 100, inFlight)[2]) / 100
	return slow, recovered, float64(w.run(t, 300, inFlight)[2]) / 300
}

const slowWorkerSeeds = 30

func TestLearnsASlowWorkerAndItsRecovery(t *testing.T) {
	for _, inFlight := range []int{1, 8} {
		mean := 0.0
		for seed := range uint64(slowWorkerSeeds) {
			slow, recovered, later := slowAndRecovered(t, "all", inFlight, seed+1)
			if slow >= 0.15 || later < 0.25 {
				t.Errorf("seed %d, %d in flight: a worker 3 times as slow gets %.3f of the requests, and %.3f once it has become as fast as the others", seed+1, inFlight, slow, later)
			}
			mean += recovered / slowWorkerSeeds
		}
		if mean < 0.2 {
			t.Errorf("%d in flight: it gets %.3f of the third hundred requests after it has become as fast as the others", inFlight, mean)
		}
	}
}

// TestFixesAblation makes the table of docs/benchmarks.md.
func TestFixesAblation(t *testing.T) {
	if os.Getenv("KVROUTER_ABLATION") == "" {
		t.Skip("prints a table; KVROUTER_ABLATION=1 runs it")
	}
	sets := [][2]string{{"all", "all"}, {"none", "none"}}
	fixes := []string{"worker-baseline", "forgetting", "load-sign", "outstanding", "pin-ttl", "feedback", "cold-start"}
	for i, fix := range fixes {
		without := slices.Concat(fixes[:i], fixes[i+1:])
		sets = append(sets, [2]string{"without " + fix, strings.Join(without, ",")})
	}
	for _, set := range sets {
		for _, inFlight := range []int{1, 8} {
			slow, recovered := 0.0, 0.0
			for seed := range uint64(slowWorkerSeeds) {
				s, r, _ := slowAndRecovered(t, set[1], inFlight, seed+1)
				slow, recovered = slow+s/slowWorkerSeeds, recovered+r/slowWorkerSeeds
			}
			t.Logf("%s, %d in flight: slow %.1f %%, recovered %.0f %%", set[0], inFlight, 100*slow, 100*recovered)
		}
	}
}

func TestWithoutFixesDoesNotLearnConstantSlowness(t *testing.T) {
	for _, fixes := range []string{"none", "forgetting,load-sign,outstanding,pin-ttl,feedback"} {
		w := newWorld(t, fixes, 1, 1, 1, 3)
		w.run(t, 500, 1)
		if got := w.run(t, 1000, 1); got[2] < 250 {
			t.Errorf("fixes %s: a worker 3 times as slow gets %v of 1000", fixes, got)
		}
		for _, s := range w.policy.Stats().Workers {
			if mean := s.Alpha / (s.Alpha + s.Beta); mean < 0.45 || mean > 0.55 {
				t.Errorf("fixes %s: worker %v has a mean reward of %.3f, want about 0.5", fixes, s.Worker, mean)
			}
		}
	}
}

func TestIsDeterministic(t *testing.T) {
	for _, fixes := range []string{"all", "none"} {
		run := func(seed uint64) ([]int, thompson.Stats) {
			w := newWorld(t, fixes, seed, 1, 2, 3, 1)
			w.run(t, 400, 8)
			return w.sent, w.policy.Stats()
		}
		sent, stats := run(7)
		again, statsAgain := run(7)
		if !reflect.DeepEqual(sent, again) || !reflect.DeepEqual(stats, statsAgain) {
			t.Errorf("fixes %s: two runs with one seed differ: %v %v", fixes, sent, again)
		}
		differ := false
		for seed := uint64(8); seed < 12 && !differ; seed++ {
			other, _ := run(seed)
			differ = !reflect.DeepEqual(sent, other)
		}
		if !differ {
			t.Errorf("fixes %s: another seed changes nothing", fixes)
		}
	}
}
