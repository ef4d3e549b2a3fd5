package vllm

import (
	"strconv"

	"kvrouter/internal/fleet/process"
)

// nixl is the connector of started worker i that hands prompts over.
func nixl(cfg process.Settings, i int) connector {
	settings := connector{
		Connector: "NixlConnector", Role: "kv_consumer",
		// A prefill worker that dies with a prompt costs its decode worker time, not
		// the request.
		OnFailure: "recompute",
	}
	if i < cfg.PrefillWorkers {
		settings.Role = "kv_producer"
	}
	if len(cfg.GPUs) == 0 {
		settings.Device = "cpu"
	}
	return settings
}

// setNIXLEnvironment sets what NIXL reads from the environment. first is the
// number of the worker's first rank: vLLM itself adds a rank's number to the
// port. On a CPU everything stays on loopback; with GPUs the best way between
// them is UCX's to find.
func setNIXLEnvironment(cfg process.Settings, first int, env process.Environment) {
	env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
	env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = strconv.Itoa(cfg.Ports.NIXL + first)
	if len(cfg.GPUs) > 0 {
		return
	}
	env.SetNIXLOnCPU()
}
