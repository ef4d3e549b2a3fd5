package extproc

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
)

// TestPiecesAfterTheEndAreDropped: the last piece comes twice, before the body is read.
func TestPiecesAfterTheEndAreDropped(t *testing.T) {
	for range 100 { // what is ready at the same time is taken at random
		b := newPieces(testShare())
		b.put(t.Context(), []byte("one "), false)
		b.put(t.Context(), []byte("two"), true)
		b.put(t.Context(), []byte("two"), true)
		if text, err := io.ReadAll(b); err != nil || string(text) != "one two" {
			t.Fatalf("%q, %v", text, err)
		}
	}
}

// TestABodyIsWholeOnlyAtItsEnd verifies that its length alone does not complete a body.
func TestABodyIsWholeOnlyAtItsEnd(t *testing.T) {
	for name, test := range map[string]struct {
		length int64
		pieces []string
		end    func(*pieces) // nil: it does not end, and the time is over
		read   string
		err    error
	}{
		"its end comes":                {4, []string{"ab", "cd"}, func(b *pieces) { b.put(t.Context(), nil, true) }, "abcd", nil},
		"trailers come":                {4, []string{"ab", "cd"}, (*pieces).trail, "abcd", nil},
		"all bytes come, and no end":   {4, []string{"ab", "cd"}, nil, "ab", os.ErrDeadlineExceeded},
		"in one piece, and no end":     {4, []string{"abcd"}, nil, "", os.ErrDeadlineExceeded},
		"it ends too early":            {4, []string{"ab"}, func(b *pieces) { b.put(t.Context(), nil, true) }, "ab", nil},
		"it is too long":               {4, []string{"ab", "cde"}, nil, "ab", errLonger},
		"it is to be empty and is not": {0, []string{"a"}, nil, "", errLonger},
		"of unknown length":            {-1, []string{"ab", "cd"}, func(b *pieces) { b.put(t.Context(), nil, true) }, "abcd", nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := newPieces(testShare())
			b.length = test.length
			for _, piece := range test.pieces {
				if err := b.put(t.Context(), []byte(piece), false); err != nil {
					b.end(err)
				}
			}
			if test.end != nil {
				test.end(b)
			} else {
				b.end(os.ErrDeadlineExceeded)
			}
			if got, err := io.ReadAll(b); string(got) != test.read || !errors.Is(err, test.err) {
				t.Errorf("read %q, %v; want %q, %v", got, err, test.read, test.err)
			}
		})
	}
}

// TestNothingIsBookedBeforeABodyEnds has gateways send all bytes of a body without its end:
// the body deadline stays in effect, and no worker is chosen.
func TestNothingIsBookedBeforeABodyEnds(t *testing.T) {
	const body = `{"messages":[]}`
	for name, test := range map[string]struct{ length, body string }{
		"of known length": {fmt.Sprint(len(body)), body},
		"of no bytes":     {"0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := newRelay()
			p := listenWith(t, Settings{}, limits{idle: idleLimit, silence: silenceLimit, stall: 50 * time.Millisecond}, maxConnections, func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
				if r.ContentLength == 0 {
					t.Error("the handler takes the body for complete")
				}
				var bad *web.BodyError
				if err := h.serve(w, r, via); err == nil {
					t.Error("the request went to a worker")
				} else if errors.As(err, &bad) {
					http.Error(w, "late", bad.Status)
				}
			})
			g := ask(t, p)
			g.tell(post("/v1/chat/completions", "content-length", test.length))
			g.tell(requestBody(test.body, false))
			if m := g.hear(); m.GetImmediateResponse().GetStatus().GetCode() != http.StatusRequestTimeout {
				t.Errorf("the gateway was answered %v", m)
			}
		})
	}
}

// TestABodyBeyondItsLengthIsRefused verifies the answer to the client.
func TestABodyBeyondItsLengthIsRefused(t *testing.T) {
	g := ask(t, listenTest(t, Settings{}, bodyReader(1<<20)))
	g.tell(post("/v1/chat/completions", "content-length", "4"))
	g.tell(requestBody(`{"a":1}`, true))
	m := g.hear().GetImmediateResponse()
	if m.GetStatus().GetCode() != http.StatusBadRequest || !strings.Contains(string(m.GetBody()), "longer than its Content-Length") {
		t.Errorf("answered %v", m)
	}
}

// testShare is a stream's share of 64 KiB.
func testShare() *share { return &share{of: &memory{most: 64 << 10}} }
