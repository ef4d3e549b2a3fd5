package testkit

import (
	"testing"
	"time"
)

// eventually polls condition until it holds or the limit has passed.
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
