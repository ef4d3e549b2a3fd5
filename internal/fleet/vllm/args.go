package vllm

import (
	"errors"
	"fmt"
	"os"

	"kvrouter/internal/fleet/process"
)

const (
	ranksFlag   = "data-parallel-size"
	ranksInside = "--data-parallel-size: all ranks of a worker run inside it"
)

// reservedArgs are vLLM's flags that the router sets itself or could not
// follow, with what to use instead.
var reservedArgs = map[string]string{
	"model":             "--model before --",
	"served-model-name": "--served-model-name before --",
	"host":              "nothing: workers listen on loopback",
	"port":              "--base-worker-port before --",
	"block-size":        "--block-size before --",
	"kv-events-config":  "--base-kv-events-port and --base-kv-replay-port before --",
	"uds":               "nothing: the router reaches workers by port",
	"api-server-count":  "nothing: a worker has one API server",

	"data-parallel-rank":                   ranksInside,
	"data-parallel-start-rank":             ranksInside,
	"data-parallel-size-local":             ranksInside,
	"data-parallel-hybrid-lb":              ranksInside,
	"data-parallel-external-lb":            ranksInside,
	"data-parallel-multi-port-external-lb": ranksInside,
}

// checkArgs refuses arguments for vLLM that the router sets itself or could not
// follow; its errors name the argument and what to use instead.
func checkArgs(s process.Settings) error {
	args := s.Args
	for _, arg := range args {
		if instead, reserved := reservedArgs[flags.Name(arg)]; reserved {
			return fmt.Errorf("%s after --: not supported; use %s", arg, instead)
		}
	}
	if value, given := flags.Value(args, ranksFlag); given && flags.Number(args, ranksFlag) < 1 {
		return fmt.Errorf("--data-parallel-size %s after --: must be at least 1", value)
	}
	for _, flag := range []string{"kv-transfer-config", "kv-offloading-size", "kv-offloading-backend"} {
		if s.OffloadGiB > 0 && flags.Has(args, flag) {
			return fmt.Errorf("--%s after -- with --kv-offload-gib: both set the KV connector; use one of them", flag)
		}
	}
	if s.PrefillWorkers > 0 && flags.Has(args, "kv-transfer-config") {
		return errors.New("--kv-transfer-config after --: with --prefill-workers the router sets it for each worker; for other settings start " +
			"the workers yourself and attach them with --worker url=...,role=prefill and role=decode")
	}
	return nil
}

// flags read vLLM's arguments: the short spellings of those that matter here.
var flags = process.Flags{
	"-tp": "tensor-parallel-size", "-asc": "api-server-count",
	"-dp": "data-parallel-size", "-dpn": "data-parallel-rank", "-dpr": "data-parallel-start-rank", "-dpl": "data-parallel-size-local",
	"-dph": "data-parallel-hybrid-lb", "-dpe": "data-parallel-external-lb", "-dpm": "data-parallel-multi-port-external-lb",
}

// key returns the key that started workers will require.
func key(args []string) string {
	if key, given := flags.Value(args, "api-key"); given {
		return key
	}
	return os.Getenv("VLLM_API_KEY")
}
