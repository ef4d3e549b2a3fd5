package main

import (
	"fmt"
	"time"

	"kvrouter/internal/testkit"
)

// scaled is a router without workers, and the file that tells it of some.
type scaled struct {
	*mockSite
	mocks *mockSite
	file  *workersFile
}

// entry is worker i in the file.
func (s scaled) entry(i int, more string) string {
	return fmt.Sprintf("{name: w%d, url: %q%s}", i, s.mocks.workerURL(i), more)
}

// held waits until so many requests are held.
func (s scaled) held(n int) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, fmt.Sprintf("%d requests are held", n), func() bool {
		_, page := testkit.HTTPGet(s.t, s.openAI+"/metrics")
		return testkit.ReadMetricsPage(string(page))["kvrouter_held_requests"] == float64(n)
	})
}
