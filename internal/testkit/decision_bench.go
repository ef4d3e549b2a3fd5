package testkit

import (
	"syscall"
	"time"
)

// cpuTime is what this process has used so far: unlike the clock's time it does
// not depend on what else the machine does.
func CpuTime() time.Duration {
	var usage syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
