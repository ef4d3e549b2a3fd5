// Package zoo compares predictions with real engines for models of every form: `make
// test-zoo`.
package zoo

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
