package proxy

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/base/quota"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
)

// shut is a client that takes nothing until it is opened.
type shut struct {
	*httptest.ResponseRecorder
	waiting *atomic.Int64 // writes so far
	open    <-chan struct{}
}

func (s *shut) Write(b []byte) (int, error) {
	s.waiting.Add(1)
	<-s.open
	return s.ResponseRecorder.Write(b)
}

// TestAnswersThatNobodyTakesHoldTheWorkerBack: their bytes are bounded over all clients, one
// client leaves room for another's, and all come whole in the end.
func TestAnswersThatNobodyTakesHoldTheWorkerBack(t *testing.T) {
	const size, memory, asked = 6 << 20, 16 << 20, 8
	var waiting atomic.Int64
	f := newFailingFleet(t, "random", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for range size >> 16 {
			w.Write(make([]byte, 1<<16))
		}
	})
	answers := quota.New(memory)
	f.proxy.answers = answers
	open, ended := make(chan struct{}), make(chan int, asked)
	for range asked {
		go func() { // until it is opened
			w := &shut{httptest.NewRecorder(), &waiting, open}
			u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Route: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}, Client: "greedy"}
			if err := f.proxy.Forward(t.Context(), w, u, &Exchange{}, chooseOne(func([]uint64) (router.Decision, error) {
				return f.router.Route(t.Context(), router.Request{AnsweredWhole: true})
			})); err != nil {
				t.Error(err)
			}
			ended <- w.Body.Len()
		}()
	}
	testkit.Eventually(t, 20*time.Second, "all answers wait for their clients", func() bool { return waiting.Load() == asked })
	if held := answers.Held(); held > memory || held < memory/2 {
		t.Errorf("%d bytes are held", held)
	}
	if !answers.Take("other", 0, 64<<10) {
		t.Error("one client has all the memory of answers")
	}
	answers.Give("other", 64<<10)
	close(open)
	for range asked {
		if n := <-ended; n != size {
			t.Errorf("%d bytes arrived of %d", n, size)
		}
	}
	if answers.Held() != 0 {
		t.Errorf("%d bytes are still held", answers.Held())
	}
}

// TestAnAnswerThatIsHeldComesWhole for every size and framing, whatever memory there is.
func TestAnAnswerThatIsHeldComesWhole(t *testing.T) {
	for _, memory := range []int64{0, 10, 100_000, 1 << 30} {
		for _, size := range []int{0, 1, 32 << 10, 100_000, bufferedAnswer, bufferedAnswer + 1} {
			f := newFailingFleet(t, "random", func(w http.ResponseWriter, _ *http.Request) {
				w.Write(make([]byte, size))
			})
			f.proxy.answers = quota.New(memory)
			w, err := f.forward(context.Background(), "a", "", 0, &Exchange{})
			if err != nil || w.Body.Len() != size || f.proxy.answers.Held() != 0 {
				t.Errorf("%d bytes of memory: %d bytes of %d, %d held, %v", memory, w.Body.Len(), size, f.proxy.answers.Held(), err)
			}
		}
	}
}
