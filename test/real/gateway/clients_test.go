package gateway

import (
	"os"
	"testing"
	"time"

	"kvrouter/internal/testkit/envoy"
	"kvrouter/test"
)

// TestGatewayKeysFailuresStayWithThatKey is TestOneKeysFailuresStayWithThatKey behind a
// real Envoy, which sends the requests, so that none is sent again.
func TestGatewayKeysFailuresStayWithThatKey(t *testing.T) {
	if os.Getenv(envoy.Program) == "" {
		t.Skip("make test-gateway runs it")
	}
	all := os.Getenv("KVROUTER_CHAOS") != ""
	cases := test.PoisonCases(all)
	if !all {
		cases = []test.PoisonCase{cases[1], cases[3], cases[5], cases[7], cases[8]}
	}
	test.RunPoisons(t, test.PlainProgram, cases, 8*time.Second, func(t *testing.T, port int, picker string, workers []string) (url string) {
		e := envoy.StartDeployed(t, deployed, port, []string{picker}, workers)
		e.WaitForPicker(true)
		return e.URL
	})
}
