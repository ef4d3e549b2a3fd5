package health

import (
	"testing"
	"time"
)

func TestMissedChecksAreSilenceNotProof(t *testing.T) {
	at := time.Unix(1000, 0)
	after := func(s float64) time.Time { return at.Add(time.Duration(s * float64(time.Second))) }
	for _, test := range []struct {
		name      string
		misses    int
		late, met bool
		lived     time.Time
		busy      time.Time
		now       float64
		down      bool
	}{
		{"a busy server", 10, true, true, time.Time{}, time.Time{}, 15, false},
		{"a hung server", 20, true, true, time.Time{}, time.Time{}, 60, true},
		{"answers go on", 20, true, true, after(59), time.Time{}, 60, false},
		{"a server that is busy for long", 20, true, true, time.Time{}, after(30), 89, false},
		{"a server that was busy for long, and is hung", 20, true, true, time.Time{}, after(30), 90, true},
		{"connections break while it is busy", 3, false, true, time.Time{}, after(30), 3, true},
		{"answers went on, and ended", 30, true, true, after(30), time.Time{}, 90, true},
		{"it lived before", 5, true, true, after(-100), time.Time{}, 59, false},
		{"connections break", 3, false, true, time.Time{}, time.Time{}, 3, true},
		{"connections break now and then", 2, false, true, time.Time{}, time.Time{}, 3, false},
		{"connections break beside answers", 9, false, true, after(1), time.Time{}, 3, false},
		{"it was never met", 2, true, false, time.Time{}, time.Time{}, 6, true},
	} {
		var m Misses
		for i := range test.misses {
			m.Add(after(float64(i)))
		}
		if !m.Since.Equal(at) || m.Avoid(after(1)) != (test.misses >= 2) {
			t.Errorf("%s: %+v", test.name, m)
		}
		if down := m.Down(test.late, test.met, test.lived, test.busy, time.Minute, after(test.now)); down != test.down {
			t.Errorf("%s: down %v", test.name, down)
		}
	}
	if m := (Misses{Count: 1, Since: at}); m.Avoid(after(3)) || !m.Avoid(after(5)) {
		t.Error("a long check counts as two short ones")
	}
	if m := (Misses{Count: 50, Since: at}); m.Down(true, true, time.Time{}, time.Time{}, 0, after(1e6)) {
		t.Error("down without a limit")
	}
}

func TestTheLimitOfChecksFollowsTheWorker(t *testing.T) {
	const most = 6 * time.Second
	limit := 1500 * time.Millisecond
	for _, want := range []time.Duration{3 * time.Second, most, most} {
		if limit = NextLimit(limit, limit, true, most); limit != want {
			t.Errorf("%s, want %s", limit, want)
		}
	}
	if limit = NextLimit(limit, 20*time.Millisecond, false, most); limit != 60*time.Millisecond {
		t.Errorf("%s after a fast answer", limit)
	}
}
