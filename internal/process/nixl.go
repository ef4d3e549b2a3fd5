package process

import "fmt"

// CheckNIXL refuses a Python without NIXL where workers are to hand prompts over: the
// engine would end after a minute of loading. setup is the command that installs it.
func (s Settings) CheckNIXL(setup string) error {
	if s.PrefillWorkers == 0 {
		return nil
	}
	lacks, err := Lacks(s.Python, "nixl", "nixl_rocm")
	if lacks {
		return fmt.Errorf("--prefill-workers: %s has no NIXL, by which workers hand prompts over; run `%s`, or %s -m pip install nixl", s.Python, setup, s.Python)
	}
	return err
}

// SetNIXLOnCPU sets what NIXL and its UCX read in a worker on a CPU: all stays on
// loopback, and NIXL's thread waits a millisecond at most.
func (e Environment) SetNIXLOnCPU() {
	e.SetDefault("UCX_TLS", "tcp,self,sm")
	e.SetDefault("UCX_NET_DEVICES", "lo")
	e["KVROUTER_NIXL_POLL_US"] = "1000"
}
