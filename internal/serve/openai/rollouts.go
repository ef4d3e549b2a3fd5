package openai

import (
	"net/http"

	"github.com/gin-gonic/gin"
)

// workerRoutes are those by which RL trainers manage workers. They know one URL, this port's.
var workerRoutes = []struct{ method, path string }{
	{http.MethodGet, "/workers"}, {http.MethodPost, "/workers"}, {http.MethodGet, "/workers/:id"}, {http.MethodDelete, "/workers/:id"},
	{http.MethodGet, "/list_workers"}, {http.MethodPost, "/add_worker"}, {http.MethodPost, "/remove_worker"},
}

// serveWorkers adds workerRoutes. They need a key of the router port or, with --rollouts, that of a trusted client.
func (a *API) serveWorkers(workers http.Handler) {
	s := &a.settings
	serve, keys := gin.WrapH(workers), s.RouterKeys
	switch {
	case s.Rollouts:
		keys = nil
	case !s.RouterKeys.Asked():
		serve = func(c *gin.Context) {
			a.fail(c, http.StatusForbidden, "", "workers are managed at the router port: start the router with --rollouts, or with --router-api-key and use that key, to manage them here")
		}
	}
	operators := a.operators("/workers", keys)
	for _, route := range workerRoutes {
		operators.Handle(route.method, route.path, serve)
	}
}

// finishSession forgets a session of the client's, of which no more requests come. It may be unknown.
func (a *API) finishSession(c *gin.Context) {
	session := c.Query("session_id")
	if session == "" {
		a.fail(c, http.StatusBadRequest, "session_id", "session_id is missing in the query")
		return
	}
	a.models.EndSession(a.keys.Of(c).Name, session)
	c.JSON(http.StatusOK, gin.H{"status": "ok", "session_id": session})
}
