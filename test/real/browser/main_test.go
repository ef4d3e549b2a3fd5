// Package browser looks at the built router's page in Chromium: `make test-page`.
package browser

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
