package zmq

import (
	"testing"
	"time"
)

// Eventually is testkit.Eventually; testkit imports zmq, so it cannot be used here.
func Eventually(t testing.TB, limit time.Duration, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("after %s still not: %s", limit, what)
		}
		<-time.After(5 * time.Millisecond)
	}
}
