package workers

import (
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/probe"
)

// askState asks the worker's engine for its state, where trainers may have changed that by calls that the router does
// not see, and while it is taken to rest, which may have ended so.
func (in *incarnation) askState() {
	state, _ := in.f.members.Engine(kv.WorkerKey{Worker: in.w.id})
	if !in.f.cfg.Trained && !state.Rests() || in.mute {
		return
	}
	asked := time.Now()
	report, err := in.f.probe.EngineState(in.ctx, in.w.spec, in.engine)
	switch {
	case err == nil:
		in.f.members.EngineReports(in.w.id, in.generation, asked, report)
	case probe.Rejected(err):
		in.mute = true
		in.f.log.Info(in.w.String()+": does not say whether it is paused: pauses that do not pass the router are not seen",
			"url", in.w.spec.URL, "remedy", "start vLLM with VLLM_SERVER_DEV_MODE=1")
	}
}
