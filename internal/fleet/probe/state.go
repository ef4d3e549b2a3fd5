package probe

import (
	"context"
	"net/http"

	"kvrouter/internal/base/kv"
)

// EngineState asks an engine what trainers have done to it. vLLM answers in development mode only; SGLang does not say
// whether its memory is released.
func (c *Client) EngineState(ctx context.Context, s Server, engine kv.Engine) (report kv.EngineReport, err error) {
	if engine == kv.EngineSGLang {
		return c.sglangState(ctx, s)
	}
	var paused struct {
		Is bool `json:"is_paused"`
	}
	if err := c.state(ctx, s, "/is_paused", &paused); err != nil {
		return report, err
	}
	report.Knows = kv.Paused | kv.Asleep
	if paused.Is {
		report.State = kv.Paused
		page, err := c.page(ctx, s, []string{sleepName})
		if err != nil {
			return report, err
		}
		if page.asleep() {
			report.State |= kv.Asleep
		}
	}
	report.Version, err = c.weights(ctx, s, "/weight_info")
	return report, err
}

// sleepName is vLLM's metric of a released memory.
const sleepName = "vllm:engine_sleep_state"

// asleep reports whether an engine's weights or KV cache are released.
func (p Page) asleep() bool {
	for _, m := range p[sleepName].GetMetric() {
		for _, label := range m.GetLabel() {
			if label.GetName() == "sleep_state" && label.GetValue() != "awake" && m.GetGauge().GetValue() == 1 {
				return true
			}
		}
	}
	return false
}

// sglangState is EngineState of an SGLang server.
func (c *Client) sglangState(ctx context.Context, s Server) (report kv.EngineReport, err error) {
	err = c.state(ctx, s, "/ready", nil)
	report.Knows = kv.Paused
	switch {
	case statusOf(err) == http.StatusServiceUnavailable:
		report.State = kv.Paused
	case err != nil:
		return report, err
	}
	report.Version, err = c.weights(ctx, s, "/model_info")
	return report, err
}

// weights returns the version of the weights; empty: the server does not report it there.
func (c *Client) weights(ctx context.Context, s Server, path string) (version string, err error) {
	var info struct {
		Version string `json:"weight_version"`
	}
	if err = c.state(ctx, s, path, &info); Rejected(err) {
		err = nil
	}
	return info.Version[:min(len(info.Version), kv.MaxVersion)], err
}

// state fetches one of these short answers.
func (c *Client) state(ctx context.Context, s Server, path string, into any) error {
	return c.getBy(ctx, c.pages, s, path, answerLimit, into)
}
