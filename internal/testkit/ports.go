package testkit

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreePorts returns the first of n consecutive free ports. They are below the range of
// ephemeral ports, so that they stay free until the test listens on them.
func FreePorts(t testing.TB, n int) int {
	t.Helper()
	for range 100 {
		base := 20000 + rand.IntN(12000)
		free := true
		for i := range n {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base+i))
			if err != nil {
				free = false
				break
			}
			l.Close()
		}
		if free {
			return base
		}
	}
	t.Fatal("no free ports")
	return 0
}
