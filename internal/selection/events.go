package selection

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/kv"
)

// events answers another router that has missed events of a worker.
func (s *Service) events(c *gin.Context) {
	var worker, rank, start, end, check *uint64
	for _, parameter := range []struct {
		name string
		bits int
		into **uint64
	}{{"worker_id", 64, &worker}, {"dp_rank", 32, &rank}, {"start", 64, &start}, {"end", 64, &end}, {"check", 64, &check}} {
		text, given := c.GetQuery(parameter.name)
		if !given {
			continue
		}
		n, err := strconv.ParseUint(text, 10, parameter.bits)
		if err != nil {
			plainError(c, http.StatusBadRequest, fmt.Sprintf("%s=%.40s: it must be a whole number of at most %d bits", parameter.name, text, parameter.bits))
			return
		}
		*parameter.into = &n
	}
	var key kv.WorkerKey
	switch {
	case worker == nil:
		plainError(c, http.StatusBadRequest, "worker_id is missing")
		return
	case start != nil && end != nil && *end < *start:
		plainError(c, http.StatusBadRequest, fmt.Sprintf("invalid range: end %d is before start %d", *end, *start))
		return
	case rank != nil:
		key.Rank = uint32(*rank)
	}
	key.Worker = *worker
	log := s.history(key)
	if log == nil {
		plainError(c, http.StatusNotFound, fmt.Sprintf("no KV events of worker %d rank %d are followed here", key.Worker, key.Rank))
		return
	}
	answer := log.Query(start, end, check)
	answer.BlockSize = s.router.BlockSize()
	c.JSON(http.StatusOK, answer)
}
