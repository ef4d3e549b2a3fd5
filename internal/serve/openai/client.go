package openai

import (
	"net/http"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
)

// clientOf names the client that a request is counted for where failures and retries are
// divided between clients: the name of its key, else the address of its connection, which
// for a request through a gateway is the one that the gateway states. Headers that name an
// address are not believed. Empty: neither is known.
func clientOf(r *http.Request, caller *keys.Caller) string {
	if caller.Name != "" {
		return "key " + caller.Name
	}
	return web.AddressOf(r)
}
