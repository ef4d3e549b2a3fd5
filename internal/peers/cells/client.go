package cells

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/summary"
)

// Errors of Open and Next.
var (
	// ErrContent: the content cannot be used. A new stream would have the same.
	ErrContent = errors.New("its reports cannot be used")
	// ErrLeadsBack: the address is this router's own, or that of a router above it.
	ErrLeadsBack = errors.New("routing loop: this router is below that one: give each router only routers below it as workers")
	// ErrOther: the router speaks another version of the stream, or names blocks in another
	// way.
	ErrOther = errors.New("the router is of another version")
)

// Silence is how long a stream may be silent until the router counts as gone.
const Silence = 2500 * time.Millisecond

const (
	// maxReports bounds the frames of JSON that are read in a second, of which a router sends
	// two in an interval, 20 ms at least: reading more pauses, which slows the sender.
	maxReports = 200
	// maxSnapshots bounds the snapshots of a stream at once, of which each takes the memory of
	// a view anew; one more may come each second. A filter grows 14 times.
	maxSnapshots = 32
)

// Settings are the settings of requests to routers below.
type Settings struct {
	TLS *tls.Config // for https URLs; nil: the system's roots
	Hop web.Hop     // this router
}

// Client follows routers below. It is safe for concurrent use.
type Client struct {
	hop     web.Hop
	streams *http.Client
	pings   *http.Client // keeps its connections
}

// NewClient returns a client. Close must follow.
func NewClient(s Settings) *Client {
	streams := web.NewTransport(s.TLS)
	streams.DisableKeepAlives = true
	return &Client{hop: s.Hop, streams: web.NewClient(streams), pings: web.NewClient(web.NewTransport(s.TLS))}
}

// Close closes the kept connections that are idle.
func (c *Client) Close() { c.pings.CloseIdleConnections() }

// Stream is the stream of one router. It is used by one goroutine, except for Close.
type Stream struct {
	Hello Hello
	First Report // received with it, without a summary

	own    func(router string) bool // the name is that of this router
	body   io.ReadCloser
	ctx    context.Context // ends with the stream; its cause says why
	end    context.CancelCauseFunc
	timer  *time.Timer
	memory []byte
	view   *summary.View
	close  sync.Once

	reports, snapshots *rate.Limiter
}

// Report is what a router reports in one interval.
type Report struct {
	State     State
	Info      *Info  // nil: as before
	Bytes     uint64 // of the summary's messages
	Snapshots uint64 // whole summaries
}

// errSilent ends a stream that was silent for too long.
var errSilent = fmt.Errorf("no report for %s", Silence)

// errEnded: the router has ended the stream, or itself.
var errEnded = errors.New("the router has ended its reports")

// StatusError is an answer other than 200.
type StatusError struct {
	Status int
}

// Error says what the status means.
func (e *StatusError) Error() string {
	text := fmt.Sprintf("GET %s answered %d %s", Path, e.Status, http.StatusText(e.Status))
	switch e.Status {
	case http.StatusUnauthorized, http.StatusForbidden:
		text += ": give the worker's key-env a key of that router's --router-api-key, or a trusted one of its --api-keys-file"
	case http.StatusNotFound:
		text += ": it is no kvrouter, or an older one: leave out kind=router"
	}
	return text
}

// Open begins to follow the router at a URL, and reads its first report. The summary of
// its blocks goes into view, from where that ends if it can be resumed. Close must follow.
func (c *Client) Open(ctx context.Context, url string, key kv.Secret, view *summary.View) (*Stream, error) {
	s := newStream(ctx, view)
	s.own = c.own
	if err := c.open(s, url, key); err != nil {
		if errors.Is(context.Cause(s.ctx), errSilent) {
			err = errSilent
		}
		s.Close()
		return nil, fmt.Errorf("router at %s: %w", url, err)
	}
	return s, nil
}

func newStream(ctx context.Context, view *summary.View) *Stream {
	ctx, end := context.WithCancelCause(ctx)
	return &Stream{
		ctx: ctx, end: end, timer: time.AfterFunc(Silence, func() { end(errSilent) }),
		view: view, reports: rate.NewLimiter(maxReports, maxReports/10), snapshots: rate.NewLimiter(1, maxSnapshots),
	}
}

func (c *Client) open(s *Stream, url string, key kv.Secret) error {
	s.First.Info = new(Info)
	address := url + Path
	if at, ok := s.view.Position(); ok {
		address += "?epoch=" + strconv.FormatUint(at.Epoch, 10) + "&seq=" + strconv.FormatUint(at.Seq, 10)
	}
	request, err := c.request(s.ctx, address, key)
	if err != nil {
		return err
	}
	response, err := c.streams.Do(request)
	if err != nil {
		return err
	}
	s.body = response.Body
	switch {
	case response.StatusCode == http.StatusLoopDetected:
		return ErrLeadsBack
	case response.StatusCode != http.StatusOK:
		return &StatusError{response.StatusCode}
	}
	for _, want := range []struct {
		kind byte
		into any
	}{{frameHello, &s.Hello}, {frameInfo, s.First.Info}, {frameState, &s.First.State}} {
		kind, body, err := s.frame()
		switch {
		case err != nil:
			return err
		case kind != want.kind:
			return fmt.Errorf("%w: frame %q instead of %q", ErrOther, kind, want.kind)
		}
		if err := json.Unmarshal(body, want.into); err != nil {
			return fmt.Errorf("%w: %w", ErrOther, err)
		}
		if want.kind == frameHello { // before anything else of another version is read
			if err := c.check(&s.Hello); err != nil {
				return err
			}
		}
	}
	s.First.Info.clip()
	s.First.State.clamp()
	if at, ok := s.view.Position(); ok && at.Epoch != s.Hello.Epoch {
		s.view.Empty() // it was another process's; a snapshot follows
	}
	if c.own(s.Hello.Router) || slices.ContainsFunc(s.First.Info.Below, c.own) {
		return ErrLeadsBack
	}
	return nil
}

