package proxy

import (
	"context"
	"io"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/health"
	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
)

// dripping is a stream of a token each 100 ms for so long, which pauses at the worker's
// pauses: from, until, in turn, counted from start. A pause without an end lasts for ever.
func dripping(ctx context.Context, start time.Time, whole time.Duration, pauses ...time.Duration) (*http.Response, string, error) {
	body, begun := io.Pipe() // nothing but its Close ends a read
	stop := context.AfterFunc(ctx, func() { begun.CloseWithError(context.Cause(ctx)) })
	go func() {
		defer stop()
		for began := time.Now(); time.Since(began) < whole; time.Sleep(100 * time.Millisecond) {
			for i := 0; i < len(pauses); i += 2 {
				if at := time.Since(start); at >= pauses[i] && (i+1 == len(pauses) || at < pauses[i+1]) {
					if i+1 == len(pauses) {
						<-ctx.Done()
						return
					}
					time.Sleep(pauses[i+1] - at)
				}
			}
			if _, err := io.WriteString(begun, "data: "+testkit.TokenEvent+"\n\n"); err != nil {
				return
			}
		}
		io.WriteString(begun, "data: [DONE]\n\n")
		begun.Close()
	}()
	return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: body}, "", nil
}

// TestRunningAnswersThatFallSilent holds when a worker counts as stuck whose answers have
// begun. Nothing can be retried.
func TestRunningAnswersThatFallSilent(t *testing.T) {
	const s, slack = time.Second, 3 * time.Second
	for name, c := range map[string]struct {
		answers int
		pauses  []time.Duration // of worker 0
		others  time.Duration   // for which other workers answer
		out     time.Duration   // when worker 0 is ejected, about; 0: it is not
	}{
		"for ever":                              {flowing, []time.Duration{5 * s}, 60 * s, 15 * s},
		"for ever, but two alone":               {flowing - 1, []time.Duration{5 * s}, 60 * s, 0},
		"for a while":                           {flowing, []time.Duration{5 * s, 14 * s}, 60 * s, 0},
		"while no other worker answers":         {flowing, []time.Duration{5 * s, 40 * s}, 5 * s, 0},
		"for ever, after a gap":                 {flowing, []time.Duration{2 * s, 7 * s, 10 * s}, 60 * s, 33 * s},
		"for less than four times a former gap": {flowing, []time.Duration{2 * s, 7 * s, 10 * s, 25 * s}, 60 * s, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				g := newGatewayFleet(t, 3, func(to kv.Target, ctx context.Context) (*http.Response, string, error) {
					if to.Key.Worker > 0 {
						return answersAfter(ctx, 20*time.Millisecond)
					}
					return dripping(ctx, start, 50*s, c.pauses...)
				})
				stop := g.busy(t)
				time.AfterFunc(c.others, stop)
				var all sync.WaitGroup
				failed := make([]error, c.answers)
				limit, cancel := context.WithTimeout(t.Context(), 70*s)
				defer cancel()
				for i := range failed {
					all.Go(func() { _, failed[i] = g.forward(limit, 0) })
				}
				is := func() bool { records, _ := g.router.Outliers(); return records[0].State == health.StateOut }
				if c.out > 0 {
					time.Sleep(c.out - slack)
					if is() {
						t.Errorf("ejected before %s", c.out-slack)
					}
					time.Sleep(2 * slack)
					if !is() {
						t.Errorf("not ejected after %s", c.out+slack)
					}
					time.Sleep(2 * s) // of silence are still to come
				} else {
					for time.Since(start) < 45*s {
						time.Sleep(s)
						if is() {
							t.Fatalf("ejected after %s", time.Since(start))
						}
					}
				}
				over := time.Now()
				all.Wait()
				for i, err := range failed {
					if c.out > 0 && (err == nil || time.Since(over) > 2*s) {
						t.Errorf("answer %d ended %s after the ejection: %v", i, time.Since(over), err)
					} else if c.out == 0 && len(c.pauses) == 2 && err != nil {
						t.Errorf("answer %d: %v", i, err)
					}
				}
				stop()
			})
		})
	}
}

// TestBehindAGatewayATrialAtAStuckWorkerEnds though the baseline allows it to wait for
// longer: the worker is ejected already.
func TestBehindAGatewayATrialAtAStuckWorkerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failing := true
		g := newGatewayFleet(t, 3, func(to kv.Target, ctx context.Context) (*http.Response, string, error) {
			switch {
			case to.Key.Worker > 0:
				return answersAfter(ctx, 20*time.Second)
			case failing:
				return answered(500, "application/json", `{}`), "", nil
			}
			<-ctx.Done()
			return nil, "", context.Cause(ctx)
		})
		stop := g.busy(t)
		time.Sleep(200 * time.Second) // the baseline is known
		for range 3 {
			g.forward(t.Context(), 0)
		}
		failing = false
		records, _ := g.router.Outliers()
		if records[0].State != health.StateOut {
			t.Fatalf("after three failures the worker is %s", records[0].State)
		}
		time.Sleep(6 * time.Second) // its trial is due
		began := time.Now()
		if _, err := g.forward(t.Context(), 0); err == nil || time.Since(began) > stalledStart+lateLook {
			t.Errorf("the trial ended after %s: %v", time.Since(began), err)
		}
		stop()
	})
}
