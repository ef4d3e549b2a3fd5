package main

import (
	"net/http"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails the run if a goroutine is left behind by any test.
func TestMain(m *testing.M) {
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
