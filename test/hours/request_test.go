package hours

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/serve/proxy"
)

// request is one request of a client.
type request struct {
	world          *world
	id             string
	kind           *kind
	prompt, output int // tokens
	reads          uint64
	leaves         time.Duration // after which its client goes; 0: it stays
	ctx            context.Context
	cancel         context.CancelFunc

	at []*worker // that it was sent to; guarded by world.mu
}

// sent notes that the request is sent to a worker, which is locked.
func (q *request) sent(to *worker) {
	w := q.world
	if q.kind.blocks && len(q.at) == 0 {
		long := time.Duration(5+q.reads%11) * time.Second
		if q.reads%8 == 0 {
			long *= 10
		}
		time.AfterFunc(time.Second, func() { to.block(long) })
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log(fmt.Sprintf("%s (%s, %d + %d tokens) to worker %d", q.id, q.kind.name, q.prompt, q.output, to.id))
	if q.at = append(q.at, to); len(q.at) != 2 {
		return
	}
	first := q.at[0]
	go func() { // it is locked by others
		s, blocked := first.faultyNow(10*time.Second), first.blockedLately()
		w.mu.Lock()
		defer w.mu.Unlock()
		switch {
		case s:
			w.figures.TwiceFaulty++
		case blocked:
			w.figures.TwiceBlocked++
		default:
			w.figures.Twice++
			w.bad("%s (%s, %d + %d tokens) is sent to worker %d beside worker %d, which works", q.id, q.kind.name, q.prompt, q.output, to.id, first.id)
		}
	}()
}

// blockedLately reports whether the worker's event loop is busy, or was a moment ago.
func (w *worker) blockedLately() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Since(w.blocked) < time.Second
}

// body is the request's body.
func (q *request) body() string {
	limit := ""
	if !q.kind.unbound && q.output > 0 {
		limit = fmt.Sprintf(`,"max_tokens":%d`, q.output)
	}
	return fmt.Sprintf(`{"model":"m","messages":[],"stream":%t%s}`, q.kind.streams, limit)
}

// run sends the request and judges the answer.
func (q *request) run() {
	w := q.world
	defer q.cancel()
	if q.leaves > 0 {
		time.AfterFunc(q.leaves, q.cancel)
	}
	began, text := time.Now(), q.body()
	body, _ := jsonbody.Parse([]byte(text))
	out := &recorder{header: http.Header{}}
	if q.kind.slow {
		out.random = rand.New(rand.NewPCG(q.reads, 1))
	}
	header := proxy.ClientHeader(http.Header{"Content-Type": {"application/json"}, headerRequest: {q.id}}, q.id, false, false)
	x := &proxy.Exchange{ID: q.id, Route: q.kind.route, Arrived: began}
	err := w.proxy.Forward(q.ctx, out, proxy.Upstream{
		Method: http.MethodPost, Path: q.kind.route, Header: header, Body: body, Route: q.kind.route, RequestID: q.id, Client: "a",
		MaxRetries: 2, EndMarked: q.kind.streams,
	}, x, q)
	gone := q.ctx.Err() != nil
	ends := strings.Contains(out.body.String(), `"stop"`)
	faulty := false
	w.mu.Lock()
	at := q.at
	w.mu.Unlock()
	for _, worker := range at {
		faulty = faulty || worker.faultyNow(time.Since(began)+10*time.Second)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case gone && !ends:
		w.figures.Left++
	case err == nil && ends:
		w.figures.Answered++
	case faulty:
		w.figures.LostFaulty++
	default:
		w.figures.Lost++
		w.bad("%s (%s, %d + %d tokens) at workers %v is lost after %s: status %d, %v", q.id, q.kind.name, q.prompt, q.output, ids(at), time.Since(began), out.status, errors.Unwrap(errors.Join(err)))
	}
}

func ids(workers []*worker) (list []uint64) {
	for _, w := range workers {
		list = append(list, w.id)
	}
	return list
}

// recorder is the client's side of an answer.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
	random *rand.Rand // of the pauses of a slow reader; nil: it is fast
}

// Header implements http.ResponseWriter.
func (r *recorder) Header() http.Header { return r.header }

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
}

// Write implements http.ResponseWriter.
func (r *recorder) Write(b []byte) (int, error) {
	if r.random != nil && r.random.Float64() < 0.2 {
		time.Sleep(time.Duration(r.random.ExpFloat64() * 5 * float64(time.Second)))
	}
	r.WriteHeader(http.StatusOK)
	return r.body.Write(b)
}

// FlushError implements flushing for http.ResponseController.
func (r *recorder) FlushError() error { return nil }

// SetWriteDeadline implements deadlines for http.ResponseController.
func (r *recorder) SetWriteDeadline(time.Time) error { return nil }
