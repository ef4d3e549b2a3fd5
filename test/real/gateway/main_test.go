// Package gateway has a real Envoy ask the built router where each request goes:
// `make test-gateway`. Without $KVROUTER_ENVOY its tests are skipped.
package gateway

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
