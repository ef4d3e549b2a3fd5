package web

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"
)

const (
	// dialTimeout is the longest time to open a connection to a worker.
	dialTimeout = 3 * time.Second
	// handshakeTimeout is the longest time for TLS beside that.
	handshakeTimeout = 5 * time.Second
	// unanswered is the time that a worker's machine may leave bytes or probes without
	// an acknowledgement until the connection is broken. TCP alone takes 15
	// minutes for bytes, and with Go's probes 2 for silence.
	unanswered = 10 * time.Second
	// workerIdle is the time that an unused connection to a worker is kept: less than
	// the 5 s after which uvicorn closes it, so that no request meets a connection
	// that is just being closed.
	workerIdle = 4 * time.Second
	// workerIdlePerHost bounds the unused connections to one worker.
	workerIdlePerHost = 1024
	// idleSixteenths is the share of the descriptors that unused connections to all
	// workers may take, in sixteenths.
	idleSixteenths = 2
)

// NewTransport returns the HTTP transport to workers. config applies to https URLs; nil
// uses the system's roots. Connections to a machine that has disappeared fail after
// about 10 s on Linux, and after the system's own limits elsewhere.
func NewTransport(config *tls.Config) *http.Transport {
	probes := net.KeepAliveConfig{Enable: true, Idle: 4 * time.Second, Interval: 2 * time.Second, Count: 3}
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAliveConfig: probes, Control: limitUnanswered}
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &readableConn{Conn: conn}, nil
		},
		TLSClientConfig:     config,
		TLSHandshakeTimeout: handshakeTimeout,
		MaxIdleConns:        max(1, Descriptors()*idleSixteenths/16),
		MaxIdleConnsPerHost: workerIdlePerHost,
		IdleConnTimeout:     workerIdle,
		DisableCompression:  true,
		// Every connection has these buffers. Most requests go in one write, and an event with
		// the ids of a prompt's tokens comes in one read, with what follows it.
		WriteBufferSize: 16 << 10,
		ReadBufferSize:  16 << 10,
	}
}

// NewClient returns a client over transport that follows no redirects: a worker must
// not choose which hosts the router connects to. A request whose kept connection ends
// before any byte of the answer is sent once more, on a new one; one that cannot be sent
// fails with ErrUnsendable. The transport must not be changed afterwards.
func NewClient(transport http.RoundTripper) *http.Client {
	if t, ok := transport.(*http.Transport); ok {
		transport = newResender(t)
	}
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// OwnFault reports whether a connection could not be opened because this machine lacks
// descriptors, ports or memory. Such an error says nothing about the peer.
func OwnFault(err error) bool {
	if err == nil {
		return false
	}
	for _, lack := range []error{syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL, syscall.ENOBUFS, syscall.ENOMEM} {
		// The resolver's errors have the text only.
		if errors.Is(err, lack) || strings.Contains(err.Error(), lack.Error()) {
			return true
		}
	}
	return false
}
