// Package natstest starts NATS servers of an operator for tests.
package natstest

import (
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Start starts a server on 127.0.0.1 at a port (server.RANDOM_PORT: a free one), with options that tweak changes. It
// ends with the test.
func Start(t testing.TB, port int, tweak ...func(*server.Options)) *server.Server {
	t.Helper()
	options := &server.Options{Host: "127.0.0.1", Port: port, NoLog: true, NoSigs: true}
	for _, change := range tweak {
		change(options)
	}
	s, err := server.NewServer(options)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("the NATS server has not started")
	}
	return s
}
