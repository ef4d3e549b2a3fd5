package page

import (
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
)

// act performs a user's action on a worker.
func (p *Page) act(c *gin.Context) {
	id, err := strconv.ParseUint(c.Param("id"), 10, 64)
	if err != nil {
		fail(c, http.StatusNotFound, "no such worker")
		return
	}
	action, called := c.Param("action"), p.deps.Models.Names().Label(id)
	switch action {
	case "drain":
		err = p.deps.Models.Cordon(id)
	case "readmit":
		err = p.deps.Models.Readmit(id)
	case "reset-cache":
		err = p.resetCache(c, id)
	default:
		fail(c, http.StatusNotFound, "no such action: use drain, readmit or reset-cache")
		return
	}
	var refused *engineError
	switch {
	case err == nil:
		p.log.Info(fmt.Sprintf("worker %s: %s, requested on the dashboard", called, action))
		c.Status(http.StatusNoContent)
	case errors.Is(err, router.ErrUnknownWorker):
		fail(c, http.StatusNotFound, fmt.Sprintf("worker %s is not up", called))
	case errors.Is(err, errKept):
		fail(c, http.StatusConflict, err.Error())
	case errors.As(err, &refused):
		fail(c, http.StatusBadGateway, err.Error())
	default:
		p.log.Warn(fmt.Sprintf("worker %s: %s failed", called, action), "error", err)
		fail(c, http.StatusBadGateway, fmt.Sprintf("worker %s did not answer", called))
	}
}

// errKept means that an engine did not drop its cache.
var errKept = errors.New("the engine kept its cache: running requests use it")

// engineError is an engine's refusal of an action.
type engineError struct {
	path   string
	status int
}

func (e *engineError) Error() string {
	text := fmt.Sprintf("the engine answered %d to POST %s", e.status, e.path)
	if e.status == http.StatusNotFound {
		text += ": vLLM has this route with VLLM_SERVER_DEV_MODE=1 in its environment"
	}
	return text
}

// resetCache asks a worker to drop its prefix cache. It publishes the dropped blocks, so
// the index follows.
func (p *Page) resetCache(c *gin.Context, id uint64) error {
	targets := p.deps.Models.Targets()
	at := slices.IndexFunc(targets, func(t kv.Target) bool { return t.Key.Worker == id })
	if at < 0 {
		return router.ErrUnknownWorker
	}
	path := "/reset_prefix_cache"
	if targets[at].RunsSGLang() {
		path = "/flush_cache"
	}
	status, answer, err := p.deps.Proxy.Ask(c.Request.Context(), targets[at], http.MethodPost, path, http.Header{}, nil)
	switch success := gjson.GetBytes(answer, "success"); {
	case err != nil:
		return err
	case status >= http.StatusBadRequest:
		return &engineError{path, status}
	case success.Exists() && !success.Bool():
		return errKept
	}
	return nil
}

// vars shows the state of Go's runtime.
func (p *Page) vars(c *gin.Context) {
	samples := []metrics.Sample{}
	for _, d := range metrics.All() {
		if d.Kind == metrics.KindUint64 || d.Kind == metrics.KindFloat64 {
			samples = append(samples, metrics.Sample{Name: d.Name})
		}
	}
	metrics.Read(samples)
	values := gin.H{}
	for _, s := range samples {
		if s.Value.Kind() == metrics.KindUint64 {
			values[s.Name] = s.Value.Uint64()
		} else {
			values[s.Name] = s.Value.Float64()
		}
	}
	c.JSON(http.StatusOK, gin.H{
		"version": p.settings.Version, "go": runtime.Version(), "uptime": seconds(p.now().Sub(p.began)),
		"cpus": runtime.NumCPU(), "gomaxprocs": runtime.GOMAXPROCS(0), "goroutines": runtime.NumGoroutine(), "viewers": p.viewers.n.Load(),
		"runtime": values,
	})
}
