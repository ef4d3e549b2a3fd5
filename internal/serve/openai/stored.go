package openai

import (
	"container/list"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

const (
	// maxStored is the number of stored responses whose worker and owner are remembered.
	maxStored = 1 << 16
	// maxResponseID is the maximum length of a response's id that is remembered and asked
	// for, bytes.
	maxResponseID = 128
)

// Stored remembers the workers and the owners of the last maxStored responses. An owner with more
// than its share of them loses its own oldest first. The zero value is empty. It is safe for
// concurrent use.
type Stored struct {
	mu     sync.Mutex // guards the rest; held while Each runs
	byID   map[string]storedResponse
	owners map[keys.Owner]*list.List // ids of each, oldest first; none is empty
}

// storedResponse is where a response is, and whose.
type storedResponse struct {
	worker uint64
	owner  keys.Owner
}

// Note remembers the worker and the owner of a response. It reports whether that is news. Not
// remembered are ids of more than maxResponseID bytes, and ones of another owner.
func (s *Stored) Note(id string, worker uint64, owner keys.Owner) (news bool) {
	if id == "" || len(id) > maxResponseID {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	had, known := s.byID[id]
	if known && had.owner != owner {
		return false
	}
	if !known {
		s.makeRoom(owner)
		if s.owners[owner] == nil {
			s.owners[owner] = list.New()
		}
		s.owners[owner].PushBack(id)
	}
	s.byID[id] = storedResponse{worker, owner}
	return !known || had.worker != worker
}

// makeRoom drops a response if there is no room for one more of an owner: its own oldest, if it
// has its share, else that of the owner with the most. s.mu is locked.
func (s *Stored) makeRoom(owner keys.Owner) {
	if s.byID == nil {
		s.byID, s.owners = map[string]storedResponse{}, map[keys.Owner]*list.List{}
	}
	if len(s.byID) < maxStored {
		return
	}
	if own := s.owners[owner]; own == nil || own.Len() < maxStored/len(s.owners) {
		most := 0
		for of, ids := range s.owners {
			if ids.Len() > most {
				owner, most = of, ids.Len()
			}
		}
	}
	ids := s.owners[owner]
	delete(s.byID, ids.Remove(ids.Front()).(string))
	if ids.Len() == 0 {
		delete(s.owners, owner)
	}
}

// of returns what is known of a response.
func (s *Stored) of(id string) (stored storedResponse, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stored, known = s.byID[id]
	return stored, known
}

// Each calls take with the ids of the responses of each worker and owner, oldest first. take must
// not use s.
func (s *Stored) Each(take func(worker uint64, owner keys.Owner, ids []string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for owner, ids := range s.owners {
		byWorker := map[uint64][]string{}
		for e := ids.Front(); e != nil; e = e.Next() {
			id := e.Value.(string)
			worker := s.byID[id].worker
			byWorker[worker] = append(byWorker[worker], id)
		}
		for worker, ids := range byWorker {
			take(worker, owner, ids)
		}
	}
}

// mayUse reports whether a caller may use the response of that id, and its worker, if that is
// known. With several clients, a response without a known owner is nobody's.
func (a *API) mayUse(caller *keys.Caller, id string) (worker uint64, known, may bool) {
	if id == "" || len(id) > maxResponseID {
		return 0, false, false
	}
	stored, known := a.stored.of(id)
	if stored.owner == 0 {
		may = !a.keys.Several()
	} else {
		may = stored.owner == caller.Owner()
	}
	return stored.worker, known, may
}

// noResponse answers that there is no such response: the same for one of another client.
func (a *API) noResponse(c *gin.Context) {
	a.fail(c, http.StatusNotFound, "", "no worker has this response")
}

// errUnsaid means that a worker that may have a response did not say.
var errUnsaid = errors.New("a worker that may have this response did not answer: try again")

// owns refuses a request that names state of the responses API which is not its client's, and
// reports whether it does not. With several clients a conversation has no known owner.
func (r *inference) owns(c *gin.Context) bool {
	if !strings.HasPrefix(r.exchange.Route, proxy.ResponsesRoute) || !r.api.keys.Several() {
		return true
	}
	if r.body.Get("conversation").Type != gjson.Null {
		r.api.fail(c, http.StatusBadRequest, "conversation", "conversation is not supported with several API keys: use previous_response_id")
		return false
	}
	previous := r.body.Get("previous_response_id")
	if _, _, may := r.api.mayUse(r.caller, previous.Str); previous.Type != gjson.Null && !may {
		r.api.noResponse(c)
		return false
	}
	return true
}

// stays sends a request that continues a stored response to the worker that has it. Without
// such a worker any may answer, which says that there is no such response. Not ok: it has been
// answered.
func (r *inference) stays(c *gin.Context) (ok bool) {
	previous := r.body.Get("previous_response_id")
	if r.exchange.Route != proxy.ResponsesRoute || previous.Type != gjson.String || r.request.Pinned != nil {
		return true
	}
	worker, known, may := r.api.mayUse(r.caller, previous.Str)
	switch {
	case len(previous.Str) > maxResponseID || previous.Str == "":
		return true
	case !may:
		r.api.noResponse(c)
		return false
	}
	if !known || !r.model.Router.Has(func(t *kv.Target) bool { return t.Key.Worker == worker }) {
		target, err := r.api.find(c, previous.Str, r.model.Router.Targets())
		if err != nil {
			r.api.fail(c, http.StatusBadGateway, "previous_response_id", err.Error())
			return false
		}
		if target == nil {
			return true
		}
		worker = target.Key.Worker
	}
	r.request.Allowed = []uint64{worker}
	return true
}

// find queries all workers of targets that answer for a response. errUnsaid: none has it, as far
// as they have said.
func (a *API) find(c *gin.Context, id string, targets []kv.Target) (holder *kv.Target, err error) {
	q := a.question(c, nil)
	q.Method, q.Path = http.MethodGet, proxy.ResponsesRoute+"/"+url.PathEscape(id)
	q.Header.Del("Content-Type")
	targets = slices.DeleteFunc(kv.OnePerWorker(targets), func(t kv.Target) bool { return t.Role == kv.RolePrefill })
	a.proxy.AskAll(c.Request.Context(), targets, q, func(answer proxy.Answer) bool {
		switch {
		case answer.Err == nil && answer.Status == http.StatusOK:
			holder, err = &answer.Target, nil
		case answer.Err != nil || !deniesResponse(answer.Status):
			err = errUnsaid
		}
		return holder == nil
	})
	if holder != nil {
		a.noteStored(id, holder.Key.Worker, a.keys.Of(c).Owner())
	}
	return holder, err
}

// deniesResponse reports whether a worker that answers with that status has no response of the
// id that it was asked for: it says so, or has no such route, or refuses the id.
func deniesResponse(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusGone, http.StatusUnprocessableEntity,
		http.StatusNotImplemented:
		return true
	}
	return false
}

// storedRoute passes a request about a stored response to the worker that has it, and its answer
// back as it comes. rest is the path behind the id.
func (a *API) storedRoute(rest string) gin.HandlerFunc {
	return func(c *gin.Context) {
		id, caller := c.Param("id"), a.keys.Of(c)
		worker, known, may := a.mayUse(caller, id)
		if !may {
			a.noResponse(c)
			return
		}
		targets := a.models.Targets()
		var holder *kv.Target
		if at := slices.IndexFunc(targets, func(t kv.Target) bool { return known && t.Key.Worker == worker }); at >= 0 {
			holder = &targets[at]
		} else if found, err := a.find(c, id, targets); err != nil {
			a.fail(c, http.StatusBadGateway, "", err.Error())
			return
		} else if holder = found; holder == nil {
			a.noResponse(c)
			return
		}
		q := a.question(c, nil)
		q.Path = proxy.ResponsesRoute + "/" + url.PathEscape(id) + rest
		if query := web.WithoutKeys(c.Request.URL.RawQuery); query != "" {
			q.Path += "?" + query
		}
		c.Header(web.HeaderRequest, web.RequestID(c))
		if caller.SeesDecisions {
			c.Header(web.HeaderWorker, a.models.Names().Label(holder.Key.Worker))
		}
		if err := a.proxy.Pass(c.Request.Context(), c.Writer, *holder, q); err != nil && !errors.Is(err, proxy.ErrAnswered) &&
			!errors.Is(err, context.Canceled) {
			a.log.Warn("the worker of a stored response did not answer", "worker", holder.Key.Worker, "error", err)
			a.fail(c, http.StatusBadGateway, "", "the worker of this response did not answer: try again")
		}
	}
}

// noteStored remembers the worker and the owner of a response, and has other routers remember
// them.
func (a *API) noteStored(id string, worker uint64, owner keys.Owner) {
	if a.stored.Note(id, worker, owner) && a.shareStored != nil {
		a.shareStored(id, worker, owner)
	}
}
