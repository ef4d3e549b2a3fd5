package telemetry

import "kvrouter/internal/workers"

// newBareTelemetry returns a telemetry of no workers and no prompts.
func newBareTelemetry() *Metrics {
	return New(func() []workers.Sample { return nil }, func() PromptSample { return PromptSample{} })
}
