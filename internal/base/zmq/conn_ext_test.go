package zmq_test

import (
	"testing"
	"time"

	"kvrouter/internal/base/zmq"
	"kvrouter/internal/testkit"
)

func TestZMQConnWaitEndsAtItsTime(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	c, err := zmq.DialSub(t.Context(), p.Pub.Endpoint(), "kv")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 3 { // a deadline that has passed must not spoil the next wait
		if ready, err := c.Wait(time.Now().Add(time.Millisecond)); ready || err != nil {
			t.Fatal(ready, err)
		}
	}
}
