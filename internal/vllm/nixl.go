package vllm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"time"
)

// nixlConfig returns the --kv-transfer-config of started worker i.
func nixlConfig(cfg Settings, i int) string {
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
func setNIXLEnvironment(cfg Settings, first int, env environment) {
	env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
	env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = strconv.Itoa(cfg.Ports.NIXL + first)
	if len(cfg.GPUs) > 0 {
		return
	}
	env.setDefault("UCX_TLS", "tcp,self,sm")
	env.setDefault("UCX_NET_DEVICES", "lo")
	env["KVROUTER_NIXL_POLL_US"] = "1000"
}

// nixlCheckLimit bounds the question whether a Python has NIXL.
const nixlCheckLimit = 30 * time.Second

// checkNIXL tells whether a Python has NIXL, without which vLLM would end after a
// minute of loading. It is only looked for: importing it takes seconds.
func checkNIXL(python string) error {
	ctx, cancel := context.WithTimeout(context.Background(), nixlCheckLimit)
	defer cancel()
	const look = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('nixl') or u.find_spec('nixl_rocm') else 3)"
	err := exec.CommandContext(ctx, python, "-c", look).Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 3 {
		return fmt.Errorf("--prefill-workers: %s has no NIXL, by which workers hand prompts over; run `make setup`, or %s -m pip install nixl", python, python)
	}
	if err != nil {
		return fmt.Errorf("--python %s cannot be asked for NIXL: %w", python, err)
	}
	return nil
}
