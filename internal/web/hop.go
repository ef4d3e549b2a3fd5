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

// Hop is this router's entry in the Via header (RFC 9110, section 7.6.3) of what it
// sends: 1.1, the protocol, and kvrouter- with a number that no other process has. A
// request that comes back to it is known by it. Empty: nothing is signed, nothing
// refused.
type Hop string

const (
	headerVia   = "Via"
	hopProtocol = "1.1 "
	hopPrefix   = "kvrouter-"
	// maxHops bounds the routers that a request may have passed: a router behind
	// a router is meant, a ring of several is not.
	maxHops = 3
)

// NewHop returns the name of a router that starts.
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

// Refuse answers requests that have passed this router before, or too many routers,
// with 508 Loop Detected: some worker's address leads back here.
func (h Hop) Refuse(c *gin.Context) {
	via := c.Request.Header[headerVia]
	if len(via) == 0 || h == "" {
		return
	}
	mine, hops := h.passed(via)
	switch {
	case mine:
		OpenAIError(c, http.StatusLoopDetected, "routing loop: the URL of a worker leads back to this router")
	case hops >= maxHops:
		OpenAIError(c, http.StatusLoopDetected, fmt.Sprintf("routing loop: the request has passed %d routers, at most %d may be chained", hops, maxHops))
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
