package testkit

import (
	"kvrouter/internal/zmq"
	"testing"

	"go.uber.org/goleak"
)

func NewTestPublisher(t *testing.T) *zmq.Publisher {
	t.Helper()
	before := goleak.IgnoreCurrent()
	p, err := zmq.NewPublisher("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		goleak.VerifyNone(t, before)
	})
	return p
}
