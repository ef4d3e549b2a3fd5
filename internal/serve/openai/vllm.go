package openai

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// abortLimit bounds a body that names requests of vLLM to abort, bytes.
const abortLimit = 1 << 20

// errNoVLLM refuses a request for vLLM where only other workers are up.
var errNoVLLM = errors.New("this route needs a vLLM worker, and none is up")

// serveVLLM adds vLLM's own short routes to those of clients. own guards those that pages of
// other sites may not call.
func (a *API) serveVLLM(clients gin.IRoutes, own gin.HandlerFunc) {
	clients.GET("/tokenizer_info", a.tokenizerInfo)
	clients.GET("/load", a.serverLoad)
	clients.POST("/inference/v1/abort_requests", own, a.abortRequests)
}

// vllmWorkers returns one target of each worker that is up and may run vLLM; none: the request
// has been answered.
func (a *API) vllmWorkers(c *gin.Context) (targets []kv.Target) {
	for _, t := range a.workers() {
		if !t.RunsSGLang() {
			targets = append(targets, t)
		}
	}
	a.refuseWithout(c, targets, errNoVLLM)
	return targets
}

// tokenizerInfo passes on the answer of the first worker that gives one.
func (a *API) tokenizerInfo(c *gin.Context) {
	targets := a.vllmWorkers(c)
	if len(targets) == 0 {
		return
	}
	for _, t := range targets[:min(len(targets), askedInTurn)] {
		if err := a.proxy.Pass(c.Request.Context(), c.Writer, t, a.question(c, nil)); err == nil || errors.Is(err, proxy.ErrAnswered) {
			return
		}
	}
	a.fail(c, http.StatusBadGateway, "", "no vLLM worker answered "+c.FullPath())
}

// serverLoad answers with the sum of the loads that workers report.
func (a *API) serverLoad(c *gin.Context) {
	targets := a.vllmWorkers(c)
	if len(targets) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), askTimeout)
	defer cancel()
	q := a.question(c, nil)
	q.Limit = answerLimit
	sum, heard := 0.0, false
	a.proxy.AskAll(ctx, targets, q, func(answer proxy.Answer) bool {
		if load := gjson.GetBytes(answer.Body, "server_load"); answer.Err == nil && answer.Status == http.StatusOK && load.Type == gjson.Number {
			sum, heard = sum+max(0, load.Num), true
		}
		return true
	})
	if !heard {
		a.fail(c, http.StatusBadGateway, "", "no vLLM worker answered /load")
		return
	}
	c.JSON(http.StatusOK, gin.H{"server_load": int64(min(sum, 1<<53))})
}

// abortRequests ends requests on every worker, by the names that clients read in answers. With
// several keys they are those of the client's own requests.
func (a *API) abortRequests(c *gin.Context) {
	text, ok := a.smallBody(c, abortLimit)
	if !ok {
		return
	}
	var ids gjson.Result
	if body, ok := jsonbody.Parse(text); ok {
		ids = body.Get("request_ids")
	}
	var names []string
	ok = ids.IsArray()
	jsonbody.EachElement(ids.Raw, func(id gjson.Result) bool {
		if ok = ok && id.Type == gjson.String; ok {
			names = append(names, a.engineNames(c, strings.Clone(id.Str))...)
		}
		return ok
	})
	if !ok {
		a.fail(c, http.StatusBadRequest, "request_ids", `the body must be a JSON object with "request_ids", a list of strings`)
		return
	}
	targets := a.vllmWorkers(c)
	if len(targets) == 0 || len(names) == 0 {
		return
	}
	list := []byte{'['}
	for _, name := range names {
		a.aborted.note(name)
		list = append(jsonbody.AppendString(list, name), ',')
	}
	list[len(list)-1] = ']'
	a.abort(c, targets, string(jsonbody.AppendObject(nil, []jsonbody.Field{{Key: "request_ids", Raw: string(list)}})))
}

// idPrefixes are what vLLM puts before the id of a request to make it the name of one of its own.
// On proxy.ResponsesRoute that is nothing.
var idPrefixes = []string{"", "chatcmpl-", "cmpl-", "generate-tokens-"}

// engineNames returns the names that vLLM may have given to the request that a client calls name.
func (a *API) engineNames(c *gin.Context, name string) (names []string) {
	if !a.keys.Several() {
		return []string{name}
	}
	return scopedNames(a.keys.Of(c).Owner(), name)
}

// scopedNames is engineNames for an owner whose requests have ids of their own.
func scopedNames(owner keys.Owner, name string) (names []string) {
	for _, prefix := range idPrefixes {
		id, ok := strings.CutPrefix(name, prefix)
		if !ok {
			continue
		}
		names = append(names, prefix+owner.Scoped(id))
		if at := strings.LastIndexAny(id, "-_"); at >= 0 && isPart(id[at:]) {
			names = append(names, prefix+owner.Scoped(id[:at])+id[at:])
		}
	}
	return names
}

// isPart reports whether vLLM may have put that behind the id of a request: the number of one of
// its prompts.
func isPart(end string) bool {
	_, err := strconv.ParseUint(end[1:], 10, 32)
	return err == nil && (end[0] == '-' || end[0] == '_')
}

// aborts remembers the last names by which clients have aborted requests. The zero value is empty.
// It is safe for concurrent use.
type aborts struct {
	mu    sync.Mutex // guards the rest
	names [1024]string
	next  int
}

// maxAborted is the maximum length of a name that is remembered, bytes: those of requests are
// shorter.
const maxAborted = 512

func (a *aborts) note(name string) {
	if len(name) > maxAborted {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.names[a.next%len(a.names)] = name
	a.next++
}

// has reports whether a request was aborted that has that id at its engine.
func (a *aborts) has(id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, name := range a.names {
		for _, prefix := range idPrefixes {
			if end, ok := strings.CutPrefix(name, prefix+id); ok && (end == "" || isPart(end)) {
				return true
			}
		}
	}
	return false
}
