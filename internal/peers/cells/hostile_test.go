package cells

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit"
)

// framesOf returns the first frames of a stream, and these behind them.
func framesOf(t *testing.T, more ...[]byte) (all []byte) {
	t.Helper()
	for _, f := range []struct {
		kind  byte
		value any
	}{{frameHello, Hello{Protocol: Protocol, Router: "kvrouter-x", BlockSize: 16, Hash: HashKind, Summary: true}}, {frameInfo, Info{}}, {frameState, State{}}} {
		var err error
		if all, err = appendJSON(all, f.kind, f.value); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range more {
		all = append(all, f...)
	}
	return all
}

// follow opens a stream with these bytes.
func follow(t *testing.T, hop web.Hop, view *summary.View, frames []byte) *Stream {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(frames) }))
	t.Cleanup(server.Close)
	return open(t, newClient(t, hop), server.URL, view)
}

// endOf reads reports until the stream ends, and returns why and how many there were.
func endOf(s *Stream) (reports int, why error) {
	for {
		if _, why = s.Next(); why != nil {
			return reports, why
		}
		reports++
	}
}

// publishAll publishes all that a book holds.
func publishAll(book *summary.Book) {
	for before := book.Publish(summary.MaxMessage); ; {
		at := book.Publish(summary.MaxMessage)
		if at == before {
			return
		}
		before = at
	}
}

func TestALoopThatIsMadeLaterEndsTheStream(t *testing.T) {
	hop := web.NewHop()
	info, err := appendJSON(nil, frameInfo, Info{Below: []string{"other", hop.Name()}})
	if err != nil {
		t.Fatal(err)
	}
	if _, why := endOf(follow(t, hop, &summary.View{}, framesOf(t, info))); !errors.Is(why, ErrLeadsBack) || !errors.Is(why, ErrContent) {
		t.Errorf("it ends with %v", why)
	}
}

// TestSnapshotsAreLimited: one of 26 bytes takes 32 MB.
func TestSnapshotsAreLimited(t *testing.T) {
	book, view := summary.NewBook(), &summary.View{}
	reset, _ := book.Begin()
	var resets [][]byte
	for range maxSnapshots + 5 {
		resets = append(resets, appendFrame(nil, frameSummary, reset))
	}
	if _, why := endOf(follow(t, "", view, framesOf(t, resets...))); !errors.Is(why, ErrContent) || !strings.Contains(why.Error(), "one snapshot after the other") {
		t.Errorf("it ends with %v", why)
	}
	if _, why := endOf(follow(t, "", view, framesOf(t, resets[:maxSnapshots]...))); !errors.Is(why, errEnded) {
		t.Errorf("%d snapshots: %v", maxSnapshots, why)
	}
}

// TestReportsAreReadAtABoundedRate: those of a router that sends without a pause wait.
func TestReportsAreReadAtABoundedRate(t *testing.T) {
	state, err := appendJSON(nil, frameState, State{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	const sent = 100
	var states [][]byte
	for range sent {
		states = append(states, state)
	}
	began := time.Now()
	reports, why := endOf(follow(t, "", &summary.View{}, framesOf(t, states...)))
	if took, least := time.Since(began), (sent-maxReports/10)*time.Second/maxReports; reports != sent || !errors.Is(why, errEnded) || took < least*9/10 {
		t.Errorf("%d reports in %v, at least %v; %v", reports, took, least, why)
	}
}

// TestNothingTellsATimeOfDay: clocks need not agree.
func TestNothingTellsATimeOfDay(t *testing.T) {
	for _, frame := range []any{Hello{}, Info{}, State{}} {
		for kind, i := reflect.TypeOf(frame), 0; i < kind.NumField(); i++ {
			if field := kind.Field(i); field.Type == reflect.TypeFor[time.Time]() || strings.Contains(strings.ToLower(field.Name), "time") {
				t.Errorf("%s.%s", kind, field.Name)
			}
		}
	}
}

// TestAReaderThatStopsReadingIsLeft: what waits for it is bounded in time, too.
func TestAReaderThatStopsReadingIsLeft(t *testing.T) {
	t.Parallel()
	b := startBelow(t, nil)
	for hash := range uint64(300_000) { // more than the buffers of a connection
		b.book.Hold(hash)
	}
	publishAll(b.book)
	server := httptest.NewUnstartedServer(b.Reporter)
	server.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if err := c.(*net.TCPConn).SetWriteBuffer(4 << 10); err != nil {
			t.Error(err)
		}
		return ctx
	}
	server.Start()
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: cell\r\n\r\n", Path)
	testkit.Eventually(t, 10*time.Second, "it is read", func() bool { return b.Counts().Readers.Load() == 1 })
	began := time.Now()
	testkit.Eventually(t, 20*time.Second, "it is left", func() bool { return b.Counts().Readers.Load() == 0 })
	t.Logf("left after %v", time.Since(began).Round(time.Millisecond))
}

// stuck is a reader that takes so many writes, and then none until it continues.
type stuck struct {
	takes  int
	stands *atomic.Int64 // readers that take no more
	goesOn <-chan struct{}
}

func (*stuck) Header() http.Header { return http.Header{} }
func (*stuck) WriteHeader(int)     {}
func (*stuck) Flush()              {}

func (s *stuck) Write(text []byte) (int, error) {
	if s.takes--; s.takes < 0 {
		s.stands.Add(1)
		<-s.goesOn
		return 0, errors.New("gone")
	}
	return len(text), nil
}

// TestReadersThatStandTakeLittleMemory: as many as there may be, in the middle of a snapshot.
func TestReadersThatStandTakeLittleMemory(t *testing.T) {
	b := startBelow(t, nil)
	for hash := range uint64(400_000) {
		b.book.Hold(hash)
	}
	publishAll(b.book)
	size := 8 * b.book.Size().Buckets
	testkit.LiveHeap()
	before := testkit.LiveHeap()
	goesOn, stands := make(chan struct{}), new(atomic.Int64)
	var all sync.WaitGroup
	for range maxReaders {
		all.Go(func() {
			b.ServeHTTP(&stuck{4, stands, goesOn}, httptest.NewRequestWithContext(t.Context(), http.MethodGet, Path, nil))
		})
	}
	testkit.Eventually(t, 20*time.Second, "all of them stand", func() bool { return stands.Load() == maxReaders })
	each := (int64(testkit.LiveHeap()) - int64(before)) / maxReaders
	close(goesOn)
	all.Wait()
	t.Logf("%d KB for each reader of a filter of %d KB", each>>10, size>>10)
	if each > 512<<10 {
		t.Errorf("%d bytes for each reader", each)
	}
}

// noted is a reader that notes the kinds of frames, and takes so long for a part of a summary that
// a report comes.
type noted struct {
	stuck
	reporter *Reporter
	kinds    []byte
	end      context.CancelFunc
}

func (n *noted) Write(text []byte) (int, error) {
	if n.kinds = append(n.kinds, text[4]); text[4] == frameSummary {
		n.reporter.report(false)
		if len(text) == 6 { // the last message of a snapshot
			n.end()
		}
	}
	return len(text), nil
}

func TestStatesAreToldDuringASnapshot(t *testing.T) {
	b := startBelow(t, nil)
	for hash := range uint64(100_000) {
		b.book.Hold(hash)
	}
	publishAll(b.book)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	n := &noted{reporter: b.Reporter, end: end}
	b.ServeHTTP(n, httptest.NewRequestWithContext(ctx, http.MethodGet, Path, nil))
	if !strings.HasPrefix(string(n.kinds), "hmsmsm") {
		t.Errorf("frames %s", n.kinds)
	}
}
