package batch

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

func TestTheLimitFollowsTheEndpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPace(64)
		defer p.stop()
		round := func(v verdict, asked time.Duration) (n int) {
			n = int(p.limit)
			for range n {
				if !p.enter(t.Context()) {
					t.Fatal("not entered")
				}
			}
			sent := time.Now()
			time.Sleep(time.Second)
			for range n {
				p.leave(v, sent, asked)
			}
			return n
		}
		for i, step := range []struct {
			v     verdict
			asked time.Duration
			sent  int // in the round
			pause time.Duration
		}{
			{answered, 0, 4, 0}, {answered, 0, 8, 0}, {answered, 0, 16, 0}, {broken, 0, 32, 0},
			{refused, 0, 32, firstPause}, // once for the whole round
			{answered, 0, 16, 0}, {answered, 0, 16, 0}, {answered, 0, 17, 0},
			{refused, 3 * time.Second, 18, 3 * time.Second}, {refused, 0, 9, 2 * firstPause}, {refused, 0, 4, 4 * firstPause},
			{refused, 0, 2, 8 * firstPause}, {refused, 0, 1, 16 * firstPause}, {refused, 0, 1, 32 * firstPause}, {refused, 0, 1, longestPause},
			{refused, 48 * time.Hour, 1, longestAsked}, {answered, 0, 1, 0}, {answered, 0, 2, 0},
		} {
			if n := round(step.v, step.asked); n != step.sent {
				t.Errorf("step %d: %d sent, want %d", i, n, step.sent)
			}
			if pause := max(0, time.Until(p.pause)); pause != step.pause {
				t.Errorf("step %d: pause of %s, want %s", i, pause, step.pause)
			}
		}
	})
}

func TestNothingIsSentInAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPace(4)
		defer p.stop()
		p.enter(t.Context())
		p.leave(refused, time.Now(), 7*time.Second)
		began := time.Now()
		p.enter(t.Context())
		if waited := time.Since(began); waited != 7*time.Second {
			t.Errorf("sent after %s", waited)
		}
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		p.enter(t.Context())
		if p.enter(short) {
			t.Error("three are in flight, the limit is 2")
		}
		p.leave(answered, began, 0)
		p.leave(answered, began, 0)
		if p.inFlight != 0 || len(p.waiting) != 0 {
			t.Errorf("%d in flight, %d wait", p.inFlight, len(p.waiting))
		}
	})
}

// TestRequestsThatGiveUpWaitingLeaveNoTrace lets requests enter, end and give up at random.
func TestRequestsThatGiveUpWaitingLeaveNoTrace(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		most := rapid.IntRange(1, 9).Draw(rt, "most")
		type request struct {
			comes, patience, takes int // ms
			v                      verdict
			asked                  int
		}
		requests := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) request {
			return request{
				rapid.IntRange(0, 5000).Draw(rt, "comes"), rapid.IntRange(1, 5000).Draw(rt, "patience"), rapid.IntRange(0, 1000).Draw(rt, "takes"),
				verdict(rapid.IntRange(0, 2).Draw(rt, "verdict")), rapid.IntRange(0, 2000).Draw(rt, "asked"),
			}
		}), 0, 60).Draw(rt, "requests")
		synctest.Test(t, func(t *testing.T) {
			p := newPace(most)
			defer p.stop()
			var all sync.WaitGroup
			for _, r := range requests {
				all.Go(func() {
					time.Sleep(time.Duration(r.comes) * time.Millisecond)
					ctx, stop := context.WithTimeout(t.Context(), time.Duration(r.patience)*time.Millisecond)
					defer stop()
					if !p.enter(ctx) {
						return
					}
					if n := p.flying(); n > most {
						t.Errorf("%d in flight, want at most %d", n, most)
					}
					sent := time.Now()
					time.Sleep(time.Duration(r.takes) * time.Millisecond)
					p.leave(r.v, sent, time.Duration(r.asked)*time.Millisecond)
				})
			}
			all.Wait()
			if p.inFlight != 0 || len(p.waiting) != 0 || p.limit < 1 || p.limit > float64(most) {
				t.Errorf("%d in flight, %d wait, limit %v", p.inFlight, len(p.waiting), p.limit)
			}
			time.Sleep(longestAsked)
			if !p.enter(t.Context()) {
				t.Error("nothing can be sent any more")
			}
		})
	})
}
