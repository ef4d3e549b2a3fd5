package web

import (
	"net"
	"net/http"
)

// Bound is bound with the usual time of stall.
func Bound(server *http.Server, port net.Listener, most int) net.Listener {
	return bound(server, port, most, Stall)
}

// NewServer is newServer with a handler.
func NewServer(handler http.Handler) *http.Server {
	server := newServer()
	server.Handler = handler
	return server
}
