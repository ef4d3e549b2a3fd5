package top

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"
)

func TestEventsAreReadWithinBounds(t *testing.T) {
	long := strings.Repeat("x", maxEvent/2+1)
	for name, c := range map[string]struct {
		stream, want string
		err          error
	}{
		"two":                        {"event: state\ndata: a\n\nevent: trends\ndata: b\n\n", "state=a trends=b ", io.EOF},
		"several lines":              {"data: a\ndata:b\n\n", "=ab ", io.EOF},
		"carriage returns":           {"event: state\r\ndata: a\r\n\r\n", "state=a ", io.EOF},
		"comments, unknown fields":   {": hello\nid: 3\nretry: 5\n\ndata: a\n\n", "=a ", io.EOF},
		"an event that is cut":       {"event: state\ndata: a\n", "", io.EOF},
		"a line that does not end":   {"data: " + strings.Repeat("x", maxEvent+1), "", bufio.ErrTooLong},
		"lines that are much in all": {"data: " + long + "\ndata: " + long + "\n\n", "", bufio.ErrTooLong},
		"an event's name":            {"event: \x1b[2Jstate\ndata: a\n\n", "[2Jstate=a ", io.EOF},
	} {
		got, lines := "", 0
		err := readEvents(strings.NewReader(c.stream), func() { lines++ }, func(event string, data []byte) error {
			got += fmt.Sprintf("%s=%s ", event, data)
			return nil
		})
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: %.50q, %v", name, got, err)
		}
	}
}

func TestStatesAreMadeFitToBeShown(t *testing.T) {
	s, err := decodeState([]byte(`{"version":"\u001b[31mv1\u0007","models":["\u202ereversed"],"cache":{"nodes":[1,"x"]},
		"workers":[{"worker":"3","url":"http://w\r\n\u009b2J","why":"` + strings.Repeat("é", 1000) + `","kv_usage":1e300,"state":"\u0000ready","name":"pod\u001b[2J"}],
		"requests":[{"id":"\u001b]0;title\u0007","prompt":"secret","worker_name":"\u0007a","prefill_worker_name":"\u0007b"}],"tenants":[{"tenant":"\u001b[31ma"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	w, r := s.Workers[0], s.Requests[0]
	if s.Version != "[31mv1" || s.Models[0] != "reversed" || w.URL != "http://w2J" || w.Why != strings.Repeat("é", maxText) || w.State != "ready" || w.Name != "pod[2J" || r.WorkerName != "a" || r.PrefillName != "b" || r.ID != "]0;title" || s.Tenants[0].Tenant != "[31ma" || r.Prompt != "" {
		t.Errorf("%+v %+v", s, w)
	}
	many := `{"workers":[` + strings.TrimSuffix(strings.Repeat(`{},`, maxWorkers+9), ",") + `],"requests":[` + strings.TrimSuffix(strings.Repeat(`{},`, maxRequests+9), ",") + `],"tenants":[` + strings.TrimSuffix(strings.Repeat(`{},`, maxTenants+9), ",") + `]}`
	if s, err = decodeState([]byte(many)); err != nil || len(s.Workers) != maxWorkers || len(s.Requests) != maxRequests || len(s.Tenants) != maxTenants {
		t.Errorf("%v", err)
	}
	for _, text := range []string{"", "[]", `{"workers":3}`, `{"at":1e999}`, `{"uptime":"x"}`} {
		if _, err := decodeState([]byte(text)); err == nil {
			t.Errorf("%q is a state", text)
		}
	}
}

// FuzzState draws what any state comes to: lines within the width, as many as the
// terminal has, and nothing that it would obey.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{"at":-1e300,"uptime":1e300,"totals":{"requests":18446744073709551615,"in_flight":-9223372036854775808},"workers":[{"worker":"1","since":-1e308,"kv_usage":-3,"blocks":-5,"event_lag":1e308,"restarts":9223372036854775807},{"rank":7}]}`), uint8(80), uint8(24))
	f.Add([]byte(`{"workers":[{"why":"\u001b[2J","url":"漢字漢字"}],"requests":[{"at":1e18,"worker":"1","prefill_worker":"2","ttft":-1,"status":-4,"id":"👩‍👩‍👧"}]}`), uint8(20), uint8(1))
	f.Add([]byte(`{"fair":true,"tenants":[{"tenant":"漢字","weight":1e308,"waiting":{"batch":-9223372036854775808,"standard":-1},"oldest_wait":-1e308,"objectives_kept":18446744073709551615,"objectives_missed":1},{"running":-3}]}`), uint8(120), uint8(40))
	f.Fuzz(func(t *testing.T, data []byte, width, height uint8) {
		state, err := decodeState(data)
		if err != nil {
			return
		}
		checkFrame(t, frame{width: int(width), height: int(height), state: state, sort: int(width) % len(orders()), reverse: height%2 == 0, skip: int(height)})
	})
}

