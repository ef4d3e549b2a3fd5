package proxy

import (
	"net/http"
	"strconv"
	"strings"

	"kvrouter/internal/kv"
	"kvrouter/internal/web"
)

// Below is what a router below this one has decided about a request.
type Below struct {
	Worker  string // that it chose; empty: it does not say
	Overlap int    // prompt tokens that it predicts cached there
}

// readBelow takes what a router below says of its decision out of the headers of its answer, and
// tells the booking how much of the prompt was found.
func (x *Exchange) readBelow(header http.Header) {
	worker := kv.MetricLabel(header.Get(web.HeaderWorker))
	overlap, err := strconv.Atoi(header.Get(web.HeaderOverlap))
	for name := range header {
		if strings.HasPrefix(name, web.HeaderOwn) { // they are about its workers
			delete(header, name)
		}
	}
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
