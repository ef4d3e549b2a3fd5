// Package kubernetes runs the built router beside a real control plane, and its chart
// through helm: `make test-kubernetes`.
package kubernetes

import (
	"testing"

	"kvrouter/internal/testkit/kubernetes"
	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }

// TestMockPod is no test: it is the worker of a Pod, which the kubelet starts.
func TestMockPod(t *testing.T) { kubernetes.Run(t) }
