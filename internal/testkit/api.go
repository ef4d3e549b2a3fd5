package testkit

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
)

// fakeWorker is an engine's HTTP side, scripted by a test.
type FakeWorker struct {
	*httptest.Server
	Mu     sync.Mutex // guards all below
	Bodies []string
	Header http.Header
}

func (f *FakeWorker) Received() []string {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	return append([]string(nil), f.Bodies...)
}

const ChatPath = "/v1/chat/completions"

// streamOf answers with the given events.
func StreamOf(events ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, e := range events {
			fmt.Fprintf(w, "data: %s\n\n", e)
		}
	}
}

const TokenEvent = `{"choices":[{"delta":{"content":"hi"}}]}`
