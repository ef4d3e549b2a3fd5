package testkit

import (
	"sync"
	"testing"
)

func TestNoPortIsGivenTwice(t *testing.T) {
	var mu sync.Mutex
	given := map[int]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				base := FreePorts(t, 10)
				mu.Lock()
				for port := base; port < base+10; port++ {
					if given[port] {
						t.Errorf("port %d was given twice", port)
					}
					given[port] = true
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func TestPortsOfAnEndedTestAreGivenAgain(t *testing.T) {
	dir := t.TempDir()
	first, ok := claimPorts(dir, 20004, 8)
	if !ok || len(first) != 2 {
		t.Fatalf("8 ports over two groups: %d locks, %t", len(first), ok)
	}
	if second, ok := claimPorts(dir, 20011, 1); ok {
		t.Errorf("a port of a claimed group was claimed: %d locks", len(second))
	}
	for _, claim := range first {
		claim.Close()
	}
	if second, ok := claimPorts(dir, 20000, 16); !ok {
		t.Errorf("released ports were not claimed: %d locks", len(second))
	}
}
