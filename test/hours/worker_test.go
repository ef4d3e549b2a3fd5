package hours

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"kvrouter/internal/base/kv"
)

// state is how a worker is.
type state string

const (
	well  state = "well"
	dead  state = "dead"         // its process has ended: connections are refused, open ones are reset
	hung  state = "hung"         // it accepts connections and does nothing
	stuck state = "engine stuck" // its server answers checks, and its engine computes nothing
)

const (
	passTokens = 8192                   // prompt tokens of a pass
	longPass   = 250 * time.Millisecond // the longest pass without a prompt
	serverTime = 3 * time.Millisecond   // for an answer of the server alone
)

// job is a request at a worker.
type job struct {
	request *request
	prompt  int // tokens to compute
	output  int // tokens to write
	written int
	chunks  chan string   // what its client gets; closed at the end
	broken  chan struct{} // closed when its connection breaks
	gone    <-chan struct{}
}

// worker is a simulated engine behind a server with one event loop.
type worker struct {
	world *world
	id    uint64
	read  float64       // prompt tokens a second
	write time.Duration // a token of one answer

	wake       chan struct{}
	supervised *supervisor

	mu         sync.Mutex // guards the rest
	state      state
	generation int
	faulty     time.Time // when its last fault ended; while there is one, when that began
	blocked    time.Time // its event loop is busy until then
	cold       int       // passes that are slow, because it has just started
	jobs       []*job
	held       []func()  // deliveries that wait for the event loop
	progress   int       // passes so far
	told       time.Time // when its events were last passed on
}

func (w *worker) key() kv.WorkerKey { return kv.WorkerKey{Worker: w.id} }

// run computes until ctx ends.
func (w *worker) run(ctx context.Context) {
	for ctx.Err() == nil {
		took, deliver, busy := w.pass()
		if !busy {
			select {
			case <-w.wake:
			case <-ctx.Done():
			}
			continue
		}
		time.Sleep(took)
		w.mu.Lock()
		if w.state == well {
			w.progress++
			w.deliver(deliver)
			w.tell()
		}
		w.mu.Unlock()
	}
}

// pass takes the next pass: how long it takes, and what comes of it.
func (w *worker) pass() (took time.Duration, deliver func(), busy bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	live := w.jobs[:0]
	for _, j := range w.jobs {
		select {
		case <-j.gone:
		default:
			live = append(live, j)
		}
	}
	w.jobs = live
	if w.state != well || len(live) == 0 {
		return 0, nil, false
	}
	var first *job
	writing := 0
	for _, j := range live {
		if j.prompt > 0 {
			if first == nil {
				first = j
			}
		} else {
			writing++
		}
	}
	each := time.Duration(float64(w.write) * (1 + float64(writing)/64))
	tokens := 1
	if first != nil {
		n := min(first.prompt, passTokens)
		first.prompt -= n
		took = time.Duration(float64(n) / w.read * float64(time.Second))
	} else {
		tokens = max(1, int(longPass/each))
	}
	if writing > 0 {
		most := 0
		for _, j := range live {
			if j != first && j.prompt == 0 {
				most = max(most, j.output-j.written)
			}
		}
		tokens = max(1, min(tokens, most))
		took += time.Duration(tokens) * each
	}
	if w.cold > 0 {
		w.cold--
		took = 4*took + time.Second
	}
	return took, func() { w.emit(first, tokens) }, true
}

// emit writes so many tokens of each answer, and the first of one whose prompt is computed.
func (w *worker) emit(computed *job, tokens int) {
	rest := w.jobs[:0]
	for _, j := range w.jobs {
		switch {
		case j == computed && j.prompt > 0, j.prompt > 0:
			rest = append(rest, j)
			continue
		case j == computed:
			j.written = min(1, j.output)
		default:
			j.written = min(j.written+tokens, j.output)
		}
		ends := j.written >= j.output
		if j.request.kind.streams && (!j.request.kind.silent || j.written <= 1 || ends) {
			j.send("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n")
		}
		if !ends {
			rest = append(rest, j)
			continue
		}
		if j.request.kind.streams {
			j.send("data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
		} else {
			j.send(`{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":` + fmt.Sprint(j.output) + `}}`)
		}
		close(j.chunks)
	}
	w.jobs = rest
}

func (j *job) send(text string) {
	select {
	case j.chunks <- text:
	default:
		panic("a client's buffer is full")
	}
}

// deliver has the event loop pass something on: at once, or once it is free. w is locked.
func (w *worker) deliver(f func()) {
	if time.Now().Before(w.blocked) || len(w.held) > 0 {
		// The engine's results wait for the event loop; its jobs continue meanwhile.
		w.held = append(w.held, f)
		return
	}
	f()
}

// tell passes on that the engine publishes KV events. w is locked.
func (w *worker) tell() {
	if now := time.Now(); w.world.signs >= signsEvents && now.Sub(w.told) >= 250*time.Millisecond {
		w.told = now
		w.world.lives(w.id, w.generation)
	}
}

// block makes the event loop busy for so long.
func (w *worker) block(long time.Duration) {
	w.mu.Lock()
	w.blocked = time.Now().Add(long)
	w.mu.Unlock()
	time.AfterFunc(long, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if time.Now().Before(w.blocked) || w.state == hung || w.state == dead {
			return
		}
		held := w.held
		w.held = nil
		for _, f := range held {
			f()
		}
		w.nudge()
	})
}

