package cells

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/summary"
)

// Flags are the flags of a router below others.
type Flags struct {
	Cell         bool          `group:"Cells" help:"Report the prefixes that its workers have cached to routers above, which attach this one by --worker url=URL,kind=router. Without it they get its load alone. Needs about 60 bytes of memory per block. See docs/cells.md."`
	CellInterval time.Duration `group:"Cells" default:"200ms" hidden:"" help:"Time between two reports to a router above, 20ms to 1s."`
	CellRate     int           `group:"Cells" default:"1000000" placeholder:"BYTES" hidden:"" help:"Maximum rate of changes of the summary to each router above, bytes per second. Snapshots for routers that join are not limited."`
}

// Validate checks the flags; its errors name the flag.
func (f Flags) Validate() error {
	switch {
	case f.CellInterval < 20*time.Millisecond || f.CellInterval > time.Second:
		return errors.New("--cell-interval: give 20ms to 1s: a router without a report for 2.5s is out")
	case f.CellRate < 10_000:
		return errors.New("--cell-rate: give at least 10000 bytes per second")
	}
	return nil
}

const (
	// maxReaders bounds the routers that follow this one.
	maxReaders = 64
	// writeLimit is how long a reader may take for one frame.
	writeLimit = 2500 * time.Millisecond
	// tidyEach is how many blocks of cleared workers are reported as dropped in an interval
	// at most.
	tidyEach = 1 << 16
)

// Deps are the parts that a Reporter uses.
type Deps struct {
	Hello Hello
	Info  func() Info
	State func() State                // without Leaving
	Book  *summary.Book               // of the workers' cached prefixes; nil: no summary is sent
	Tidy  func(limit int) (more bool) // brings the book up to date with cleared workers; nil: it is
	Log   *slog.Logger
}

// Reporter reports to the routers above. It is safe for concurrent use.
type Reporter struct {
	flags  Flags
	deps   Deps
	counts Counts

	mu    sync.Mutex    // guards the rest
	tick  chan struct{} // closed at the next report
	info  []byte        // frame of the last report
	state []byte        // likewise
	left  bool          // the last report announces that the router leaves; it stays the last
}

// Counts count what a Reporter has sent.
type Counts struct {
	Readers   atomic.Int64  // routers above now
	Sent      atomic.Uint64 // bytes of summaries
	Snapshots atomic.Uint64 // whole summaries sent
}

// NewReporter returns a reporter. Run must follow.
func NewReporter(flags Flags, deps Deps) *Reporter {
	deps.Hello.Protocol, deps.Hello.Hash, deps.Hello.Summary = Protocol, HashKind, deps.Book != nil
	return &Reporter{flags: flags, deps: deps, tick: make(chan struct{})}
}

// hello returns the first frame of a stream.
func (t *Reporter) hello() []byte {
	hello := t.deps.Hello
	if t.deps.Book != nil {
		hello.Epoch = t.deps.Book.Position().Epoch
	}
	frame, err := appendJSON(nil, frameHello, hello)
	if err != nil {
		t.deps.Log.Error("cell: no report to a router above", "error", err)
	}
	return frame
}

// Counts returns what the reporter has sent.
func (t *Reporter) Counts() *Counts { return &t.counts }

// Leave reports that the router drains, and ends all streams.
func (t *Reporter) Leave() { t.report(true) }

// Run makes a report in each interval until ctx is done.
func (t *Reporter) Run(ctx context.Context) {
	tick := time.NewTicker(t.flags.CellInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			t.Leave()
			return
		case <-tick.C:
		}
		if t.deps.Book != nil {
			if t.deps.Tidy != nil {
				t.deps.Tidy(tidyEach)
			}
			t.deps.Book.Publish(int(float64(t.flags.CellRate) * t.flags.CellInterval.Seconds()))
		}
		t.report(false)
	}
}

