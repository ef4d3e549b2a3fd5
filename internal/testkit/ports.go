package testkit

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// The ports that tests use are below the range of ephemeral ports, so that no connection
// takes one. A test claims groups of them, each by the lock of a file.
const (
	firstTestPort = 20000
	testPorts     = 12000
	portGroup     = 8
)

// FreePorts returns the first of n consecutive free ports. No other test, in this process
// or another, gets one of them before this test ends.
func FreePorts(t testing.TB, n int) int {
	t.Helper()
	dir := filepath.Join(os.TempDir(), "kvrouter-test-ports")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		base := firstTestPort + rand.IntN(testPorts-n+1)
		claims, ok := claimPorts(dir, base, n)
		release := func() {
			for _, claim := range claims {
				claim.Close()
			}
		}
		if ok && unused(base, n) {
			t.Cleanup(release)
			return base
		}
		release()
	}
	t.Fatalf("no %d free ports", n)
	return 0
}

// claimPorts locks the groups of n ports from base. It returns the locks it took, and
// whether these are all.
func claimPorts(dir string, base, n int) (claims []*os.File, ok bool) {
	for group := base / portGroup; group <= (base+n-1)/portGroup; group++ {
		claim, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(group)), os.O_CREATE|os.O_RDWR, 0o666)
		if err != nil {
			return claims, false
		}
		claims = append(claims, claim)
		if syscall.Flock(int(claim.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			return claims, false
		}
	}
	return claims, true
}

// unused reports whether nothing listens on n ports from base.
func unused(base, n int) bool {
	for port := base; port < base+n; port++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return false
		}
		l.Close()
	}
	return true
}
