package vllm

import (
	"encoding/json"
	"fmt"
	"strconv"

	"kvrouter/internal/process"
)

// nixlConfig returns the --kv-transfer-config of started worker i.
func nixlConfig(cfg process.Settings, i int) string {
	settings := struct {
		Connector string `json:"kv_connector"`
		Role      string `json:"kv_role"`
		Device    string `json:"kv_buffer_device,omitempty"`
		OnFailure string `json:"kv_load_failure_policy"`
	}{
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
	text, err := json.Marshal(settings)
	if err != nil {
		panic(err) // strings can always be written
	}
	return string(text)
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
	env.SetDefault("UCX_TLS", "tcp,self,sm")
	env.SetDefault("UCX_NET_DEVICES", "lo")
	env["KVROUTER_NIXL_POLL_US"] = "1000"
}

// checkNIXL refuses a Python without NIXL where workers are to hand prompts over:
// vLLM would end after a minute of loading.
func checkNIXL(cfg process.Settings) error {
	if cfg.PrefillWorkers == 0 {
		return nil
	}
	lacks, err := process.Lacks(cfg.Python, "nixl", "nixl_rocm")
	if lacks {
		return fmt.Errorf("--prefill-workers: %s has no NIXL, by which workers hand prompts over; run `make setup`, or %s -m pip install nixl", cfg.Python, cfg.Python)
	}
	return err
}
