package guard

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestWhatReachesALimitRunsForATenthOfTheTimeAtMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Pause
		busy, began := time.Duration(0), time.Now()
		for time.Since(began) < time.Minute {
			if p.On(7) {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			time.Sleep(200 * time.Millisecond)
			busy += 200 * time.Millisecond
			p.Hit(200*time.Millisecond, 7)
		}
		if share := float64(busy) / float64(time.Since(began)); share > 0.1 || share < 0.08 {
			t.Errorf("it ran for %.0f %% of the time", 100*share)
		}
		if want := uint64(busy / (200 * time.Millisecond)); p.Hits() != want {
			t.Errorf("%d hits counted of %d", p.Hits(), want)
		}
	})
}

func TestWithoutAHitThereIsNoPause(t *testing.T) {
	if p := new(Pause); p.On(1) || p.Hits() != 0 {
		t.Error("it is paused")
	}
}

// TestSmallerInputsGoOn: one client's large request does not block those of others.
func TestSmallerInputsGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Pause
		p.Hit(time.Second, 1000)
		if p.On(999) || !p.On(1000) || !p.On(2000) {
			t.Error("after one of 1,000 bytes")
		}
		p.Hit(time.Second, 100)
		p.Hit(time.Millisecond, 500)
		if p.On(99) || !p.On(100) {
			t.Error("after one of 100 bytes")
		}
		time.Sleep(10 * time.Second)
		if p.On(5000) {
			t.Error("the pause does not end")
		}
		p.Hit(time.Second, 2000)
		if p.On(1999) || !p.On(2000) {
			t.Error("the next pause remembers the first")
		}
	})
}
