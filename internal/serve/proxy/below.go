package proxy

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
)

// Below is what a router below this one has decided about a request.
type Below struct {
	Worker  string // that it chose; empty: it does not say
	Overlap int    // prompt tokens that it predicts cached there
}

// forThisRouter begin the names of the headers of a worker's answer that are for this router alone:
// about the workers of a router below, about the limits of the key that this router has there, and
// about pages that may read the answer, which --cors-origins says here.
var forThisRouter = []string{web.HeaderOwn, "X-Ratelimit-", "Access-Control-"}

// dropOwn removes from the headers of a worker's answer those that its client must not get.
func dropOwn(header http.Header) {
	for name := range header {
		if slices.ContainsFunc(forThisRouter, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			delete(header, name)
		}
	}
}

// readBelow takes what a router below says of its decision out of the headers of its answer, and
// tells the booking how much of the prompt was found.
func (x *Exchange) readBelow(header http.Header) {
	worker := kv.MetricLabel(header.Get(web.HeaderWorker))
	overlap, err := strconv.Atoi(header.Get(web.HeaderOverlap))
	if worker == "" || err != nil || overlap < 0 || overlap > kv.MaxTokens {
		return
	}
	x.Below = Below{worker, overlap}
	x.Decision.Booking.Found(overlap)
}

// show sets the headers of the answer.
func (b Below) show(header http.Header) {
	if b.Worker != "" {
		header.Set(web.HeaderCellWorker, b.Worker)
		header.Set(web.HeaderCellOverlap, strconv.Itoa(b.Overlap))
	}
}
