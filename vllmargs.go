package main

import (
	"slices"
	"strconv"
	"strings"
)

// reservedVLLMArgs are vLLM's flags that the router sets itself, with the
// setting to use instead.
var reservedVLLMArgs = map[string]string{
	"model":              "--model before --",
	"served-model-name":  "--served-model-name before --",
	"host":               "nothing: workers listen on loopback",
	"port":               "--base-worker-port before --",
	"block-size":         "--block-size before --",
	"kv-events-config":   "--base-kv-events-port and --base-kv-replay-port before --",
	"uds":                "nothing: the router reaches workers by port",
	"data-parallel-size": "--num-workers before --: each rank as its own worker",
	"api-server-count":   "nothing: a worker has one API server",
}

// vllmShortFlags are the short spellings of those flags of vLLM that matter here.
var vllmShortFlags = map[string]string{"-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-asc": "api-server-count"}

// vllmFlag returns the name of the flag that a vLLM argument is, without
// dashes and value, in the long spelling with dashes; empty if it is none.
func vllmFlag(arg string) string {
	name, _, _ := strings.Cut(arg, "=")
	long, isLong := strings.CutPrefix(name, "--")
	if !isLong {
		return vllmShortFlags[name]
	}
	return strings.ReplaceAll(long, "_", "-")
}

// hasVLLMFlag tells whether the user gave vLLM one of the flags.
func (c *Config) hasVLLMFlag(names ...string) bool {
	return slices.ContainsFunc(c.VLLMArgs, func(arg string) bool {
		name := vllmFlag(arg)
		return name != "" && slices.Contains(names, name)
	})
}

// EngineLimits returns how many tokens a started worker computes in a pass at
// most, and the blocks of its KV cache; 0: unknown.
func (c *Config) EngineLimits() (maxBatchedTokens, totalBlocks int) {
	if c.Engine == EngineMocker {
		return c.MockMaxNumBatchedTokens, c.MockNumGPUBlocks
	}
	return c.vllmNumber("max-num-batched-tokens"), c.vllmNumber("num-gpu-blocks-override")
}

// vllmNumber returns the value that the user gave one of vLLM's flags; 0: none,
// or no number.
func (c *Config) vllmNumber(flag string) int {
	for i, arg := range c.VLLMArgs {
		if vllmFlag(arg) != flag {
			continue
		}
		_, value, inside := strings.Cut(arg, "=")
		if !inside && i+1 < len(c.VLLMArgs) {
			value = c.VLLMArgs[i+1]
		}
		n, _ := strconv.Atoi(value)
		return max(0, n)
	}
	return 0
}
