package openai

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
)

const (
	// maxStored is the number of stored responses whose worker is remembered.
	maxStored = 1 << 16
	// maxResponseID is the maximum length of a response's id that is remembered and asked
	// for, bytes.
	maxResponseID = 128
	// findTimeout bounds the search for the worker that has a response.
	findTimeout = 2 * time.Second
)

// Stored remembers the workers that have the last maxStored responses. The zero value is
// empty. It is safe for concurrent use.
type Stored struct {
	mu     sync.Mutex // guards the rest
	worker map[string]uint64
	ring   []string // ids in their order; next is overwritten
	next   int
}

// Note remembers the worker of a response. It reports whether that is news: ids of more than
// maxResponseID bytes are not remembered.
func (s *Stored) Note(id string, worker uint64) (news bool) {
	if id == "" || len(id) > maxResponseID {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.worker == nil {
		s.worker = map[string]uint64{}
	}
	had, known := s.worker[id]
	if !known {
		if len(s.ring) < maxStored {
			s.ring = append(s.ring, id)
		} else {
			delete(s.worker, s.ring[s.next])
			s.ring[s.next] = id
		}
		s.next = (s.next + 1) % maxStored
	}
	s.worker[id] = worker
	return !known || had != worker
}

// of returns the worker of a response.
func (s *Stored) of(id string) (worker uint64, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	worker, known = s.worker[id]
	return worker, known
}

// stays sends a request that continues a stored response to the worker that has it. Without
// such a worker any may answer, which says that there is no such response.
func (r *inference) stays(header http.Header) {
	previous := r.body.Get("previous_response_id")
	if r.exchange.Route != proxy.ResponsesRoute || previous.Type != gjson.String || previous.Str == "" || len(previous.Str) > maxResponseID || r.request.Pinned != nil {
		return
	}
	worker, known := r.api.stored.of(previous.Str)
	if !known || !r.model.Router.Has(func(t *kv.Target) bool { return t.Key.Worker == worker }) {
		worker, known = r.find(previous.Str, header)
	}
	if known {
		r.request.Allowed = []uint64{worker}
	}
}

// find asks all workers of the model that answer for a response.
func (r *inference) find(id string, header http.Header) (worker uint64, found bool) {
	ctx, cancel := context.WithTimeout(r.ctx, findTimeout)
	defer cancel()
	q := proxy.Question{Method: http.MethodGet, Path: proxy.ResponsesRoute + "/" + url.PathEscape(id), Header: r.api.header(header, r.caller, r.exchange.ID, false)}
	q.Header.Del("Content-Type")
	targets := slices.DeleteFunc(kv.OnePerWorker(r.model.Router.Targets()), func(t kv.Target) bool { return t.Role == kv.RolePrefill })
	r.api.proxy.AskAll(ctx, targets, q, func(a proxy.Answer) bool {
		if a.Err == nil && a.Status == http.StatusOK {
			worker, found = a.Target.Key.Worker, true
		}
		return !found
	})
	if found {
		r.api.noteStored(id, worker)
	}
	return worker, found
}

// noteStored remembers the worker of a response, and has other routers remember it.
func (a *API) noteStored(id string, worker uint64) {
	if a.stored.Note(id, worker) && a.shareStored != nil {
		a.shareStored(id, worker)
	}
}
