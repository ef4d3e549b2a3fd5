package hints

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
)

// HeaderRouted marks a request that a router has sent to a router below it. Then the hints that
// affect other clients count in headers only, which that router has set, and not in the body,
// which is its client's. Who sets it otherwise only gives up hints.
const HeaderRouted = "X-Kvrouter-Routed"

// headerOutput has the expected tokens of the answer that a router above has accepted.
const headerOutput = "X-Kvrouter-Osl"

// Routed is what a router sends to a router below it with a request.
type Routed struct {
	Tenant   string        // empty: none
	Class    fair.Class    // of the request
	Deadline time.Time     // by which its first token should come; zero: none
	TPOT     time.Duration // in which each further token should come; 0: none
	Output   int           // expected tokens of the answer; 0: unknown

	Series        string // of Prefix; empty: none
	SessionHeader string // names the session; empty: no header does
	Session       string // may have any bytes; empty: none is sent
}

// DropUntrusted removes the headers that are honored of trusted clients only: a worker may be a
// router that honors them, too.
func DropUntrusted(header http.Header) {
	header.Del(headerPriority)
	dropSigned(header)
}

// dropSigned removes the headers that Sign sets, or that name workers of this router.
func dropSigned(header http.Header) {
	for _, name := range []string{HeaderPinnedWorker, HeaderPinnedRank, HeaderPinnedPrefill, headerPrefillRank, HeaderFairness,
		HeaderGatewayFairness, HeaderTTFT, HeaderTPOT, headerOutput} {
		header.Del(name)
	}
}

// Sign sets the headers of the request in place of the client's. now is by the clock of Deadline:
// the remaining time is sent.
func (r Routed) Sign(header http.Header, now time.Time) {
	dropSigned(header)
	header.Set(HeaderRouted, "1")
	header.Set(HeaderClass, r.Class.String())
	if r.Tenant != "" && !strings.ContainsFunc(r.Tenant, unicode.IsControl) {
		header.Set(HeaderFairness, r.Tenant)
	}
	if r.SessionHeader != "" {
		if header.Del(r.SessionHeader); r.Session != "" { // sessions of two keys may have one name
			header.Set(r.SessionHeader, url.QueryEscape(r.Session))
		}
	}
	if r.Output > 0 {
		header.Set(headerOutput, strconv.Itoa(r.Output))
	}
	if header.Del(prefixHeaders[0].header); r.Series != "" && !strings.ContainsFunc(r.Series, unicode.IsControl) {
		header.Set(prefixHeaders[0].header, r.Series)
	}
	objective := func(name string, d time.Duration) {
		if ms := float64(d) / float64(time.Millisecond); ms > 0 && ms <= maxObjective {
			header.Set(name, strconv.FormatFloat(ms, 'f', -1, 64))
		}
	}
	if !r.Deadline.IsZero() {
		objective(HeaderTTFT, max(time.Millisecond, r.Deadline.Sub(now)))
	}
	objective(HeaderTPOT, r.TPOT)
}

// readRouted is Read of a request with HeaderRouted.
func readRouted(header http.Header, nvext gjson.Result, names *kv.Names, trusted bool) (hints Hints) {
	r := hintReader{names: names}
	if r.object("nvext", nvext) {
		r.annotations(nvext.Get("annotations"), &hints)
		r.agentHints(nvext.Get("agent_hints"), &hints)
	}
	r.prefixHeaders(header, &hints.Prefix)
	hints = hints.Untrusted()
	hints.FromAbove = true
	hints.Class = r.class(hint{HeaderClass, header.Get(HeaderClass)})
	if trusted {
		hints.Tenant = tenantOf(header)
		hints.TTFT, hints.TPOT = r.objective(hint{HeaderTTFT, header.Get(HeaderTTFT)}), r.objective(hint{HeaderTPOT, header.Get(HeaderTPOT)})
		hints.ExpectedOutput = int(r.whole(hint{headerOutput, header.Get(headerOutput)}, 31))
	}
	return hints // the router has refused what is malformed
}
