// Package sglang runs the built router over real SGLang servers: `make test-sglang`.
package sglang

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
