package selection

import (
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
	guarded.GET("/list_workers", s.listURLs)
	guarded.POST("/add_worker", withURL(s.addURL))
	guarded.POST("/remove_worker", withURL(s.removeURL))
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

// addURL adds the worker at a URL, probes it for everything else and responds once it is
// ready.
func (s *Service) addURL(c *gin.Context, url string) {
	key := kv.Secret(c.Query("api_key"))
	if err := (workerSpec{APIKey: &key}).check(); err != nil {
		c.String(http.StatusBadRequest, "%s", err.Error())
		return
	}
	if s.fleet.LeadsBack(c.Request.Context(), url) {
		c.String(http.StatusBadRequest, "%s", url+" is an address of this router itself or leads back to it: give the address of the worker")
		return
	}
	if len(s.fleet.Workers()) >= maxRegistered {
		c.String(http.StatusServiceUnavailable, "there are %d workers, which is the maximum", maxRegistered)
		return
	}
	id, err := s.fleet.Add(c.Request.Context(), url, key)
	var late *workers.NotReadyError
	switch {
	case err == nil:
		s.log.Info(fmt.Sprintf("worker %d: added", id), "url", url)
		c.String(http.StatusOK, "%s", "Successfully added worker: "+url)
	case errors.Is(err, workers.ErrKnown):
		c.String(http.StatusBadRequest, "%s", "Worker "+url+" already exists")
	case errors.As(err, &late):
		c.String(http.StatusBadRequest, "%s",
			fmt.Sprintf("Timeout %.0fs waiting for worker %s to become healthy. Please set --startup-timeout to a larger value. %s",
				late.Limit.Seconds(), url, late.Why))
	default:
		c.String(http.StatusServiceUnavailable, "%s", err.Error())
	}
}

// removeURL removes the worker at a URL that a client has added or registered. An unknown
// one counts as removed.
func (s *Service) removeURL(c *gin.Context, url string) {
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
		c.String(http.StatusBadRequest, "%s", "Worker "+url+" was started by the router, or attached by --worker: it cannot be removed")
		return
	}
	s.log.Info("worker removed", "url", url, "was_there", found)
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
