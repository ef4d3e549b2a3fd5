package router

import (
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// TestRequestsOfOthersAreSeen: policy work sent its own behind a queue of them.
func TestRequestsOfOthersAreSeen(t *testing.T) {
	w := kv.WorkerKey{Worker: 3}
	at := func(s float64) time.Time {
		return time.Unix(1_000_000, 0).Add(time.Duration(s * float64(time.Second)))
	}
	l := newLoads()
	publish := func(s float64, running, waiting, want int) {
		t.Helper()
		l.publish(w, policy.Published{Running: running, Waiting: waiting, At: at(s)}, at(s))
		if got := l.get(w, at(s)).Foreign; got != want {
			t.Errorf("at %g s: %d requests are others', want %d", s, got, want)
		}
	}
	publish(0, 2, 6, 8)
	publish(0.5, 0, 0, 0)
	var own []*Booking
	for range 4 {
		b := &Booking{worker: w}
		l.begin(b, at(1))
		own = append(own, b)
	}
	publish(1.1, 3, 1, 0)
	publish(1.2, 4, 6, 6)
	for _, b := range own {
		l.firstToken(b, at(2))
		l.end(b, at(2))
	}
	publish(2.1, 2, 1, 0) // as things stood before they ended
	publish(12, 2, 1, 0)
	publish(16, 2, 1, 3)
	if got := l.get(w, at(16).Add(loadFreshFor)).Foreign; got != 0 {
		t.Errorf("%d of what is no longer believed", got)
	}
	l.silence(w)
	publish(17, 0, 1, 1)
}
