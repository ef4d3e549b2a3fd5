package vllm

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

const ranksInside = "--data-parallel-size: all ranks of a worker run inside it"

// ReservedArgs are vLLM's flags that the router sets itself or could not
// follow, with what to use instead.
var ReservedArgs = map[string]string{
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

// CheckArgs refuses arguments for vLLM that the router sets itself or could not
// follow; its errors name the argument and what to use instead.
func CheckArgs(args []string) error {
	for _, arg := range args {
		if instead, reserved := ReservedArgs[Flag(arg)]; reserved {
			return fmt.Errorf("%s after --: it is not passed on; use %s", arg, instead)
		}
	}
	if value, given := Value(args, "data-parallel-size"); given && Number(args, "data-parallel-size") < 1 {
		return fmt.Errorf("--data-parallel-size %s after --: give a number of at least 1", value)
	}
	return nil
}

// shortFlags are the short spellings of those flags of vLLM that matter here.
var shortFlags = map[string]string{
	"-tp": "tensor-parallel-size", "-asc": "api-server-count",
	"-dp": "data-parallel-size", "-dpn": "data-parallel-rank", "-dpr": "data-parallel-start-rank", "-dpl": "data-parallel-size-local",
	"-dph": "data-parallel-hybrid-lb", "-dpe": "data-parallel-external-lb", "-dpm": "data-parallel-multi-port-external-lb",
}

// Flag returns the name of the flag that a vLLM argument is, without
// dashes, value and the member of a JSON value (--flag.member), in the long
// spelling with dashes; empty if it is none.
func Flag(arg string) string {
	name, _, _ := strings.Cut(arg, "=")
	name, _, _ = strings.Cut(name, ".")
	long, isLong := strings.CutPrefix(name, "--")
	if !isLong {
		return shortFlags[name]
	}
	return strings.ReplaceAll(long, "_", "-")
}

// hasFlag tells whether the user gave vLLM one of the flags.
func hasFlag(args []string, names ...string) bool {
	return slices.ContainsFunc(args, func(arg string) bool {
		name := Flag(arg)
		return name != "" && slices.Contains(names, name)
	})
}

// Number returns the value that the user gave one of vLLM's flags; 0: none,
// or no number above it.
func Number(args []string, flag string) int {
	value, _ := Value(args, flag)
	n, _ := strconv.Atoi(value)
	return max(0, n)
}

// Value returns the value of one of vLLM's flags, of several the last, which
// is the one that vLLM takes.
func Value(args []string, flag string) (value string, given bool) {
	for i, arg := range args {
		if Flag(arg) != flag {
			continue
		}
		var inside bool
		if _, value, inside = strings.Cut(arg, "="); !inside && i+1 < len(args) {
			value = args[i+1]
		}
		given = true
	}
	return value, given
}

// Key finds the key that started workers will ask for.
func Key(args []string) string {
	if key, given := Value(args, "api-key"); given {
		return key
	}
	return os.Getenv("VLLM_API_KEY")
}