// report encodes the current state and wakes the readers. leaves announces that the router leaves:
// later calls change nothing.
func (t *Reporter) report(leaves bool) {
	var info, state []byte
	if leaves || t.counts.Readers.Load() > 0 {
		now, serves := t.deps.State(), t.deps.Info()
		now.Ready, now.Leaving = now.Ready && !leaves, leaves
		now.clamp()
		serves.clip()
		var failed [2]error
		info, failed[0] = appendJSON(nil, frameInfo, serves)
		state, failed[1] = appendJSON(nil, frameState, now)
		if err := errors.Join(failed[:]...); err != nil {
			t.deps.Log.Error("cell: no report to the routers above", "error", err)
			info, state = nil, nil
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.left {
		return
	}
	if state != nil {
		t.info, t.state = info, state
	}
	t.left = leaves
	close(t.tick)
	t.tick = make(chan struct{})
}

// last returns the frames of the last report, whether it stays the last, and a channel that the next
// one closes.
func (t *Reporter) last() (info, state []byte, left bool, next <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.info, t.state, t.left, t.tick
}

// ServeHTTP streams to a router above until it goes, falls behind, or this router leaves. The
// caller has authenticated it.
func (t *Reporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if t.counts.Readers.Add(1) > maxReaders {
		t.counts.Readers.Add(-1)
		w.Header().Set("Retry-After", "10")
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write(web.DialectOpenAI.JSON(web.Fault{Status: http.StatusServiceUnavailable,
			Message: "too many routers follow this one: at most " + strconv.Itoa(maxReaders)}))
		return
	}
	defer t.counts.Readers.Add(-1)
	t.report(false) // the last one may be old
	s := outgoing{t: t, w: w, control: http.NewResponseController(w), at: positionOf(r)}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Cache-Control", "no-store")
	sent := s.last()
	if s.write(bytes.Join([][]byte{t.hello(), sent, s.state}, nil)) != nil || s.summary() != nil {
		return
	}
	for !s.left {
		select {
		case <-r.Context().Done():
			return
		case <-s.next:
		}
		if info := s.last(); !bytes.Equal(info, sent) {
			if sent = info; s.write(info) != nil {
				return
			}
		}
		if s.summary() != nil || s.write(s.state) != nil {
			return
		}
	}
}

// positionOf reads the position at which a router resumes; the zero value: from the beginning.
func positionOf(r *http.Request) (at summary.Position) {
	query := r.URL.Query()
	at.Epoch, _ = strconv.ParseUint(query.Get("epoch"), 10, 64)
	at.Seq, _ = strconv.ParseUint(query.Get("seq"), 10, 64)
	return at
}

// outgoing is the stream to one router.
type outgoing struct {
	t       *Reporter
	w       http.ResponseWriter
	control *http.ResponseController
	at      summary.Position // sent
	state   []byte           // frame of the last report
	left    bool             // it stays the last
	next    <-chan struct{}  // closed at the next one
}

// last takes the last report over, and returns its other frame.
func (s *outgoing) last() (info []byte) {
	info, s.state, s.left, s.next = s.t.last()
	return info
}

// write sends frames. An error means that the router is gone, or too slow.
func (s *outgoing) write(frames []byte) error {
	if err := s.control.SetWriteDeadline(time.Now().Add(writeLimit)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if _, err := s.w.Write(frames); err != nil {
		return err
	}
	return s.control.Flush()
}

// errLeft ends a stream whose last report was sent.
var errLeft = errors.New("this router drains")

// summary sends what is new of the summary: what is missing, or all of it.
func (s *outgoing) summary() error {
	book := s.t.deps.Book
	if book == nil {
		return nil
	}
	messages, ok := book.Since(s.at)
	for !ok {
		if err := s.snapshot(book); err != nil {
			return err
		}
		messages, ok = book.Since(s.at)
	}
	for _, m := range messages {
		if err := s.send(m); err != nil {
			return err
		}
		s.at.Seq++
	}
	return nil
}

// snapshot sends all of the summary, one part after the other: a slow reader keeps one of them
// in memory, not all. It ends early where the filter is replaced meanwhile.
func (s *outgoing) snapshot(book *summary.Book) error {
	message, at := book.Begin()
	s.t.counts.Snapshots.Add(1)
	for bucket, same := 0, true; message != nil; {
		if err := s.send(message); err != nil {
			return err
		}
		if message, bucket, same = book.Part(at, bucket); !same {
			return nil
		}
	}
	s.at = at
	return nil
}

// send sends a message of the summary, and the state where that is due: a snapshot may take long.
func (s *outgoing) send(message []byte) error {
	if err := s.write(appendFrame(nil, frameSummary, message)); err != nil {
		return err
	}
	s.t.counts.Sent.Add(uint64(len(message)))
	select {
	case <-s.next:
	default:
		return nil
	}
	s.last()
	if err := s.write(s.state); err != nil {
		return err
	}
	if s.left {
		return errLeft
	}
	return nil
}
