package gateway

import (
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/envoy"
	"kvrouter/test"
)

// TestGatewayChaos has a real Envoy with the configuration of deploy/gateway ask two
// routers, which are restarted in turn, with 1,000 requests in flight. A token takes
// 120 ms and more, so that two cores suffice for all that is in between.
func TestGatewayChaos(t *testing.T) {
	d := test.ChaosTime(t)
	test.RunChaos(t, d, test.ChaosSettings{
		Clients: 1000, Pace: "--speedup-ratio=1 --mock=max-num-batched-tokens=65536 --mock=prefill-ms=4,0.002,0 --mock=decode-ms=120,40,-20", Limit: 90 * time.Second, Phase: 110 * time.Second, Long: 150,
		Gateway: func(pickers, workers []string) (url string, pid int) {
			e := envoy.StartDeployed(t, deployed, testkit.FreePorts(t, 2), pickers, workers)
			e.WaitForPicker(true)
			return e.URL, e.PID
		},
	})
}
