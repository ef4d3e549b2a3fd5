package selection

import (
	"errors"
	"net/http"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/peers/replica"
)

// peerQuery names a peer router.
type peerQuery struct {
	Endpoint *string `json:"endpoint"`
}

// withPeer returns a handler of requests that name the endpoint of a peer router.
func (s *Service) withPeer(handle func(c *gin.Context, endpoint string)) gin.HandlerFunc {
	return withBody(func(c *gin.Context, query peerQuery) {
		switch {
		case query.Endpoint == nil:
			plainError(c, http.StatusUnprocessableEntity, "bad body: endpoint is missing")
		case s.dynamo == nil:
			plainError(c, http.StatusConflict, "replica sync is disabled")
		default:
			handle(c, *query.Endpoint)
		}
	})
}

// registerPeer adds a peer router.
func (s *Service) registerPeer(c *gin.Context, endpoint string) {
	switch added, err := s.dynamo.Register(endpoint); {
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
func (s *Service) deregisterPeer(c *gin.Context, endpoint string) {
	switch removed, err := s.dynamo.Deregister(endpoint); {
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
	if s.dynamo != nil {
		peers = s.dynamo.Peers()
	}
	c.JSON(http.StatusOK, peers)
}

// showCluster shows the other routers, and the connections to them.
func (s *Service) showCluster(c *gin.Context) {
	if s.mesh == nil {
		plainError(c, http.StatusConflict, "this router is in no cluster: --cluster is not set")
		return
	}
	c.JSON(http.StatusOK, s.mesh.Status())
}
