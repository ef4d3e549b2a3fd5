// Package migration kills real engines under streams, and compares the streams with
// uninterrupted ones: `make test-migration`.
package migration

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
