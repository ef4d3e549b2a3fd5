package hints

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"kvrouter/internal/base/fair"
)

// Headers of the Gateway API Inference Extension and of llm-d about a request's share: whose
// it uses, by when it needs its first token, and in which time each further one, ms.
const (
	HeaderFairness        = "X-Llm-D-Inference-Fairness-Id"
	HeaderGatewayFairness = "X-Gateway-Inference-Fairness-Id"
	HeaderTTFT            = "X-Llm-D-Slo-Ttft-Ms"
	HeaderTPOT            = "X-Llm-D-Slo-Tpot-Ms"
)

// HeaderClass names the class of a request in a fair queue. Not only trusted clients may use it.
const HeaderClass = "X-Kvrouter-Class"

const (
	// maxTenant bounds the name of a tenant, bytes.
	maxTenant = 64
	// maxObjective bounds an objective, ms: a day.
	maxObjective = 86_400_000
)

// tenantOf returns the tenant that the headers name, at most maxTenant bytes; empty: none.
func tenantOf(header http.Header) string {
	name := header.Get(HeaderFairness)
	if name == "" {
		name = header.Get(HeaderGatewayFairness)
	}
	return strings.ToValidUTF8(name[:min(len(name), maxTenant)], "")
}

// objective reads a number of milliseconds; nothing is none.
func (r *hintReader) objective(h hint) time.Duration {
	if h.text == "" {
		return 0
	}
	ms, err := strconv.ParseFloat(h.text, 64)
	if err != nil || !(ms > 0 && ms <= maxObjective) {
		r.fail(h, "a number of milliseconds above 0 and at most "+strconv.Itoa(maxObjective))
		return 0
	}
	return time.Duration(ms * float64(time.Millisecond))
}

// class reads the name of a class; nothing is none.
func (r *hintReader) class(h hint) *fair.Class {
	if h.text == "" {
		return nil
	}
	class, ok := fair.ClassOf(h.text)
	if !ok {
		r.fail(h, "interactive, standard or batch")
		return nil
	}
	return &class
}
