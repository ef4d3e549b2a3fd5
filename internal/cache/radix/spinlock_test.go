package radix

import (
	"sync"
	"testing"
	"time"
)

func TestSpinLockKeepsWritersAlone(t *testing.T) {
	const callers, times = 8, 2000
	var (
		lock        spinLock
		all         sync.WaitGroup
		left, right int
	)
	for range callers {
		all.Go(func() {
			for range times {
				lock.Lock()
				left++
				right++
				lock.Unlock()
			}
		})
		all.Go(func() {
			for range times {
				lock.RLock()
				if left != right {
					t.Errorf("a reader saw %d and %d", left, right)
				}
				lock.RUnlock()
			}
		})
	}
	all.Wait()
	if left != callers*times || right != left {
		t.Errorf("%d and %d of %d changes were kept", left, right, callers*times)
	}
}

// Who holds the lock for longer than anybody tries is waited for all the same.
func TestSpinLockWaitsForALongHolder(t *testing.T) {
	var lock spinLock
	lock.Lock()
	got := make(chan string, 2)
	go func() { lock.RLock(); got <- "reader"; lock.RUnlock() }()
	go func() { lock.Lock(); got <- "writer"; lock.Unlock() }()
	for range 50 {
		select {
		case who := <-got:
			t.Fatalf("the %s got a lock that was held", who)
		case <-time.After(time.Millisecond):
		}
	}
	lock.Unlock()
	for range 2 {
		<-got
	}
}
