package health

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// newCapped is newBench with a maximum percentage of ejected workers.
func newCapped(workers, percent int) *bench {
	settings := testkit.Defaults[Settings]()
	settings.MaxEjectionPercent = percent
	b := &bench{Detector: New(settings), now: time.Unix(1_000_000, 0), random: rand.New(rand.NewPCG(1, 1))}
	for i := range workers {
		b.Join(key(i), 1, kv.RoleBoth, b.now)
	}
	return b
}

// TestNoMoreWorkersAreOutThanMayBe covers every kind of failure.
func TestNoMoreWorkersAreOutThanMayBe(t *testing.T) {
	for _, test := range []struct{ workers, percent, want int }{
		{4, 50, 2}, {4, 10, 1}, {4, 0, 0}, {4, 100, 4}, {1, 50, 0}, {2, 50, 1}, {2, 10, 1}, {3, 50, 1}, {3, 67, 2}, {10, 25, 2},
	} {
		for kind := range kinds {
			t.Run(fmt.Sprintf("%d %% of %d, %s", test.percent, test.workers, kind), func(t *testing.T) {
				b := newCapped(test.workers, test.percent)
				for range 4 {
					for i := range test.workers {
						b.fail(i, kind)
					}
				}
				out, _ := b.out(kv.RoleBoth)
				if out != test.want {
					t.Errorf("%d are out, want %d", out, test.want)
				}
				if spares := out < test.workers; b.Panic() != spares {
					t.Errorf("panic: %v", b.Panic())
				}
				for i := range test.workers {
					if b.IsOut(key(i), b.now) == b.Spared(key(i), b.now) {
						t.Errorf("worker %d is out: %v, and spared: the same", i, b.IsOut(key(i), b.now))
					}
				}
			})
		}
	}
}

func TestASparedWorkerIsOutOnceThereIsRoom(t *testing.T) {
	b := newCapped(4, 10)
	for i := range 2 {
		for range 3 {
			b.fail(i, Status)
		}
	}
	if !b.IsOut(key(0), b.now) || !b.Spared(key(1), b.now) || b.SuccessRate(key(1), b.now).Share != 0 || b.SuccessRate(key(2), b.now).Share != 1 {
		t.Fatal("one is to be out, the other spared")
	}
	b.pass(5 * time.Second)
	b.good(0)
	b.fail(1, Status)
	if b.Spared(key(1), b.now) || !b.IsOut(key(1), b.now) {
		t.Error("the other is not out though the first is back")
	}
}

func TestASparedWorkerIsLikeOthersAgain(t *testing.T) {
	for name, does := range map[string]func(b *bench){
		"after an answer":                     func(b *bench) { b.good(1) },
		"after some time":                     func(b *bench) { b.pass(sparedFor) },
		"once its last failure is taken back": func(b *bench) { b.Forgive(b.sent(1), b.now) },
	} {
		b := newCapped(4, 10)
		for i := range 2 {
			for range 3 {
				b.fail(i, Status)
			}
		}
		if !b.Spared(key(1), b.now) {
			t.Fatal("it is not spared")
		}
		if does(b); b.Spared(key(1), b.now) || b.Panic() {
			t.Errorf("%s: it is still spared", name)
		}
	}
}

// TestWorkersThatGoDownBringOthersBack: a worker that is down is not ejected, and the cap
// holds for the rest.
func TestWorkersThatGoDownBringOthersBack(t *testing.T) {
	b := newCapped(4, 50)
	for i := range 2 {
		for range 3 {
			b.fail(i, Status)
		}
		b.pass(time.Second)
	}
	b.Leave(key(3), b.now)
	if out, all := b.out(kv.RoleBoth); out != 1 || all != 3 || b.IsOut(key(0), b.now) || !b.IsOut(key(1), b.now) {
		t.Errorf("%d of %d are out; the one that was out first is to be back", out, all)
	}
	b.Leave(key(2), b.now)
	b.Leave(key(0), b.now)
	if out, all := b.out(kv.RoleBoth); out != 0 || all != 1 {
		t.Errorf("%d of %d are out", out, all)
	}
}

func TestAStuckWorkerThatIsSparedIsLeft(t *testing.T) {
	b := newCapped(3, 34)
	for range 3 {
		b.fail(2, Status)
	}
	b.good(1)
	if q := b.waits(0, Waiting{}, 2*b.settings.SilenceTimeout); b.judged(q) != GiveUp || b.IsSilent(key(0)) && b.level(0) == Out {
		t.Errorf("level %d", b.level(0))
	}
}

func TestWhoIsWorse(t *testing.T) {
	for _, test := range []struct {
		rate, best Rate
		want       bool
	}{
		{Rate{0, 3}, Rate{Share: 1}, true},
		{Rate{0.5, 2}, Rate{1, 2}, true},
		{Rate{0.85, 1000}, Rate{0.86, 1000}, false},
		{Rate{0, 5}, Rate{0.2, 5}, false},
		{Rate{0, 200}, Rate{0.2, 200}, true}, // most requests fail everywhere, here all do
		{Rate{0.15, 20}, Rate{0.2, 20}, false},
		{Rate{0, 9}, Rate{0.2, 1000}, false},
		{Rate{0, 1000}, Rate{0, 1000}, false},
		{Rate{1, 1000}, Rate{1, 1000}, false},
		{Rate{}, Rate{}, false},
	} {
		if got := test.rate.Worse(test.best); got != test.want {
			t.Errorf("%+v beside %+v: worse %v", test.rate, test.best, got)
		}
	}
}

// TestEachRoleHasItsCap: failing decode workers must not keep a failing prefill worker in.
func TestEachRoleHasItsCap(t *testing.T) {
	b := newBench(4)
	for i, role := range []kv.Role{kv.RolePrefill, kv.RolePrefill, kv.RoleDecode, kv.RoleDecode} {
		b.Join(key(i), 1, role, b.now)
	}
	for _, i := range []int{2, 3, 0} {
		for range b.settings.EjectAfter {
			b.fail(i, Status)
		}
	}
	if !b.IsOut(key(2), b.now) || b.IsOut(key(3), b.now) || !b.IsOut(key(0), b.now) || !b.Panic() {
		t.Errorf("out: %v, %v, %v; panic %v", b.IsOut(key(2), b.now), b.IsOut(key(3), b.now), b.IsOut(key(0), b.now), b.Panic())
	}
}
