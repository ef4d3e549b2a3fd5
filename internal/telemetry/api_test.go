package telemetry

// newBareTelemetry returns a telemetry of no workers and no prompts.
func newBareTelemetry() *Metrics {
	return New(func() []WorkerSample { return nil }, func() PromptSample { return PromptSample{} })
}
