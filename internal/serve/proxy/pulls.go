package proxy

import (
	"crypto/rand"
	"fmt"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/decide/router"
)

// HeaderSource is the header that names llm-d's sidecar the worker from which its engine
// pulls the beginning of the prompt.
const HeaderSource = "X-Kv-Cache-Source-Host-Port"

// Pulls reports whether a request of that route can have its worker pull blocks. It cannot
// if the client sets transfer parameters itself, or asks for more than one answer or for
// figures of the prompt's tokens, for which an engine computes the prompt.
func Pulls(route string, body *jsonbody.Body) bool {
	if route != chatRoute && route != completionRoute || SeveralAnswers(route, body) {
		return false
	}
	for _, key := range []string{"kv_transfer_params", "prompt_logprobs", "echo"} {
		if asks(body, key) {
			return false
		}
	}
	return true
}

// pullParams are the transfer parameters by which vLLM's tier p2p pulls blocks from the
// decision's source; empty: it has none, or a gateway's sidecar writes them.
func pullParams(u *sending, d *router.Decision) string {
	if d.Source == nil || u.Gateway != nil {
		return ""
	}
	at := d.Source.PeerAddress()
	return fmt.Sprintf(`{"remote_kv_source":{"kv_request_id":%s,"remote_host":%s,"remote_port":%d}}`, Quoted(u.RequestID+"-"+rand.Text()), Quoted(at.Host), at.Port)
}
