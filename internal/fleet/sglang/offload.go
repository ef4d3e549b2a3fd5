package sglang

import (
	"fmt"
	"strconv"

	"kvrouter/internal/fleet/process"
)

// offloadSize is SGLang's host memory for KV blocks, whole GB of each process of tensor
// parallelism.
func offloadSize(cfg process.Settings) int {
	size, _ := tensorSize(cfg)
	processes, _ := strconv.Atoi(size)
	if sharesModel(cfg.Args) { // they belong to all ranks
		processes /= cfg.Ports.Ranks
	}
	const gb = 1e9
	return int(cfg.OffloadGiB * (1 << 30) / gb / float64(max(1, processes)))
}

// checkOffload rejects less memory than SGLang can divide.
func checkOffload(cfg process.Settings) error {
	if cfg.OffloadGiB > 0 && offloadSize(cfg) == 0 && !flags.Has(cfg.Args, sizeFlags...) {
		return fmt.Errorf("--kv-offload-gib %v: SGLang takes whole GB for each GPU; give at least 1 for each, or --hicache-ratio after --",
			cfg.OffloadGiB)
	}
	return nil
}

// sizeFlags are SGLang's flags for the size of the hierarchical cache.
var sizeFlags = []string{"hicache-size", "hicache-ratio", "hicache-host-memory-fraction"}

// offloadArgs are the arguments for a hierarchical cache that the user did not give.
// Each block is written to the host when it is computed, so that a block that leaves the
// GPU is still there.
func offloadArgs(cfg process.Settings) []string {
	if cfg.OffloadGiB <= 0 {
		return nil
	}
	var argv []string
	if !flags.Has(cfg.Args, offloadFlag) {
		argv = append(argv, "--"+offloadFlag)
	}
	if !flags.Has(cfg.Args, sizeFlags...) {
		argv = append(argv, "--hicache-size", strconv.Itoa(offloadSize(cfg)))
	}
	argv = append(argv, flags.Defaults(cfg.Args, "--hicache-write-policy", "write_through")...)
	if len(cfg.GPUs) == 0 { // what kvrouter_tiers can copy
		argv = append(argv, flags.Defaults(cfg.Args, "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first")...)
	}
	return argv
}

// offloadFlag enables SGLang's hierarchical cache.
const offloadFlag = "enable-hierarchical-cache"

// offloads reports whether a worker keeps blocks in memory of the machine, by
// --kv-offload-gib or by arguments after --.
func offloads(cfg process.Settings) bool {
	return cfg.OffloadGiB > 0 || flags.Has(cfg.Args, offloadFlag)
}
