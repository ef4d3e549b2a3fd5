package selection

import (
	"errors"
	"net/http"
	"slices"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/replica"
)

// PartitionOf returns the model and the routing group of a worker.
func (s *Service) PartitionOf(worker uint64) (model, group string) {
	s.mu.Lock()
	w, registered := s.registered[worker]
	s.mu.Unlock()
	if registered {
		of := w.partition()
		return of.Model, of.Group
	}
	model = s.ownModel()
	s.models.For(worker).Router.Has(func(t *kv.Target) bool {
		if t.Key.Worker != worker {
			return false
		}
		if len(t.Models) > 0 && !slices.Contains(t.Models, model) { // an attached one may have another name
			model = t.Models[0]
		}
		return true
	})
	return model, events.DefaultGroup
}

// peerEndpoint reads the endpoint that a request names; not ok: it has been answered.
func (s *Service) peerEndpoint(c *gin.Context) (endpoint string, ok bool) {
	var query struct {
		Endpoint *string `json:"endpoint"`
	}
	if !body(c, &query) {
		return "", false
	}
	switch {
	case query.Endpoint == nil:
		plainError(c, http.StatusUnprocessableEntity, "bad body: endpoint is missing")
	case s.Mesh == nil:
		plainError(c, http.StatusConflict, "replica sync is disabled")
	default:
		return *query.Endpoint, true
	}
	return "", false
}

// registerPeer has another router followed.
func (s *Service) registerPeer(c *gin.Context) {
	endpoint, ok := s.peerEndpoint(c)
	if !ok {
		return
	}
	switch added, err := s.Mesh.RegisterPeer(endpoint); {
	case errors.Is(err, replica.ErrTooManyPeers):
		plainError(c, http.StatusServiceUnavailable, err.Error())
	case err != nil:
		plainError(c, http.StatusBadRequest, err.Error())
	case added:
		c.JSON(http.StatusCreated, gin.H{"status": "ok"})
	default:
		c.JSON(http.StatusOK, gin.H{"status": "ok"})
	}
}

// deregisterPeer has another router followed no more.
func (s *Service) deregisterPeer(c *gin.Context) {
	endpoint, ok := s.peerEndpoint(c)
	if !ok {
		return
	}
	switch removed, err := s.Mesh.DeregisterPeer(endpoint); {
	case err != nil:
		plainError(c, http.StatusBadRequest, err.Error())
	case removed:
		c.JSON(http.StatusOK, gin.H{"status": "ok"})
	default:
		plainError(c, http.StatusNotFound, "peer not found")
	}
}

// listPeers lists the endpoints of the other routers.
func (s *Service) listPeers(c *gin.Context) {
	peers := []string{}
	if s.Mesh != nil {
		peers = s.Mesh.Peers()
	}
	c.JSON(http.StatusOK, peers)
}
