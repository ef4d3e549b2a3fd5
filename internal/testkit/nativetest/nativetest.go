// Package nativetest is for tests that need the native library.
package nativetest

import (
	"fmt"
	"os"
	"testing"

	"kvrouter/internal/prompt/native"
	"kvrouter/internal/testkit/leaks"
)

// Required is the environment variable that makes a missing library an error: `make` sets it.
const Required = "KVROUTER_NATIVE"

// Main runs a package's tests, of which most need the library. Without it they are left out.
func Main(m *testing.M) {
	if native.Linked() {
		leaks.Main(m)
		return
	}
	fmt.Println("left out:", native.ErrMissing)
	if os.Getenv(Required) != "" {
		os.Exit(1)
	}
}

// Library returns the library; without it the test is skipped.
func Library(t testing.TB) native.Library {
	t.Helper()
	library, err := native.Open()
	if err != nil {
		if os.Getenv(Required) != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	return library
}