// check refuses a router of another version.
func (c *Client) check(h *Hello) error {
	switch {
	case h.Protocol != Protocol:
		return fmt.Errorf("%w: its %s has version %d, this router's %d: run routers of one version", ErrOther, Path, h.Protocol, Protocol)
	case h.Hash != HashKind:
		return fmt.Errorf("%w: it names blocks by %.40q, this router by %s", ErrOther, h.Hash, HashKind)
	case h.BlockSize < 1 || h.BlockSize > maxBlock || h.Router == "" || len(h.Router) > maxName || len(h.Version) > maxName:
		return fmt.Errorf("%w: its first report is out of range", ErrOther)
	}
	return nil
}

// own reports whether a name is this router's.
func (c *Client) own(router string) bool { return c.hop != "" && router == c.hop.Name() }

// request is a GET to a router.
func (c *Client) request(ctx context.Context, address string, key kv.Secret) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	if key != "" {
		request.Header.Set("Authorization", "Bearer "+string(key))
	}
	c.hop.Sign(request.Header)
	return request, nil
}

// frame reads the next frame, which is valid until the next call.
func (s *Stream) frame() (kind byte, body []byte, err error) {
	kind, body, s.memory, err = readFrame(s.body, s.memory)
	switch {
	case err == nil:
		s.timer.Reset(Silence)
	case errors.Is(context.Cause(s.ctx), errSilent):
		err = errSilent
	case errors.Is(err, io.EOF):
		err = errEnded
	}
	return kind, body, err
}

// Next waits for the next report, at most for Silence, and applies its summary. An error ends
// the stream.
func (s *Stream) Next() (r Report, err error) {
	for {
		kind, body, err := s.frame()
		if err != nil {
			return r, err
		}
		if kind != frameSummary {
			if err := s.reports.Wait(s.ctx); err != nil { // 1/maxReports seconds at most
				return r, err
			}
		}
		switch kind {
		case frameState:
			if err := json.Unmarshal(body, &r.State); err != nil {
				return r, fmt.Errorf("%w: its state: %w", ErrContent, err)
			}
			r.State.clamp()
			return r, nil
		case frameInfo:
			r.Info = new(Info)
			if err := json.Unmarshal(body, r.Info); err != nil {
				return r, fmt.Errorf("%w: what it serves: %w", ErrContent, err)
			}
			if r.Info.clip(); slices.ContainsFunc(r.Info.Below, s.own) {
				return r, fmt.Errorf("%w: %w", ErrContent, ErrLeadsBack)
			}
		case frameSummary:
			if summary.Begins(body) && !s.snapshots.Allow() {
				return r, fmt.Errorf("%w: it sends one snapshot after the other", ErrContent)
			}
			before, whole := s.view.Position()
			if err := s.view.Apply(body); err != nil {
				return r, fmt.Errorf("%w: %w", ErrContent, err)
			}
			r.Bytes += uint64(len(body))
			if after, ok := s.view.Position(); ok && (!whole || after.Epoch != before.Epoch) {
				r.Snapshots++
			}
		default: // of a later version
		}
	}
}

// Close ends the stream. It may be called at any time.
func (s *Stream) Close() {
	s.close.Do(func() {
		s.timer.Stop()
		s.end(nil)
		if s.body != nil {
			_ = s.body.Close()
		}
	})
}

// pingLimit bounds a round trip.
const pingLimit = 2 * time.Second

// Ping measures a round trip to a router over a kept connection.
func (c *Client) Ping(ctx context.Context, url string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, pingLimit)
	defer cancel()
	request, err := c.request(ctx, url+"/health", "")
	if err != nil {
		return 0, err
	}
	began := time.Now()
	response, err := c.pings.Do(request)
	if err != nil {
		return 0, err
	}
	took = time.Since(began)
	_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 4<<10))
	return took, response.Body.Close()
}

// roundTrips are the last measured ones.
const roundTrips = 16

// Way measures the round trip to a router. One goroutine uses it.
type Way struct {
	last  [roundTrips]time.Duration
	count int
}

// Add adds a round trip.
func (w *Way) Add(took time.Duration) {
	w.last[w.count%roundTrips] = took
	w.count++
}

// Shortest returns the shortest of the last round trips: the rest was spent in queues. 0: none was measured.
func (w *Way) Shortest() time.Duration {
	if w.count == 0 {
		return 0
	}
	return slices.Min(w.last[:min(w.count, roundTrips)])
}
