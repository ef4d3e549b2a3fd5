package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"time"
)

// defaultWorkers is how many workers are started where nothing is said.
const defaultWorkers = 2

// countWorkers sets NumWorkers from the flags that tell of it.
func (c *Config) countWorkers() error {
	apart := c.PrefillWorkers != 0 || c.DecodeWorkers != 0
	switch {
	case apart && c.WorkersGiven != nil:
		return fmt.Errorf("--num-workers %d beside --prefill-workers and --decode-workers: started workers either all serve whole requests or each have their part; leave one of the two out", *c.WorkersGiven)
	case apart && c.Engine == EngineNone:
		return errors.New("--prefill-workers and --decode-workers start workers, and --engine is none; leave them out")
	case apart && (c.PrefillWorkers < 1 || c.DecodeWorkers < 1):
		return fmt.Errorf("--prefill-workers %d with --decode-workers %d: give at least 1 of each", c.PrefillWorkers, c.DecodeWorkers)
	case apart:
		c.NumWorkers = c.PrefillWorkers + c.DecodeWorkers
	case c.WorkersGiven != nil:
		c.NumWorkers = *c.WorkersGiven
	default:
		c.NumWorkers = defaultWorkers
	}
	if c.Engine != EngineNone && (c.NumWorkers < 1 || c.NumWorkers > 1000) {
		return fmt.Errorf("%s: give 1 to 1000; for none use --engine none", c.workersAsked())
	}
	return nil
}

// workersAsked tells the flags that ask for NumWorkers workers, and their values.
func (c *Config) workersAsked() string {
	if c.PrefillWorkers > 0 {
		return fmt.Sprintf("--prefill-workers %d and --decode-workers %d", c.PrefillWorkers, c.DecodeWorkers)
	}
	return fmt.Sprintf("--num-workers %d", c.NumWorkers)
}

// nixl tells whether the workers that are started hand prompts over by NIXL.
func (c *Config) nixl() bool { return c.Engine == EngineVLLM && c.PrefillWorkers > 0 }

// startedPart returns the part of started worker i where prefill and decode are
// apart: prefill workers have the lowest numbers.
func (c *Config) startedPart(i int) Disagg {
	if c.PrefillWorkers == 0 {
		return Disagg{}
	}
	d := Disagg{Role: RoleDecode, Kind: KindNIXL}
	if i < c.PrefillWorkers {
		d.Role = RolePrefill
	}
	if c.Engine == EngineMocker && c.MockDisaggKind == KindSGLang.String() {
		d.Kind = KindSGLang
		if d.Role == RolePrefill { // its HTTP port is its bootstrap server's, too
			d.Bootstrap = Bootstrap{Host: "127.0.0.1", Port: uint16(c.BaseWorkerPort + i)}
		}
	}
	return d
}

// nixlConfig returns the --kv-transfer-config of started worker i.
func nixlConfig(cfg Config, i int) string {
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
	if cfg.startedPart(i).Role == RolePrefill {
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
func setNIXLEnvironment(cfg Config, first int, env *environment) {
	env.set("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
	env.set("VLLM_NIXL_SIDE_CHANNEL_PORT", strconv.Itoa(cfg.BaseNIXLPort+first))
	if len(cfg.GPUs) > 0 {
		return
	}
	env.setDefault("UCX_TLS", "tcp,self,sm")
	env.setDefault("UCX_NET_DEVICES", "lo")
	env.set("KVROUTER_NIXL_POLL_US", "1000")
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
