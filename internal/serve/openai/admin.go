package openai

import (
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// Headers of calls to several workers.
const (
	// headerWorkers names the workers that get the call, with commas; without it all do.
	headerWorkers = "X-Kvrouter-Workers"
	// headerRolling is the number of workers that get it at once. They get no requests meanwhile.
	headerRolling = "X-Kvrouter-Rolling"
	// headerIdempotency names the call: one that is sent again is not done again.
	headerIdempotency = "Idempotency-Key"
	// headerReplayed marks the answer to a call that was done before.
	headerReplayed = "Idempotent-Replayed"
)

// administration bounds a worker's answer to a call: weights of hundreds of gigabytes are loaded meanwhile.
const administration = 30 * time.Minute

// administers reports whether a client may do to the workers what affects all clients. If not, it
// has been answered.
func (a *API) administers(c *gin.Context, what string) bool {
	switch {
	case !a.settings.AllowEngineAdmin && !a.settings.Rollouts:
		a.fail(c, http.StatusForbidden, "", what+" is disabled: start the router with --allow-engine-admin, or with --rollouts for a trainer")
	case !a.keys.Of(c).Trusted:
		a.fail(c, http.StatusForbidden, "", what+" affects all clients: use a key with trust-hints")
	default:
		return true
	}
	return false
}

// admin sends an administration request to all workers, or to those that it names, and reports what each answered.
func (a *API) admin(c *gin.Context) {
	if !a.administers(c, "engine administration") {
		return
	}
	targets, ok := a.named(c, having(c.FullPath(), a.workers()))
	if !ok {
		return
	}
	if len(targets) == 0 {
		a.fail(c, http.StatusServiceUnavailable, "", "no worker that has "+c.FullPath()+" is up")
		return
	}
	rolling, ok := a.rolling(c)
	if !ok {
		return
	}
	body, ok := a.body(c)
	if !ok {
		return
	}
	defer a.done(c, body)
	q := a.question(c, body)
	q.Path, q.Patience, q.Rolling = c.FullPath(), administration, rolling
	if query := web.WithoutKeys(c.Request.URL.RawQuery); query != "" {
		q.Path += "?" + query
	}
	id := c.GetHeader(headerIdempotency)
	if id == "" {
		a.answerAdmin(c, a.administer(c, targets, q))
		return
	}
	if len(id) > maxIdempotencyKey {
		a.fail(c, http.StatusBadRequest, headerIdempotency, fmt.Sprintf("%s has %d bytes: at most %d are allowed", headerIdempotency, len(id), maxIdempotencyKey))
		return
	}
	what := fmt.Sprintf("%s %s to %q, %x", q.Method, q.Path, c.Request.Header.Values(headerWorkers), sha256.Sum256(body))
	call, first := a.controls.begin(controlID{a.keys.Of(c).Owner(), id}, what)
	switch {
	case call.what != what:
		a.fail(c, http.StatusUnprocessableEntity, headerIdempotency, "this "+headerIdempotency+" was used for another call, or for other workers")
	case first:
		a.controls.end(call, a.administer(c, targets, q))
		a.answerAdmin(c, call.answer)
	default:
		select {
		case <-call.done:
			c.Header(headerReplayed, "true")
			a.answerAdmin(c, call.answer)
		case <-c.Request.Context().Done():
		}
	}
}

// named returns those of the targets that the request names. Not ok: it has been answered.
func (a *API) named(c *gin.Context, targets []kv.Target) (chosen []kv.Target, ok bool) {
	values, given := c.Request.Header[headerWorkers]
	if !given {
		return targets, true
	}
	for name := range strings.SplitSeq(strings.Join(values, ","), ",") {
		name = strings.TrimSpace(name)
		id, known := a.models.Names().ID(name)
		if !known {
			id, known = parseID(name)
		}
		at := slices.IndexFunc(targets, func(t kv.Target) bool { return t.Key.Worker == id })
		if !known || at < 0 {
			a.fail(c, http.StatusNotFound, headerWorkers, fmt.Sprintf("%s: no such worker is up: %.80q", headerWorkers, name))
			return nil, false
		}
		if !slices.ContainsFunc(chosen, func(t kv.Target) bool { return t.Key.Worker == id }) {
			chosen = append(chosen, targets[at])
		}
	}
	return chosen, true
}

func parseID(text string) (id uint64, ok bool) {
	id, err := strconv.ParseUint(text, 10, 64)
	return id, err == nil
}

// rolling returns how many workers a call takes at once; 0: all. Not ok: the request has been answered.
func (a *API) rolling(c *gin.Context) (n int, ok bool) {
	given := c.GetHeader(headerRolling)
	if given == "" {
		return 0, true
	}
	n, err := strconv.Atoi(given)
	if err != nil || n < 1 || n > maxRolling {
		a.fail(c, http.StatusBadRequest, headerRolling, fmt.Sprintf("%s is %.40q: give 1 to %d, the workers that get the call at once", headerRolling, given, maxRolling))
		return 0, false
	}
	return n, true
}

// maxRolling bounds the workers that a rolling call takes at once.
const maxRolling = 64

// adminAnswer is the answer to a call.
type adminAnswer struct {
	status int
	body   []byte
}

// administer sends a call to the targets. The client's end does not end it: no worker is left as the others are not.
func (a *API) administer(c *gin.Context, targets []kv.Target, q proxy.Question) adminAnswer {
	began := time.Now()
	if q.Rolling > 0 {
		if !a.controls.rolls.TryLock() {
			return adminFault(http.StatusConflict, "another rolling call is under way: wait until it has ended")
		}
		defer a.controls.rolls.Unlock()
	}
	status, answers := a.proxy.Administer(context.WithoutCancel(c.Request.Context()), targets, q)
	a.log.Info("a client administers workers", "client", a.keys.Of(c).Name, "call", q.Method+" "+c.FullPath(), "workers", len(targets), "status", status,
		"took", time.Since(began).Round(time.Millisecond))
	body, err := json.Marshal(answers)
	if err != nil {
		return adminFault(http.StatusInternalServerError, err.Error())
	}
	return adminAnswer{status, body}
}

// adminFault is the answer to a call that was not sent.
func adminFault(status int, message string) adminAnswer {
	return adminAnswer{status, web.DialectOpenAI.JSON(web.Fault{Status: status, Message: message})}
}

func (a *API) answerAdmin(c *gin.Context, answer adminAnswer) {
	c.Data(answer.status, gin.MIMEJSON, answer.body)
}

const (
	// maxIdempotencyKey bounds the name of a call, bytes.
	maxIdempotencyKey = 128
	// keptCalls is the number of named calls that are remembered, and keptAnswers bounds their answers, bytes.
	keptCalls, keptAnswers = 256, 16 << 20
)

// controlID names a call. Clients cannot name each other's.
type controlID struct {
	owner keys.Owner
	name  string
}

// controlCall is a call that has a name.
type controlCall struct {
	id     controlID
	what   string        // it does: its method, path, workers and the hash of its body
	done   chan struct{} // closed when answer is there
	answer adminAnswer
}

// controls are the last calls to several workers. The zero value has none. It is safe for concurrent use.
type controls struct {
	rolls sync.Mutex // is held by a rolling call

	mu    sync.Mutex // guards the rest
	calls map[controlID]*list.Element
	order list.List // of *controlCall, the oldest first
	bytes int       // of their answers
}

// begin returns the call of that name, and whether it is new: then end must follow.
func (s *controls) begin(id controlID, what string) (call *controlCall, first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.calls[id]; known != nil {
		return known.Value.(*controlCall), false
	}
	if s.calls == nil {
		s.calls = map[controlID]*list.Element{}
	}
	call = &controlCall{id: id, what: what, done: make(chan struct{})}
	s.calls[id] = s.order.PushBack(call)
	return call, true
}

// end stores the answer to a call, and forgets the oldest ones that have ended, if they are too many. One that no worker
// has got is forgotten at once.
func (s *controls) end(call *controlCall, answer adminAnswer) {
	call.answer = answer
	close(call.done)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += len(answer.body)
	if answer.status == http.StatusConflict {
		s.forget(s.calls[call.id])
	}
	for e := s.order.Front(); e != nil && (s.order.Len() > keptCalls || s.bytes > keptAnswers); {
		oldest := e
		e = e.Next()
		select {
		case <-oldest.Value.(*controlCall).done:
			s.forget(oldest)
		default: // it is under way
		}
	}
}

func (s *controls) forget(e *list.Element) {
	call := s.order.Remove(e).(*controlCall)
	delete(s.calls, call.id)
	s.bytes -= len(call.answer.body)
}
