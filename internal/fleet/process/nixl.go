package process

import "fmt"

// CheckNIXL rejects a Python without NIXL for workers that transfer KV blocks: the engine
// would end after a minute of loading. setup is the command that installs it.
func (s Settings) CheckNIXL(setup string) error {
	flag := "--prefill-workers"
	switch {
	case s.Pulls:
		flag = "--kv-p2p"
	case s.PrefillWorkers == 0:
		return nil
	}
	lacks, err := Lacks(s.Python, "nixl", "nixl_rocm")
	if lacks {
		return fmt.Errorf("%s: %s lacks NIXL, which transfers KV caches between workers; run `%s`, or %s -m pip install nixl", flag, s.Python,
			setup, s.Python)
	}
	return err
}

// SetNIXLOnCPU configures NIXL and its UCX in a worker on a CPU: traffic stays on
// loopback, and NIXL's thread waits for a millisecond at most.
func (e Environment) SetNIXLOnCPU() {
	e.SetDefault("UCX_TLS", "tcp,self,sm")
	e.SetDefault("UCX_NET_DEVICES", "lo")
	e["KVROUTER_NIXL_POLL_US"] = "1000"
}
