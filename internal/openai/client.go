package openai

import (
	"net/http"
	"net/netip"

	"kvrouter/internal/keys"
)

// clientOf names the client that a request is counted for where failures and retries are
// divided between clients: the name of its key, else the address of its connection, which
// for a request through a gateway is the one that the gateway states. Headers that name an
// address are not believed. Empty: neither is known.
func clientOf(r *http.Request, caller *keys.Caller) string {
	if caller.Name != "" {
		return "key " + caller.Name
	}
	return network(r.RemoteAddr)
}

// hostBits are those of an IPv6 address which its host may choose.
const hostBits = 64

// network returns the address of a connection without its port. One host has a whole
// network of IPv6 addresses, which counts as one. Empty: it is no address.
func network(remote string) string {
	from, err := netip.ParseAddrPort(remote)
	if err != nil {
		return ""
	}
	address := from.Addr().Unmap().WithZone("")
	if address.Is4() {
		return address.String()
	}
	prefix, _ := address.Prefix(128 - hostBits)
	return prefix.String()
}
