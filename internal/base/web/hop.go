package web

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"
)

// Hop is this router's entry in the Via header (RFC 9110, section 7.6.3) of the
// requests that it sends: the protocol version 1.1, and kvrouter- with a number
// unique to the process. It detects routing loops. An empty Hop adds and refuses
// nothing.
type Hop string

const (
	headerVia   = "Via"
	hopProtocol = "1.1 "
	hopPrefix   = "kvrouter-"
	// maxHops is the maximum number of chained routers.
	maxHops = 3
)

// NewHop returns a new unique Hop.
func NewHop() Hop {
	var random [8]byte
	rand.Read(random[:])
	return Hop(hopProtocol + hopPrefix + hex.EncodeToString(random[:]))
}

// Sign adds the router to the Via header of a request that it sends.
func (h Hop) Sign(header http.Header) {
	if h != "" {
		header[headerVia] = append(slices.Clip(header[headerVia]), string(h))
	}
}

// Refuse answers requests that have already passed this router, or too many routers,
// with 508 Loop Detected.
func (h Hop) Refuse(c *gin.Context) {
	via := c.Request.Header[headerVia]
	if len(via) == 0 || h == "" {
		return
	}
	mine, hops := h.passed(via)
	switch {
	case mine:
		Fail(c, http.StatusLoopDetected, "routing loop: the URL of a worker leads back to this router")
	case hops >= maxHops:
		Fail(c, http.StatusLoopDetected, fmt.Sprintf("routing loop: the request has passed %d routers, at most %d may be chained", hops, maxHops))
	default:
		return
	}
	c.Abort()
}

// passed reports whether a Via header names the router, and how many routers it
// names.
func (h Hop) passed(via []string) (mine bool, hops int) {
	for _, value := range via {
		for part := range strings.SplitSeq(value, ",") {
			// protocol, name, perhaps a comment
			if fields := strings.Fields(part); len(fields) > 1 && strings.HasPrefix(fields[1], hopPrefix) {
				hops++
				mine = mine || fields[1] == strings.TrimPrefix(string(h), hopProtocol)
			}
		}
	}
	return mine, hops
}

// Name returns the router's name in Via headers; empty: it has none.
func (h Hop) Name() string { return strings.TrimPrefix(string(h), hopProtocol) }