// nudge has run look for work.
func (w *worker) nudge() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// set changes the state; a process that ends breaks its connections.
func (w *worker) set(s state) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s == well && w.state == dead {
		w.generation++
		w.cold = 3
	}
	if s == dead {
		for _, j := range w.jobs {
			close(j.broken)
		}
		w.jobs, w.held, w.blocked = nil, nil, time.Time{}
	}
	w.state, w.faulty = s, time.Now()
	if s == well {
		held := w.held
		w.held = nil
		for _, f := range held {
			f()
		}
	}
	w.nudge()
}

// is returns the state, and how long the server's event loop is busy.
func (w *worker) is() (s state, generation int, busy time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, w.generation, max(0, time.Until(w.blocked))
}

// faultyNow reports whether the worker has, or had within that time, a fault.
func (w *worker) faultyNow(within time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state != well || !w.faulty.IsZero() && time.Since(w.faulty) < within
}

// check is a health check within a limit: late means that nothing came in time.
func (w *worker) check(limit time.Duration) (err error, late bool) {
	for began := time.Now(); ; {
		s, _, busy := w.is()
		switch left := limit - time.Since(began); {
		case s == dead:
			return errRefused, false
		case left <= 0:
			return context.DeadlineExceeded, true
		case s == hung:
			time.Sleep(min(left, time.Second))
		case busy > 0:
			time.Sleep(min(left, busy))
		default:
			time.Sleep(serverTime)
			return nil, false
		}
	}
}

var errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}

var errReset = &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}

// RoundTrip implements http.RoundTripper.
func (w *worker) RoundTrip(r *http.Request) (*http.Response, error) {
	q := w.world.request(r.Header.Get(headerRequest))
	w.mu.Lock()
	if w.state == dead {
		w.mu.Unlock()
		return nil, errRefused
	}
	j := &job{request: q, prompt: q.prompt, output: q.output, chunks: make(chan string, 1<<15), broken: make(chan struct{}), gone: r.Context().Done()}
	q.sent(w)
	w.jobs = append(w.jobs, j) // the engine has it when the event loop is free
	arrived := make(chan struct{})
	w.deliver(func() { close(arrived) })
	if w.state == hung {
		arrived = nil
	}
	w.nudge()
	w.mu.Unlock()
	body := &answer{job: j, ctx: r.Context()}
	response := &http.Response{Status: "200 OK", StatusCode: http.StatusOK, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{"Content-Type": {"application/json"}}, Body: body, ContentLength: -1, Request: r}
	if q.kind.streams {
		response.Header.Set("Content-Type", "text/event-stream")
		select {
		case <-arrived:
			return response, nil
		case <-j.broken:
			return nil, errReset
		case <-r.Context().Done():
			return nil, context.Cause(r.Context())
		}
	}
	select {
	case text, more := <-j.chunks:
		if more {
			body.text = text
		}
		return response, nil
	case <-j.broken:
		return nil, errReset
	case <-r.Context().Done():
		return nil, context.Cause(r.Context())
	}
}

// answer is the body of an answer.
type answer struct {
	job  *job
	ctx  context.Context
	text string
}

// Read implements io.Reader.
func (a *answer) Read(b []byte) (int, error) {
	if a.text == "" {
		select {
		case text, more := <-a.job.chunks:
			if !more {
				return 0, io.EOF
			}
			a.text = text
		default:
			select {
			case text, more := <-a.job.chunks:
				if !more {
					return 0, io.EOF
				}
				a.text = text
			case <-a.job.broken:
				return 0, errReset
			case <-a.ctx.Done():
				return 0, errors.Join(a.ctx.Err(), context.Cause(a.ctx))
			}
		}
	}
	n := copy(b, a.text)
	a.text = a.text[n:]
	return n, nil
}

// Close implements io.Closer.
func (a *answer) Close() error { return nil }
