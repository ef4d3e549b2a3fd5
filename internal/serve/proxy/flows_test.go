package proxy

import (
	"context"
	"io"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
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

// TestRunningAnswersThatFallSilent holds when a worker is avoided whose answers have begun, and
// that these go on until no work explains the silence.
func TestRunningAnswersThatFallSilent(t *testing.T) {
	const s = time.Second
	for name, c := range map[string]struct {
		pauses  []time.Duration // of worker 0
		others  time.Duration   // for which other workers answer
		shows   bool            // the engine shows life otherwise
		avoided bool
		out     time.Duration // when worker 0 is ejected, about; 0: it is not
	}{
		// 60 s, and 3 s that 64 tokens of the prompt and 100 of the answer explain.
		"for ever":                        {pauses: []time.Duration{5 * s}, others: 90 * s, avoided: true, out: 68 * s},
		"for a while":                     {pauses: []time.Duration{5 * s, 14 * s}, others: 90 * s},
		"for longer":                      {pauses: []time.Duration{5 * s, 60 * s}, others: 90 * s, avoided: true},
		"for long while the engine works": {pauses: []time.Duration{5 * s, 85 * s}, others: 90 * s, shows: true},
		"while no other worker answers":   {pauses: []time.Duration{5 * s, 85 * s}, others: 4 * s, avoided: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				g := newGatewayFleet(t, 3, func(to kv.Target, ctx context.Context) (*http.Response, string, error) {
					if to.Key.Worker > 0 {
						return answersAfter(ctx, 20*time.Millisecond)
					}
					return dripping(ctx, start, 90*s, c.pauses...)
				})
				stop := g.busy(t)
				time.AfterFunc(c.others, stop)
				var all sync.WaitGroup
				failed := make([]error, 3)
				for i := range failed {
					all.Go(func() { _, failed[i] = g.forward(t.Context(), 0) })
				}
				var avoided, out time.Duration
				for range 89 {
					time.Sleep(s)
					if c.shows {
						g.router.Health.Lives(0, 1)
					}
					switch records, _ := g.router.Health.Records(); {
					case records[0].State == health.StateSilent && avoided == 0:
						avoided = time.Since(start)
					case records[0].State == health.StateOut && out == 0:
						out = time.Since(start)
					}
				}
				all.Wait()
				if (avoided > 0) != c.avoided || avoided > 0 && (avoided < 15*s || avoided > 17*s) {
					t.Errorf("avoided after %s", avoided)
				}
				if (out > 0) != (c.out > 0) || out > 0 && (out < c.out || out > c.out+2*s) {
					t.Errorf("ejected after %s", out)
				}
				for i, err := range failed {
					if (err != nil) != (c.out > 0) {
						t.Errorf("answer %d: %v", i, err)
					}
				}
				stop()
			})
		})
	}
}
