package selection

import (
	"errors"
	"net/http"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/replica"
)

// peerEndpoint reads the endpoint in a request. Not ok: an error response was sent.
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
	case s.mesh == nil:
		plainError(c, http.StatusConflict, "replica sync is disabled")
	default:
		return *query.Endpoint, true
	}
	return "", false
}

// registerPeer adds a peer router.
func (s *Service) registerPeer(c *gin.Context) {
	endpoint, ok := s.peerEndpoint(c)
	if !ok {
		return
	}
	switch added, err := s.mesh.RegisterPeer(endpoint); {
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

// deregisterPeer removes a peer router.
func (s *Service) deregisterPeer(c *gin.Context) {
	endpoint, ok := s.peerEndpoint(c)
	if !ok {
		return
	}
	switch removed, err := s.mesh.DeregisterPeer(endpoint); {
	case err != nil:
		plainError(c, http.StatusBadRequest, err.Error())
	case removed:
		c.JSON(http.StatusOK, gin.H{"status": "ok"})
	default:
		plainError(c, http.StatusNotFound, "peer not found")
	}
}

// listPeers lists the endpoints of the peer routers.
func (s *Service) listPeers(c *gin.Context) {
	peers := []string{}
	if s.mesh != nil {
		peers = s.mesh.Peers()
	}
	c.JSON(http.StatusOK, peers)
}
