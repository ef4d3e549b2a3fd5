package testkit

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// freePorts returns the first of n ports in a row that nothing listens on. They
// lie below the range that outgoing connections take theirs from, so that they
// stay free until the test listens there.
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

// settles polls a condition that says what is still wrong.
func Settles(t *testing.T, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-tick.C
	}
}

// processLives tells whether a process runs; a zombie does not.
func ProcessLives(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

// killedRouter is what a router process tells before it is killed.
type KilledRouter struct {
	PIDs   []int // of its workers and their children
	Folder string
}