func TestTextsHaveNothingThatATerminalObeys(t *testing.T) {
	for r := range rune(0x3000) {
		for _, left := range cleanText("a" + string(r) + "b") {
			if unicode.IsControl(left) || unicode.Is(unicode.Cf, left) || unicode.Is(unicode.Zl, left) || unicode.Is(unicode.Zp, left) {
				t.Errorf("%U is left", left)
			}
		}
	}
	if got := cleanText("a\xffb\xc3"); got != "ab" {
		t.Errorf("%q", got)
	}
}

// stream serves one answer after the other, the last one again and again.
func stream(t *testing.T, answers ...http.HandlerFunc) *source {
	t.Helper()
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/ui/stream" || r.Header.Get("Authorization") != "Bearer k" {
			t.Errorf("%s with %q", r.URL, r.Header)
		}
		answers[min(int(n.Add(1)), len(answers))-1](w, r)
	}))
	t.Cleanup(server.Close)
	s, err := newSource(server.URL+"/", "k")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.client.CloseIdleConnections)
	s.firstPause = time.Millisecond
	return s
}

// sends answers with a state and continues until the client leaves, or ends.
func sends(version string, stays bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "event: trends\ndata: {}\n\nevent: state\ndata: {\"version\":%q}\n\n", version)
		w.(http.Flusher).Flush()
		if stays {
			<-r.Context().Done()
		}
	}
}

func answers(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
}

func TestStreamIsFollowedThroughFailures(t *testing.T) {
	s := stream(t,
		answers(http.StatusUnauthorized), answers(http.StatusNotFound), answers(http.StatusServiceUnavailable), answers(http.StatusBadGateway),
		func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) },
		sends("one", false), sends("two", true), // which falls silent
		func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "event: state\ndata: nonsense\n\n") },
		sends("three", true))
	s.silence = 500 * time.Millisecond
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	var got []string
	s.follow(ctx, func(u update) {
		if u.problem != nil {
			got = append(got, fmt.Sprint(u.problem))
			return
		}
		got = append(got, u.state.Version)
		if u.state.Version == "three" {
			stop()
		}
	})
	want := []string{"key", "404", "503", "status 502", "status 302", "one", "EOF", "two", "no data received for 500ms", "cannot read the router's state", "three"}
	if len(got) != len(want) {
		t.Fatalf("%q", got)
	}
	for i := range want {
		if !strings.Contains(got[i], want[i]) {
			t.Errorf("%d: %q, want %q", i, got[i], want[i])
		}
	}
}

func TestPausesGrowToABound(t *testing.T) {
	s := &source{url: "http://127.0.0.1:1/ui/stream", client: &http.Client{}, silence: time.Second, firstPause: time.Microsecond}
	ctx, stop := context.WithCancel(t.Context())
	var pauses []time.Duration
	s.follow(ctx, func(u update) {
		if pauses = append(pauses, u.again); len(pauses) == 8 {
			stop()
		}
	})
	for i, pause := range pauses {
		if pause != time.Microsecond<<i {
			t.Errorf("%v", pauses)
		}
	}
}

// failing is a network that fails with a text.
type failing string

func (f failing) RoundTrip(*http.Request) (*http.Response, error) { return nil, errors.New(string(f)) }

func TestOnceWritesOneFrame(t *testing.T) {
	var out strings.Builder
	if err := once(t.Context(), stream(t, sends("v7", true)), 100, &out); err != nil || !strings.HasPrefix(out.String(), "kvrouter v7 ") {
		t.Errorf("%v, %q", err, out.String())
	}
	if err := once(t.Context(), stream(t, answers(http.StatusUnauthorized)), 100, &out); err == nil || !strings.Contains(err.Error(), "--router-api-key") {
		t.Error(err)
	}
	broken := stream(t, answers(http.StatusOK))
	broken.client = &http.Client{Transport: failing("\x1b[2Jno way\u202e\r\n")}
	if err := once(t.Context(), broken, 100, &out); err == nil || !strings.HasSuffix(err.Error(), ": [2Jno way") {
		t.Errorf("%q", err)
	}
}

func TestAddressesAreChecked(t *testing.T) {
	for _, address := range []string{"", "127.0.0.1:7000", "ftp://a", "http://", "http://user:pass@a", "http://a b", "::"} {
		if _, err := newSource(address, ""); err == nil || !strings.Contains(err.Error(), "--router-url") {
			t.Errorf("%q: %v", address, err)
		}
	}
	if s, err := newSource("https://a:7000/", ""); err != nil || s.url != "https://a:7000/ui/stream" {
		t.Error(err)
	}
}
