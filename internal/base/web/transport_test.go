package web_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"syscall"
	"testing"

	"kvrouter/internal/base/web"
)

// TestConnectionsToWorkersBreakWhenTheirMachineVanishes: what is sent, and the
// probes while nothing is, must be acknowledged within 10 s.
func TestConnectionsToWorkersBreakWhenTheirMachineVanishes(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := web.NewTransport(nil).DialContext(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	const userTimeout = 0x12 // TCP_USER_TIMEOUT
	for _, option := range []struct {
		name               string
		level, name_, want int
	}{
		{"TCP_USER_TIMEOUT", syscall.IPPROTO_TCP, userTimeout, 10_000},
		{"SO_KEEPALIVE", syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE, 4},
		{"TCP_KEEPINTVL", syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL, 2},
	} {
		raw.Control(func(fd uintptr) {
			if got, err := syscall.GetsockoptInt(int(fd), option.level, option.name_); err != nil || got != option.want {
				t.Errorf("%s is %d (%v), want %d", option.name, got, err, option.want)
			}
		})
	}
}

func TestRedirectsAreFollowedNowhere(t *testing.T) {
	there := 0
	inner := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { there++ }))
	defer inner.Close()
	outer := httptest.NewServer(http.RedirectHandler(inner.URL, http.StatusFound))
	defer outer.Close()
	transport := web.NewTransport(nil)
	defer transport.CloseIdleConnections()
	response, err := web.NewClient(transport).Get(outer.URL)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusFound || there != 0 {
		t.Errorf("%s, and %d requests at the other address", response.Status, there)
	}
}

func TestLackOfDescriptorsIsNobodysFault(t *testing.T) {
	dial := func(err error) error {
		return &url.Error{Op: "Get", URL: "http://h", Err: &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", err)}}
	}
	for _, test := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{dial(syscall.EMFILE), true},
		{dial(syscall.ENFILE), true},
		{dial(syscall.EADDRNOTAVAIL), true},
		{fmt.Errorf("worker at x: %w", dial(syscall.ENOBUFS)), true},
		{&net.DNSError{Err: "dial udp 10.0.0.1:53: socket: too many open files", Name: "h"}, true},
		{dial(syscall.ECONNREFUSED), false},
		{dial(syscall.EHOSTUNREACH), false},
		{context.DeadlineExceeded, false},
		{errors.New("EOF"), false},
	} {
		if got := web.OwnFault(test.err); got != test.want {
			t.Errorf("OwnFault(%v) = %v", test.err, got)
		}
	}
}
