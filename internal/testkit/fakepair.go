package testkit

import (
	"kvrouter/internal/kv"
	"net/http/httptest"
	"testing"
)

// bootstrapAt is the address of a server.
func BootstrapAt(t testing.TB, server *httptest.Server) (at kv.Bootstrap) {
	t.Helper()
	if err := at.UnmarshalText([]byte(server.Listener.Addr().String())); err != nil {
		t.Fatal(err)
	}
	return at
}
