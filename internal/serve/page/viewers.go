package page

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
)

const (
	// maxViewers bounds the streams. Beyond it, a new one takes the place of one of the
	// client that has the most, which has been open for leastStay.
	maxViewers = 64
	leastStay  = 10 * time.Second
	// streamLimit is after how long a stream ends, so that the key is looked at again:
	// browsers open it again.
	streamLimit = time.Hour
	// unsentLimit is how much is kept for a viewer that does not read, bytes.
	unsentLimit = 32 << 10
	// freshFor is the time that a state is shown to those that come.
	freshFor = time.Second
)

// Events of the stream.
const (
	eventState  = "state"
	eventTrends = "trends"
)

// viewers are the open dashboards. All get the same bytes.
type viewers struct {
	came chan struct{} // has a token for a new viewer
	over chan struct{} // closed when all streams end
	end  sync.Once     // of over
	n    atomic.Int32  // that look
	made atomic.Uint64 // events so far

	mu      sync.Mutex // guards the rest
	streams map[*viewer]bool
	last    []byte    // the last state; nil: none
	at      time.Time // of it
	buffer  bytes.Buffer
}

// viewer is one stream. The channels of events hold the latest that it has not sent.
type viewer struct {
	state, trends chan []byte
	replaced      chan struct{} // closed when another has taken its place
	client        string
	since         time.Time
}

func newViewers() *viewers {
	return &viewers{came: make(chan struct{}, 1), over: make(chan struct{}), streams: map[*viewer]bool{}}
}

// watched reports whether any dashboard is open.
func (v *viewers) watched() bool { return v.n.Load() > 0 }

// stale reports whether a new viewer needs a new state.
func (v *viewers) stale(now time.Time) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.last == nil || now.Sub(v.at) >= freshFor
}

func (v *viewers) close() { v.end.Do(func() { close(v.over) }) }

// join adds a viewer of a client; nil: there are too many, or the page has ended.
func (v *viewers) join(client string, now time.Time) *viewer {
	v.mu.Lock()
	defer v.mu.Unlock()
	select {
	case <-v.over:
		return nil
	default:
	}
	if len(v.streams) >= maxViewers && !v.replace(client, now) {
		return nil
	}
	one := &viewer{state: make(chan []byte, 1), trends: make(chan []byte, 1), replaced: make(chan struct{}), client: client, since: now}
	v.streams[one] = true
	v.n.Store(int32(len(v.streams)))
	if v.last != nil && now.Sub(v.at) < freshFor {
		one.state <- v.last
	}
	select {
	case v.came <- struct{}{}:
	default:
	}
	return one
}

// replace ends a stream to make room for one of a client: the oldest of the client that has
// the most, if it has more than this one will have, or of this one. v.mu is locked.
func (v *viewers) replace(client string, now time.Time) (ok bool) {
	of := map[string]int{}
	for one := range v.streams {
		of[one.client]++
	}
	most := client
	for other, n := range of {
		if n > of[most] {
			most = other
		}
	}
	if most == client && of[client] < 2 || most != client && of[most] <= of[client]+1 {
		return false
	}
	var oldest *viewer
	for one := range v.streams {
		if one.client == most && (oldest == nil || one.since.Before(oldest.since)) {
			oldest = one
		}
	}
	if now.Sub(oldest.since) < leastStay {
		return false
	}
	close(oldest.replaced)
	delete(v.streams, oldest)
	return true
}

// leave removes a viewer.
func (v *viewers) leave(one *viewer) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.streams, one)
	if v.n.Store(int32(len(v.streams))); len(v.streams) == 0 {
		v.last, v.buffer = nil, bytes.Buffer{}
	}
}

// send encodes an event once and sends it to all viewers. A viewer that has not sent its
// last event yet skips this one.
func (v *viewers) send(event string, data any, now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.buffer.Reset()
	frame, err := encode(&v.buffer, event, data)
	if err != nil {
		return // not one of our types fails: see the test
	}
	v.made.Add(1)
	if event == eventState {
		v.last, v.at = frame, now
	}
	for one := range v.streams {
		to := one.state
		if event == eventTrends {
			to = one.trends
		}
		select {
		case <-to:
		default:
		}
		to <- frame
	}
}

// encode returns an event as it goes over the wire. It uses the buffer, but keeps
// nothing of it.
func encode(buffer *bytes.Buffer, event string, data any) ([]byte, error) {
	fmt.Fprintf(buffer, "event: %s\ndata: ", event)
	if err := json.NewEncoder(buffer).Encode(data); err != nil { // ends with a line feed
		return nil, err
	}
	buffer.WriteByte('\n')
	return bytes.Clone(buffer.Bytes()), nil
}

// client names the sender of a request: by its session, or else by its address.
func (p *Page) client(c *gin.Context) string {
	if id, err := c.Cookie(cookieName); err == nil && p.sessions.holds(id, p.now()) {
		return "session " + id
	}
	return web.AddressOf(c.Request)
}

// stream sends events until the client goes, another takes its place, the page ends or
// streamLimit is over.
func (p *Page) stream(c *gin.Context) {
	one := p.viewers.join(p.client(c), p.now())
	if one == nil {
		c.Header("Retry-After", "10")
		fail(c, http.StatusServiceUnavailable, fmt.Sprintf("the dashboard already has %d viewers, or the router is shutting down", maxViewers))
		return
	}
	defer p.viewers.leave(one)
	limit := time.NewTimer(streamLimit)
	defer limit.Stop()
	header := c.Writer.Header()
	header.Set("Content-Type", "text/event-stream; charset=utf-8")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Accel-Buffering", "no") // proxies in front must not hold events back
	web.LimitUnsent(c.Request, unsentLimit)
	connection := http.NewResponseController(c.Writer)
	send := func(frame []byte) bool {
		_, err := c.Writer.Write(frame)
		return err == nil && connection.Flush() == nil
	}
	first, err := encode(new(bytes.Buffer), eventTrends, p.trends.all())
	if err != nil || !send(first) {
		return
	}
	for {
		var frame []byte
		select {
		case <-c.Request.Context().Done():
			return
		case <-p.viewers.over:
			return
		case <-one.replaced:
			return
		case <-limit.C:
			return
		case frame = <-one.state:
		case frame = <-one.trends:
		}
		if !send(frame) {
			return
		}
	}
}
