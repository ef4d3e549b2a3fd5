// Package leaks fails the tests of a package that leave goroutines behind.
package leaks

import (
	"net/http"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Main runs a package's tests and ends the process. It fails if any test leaves a
// goroutine behind. Call it from TestMain.
func Main(m *testing.M) {
	status := m.Run()
	http.DefaultClient.CloseIdleConnections()
	if status == 0 {
		if err := goleak.Find(); err != nil {
			os.Stderr.WriteString("goroutines are left behind: " + err.Error() + "\n")
			status = 1
		}
	}
	os.Exit(status)
}
