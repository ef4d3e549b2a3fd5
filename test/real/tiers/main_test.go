// Package tiers compares predictions with real engines that keep evicted blocks in host
// memory and files: `make test-tiers`.
package tiers

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
