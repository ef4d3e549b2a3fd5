package web

import (
	"fmt"
	"strings"
	"syscall"
	"time"
)

// tcpUserTimeout is TCP_USER_TIMEOUT, milliseconds: package syscall lacks it for
// some processors.
const tcpUserTimeout = 0x12

// limitUnanswered has the kernel break a connection whose bytes or keep-alive
// probes are not acknowledged for that time.
func limitUnanswered(network, _ string, connection syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var failed error
	err := connection.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(unanswered/time.Millisecond))
	})
	if err == nil && failed != nil {
		err = fmt.Errorf("TCP_USER_TIMEOUT: %w", failed)
	}
	return err
}
