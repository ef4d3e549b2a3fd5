package selection

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/decide/router"
)

// lastDecisions is the default number of decisions in a response.
const lastDecisions = 20

// decisionsAnswer explains the latest decisions of both ports.
type decisionsAnswer struct {
	Explained bool              `json:"explained"` // explanations were on before this request; they stay on for a minute after it
	Decisions []*router.Receipt `json:"decisions"` // newest first
}

// explainDecisions explains the latest decisions.
func (s *Service) explainDecisions(c *gin.Context) {
	last := lastDecisions
	if text, given := c.GetQuery("last"); given {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > router.MaxReceipts {
			plainError(c, http.StatusBadRequest, fmt.Sprintf("last must be a number of decisions from 1 to %d", router.MaxReceipts))
			return
		}
		last = n
	}
	list, explained := s.models.Decisions(last)
	if list == nil {
		list = []*router.Receipt{}
	}
	c.JSON(http.StatusOK, decisionsAnswer{explained, list})
}
