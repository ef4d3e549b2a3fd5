package selection

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/workers"
)

// managed adds the routes by which clients of sglang-router manage its workers, each
// named by its URL. The responses are word for word those of sglang-router: text, except
// for lists.
func (s *Service) managed(open, guarded gin.IRoutes) {
	open.GET("/liveness", func(c *gin.Context) { c.String(http.StatusOK, "OK") })
	open.GET("/readiness", s.readiness)
	s.byURL(guarded)
}

// byURL adds those of them that change or list the workers.
func (s *Service) byURL(routes gin.IRoutes) {
	routes.GET("/list_workers", s.listURLs)
	routes.POST("/add_worker", withURL(s.addURL))
	routes.POST("/remove_worker", withURL(s.removeURL))
}

// readiness reports whether a worker that generates tokens is up and not cordoned.
func (s *Service) readiness(c *gin.Context) {
	healthy, answers := map[uint64]bool{}, false
	for _, t := range s.models.Targets() {
		if t.Unanswered {
			continue
		}
		healthy[t.Key.Worker] = true
		answers = answers || t.Role != kv.RolePrefill && !t.Cordoned
	}
	if !answers || s.draining.Load() {
		c.JSON(http.StatusServiceUnavailable, gin.H{"status": "not ready", "reason": "insufficient healthy workers"})
		return
	}
	c.JSON(http.StatusOK, gin.H{"status": "ready", "healthy_workers": len(healthy), "total_workers": len(s.fleet.Workers())})
}

// listURLs lists the URLs of all workers that have ever responded or were registered.
func (s *Service) listURLs(c *gin.Context) {
	urls := []string{}
	for _, w := range s.fleet.Workers() {
		if w.Generation > 0 {
			urls = append(urls, w.URL)
		}
	}
	c.JSON(http.StatusOK, gin.H{"urls": urls})
}

// withURL returns a handler of requests that name a worker by its URL.
func withURL(handle func(c *gin.Context, url string)) gin.HandlerFunc {
	return func(c *gin.Context) {
		given := c.Query("url")
		if given == "" {
			c.String(http.StatusBadRequest, "Worker URL required. Provide 'url' query parameter")
			return
		}
		url, err := kv.ParseURL(given)
		if err != nil {
			c.String(http.StatusBadRequest, "%s", "url: "+err.Error())
			return
		}
		handle(c, url)
	}
}

// errFull refuses a worker beyond the maximum.
var errFull = fmt.Errorf("there are %d workers, which is the maximum", maxRegistered)

// leadsBack is the error of a worker's address that is this router's.
type leadsBack string

func (l leadsBack) Error() string {
	return string(l) + " is an address of this router itself or leads back to it: give the address of the worker"
}

// attach adds the worker at a URL, probes it for everything else and returns once it is
// ready. Its errors are leadsBack, errFull and those of Fleet.Add.
func (s *Service) attach(ctx context.Context, url string, key kv.Secret) (id uint64, err error) {
	if s.fleet.LeadsBack(ctx, url) {
		return 0, leadsBack(url)
	}
	if len(s.fleet.Workers()) >= maxRegistered {
		return 0, errFull
	}
	if id, err = s.fleet.Add(ctx, url, key); err == nil {
		s.log.Info(fmt.Sprintf("worker %d: added", id), "url", url)
	}
	return id, err
}

// addURL is attach in the words of sglang-router.
func (s *Service) addURL(c *gin.Context, url string) {
	key := kv.Secret(c.Query("api_key"))
	if err := (workerSpec{APIKey: &key}).check(); err != nil {
		c.String(http.StatusBadRequest, "%s", err.Error())
		return
	}
	_, err := s.attach(c.Request.Context(), url, key)
	switch {
	case err == nil:
		c.String(http.StatusOK, "%s", "Successfully added worker: "+url)
	case errors.Is(err, workers.ErrKnown):
		c.String(http.StatusBadRequest, "%s", "Worker "+url+" already exists")
	default:
		c.String(attachStatus(err), "%s", attachError(url, err))
	}
}

// attachStatus is the status for an error of attach.
func attachStatus(err error) int {
	var late *workers.NotReadyError
	var back leadsBack
	if errors.As(err, &late) || errors.As(err, &back) {
		return http.StatusBadRequest
	}
	return http.StatusServiceUnavailable
}

// attachError is the text for it.
func attachError(url string, err error) string {
	var late *workers.NotReadyError
	if errors.As(err, &late) {
		return fmt.Sprintf("Timeout %.0fs waiting for worker %s to become healthy. Please set --startup-timeout to a larger value. %s",
			late.Limit.Seconds(), url, late.Why)
	}
	return err.Error()
}

// detach removes the worker at a URL that a client has added or registered. An unknown
// one counts as removed. Not ok: the worker is of the flags, or was started.
func (s *Service) detach(url string) (ok bool) {
	s.changing.Lock()
	defer s.changing.Unlock()
	id, found := s.fleet.Remove(url)
	if found {
		s.reserved.releaseWorker(id)
	}
	for _, id := range s.registeredBy(url) {
		s.unregister(id)
		found = true
	}
	if !found && slices.ContainsFunc(s.fleet.Workers(), func(w workers.Status) bool { return w.URL == url }) {
		return false
	}
	s.log.Info("worker removed", "url", url, "was_there", found)
	return true
}

// removeURL is detach in the words of sglang-router.
func (s *Service) removeURL(c *gin.Context, url string) {
	if !s.detach(url) {
		c.String(http.StatusBadRequest, "%s", "Worker "+url+" was started by the router, or attached by --worker: it cannot be removed")
		return
	}
	c.String(http.StatusOK, "%s", "Successfully removed worker: "+url)
}

// registeredBy returns the ids of the workers that are registered with a URL.
func (s *Service) registeredBy(url string) (ids []uint64) {
	for id, w := range s.partitions.list() {
		if given, err := kv.ParseURL(Given(w.spec.Endpoint, "")); err == nil && given == url {
			ids = append(ids, id)
		}
	}
	return ids
}

// unregister removes a registered worker; s.changing is held.
func (s *Service) unregister(id uint64) {
	s.fleet.Unregister(id)
	s.partitions.remove(id)
	s.reserved.releaseWorker(id)
}
