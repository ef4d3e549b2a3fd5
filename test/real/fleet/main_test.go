// Package fleet runs the built router over real servers of several engines, started with the
// engines' own defaults: `make test-fleet`.
package fleet

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
