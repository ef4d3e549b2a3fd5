// Package vllm runs the built router over real vLLM workers, which `make setup`
// installs. go test -short leaves its tests out.
package vllm

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
