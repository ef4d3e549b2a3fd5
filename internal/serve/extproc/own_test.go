package extproc

import (
	"io"
	"net/http"
	"testing"

	"kvrouter/internal/serve/proxy"
)

// TestAGatewaysOwnAnswerIsPassedBackAtOnce: it gives one where its client's body does not end, or
// no worker is found in time. Nothing is routed then.
func TestAGatewaysOwnAnswerIsPassedBackAtOnce(t *testing.T) {
	for name, test := range map[string]struct {
		body  []string // of the request, so far
		whole bool     // it has ended
		empty bool     // the answer has no body
	}{
		"before any of the body": {},
		"within the body":        {body: []string{`{"messages"`}},
		"after the body":         {body: []string{`{}`}, whole: true},
		"without a body":         {body: []string{`{`}, empty: true},
	} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan error, 1)
			p := listenTest(t, Settings{}, func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
				_, err := io.ReadAll(r.Body)
				if err == nil {
					<-r.Context().Done() // as in the queue
					err = r.Context().Err()
				}
				_, _, sent := via.Send(proxy.Routed{Request: r})
				if sent == nil {
					t.Error("it was sent to a worker")
				}
				http.Error(w, "nobody gets this", http.StatusBadRequest)
				ended <- err
			})
			g := ask(t, p)
			g.tell(post("/v1/chat/completions"))
			for i, piece := range test.body {
				g.tell(requestBody(piece, test.whole && i == len(test.body)-1))
			}
			g.tell(responseHeaders(test.empty, ":status", "408"))
			if m := g.hear(); m.GetResponseHeaders() == nil {
				t.Fatalf("the gateway got %v", m)
			}
			if !test.empty {
				g.tell(responseBody("request ", false))
				g.tell(responseBody("timeout", true))
				for _, want := range []string{"request ", "timeout"} {
					got := g.hear().GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
					if string(got.GetBody()) != want || got.GetEndOfStream() != (want == "timeout") {
						t.Errorf("the gateway got %v, want %q", got, want)
					}
				}
			}
			if err := <-ended; err == nil {
				t.Error("the handler goes on")
			}
			if m, err := g.Recv(); err != io.EOF {
				t.Errorf("the stream ends with %v, %v", m, err)
			}
		})
	}
}
